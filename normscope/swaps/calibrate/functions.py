"""Point-wise functions in closed form: one's parameters from a norm's inputs and outputs, by least squares.

Given α and s, the weight and bias of every channel have a closed form; α and s are then searched along it (variable
projection: G. H. Golub, V. Pereyra, SIAM J. Numer. Anal. 10, 1973).
"""

from __future__ import annotations

import torch
from torch import Tensor

from normscope.swaps.pointwise import PointwiseFunction

_SEARCH_STEPS = 20
_LEAST_REACH = 0.01  # of α·max|x|: a tanh that reaches so far is straight but for 3·10⁻⁵
_LEAST_VARIANCE = 1e-10  # of f over a channel's tokens, as a share of its mean square: less leaves no slope to tell


def least_squares(function: PointwiseFunction, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The parameters of a point-wise function that come nearest to y, searched from its present ones.

    Args:
        function: it stays as it is.
        x: what the norm took: float64 ``(tokens, channels)``.
        y: what it gave.

    Returns:
        Values by parameter name, in the shape and dtype of the function's.

    >>> function = PointwiseFunction("tanh", 2, alpha=0.4)
    >>> x = torch.linspace(-3, 3, 200, dtype=torch.float64).reshape(100, 2)
    >>> found = least_squares(function, x, 2 * torch.tanh(0.7 * x) - 1)
    >>> [round(float(found[name].mean()), 3) for name in ("alpha", "weight", "bias")]
    [0.7, 2.0, -1.0]
    """
    inner = {"alpha": function.alpha, "shift": function.shift}
    free = {
        name: part.detach().double().cpu().flatten().clone().requires_grad_(function.table is None)
        for name, part in inner.items()
        if part is not None
    }
    if function.table is None:
        with torch.enable_grad():
            _search(function, free, x, y)
    with torch.no_grad():
        weight, bias = _projected(function, _of(function, free, x), y)
    solution: dict[str, Tensor] = {**free, "weight": weight, **({} if bias is None else {"bias": bias})}
    parameters = dict(function.named_parameters())
    return {
        name: value.detach().reshape(parameters[name].shape).to(parameters[name]) for name, value in solution.items()
    }


def _search(function: PointwiseFunction, free: dict[str, Tensor], x: Tensor, y: Tensor) -> None:
    """Move α and s downhill, with their best weight and bias; stay where nothing is finite."""
    start = {name: value.detach().clone() for name, value in free.items()}
    size = x.square().mean(0 if free["alpha"].numel() > 1 else None).sqrt().clamp_min(torch.finfo(x.dtype).tiny)
    x = x / size  # so that steps do not depend on the unit of x
    free["alpha"].data.mul_(size)
    search = torch.optim.LBFGS(list(free.values()), max_iter=_SEARCH_STEPS, line_search_fn="strong_wolfe")
    total = y.square().sum().clamp_min(torch.finfo(y.dtype).tiny)

    def loss() -> Tensor:
        search.zero_grad()
        values = _of(function, free, x)
        with torch.no_grad():  # at the minimum over them, their own change does not count
            weight, bias = _projected(function, values.detach(), y)
        left = y - weight * values - (0.0 if bias is None else bias)
        squares = left.square().sum() / total
        squares.backward()  # type: ignore[no-untyped-call]
        return squares

    search.step(loss)  # type: ignore[no-untyped-call]
    if all(bool(value.isfinite().all()) for value in free.values()):
        free["alpha"].data.copy_(_not_all_straight(free["alpha"].detach(), x) / size)
        if function.curve.zero_centred:
            _turn_upwards(free)
    else:
        for name, value in free.items():
            value.data.copy_(start[name])


def _not_all_straight(alpha: Tensor, x: Tensor) -> Tensor:
    """α, large enough that the function leaves its straight part by a trace.

    Where a norm is straight over all tokens, any small α fits as well as any other, with a weight of 1/α: the search
    may end at weights of 10⁵, which half precision does not hold and training does not survive.
    """
    reach = x.abs().amax(0) if alpha.numel() > 1 else x.abs().amax()
    least = torch.where(reach > 0, _LEAST_REACH / reach, 0.0)
    return torch.copysign(torch.maximum(alpha.abs(), least), alpha)


def _turn_upwards(free: dict[str, Tensor]) -> None:
    """Make every α positive: w·f(αx + s) is −w·f(−αx − s), which reads worse.

    One s for several α of both signs leaves them as they are.
    """
    turned = torch.where(free["alpha"] < 0, -1.0, 1.0)
    shift = free.get("shift")
    if shift is not None and shift.numel() != turned.numel():
        if bool((turned != turned[0]).any()):
            return
        turned = turned[0]
    for value in free.values():
        value.data.mul_(turned)


def _of(function: PointwiseFunction, free: dict[str, Tensor], x: Tensor) -> Tensor:
    inside = free["alpha"] * x
    if "shift" in free:
        inside = inside + free["shift"]
    return (function.curve.function if function.table is None else function.table)(inside)


def _projected(function: PointwiseFunction, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
    """The best weight and bias, in closed form: a straight line through (f, y)."""
    old = function.weight.detach().double().cpu().flatten()
    if old.numel() == 1 and f.shape[1] > 1:
        return (f * y).sum().div(f.square().sum().clamp_min(1e-300)).reshape(1), None
    if function.bias is None:
        spread, common, centre = f.square().mean(0), (f * y).mean(0), None
    else:
        centre = f.mean(0)
        spread = (f - centre).square().mean(0)
        common = ((f - centre) * (y - y.mean(0))).mean(0)
    idle = spread <= _LEAST_VARIANCE * f.square().mean(0)
    weight = torch.where(idle, old, common / spread.masked_fill(idle, 1.0))
    return weight, None if centre is None else y.mean(0) - weight * centre
