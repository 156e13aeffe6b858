"""Launches of kernels: by Triton the first time, and by what Triton told the driver then at calls that are alike.

A capture calls the same kernels at every norm of every batch. What takes the host long is the same each time: to work
the launches out, and Triton's binding of some thirty arguments. A plan keeps all of it but the addresses of tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor
from triton.knobs import compilation as _COMPILATION
from triton.knobs import runtime as _RUNTIME
from triton.runtime import driver

LIMIT = 256  # plans that are kept; of more, as ever new shapes make, the oldest goes
_ALIGNED = 16  # bytes: a kernel is compiled for tensors that begin at a multiple of so many, or for others
_UNKNOWN = object()
_NO_HOOKS = (None, None, None)  # what they are told, the one before a launch, the one after it


@dataclass(frozen=True)
class KernelCall:
    """One kernel with its grid and arguments.

    Attributes:
        kernel: whose arguments are tensors, then numbers, then what it is compiled with.
        grid: programs along each axis.
        numbers: by name, in their order.
        constants: what it is compiled with, by name, in their order.
        options: for Triton.
    """

    kernel: Any
    grid: tuple[int, ...]
    numbers: Mapping[str, int]
    constants: Mapping[str, Any]
    options: Mapping[str, int] = field(default_factory=dict)

    @property
    def tensors(self) -> list[str]:
        """Names of its tensors."""
        names = list(self.kernel.arg_names)
        return names[: len(names) - len(self.numbers) - len(self.constants)]


@dataclass(frozen=True)
class ToldLaunch:
    """What a driver is told at a launch, but for stream and addresses.

    Attributes:
        launcher: what tells it.
        before: the three axes of the grid.
        between: behind the stream: the function, Triton's metadata, and that there are no hooks.
        tensors: names of those whose addresses follow.
        behind: numbers and constants.
        compiled: Triton's record of the kernel, without which it would be unloaded.
    """

    launcher: Callable[..., object]
    before: tuple[int, ...]
    between: tuple[object, ...]
    tensors: tuple[str, ...]
    behind: tuple[object, ...]
    compiled: object


_plans: dict[Hashable, tuple[ToldLaunch, ...] | None] = {}  # None where the way in which Triton launches is not known
_planning = threading.Lock()


def launched(
    kind: Hashable,
    memory: dict[str, Tensor],
    room: Mapping[str, tuple[torch.dtype, int]],
    launches: Callable[[], Iterable[KernelCall]],
) -> None:
    """Launch kernels on the current device and stream, one after the other.

    Args:
        kind: all that the launches depend on, tensors' dtypes and devices among it.
        memory: tensors by the names of the kernels' arguments.
        room: dtype and number of elements of tensors that the kernels fill for one another alone.
        launches: says which.
    """
    begins, nbytes = _places(room)
    slab = torch.empty(nbytes, dtype=torch.uint8, device=memory["rows"].device)
    steps: Any = None
    addresses: dict[str, int] = {}
    if not _watched():
        addresses |= {name: tensor.data_ptr() for name, tensor in memory.items()}
        if any(address % _ALIGNED for address in addresses.values()):
            kind = (kind, *(address % _ALIGNED == 0 for address in addresses.values()))
        steps = _plans.get(kind, _UNKNOWN)
    if steps is None:
        for launch in launches():
            _by_triton(launch, memory | _tensors(slab, room, begins))
        return
    if steps is _UNKNOWN:
        with _planning:
            told = [_planned(launch, memory | _tensors(slab, room, begins)) for launch in launches()]
            _plans[kind] = None if None in told else tuple(step for step in told if step is not None)
            while len(_plans) > LIMIT:
                del _plans[next(iter(_plans))]
        return
    base, active = slab.data_ptr(), driver.active
    addresses |= {name: base + begin for name, begin in begins.items()}
    stream = active.get_current_stream(active.get_current_device())
    for step in steps:
        step.launcher(*step.before, stream, *step.between, *[addresses[name] for name in step.tensors], *step.behind)


def _places(room: Mapping[str, tuple[torch.dtype, int]]) -> tuple[dict[str, int], int]:
    """Return at which byte each tensor begins, and how many there are."""
    begins, end = {}, 0
    for name, (dtype, number) in room.items():
        begins[name] = end
        end += -(-number * dtype.itemsize // _ALIGNED) * _ALIGNED
    return begins, end


def _tensors(slab: Tensor, room: Mapping[str, tuple[torch.dtype, int]], begins: Mapping[str, int]) -> dict[str, Tensor]:
    """Cut a slab into tensors."""
    return {
        name: slab[begins[name] : begins[name] + number * dtype.itemsize].view(dtype)
        for name, (dtype, number) in room.items()
    }


def _by_triton(launch: KernelCall, memory: Mapping[str, Tensor]) -> None:
    own = {name: memory[name] for name in launch.tensors}
    launch.kernel[launch.grid](**own, **launch.numbers, **launch.constants, **launch.options)


def _planned(launch: KernelCall, memory: Mapping[str, Tensor]) -> ToldLaunch | None:
    """Launch in Triton's way, and return what tells the driver the same; None where that way is not the known one."""
    own = {name: memory[name] for name in launch.tensors}
    behind = (*launch.numbers.values(), *launch.constants.values())
    compiled: Any = None
    if isinstance(launch.kernel, triton.JITFunction):
        compiled = launch.kernel.warmup(*own.values(), *behind, grid=launch.grid, **launch.options)
    if not hasattr(compiled, "_run"):
        _by_triton(launch, memory)
        return None
    launcher: Any = compiled.run
    told: list[tuple[object, ...]] = []

    def noting(*given: object) -> object:
        told.append(given)
        return launcher(*given)

    compiled._run = noting
    try:
        _by_triton(launch, memory)
    finally:
        compiled._run = launcher
    function, metadata = getattr(compiled, "function", None), getattr(compiled, "packed_metadata", None)
    before, between = (*launch.grid, 1, 1)[:3], (function, metadata, *_NO_HOOKS)
    stream = driver.active.get_current_stream(driver.active.get_current_device())
    expected = (*before, stream, function, metadata, ..., ..., ..., *own.values(), *behind)
    known = len(told) == 1 and len(told[0]) == len(expected) and all(map(_is, told[0], expected))
    return ToldLaunch(launcher, before, between, tuple(own), behind, compiled) if known else None


def _is(given: object, expected: object) -> bool:
    """Whether Triton gave what was expected; of hooks anything is."""
    return expected is ... or given is expected or (not isinstance(given, Tensor) and given == expected)


def _watched() -> bool:
    """Whether Triton does more at a launch than to launch: calls hooks, or compiles in another way."""
    hooks = (_RUNTIME.launch_enter_hook, _RUNTIME.launch_exit_hook)
    return bool(
        any(hook is not None and getattr(hook, "calls", True) for hook in hooks)  # a chain of hooks, or one
        or getattr(_RUNTIME, "add_stages_inspection_hook", None)
        or _RUNTIME.debug
        or getattr(_COMPILATION, "instrumentation_mode", "")
    )
