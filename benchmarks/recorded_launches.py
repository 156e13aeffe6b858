"""Launches of the kernels as a GPU's driver would get them, on a machine that has none.

Tensors on the CPU stand for those of a GPU: nothing is computed. The benchmark of the host's part of a call and the
tests that hold its launches to Triton's own share this.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import triton.compiler
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from normscope.runtime import launches
from normscope.swaps.kernels import choice, launch, loops

CAPABILITY, LANES = 90, 32
MULTIPROCESSORS = 132
KERNELS = (loops.forward, loops.backward, loops.add_slots)


@dataclass(frozen=True)
class Recorded:
    """Launch of a compiled kernel; tensors are recorded as the addresses of their memory."""

    kernel: str
    grid: tuple[int, int, int]
    stream: int
    function: int
    arguments: tuple[Any, ...]
    hooked: bool


class Driver:
    """Driver that records launches while ``noting`` is set, and compiled kernels."""

    def __init__(self) -> None:
        self.device, self.stream = -1, 2**40  # a tensor on the CPU has device -1; streams are addresses
        self.launches: list[Recorded] = []
        self.compiled: list[Compiled] = []
        self.noting = True
        self.launcher_cls, self.utils = self.launcher, self

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream + 0  # a new object each time, as from C

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, LANES)

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, ...]:
        return id(name), id(binary), 32, 0, 1024

    def unload_module(self, module: int) -> None:
        pass

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232_448}

    def launcher(self, source: Any, metadata: object) -> Any:
        """Return what Triton calls to launch one compiled kernel."""
        name = source.fn.__name__

        def launched(x: int, y: int, z: int, stream: int, function: int, packed: object, *rest: Any) -> None:
            if self.noting:
                _, before, after, *arguments = rest
                places = tuple(each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments)
                called = [hook for hook in (before, after) if hook is not None and hook.calls]
                for hook in called:
                    hook(None)
                self.launches.append(Recorded(name, (x, y, z), stream, function, places, bool(called)))

        return launched


class Compiled:
    """Stand-in for Triton's record of a compiled kernel, without machine code."""

    numbers = itertools.count(2**40)  # functions are addresses

    def __init__(self, source: Any, target: GPUTarget, options: dict[str, Any], **_: object) -> None:
        self.source, self.function = source, next(self.numbers)
        self.packed_metadata = (options["num_warps"], 1, 0)
        self._run: Any = None
        driver.active.compiled.append(self)

    @property
    def run(self) -> Any:
        if self._run is None:
            self._run = driver.active.launcher_cls(self.source, None)
        return self._run

    def launch_metadata(self, grid: tuple[int, ...], stream: int, *arguments: object) -> None:
        return None


@contextlib.contextmanager
def recorded(compiling: bool = False, kernels: Sequence[Any] = KERNELS) -> Iterator[Driver]:
    """Launch kernels by a driver that records them, if ``NORMSCOPE_KERNELS=triton`` asks for kernels.

    Args:
        compiling: whether Triton compiles them, for sm_90.
        kernels: those that are launched.
    """
    own = Driver()
    with contextlib.ExitStack() as stack:
        active = "_active" if hasattr(driver, "_active") else "active"  # Triton 3.4 has no _active
        stack.enter_context(mock.patch.object(driver, active, own))  # the last to go: kernels are unloaded by it
        if not compiling:
            stack.enter_context(mock.patch.object(triton.compiler, "compile", Compiled))
        for kernel in kernels:
            stack.enter_context(mock.patch.object(kernel, "device_caches", defaultdict(kernel.create_binder)))
        stack.enter_context(mock.patch.object(launches, "_plans", {}))
        stack.enter_context(mock.patch.object(choice, "why_not_on", lambda device: ""))
        stack.enter_context(mock.patch.object(launch, "multiprocessors", lambda device: MULTIPROCESSORS))
        yield own
