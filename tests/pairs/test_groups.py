"""Captures by the ranks of a script that has its own process group, against one process with all batches.

This file is also the program of each rank: one launch captures every network, and writes what came of it. Networks are
in float64, so that another order of additions in a network does not change x in float32, by which pairs are counted.
"""

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from captures import assert_same_tensors
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import normscope
from normscope.errors import NormscopeError
from normscope.inputs.batch import Batch, Sample
from normscope.pairs.storage import pack

D = 8
OPTIONS = {"verify": True, "by_gamma": True, "keep_inputs": 2}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.up, self.down = nn.RMSNorm(D, eps=1e-6), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
        self.norm2, self.module = nn.LayerNorm(D), nn.LayerNorm(D)  # an attribute of the name that DDP's has

    def forward(self, x):
        x = x + self.down(F.gelu(self.up(self.norm1(x))))
        return x + self.module(self.norm2(x).sin())


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.module, self.blocks = nn.Linear(D, D), nn.ModuleList([Block(), Block()])
        self.register_buffer("offset", torch.ones(D))  # which DDP sends from rank to rank
        self.double()
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, x):
        x = self.module(x) + self.offset
        for block in self.blocks:
            x = block(x)
        return F.layer_norm(x, (D,))


def batch(index):
    """Three samples of a data set of six batches, each sample a source of its own."""
    x = torch.randn(3, 6, D, generator=torch.Generator().manual_seed(index)).double()
    return Batch((x,), samples=tuple(Sample(f"text {n}", n, n, "texts") for n in range(3 * index, 3 * index + 3)))


BATCHES = range(5)  # which two ranks do not have as many of


def of_rank(rank, size=2):
    return [batch(index) for index in BATCHES if index % size == rank]


# --- networks of ranks, by name -----------------------------------------------------------------------------------


def fsdp1(network):
    wrapped = functools.partial(FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=True)
    network.blocks[0].norm1 = wrapped(network.blocks[0].norm1)
    network.blocks[1] = wrapped(network.blocks[1])
    return wrapped(network)


def fsdp2(network):
    for part in (network.blocks[0].norm1, *network.blocks):
        fully_shard(part)
    return fully_shard(network)


def compiled(network):
    network.blocks[0] = torch.compile(network.blocks[0], backend="eager")
    return torch.compile(DistributedDataParallel(network), backend="eager")


def checkpointed(network):
    network.blocks[0] = checkpoint_wrapper(network.blocks[0])
    return network


DATA_PARALLEL = {
    "plain": lambda network: network,
    "DDP": DistributedDataParallel,
    "replicate": replicate,
    "FSDP1": fsdp1,
    "FSDP2": fsdp2,
    "compiled": compiled,
    "checkpointed": checkpointed,
}
SHARDED = ("FSDP1", "FSDP2")  # whose ranks run as many passes


def data_parallel(folder, rank):
    for name, wrap in DATA_PARALLEL.items():
        batches = of_rank(rank)[:2] if name in SHARDED else of_rank(rank)
        save(folder, f"{name} {rank}", normscope.capture(wrap(Network()), batches, **OPTIONS))
    save(folder, f"alone {rank}", normscope.capture(Network(), of_rank(rank), group=None, **OPTIONS))
    unnamed = [each.args[0] for each in of_rank(rank)]
    save(folder, f"unnamed {rank}", normscope.capture(Network(), unnamed))
    save(folder, f"unnamed alone {rank}", normscope.capture(Network(), unnamed, group=None))


def refused(folder, rank):
    """Write the errors of calls that ranks do not agree in."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    impatient = dist.new_group(timeout=timedelta(seconds=2))
    calls = {
        "mesh": lambda: normscope.capture(Network(), [batch(0)], group=mesh),
        "same": lambda: normscope.capture(Network(), [batch(0).args[0]]),
        "layers": lambda: normscope.capture(Network(), of_rank(rank), layers=[rank]),
        "missing": lambda: rank or normscope.capture(Network(), of_rank(rank), group=impatient),
    }
    errors = {}
    for name, call in calls.items():
        try:
            call()
        except NormscopeError as error:
            errors[name] = f"{type(error).__name__}: {error}"
    same = normscope.capture(Network(), [batch(0)], group=mesh["dp"])
    errors["n_samples"] = same.n_samples
    (folder / f"errors {rank}.json").write_text(json.dumps(errors))


def save(folder, name, seen):
    normscope.save_capture(seen, folder / f"{name}.safetensors")


PROGRAMS = {"two": (data_parallel, refused)}


# --- what came of it ----------------------------------------------------------------------------------------------


def launched(folder, program, size):
    """Run a program on several ranks; they end with status 0 or this fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    given["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, __file__, program, str(folder)]
    environments = [{**os.environ, **given, "RANK": str(rank)} for rank in range(size)]
    ranks = [subprocess.Popen(command, env=own, stderr=subprocess.PIPE, text=True) for own in environments]
    ends = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(ends)
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return launched(tmp_path_factory.mktemp("two"), "two", 2)


def assert_same(seen, known):
    """Counts and drawn samples to the bit; sums to the rounding of float64, in another order of additions."""
    assert [site.name for site in seen.sites] == [site.name for site in known.sites]
    assert_same_tensors(pack(seen)[1], pack(known)[1])
    assert (seen.n_samples, seen.about) == (known.n_samples, known.about)
    assert [kept.key for kept in seen.inputs] == [kept.key for kept in known.inputs]


@pytest.mark.slow
@pytest.mark.parametrize("name", DATA_PARALLEL)
def test_ranks_with_batches_of_their_own_see_what_one_process_sees(two, name):
    files = [(two / f"{name} {rank}.safetensors").read_bytes() for rank in range(2)]
    assert files[0] == files[1]
    seen = normscope.load_capture(two / f"{name} 0.safetensors")
    batches = [batch(index) for index in (BATCHES[:4] if name in SHARDED else BATCHES)]
    assert_same(seen, normscope.capture(Network(), batches, **OPTIONS))
    assert [site.name for site in seen.sites][:3] == ["blocks.0.norm1", "blocks.0.norm2", "blocks.0.module"]
    assert seen.sites[-1].name == "(model):layer_norm.0"


@pytest.mark.slow
@pytest.mark.parametrize(("whole", "alone"), [("plain", "alone"), ("unnamed", "unnamed alone")])
def test_merged_captures_of_ranks_are_the_capture_of_the_group(two, whole, alone):
    merged = normscope.merge_captures(*(two / f"{alone} {rank}.safetensors" for rank in range(2)))
    assert_same(normscope.load_capture(two / f"{whole} 0.safetensors"), merged)
    single = normscope.capture(Network(), [batch(index) for index in BATCHES])
    for name, stats in merged.stats.items():  # folds depend on the names of samples, and counts do not
        assert torch.equal(stats.moments[:, 0].sum(0), single.stats[name].moments[:, 0].sum(0))


@pytest.mark.slow
def test_ranks_that_do_not_agree_are_refused(two):
    errors = [json.loads((two / f"errors {rank}.json").read_text()) for rank in range(2)]
    for said in errors:
        assert said["mesh"].startswith("UsageError: group is a DeviceMesh of the axes dp, tp. Pass the axis along")
        assert said["same"].startswith("DataError: Two ranks have captured sample 0 of the same data, which would be")
        assert "sees another layers than" in said["layers"]
        assert said["n_samples"] == 3
    assert "every rank of the group must call it" in errors[0]["missing"] and "missing" not in errors[1]


def test_without_torch_distributed_there_is_no_group():
    alone = normscope.capture(Network(), [batch(0)])
    assert_same(normscope.capture(Network(), [batch(0)], group=None), alone)
    with pytest.raises(NormscopeError, match=r"torch\.distributed is not initialized"):
        normscope.capture(Network(), [batch(0)], group=dist.ProcessGroup)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for step in PROGRAMS[sys.argv[1]]:
        step(Path(sys.argv[2]), dist.get_rank())
    with contextlib.suppress(RuntimeError):  # of a rank that is gone
        dist.destroy_process_group()
    os._exit(0)
