"""The module's true output, recomputed from the summed y and the module's weight and bias."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from normscope.errors import ModelError
from normscope.pairs.norms.kinds import NormKind, OfModule

# Ours is float64 but for what it begins with: x, weights and running statistics as float32 holds them. It is the module
# that rounds: in float32 the mean and the variance (sums of d numbers, in some order), x − mean, a root, two products
# and a sum. The norms of the libraries come to 2 units in the last place of the largest term, whatever d is up to 10⁶;
# other machines sum and take roots otherwise: eight times that. In half precision the result, and in some modules what
# the weight multiplies, is rounded once more: half a unit each, and twice that. Modules that compute in half precision
# themselves round the variance, its root and each product too: twice that again, and x and the mean before one is taken
# from the other.
_FLOAT32_UNITS = 16
_HALF_UNITS = 2
_OWN_PRECISION_UNITS = 4
_WIDER = {torch.float16: "bfloat16 or float32"}  # holds what the dtype does not; otherwise only float64 does
# Activations are steeper than one in places (hardswish: 1.5), and what they give is rounded again.
_ACTIVATION = 2


@torch.no_grad()
def excess(kind: NormKind, module: nn.Module, x: Tensor, output: Tensor, *, at_most: int | None = None) -> float:
    """Return the largest difference between the module's output and ours, as a multiple of what rounding explains.

    ``at_most`` limits the number of tokens that are compared, evenly over all, unless tokens are groups.
    """
    if output.shape != x.shape:
        return math.inf
    rows, true = kind.rows(module, x), kind.rows(module, output)
    if at_most is not None and kind.groups is None:
        step = max(1, len(rows) // at_most)
        rows, true = rows[::step], true[::step]
    times = _times(kind, module, rows, true).nan_to_num(nan=math.inf)
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
    """Raise ModelError if a site's output differs from what ``kind`` makes of its input by more than rounding.

    ``batch_axis`` of ``x`` and ``output`` counts samples. ``valid``, bool ``(tokens,)`` with samples one after the
    other, marks the tokens that are no padding; None stands for all.
    """
    where = f"{name} ({kind.name}, input {tuple(x.shape)} {x.dtype})"
    furthest, too_large = math.inf, None
    if output.shape == x.shape:
        rows, true = (kind.rows(module, tensor, batch_axis) for tensor in (x, output))
        times = _times(kind, module, rows, true)
        differs = times > 1 if valid is None else (times > 1) & valid.to(times.device)
        if not bool(differs.any()):
            return
        furthest, too_large = float(times[differs].max()), overflow(kind, rows[differs.to(rows.device)])
    if too_large is not None:
        wider = _WIDER.get(_computed_in(kind, x.dtype), "float64")
        raise ModelError(
            f"Verification failed at {where}: {too_large}. The module's output is then not what its formula gives, and "
            "the y that is summed, in float64, not the network's own. Find out what makes the input so large, run the "
            f"network in {wider}, or leave the site out (layers)."
        )
    raise ModelError(
        f"Verification failed at {where}: the module's output differs from weight · y + bias by {furthest:.3g} times "
        "what rounding explains. Its axes, eps or affine step are not what the table of norms says; "
        "normscope.register_norm corrects them."
    )


def overflow(kind: NormKind, rows: Tensor) -> str | None:
    """A clause that says that all of these tokens are too large for the module that normalizes them.

    Args:
        kind: how the module normalizes.
        rows: the elements of its tokens, ``(tokens, d)``.

    Returns:
        None where there is no token, or one that is not too large.
    """
    dtype = _computed_in(kind, rows.dtype)
    most = torch.finfo(dtype).max
    # torch adds numbers in half precision up in float32.
    most_in_sum = torch.finfo(torch.promote_types(dtype, torch.float32)).max
    squares = (rows.cpu() if rows.device.type == "mps" else rows).double().square()
    single, summed = squares > most, squares.sum(1) > most_in_sum
    if not len(rows) or not bool((single.any(1) | summed).all()):
        return None
    what = "its square passes" if bool(single.any()) else f"with d = {rows.shape[1]} the sum of squares passes"
    name = str(dtype).removeprefix("torch.")
    return f"the largest |x| is {rows.abs().max():.3g}, and {what} what {name} holds ({most:.2g}), in which it computes"


def overflow_in(kind: NormKind, module: nn.Module, x: Tensor, output: Tensor) -> str | None:
    """A clause that says that all tokens with another output than ours are too large for the module, if they are."""
    rows = kind.rows(module, x)
    return overflow(kind, rows[(_times(kind, module, rows, kind.rows(module, output)) > 1).to(rows.device)])


def _computed_in(kind: NormKind, dtype: torch.dtype) -> torch.dtype:
    return dtype if kind.own_precision or dtype == torch.float64 else torch.float32


def _times(kind: NormKind, module: nn.Module, rows: Tensor, true: Tensor) -> Tensor:
    """How far a module's output is from ours, as a multiple of what rounding explains.

    Args:
        kind: how the module is thought to normalize.
        module: the norm.
        rows: its input, ``(tokens, d)``.
        true: its true output, likewise.

    Returns:
        The largest of each token: float64 ``(tokens,)``. 0 of a token that holds a NaN or an infinity; NaN of one whose
        line is not finite, which is in no sum either.
    """
    dtypes, on = (rows.dtype, true.dtype), rows.device
    if on.type == "mps":  # which has no float64
        rows, true = rows.cpu(), true.cpu()
    lines = kind.lines(module, rows, kind.eps_of(module, dtypes[0]))
    y = lines.y(rows)
    shift, rstd = lines.of(rows.float().double(), slice(None))
    offset = (shift * rstd).abs()  # of the mean, in units of σ

    def made_by(step: OfModule, y: Tensor) -> Tensor:
        return step(module, y.to(on, torch.float32) if on.type == "mps" else y).to(y)

    ours, bias = made_by(kind.output, y), made_by(kind.affine, torch.zeros_like(y))
    weight = made_by(kind.affine, torch.ones_like(y)) - bias
    allowed = _allowed(kind, dtypes, y, offset, weight, bias)
    ratio = (ours - true.double()).abs() / allowed.clamp_min(torch.finfo(torch.float32).tiny)
    times = ratio.nan_to_num(nan=math.inf).amax(1) if ratio.numel() else ratio.sum(1)
    in_sums = torch.isfinite(shift * rstd).flatten()
    return times.where(in_sums, math.nan).where(torch.isfinite(rows.float()).all(1), 0.0)


def _allowed(
    kind: NormKind, dtypes: tuple[torch.dtype, torch.dtype], y: Tensor, offset: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    """Return what rounding explains of each element's difference: ``(tokens, d)``, as all but ``offset``."""
    unit = torch.finfo(torch.float32).eps
    # A mean far off zero costs digits of x − mean, and twice as many of a variance that is computed in one pass.
    allowed = _FLOAT32_UNITS * unit * (weight.abs() * (1 + y.abs() + offset) + bias.abs())
    allowed += unit * weight.abs() * y.abs() * offset.square()
    coarsest = max(torch.finfo(dtype).eps for dtype in dtypes)
    if coarsest > unit:
        allowed += _HALF_UNITS * coarsest * ((weight * y).abs() + bias.abs())
        allowed += torch.finfo(dtypes[1]).smallest_normal * coarsest  # below which float16 has no digits left
        if kind.own_precision:
            allowed += _OWN_PRECISION_UNITS * coarsest * weight.abs() * (y.abs() + offset)
    return allowed if kind.activation is None else _ACTIVATION * allowed
