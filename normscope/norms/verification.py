"""Verification of a kind of norm: our output against the module's own, within what rounding explains."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from normscope.errors import ModelError
from normscope.norms.kinds import NormKind, OfModule
from normscope.runtime.spread import copied

# We compute in float64 from x, weights and running statistics as float32 stores them; the module rounds.
# In float32 it rounds the mean and the variance (sums of d numbers, in some order), x − mean, a root, two products and
# a sum. The libraries' norms reach 2 units in the last place of the largest term, for any d up to 10⁶; other machines
# sum and take roots differently: eight times that. In half precision the result, and in some modules the factor of the
# weight, is rounded once more: half a unit each, and twice that. Modules that compute in half precision also round the
# variance, its root, each product, x and the mean: twice that again.
_FLOAT32_UNITS = 16
_HALF_UNITS = 2
_OWN_PRECISION_UNITS = 4
_NUDGE = 2.0**-10  # of x, as a share: its effect on a point-wise function tells how rounding of αx shows
# Activations are steeper than one in places (hardswish: 1.5), and their result is rounded again.
_ACTIVATION = 2


@torch.no_grad()
def excess(kind: NormKind, module: nn.Module, x: Tensor, output: Tensor, *, at_most: int | None = None) -> float:
    """Return the largest difference between the module's output and ours, as a multiple of what rounding explains.

    ``at_most`` limits the number of compared tokens, evenly over all, unless tokens are groups.
    """
    if output.shape != x.shape:
        return math.inf
    rows, truth = kind.rows(module, x), kind.rows(module, output)
    if at_most is not None and kind.groups is None:
        step = max(1, len(rows) // at_most)
        rows, truth = rows[::step], truth[::step]
    times = _times(kind, module, rows, truth).nan_to_num(nan=math.inf)
    return float(times.max()) if times.numel() else 0.0


@torch.no_grad()
def check(
    kind: NormKind,
    name: str,
    module: nn.Module,
    x: Tensor,
    output: Tensor,
    *,
    batch_axis: int = 0,
    valid: Tensor | None = None,
) -> None:
    """Raise ModelError if a site's output differs from that of ``kind`` by more than rounding explains.

    ``batch_axis`` of ``x`` and ``output`` counts samples. ``valid``, bool ``(tokens,)`` with one sample after the
    other, is False for padding; None stands for no padding.
    """
    furthest, largest = math.inf, float(x.abs().max()) if x.numel() else 0.0
    if output.shape == x.shape:
        rows, truth = (kind.rows(module, tensor, batch_axis) for tensor in (x, output))
        times = _times(kind, module, rows, truth)
        differs = times > 1 if valid is None else (times > 1) & valid.to(times.device)
        if not bool(differs.any()) or _only_sums_differ(kind, module, x, output):
            return
        furthest, largest = float(times[differs].max()), float(rows[differs.to(rows.device)].abs().max())
    raise ModelError(
        f"Verification failed at {name} ({kind.name}, input {tuple(x.shape)} {x.dtype}): the module's output differs "
        f"from weight · y + bias by {furthest:.3g} times what rounding explains, in tokens of |x| up to {largest:.3g}. "
        "Its axes, eps or affine step are not what the table of norms says, and normscope.register_norm corrects them; "
        "or x overflows in the precision in which the module computes."
    )


def _times(kind: NormKind, module: nn.Module, rows: Tensor, truth: Tensor, n_summed: int = 0) -> Tensor:
    """Return the largest difference of each token from the module's output, as a multiple of rounding error.

    ``rows`` and ``truth`` are input and output. The result is 0 for a token with a NaN or an infinity, and NaN for one
    whose line is not finite, which is not summed either. ``n_summed`` is the number of elements that the module adds up
    one after the other, where that is not accurate.
    """
    dtypes, device = (rows.dtype, truth.dtype), rows.device
    on_mps = device.type == "mps"  # which lacks float64
    rows, truth = (rows.cpu(), truth.cpu()) if on_mps else (rows, truth)
    lines = kind.lines(module, rows, kind.eps_of(module, dtypes[0]))
    y = lines.y(rows)
    shift, rstd = lines.of(rows.float().double(), slice(None))
    if kind.curve is None:
        offset = (shift * rstd).abs()  # of the mean, in units of σ
    else:  # αx is rounded, by a share of itself
        offset = (kind.lines(module, rows.float() * (1 + _NUDGE), 0.0).y(rows) - y).abs() / _NUDGE

    def applied(step: OfModule, y: Tensor) -> Tensor:
        return step(module, y.to(device, torch.float32) if on_mps else y).to(y)

    bias = applied(kind.affine, torch.zeros_like(y))
    weight = applied(kind.affine, torch.ones_like(y)) - bias
    # A mean far from zero costs digits of x − mean, and twice as many of a variance computed in one pass.
    unit = torch.finfo(torch.float32).eps
    allowed = _FLOAT32_UNITS * unit * (weight.abs() * (1 + y.abs() + offset) + bias.abs())
    if kind.curve is None:
        allowed += unit * weight.abs() * y.abs() * offset.square()
    allowed += n_summed * unit * weight.abs() * (1 + y.abs()) * (1 + offset.square())
    coarsest = max(torch.finfo(dtype).eps for dtype in dtypes)
    if coarsest > unit:
        allowed += _HALF_UNITS * coarsest * ((weight * y).abs() + bias.abs())
        allowed += torch.finfo(dtypes[1]).smallest_normal * coarsest  # below which float16 has no digits left
        if kind.own_precision:
            allowed += _OWN_PRECISION_UNITS * coarsest * weight.abs() * (y.abs() + offset)
    if kind.activation is not None:
        allowed *= _ACTIVATION
    ratio = (applied(kind.output, y) - truth.double()).abs() / allowed.clamp_min(torch.finfo(torch.float32).tiny)
    times = ratio.nan_to_num(nan=math.inf).amax(1) if ratio.numel() else ratio.sum(1)
    summed = torch.isfinite(shift * rstd).flatten()
    return times.where(summed, math.nan).where(torch.isfinite(rows.float()).all(1), 0.0)


def _only_sums_differ(kind: NormKind, module: nn.Module, x: Tensor, output: Tensor) -> bool:
    """True if an output has the error of sums over strided positions, while that for contiguous x is ours.

    In channels_last, torch's GroupNorm adds up all n positions of a channel one after the other. Every addition rounds
    the sum so far, by half a unit at most, so that Σx and Σx² are off by n/2 units of Σ|x| and Σx² at most.
    """
    if not kind.over_positions or x.is_contiguous() or x.ndim < 3:
        return False
    contiguous = x.contiguous()
    copy = copied(module).eval()
    if excess(kind, copy, contiguous, copy(contiguous)) > 1:
        return False
    rows, truth = kind.rows(module, x), kind.rows(module, output)
    return not bool((_times(kind, module, rows, truth, x[0, 0].numel()) > 1).any())
