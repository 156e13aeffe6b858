"""Every file that normscope writes, on a disk that is full: a sentence, what was there before, and nothing else."""

import contextlib
import gc
import resource
import shutil
import subprocess

import matplotlib.figure
import pytest
import torch
from torch import nn

import normscope
from normscope.cli.output import Output
from normscope.errors import UsageError
from normscope.figures.scurves import save_figure
from normscope.pairs.capture import captured
from normscope.pairs.recorder import Summing
from normscope.pairs.storage import RawPairs
from normscope.swaps.heal.training import TrainingState, copied, save_checkpoint
from normscope.swaps.store.store import FILES

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
    state = TrainingState(0.5, calibrated=copied(dict(model.named_parameters())))
    return lambda: save_checkpoint(path, {}, {}, state)


WRITERS = {
    "capture.safetensors": a_capture,
    "swap": a_swap,
    "healing.safetensors": a_healing,
    **{f"figure.{kind}": figure for kind in ("png", "svg", "pdf")},
    **{f"table.{kind}": table for kind in ("json", "yaml", "csv", "parquet")},
}


@contextlib.contextmanager
def limited(folder):
    """Let no file grow beyond 512 bytes, which needs no rights."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@contextlib.contextmanager
def filled(folder):
    """Fill the file system that the folder is on to its last byte."""
    filler = folder.parent / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    try:
        yield
    finally:
        filler.unlink()


@pytest.fixture(params=["a limit on files", "a small file system"])
def full(request, tmp_path):
    """Give a folder, and what fills the disk that it is on; with a sentence of the system's."""
    if request.param == "a limit on files":
        yield tmp_path, limited, "File too large"
        return
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a file system takes rights; the limit on files stands for it")
    try:
        (place / "folder").mkdir()
        yield place / "folder", filled, "No space left on device"
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")  # it would stand behind the sentence
@pytest.mark.parametrize("name", WRITERS)
def test_what_stood_there_stays(full, name):
    folder, fills, reason = full
    path = folder / name
    files = [path / own for own in FILES] if name == "swap" else [path]
    files[0].parent.mkdir(exist_ok=True)
    for file in files:
        file.write_text("what was there")
    write = WRITERS[name](path)
    before = sorted(folder.rglob("*"))
    with fills(folder), pytest.raises(UsageError) as error:
        write()
    assert str(error.value) == f"Cannot write {path}: {reason}."
    assert sorted(folder.rglob("*")) == before
    assert {file.read_text() for file in files} == {"what was there"}
    write()
    assert all(file.stat().st_size > len("what was there") for file in files)
    error = None  # and with it what the failed call held
    gc.collect()


@pytest.mark.parametrize("when", ["pairs come", "the folder is finished"])
def test_raw_pairs(full, when):
    folder, fills, reason = full
    model, seen = network()
    raw = RawPairs(folder / "raw")
    if when == "pairs come":
        with fills(folder), pytest.raises(UsageError) as error:
            captured(model, [torch.randn(32, 16)], Summing(observe=raw.add))
    else:
        captured(model, [torch.randn(32, 16)], Summing(observe=raw.add))
        with fills(folder), pytest.raises(UsageError) as error:
            raw.finish(seen)
    assert str(error.value) == f"Cannot write {folder / 'raw'}: {reason}."
    raw.discard()
    assert list(folder.iterdir()) == []
