"""Three ranks that capture together, against one process that captures everything.

This file is also the program of each of them: one launch does everything, and writes what came of it.
"""

import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from captures import assert_same_tensors
from networks import network_of
from torch import nn

import normscope
from normscope.errors import DataError, RankLostError
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.chunks import LeftOut
from normscope.inputs.previews import Preview
from normscope.pairs.capture import capture, captured
from normscope.pairs.ranks import ALONE, check_alike, merge_left_out, process_group
from normscope.pairs.recorder import CaptureOptions
from normscope.pairs.storage import pack
from normscope.runtime.processes import Process

SIZE = 3
MESSAGES = [None, {"ä": [1, 2.5, True, None]}, "lone \udcff and 🜚, " * 40]


def uneven():
    """A norm whose tokens do not divide among the samples, so that they are nobody's."""
    return network_of(lambda self, x: self.norm(x.reshape(-1, 16)[:-1]), norm=nn.LayerNorm(16))


def batch(indices, *, source=None, data="noise", tokens=5, spoilt=False, part=""):
    """Make samples of noise, each a source of its own unless one is named; the same for the same numbers."""
    x = torch.stack([torch.randn(tokens, 16, generator=torch.Generator().manual_seed(i)) for i in indices])
    x[:, 0, 3] *= 50  # the tails, and the largest tokens
    if spoilt:
        x[:, 1, 1] = torch.nan
    sources = indices if source is None else [source] * len(indices)
    samples = [Sample(f"photo {number}", number, i, data) for i, number in zip(indices, sources, strict=True)]
    return Batch((x,), samples=tuple(samples), part=part)


def network():
    """Two norms, of which the second is not called for every sample, and a third that only later ones call."""

    def forward(self, x, *, late=False, short=False):
        x = self.first(x)
        return (x if short else self.second(x)) + (self.late(x) if late else 0)

    return network_of(forward, **{name: nn.LayerNorm(16) for name in ("first", "second", "late")})


class Shown(list):
    """Batches that say what can be looked at of a sample."""

    def preview(self, batch, place):
        return Preview(words=(batch.samples[place].source, "ä"))


def network_batches():
    """Four parts; of one of them, the second norm sees a sample of one rank alone."""
    batches = [batch([i], part=f"timestep {i % 4}", tokens=40) for i in range(7)]
    for number, options in ((5, {"late": True}), (6, {"short": True})):
        batches[number] = dataclasses.replace(batches[number], kwargs=options)
    return Shown(batches)


# --- what each process does ---------------------------------------------------------------------------------------


def refused_to_pickle(*_arguments, **_options):
    raise AssertionError("nothing is pickled")


def run_rank(folder, rank):
    """Do everything that ranks do with one another, and write what this one knows in the end."""
    said = {}
    with process_group(Process(rank, SIZE, rank)) as ranks:
        for name in ("_pickler", "_unpickler", "_object_to_tensor", "_tensor_to_object"):
            assert hasattr(dist.distributed_c10d, name)
            setattr(dist.distributed_c10d, name, refused_to_pickle)
        said["told"] = ranks.gather(MESSAGES[rank])
        said["each"] = [list(data) for data in ranks.gather_bytes(bytes([rank] * rank))]
        left_out = merge_left_out(LeftOut({rank: f"{rank}.png: \udcff"} if rank else {}, rank), ranks)
        said["left out"] = [left_out.lines, left_out.cut]
        said["alike"] = []
        for settings in ({"seed": 1, "layers": ("a", "b")}, {"seed": 1, "layers": ["a", "b"[: 2 - rank]]}):
            try:
                said["alike"].append(check_alike(ranks, settings))
            except DataError as error:
                said["alike"].append(str(error))
        whole = captured(network(), network_batches(), CaptureOptions(by_part=True, keep_inputs=1), ranks=ranks)
        normscope.save_capture(whole, folder / f"whole {rank}.safetensors")
        said["skipped"] = [dataclasses.asdict(norm) for norm in whole.skipped]
        (folder / f"{rank}.json").write_text(json.dumps(said))
        if rank == SIZE - 1:
            os._exit(9)
        try:
            ranks.gather("is anybody there?")
        except RankLostError as error:
            (folder / f"lost {rank}.txt").write_text(str(error))
        os._exit(0)  # the others may already be gone, whom destroying the group would tell


# --- what came of it ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(SIZE), "OMP_NUM_THREADS": "1"}
    given["PYTHONPATH"] = os.pathsep.join(sys.path)
    environments = [{**os.environ, **given, "RANK": str(rank)} for rank in range(SIZE)]
    command = [sys.executable, __file__, str(folder)]
    processes = [
        subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for environment in environments
    ]
    ends = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 9], "\n".join(ends)
    return folder


@pytest.fixture(scope="module")
def said(folder):
    """Return what each rank knew in the end; and check that all knew the same."""
    answers = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(SIZE)]
    alike = [answers[rank].pop("alike") for rank in range(SIZE)]
    assert answers[0] == answers[1] == answers[2]
    return {**answers[0], "alike": alike}


def test_tokens_of_no_sample_are_drawn_anywhere_in_their_batch():
    """One of each of 64 batches, none of which draws as another does."""
    batches = [batch(range(i * 9, i * 9 + 9)) for i in range(64)]
    (stats,) = normscope.capture(uneven(), batches, sample=1).stats.values()
    assert (stats.n_tokens, len(stats.tokens.key.unique())) == (64, 64)
    assert len(stats.tokens.position.unique()) > 16  # of 44 places; one place alone, if keys began anew


@pytest.mark.slow
def test_messages_arrive_at_every_rank(said):
    assert said["told"] == MESSAGES
    assert said["each"] == [[], [1], [2, 2]]
    assert said["left out"] == [["1.png: \udcff", "2.png: \udcff"], 3]


@pytest.mark.slow
def test_ranks_with_different_options_all_refuse(said):
    for rank, (alike, other) in enumerate(said["alike"]):
        assert alike is None
        shown = r"['a', '']" if rank < 2 else "['a', 'b']"
        rank_named = 2 if rank < 2 else 0
        assert other.startswith(f"Rank {rank_named} sees another layers than rank {rank}: {shown}, not [")
        assert other.endswith("All hosts need the same files and the same options.")


@pytest.mark.slow
def test_a_capture_by_all_is_the_capture_of_one(folder, said):
    whole = capture(network(), network_batches(), by_part=True, keep_inputs=1)
    assert len({(folder / f"whole {rank}.safetensors").read_bytes() for rank in range(SIZE)}) == 1
    seen = normscope.load_capture(folder / "whole 0.safetensors")
    assert_same_tensors(pack(seen)[1], pack(whole)[1])
    assert "second" in seen.parts["timestep 2"].stats and seen.parts["timestep 2"].stats["second"].n_tokens == 40
    assert (seen.about, seen.n_samples, list(seen.parts)) == (whole.about, 7, list(whole.parts))
    assert [one.preview.words for one in seen.inputs] == [(f"photo {i}", "ä") for i in range(4)]  # one of each part
    assert [one.key for one in seen.inputs] == [one.key for one in whole.inputs]
    assert said["skipped"] == [dataclasses.asdict(norm) for norm in whole.skipped]
    assert "only by later ones" in said["skipped"][0]["reason"]


@pytest.mark.slow
def test_a_lost_rank_is_an_error_of_the_others(folder, said):
    for rank in range(SIZE - 1):
        told = (folder / f"lost {rank}.txt").read_text()
        assert told.startswith("Another rank ended, or did not make the same call ") and "--resume" in told


def test_a_single_rank_needs_no_process_group():
    assert ALONE.gather("x") == ["x"] and list(ALONE.gather_bytes(b"\0\1")) == [b"\0\1"]
    with process_group(Process()) as ranks:
        assert ranks == ALONE and not dist.is_initialized()


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), int(os.environ["RANK"]))
