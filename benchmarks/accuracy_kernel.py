"""The kernels' functions elementwise, for accuracy.py: on a GPU, or with TRITON_INTERPRET=1 in the interpreter.

The variable is read on import.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from normscope.swaps.kernels.choice import interpreted
from normscope.swaps.kernels.loops import derivative, function, function_beside

BLOCK = {"cpu": 65_536, "cuda": 1024}
BESIDE = "f beside f′"


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


def run(u: NDArray[np.float32], of: str, curve: str, precise: bool, device: str = "cpu") -> NDArray[np.float32]:
    """Return f(u), alone or beside f′, or f′(u)."""
    given = torch.from_numpy(np.ascontiguousarray(u)).to(device)
    y, block = torch.full_like(given, torch.nan), BLOCK[device]
    with np.errstate(over="ignore"):  # u² is infinite where erf is ±1
        settings = (of == "f′", of == BESIDE, curve, precise, interpreted(), block)
        apply[(triton.cdiv(len(u), block),)](given, y, len(u), *settings)
    return y.cpu().numpy()
