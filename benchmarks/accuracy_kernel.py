"""The kernels' functions elementwise, for accuracy.py: on a GPU, or with TRITON_INTERPRET=1 in the interpreter.

The variable is read on import.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from normscope.swaps.kernels.loops import derivative, function

BLOCK = {"cpu": 65_536, "cuda": 1024}


@triton.jit
def apply(
    u, y, n, slope: tl.constexpr, curve: tl.constexpr, precise: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0) * block + tl.arange(0, block)
    own = tl.load(u + at, mask=at < n, other=0)
    if slope:
        tl.store(y + at, derivative(own, curve), mask=at < n)
    else:
        tl.store(y + at, function(own, curve, precise), mask=at < n)


def run(u: NDArray[np.float32], of: str, curve: str, precise: bool, device: str = "cpu") -> NDArray[np.float32]:
    """Return f(u) or f′(u)."""
    given = torch.from_numpy(np.ascontiguousarray(u)).to(device)
    y, block = torch.full_like(given, torch.nan), BLOCK[device]
    with np.errstate(over="ignore"):  # u² is infinite where erf is ±1
        apply[(triton.cdiv(len(u), block),)](given, y, len(u), of == "f′", curve, precise, block)
    return y.cpu().numpy()
