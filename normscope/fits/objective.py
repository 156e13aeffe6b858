"""What is minimized: the squared error of y ≈ A·f(αx + s), as a function of log α and s alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from normscope.fits.curves import Curve
from normscope.fits.nodes import Nodes, dot

_DEPARTS = 2e-4  # share by which a curve departs from its power law at the origin at the smallest α that is tried
_LARGEST_SLOPE = 1e12  # in place of the infinite slope that some curves have at their origin


@dataclass(frozen=True)
class Constraints:
    """What of A, α and s is not searched.

    Attributes:
        amplitude: A of each problem, float64 ``(problems,)``; None where it is free.
        alpha: α of all; None where it is free.
        shifted: whether s is free; otherwise it is zero.
    """

    amplitude: Tensor | None = None
    alpha: float | None = None
    shifted: bool = False

    def of(self, problems: Tensor) -> Constraints:
        """Return those of some of the problems, by their numbers."""
        amplitude = None if self.amplitude is None else self.amplitude.index_select(0, problems)
        return Constraints(amplitude, self.alpha, self.shifted)


@dataclass(frozen=True)
class Solutions:
    """A, α and s of least squared error, each ``(problems,)``.

    Attributes:
        amplitude: A.
        alpha: α, positive.
        shift: s.
        residual: Σ w (y − A·f(αx + s))² over all pairs.
        only_power: the curve's power law at its origin, A·α^p·|x|^p, fits as well, for most curves a straight line: A
            and α mean nothing by themselves, and only that law of least squares, which they make, does.
        converged: False where α ran into an end of its range, or where no α does better than another.
    """

    amplitude: Tensor
    alpha: Tensor
    shift: Tensor
    residual: Tensor
    only_power: Tensor
    converged: Tensor

    def of(self, problems: Tensor) -> Solutions:
        """Return some of them, by their numbers, as often as they are named."""
        return Solutions(**{f.name: getattr(self, f.name).index_select(0, problems) for f in fields(self)})

    def predicted(self, curve: Curve, x: Tensor) -> Tensor:
        """A·f(αx + s) at x, ``(problems, nodes)``."""
        return self.amplitude[:, None] * curve.function(self.alpha[:, None] * x + self.shift[:, None])

    def derivative(self, curve: Curve, x: Tensor) -> Tensor:
        """A·α·f′(αx + s) at x, likewise."""
        slope = curve.derivative(self.alpha[:, None] * x + self.shift[:, None])
        return (self.amplitude * self.alpha)[:, None] * slope


def joined_solutions(parts: Sequence[Solutions]) -> Solutions:
    """Put those of several batches one after the other."""
    return Solutions(**{f.name: torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Solutions)})


@dataclass(frozen=True)
class Point:
    """What an objective is at one theta a problem.

    Attributes:
        theta: log α and s, ``(problems, 2)``.
        amplitude: the best A there, ``(problems,)``.
        residual: Σ w (y − A·f(αx + s))² over all pairs, likewise.
        gradient: of that by theta, ``(problems, 2)``.
    """

    theta: Tensor
    amplitude: Tensor
    residual: Tensor
    gradient: Tensor

    def of(self, problems: Tensor) -> Point:
        return Point(*(values[problems] for values in vars(self).values()))

    def where(self, here: Tensor, other: Point) -> Point:
        """Take this point for some of the problems, bool ``(problems,)``, and another for the rest."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Point(*(torch.where(here.view(-1, *[1] * (own.ndim - 1)), own, its) for own, its in pairs))

    def put(self, problems: Tensor, other: Point) -> None:
        """Replace this point by another at some of the problems, by their numbers."""
        for own, its in zip(vars(self).values(), vars(other).values(), strict=True):
            own[problems] = its

    def solutions(self, only_power: Tensor, converged: Tensor) -> Solutions:
        alpha, shift = self.theta[:, 0].exp(), self.theta[:, 1]
        return Solutions(self.amplitude, alpha, shift, self.residual, only_power, converged)


@dataclass(frozen=True)
class Objective:
    """Squared error of one curve at several problems, as a function of theta: log α and s, ``(problems, 2)``.

    Attributes:
        nodes: the problems.
        curve: f.
        constraints: what is not searched.
    """

    nodes: Nodes
    curve: Curve
    constraints: Constraints

    @functools.cached_property
    def alpha(self) -> float | None:
        """α where it is not searched: given, or without any effect."""
        given = self.constraints.alpha
        return 1.0 if given is None and power_law_until(self.curve) == math.inf else given

    @property
    def free(self) -> list[int]:
        """Which columns of theta are searched."""
        return [column for column, is_free in enumerate((self.alpha is None, self.constraints.shifted)) if is_free]

    @property
    def rugged(self) -> bool:
        """Whether the error may have many minima of nearly the same depth, as kinks pass points in two directions.

        Which of them is found hangs on the last digit of a sum, and so on what else is summed beside it.
        """
        return not self.curve.smooth and len(self.free) > 1

    @property
    def alone(self) -> Iterator[Objective]:
        """Each problem by itself, on its own points alone: the same to the last digit whatever it was beside."""
        for number in range(len(self.nodes)):
            one = self.of(torch.tensor([number]))
            yield replace(one, nodes=one.nodes.filled())

    @property
    def may_be_only_power(self) -> bool:
        """Whether A and α go over into one number, A·α^p, in the limit α → 0."""
        free = self.constraints.amplitude is None and self.constraints.alpha is None
        powered = self.curve.zero_centred and math.isfinite(self.curve.power_at_origin)
        return free and powered and not self.curve.amplitude_is_inverse_scale

    @functools.cached_property
    def explainable(self) -> Tensor:
        """Σ w y² at the nodes, ``(problems,)``."""
        return dot(self.nodes.weight * self.nodes.y, self.nodes.y)

    def of(self, problems: Tensor) -> Objective:
        return Objective(self.nodes.of(problems), self.curve, self.constraints.of(problems))

    def amplitude(self, products: Tensor, squares: Tensor, alpha: Tensor) -> Tensor:
        """A: given, bound to α, or the best one, of Σ w·f·y, Σ w·f² and α, each ``(problems, …)``."""
        if self.curve.amplitude_is_inverse_scale:
            return 1 / alpha
        if self.constraints.amplitude is not None:
            given = self.constraints.amplitude
            return given.reshape(-1, *[1] * (alpha.ndim - 1)).expand(alpha.shape)
        return products / torch.where(squares > 0, squares, torch.inf)

    def errors(self, theta: Tensor) -> Tensor:
        """Squared error at the nodes for many theta a problem, ``(problems, thetas, 2)``: ``(problems, thetas)``."""
        alpha = theta[..., 0].exp()
        values = self.curve.function(alpha[..., None] * self.nodes.x[:, None] + theta[..., 1:])
        products = (values @ (self.nodes.weight * self.nodes.y)[..., None])[..., 0]
        squares = (values.square() @ self.nodes.weight[..., None])[..., 0]
        amplitude = self.amplitude(products, squares, alpha)
        return self.explainable[:, None] - amplitude * (2 * products - amplitude * squares)

    def at(self, theta: Tensor) -> Point:
        """Squared error over all pairs, and its gradient, at one theta a problem, ``(problems, 2)``."""
        alpha, x, y = theta[:, 0].exp(), self.nodes.x, self.nodes.y
        scaled = alpha[:, None] * x
        u = scaled + theta[:, 1:]
        values = self.curve.function(u)
        weighted = self.nodes.weight * values
        amplitude = self.amplitude(dot(weighted, y), dot(weighted, values), alpha)
        off = y - amplitude[:, None] * values
        weighted = self.nodes.weight * off
        residual = dot(weighted, off) + self.nodes.scatter.sum(-1)
        # Where A is the best one, the error does not change with it: α and s move f alone.
        moved = weighted * self.curve.derivative(u).clamp(-_LARGEST_SLOPE, _LARGEST_SLOPE)
        gradient = -2 * amplitude[:, None] * torch.stack([dot(moved, scaled), moved.sum(-1)], -1)
        if self.curve.amplitude_is_inverse_scale:
            gradient[:, 0] += 2 * amplitude * dot(weighted, values)
        return Point(theta, amplitude, residual, gradient)


@functools.lru_cache
def power_law_until(curve: Curve) -> float:
    """Return u up to which a curve is its power law at the origin, to 2e-4 of it; infinite for such a law itself.

    For most curves that law is the tangent.

    >>> from normscope.fits.curves import CURVES
    >>> round(power_law_until(CURVES["power23_clip"]), 2), power_law_until(CURVES["linear"])
    (0.5, inf)
    """
    u, power = torch.logspace(-8, 2, 401, dtype=torch.float64), curve.power_at_origin
    if not math.isfinite(power):
        return float(u[0])
    origin = torch.zeros(1, dtype=torch.float64)
    rise = curve.function(u) - curve.function(origin)
    law = curve.derivative(origin) * u if curve.linear_at_origin else rise[0] * (u / u[0]) ** power
    departs = (rise - law).abs() > _DEPARTS * law.abs()
    if not departs.any():
        return math.inf
    first = int(departs.nonzero()[0, 0])
    # Half of it, as the nodes that stand for the farthest pairs may lie beyond them.
    return float(u[max(first - 1, 0)]) / 2
