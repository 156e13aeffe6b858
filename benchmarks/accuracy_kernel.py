"""For accuracy.py: the kernels' functions elementwise in Triton's interpreter, its instructions put off if need be."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl

from normscope.swaps.kernels import functions
from normscope.swaps.kernels.functions import derivative, function

BLOCK = 65_536
INSTRUCTIONS = ("_hardware_exp2", "_hardware_reciprocal")


@triton.jit
def apply(u, y, n, slope: tl.constexpr, curve: tl.constexpr, precise: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    own = tl.load(u + at, mask=at < n, other=0)
    if slope:
        tl.store(y + at, derivative(own, curve, True), mask=at < n)
    else:
        tl.store(y + at, function(own, curve, precise, True), mask=at < n)


def run(u: NDArray[np.float32], of: str, curve: str, precise: bool, off: Sequence[float]) -> NDArray[np.float32]:
    """Return f(u) or f′(u), with 2^v and 1/v so much off, relative."""
    put_off = {name: times(getattr(functions, name), 1 + by) for name, by in zip(INSTRUCTIONS, off, strict=True)}
    given = torch.from_numpy(u)
    y = torch.empty_like(given)
    with mock.patch.multiple(functions, **put_off), np.errstate(over="ignore"):  # u² is infinite where erf is ±1
        apply[(triton.cdiv(len(u), BLOCK),)](given, y, len(u), of != "f", curve, precise, BLOCK)
    return y.numpy()


def times(instruction: Callable[..., tl.tensor], factor: float) -> Callable[..., tl.tensor]:
    """Return an instruction whose result is multiplied."""
    return lambda *values: instruction(*values) * factor
