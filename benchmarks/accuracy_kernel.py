"""For accuracy.py: the kernels' functions elementwise, in Triton's interpreter or on a GPU with its instructions.

Whoever wants the interpreter sets TRITON_INTERPRET=1 before this is imported. There instructions can be put off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from unittest import mock

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from normscope.swaps.kernels import loops
from normscope.swaps.kernels.choice import interpreted
from normscope.swaps.kernels.loops import derivative, function, function_beside

BLOCK = {"cpu": 65_536, "cuda": 1024}
BESIDE = "f beside f′"
INSTRUCTIONS = ("_hardware_exp2", "_hardware_reciprocal")


@triton.jit
def apply(
    u, y, n, slope: tl.constexpr, beside: tl.constexpr, curve: tl.constexpr, precise: tl.constexpr,
    portable: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * block + tl.arange(0, block)
    own = tl.load(u + at, mask=at < n, other=0)
    if slope:
        tl.store(y + at, derivative(own, curve, portable), mask=at < n)
    elif beside:
        tl.store(y + at, function_beside(own, curve, precise, True, portable), mask=at < n)
    else:
        tl.store(y + at, function(own, curve, precise, portable), mask=at < n)


def run(
    u: NDArray[np.float32], of: str, curve: str, precise: bool, off: Sequence[float] = (0.0, 0.0), device: str = "cpu"
) -> NDArray[np.float32]:
    """Return f(u), alone or beside f′, or f′(u), with 2^v and 1/v so much off, relative.

    They can be off in the interpreter alone.
    """
    given = torch.from_numpy(np.ascontiguousarray(u)).to(device)
    y, block = torch.full_like(given, torch.nan), BLOCK[device]
    with put_off(off), np.errstate(over="ignore"):  # u² is infinite where erf is ±1
        how = (of == "f′", of == BESIDE, curve, precise, interpreted(), block)
        apply[(triton.cdiv(len(u), block),)](given, y, len(u), *how)
    return y.cpu().numpy()


def put_off(off: Sequence[float]) -> contextlib.AbstractContextManager[object]:
    """Let the instructions of the interpreter be off."""
    if not any(off):
        return contextlib.nullcontext()
    off_by = {name: times(getattr(loops, name), 1 + by) for name, by in zip(INSTRUCTIONS, off, strict=True)}
    return mock.patch.multiple(loops, **off_by)


def times(instruction: Callable[..., tl.tensor], factor: float) -> Callable[..., tl.tensor]:
    """Return an instruction whose result is multiplied."""
    return lambda *values: instruction(*values) * factor
