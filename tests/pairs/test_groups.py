"""Captures by the ranks of a script that has its own process group, against one process with all batches.

This file is also the program of the ranks: one launch, which forks them, captures every network and writes what came
of it. Networks are in float64, so that another order of additions in a network does not change x in float32, by which
pairs are counted.
"""

import contextlib
import functools
import json
import multiprocessing
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from captures import assert_same_tensors
from networks import network_of
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
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


DATA_PARALLEL = {
    "plain": lambda network: network,
    "DDP": DistributedDataParallel,
    "replicate": replicate,
    "FSDP1": fsdp1,
    "FSDP2": fsdp2,
    "compiled": compiled,
}
SHARDED = ("FSDP1", "FSDP2")  # whose ranks run as many passes


def data_parallel(folder, rank):
    for name, wrap in DATA_PARALLEL.items():
        batches = of_rank(rank)[:2] if name in SHARDED else of_rank(rank)
        save(folder, f"{name} {rank}", normscope.capture(wrap(Network()), batches, **OPTIONS))
    of_first = [] if rank else [batch(index) for index in BATCHES]
    save(folder, f"empty {rank}", normscope.capture(Network(), iter(of_first), **OPTIONS))
    probe = normscope.Probe(Network(), of_first, samples=6)
    probe.run()
    save(folder, f"probed {rank}", probe.capture)


COLUMNS = {f"blocks.{n}.up": lambda **layouts: ColwiseParallel(**layouts) for n in range(2)}
ROWS = {f"blocks.{n}.down": lambda **layouts: RowwiseParallel(**layouts) for n in range(2)}


def tensor_parallel(network, mesh):
    return parallelize_module(network, mesh, {path: make() for path, make in {**COLUMNS, **ROWS}.items()})


def sequence_parallel(network, mesh):
    """Norms see a shard of the sequence, as a DTensor; the outputs of some are plain tensors of that shard."""
    plan = {
        "blocks.0": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
        **{path: make(input_layouts=Shard(1)) for path, make in COLUMNS.items()},
        **{path: make(output_layouts=Shard(1), use_local_output=False) for path, make in ROWS.items()},
    }
    for n in range(2):
        plan |= {f"blocks.{n}.{norm}": SequenceParallel() for norm in ("norm2", "module")}
        plan[f"blocks.{n}.norm1"] = SequenceParallel(use_local_output=bool(n))
    return parallelize_module(network, mesh, plan)


def channel_parallel(network, mesh):
    """The first norm sees a shard of the channels."""
    plan = {"blocks.0": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(2))}
    return parallelize_module(network, mesh, plan)


class BatchParallel(nn.Module):
    """The norm sees a shard of the batch: of three samples, two on one rank; of one sample, none on the other."""

    def __init__(self, mesh=None):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.mesh = nn.Linear(D, D).double(), nn.LayerNorm(D).double(), mesh
        if mesh is not None:
            parallelize_module(self, mesh, {"norm": SequenceParallel(sequence_dim=0)})

    def forward(self, x):
        x = self.up(x)
        if self.mesh is None:
            return self.norm(x)
        return self.norm(distribute_tensor(x, self.mesh, [Shard(0)])).full_tensor()


def heads():
    """A norm of tokens, and one of the heads, of which each rank has one as a plain tensor."""
    torch.manual_seed(0)
    layers = {"norm": nn.LayerNorm(D), "up": nn.Linear(D, 2 * D), "heads": nn.RMSNorm(D)}
    return network_of(lambda self, x: self.heads(self.up(self.norm(x)).unflatten(-1, (-1, D))), **layers).double()


def of_tensor_parallel(folder, rank):
    """All ranks have the same data, of which there is no axis."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for parallel in (tensor_parallel, sequence_parallel):
        network = parallel(Network(), mesh)
        seen = normscope.capture(network, [batch(index) for index in BATCHES], group=None, **OPTIONS)
        save(folder, f"{parallel.__name__} {rank}", seen)
        swapped(folder, f"{parallel.__name__} {rank}", network, seen)
    seen_by_batch = normscope.capture(BatchParallel(mesh), [batch(0), batch(1)], group=None, **OPTIONS)
    save(folder, f"batch_parallel {rank}", seen_by_batch)
    divided = parallelize_module(heads(), mesh, {"up": ColwiseParallel()})
    save(folder, f"heads {rank}", normscope.capture(divided, [batch(0)], group=None))
    save_refusals(folder, rank, mesh, network, seen)


def of_fully_sharded(folder, rank):
    network = fsdp2(Network())
    seen = normscope.capture(network, of_rank(rank)[:2])
    swapped(folder, f"fully_sharded {rank}", network, seen)


def of_both(folder, rank):
    """Two data ranks, of two tensor ranks each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    network = sequence_parallel(Network(), mesh["tp"])
    for part in (*network.blocks, network):
        fully_shard(part, mesh=mesh["dp"])
    seen = normscope.capture(network, of_rank(mesh["dp"].get_local_rank())[:2], group=mesh["dp"], **OPTIONS)
    save(folder, f"both {rank}", seen)
    swapped(folder, f"both {rank}", network, seen)


def of_replicated_shards(folder, rank):
    """Four data ranks; FSDP2 shards over two of them, and has a copy on the other two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    network = Network()
    for part in (*network.blocks, network):
        fully_shard(part, mesh=mesh)
    save(folder, f"replicated_shards {rank}", normscope.capture(network, [batch(rank)], **OPTIONS))


SWAPPED = "*.norm1,blocks.1.norm2"


def swapped(folder, name, network, seen):
    """Write the drift of a swap, on the same batches on every rank."""
    modules = normscope.replacements(network, "dyt", seen, layers=SWAPPED)
    for path, module in modules.items():
        norm = network.get_submodule(path)
        assert getattr(module.weight, "placements", None) == getattr(norm.weight, "placements", None)
    report = normscope.drift(network, [batch(8), batch(9)], modules)
    (folder / f"{name}.json").write_text(json.dumps(drifts(report)))


def drifts(report):
    return [[row.site, row.relative_l2.p50, row.relative_l2.max] for row in report.rows]


def save_refusals(folder, rank, mesh, network, seen):
    calls = {
        "channels": lambda: normscope.capture(channel_parallel(Network(), mesh), [batch(0)], group=None),
        "batches": lambda: normscope.capture(tensor_parallel(Network(), mesh), [batch(rank)], group=None),
        "calibrate": lambda: normscope.swap(network, "dyt", seen, init="calibrated", learn=[batch(0), batch(1)]),
        "heal": lambda: normscope.heal(network, network, [batch(0)], [batch(1)]),
        "rmsnorm": lambda: normscope.replacements(network, "rmsnorm", seen, layers="*.norm2"),
        "DDP": lambda: normscope.swap(DistributedDataParallel(Network()), "dyt", seen, layers="*.norm2"),
    }
    (folder / f"errors {rank}.json").write_text(json.dumps({name: error_of(call) for name, call in calls.items()}))


def error_of(call):
    try:
        call()
    except NormscopeError as error:
        return f"{type(error).__name__}: {error}"


def refused(folder, rank):
    """Write the errors of calls that ranks do not agree in."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    calls = {
        "mesh": lambda: normscope.capture(Network(), [batch(0)], group=mesh),
        "same": lambda: normscope.capture(Network(), [batch(0).args[0]]),
        "layers": lambda: normscope.capture(Network(), of_rank(rank), layers=[rank]),
        "empty": lambda: normscope.capture(Network(), []),
    }
    errors = {name: error_of(call) for name, call in calls.items()}
    same = normscope.capture(Network(), [batch(0)], group=mesh["dp"])
    errors["n_samples"] = same.n_samples
    (folder / f"errors {rank}.json").write_text(json.dumps(errors))


def save(folder, name, seen):
    normscope.save_capture(seen, folder / f"{name}.safetensors")


PROGRAMS = {
    "two": (2, data_parallel, refused),
    "sharded": (2, of_tensor_parallel, of_fully_sharded),
    "four": (4, of_both, of_replicated_shards),
}


def run_rank(folder, name, rank):
    size, *steps = PROGRAMS[name]
    store, patience = f"file://{folder / name}/store", timedelta(minutes=2)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=patience)
    for step in steps:
        step(folder / name, rank)
    with contextlib.suppress(RuntimeError):  # of a rank that is gone
        dist.destroy_process_group()
    os._exit(0)


def run_ranks(folder):
    """Fork the ranks of each program, once all is imported and compiled; they end with status 0 or this fails."""
    seen = normscope.capture(Network(), [batch(0)], **OPTIONS)
    normscope.drift(Network(), [batch(0)], normscope.replacements(Network(), "dyt", seen, layers=SWAPPED))
    fork = multiprocessing.get_context("fork")
    for name, (size, *_) in PROGRAMS.items():
        (folder / name).mkdir()
        ranks = [fork.Process(target=run_rank, args=(folder, name, rank)) for rank in range(size)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert [rank.exitcode for rank in ranks] == [0] * size, name


# --- what came of it ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, str(folder)]
    process = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    return folder


def assert_same(seen, expected):
    """Counts and drawn samples to the bit; sums to the rounding of float64, in another order of additions."""
    assert [site.name for site in seen.sites] == [site.name for site in expected.sites]
    assert_same_tensors(pack(seen)[1], pack(expected)[1])
    assert (seen.n_samples, seen.about) == (expected.n_samples, expected.about)
    assert [kept.key for kept in seen.inputs] == [kept.key for kept in expected.inputs]


@pytest.mark.slow
@pytest.mark.parametrize("name", DATA_PARALLEL)
def test_ranks_with_own_batches_match_one_process(folder, name):
    seen = normscope.load_capture(of_all(folder / "two", name, "safetensors"))
    batches = [batch(index) for index in (BATCHES[:4] if name in SHARDED else BATCHES)]
    assert_same(seen, normscope.capture(Network(), batches, **OPTIONS))
    assert [site.name for site in seen.sites][:3] == ["blocks.0.norm1", "blocks.0.norm2", "blocks.0.module"]
    assert seen.sites[-1].name == "(model):layer_norm.0"


@pytest.mark.slow
def test_a_rank_without_batches_matches_the_others(folder):
    expected = normscope.capture(Network(), [batch(index) for index in BATCHES], **OPTIONS)
    assert_same(normscope.load_capture(of_all(folder / "two", "empty", "safetensors")), expected)
    probed = normscope.load_capture(of_all(folder / "two", "probed", "safetensors"))
    assert_same_tensors(pack(probed)[1], pack(normscope.capture(Network(), [batch(0), batch(1)]))[1])


def of_all(folder, name, extension, size=2):
    """Return the file that every rank wrote the same."""
    files = [folder / f"{name} {rank}.{extension}" for rank in range(size)]
    assert len({file.read_bytes() for file in files}) == 1
    return files[0]


def assert_same_drift(file, seen):
    """Outputs differ by roundings of float64, 1e-16 each; the fitted curves by those of sums, of 1e-12."""
    network = Network()
    modules = normscope.replacements(network, "dyt", seen, layers=SWAPPED)
    expected_rows = drifts(normscope.drift(network, [batch(8), batch(9)], modules))
    for (site, *measured), (name, *expected) in zip(json.loads(file.read_text()), expected_rows, strict=True):
        assert (site, measured) == (name, pytest.approx(expected, rel=1e-6))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "name", "size", "swaps"),
    [
        *(("sharded", name, 2, True) for name in ("tensor_parallel", "sequence_parallel")),
        *(("four", name, 4, name == "both") for name in ("both", "replicated_shards")),
    ],
)
def test_ranks_with_the_same_data_count_once(folder, program, name, size, swaps):
    seen = normscope.load_capture(of_all(folder / program, name, "safetensors", size))
    expected = normscope.capture(Network(), [batch(index) for index in BATCHES][: 5 if size == 2 else 4], **OPTIONS)
    assert_same(seen, expected)
    if swaps:
        assert_same_drift(of_all(folder / program, name, "json", size), expected)


@pytest.mark.slow
def test_norms_of_fully_sharded_networks_are_swapped(folder):
    seen = normscope.capture(Network(), [batch(index) for index in BATCHES[:4]])
    assert_same_drift(of_all(folder / "sharded", "fully_sharded", "json"), seen)


@pytest.mark.slow
def test_shards_of_the_batch_count_once(folder):
    seen = normscope.load_capture(of_all(folder / "sharded", "batch_parallel", "safetensors"))
    assert_same(seen, normscope.capture(BatchParallel(), [batch(0), batch(1)], **OPTIONS))


@pytest.mark.slow
def test_norms_whose_heads_ranks_divide_are_skipped(folder):
    seen = normscope.load_capture(of_all(folder / "sharded", "heads", "safetensors"))
    [skipped] = seen.skipped
    assert skipped.name == "heads" and "each has some of the heads" in skipped.reason
    expected = normscope.capture(heads(), [batch(0)], layers="norm")
    assert_same_tensors(pack(seen.only("norm"))[1], pack(expected)[1])


@pytest.mark.slow
def test_unsupported_actions_on_sharded_networks_are_refused(folder):
    errors = json.loads((folder / "sharded" / "errors 0.json").read_text())
    assert "blocks.0.norm1 is sharded along its channels, so that no rank sees a whole token" in errors["channels"]
    assert "norm1 (RMSNorm): ranks that share the network have different inputs of it" in errors["batches"]
    for name, action in (("calibrate", "Calibration"), ("heal", "Healing"), ("rmsnorm", "A swap for rmsnorm")):
        assert errors[name].startswith(f"ModelError: {action} is not possible: ranks share the weights of this ")
    assert errors["DDP"].startswith("ModelError: A swap is not possible: DDP or FSDP1 wraps this Network")


@pytest.mark.slow
def test_disagreeing_ranks_are_refused(folder):
    errors = [json.loads((folder / "two" / f"errors {rank}.json").read_text()) for rank in range(2)]
    for said in errors:
        assert said["mesh"].startswith("UsageError: group is a DeviceMesh of the axes dp, tp. Pass the axis along")
        assert said["same"].startswith("DataError: Two ranks have captured sample ")
        assert "sees another layers than" in said["layers"]
        assert said["empty"] == "DataError: There is no batch to run the model on."
        assert said["n_samples"] == 3


def test_without_torch_distributed_there_is_no_group():
    alone = normscope.capture(Network(), [batch(0)])
    assert_same(normscope.capture(Network(), [batch(0)], group=None), alone)
    with pytest.raises(NormscopeError, match=r"torch\.distributed is not initialized"):
        normscope.capture(Network(), [batch(0)], group=dist.ProcessGroup)


if __name__ == "__main__":
    run_ranks(Path(sys.argv[1]))
