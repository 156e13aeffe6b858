"""The batch size that fits into memory: doubled until memory ends."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import nn

from normscope.errors import MemoryEndedError
from normscope.inputs.batch import Batch
from normscope.inputs.loaded_model import LoadedModel
from normscope.inputs.splits import DivisibleInputs
from normscope.runtime.network import left_as_found, memory_ended, run
from normscope.runtime.processes import Place

_SUMS = 2**28  # bytes that are left for what is kept of the norms: some 5 MB each, and steps of their loops
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
# Files of a control group's limit, its use, and the line of memory.stat that counts what would be given back: of the
# second and of the first version.
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


class Gauge:
    """Compares the peak memory of passes with the room there is."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        """Note what is in use before the first pass.

        Args:
            devices: that the network is on. What cannot be measured (MPS) counts as empty: there, errors alone tell.
        """
        self._before = {device: _in_use(device) for device in set(devices) if device.type in ("cpu", "cuda")}

    def start(self) -> None:
        """Forget earlier peaks; where the system cannot, as far as it can: they are then taken for this pass's."""
        for device in self._before:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            else:
                with contextlib.suppress(OSError):
                    Path("/proc/self/clear_refs").write_text("5")

    @property
    def fullness(self) -> float:
        """The part of the room on the fullest device that was taken at most since the start; once all is computed."""
        return max((self._taken(device) / max(self._room(device), 1) for device in self._before), default=0.0)

    def _taken(self, device: torch.device) -> int:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            return torch.cuda.max_memory_allocated(device) - self._before[device]
        return _peak() - self._before[device]

    def _room(self, device: torch.device) -> int:
        """Return what passes may take: what is free, and what this process holds for them already; less the sums."""
        if device.type == "cuda":
            free, held = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device)
        else:
            free, held = available() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), _in_use(device)
        return free + held - self._before[device] - _SUMS


def available() -> int:
    """Bytes that this process can still take before something is swapped, refused or killed.

    >>> available() > 0
    True
    """
    limits = [int(psutil.virtual_memory().available), *_left_to_groups()]
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        limits.append(address_space - int(psutil.Process().memory_info().vms))
    return max(min(limits), 0)


def _peak() -> int:
    """Return the most bytes that this process has held since the start; where the system does not tell, ever."""
    with contextlib.suppress(OSError):
        # ru_maxrss would begin with what the process held that started this one, and no reset goes below that.
        status = Path("/proc/self/status").read_text(encoding="ascii")
        if peak := re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE):
            return int(peak[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _in_use(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(psutil.Process().memory_info().rss)


def _left_to_groups() -> Iterator[int]:
    """Yield what the control groups of this process and their parents leave to it, as in a container."""
    for group in _control_groups():
        for limit, use, given_back in _FILES:
            with contextlib.suppress(OSError, ValueError):  # the root has none, and a limit may be the word max
                statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                used = int((group / use).read_text()) - int(statistics.get(given_back, 0))
                yield int((group / limit).read_text()) - used


def _control_groups() -> Iterator[Path]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            innermost = Path(path.lstrip("/"))
            yield from (_CONTROL_GROUPS / controllers / group for group in (innermost, *innermost.parents))


_MOST = 1024  # beyond it nothing becomes faster, and checkpoints, which wait for a chunk's end, become rare
_LONGEST = 5.0  # seconds of a pass; a slow network is not made to try what would take minutes
_SHARE = 0.8  # of the room; the rest is for the sums' loops, which take a copy of one norm's input


@dataclass(frozen=True)
class Fitting:
    """A batch size that fits.

    Attributes:
        size: inputs in a batch.
        because: why it is no larger.

    >>> print(Fitting(256, "memory ends at 512"))
    batches of 256: memory ends at 512
    """

    size: int
    because: str

    def __str__(self) -> str:
        return f"batches of {self.size}: {self.because}"


def fit_batches(network: LoadedModel) -> Fitting:
    """Set the batch size of a network's inputs to the largest that fits, also of those to learn from, and note why.

    Raises:
        MemoryEndedError: see :func:`largest`.

    >>> import normscope
    >>> network = normscope.load("demo_vit", limit=6, device="cpu")
    >>> print(fit_batches(network), [len(batch.samples) for batch in network.inputs])
    batches of 6: all inputs in one [6]
    """
    fitting = largest(network.module, network.inputs)
    for inputs in (network.inputs, network.calibration):
        if inputs is not None:
            inputs.batch_size = fitting.size
    network.fitting = str(fitting)
    return fitting


def largest(module: nn.Module, inputs: DivisibleInputs) -> Fitting:
    """Find the largest batch size that fits: 1, 2, 4, … copies of the first sample, until memory ends; then back.

    Memory ends where an allocation fails, and where twice of what a pass took would leave less than a fifth of the
    room: the sums need some of it, and on a CPU nothing fails before the machine swaps, or ends the process. Where
    later inputs are longer than the first (texts), a batch may still not fit; it is split then.

    Args:
        module: ready to run. Its training flags, the grad mode and torch's random numbers are left as found.
        inputs: of which the first that can be read is run. Their batch size is changed.

    Raises:
        MemoryEndedError: if a single sample takes more memory than there is.
        ModelError: if the module raises anything else.
    """
    inputs.batch_size = _MOST
    if inputs.batch_size == 1:
        return Fitting(1, "these inputs are taken one at a time")
    first = inputs.first_sample()
    gauge = Gauge(tensor.device for tensor in itertools.chain(module.parameters(), module.buffers()))
    ranks = Place.from_environment().ranks
    share = -(-(inputs.n_inputs or _MOST) // ranks)  # or one rank would have all of them in one batch
    most = min(share, _MOST)
    fits, size = 0, 1
    with left_as_found(module):
        while True:
            gauge.start()
            began = time.perf_counter()
            if not _fits(module, first, size):
                torch.cuda.empty_cache()
                return Fitting(fits, f"memory ends at {size}")
            fullness, seconds = gauge.fullness, time.perf_counter() - began
            if size == most:
                return Fitting(size, _whole(ranks) if size == share else "more are not tried")
            larger = min(2 * size, most)
            if larger / size * fullness > _SHARE:
                return Fitting(size, f"memory ends at {larger}")
            if seconds > _LONGEST:
                return Fitting(size, f"one takes {seconds:.0f} s already")
            fits, size = size, larger


def _whole(ranks: int) -> str:
    return "all inputs in one" if ranks == 1 else f"all inputs in one for each of {ranks} ranks"


def _fits(module: nn.Module, first: Batch, size: int) -> bool:
    try:
        run(module, first.take([0] * size))
    except MemoryEndedError:
        if size == 1:
            raise
        return False
    except (RuntimeError, MemoryError) as error:  # of the copies themselves
        if not memory_ended(error):
            raise
        return False
    return True
