"""Least squares of y ≈ A·f(αx + s) by variable projection: given α and s, A is linear; log α and s are searched.

Many problems are solved at once, each from several starts on a grid, by Newton's method within a trust region.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normscope.curves.known import Curve
from normscope.fits.nodes import Batched, Nodes, dot

_GRID_POINTS_A_DECADE = 5
_GRID_POINTS_AT_KINKS = 32  # a kink just beyond the farthest pairs makes a far narrower minimum than a bend
_STEEPEST = 1e3  # α times the smallest |x| that counts, at which curves are step functions
_SMALLEST_COUNTS = 1e-3  # share of the pairs below the smallest |x| that counts
_FLAT = 1e-9  # of Σy²: if no α explains more than another by that, x has no spread to identify it
_STARTS = 5  # of a problem, of which the coarse nodes leave one or two
_RIVAL = 1e-2  # of Σ(y − ȳ)²: of minima on the coarse nodes that differ less, any may be the least on all nodes
_SAME = 0.05  # in log α and s: of two minima on the coarse nodes
_BEND = 1e-3  # a bend has to save this share of the squared error of the curve's limits
_EXACT = 1e-12  # of Σ(y − ȳ)²: a limit that leaves less is the curve
_CENTRES = (0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98)  # quantiles of x to start the centre of a shifted curve at
_VALUES_AT_ONCE = 2**18  # fit into a core's cache
_DIFFERENCE = 1e-4  # in log α or s, of the difference quotients of gradients
_CLOSE = 1e-7  # in log α and s: a step that leaves nothing to gain
_ROUGHLY = 1e-2  # in log α and s: Newton's last step if only the squared error matters
_OVERSHOT = 0.25  # share of the slope that is left behind a minimum, where Newton's method converges slowly
_ROUNDING = 1e-15  # of Σ w y²: near a minimum only the slope of the error shows which way is down
_STEPS = 80
_DEPARTS = 2e-4  # relative departure of a curve from its limit at the origin, at the smallest α tried


@dataclass(frozen=True)
class Solutions(Batched):
    """A, α > 0 and s of least squared error, each ``(problems,)``.

    ``unbent`` is true if the pairs do not reach the curve's bend: its limit for small α, for most curves a line, fits
    as well, so A and α are not identified separately. ``converged`` is false if α reached an end of its range, or if
    the error does not depend on α.
    """

    amplitude: Tensor
    alpha: Tensor
    shift: Tensor
    unbent: Tensor
    converged: Tensor

    def predicted(self, curve: Curve, x: Tensor) -> Tensor:
        """A·f(αx + s) at x, ``(problems, nodes)``."""
        return self.amplitude[:, None] * curve.function(self.alpha[:, None] * x + self.shift[:, None])

    def derivative(self, curve: Curve, x: Tensor) -> Tensor:
        """A·α·f′(αx + s) at x, likewise."""
        slope = curve.derivative(self.alpha[:, None] * x + self.shift[:, None])
        return (self.amplitude * self.alpha)[:, None] * slope


@dataclass(frozen=True)
class Evaluation(Batched):
    """An objective at one theta per problem."""

    theta: Tensor  # log α and s, (problems, 2)
    amplitude: Tensor  # the best A there, (problems,)
    residual: Tensor  # Σ w (y − A·f(αx + s))² over all pairs, likewise
    gradient: Tensor  # of the residual by theta, (problems, 2); zero by s if s is not searched

    def where(self, condition: Tensor, alternative: Evaluation) -> Evaluation:
        """Select this evaluation where the condition is true, bool ``(problems,)``, and otherwise the alternative."""
        pairs = zip(vars(self).values(), vars(alternative).values(), strict=True)
        return Evaluation(*(torch.where(condition.view(-1, *[1] * (a.ndim - 1)), a, b) for a, b in pairs))

    def put(self, problems: Tensor, evaluation: Evaluation) -> None:
        """Overwrite the rows of some problems."""
        for rows, new in zip(vars(self).values(), vars(evaluation).values(), strict=True):
            rows[problems] = new

    def solutions(self, unbent: Tensor, converged: Tensor) -> Solutions:
        alpha, shift = self.theta[:, 0].exp(), self.theta[:, 1]
        return Solutions(self.amplitude, alpha, shift, unbent, converged)


@dataclass(frozen=True)
class Objective:
    """Squared error of one curve at several problems, as a function of theta: log α and s, ``(problems, 2)``."""

    nodes: Nodes
    curve: Curve
    fixed_amplitude: Tensor | None = None  # of each problem, float64 (problems,); None if A is free
    fixed_alpha: Tensor | None = None  # likewise
    shifted: bool = False  # s is free; otherwise it is zero

    @functools.cached_property
    def alpha(self) -> Tensor | None:
        """α of each problem if it is not searched: fixed, or one as it has no effect."""
        without_effect = self.fixed_alpha is None and unbent_until(self.curve) == math.inf
        return torch.ones(len(self.nodes), dtype=torch.float64) if without_effect else self.fixed_alpha

    @property
    def free(self) -> list[int]:
        """Columns of theta that are searched."""
        return [column for column, is_free in enumerate((self.alpha is None, self.shifted)) if is_free]

    @property
    def spacing(self) -> float:
        """Step in log α of the grid of starts."""
        return math.log(10) / (_GRID_POINTS_AT_KINKS if self.curve.kinks else _GRID_POINTS_A_DECADE)

    @functools.cached_property
    def explainable(self) -> Tensor:
        """Σ w y² at the nodes, ``(problems,)``."""
        return dot(self.nodes.weight * self.nodes.y, self.nodes.y)

    def of(self, problems: Tensor, nodes: Nodes | None = None) -> Objective:
        """Select problems by their numbers, with repetitions; with other nodes than their own if there are any."""
        fixed = (self.fixed_amplitude, self.fixed_alpha)
        amplitude, alpha = (None if values is None else values.index_select(0, problems) for values in fixed)
        nodes = self.nodes.of(problems) if nodes is None else nodes
        return Objective(nodes, self.curve, amplitude, alpha, self.shifted)

    def on(self, nodes: Nodes) -> Objective:
        """Replace the nodes by n variants of the first problem, n of the next, and so on."""
        problems = torch.arange(len(self.nodes))
        return self.of(problems.repeat_interleave(len(nodes) // len(self.nodes)), nodes)

    def amplitude(self, products: Tensor, squares: Tensor, alpha: Tensor) -> Tensor:
        """Return the fixed or the best A from Σ w·f·y, Σ w·f² and α, each ``(problems, …)``."""
        if self.curve.amplitude_is_inverse_scale:
            return 1 / alpha
        if self.fixed_amplitude is not None:
            return self.fixed_amplitude.reshape(-1, *[1] * (alpha.ndim - 1)).expand(alpha.shape)
        return products / torch.where(squares > 0, squares, torch.inf)

    def errors(self, theta: Tensor) -> Tensor:
        """Squared error at the nodes, ``(problems, thetas)``, for many theta per problem, ``(problems, thetas, 2)``."""
        alpha = theta[..., 0].exp()
        scaled = alpha[..., None] * self.nodes.x[:, None]
        values = self.curve.function(scaled + theta[..., 1:] if self.shifted else scaled)
        # With the vector on the left, torch's batched product takes a fifth of the time.
        products = ((self.nodes.weight * self.nodes.y)[:, None] @ values.mT)[:, 0]
        squares = (self.nodes.weight[:, None] @ values.square().mT)[:, 0]
        amplitude = self.amplitude(products, squares, alpha)
        return self.explainable[:, None] - amplitude * (2 * products - amplitude * squares)

    def at(self, theta: Tensor) -> Evaluation:
        """Evaluate squared error over all pairs, and its gradient, at one theta per problem, ``(problems, 2)``."""
        alpha = theta[:, 0].exp()
        x, y, weight = self.nodes.split(alpha, theta[:, 1], self.curve.kinks)
        scaled = alpha[:, None] * x
        u = scaled + theta[:, 1:] if self.shifted else scaled
        values = self.curve.function(u)
        weighted = weight * values
        amplitude = self.amplitude(dot(weighted, y), dot(weighted, values), alpha)
        off = y - amplitude[:, None] * values
        weighted = weight * off
        residual = dot(weighted, off) + self.nodes.scatter.sum(-1)
        # At the best A the error is stationary in A: α and s move f alone.
        moved = weighted * self.curve.derivative(u)
        by_shift = moved.sum(-1) if self.shifted else torch.zeros_like(alpha)
        gradient = -2 * amplitude[:, None] * torch.stack([dot(moved, scaled), by_shift], -1)
        if self.curve.amplitude_is_inverse_scale:
            gradient[:, 0] += 2 * amplitude * dot(weighted, values)
        return Evaluation(theta, amplitude, residual, gradient)


@functools.lru_cache
def unbent_until(curve: Curve) -> float:
    """u up to which α only scales f(αx) − f(0), to 2e-4: f is its tangent, or bends alike at every scale, as u³ does.

    >>> from normscope.curves.known import CURVES
    >>> [round(unbent_until(CURVES[name]), 3) for name in ("tanh", "cubsign", "linear")]
    [0.012, 0.028, inf]
    """
    u, origin = torch.logspace(-8, 2, 401, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    both = torch.stack([u, -u])
    rise = curve.function(both) - curve.function(origin)
    if curve.linear_at_origin:
        limit = curve.derivative(origin) * both
    else:  # the ratio of neighbouring values stays that of the first two
        limit = rise[:, :1] * (rise[0, 1] / rise[0, 0]) ** torch.arange(len(u))
    departs = ~((rise - limit).abs() <= _DEPARTS * limit.abs()).all(0)
    if not departs.any():
        return math.inf
    first = int(departs.nonzero()[0, 0])
    return float(u[max(first - 1, 0)]) / 2  # the nodes of the farthest pairs may lie beyond them


def least_squares(objective: Objective, coarse: Nodes) -> Solutions:
    """Fit one curve to several problems, at any scale of their x and y, which need some spread.

    ``coarse`` contains far fewer nodes for the same pairs, for a first look.
    """
    return _solutions(objective, *_searched(objective, objective.on(coarse)))


def _searched(objective: Objective, first_look: Objective) -> tuple[Evaluation, Tensor, Tensor]:
    """Find the least of the minima about the starts of a grid; also return the bounds of log α."""
    low, high = _range(first_look)
    problem, starts = _starts(first_look, low, high)
    ended = _minimum(objective.of(problem), starts, low[problem], high[problem], _CLOSE)
    order = _least_first(problem, ended)
    return ended.of(order[torch.searchsorted(problem[order], torch.arange(len(low)))]), low, high


def _least_first(problem: Tensor, ended: Evaluation) -> Tensor:
    """Order of evaluations problem by problem, the least residual first."""
    order = ended.residual.nan_to_num(torch.inf).argsort(stable=True)
    return order[problem[order].argsort(stable=True)]


def refined(objective: Objective, near: Solutions, rough: Nodes) -> Solutions:
    """Fit one curve to nearly the same pairs as other problems, beginning at their solutions.

    With kinks another minimum may be the least: a search for α alone starts anew on fewer nodes.
    """
    start = torch.stack([near.alpha.log(), near.shift], -1)
    ended, is_unbent = objective.at(start), near.unbent & (objective.alpha is None)
    unbent, bends = (mask.nonzero()[:, 0] for mask in (is_unbent, ~is_unbent))
    if len(unbent):  # a line remains a line, of another slope and offset
        ended.put(unbent, _unbent(objective.of(unbent), ended.of(unbent), start[unbent, 0]))
    if len(bends):
        bent, start = objective.of(bends), start[bends]
        low, high = (start[:, 0] + side * math.log(_STEEPEST) for side in (-1, 1))
        if objective.curve.kinks and len(objective.free) < 2:
            least, _, _ = _searched(bent, objective.on(rough).of(bends))
        else:
            least = _minimum(bent, start, low, high, _CLOSE)
        ended.put(bends, least)
    return ended.solutions(near.unbent, near.converged)


def roughly(coarse: Objective, nodes: Nodes) -> Solutions:
    """Fit one curve to several variants of each problem, so that the squared error is right to a millionth.

    ``nodes`` contains n variants of the first problem of ``coarse``, n of the next, and so on. A solution per variant
    is returned, without a test of whether α is identified.
    """
    never = torch.zeros(len(nodes), dtype=torch.bool)
    low, high = _range(coarse)
    problem, starts = _starts(coarse, low, high)
    best = torch.searchsorted(problem, torch.arange(len(low)))  # the start of least error comes first
    variant = torch.arange(len(low)).repeat_interleave(len(nodes) // len(low))
    start, low, high = starts[best][variant], low[variant], high[variant]
    ended = _minimum(coarse.on(nodes), start, low, high, _ROUGHLY)
    return ended.solutions(never, ~never)


def _range(coarse: Objective) -> tuple[Tensor, Tensor]:
    """Bounds of log α, ``(problems,)``: from a curve that does not bend over all x to a step function."""
    nodes = coarse.nodes
    if coarse.alpha is not None:
        return coarse.alpha.log(), coarse.alpha.log()
    counts = nodes.weight > 0
    middle = _quantiles(nodes, nodes.x, (0.5,)) if coarse.shifted else 0
    magnitude = (nodes.x - middle).abs()
    reach = torch.where(counts, magnitude, 0.0).amax(-1)
    smallest = _quantiles(nodes, magnitude, (_SMALLEST_COUNTS,))[:, 0]
    least = torch.where(counts & (magnitude > 0), magnitude, torch.inf).amin(-1)
    low = (unbent_until(coarse.curve) / reach).log()
    high = (_STEEPEST / torch.maximum(smallest, least)).log()
    return low, torch.maximum(high, low + math.log(_STEEPEST))


def _quantiles(nodes: Nodes, values: Tensor, shares: tuple[float, ...]) -> Tensor:
    """Weighted quantiles of values at the nodes: ``(problems, shares)``."""
    ordered, order = values.sort(-1)
    weight = nodes.weight.gather(-1, order).cumsum(-1)
    targets = torch.tensor(shares, dtype=torch.float64) * weight[:, -1:]
    at = torch.searchsorted(weight, targets).clamp_max(values.shape[-1] - 1)
    return ordered.gather(-1, at)


def _starts(coarse: Objective, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Find minima of nearly the least error on the coarse nodes: problems ``(starts,)``, theta ``(starts, 2)``.

    Each problem's least comes first. Newton's method finds them from the lowest points of a grid of α and centres, and
    from the best line: only its centre hardly matters, so that on the grid it precedes better bends.
    """
    # The steps do not depend on the other problems of the batch; the last one, to the end of the range, may be shorter.
    step = coarse.spacing
    steps = torch.arange(1 + math.ceil(float((high - low).max()) / step), dtype=torch.float64) * step
    log_alpha = torch.minimum(low[:, None] + steps, high[:, None])
    beyond = low[:, None] + steps - step >= high[:, None]
    beyond[:, 0] = False
    centres = torch.zeros(len(low), 1, dtype=torch.float64)
    if coarse.shifted:
        inside = _quantiles(coarse.nodes, coarse.nodes.x, _CENTRES)
        first, last = inside[:, :1], inside[:, -1:]
        centres = torch.cat([centres, inside, 2 * first - last, 2 * last - first], -1)
    shift = 0.0 - log_alpha[:, None].exp() * centres[..., None]  # and not −0, which reads as a shift
    theta = torch.stack([log_alpha[:, None].expand_as(shift), shift], -1).flatten(1, 2)
    at_once = max(1, _VALUES_AT_ONCE // (theta.shape[1] * coarse.nodes.x.shape[1]))
    numbers = torch.arange(len(low))
    chunks = (numbers[first : first + at_once] for first in range(0, len(low), at_once))
    errors = torch.cat([coarse.of(chunk).errors(theta[chunk]) for chunk in chunks]).view(shift.shape)
    errors = errors.where(~beyond[:, None], torch.inf)
    edge = torch.full_like(errors[..., :1], torch.inf)
    beside = torch.cat([edge, errors, edge], -1)
    before, after = beside[..., :-2] - errors, beside[..., 2:] - errors
    lowest = (before > 0) & (after >= 0) & ((before + after).isfinite() | (coarse.alpha is not None))
    lowest_between = torch.nan_to_num((before - after) / (2 * (before + after))).clamp(-0.5, 0.5).flatten(1)
    errors = errors.flatten(1)
    lowest = lowest.flatten(1).scatter(1, errors.argmin(-1, keepdim=True), True)
    chosen = torch.where(lowest, errors, torch.inf).topk(min(_STARTS, errors.shape[1]), largest=False)
    problem, rank = (chosen.values < torch.inf).nonzero().unbind(-1)
    at = chosen.indices[problem, rank]
    # The lowest point of the parabola through a minimum and the two points beside it.
    start = theta[problem, at]
    start = _with_centre_of(start, start[:, 0] + step * lowest_between[problem, at])
    ended = _minimum(coarse.of(problem), start, low[problem], high[problem], _ROUGHLY)
    order = _least_first(problem, ended)
    problem, ended = problem[order], ended.of(order)
    least = ended.residual[torch.searchsorted(problem, problem)]
    rivals = ~(ended.residual > least + _RIVAL * coarse.nodes.total[problem])
    rivals[1:] &= ~((problem.diff() == 0) & (ended.theta.diff(dim=0).abs() < _SAME).all(-1))
    return problem[rivals], ended.theta[rivals]


def _minimum(objective: Objective, start: Tensor, low: Tensor, high: Tensor, close: float) -> Evaluation:
    """Find the minimum about each start, with log α in [low, high], to ``close`` in log α and s."""
    if not objective.free:
        return objective.at(start)
    is_line = unbent_until(objective.curve) == math.inf and objective.curve.linear_at_origin
    if is_line and objective.fixed_amplitude is None and objective.alpha is not None:
        return objective.at(torch.stack([low, 0.0 - low.exp() * _zero_of_line(objective.nodes)], -1))
    ended = objective.at(start.clone())
    todo = torch.arange(len(start))
    remaining, here, radius = objective, ended, torch.full_like(low, objective.spacing)
    for _ in range(_STEPS):
        step = _newton(remaining, here)
        length = step.norm(dim=-1)
        step = step * (radius / length.clamp_min(radius))[:, None]
        there = here.theta + step
        there = remaining.at(_with_centre_of(there, there[:, 0].clamp(low[todo], high[todo])))
        step = there.theta - here.theta
        better = there.residual <= here.residual + _ROUNDING * remaining.explainable
        length = step.norm(dim=-1)
        # Where the curvature jumps, Newton's steps go back and forth across the jump; the secant's do not.
        before, after = dot(here.gradient, step).abs(), dot(there.gradient, step)
        secant = length * after / (after + before)
        longer = torch.where(after > _OVERSHOT * before, secant, torch.maximum(radius, 2 * length))
        radius = torch.where(better, longer, length / 4)
        here = there.where(better, here)
        ended.put(todo, here)
        going = length > close
        if not going.any():
            break
        if not going.all():
            active = going.nonzero()[:, 0]
            todo, radius, remaining, here = todo[active], radius[active], remaining.of(active), here.of(active)
    return ended


def _newton(objective: Objective, here: Evaluation) -> Tensor:
    """Newton's step ``(problems, 2)``, downhill also where the error is concave."""
    step, free, h = torch.zeros_like(here.theta), objective.free, _DIFFERENCE
    beside = [objective.at(here.theta + h * torch.eye(2, dtype=torch.float64)[column]).gradient for column in free]
    bend = torch.stack([(gradient - here.gradient)[:, free] / h for gradient in beside], -1)
    slope = here.gradient[:, free]
    values, vectors = torch.linalg.eigh(torch.nan_to_num((bend + bend.mT) / 2))
    values = values.abs().clamp_min(1e-300)
    along = (vectors.mT @ torch.nan_to_num(slope)[..., None])[..., 0] / values
    step[:, free] = -(vectors @ along[..., None])[..., 0]
    return torch.nan_to_num(step)


def _solutions(objective: Objective, ended: Evaluation, low: Tensor, high: Tensor) -> Solutions:
    """Solutions, with a mark if the curve's limit for small or large α does as well: A and α are not identified."""
    never = torch.zeros_like(low, dtype=torch.bool)
    finite = ended.amplitude.isfinite() & ended.residual.isfinite()
    if objective.alpha is not None:
        return ended.solutions(never | (objective.fixed_alpha is None), finite)
    unbent = _unbent(objective, ended, low)
    step = objective.at(_with_centre_of(ended.theta, high))
    # If they differ by rounding alone, x has no spread to identify α.
    identified = torch.maximum(unbent.residual, step.residual) - ended.residual > _FLAT * objective.explainable
    bends = (step.residual - ended.residual > _BEND * step.residual) & finite
    is_unbent = unbent.residual - ended.residual < _BEND * unbent.residual
    is_unbent |= unbent.residual < _EXACT * objective.nodes.total
    curve = objective.curve
    if objective.fixed_amplitude is not None or curve.amplitude_is_inverse_scale or not curve.zero_at_origin:
        return ended.solutions(never, identified & bends & ~is_unbent)  # A and α do not both only scale the limit
    return unbent.where(is_unbent, ended).solutions(is_unbent, identified & (bends | is_unbent))


def _with_centre_of(theta: Tensor, log_alpha: Tensor) -> Tensor:
    """Theta for another α, with u = 0 at the same x."""
    return torch.stack([log_alpha, theta[..., 1] * (log_alpha - theta[..., 0]).exp()], -1)


def _unbent(objective: Objective, ended: Evaluation, low: Tensor) -> Evaluation:
    if not objective.shifted:
        return objective.at(torch.stack([low, torch.zeros_like(low)], -1))
    theta = _with_centre_of(ended.theta, low)
    if not objective.curve.zero_at_origin:  # a constant
        return objective.at(theta)
    if not objective.curve.linear_at_origin:
        fixed = replace(objective, fixed_alpha=low.exp())
        return _minimum(fixed, theta, low, low, _CLOSE)
    zero = _zero_of_line(objective.nodes)
    farthest = torch.maximum((-low).exp() * unbent_until(objective.curve), zero.abs())
    alpha = unbent_until(objective.curve) / farthest / 2
    return objective.at(torch.stack([alpha.log(), 0.0 - alpha * zero], -1))


def _zero_of_line(nodes: Nodes) -> Tensor:
    """Return x at which the regression line is 0, ``(problems,)``: far from all pairs, a search would not reach it."""
    total = nodes.weight.sum(-1)
    mean_x, mean_y = (dot(nodes.weight, values) / total for values in (nodes.x, nodes.y))
    x = nodes.x - mean_x[:, None]
    slope = dot(nodes.weight * x, nodes.y) / dot(nodes.weight * x, x)
    return torch.nan_to_num(mean_x - mean_y / slope, posinf=0.0, neginf=0.0)
