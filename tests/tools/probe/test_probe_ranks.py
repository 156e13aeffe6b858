"""Probes by two ranks of DDP and FSDP, against one process with the whole batch; this file is each rank's program.

Networks are in float64, so that another order of additions in a network does not change x in float32.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import normscope
from normscope.inputs.batch import Batch, Sample
from normscope.tools.probe.timeline import load_timeline

D, STEPS, EVERY = 8, 4, 2


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(2))
        self.norms = nn.ModuleList([nn.LayerNorm(D), normscope.DyT(D)])
        self.last = nn.RMSNorm(D)  # in the root's own shard
        self.double()

    def forward(self, x):
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x)).relu()
        return self.last(x)


def fsdp1(network):
    return FullyShardedDataParallel(
        network, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=torch.device("cpu")
    )


def fsdp2(network):
    for layer in network.layers:
        fully_shard(layer)
    return fully_shard(network)


WRAPPED = {"DDP": DistributedDataParallel, "FSDP1": fsdp1, "FSDP2": fsdp2}


def inputs(number, seed):
    x = torch.randn(number, 4, D, generator=torch.Generator().manual_seed(seed)).double()
    return x * torch.linspace(0.2, 4, number).double()[:, None, None]


def trained(network, rank=0, size=1, *, before=True, **probed):
    """Train on this rank's share, and probe before the updates or after; return records, losses and weights."""
    optimizer, records, losses = torch.optim.SGD(network.parameters(), 0.05), [], []
    seen = inputs(32, 9)  # FSDP2's ranks divide it themselves
    seen = seen if hasattr(network, "unshard") else seen[rank::size]
    probe = normscope.Probe(network, seen, every=EVERY, **probed) if probed else None
    for step in range(STEPS):
        loss = network(inputs(16, step)[rank::size]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if probe and before:  # FSDP2's root would go on with the weights that a pass has gathered
            records += filter(None, [probe.step()])
        optimizer.step()
        if probe and not before:
            records += filter(None, [probe.step()])
        losses.append(loss.item())
    weights = {name: whole(value) for name, value in network.state_dict().items()}
    return [each.metrics() for each in records], losses, weights, probe


def whole(value):
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).flatten().tolist()


def tensor_parallel(folder):
    """Train one network on both ranks; return the records and the error of a group of ranks with the same data."""
    network, mesh = Network(), dist.device_mesh.init_device_mesh("cpu", (2,))
    styles = {f"layers.{n}": ColwiseParallel(output_layouts=Replicate(), use_local_output=True) for n in range(2)}
    network = parallelize_module(network, mesh, styles)
    with pytest.raises(normscope.errors.UsageError, match="Ranks run this Network together on the same data"):
        normscope.Probe(network, inputs(32, 9))
    return trained(network, path=folder / "TP.jsonl", curves="tanh", group=None)[0]


def program(folder, rank, size):
    dist.init_process_group("gloo", rank=rank, world_size=size)
    results = {}
    for name, wrap in WRAPPED.items():
        *_, losses, weights, _ = trained(wrap(Network()), rank, size)
        before = name != "FSDP1"  # which loses the update that follows a pass without gradients
        options = {"path": folder / f"{name}.jsonl", "keep": folder / name, "curves": "tanh"}
        records, *probed, probe = trained(wrap(Network()), rank, size, before=before, **options)
        results[name] = {"records": records, "same": probed == [losses, weights]}
        try:
            normscope.Probe(wrap(Network()), inputs(32, 9)[rank::size], **options | {"curves": "isru"})
        except normscope.errors.UsageError as error:
            results[name]["error"] = str(error)
        for alike in (inputs(1, 9), Batch(([inputs(2, 9)],), samples=[Sample("", i, i) for i in range(2)])):
            with pytest.raises(normscope.errors.UsageError, match="All 2 ranks pass the same batch"):
                normscope.Probe(wrap(Network()), alike)
        results[name]["pairs"] = [stats.n_pairs for stats in probe.capture.stats.values()]
    results["TP"] = tensor_parallel(folder)
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    given["PYTHONPATH"] = os.pathsep.join(sys.path)
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder), str(rank), "2"],
            env={**os.environ, **given},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ends = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(ends)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPED)
def test_two_ranks_record_what_one_process_records(two, name):
    of_ranks = [json.loads((two / f"{rank}.json").read_text())[name] for rank in range(2)]
    assert of_ranks[0] == of_ranks[1]
    records, *_, probe = trained(Network(), before=name != "FSDP1", path=two / f"one {name}.jsonl", curves="tanh")
    assert len(records) == len(of_ranks[0]["records"]) == 2
    for mine, theirs in zip(records, of_ranks[0]["records"], strict=True):
        assert mine.keys() == theirs.keys() and "norms.0/r2/tanh" in mine
        for metric, value in mine.items():
            # Gradients of two halves are added in another order, and a minimum of the fit is flat.
            close = 1e-9 if "/r2/" in metric else 1e-6
            assert theirs[metric] == pytest.approx(value, rel=close, abs=close), metric
    assert of_ranks[0]["pairs"] == [stats.n_pairs for stats in probe.capture.stats.values()] == [32 * 4 * D] * 3
    [timeline, alone] = [load_timeline(two / f"{file}.jsonl") for file in (name, f"one {name}")]
    assert (timeline.sites, timeline.model, timeline.data) == (alone.sites, "Network", "32 samples")
    assert timeline.steps.tolist() == [2, 4]
    assert sorted(path.name for path in (two / name).iterdir()) == [f"step-0000000{n}.safetensors" for n in (2, 4)]
    seen = normscope.load_capture(two / name / "step-00000004.safetensors")
    counts = [[stats.moments.sum(0)[0] for stats in each.stats.values()] for each in (seen, probe.capture)]
    assert all(map(torch.equal, *counts))


@pytest.mark.slow
def test_ranks_of_one_network_record_it_once(two):
    records, *_ = trained(Network(), path=two / "one TP.jsonl", curves="tanh")
    for rank in range(2):
        of_rank = json.loads((two / f"{rank}.json").read_text())["TP"]
        for mine, theirs in zip(records, of_rank, strict=True):
            # Columns of a product are added in another order, and a minimum of the fit is flat.
            assert theirs == pytest.approx(mine, rel=1e-6, abs=1e-6)
    assert len((two / "TP.jsonl").read_text().splitlines()) == 1 + len(records)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPED)
def test_ranks_train_identically_and_all_raise_errors_of_rank_0(two, name):
    for rank in range(2):
        of_rank = json.loads((two / f"{rank}.json").read_text())[name]
        assert of_rank["same"]
        assert "of another run, with the curves ('tanh',), not ('isru',)" in of_rank["error"]


if __name__ == "__main__":
    program(Path(sys.argv[1]), *map(int, sys.argv[2:]))
