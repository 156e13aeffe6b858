"""Choice between Triton's kernels, the CPU's compiled loop and plain torch for a point-wise function."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch.autograd import forward_ad

from normscope.errors import UsageError, unknown
from normscope.runtime.launches import EAGER, TRITON, VARIABLE, cannot_be_met, why_no_launcher

CURVES = ("tanh", "isru", "erf")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LOOP_FROM = 2**13  # elements: for fewer, plain torch is faster than the call of the loop
_LOOP_DTYPES = (torch.float32, torch.bfloat16)


def by_kernels(curve: str, device: torch.device, dtype: torch.dtype) -> bool:
    """True if Triton's kernels compute a curve for an input on a device in a dtype.

    They compute tanh, isru and erf on CUDA in float32, bfloat16 and float16, if Triton is installed and can build its
    launchers; otherwise plain torch computes, after a warning. torch.compile and torch.export trace plain torch, which
    a compiler fuses with its neighbours. ``NORMSCOPE_KERNELS`` overrides this: ``eager`` selects plain torch
    everywhere, ``triton`` the kernels alone, compiled or not. The straight line is always plain torch, as are
    forward-mode derivatives and transforms of torch.func unless the variable is set. torch.compile recompiles if the
    variable changes, but not if it was unset at first.

    Raises:
        UsageError: if the variable has another value, or asks for kernels that do not exist.

    >>> by_kernels("tanh", torch.device("cpu"), torch.float32)
    False
    """
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", EAGER, TRITON):
        raise UsageError(f"{unknown(VARIABLE, asked, (EAGER, TRITON))} Without it, CUDA has {TRITON}.")
    if asked == EAGER or curve == "linear":
        return False
    if not asked and (device.type != "cuda" or torch.compiler.is_compiling()):
        return False
    why_not = _why_not(curve, device, dtype)
    if asked and why_not:
        raise cannot_be_met(why_not)
    return not why_not


def loop_for(curve: str, device: torch.device, dtype: torch.dtype, elements: int) -> ModuleType | None:
    """Return :mod:`normscope.swaps.kernels.cpu` if its loop computes a curve; None for plain torch.

    The loop computes tanh, isru and erf on the CPU, of at least :data:`LOOP_FROM` elements in float32 or bfloat16, if
    numba works (otherwise there is a warning) and ``NORMSCOPE_KERNELS`` is not set. torch.compile, torch.export and
    torch.jit.trace see plain torch.

    >>> loop_for("softsign", torch.device("cpu"), torch.float32, 10**6)
    """
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() or os.environ.get(VARIABLE, ""):
        return None
    if device.type != "cpu" or elements < LOOP_FROM or curve not in CURVES or dtype not in _LOOP_DTYPES:
        return None
    return _loop()


@functools.cache
def _loop() -> ModuleType | None:
    try:
        return import_module("normscope.swaps.kernels.cpu")
    except ImportError as error:
        warnings.warn(
            f"numba does not work here ({error}): point-wise functions on the CPU are computed in plain torch, and "
            "slowly.",
            stacklevel=4,
        )
        return None


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Context in which plain torch computes every point-wise function.

    >>> with plain_torch():
    ...     by_kernels("tanh", torch.device("cuda"), torch.float32)
    False
    """
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = EAGER
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


def _why_not(curve: str, device: torch.device, dtype: torch.dtype) -> str:
    if curve not in CURVES:
        return f"there is no kernel for the curve {curve}, only for {', '.join(CURVES)}"
    if dtype not in DTYPES:
        return f"no kernel takes an input of {dtype}"
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return "torch.func's transforms and forward-mode derivatives do not go through kernels"
    return why_not_on(device)


def why_not_on(device: torch.device) -> str:
    """Return why no kernel runs on a device; empty if kernels run."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cpu":
        import triton

        where = "the CPU's memory, where only Triton's interpreter runs them (TRITON_INTERPRET=1)"
        return "" if triton.knobs.runtime.interpret else f"the input is in {where}"
    if device.type != "cuda" or torch.version.hip is not None:
        return f"the kernels are written for NVIDIA GPUs, and the input is on {device}"
    if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return f"the GPU has compute capability {'.'.join(map(str, capability))}, and the kernels need 8.0"
    return why_no_launcher()


# torch.compile cannot trace it, and its result is constant. torch.compiler.assume_constant_result sets this attribute,
# but imports the compiler, and Triton with it, even if nothing is compiled.
why_not_on._dynamo_marked_constant = True  # type: ignore[attr-defined]
