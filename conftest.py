"""Doctests are looked for in every module, but those that import Triton only where it is; and what tests share."""

import os
import re
import signal
from collections.abc import Callable, Generator, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import settings

# The first example of a process imports and compiles; how long one takes is not what they are about.
settings.register_profile("slow", deadline=None)
settings.register_profile("quick", deadline=None, derandomize=True)  # the same examples in every run

# As the command line does before torch is imported: threads that spin while they wait take the suite minutes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:  # as many processes as cores leave one thread for each
    os.environ.setdefault("OMP_NUM_THREADS", "1")

_SPEECH_MODELS = "demo_wav2vec2|wav2vec2_|torchaudio:|transformers:"
_WITHOUT_TORCHAUDIO = f"({_SPEECH_MODELS})\\S* (needs torchaudio|cannot be loaded, because torchaudio)"

try:  # some releases of torch make it raise OSError or RuntimeError
    import torchaudio  # noqa: F401
except Exception:
    WITH_TORCHAUDIO = ["normscope/models/speech.py", "normscope/models/embedded/demo_wav2vec2.py"]
else:
    WITH_TORCHAUDIO = []
WITH_TRITON = ["pairs/sums/binning/cuda*", "swaps/kernels/l*"]
collect_ignore_glob = [] if find_spec("triton") else [f"normscope/{path}.py" for path in WITH_TRITON]
collect_ignore_glob += WITH_TORCHAUDIO


def pytest_configure(config: pytest.Config) -> None:
    """Load the profile of hypothesis before tests are imported."""
    settings.load_profile("quick" if "not slow" in config.option.markexpr else "slow")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what takes a GPU where there is none, but for what NORMSCOPE_KERNEL_TESTS=cpu rehearses there, tiny."""
    of_a_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not of_a_gpu or os.environ.get("NORMSCOPE_KERNEL_TESTS") == "cpu":
        return
    import torch

    if not torch.cuda.is_available() or torch.version.hip is not None:
        for item in of_a_gpu:
            item.add_marker(pytest.mark.skip(reason="there is no NVIDIA GPU here"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip a test that loads a speech model, and no other, where torchaudio cannot be imported."""
    error = call.excinfo.value if call.excinfo else None
    if type(error).__name__ == "ModelError" and re.match(_WITHOUT_TORCHAUDIO, str(error)):
        skipped = pytest.skip.Exception(str(error)).with_traceback(error.__traceback__)
        call.excinfo = pytest.ExceptionInfo.from_exception(skipped)
    return (yield)


class _MadeOnDemand(dict[str, Any]):
    """A dictionary whose values are made when they are first asked for."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        self._make = make

    def __missing__(self, name: str) -> Any:
        self[name] = self._make(name)
        return self[name]


@pytest.fixture(scope="session")
def made_on_demand() -> type[_MadeOnDemand]:
    """Share networks between tests, without a failure of those that use another one than the one that is missing."""
    return _MadeOnDemand


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Begin every test and doctest with the same random numbers, whichever tests its process has run before."""
    import torch

    torch.manual_seed(0)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let Ctrl-C interrupt this process and those that it starts, also where a nohup or a CI has it ignored by all."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def uncovered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start processes without coverage, which makes them twice as slow, where other tests run the same lines."""
    for name in [name for name in os.environ if name.startswith("COVERAGE_")]:
        monkeypatch.delenv(name)
