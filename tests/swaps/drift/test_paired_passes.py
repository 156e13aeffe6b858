"""Drift does not depend on the number of ranks; a batch that does not fit into memory is halved."""

import contextlib
import copy
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from networks import PreNorm, network_of
from torch import nn

from normscope.errors import DataError, MemoryEndedError, NormscopeError
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.chunks import ALL
from normscope.inputs.loaded_model import Outputs
from normscope.pairs.ranks import Ranks
from normscope.runtime import network
from normscope.swaps.drift.drift import drift
from normscope.swaps.pointwise import DyT

CLASSES = Outputs("classes")


@pytest.fixture(autouse=True)
def ranks_in_threads(monkeypatch):
    """Ranks are processes, each with torch's settings; as threads they neither wait for one another nor set any."""
    monkeypatch.setattr(network, "_one_thread", contextlib.nullcontext())
    monkeypatch.setattr(network, "module_by_module", lambda model: contextlib.nullcontext())


class Stack(PreNorm):
    """A network whose memory ends once it is swapped and a batch has more samples than ``fits``."""

    def __init__(self, fits=99):
        super().__init__()
        self.fits = fits

    def forward(self, x):
        if len(x) > self.fits and type(self.norms[1]) is not nn.LayerNorm:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().forward(x)


@dataclass(frozen=True)
class Threads(Ranks):
    """Ranks that are threads of this process."""

    barrier: threading.Barrier = field(default=None)
    gathered: list = field(default_factory=list)

    def gather_bytes(self, data):
        self.gathered[self.rank] = data
        self.barrier.wait()
        everyone = list(self.gathered)
        self.barrier.wait()
        return everyone


def together(size, work):
    """Return what each of so many ranks makes of ``work(rank)``, or the exception that it ends with."""
    barrier, gathered = threading.Barrier(size, timeout=30), [None] * size

    def one(rank):
        try:
            return work(Threads(rank, size, "cpu", barrier=barrier, gathered=gathered))
        except NormscopeError as error:  # which all of them come to
            return error
        except Exception:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def inputs():
    draw = torch.Generator().manual_seed(0)
    batches = [torch.randn(samples, 8, generator=draw) for samples in (5, 1, 4, 7, 3)]
    batches[3][2, 0] = torch.nan  # nothing to compare to
    return batches


def dyts(model):
    return {f"norms.{n}": DyT(8, alpha=0.2 + 0.3 * n) for n in (1, 0, 2)}


def spoilt():
    return network_of(lambda self, input: torch.where(input[:, :1] > 1.5, input * torch.inf, input))


@pytest.mark.parametrize("size", [2, 7])
def test_the_report_does_not_depend_on_the_number_of_ranks(size):
    parts = ("timestep 9", "timestep 5", "timestep 0", "timestep 5", "timestep 9")
    batches, number = [], 0
    for x, part in zip(inputs(), parts, strict=True):
        samples = tuple(Sample(f"s{number + i}", number + i, number + i) for i in range(len(x)))
        batches.append(Batch((x,), samples=samples, part=part))
        number += len(x)
    model = Stack()

    def measured(modules, ranks):
        own = {"outputs": CLASSES, "quality": lambda network: network(batches[0].args[0]).mean()}
        return drift(copy.deepcopy(model), batches, copy.deepcopy(modules), **own, ranks=ranks)

    for modules in (dyts(model), {"norms.0": spoilt(), "norms.2": DyT(8)}):
        known = measured(modules, Ranks())
        for report in together(size, partial(measured, modules)):
            assert json.dumps(report.as_dict()) == json.dumps(known.as_dict())
    assert known.all.nonfinite > 0 and known.all.left_out == 1 and known.all.inputs == 19
    assert [row.part for row in known.by_part] == ["timestep 9", "timestep 5", "timestep 0"]


def test_ranks_divide_the_ends_of_trajectories():
    x, model = torch.cat(inputs()[:3]), Stack()
    walked = []

    def ends_of(own):
        def ends(sampler=ALL):
            walked.append(sampler)
            for first, *_ in sampler.groups(range(10), 3):
                samples = [Sample(f"s{n}", n, n) for n in range(10)][first : first + 3]
                with torch.no_grad():
                    yield samples, own(x[first : first + 3])

        return ends

    def measured(ranks):
        own = copy.deepcopy(model)
        return drift(own, [x], dyts(own), ends=ends_of(own), ranks=ranks)

    known = measured(Ranks())
    walked.clear()
    assert [report.as_dict() for report in together(3, measured)] == [known.as_dict()] * 3
    assert known.end.inputs == 10 and {sampler.rank for sampler in walked} == {0, 1, 2}


def test_all_ranks_raise_the_same_error():
    model, modules = Stack(), dyts(Stack())
    for error in together(2, lambda ranks: drift(copy.deepcopy(model), [], copy.deepcopy(modules), ranks=ranks)):
        assert isinstance(error, DataError)
    errors = together(
        2,
        lambda ranks: drift(
            copy.deepcopy(model), inputs(), copy.deepcopy(modules), func=("a", "b")[ranks.rank], ranks=ranks
        ),
    )
    assert all(isinstance(error, DataError) and "sees another func" in str(error) for error in errors)


def test_a_batch_that_does_not_fit_is_compared_in_halves(caplog):
    modules, advanced = dyts(Stack()), []
    report = drift(Stack(fits=2), inputs(), modules, most=None, progress=lambda stage, done, of: advanced.append(done))
    # 5 go as 2, 2, 1; what is known by then holds for the batches that follow.
    pieces = [piece for x in inputs() for piece in x.split(2)]
    assert report.as_dict() == drift(Stack(), pieces, modules, most=None).as_dict()
    passes = 2 + 4 + 3  # all sites, each alone, and one after the other
    assert advanced[-1] == 20 * passes + 5 == max(advanced)  # and that of the 5, after which memory ended
    assert "Memory ended with 5 samples in a batch; from here on they are compared 2 at a time." in caplog.text
    with pytest.raises(MemoryEndedError, match="with 1 sample in a batch"):
        drift(Stack(fits=0), inputs(), modules)


def test_memory_that_ends_while_outputs_are_compared_halves_the_batch():
    model, modules = Stack(), dyts(Stack())

    def scarce(logits, batch):
        if len(logits) > fits and type(model.norms[1]) is not nn.LayerNorm:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return logits

    outputs, fits = Outputs("tensor", scarce), 4
    pieces = [inputs()[2], *inputs()[3].split(3), inputs()[4]]
    assert drift(model, inputs()[2:], modules, outputs=outputs).all == drift(model, pieces, modules).all
    fits = 0
    with pytest.raises(MemoryEndedError, match="Memory ended while outputs were compared"):
        drift(model, inputs(), modules, outputs=outputs)
