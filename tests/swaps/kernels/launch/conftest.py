"""What is here runs in a process whose kernels Triton interprets, or on a GPU: test_launch.py starts it."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

HERE = os.environ.get("TRITON_INTERPRET") == "1" or os.environ.get("NORMSCOPE_KERNEL_TESTS") == "cuda"
collect_ignore_glob = [] if HERE else ["*.py"]
if HERE:
    sys.path.insert(0, str(Path(__file__).parent))  # where truth.py is


def filling(make: Callable[..., Tensor], value: float) -> Callable[..., Tensor]:
    def made(*sizes: object, **options: object) -> Tensor:
        tensor = make(*sizes, **options)
        return tensor.fill_(value) if tensor.is_floating_point() else tensor

    return made


def _fill(patch: pytest.MonkeyPatch, value: float) -> None:
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        patch.setattr(owner, name, filling(getattr(owner, name), value))


@pytest.fixture(scope="session", autouse=True)
def poisoned() -> Iterator[None]:
    """Let memory that nothing is written to show: it holds NaN."""
    with pytest.MonkeyPatch.context() as patch:
        _fill(patch, float("nan"))
        yield


@pytest.fixture
def fill_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let new memory hold something else."""
    return lambda value: _fill(monkeypatch, value)


def pytest_sessionfinish() -> None:
    """Write the largest errors over what is allowed, where a folder for them is named: a file for each process."""
    folder, truth = os.environ.get("NORMSCOPE_KERNEL_ERRORS"), sys.modules.get("truth")
    if folder and truth is not None:
        Path(folder, f"{os.getpid()}.json").write_text(json.dumps(truth.FURTHEST), encoding="utf-8")
