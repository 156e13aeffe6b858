"""How much of the memory that there is a forward pass took."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import torch

_SUMS = 2**28  # bytes that are left for what is kept of the norms: some 5 MB each, and steps of their loops
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
# Files of a control group's limit, its use, and the line of memory.stat that counts what would be given back: of the
# second and of the first version.
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


class Gauge:
    """Compares what passes take, at their peak, with what there is room for."""

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
        """Which part of the room on the fullest device was taken at most since the start; once all is computed."""
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
    """Return how many bytes this process can still take before something is swapped, refused or killed.

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
        if found := re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE):
            return int(found[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _in_use(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(psutil.Process().memory_info().rss)


def _left_to_groups() -> Iterator[int]:
    """Yield what the control groups of this process, and those that these are in, leave to it: containers have them."""
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
            own = Path(path.lstrip("/"))
            yield from (_CONTROL_GROUPS / controllers / group for group in (own, *own.parents))
