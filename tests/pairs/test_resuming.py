"""Captures that were stopped or killed, and resumed: against one that nothing happened to."""

import dataclasses
import itertools
import logging
import math
import shutil

import pytest
import torch
from networks import network_of
from runs import differences
from torch import nn

from normscope.errors import DataError, StoppedError, UsageError
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.chunks import Chunk, LeftOut
from normscope.pairs.capture import capture, captured
from normscope.pairs.checkpoints import FORMAT, Checkpoints
from normscope.pairs.recorder import CaptureOptions
from normscope.runtime.checked_files import read_checked, write_checked

NEVER = math.inf
UNREADABLE, LATE = {3, 8}, 9
ABOUT = {"model": "toy", "weights": "trained"}


def network():
    """Two norms, and one that a single sample calls, which is not the first."""

    def forward(self, x, *, late=False):
        x = x.to(self.norm.weight.dtype)
        return self.other(self.norm(x) ** 3) + (self.late(x) if late else 0)

    unweighted = nn.LayerNorm(8, elementwise_affine=False)
    return network_of(forward, norm=nn.LayerNorm(8), other=unweighted, late=nn.LayerNorm(8))


class Inputs:
    """Noise, some of which cannot be read; every other sample belongs to another part."""

    def __init__(self, name="noise", number=11, first=0):
        self.name, self.n_samples, self.first = name, number, first
        self.left_out = LeftOut()

    @property
    def description(self):
        out = f", {len(self.left_out.unreadable)} unreadable" if self.left_out.unreadable else ""
        return f"noise of {self.name}{out}" + (f", {self.left_out.cut} cut" if self.left_out.cut else "")

    def chunks(self, sampler):
        for numbers in sampler.groups(range(self.n_samples), 2):
            read = [number for number in numbers if number not in UNREADABLE]
            unreadable = {number: f"{number}.png: broken" for number in UNREADABLE.intersection(numbers)}
            yield Chunk(numbers, [self.batch(number) for number in read], unreadable, cut=int(7 in numbers))

    def first_sample(self):
        return dataclasses.replace(self.batch(self.first), part="")

    def batch(self, number):
        x = torch.randn(1, 40, 8, generator=torch.Generator().manual_seed(number))
        sample = Sample(f"photo {number}", number, number, self.name)
        return Batch((x,), {"late": number == LATE}, (sample,), part=f"timestep {number % 2}")


class Killed(BaseException):
    """In place of a signal that cannot be caught."""


def stop(after, killed=False):
    """Return a function that asks to stop after some chunks, or raises Killed then."""
    left = itertools.count(after - 1, -1)

    def stopping():
        ends = next(left) <= 0
        if ends and killed:
            raise Killed
        return ends

    return stopping


def run(folder, *, inputs=None, every=NEVER, resume=True, stopping=lambda: False, **options):
    checkpoints = Checkpoints(folder, every, resume, stopping)
    model = network().to(options.pop("dtype", torch.float32))
    about, layers = options.pop("about", ABOUT), options.pop("layers", "all")
    summing = CaptureOptions(**{"by_part": True, **options})
    seen = captured(model, inputs or Inputs(), summing, layers=layers, about=about, checkpoints=checkpoints)
    checkpoints.remove()
    return seen


def stopped(folder, after, **options):
    with pytest.raises(StoppedError) as error:
        run(folder, stopping=stop(after), **options)
    return str(error.value)


@pytest.fixture(scope="module")
def whole():
    return capture(network(), Inputs(), about=ABOUT, by_part=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopped")
    stopped(folder, 2)
    return folder


def assert_as_if_nothing_happened(seen, whole):
    assert differences(seen, whole) == []
    assert seen.skipped == whole.skipped and "only by later ones" in seen.skipped[0].reason
    assert seen.about["data"] == "noise of noise, 2 unreadable, 1 cut"
    assert (seen.n_samples, list(seen.parts)) == (9, ["timestep 0", "timestep 1"])


@pytest.mark.parametrize("after", [1, 3, 6])
def test_a_capture_stopped_after_any_chunk_resumes(tmp_path, whole, after):
    folder, inputs = tmp_path / "kept", min(2 * after, 11)
    assert stopped(folder, after) == (
        f"Stopped. What was captured so far, {inputs} inputs, is kept in {folder}; the same command with --resume goes "
        "on."
    )
    assert [path.name for path in folder.iterdir()] == ["0.safetensors"]
    assert_as_if_nothing_happened(run(folder), whole)
    assert not folder.exists()


@pytest.mark.parametrize("ends", [[(1, 0), (4, 0)], [(2, NEVER), (3, 0), (2, NEVER)]])
def test_a_killed_capture_resumes(tmp_path, whole, ends):
    for after, every in ends:
        with pytest.raises(Killed):
            run(tmp_path / "kept", every=every, stopping=stop(after, killed=True))
    assert_as_if_nothing_happened(run(tmp_path / "kept"), whole)


@pytest.mark.parametrize(
    "options", [{"by_gamma": True, "per_channel": True, "diagonal": True}, {"sample": 3, "layers": "1,"}]
)
def test_all_options_of_a_capture_resume(tmp_path, options):
    stopped(tmp_path, 3, **options)
    alone = capture(network(), Inputs(), about=ABOUT, by_part=True, **options)
    assert differences(run(tmp_path, **options), alone) == []


def test_a_norm_that_a_part_calls_only_behind_a_checkpoint(tmp_path):
    def forward(self, x, *, short):
        return self.first(x) if short else self.second(self.first(x))

    model = network_of(forward, first=nn.LayerNorm(8), second=nn.LayerNorm(8))
    batches = [dataclasses.replace(Inputs().batch(i), kwargs={"short": i == 1}) for i in range(6)]
    for _ in range(3):
        with pytest.raises(StoppedError):
            checkpoints = Checkpoints(tmp_path, NEVER, resume=True, stopping=stop(2))
            captured(model, batches, CaptureOptions(by_part=True), checkpoints=checkpoints)
    resumed = Checkpoints(tmp_path, NEVER, resume=True)
    seen = captured(model, batches, CaptureOptions(by_part=True), checkpoints=resumed)
    assert seen.stats["second"].n_tokens == 5 * 40
    assert differences(seen, capture(model, batches, by_part=True)) == []


OTHERS = {
    "model": {"about": {**ABOUT, "model": "toys"}},
    "weights": {"about": {**ABOUT, "weights": "random"}},
    "data": {"inputs": Inputs("rain")},
    "first sample": {"inputs": Inputs(first=1)},
    "number of samples": {"inputs": Inputs(number=12)},
    "dtype": {"dtype": torch.float64},
    "seed": {"seed": 3},
    "sample": {"sample": 7},
    "by_gamma": {"by_gamma": True},
    "per_channel": {"per_channel": True},
    "diagonal": {"diagonal": True},
    "by_part": {"by_part": False},
    "keep_inputs": {"keep_inputs": 1},
    "skip": {"skip": 1},
    "layers": {"layers": "1,"},
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_of_another_capture_is_refused(checkpoint, name):
    before = (checkpoint / "0.safetensors").read_bytes()
    header, _ = read_checked(checkpoint / "0.safetensors", FORMAT, 6)
    assert header["settings"].keys() == OTHERS.keys() | {"number of ranks"}
    with pytest.raises(UsageError, match=rf"is of another capture: its {name} is .*, not .*remove .* to begin anew"):
        run(checkpoint, **OTHERS[name])
    assert (checkpoint / "0.safetensors").read_bytes() == before


def test_a_checkpoint_of_more_ranks_is_refused(checkpoint, tmp_path):
    shutil.copy(checkpoint / "0.safetensors", tmp_path / "1.safetensors")
    with pytest.raises(UsageError, match="its number of ranks is at least 2, not 1"):
        run(tmp_path)


def test_a_damaged_checkpoint_and_another_version_are_refused(checkpoint, tmp_path):
    content, path = (checkpoint / "0.safetensors").read_bytes(), tmp_path / "0.safetensors"
    for changed in (content[: len(content) // 2], b"", content.replace(b"timestep 0", b"timestep 4")):
        path.write_bytes(changed)
        with pytest.raises(DataError, match=r"checkpoint .*0\.safetensors.*remove it to capture its inputs again\."):
            run(tmp_path)
    write_checked(path, {"format": FORMAT, "version": 99}, {})
    with pytest.raises(DataError, match="checkpoint format version 99; this normscope reads version 6; remove it"):
        run(tmp_path)


def test_a_capture_continues_where_its_checkpoint_cannot_be_written(tmp_path, whole, caplog):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "kept"
    with caplog.at_level(logging.WARNING):
        seen = run(folder, every=0)
    assert len(caplog.records) == 6
    assert caplog.records[0].getMessage().endswith("The run goes on; what was kept before stays as it was.")
    assert_as_if_nothing_happened(seen, whole)
    with pytest.raises(UsageError, match=r"^Cannot write "):  # and it is not stopped
        run(folder, stopping=stop(2))


def test_an_unfinished_capture_is_not_begun_anew(checkpoint, tmp_path):
    Checkpoints(tmp_path / "kept", NEVER).check()
    with pytest.raises(UsageError, match=r"holds what an unfinished run has captured\. --resume goes on from it"):
        Checkpoints(checkpoint, NEVER).check()
    Checkpoints(checkpoint, NEVER, resume=True).check()
    file = tmp_path / "notes"
    file.write_text("somebody's notes")
    with pytest.raises(UsageError, match=r"^Cannot write .*notes.0\.safetensors: Not a directory\.$"):
        Checkpoints(file, NEVER, resume=True).check()
    assert file.read_text() == "somebody's notes" and not Checkpoints(file, NEVER).exist


def test_partial_files_are_removed_and_files_of_others_stay(checkpoint, tmp_path, whole):
    others = ["0.safetensors.partial", "backup.safetensors", "notes.txt"]
    for name in (*others, ".tmpdOCHPl", ".0.safetensors"):
        (tmp_path / name).write_text("half")
    assert not Checkpoints(tmp_path, NEVER).exist
    shutil.copy(checkpoint / "0.safetensors", tmp_path)
    assert_as_if_nothing_happened(run(tmp_path), whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == others
