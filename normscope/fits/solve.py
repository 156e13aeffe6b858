"""Least squares of y ≈ A·f(αx + s) by variable projection: given α and s, A is linear; log α and s are searched.

Many problems are solved at once, each from several starts on a grid, by Newton's method within a trust region.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normscope.fits.curves import Curve
from normscope.fits.nodes import Nodes, dot
from normscope.fits.objective import Constraints, Objective, Point, Solutions, straight_until

_GRID_POINTS_A_DECADE = 5
_GRID_POINTS_AT_KINKS = 32  # a kink that has just passed the farthest pairs is a minimum far narrower than a bend's
_STEEPEST = 1e3  # α times the smallest |x| that counts, at which curves are step functions
_SMALLEST_COUNTS = 1e-3  # of all pairs lie below it
_FLAT = 1e-9  # of Σy²: where no α explains more than another by that, x has no spread to tell them apart
_RIVAL = 0.99  # of the highest maximum on the coarse nodes: one as high as that may be the highest on all nodes
_RIVALS = 3
_BEND = 1e-3  # a curve that saves less than a thousandth of the line's squared error has found no bend
_EXACT = 1e-12  # of Σ(y − ȳ)²: a line that leaves less than that is the curve
_CENTRES = (0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98)  # quantiles of x at which a shifted curve may have its centre
_VALUES_AT_ONCE = 2**18  # which stay in a core's cache
_DIFFERENCE = 1e-4  # in log α or s, of the gradients that give its derivative
_DIFFERENCE_AT_KINKS = 1e-2  # wide enough to pass several nodes, so that a curve's kinks are felt
_RADIUS = 0.3  # about a step of the grid
_CLOSE = 1e-7  # in log α and s: a step after which nothing is left to gain
_ROUNDING = 1e-15  # of Σ w y²: the error near a minimum, where only its slope tells which way is down
_STEPS = 80


def least_squares(nodes: Nodes, coarse: Nodes, curve: Curve, constraints: Constraints | None = None) -> Solutions:
    """Fit one curve to several problems, whatever the scales of their x and y.

    Args:
        nodes: the problems; x and y of each have some spread.
        coarse: far fewer nodes for the same pairs, on which a first look costs little.
        curve: f.
        constraints: by default A and α are free, and s where the curve's own layer learns it.
    """
    objective = Objective(nodes, curve, constraints or Constraints(shifted=curve.shifted))
    low, high = _range(coarse, objective)
    problem, starts = _starts(Objective(coarse, curve, objective.constraints), low, high)
    ended = _descended(objective.of(problem), starts, low[problem], high[problem])
    order = ended.residual.nan_to_num(torch.inf).argsort(stable=True)
    order = order[problem[order].argsort(stable=True)]  # problem by problem, the least residual first
    best = order[torch.searchsorted(problem[order], torch.arange(len(low)))]
    return _told(objective, ended.of(best), low, high)


def refined(nodes: Nodes, curve: Curve, constraints: Constraints, near: Solutions) -> Solutions:
    """Fit one curve to problems of nearly the same pairs as others, from whose solutions the search begins."""
    objective = Objective(nodes, curve, constraints)
    start = torch.stack([near.alpha.log(), near.shift], -1)
    width = math.log(_STEEPEST)
    ended = _descended(objective, start, start[:, 0] - width, start[:, 0] + width)
    # What was straight stays a line, of another slope.
    found = objective.at(start).where(near.straight, ended) if near.straight.any() else ended
    return found.solutions(near.straight, near.converged)


def _range(coarse: Nodes, objective: Objective) -> tuple[Tensor, Tensor]:
    """Bounds of log α, ``(problems,)``: where the curve is straight over all x, and where it is a step at most."""
    if objective.alpha is not None:
        only = torch.full((len(coarse),), math.log(objective.alpha), dtype=torch.float64)
        return only, only
    counts = coarse.weight > 0
    middle = _quantiles(coarse, coarse.x, (0.5,)) if objective.constraints.shifted else 0
    magnitude = (coarse.x - middle).abs()
    reach = torch.where(counts, magnitude, 0.0).amax(-1)
    smallest = _quantiles(coarse, magnitude, (_SMALLEST_COUNTS,))[:, 0]
    least = torch.where(counts & (magnitude > 0), magnitude, torch.inf).amin(-1)
    low = (straight_until(objective.curve) / reach).log()
    high = (_STEEPEST / torch.maximum(smallest, least)).log()
    return low, torch.maximum(high, low + math.log(_STEEPEST))


def _quantiles(nodes: Nodes, values: Tensor, shares: tuple[float, ...]) -> Tensor:
    """Weighted quantiles of values at the nodes: ``(problems, shares)``."""
    ordered, order = values.sort(-1)
    weight = nodes.weight.gather(-1, order).cumsum(-1)
    wanted = torch.tensor(shares, dtype=torch.float64) * weight[:, -1:]
    at = torch.searchsorted(weight, wanted).clamp_max(values.shape[-1] - 1)
    return ordered.gather(-1, at)


def _starts(coarse: Objective, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Look at a grid of α and centres, and return where the error is least, and where else nearly so.

    Returns:
        The numbers of the problems, ``(starts,)``, and theta of each start, ``(starts, 2)``.
    """
    points = 1
    if coarse.alpha is None:
        a_decade = _GRID_POINTS_A_DECADE if coarse.curve.smooth else _GRID_POINTS_AT_KINKS
        points += math.ceil(float((high - low).max()) / math.log(10) * a_decade)
    along = torch.linspace(0, 1, points, dtype=torch.float64)
    log_alpha = low[:, None] + along * (high - low)[:, None]
    centres = torch.zeros(len(low), 1, dtype=torch.float64)
    if coarse.constraints.shifted:
        centres = torch.cat([centres, _quantiles(coarse.nodes, coarse.nodes.x, _CENTRES)], -1)
    shift = 0.0 - log_alpha[:, None].exp() * centres[..., None]  # and not −0, which reads as a shift
    theta = torch.stack([log_alpha[:, None].expand_as(shift), shift], -1).flatten(1, 2)
    at_once = max(1, _VALUES_AT_ONCE // (theta.shape[1] * coarse.nodes.x.shape[1]))
    parts = [torch.arange(first, min(first + at_once, len(low))) for first in range(0, len(low), at_once)]
    errors = torch.cat([coarse.of(part).errors(theta[part]) for part in parts]).view(shift.shape)
    edge = torch.full_like(errors[..., :1], torch.inf)
    beside = torch.cat([edge, errors, edge], -1)
    lowest = (errors < beside[..., :-2]) & (errors <= beside[..., 2:])
    before, after = beside[..., :-2] - errors, beside[..., 2:] - errors
    lowest_between = torch.nan_to_num((before - after) / (2 * (before + after))).clamp(-0.5, 0.5).flatten(1)
    errors, lowest = errors.flatten(1), lowest.flatten(1)
    least, where = errors.min(-1, keepdim=True)
    lowest.scatter_(1, where, True)
    lowest &= errors <= least + (1 - _RIVAL) * (coarse.explainable[:, None] - least).abs()
    chosen = torch.where(lowest, errors, torch.inf).topk(min(_RIVALS, errors.shape[1]), largest=False)
    problem, rank = (chosen.values < torch.inf).nonzero().unbind(-1)
    at = chosen.indices[problem, rank]
    # To the lowest point of the parabola through a minimum and the two points beside it.
    step = lowest_between[problem, at] * ((high - low) / max(points - 1, 1))[problem]
    start = theta[problem, at]
    return problem, _with_centre_of(start, start[:, 0] + step)


def _descended(objective: Objective, start: Tensor, low: Tensor, high: Tensor) -> Point:
    """Follow the squared error downhill from ``start`` to a minimum, with log α in [low, high]."""
    free, ended = objective.free, objective.at(start.clone())
    if not free:
        return ended
    h = _DIFFERENCE if objective.curve.smooth else _DIFFERENCE_AT_KINKS
    todo = torch.arange(len(start))
    own, here, radius = objective, ended, torch.full_like(low, _RADIUS)
    for _ in range(_STEPS):
        step = _newton(own, here, free, h)
        length = step.norm(dim=-1)
        step = step * (radius / length.clamp_min(radius))[:, None]
        step[:, 0] = (here.theta[:, 0] + step[:, 0]).clamp(low[todo], high[todo]) - here.theta[:, 0]
        there = own.at(here.theta + step)
        better = there.residual <= here.residual + _ROUNDING * own.explainable
        taken = step.norm(dim=-1)
        radius = torch.where(better, torch.maximum(radius, 2 * taken), taken / 4)
        here = there.where(better, here)
        ended.put(todo, here)
        going = taken > _CLOSE
        if not going.any():
            break
        if not going.all():
            kept = going.nonzero()[:, 0]
            todo, radius, own = todo[kept], radius[kept], own.of(kept)
            here = here.of(kept)
    return ended


def _newton(objective: Objective, here: Point, free: list[int], h: float) -> Tensor:
    """Return Newton's step, downhill wherever the error bends: ``(problems, 2)``."""
    step = torch.zeros_like(here.theta)
    beside = [objective.at(here.theta + h * torch.eye(2, dtype=torch.float64)[column]).gradient for column in free]
    bend = torch.stack([(gradient - here.gradient)[:, free] / h for gradient in beside], -1)
    slope = here.gradient[:, free]
    values, vectors = torch.linalg.eigh(torch.nan_to_num((bend + bend.mT) / 2))
    values = values.abs().clamp_min(1e-300)
    along = (vectors.mT @ torch.nan_to_num(slope)[..., None])[..., 0] / values
    step[:, free] = -(vectors @ along[..., None])[..., 0]
    return torch.nan_to_num(step)


def _told(objective: Objective, found: Point, low: Tensor, high: Tensor) -> Solutions:
    """Say whether the problems bend, and whether one α does better than others."""
    never = torch.zeros_like(low, dtype=torch.bool)
    finite = found.amplitude.isfinite() & found.residual.isfinite()
    if objective.alpha is not None:
        return found.solutions(never | (objective.constraints.alpha is None), finite)
    ends = [_with_centre_of(found.theta, end) for end in (low, high)]
    line = objective.at(_line(objective, low) if objective.may_be_straight else ends[0])
    step = objective.at(ends[1]).residual - found.residual
    flat = _FLAT * objective.explainable
    told_apart = torch.maximum(line.residual - found.residual, step) > flat
    bends = (step > flat) & finite
    if not objective.may_be_straight:
        above = (found.theta[:, 0] > low + _CLOSE) & (found.residual <= line.residual)
        return found.solutions(never, told_apart & bends & above)
    straight = line.residual - found.residual < _BEND * line.residual
    straight |= line.residual < _EXACT * objective.nodes.total
    return line.where(straight, found).solutions(straight, told_apart & (bends | straight))


def _with_centre_of(theta: Tensor, log_alpha: Tensor) -> Tensor:
    """Another α, with u = 0 at the same x."""
    return torch.stack([log_alpha, theta[:, 1] * (log_alpha - theta[:, 0]).exp()], -1)


def _line(objective: Objective, low: Tensor) -> Tensor:
    """Theta at which the curve is the line of least squares."""
    if not objective.constraints.shifted:
        return torch.stack([low, torch.zeros_like(low)], -1)
    nodes = objective.nodes
    total = nodes.weight.sum(-1)
    mean_x, mean_y = (dot(nodes.weight, values) / total for values in (nodes.x, nodes.y))
    x = nodes.x - mean_x[:, None]
    slope = dot(nodes.weight * x, nodes.y) / dot(nodes.weight * x, x)
    zero = torch.nan_to_num(mean_x - mean_y / slope, posinf=0.0, neginf=0.0)
    farthest = torch.maximum((-low).exp() * straight_until(objective.curve), zero.abs())
    alpha = straight_until(objective.curve) / farthest / 2
    return torch.stack([alpha.log(), -alpha * zero], -1)
