"""Triton on this machine: cached launches of its kernels, and the reason where it can launch none.

The host needs longer for a kernel call than the GPU does for small tensors: grids and strides are computed, and Triton
binds some thirty arguments. The first call of a kind goes through Triton, and its arguments to the driver are kept.
Later calls of that kind only fill in stream and tensor addresses.
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
_BEFORE_ARGUMENTS = 9  # of a launcher: the grid, stream, function and metadata, launch metadata and two hooks


@dataclass(frozen=True)
class KernelCall:
    """One kernel with its grid, arguments and compiler options."""

    kernel: Any  # a Triton kernel, whose tensor arguments come first
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]  # None for an absent tensor; :func:`launch` adds tensors and scratch that are left out
    options: Mapping[str, int | None] = field(default_factory=dict)

    def run(self) -> None:
        self.kernel[self.grid](**self.arguments, **self.options)


class Scratch:
    """Memory through which the kernels of one call pass results, in one allocation."""

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
            self.tensors[name] = slab[self.begins[name] :][: number * dtype.itemsize].view(dtype)
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
        tensors: the tensors by the kernels' argument names; the first is not None.
        calls: yields the kernel calls; called only if no plan is cached for this kind, or none can be followed.
    """
    first: Any = next(iter(tensors.values()))
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
            launched = [_launched(complete(call, tensors, scratch), tensors, scratch) for call in calls(scratch)]
            steps = tuple(step for step in launched if step is not None)
            whole = steps and len(steps) == len(launched)
            _plans[kind] = _Plan(steps, scratch.nbytes, scratch.begins) if whole else None
            while len(_plans) > LIMIT:
                del _plans[next(iter(_plans))]


def plan_of(kind: Hashable) -> Any:
    """Return the plan for calls of this kind, for :func:`follow`; None if they have to go through :func:`launch`."""
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


def _launched(call: KernelCall, tensors: Mapping[str, Tensor | None], scratch: Scratch) -> _Step | None:
    """Launch through Triton; return the equivalent step, or None if this Triton launches in another way."""
    import triton

    compiled: Any = None
    if isinstance(call.kernel, triton.JITFunction):
        compiled = call.kernel.warmup(grid=call.grid, **call.arguments, **call.options)
    if not hasattr(compiled, "_run"):
        call.run()
        return None
    launcher: Any = compiled.run
    passed: list[tuple[Any, ...]] = []

    def recording(*received: object) -> object:
        passed.append(received)
        return launcher(*received)

    compiled._run = recording
    try:
        call.run()
    finally:
        compiled._run = launcher
    if len(passed) != 1 or len(passed[0]) != _BEFORE_ARGUMENTS + len(call.arguments):
        return None
    grid, (_, function, metadata) = passed[0][:3], passed[0][3:6]  # then launch metadata and hooks, absent from a plan
    arguments = passed[0][_BEFORE_ARGUMENTS:]
    pointers = list(itertools.takewhile(lambda value: value is None or isinstance(value, Tensor), arguments))
    names = tuple(call.arguments)[: len(pointers)]
    available = {**tensors, **scratch.tensors}
    if any(available.get(name) is not tensor for name, tensor in zip(names, pointers, strict=True)):
        return None  # the kernel received a copy
    return _Step(launcher, grid, (function, metadata, None, None, None), names, arguments[len(pointers) :], compiled)


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
    compiler = os.environ.get("CC", "")
    if not (shutil.which(compiler) if compiler else shutil.which("gcc") or shutil.which("clang")):
        cause = f"there is no C compiler {compiler}".rstrip()
    elif not (header := Path(sysconfig.get_config_var("INCLUDEPY")) / "Python.h").exists():
        cause = f"there is no {header}"
    else:
        try:
            _ = _triton()[2].active  # builds the module through which Triton calls the driver, or finds it in the cache
            return ""
        except (AssertionError, ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
            cause = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(". ")
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
