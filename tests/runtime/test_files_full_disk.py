"""Every file that normscope writes, on a disk that is full: a sentence, what was there before, and nothing else."""

import contextlib
import gc
import resource
import sys
from unittest import mock

import matplotlib.figure
import pytest
import torch
from torch import nn

import normscope
from normscope.cli.output import Output
from normscope.errors import UsageError
from normscope.show.figures.scurves import save_figure
from normscope.swaps.store.store import FILES
from normscope.tools.heal.training import TrainingState

ROWS = [{"site": f"site {i}", "value": i / 7} for i in range(200)]
ABOUT = {"model": "small", "weights": "ours", "data": "noise"}


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64))
    return model, normscope.capture(model, [torch.randn(32, 16)], about=ABOUT)


def figure(path):
    drawn = matplotlib.figure.Figure()
    drawn.subplots().plot(torch.randn(500))
    return lambda: save_figure(drawn, path, ABOUT)


def table(path):
    said = Output(quiet=True, output=path)
    return lambda: said.document({"rows": ROWS}, ROWS)


def a_capture(path):
    _, seen = network()
    return lambda: normscope.save_capture(seen, path)


def a_swap(path):
    model, seen = network()
    normscope.swap(model, "dyt", normscope.fit(seen, "tanh"))
    return lambda: normscope.save_swapped(model, path, ABOUT)


def a_healing(path):
    model, _ = network()
    state = TrainingState(0.5, tensors={"calibrated": dict(model.named_parameters())})
    return lambda: state.save(path, {}, {})


WRITERS = {
    "capture.safetensors": a_capture,
    "swap": a_swap,
    "healing.safetensors": a_healing,
    **{f"figure.{kind}": figure for kind in ("png", "svg", "pdf")},
    **{f"table.{kind}": table for kind in ("json", "csv")},
}


@contextlib.contextmanager
def full_disk():
    """Let no file grow beyond 512 bytes: filling a disk takes rights.

    Python would cut the bytecode of modules that are imported meanwhile, and read it in later processes.
    """
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    with mock.patch.object(sys, "dont_write_bytecode", True):
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, old[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")  # it would stand behind the sentence
@pytest.mark.parametrize("name", WRITERS)
def test_what_stood_there_stays(tmp_path, name):
    path = tmp_path / name
    files = [path / own for own in FILES] if name == "swap" else [path]
    files[0].parent.mkdir(exist_ok=True)
    for file in files:
        file.write_text("what was there")
    write = WRITERS[name](path)
    before = sorted(tmp_path.rglob("*"))
    with full_disk(), pytest.raises(UsageError) as error:
        write()
    assert str(error.value) == f"Cannot write {path}: File too large."
    assert sorted(tmp_path.rglob("*")) == before
    assert {file.read_text() for file in files} == {"what was there"}
    write()
    assert all(file.stat().st_size > len("what was there") for file in files)
    error = None  # and with it what the failed call held
    gc.collect()
