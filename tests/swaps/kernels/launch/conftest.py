"""These tests run in a process whose kernels Triton interprets, or on a GPU: test_launch.py starts it."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

HERE = os.environ.get("TRITON_INTERPRET") == "1" or os.environ.get("NORMSCOPE_KERNEL_TESTS") == "cuda"
collect_ignore_glob = [] if HERE else ["*.py"]
if HERE:
    sys.path.insert(0, str(Path(__file__).parent))  # for truth.py


@pytest.fixture(scope="session", autouse=True)
def memory_of_nan():
    """Fill new memory with NaN, so that an element that no kernel writes fails a comparison."""

    def filled(create):
        def created(*sizes, **options):
            tensor = create(*sizes, **options)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return created

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            patch.setattr(owner, name, filled(getattr(owner, name)))
        yield


def pytest_sessionfinish():
    """Write the largest errors over what is allowed, for benchmarks/gpu.py: a file for each process."""
    folder, truth = os.environ.get("NORMSCOPE_KERNEL_ERRORS"), sys.modules.get("truth")
    if folder and truth is not None:
        Path(folder, f"{os.getpid()}.json").write_text(json.dumps(truth.FURTHEST), encoding="utf-8")
