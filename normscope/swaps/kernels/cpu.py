"""Point-wise functions on the CPU in one pass over memory: what the compiled loop takes, and the call.

Rows are shared out among as many threads as torch has been given. No element depends on another, nor on its place, so
that the result is the same to the bit whatever their number.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from normscope.errors import UsageError
from normscope.pairs.sums.binning.compiled_loops import threads
from normscope.swaps.kernels import cpu_loop
from normscope.swaps.kernels.choice import unseen
from normscope.swaps.kernels.eager import Parameters

_A_THREAD = 2**17  # elements, at least: below it, a further thread costs more than it saves
_CURVES = {"tanh": cpu_loop.TANH, "isru": cpu_loop.ISRU, "erf": cpu_loop.ERF}
_NONE = np.full(1, -0.0, np.float32)  # a shift or bias that there is not


def pointwise(x: Tensor, parameters: Parameters, curve: str, behind: int) -> Tensor | None:
    """Return weight · f(αx + s) + bias, computed in float32; None to leave it to plain torch.

    The loop takes contiguous float32 and bfloat16 tensors if no gradient is needed and no dispatch mode, tensor
    subclass or functorch transform is active. Plain torch reports parameters that do not fit. ``curve`` is ``tanh``,
    ``isru`` or ``erf``; ``behind`` counts the axes of x after the channels.

    >>> one = torch.ones(1)
    >>> with torch.no_grad():
    ...     pointwise(torch.tensor([[0.75, -3e38]]), Parameters(one, None, torch.tensor([1.0, 2.0]), None), "isru", 0)
    tensor([[ 0.6000, -2.0000]])
    """
    parts = (parameters.alpha, parameters.shift, parameters.weight, parameters.bias)
    if not x.numel() or not x.is_contiguous() or not unseen(x, *parts):
        return None
    if torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in (x, *parts)):
        return None
    try:
        _, end = parameters.channel_axes(x, behind)
    except UsageError:
        return None
    y = torch.empty_like(x)
    inner = math.prod(x.shape[end:])
    numbers = [_NONE if part is None else _numbers(part) for part in parts]
    lines = x.numel() // (inner if inner > 1 else max(part.size for part in numbers))
    arguments = (_CURVES[curve], _elements(x), _elements(y), *numbers, inner)
    number = min(torch.get_num_threads(), x.numel() // _A_THREAD, lines)
    if number < 2:
        cpu_loop.fill(*arguments, 0, lines)
        return y
    first, *shares = itertools.pairwise(lines * share // number for share in range(number + 1))
    waiting = [threads().submit(cpu_loop.fill, *arguments, *share) for share in shares]
    cpu_loop.fill(*arguments, *first)
    for done in waiting:
        done.result()
    return y


def _elements(tensor: Tensor) -> NDArray[np.float32 | np.int16]:
    bits = tensor.detach().view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor.detach()
    return bits.numpy().reshape(-1)


def _numbers(part: Tensor) -> NDArray[np.float32]:
    return part.detach().float().numpy().reshape(-1)
