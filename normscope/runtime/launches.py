"""Triton on this machine: whether it can launch kernels, and cached launches of them.

A kernel call needs much more time on the host than on the GPU for small tensors: grids and strides are computed, and
Triton binds some thirty arguments. The first call of a kind goes through Triton, and what Triton passed to the driver
is kept. Later calls of that kind only fill in stream and tensor addresses.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import shutil
import subprocess
import sysconfig
import threading
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normscope.errors import UsageError

VARIABLE = "NORMSCOPE_KERNELS"
EAGER, TRITON = "eager", "triton"
LIMIT = 1024  # plans that are kept; the oldest is dropped first
ALIGNED = 16  # bytes: Triton compiles a kernel anew for tensors that do not start at a multiple of this
_LINE_OF_CACHE = 128  # bytes: scratch tensors start at multiples of this
_UNKNOWN = object()


@dataclass(frozen=True)
class KernelCall:
    """One kernel with its grid, arguments and compiler options."""

    kernel: Any  # a Triton kernel, whose tensor arguments come first
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]  # None for an absent tensor; :func:`launch` adds tensors and scratch that are left out
    options: Mapping[str, int | None] = field(default_factory=dict)

    def run(self) -> None:
        """Launch the kernel on the current device and stream, or in Triton's interpreter."""
        self.kernel[self.grid](**self.arguments, **self.options)

    def compiled(self) -> Any:
        """Compile the kernel, or look it up in Triton's cache."""
        return self.kernel.warmup(grid=self.grid, **self.arguments, **self.options)


class Scratch:
    """Memory that kernels of one call fill for one another, in one allocation."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.nbytes = device, 0
        self.begins: dict[str, int] = {}
        self.tensors: dict[str, Tensor] = {}

    def __call__(self, sizes: Mapping[str, tuple[torch.dtype, int]]) -> dict[str, Tensor]:
        """Return uninitialized tensors with the given dtypes and numbers of elements; once per call."""
        for name, (dtype, number) in sizes.items():
            self.begins[name] = self.nbytes
            self.nbytes += -(-number * dtype.itemsize // _LINE_OF_CACHE) * _LINE_OF_CACHE
        slab = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        for name, (dtype, number) in sizes.items():
            begin = self.begins[name]
            self.tensors[name] = slab[begin : begin + number * dtype.itemsize].view(dtype)
        return self.tensors


Calls = Callable[[Scratch], Iterable[KernelCall]]


@dataclass(frozen=True, slots=True)
class _Step:
    """Arguments of a launch apart from stream and addresses."""

    launcher: Callable[..., object]
    grid: tuple[int, ...]
    between: tuple[object, ...]  # after the stream: the function, Triton's metadata and no hooks
    tensors: tuple[str, ...]  # names of the arguments that come next, by address
    behind: tuple[object, ...]  # numbers and constants
    compiled: object  # Triton's record of the kernel, which unloads the kernel when it is deleted


@dataclass(frozen=True, slots=True)
class _Plan:
    steps: tuple[_Step, ...]
    nbytes: int  # of scratch memory
    begins: dict[str, int]


_plans: dict[Hashable, _Plan | None] = {}  # None for calls that always go through Triton
_planning = threading.RLock()


def launch(kind: Hashable, tensors: Mapping[str, Tensor | None], calls: Calls) -> None:
    """Launch the kernels of one call, in order, on the device of the first tensor and its current stream.

    Args:
        kind: everything that grids, numbers, constants and the choice of kernels depend on, :func:`alignment` of the
            tensors included.
        tensors: the tensors by the kernels' argument names.
        calls: yields the kernel calls; asked only for the first call of a kind, or where Triton has to be.
    """
    first = next(iter(tensors.values()))
    assert first is not None  # noqa: S101 - the input of a call
    plan: Any = None if _watched() else _plans.get(kind, _UNKNOWN)
    if plan is not None and plan is not _UNKNOWN:
        follow(plan, first, tensors)
        return
    scratch = Scratch(first.device)
    with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
        if plan is None:
            for call in calls(scratch):
                complete(call, tensors, scratch).run()
            return
        with _planning:
            steps = [_planned(complete(call, tensors, scratch), tensors, scratch) for call in calls(scratch)]
            planned = tuple(step for step in steps if step is not None)
            whole = planned and len(planned) == len(steps)
            _plans[kind] = _Plan(planned, scratch.nbytes, scratch.begins) if whole else None
            while len(_plans) > LIMIT:
                del _plans[next(iter(_plans))]


def plan_of(kind: Hashable) -> Any:
    """Return the plan for calls of this kind, for :func:`follow`; None where Triton has to launch them."""
    plan = _plans.get(kind)
    return None if plan is None or _watched() else plan


def alignment(*tensors: Tensor | None) -> tuple[bool, ...]:
    """Return which tensors are aligned as Triton's compiler prefers; empty if all are.

    >>> alignment(torch.zeros(4)), alignment(torch.zeros(4)[1:], None)
    ((), (False, True))
    """
    together = 0
    for tensor in tensors:
        if tensor is not None:
            together |= tensor.data_ptr()
    if together % ALIGNED == 0:
        return ()
    return tuple(tensor is None or tensor.data_ptr() % ALIGNED == 0 for tensor in tensors)


def follow(plan: Any, first: Tensor, tensors: Mapping[str, Tensor | None]) -> None:
    """Launch the kernels of a plan on the device of a tensor; ``tensors`` are as in :func:`launch`."""
    active, device = _triton()[2].active, first.get_device()
    if active.get_current_device() != device:
        with torch.cuda.device(device):
            follow(plan, first, tensors)
        return
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None}
    if plan.nbytes:
        slab = first.new_empty(plan.nbytes, dtype=torch.uint8)
        base = slab.data_ptr()
        for name, begin in plan.begins.items():
            addresses[name] = base + begin
    stream = active.get_current_stream(device)
    for step in plan.steps:
        places = [addresses.get(name) for name in step.tensors]
        step.launcher(*step.grid, stream, *step.between, *places, *step.behind)


def complete(call: KernelCall, tensors: Mapping[str, Tensor | None], scratch: Scratch) -> KernelCall:
    """Return a call with all tensors among its arguments, in the kernel's order."""
    given = {**tensors, **scratch.tensors, **call.arguments}
    return dataclasses.replace(call, arguments={name: given.get(name) for name in call.kernel.arg_names})


def _planned(call: KernelCall, tensors: Mapping[str, Tensor | None], scratch: Scratch) -> _Step | None:
    """Launch through Triton; return the equivalent step, or None if this Triton launches in another way."""
    import triton

    compiled: Any = call.compiled() if isinstance(call.kernel, triton.JITFunction) else None
    if not hasattr(compiled, "_run"):
        call.run()
        return None
    launcher: Any = compiled.run
    passed: list[tuple[object, ...]] = []

    def recording(*received: object) -> object:
        passed.append(received)
        return launcher(*received)

    compiled._run = recording
    try:
        call.run()
    finally:
        compiled._run = launcher
    is_pointer = [value is None or isinstance(value, Tensor) for value in call.arguments.values()]
    pointers = dict(itertools.islice(call.arguments.items(), (*is_pointer, False).index(False)))
    behind = tuple(call.arguments.values())[len(pointers) :]
    function, metadata = getattr(compiled, "function", None), getattr(compiled, "packed_metadata", None)
    grid, active = (*call.grid, 1, 1)[:3], _triton()[2].active
    stream = active.get_current_stream(active.get_current_device())
    hooks = (..., ..., ...)  # launch metadata, and the hooks before and after a launch
    expected = (*grid, stream, function, metadata, *hooks, *pointers.values(), *behind)
    if len(passed) != 1 or len(passed[0]) != len(expected) or not all(map(_equal, passed[0], expected)):
        return None
    given = {**tensors, **scratch.tensors}
    if any(given.get(name) is not tensor for name, tensor in pointers.items()):
        return None  # a copy was launched on
    return _Step(launcher, grid, (function, metadata, None, None, None), tuple(pointers), behind, compiled)


def _equal(passed: object, expected: object) -> bool:
    return expected is ... or passed is expected or (not isinstance(passed, Tensor) and passed == expected)


@functools.cache
def _triton() -> tuple[Any, Any, Any]:
    from triton.knobs import compilation, runtime
    from triton.runtime import driver

    return runtime, compilation, driver


def _watched() -> bool:
    """True if Triton does more at a launch than to launch: call hooks, or compile in another way."""
    runtime, compilation, _ = _triton()
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook  # each a chain of hooks, a hook or None
    return bool(
        (enter is not None and getattr(enter, "calls", True))
        or (leave is not None and getattr(leave, "calls", True))
        or getattr(runtime, "add_stages_inspection_hook", None)
        or runtime.debug
        or getattr(compilation, "instrumentation_mode", "")
    )


def why_no_launcher() -> str:
    """Return why Triton cannot launch a kernel on this machine's GPU, with a warning once per process; empty if it can.

    Triton builds a small C module for each kernel, which requires a compiler and Python's headers. There is no warning
    if ``NORMSCOPE_KERNELS`` is set.
    """
    reason = _tried()
    if reason and not os.environ.get(VARIABLE):
        _warn(reason)
    return reason


def cannot_be_met(reason: str) -> UsageError:
    """Return the error for ``NORMSCOPE_KERNELS=triton`` where there are no kernels.

    >>> str(cannot_be_met("Triton is not installed"))
    'NORMSCOPE_KERNELS=triton cannot be met: Triton is not installed. Unset it, or say NORMSCOPE_KERNELS=eager.'
    """
    return UsageError(f"{VARIABLE}={TRITON} cannot be met: {reason}. Unset it, or say {VARIABLE}={EAGER}.")


@functools.cache
def _tried() -> str:
    header = Path(sysconfig.get_config_var("INCLUDEPY")) / "Python.h"
    named = os.environ.get("CC")
    if not (shutil.which(named) if named else shutil.which("gcc") or shutil.which("clang")):
        cause = f"there is no C compiler{f' {named}' if named else ''}"
    elif not header.exists():
        cause = f"there is no {header}"
    else:
        try:
            _ = _triton()[2].active  # builds what Triton calls the driver by, or finds it in the cache
            return ""
        except subprocess.CalledProcessError as error:
            cause = f"{Path(error.cmd[0]).name} ended with status {error.returncode}"
        except (AssertionError, ImportError, OSError, RuntimeError) as error:
            cause = str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".") or type(error).__name__
    return (
        f"Triton cannot build what launches its kernels ({cause}), which requires a C compiler and Python's headers "
        "(on Debian and Ubuntu: gcc and python3-dev)"
    )


@functools.cache
def _warn(reason: str) -> None:
    warnings.warn(
        f"{reason}: plain torch computes in their place, and more slowly. {VARIABLE}={EAGER} leaves this warning out.",
        stacklevel=3,
    )
