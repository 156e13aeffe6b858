"""The module's true output, recomputed from our y, its weight and its bias."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from normscope.errors import ModelError
from normscope.pairs.kinds import NormKind

# In float32 a norm rounds x − mean, the variance's root, two products and a sum: about 8 units in the last place of
# the largest term; four times that. In half precision the result, and in some modules what the weight multiplies, is
# rounded once more: half a unit each, and twice that. Modules that compute in half precision themselves round the
# variance, its root and each product too: twice that again, and x and the mean before one is taken from the other.
_FLOAT32_UNITS = 32
_HALF_UNITS = 2
_OWN_PRECISION_UNITS = 4
# Activations are steeper than one in places (hardswish: 1.5), and what they give is rounded again.
_ACTIVATION = 2


@torch.no_grad()
def excess(kind: NormKind, module: nn.Module, x: Tensor, output: Tensor, *, at_most: int | None = None) -> float:
    """Return the largest difference between the module's output and ours, as a multiple of what rounding explains.

    Args:
        kind: how the module is thought to normalize.
        module: the norm.
        x: its input.
        output: its true output.
        at_most: compare about as many tokens, evenly over all; tokens that are groups are all compared.
    """
    if output.shape != x.shape:
        return math.inf
    rows, true = kind.rows(module, x), kind.rows(module, output)
    if at_most is not None and kind.groups is None:
        step = max(1, len(rows) // at_most)
        rows, true = rows[::step], true[::step]
    rows, true = rows.float(), true.float()
    y, rstd = kind.normalize(module, rows, kind.eps_of(module, x.dtype))
    ours = kind.output(module, y)
    bias = kind.affine(module, torch.zeros_like(y))
    weight = kind.affine(module, torch.ones_like(y)) - bias
    unit, offset = torch.finfo(torch.float32).eps, (rows * rstd - y).abs()  # of the mean, in units of σ
    # A mean far off zero costs digits of x − mean, and twice as many of a variance that is computed in one pass.
    allowed = _FLOAT32_UNITS * unit * (weight.abs() * (1 + y.abs() + offset) + bias.abs())
    allowed += unit * weight.abs() * y.abs() * offset.square()
    coarsest = max(torch.finfo(dtype).eps for dtype in (x.dtype, output.dtype))
    if coarsest > unit:
        allowed += _HALF_UNITS * coarsest * ((weight * y).abs() + bias.abs())
        allowed += torch.finfo(output.dtype).smallest_normal * coarsest  # below which float16 has no digits left
        if kind.own_precision:
            allowed += _OWN_PRECISION_UNITS * coarsest * weight.abs() * (y.abs() + offset)
    if kind.activation is not None:
        allowed *= _ACTIVATION
    ratio = (ours - true).abs() / allowed.clamp_min(torch.finfo(torch.float32).tiny)
    finite = ratio[torch.isfinite(rows).all(-1)]
    return float(finite.max()) if finite.numel() else 0.0


def check(kind: NormKind, name: str, module: nn.Module, x: Tensor, output: Tensor) -> None:
    """Raise ModelError where the output of the site ``name`` is not what ``kind`` makes of its input."""
    times = excess(kind, module, x, output)
    if not times <= 1:
        raise ModelError(
            f"Verification failed at {name} ({kind.name}, input {tuple(x.shape)} {x.dtype}): the module's output "
            f"differs from weight · y + bias by {times:.3g} times what rounding explains. Its axes, eps or affine "
            "step are not what the table of norms says; normscope.register_norm corrects them."
        )
