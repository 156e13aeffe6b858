"""Captures that were stopped, killed and gone on with, in one process: against one that nothing happened to."""

import contextlib
import dataclasses
import itertools
import logging
import math
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from runs import differences
from safetensors.torch import load_file, save
from torch import nn

from normscope.errors import DataError, StoppedError, UsageError
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.chunks import Chunk, LeftOut
from normscope.pairs import ranks as checkpoints_module
from normscope.pairs.capture import capture, captured
from normscope.pairs.ranks import ALONE, Checkpoints, Ranks
from normscope.pairs.recorder import Summing
from normscope.runtime.checked_files import read_checked, write_checked

NEVER = math.inf
UNREADABLE, LATE = {3, 8}, 9
ABOUT = {"model": "toy", "weights": "trained"}


class Network(nn.Module):
    """Two norms, and one that a single sample calls, which is not the first."""

    def __init__(self):
        super().__init__()
        self.norm, self.other, self.late = nn.LayerNorm(8), nn.LayerNorm(8, elementwise_affine=False), nn.LayerNorm(8)

    def forward(self, x, *, late=False):
        x = x.to(self.norm.weight.dtype)
        return self.other(self.norm(x) ** 3) + (self.late(x) if late else 0)


class Inputs:
    """Noise, some of which cannot be read; every other one belongs to another part."""

    def __init__(self, number=11, batch_size=2, name="noise"):
        self.n_samples, self.batch_size, self.name = number, batch_size, name
        self.left_out = LeftOut()

    @property
    def description(self):
        out = f", {len(self.left_out.unreadable)} unreadable" if self.left_out.unreadable else ""
        return f"{self.n_samples} of {self.name}{out}" + (f", {self.left_out.cut} cut" if self.left_out.cut else "")

    def chunks(self, sampler):
        for numbers in sampler.groups(range(self.n_samples), self.batch_size):
            read = [number for number in numbers if number not in UNREADABLE]
            unreadable = {number: f"{number}.png: broken" for number in UNREADABLE.intersection(numbers)}
            yield Chunk(numbers, [self.batch(number) for number in read], unreadable, cut=int(7 in numbers))

    def first_sample(self):
        return dataclasses.replace(self.batch(0), part="")

    def batch(self, number):
        x = torch.randn(1, 40, 8, generator=torch.Generator().manual_seed(number))
        sample = Sample(f"photo {number}", number, number, self.name)
        return Batch((x,), {"late": number == LATE}, (sample,), part=f"timestep {number % 2}")


class Killed(BaseException):
    """In place of a signal that cannot be caught."""


def checkpoint(folder, rank):
    return read_checked(folder / f"{rank}.safetensors", checkpoints_module.FORMAT, 6)


def inputs_of(folder):
    """Flags of the inputs that each rank has kept, by rank."""
    return {int(path.stem): load_file(path)["done"].numpy().tobytes() for path in folder.glob("?.safetensors")}


@dataclasses.dataclass(frozen=True)
class Pretended(Ranks):
    """One of several ranks, which run one after the other as if they had begun together.

    It is killed where it would wait for the others behind its last chunk, unless those are ``done``.
    """

    begun: dict = dataclasses.field(default_factory=dict)
    done: Path | None = None

    def told(self, message):
        if not (isinstance(message, dict) and "first" in message):  # of a capture's progress
            return [message]
        if self.done is None:
            raise Killed
        return [message, *(checkpoint(self.done, rank)[0] for rank in range(1, self.size))]

    def each(self, data):
        yield data
        if len(data) < 100:  # before the first chunk
            yield from (flags for rank, flags in self.begun.items() if rank != self.rank)
        else:
            yield from (save(checkpoint(self.done, rank)[1]) for rank in range(1, self.size))


def ending(after, killed=False):
    """Say to stop after so many chunks, or be killed then."""
    left = itertools.count(after - 1, -1)

    def stopping():
        ends = next(left) <= 0
        if ends and killed:
            raise Killed
        return ends

    return stopping


def run(folder, *, inputs=None, ranks=ALONE, every=NEVER, resume=True, stopping=lambda: False, **options):
    kept = Checkpoints(folder, every, resume, stopping)
    model = Network().to(options.pop("dtype", torch.float32))
    about = options.pop("about", ABOUT)
    summing = Summing(**{"by_part": True, **{name: own for name, own in options.items() if name != "layers"}})
    layers = options.get("layers", "all")
    seen = captured(model, inputs or Inputs(), summing, layers=layers, about=about, ranks=ranks, checkpoints=kept)
    kept.remove()
    return seen


def stopped(folder, after, **options):
    with pytest.raises(StoppedError) as error:
        run(folder, stopping=ending(after), **options)
    return str(error.value)


@pytest.fixture(scope="module")
def whole():
    """Return what nothing happened to, in chunks of one and of two: with the same left out."""
    return {size: capture(Network(), Inputs(batch_size=size), about=ABOUT, by_part=True) for size in (1, 2)}


def assert_as_if_nothing_happened(seen, whole):
    assert differences(seen, whole) == []
    assert seen.skipped == whole.skipped and "only by later ones" in seen.skipped[0].reason
    assert seen.about["data"] == "11 of noise, 2 unreadable, 1 cut"
    assert (seen.n_samples, list(seen.parts)) == (9, ["timestep 0", "timestep 1"])


@pytest.mark.parametrize("after", range(1, 7))
def test_stopped_after_any_chunk(tmp_path, whole, after):
    inputs = min(2 * after, 11)
    told = stopped(tmp_path / "kept", after)
    assert told == (
        f"Stopped. What was captured so far, {inputs} inputs, is kept in {tmp_path / 'kept'}; the same command with "
        "--resume goes on."
    )
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["0.safetensors"]
    assert_as_if_nothing_happened(run(tmp_path / "kept"), whole[2])
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    "options", [{"by_gamma": True, "per_channel": True, "diagonal": True}, {"sample": 3, "layers": "1,"}]
)
def test_whatever_is_summed(tmp_path, options):
    stopped(tmp_path, 3, **options)
    alone = capture(Network(), Inputs(), about=ABOUT, by_part=True, **options)
    assert differences(run(tmp_path, **options), alone) == []


class Optional(nn.Module):
    """Two norms, the second of which some samples do not call."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)

    def forward(self, x, *, short=False):
        return self.first(x) if short else self.second(self.first(x))


def test_a_norm_that_a_part_calls_only_behind_a_checkpoint(tmp_path):
    batches = [dataclasses.replace(Inputs().batch(i), kwargs={"short": i == 1}) for i in range(6)]
    whole = captured(Optional(), batches, Summing(by_part=True))
    for _ in range(3):
        with pytest.raises(StoppedError):
            kept = Checkpoints(tmp_path, NEVER, resume=True, stopping=ending(2))
            captured(Optional(), batches, Summing(by_part=True), checkpoints=kept)
    seen = captured(Optional(), batches, Summing(by_part=True), checkpoints=Checkpoints(tmp_path, NEVER, resume=True))
    assert seen.stats["second"].n_tokens == 5 * 40 and differences(seen, whole) == []


# --- several ranks ------------------------------------------------------------------------------------------------

# Of each rank: chunks until it ends, how, and how often it keeps what it has.
RANK = st.tuples(st.integers(1, 5), st.booleans(), st.sampled_from([0, NEVER]))
LOST = st.sets(st.integers(0, 2))


def run_of_ranks(folder, ends):
    """Run the ranks of one start, each to its own end."""
    begun = inputs_of(folder)
    for rank, (after, killed, every) in enumerate(ends):
        ranks = Pretended(rank, len(ends), begun=begun)
        with pytest.raises((Killed, StoppedError)):
            run(folder, inputs=Inputs(batch_size=1), ranks=ranks, every=every, stopping=ending(after, killed))


def finished(folder, size):
    """Run all ranks to the end, the first one last, which receives what the others have."""
    begun = inputs_of(folder)
    for rank in reversed(range(size)):
        ranks = Pretended(rank, size, begun=begun, done=None if rank else folder)
        with contextlib.nullcontext() if rank == 0 else pytest.raises(Killed):
            seen = run(folder, inputs=Inputs(batch_size=1), ranks=ranks)
    return seen


@settings(max_examples=10, deadline=None, phases=[Phase.generate])
@given(st.integers(2, 3).flatmap(lambda n: st.lists(st.tuples(st.lists(RANK, min_size=n, max_size=n), LOST))))
def test_every_input_counts_once_whatever_happens(whole, runs):
    size = len(runs[0][0]) if runs else 2
    with tempfile.TemporaryDirectory() as name:
        kept = Path(name) / "kept"
        for ends, lost in runs:
            run_of_ranks(kept, ends)
            for number in lost:
                (kept / f"{number}.safetensors").unlink(missing_ok=True)
        assert_as_if_nothing_happened(finished(kept, size), whole[1])
        assert not kept.exists()


def test_each_rank_keeps_its_own_inputs(tmp_path, whole):
    run_of_ranks(tmp_path, [(1, False, NEVER), (2, False, NEVER), (9, False, 0)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.safetensors", "1.safetensors", "2.safetensors"]
    done = {path.stem: load_file(path)["done"].nonzero().flatten().tolist() for path in tmp_path.iterdir()}
    assert done == {"0": [0], "1": [1, 4], "2": [2, 5, 8]}  # the last one's whole share, kept before it waits
    assert_as_if_nothing_happened(finished(tmp_path, 3), whole[1])


def test_another_number_of_ranks_is_refused(tmp_path):
    run_of_ranks(tmp_path, [(2, False, NEVER), (2, False, NEVER)])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for ranks in (ALONE, Pretended(0, 3), Pretended(1, 3)):
        with pytest.raises(UsageError, match=rf"its number of ranks is 2, not {ranks.size}\. Go on with the options"):
            run(tmp_path, inputs=Inputs(batch_size=1), ranks=ranks)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "0.safetensors").unlink()
    with pytest.raises(UsageError, match="its number of ranks is at least 2, not 1"):
        run(tmp_path, inputs=Inputs(batch_size=1), ranks=ALONE)
    assert (tmp_path / "1.safetensors").exists()


# --- what is refused ----------------------------------------------------------------------------------------------

OTHERS = {
    "model": {"about": {**ABOUT, "model": "toys"}},
    "weights": {"about": {**ABOUT, "weights": "random"}},
    "data": {"inputs": Inputs(name="rain")},
    "first sample": {"inputs": Inputs()},
    "number of samples": {"inputs": Inputs()},
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
OTHERS["first sample"]["inputs"].first_sample = lambda: Inputs().batch(1)
OTHERS["number of samples"]["inputs"].__class__ = type("Uncounted", (Inputs,), {"description": "11 of noise"})
OTHERS["number of samples"]["inputs"].n_samples = 12


@pytest.mark.parametrize("name", OTHERS)
def test_another_capture(tmp_path, name):
    stopped(tmp_path, 1)
    before = (tmp_path / "0.safetensors").read_bytes()
    header, _ = read_checked(tmp_path / "0.safetensors", checkpoints_module.FORMAT, 6)
    assert header["settings"].keys() == OTHERS.keys() | {"number of ranks"}  # all others are tried
    with pytest.raises(UsageError, match=rf"is of another capture: its {name} is .*, not .*remove .* to begin anew"):
        run(tmp_path, **OTHERS[name])
    assert (tmp_path / "0.safetensors").read_bytes() == before


def test_damaged_or_of_another_version(tmp_path, whole):
    stopped(tmp_path, 2)
    path = tmp_path / "0.safetensors"
    content = path.read_bytes()
    for changed in (content[: len(content) // 2], b"", content.replace(b"timestep 0", b"timestep 4")):
        path.write_bytes(changed)
        with pytest.raises(DataError, match=r"checkpoint .*0\.safetensors.*remove it to capture its inputs again\."):
            run(tmp_path)
    write_checked(path, {"format": checkpoints_module.FORMAT, "version": 99}, {})
    with pytest.raises(DataError, match="checkpoint format version 99; this normscope reads version 6; remove it"):
        run(tmp_path)
    path.unlink()
    assert_as_if_nothing_happened(run(tmp_path), whole[2])


# --- where it cannot be written -----------------------------------------------------------------------------------


def full(*_arguments):
    raise UsageError("Cannot write there: No space left on device.")


def denied(path, missing_ok=False):
    raise PermissionError(13, "Permission denied")


def test_a_run_goes_on_where_its_checkpoint_cannot_be_written(tmp_path, whole, monkeypatch, caplog):
    stopped(tmp_path, 2)
    before = (tmp_path / "0.safetensors").read_bytes()
    kept = Checkpoints(tmp_path, 0, resume=True)
    monkeypatch.setattr(checkpoints_module, "write_checked", full)
    with caplog.at_level(logging.WARNING):
        seen = captured(Network(), Inputs(), Summing(by_part=True), about=ABOUT, checkpoints=kept)
    full_disk = "Cannot write there: No space left on device. The run goes on; what was kept before stays as it was."
    assert [record.getMessage() for record in caplog.records] == [full_disk] * 4
    assert (tmp_path / "0.safetensors").read_bytes() == before
    assert_as_if_nothing_happened(seen, whole[2])
    with pytest.raises(UsageError, match=r"^Cannot write there: No space left on device\.$"):  # and it is not stopped
        run(tmp_path, stopping=ending(2))


# --- the folder ---------------------------------------------------------------------------------------------------


def test_nothing_is_begun_anew_beside_what_another_run_left(tmp_path):
    folder = tmp_path / "kept"
    Checkpoints(folder, NEVER).check()
    stopped(folder, 1)
    with pytest.raises(UsageError, match=r"kept holds what an unfinished run has captured\. --resume goes on from it"):
        Checkpoints(folder, NEVER).check()
    Checkpoints(folder, NEVER, resume=True).check()
    file = tmp_path / "notes"
    file.write_text("somebody's notes")
    with pytest.raises(UsageError, match=r"^Cannot write .*notes.0\.safetensors: Not a directory\.$"):
        Checkpoints(file, NEVER, resume=True).check()
    assert file.read_text() == "somebody's notes"


def test_files_of_others_are_neither_read_nor_removed(tmp_path, whole):
    mine = ["notes.txt", "backup.safetensors", "0.safetensors.partial"]
    for name in mine:
        (tmp_path / name).write_text("mine")
    assert not Checkpoints(tmp_path, NEVER).exist
    stopped(tmp_path, 1)
    assert_as_if_nothing_happened(run(tmp_path), whole[2])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(mine)
    assert not Checkpoints(tmp_path / "notes.txt", NEVER).exist  # no folder at all


def test_what_was_half_written_when_a_run_was_killed_is_removed(tmp_path, whole, monkeypatch):
    def killed(tensors, path, metadata):
        path.write_bytes(b"half")
        raise Killed

    folder = tmp_path / "kept"
    stopped(folder, 1)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("normscope.runtime.checked_files.write_tensors", killed)
        patch.setattr("pathlib.Path.unlink", lambda path, missing_ok=False: None)
        run(folder, every=0)
    (folder / ".tmpdOCHPl").write_bytes(b"half")  # which safetensors renames once it is whole
    assert len(list(folder.iterdir())) == 3
    stopped(folder, 1)
    assert [path.name for path in folder.iterdir()] == ["0.safetensors"]
    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.unlink", denied)
        assert_as_if_nothing_happened(run(folder), whole[2])  # although its checkpoint cannot be removed


def test_how_often_it_is_written(tmp_path, monkeypatch):
    """The clock is ours: chunks take 10 s each."""
    clock, writes = itertools.count(0, 10), []
    monkeypatch.setattr(checkpoints_module.time, "monotonic", lambda: float(now[0]))
    monkeypatch.setattr(checkpoints_module, "write_checked", lambda *given: writes.append(now[0]))
    now = [next(clock)]

    class Slow(Inputs):
        def batch(self, number):
            now[0] = next(clock)
            return super().batch(number)

    run(tmp_path, inputs=Slow(batch_size=1), every=25, resume=False)
    assert writes == [40, 70, 100]  # the first sample takes the first 10 s, before there is anything to keep
