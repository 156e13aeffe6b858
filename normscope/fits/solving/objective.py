"""The squared error of y ≈ A·f(αx + s), which is minimized, and the form of a fit: which of A, α and s are free."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normscope.errors import UsageError, unknown
from normscope.fits.curves.known import CURVES, Curve
from normscope.fits.solving.levels import Level
from normscope.fits.solving.nodes import Batched, Nodes, dot

_DEPARTS = 2e-4  # share by which a curve departs from its power law at the origin at the smallest α that is tried
_LARGEST_SLOPE = 1e12  # in place of the infinite slope that some curves have at their origin


@dataclass(frozen=True)
class Solutions(Batched):
    """A, α and s of least squared error, each ``(problems,)``.

    Attributes:
        amplitude: A.
        alpha: α, positive.
        shift: s.
        only_power: the curve's power law at its origin, A·α^p·|x|^p, fits as well, for most curves a straight line: A
            and α mean nothing by themselves, and only that law of least squares, which they make, does.
        converged: False where α ran into an end of its range, or where no α does better than another.
    """

    amplitude: Tensor
    alpha: Tensor
    shift: Tensor
    only_power: Tensor
    converged: Tensor

    def predicted(self, curve: Curve, x: Tensor) -> Tensor:
        """A·f(αx + s) at x, ``(problems, nodes)``."""
        return self.amplitude[:, None] * curve.function(self.alpha[:, None] * x + self.shift[:, None])

    def derivative(self, curve: Curve, x: Tensor) -> Tensor:
        """A·α·f′(αx + s) at x, likewise."""
        slope = curve.derivative(self.alpha[:, None] * x + self.shift[:, None])
        return (self.amplitude * self.alpha)[:, None] * slope


def joined_solutions(parts: Sequence[Solutions]) -> Solutions:
    """Concatenate the solutions of several batches."""
    return Solutions(*(torch.cat(values) for values in zip(*(vars(part).values() for part in parts), strict=True)))


@dataclass(frozen=True)
class Evaluation(Batched):
    """An objective at one theta a problem.

    Attributes:
        theta: log α and s, ``(problems, 2)``.
        amplitude: the best A there, ``(problems,)``.
        residual: Σ w (y − A·f(αx + s))² over all pairs, likewise.
        gradient: of that by theta, ``(problems, 2)``; by s zero where it is not searched.
    """

    theta: Tensor
    amplitude: Tensor
    residual: Tensor
    gradient: Tensor

    def where(self, here: Tensor, other: Evaluation) -> Evaluation:
        """This evaluation at some of the problems, bool ``(problems,)``, and another at the rest."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Evaluation(*(torch.where(here.view(-1, *[1] * (a.ndim - 1)), a, b) for a, b in pairs))

    def put(self, problems: Tensor, other: Evaluation) -> None:
        """Replace the values at some of the problems, by their numbers, in place."""
        for values, others in zip(vars(self).values(), vars(other).values(), strict=True):
            values[problems] = others

    def solutions(self, only_power: Tensor, converged: Tensor) -> Solutions:
        alpha, shift = self.theta[:, 0].exp(), self.theta[:, 1]
        return Solutions(self.amplitude, alpha, shift, only_power, converged)


@dataclass(frozen=True)
class Objective:
    """Squared error of one curve at several problems, as a function of theta: log α and s, ``(problems, 2)``.

    Attributes:
        nodes: the problems.
        curve: f.
        fixed_amplitude: A of each problem, float64 ``(problems,)``; None where it is free.
        fixed_alpha: α of all; None where it is free.
        shifted: whether s is free; otherwise it is zero.
    """

    nodes: Nodes
    curve: Curve
    fixed_amplitude: Tensor | None = None
    fixed_alpha: float | None = None
    shifted: bool = False

    @functools.cached_property
    def alpha(self) -> float | None:
        """α where it is not searched: given, or without any effect."""
        without_effect = self.fixed_alpha is None and power_law_until(self.curve) == math.inf
        return 1.0 if without_effect else self.fixed_alpha

    @property
    def free(self) -> list[int]:
        """Columns of theta that are searched."""
        return [column for column, is_free in enumerate((self.alpha is None, self.shifted)) if is_free]

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
        free = self.fixed_amplitude is None and self.fixed_alpha is None
        powered = self.curve.zero_centred and math.isfinite(self.curve.power_at_origin)
        return free and powered and not self.curve.amplitude_is_inverse_scale

    @functools.cached_property
    def explainable(self) -> Tensor:
        """Σ w y² at the nodes, ``(problems,)``."""
        return dot(self.nodes.weight * self.nodes.y, self.nodes.y)

    def of(self, problems: Tensor) -> Objective:
        """The objective of some of the problems, by their numbers, as often as they are named."""
        amplitude = None if self.fixed_amplitude is None else self.fixed_amplitude.index_select(0, problems)
        return replace(self, nodes=self.nodes.of(problems), fixed_amplitude=amplitude)

    def on(self, nodes: Nodes) -> Objective:
        """The objective on other nodes: so many variants of the first problem, as many of the next, and so on."""
        amplitude, variants = self.fixed_amplitude, len(nodes) // len(self.nodes)
        amplitude = None if amplitude is None else amplitude.repeat_interleave(variants)
        return replace(self, nodes=nodes, fixed_amplitude=amplitude)

    def amplitude(self, products: Tensor, squares: Tensor, alpha: Tensor) -> Tensor:
        """A: given, bound to α, or the best one, of Σ w·f·y, Σ w·f² and α, each ``(problems, …)``."""
        if self.curve.amplitude_is_inverse_scale:
            return 1 / alpha
        if self.fixed_amplitude is not None:
            return self.fixed_amplitude.reshape(-1, *[1] * (alpha.ndim - 1)).expand(alpha.shape)
        return products / torch.where(squares > 0, squares, torch.inf)

    def errors(self, theta: Tensor) -> Tensor:
        """Squared error at the nodes for many theta a problem, ``(problems, thetas, 2)``: ``(problems, thetas)``."""
        alpha = theta[..., 0].exp()
        scaled = alpha[..., None] * self.nodes.x[:, None]
        values = self.curve.function(scaled + theta[..., 1:] if self.shifted else scaled)
        products = (values @ (self.nodes.weight * self.nodes.y)[..., None])[..., 0]
        squares = (values.square() @ self.nodes.weight[..., None])[..., 0]
        amplitude = self.amplitude(products, squares, alpha)
        return self.explainable[:, None] - amplitude * (2 * products - amplitude * squares)

    def slopes(self, u: Tensor) -> Tensor:
        """f′, finite where the curve is vertical too."""
        slopes = self.curve.derivative(u)
        return slopes if math.isfinite(self.curve.peak) else slopes.clamp(-_LARGEST_SLOPE, _LARGEST_SLOPE)

    def at(self, theta: Tensor) -> Evaluation:
        """Squared error over all pairs, and its gradient, at one theta a problem, ``(problems, 2)``."""
        alpha, x, y = theta[:, 0].exp(), self.nodes.x, self.nodes.y
        scaled = alpha[:, None] * x
        u = scaled + theta[:, 1:] if self.shifted else scaled
        values = self.curve.function(u)
        weighted = self.nodes.weight * values
        amplitude = self.amplitude(dot(weighted, y), dot(weighted, values), alpha)
        off = y - amplitude[:, None] * values
        weighted = self.nodes.weight * off
        residual = dot(weighted, off) + self.nodes.scatter.sum(-1)
        # Where A is the best one, the error does not change with it: α and s move f alone.
        moved = weighted * self.slopes(u)
        by_shift = moved.sum(-1) if self.shifted else torch.zeros_like(alpha)
        gradient = -2 * amplitude[:, None] * torch.stack([dot(moved, scaled), by_shift], -1)
        if self.curve.amplitude_is_inverse_scale:
            gradient[:, 0] += 2 * amplitude * dot(weighted, values)
        return Evaluation(theta, amplitude, residual, gradient)


@functools.lru_cache
def power_law_until(curve: Curve) -> float:
    """u up to which a curve is its power law at the origin, to 2e-4 of it; infinite for such a law itself.

    For most curves that law is the tangent.

    >>> from normscope.fits.curves.known import CURVES
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


AMPLITUDES = ("free", "theory")


@dataclass(frozen=True)
class Parametrization:
    """The form of a fit: which parameters are free.

    Attributes:
        amplitude: ``free``; or ``theory``, where A·f tends to the bound of |y|, √d or √(d−1).
        theory: nothing is fitted: A as above, and the slope at the origin that of the token of mean ρ. With constant ρ
            that makes tanh DyT's own derivation, and isru DyISRU's (arXiv 2503.21708).
        alpha: α of every fit; None where it is free.
        shift: whether s is free; None for no curve but derf, which is erf with a shift.
    """

    amplitude: str = "free"
    theory: bool = False
    alpha: float | None = None
    shift: bool | None = None

    def __post_init__(self) -> None:
        """Refuse arguments that contradict one another."""
        if self.amplitude not in AMPLITUDES:
            raise UsageError(unknown("amplitude", self.amplitude, AMPLITUDES))
        if self.alpha is not None and not 0 < self.alpha < math.inf:
            raise UsageError(f"alpha is {self.alpha}; it is a positive number, in units of 1/x.")
        if self.theory and (self.amplitude, self.alpha, self.shift or None) != ("free", None, None):
            raise UsageError(
                "Where everything follows from theory, no amplitude, alpha or shift can be asked for besides."
            )

    @property
    def needs_bound(self) -> bool:
        """Whether A follows from the bound of |y|."""
        return self.theory or self.amplitude == "theory"

    def refusal(self, curve: Curve) -> str | None:
        """Reason why a curve has no such form; None where it has."""
        if self.needs_bound and (curve.limit is None or curve.amplitude_is_inverse_scale):
            return (
                f"{curve.name} is not bounded by an amplitude of its own, so that none follows from the bound of |y|."
            )
        if self.needs_bound and not curve.zero_centred:
            return f"{curve.name} is not centred at zero, so that the bounds ±A of y are not those of its values."
        if self.theory and not curve.linear_at_origin:
            return f"{curve.name} has no slope at the origin, so that no α follows from the norm's."
        if self.shift and math.isinf(curve.slope_at_origin):
            return (
                f"{curve.name} rises vertically at its centre, so that binned pairs do not tell its shift; leave the "
                "curve or the shift out."
            )
        return None

    def called(self, curve: Curve) -> Curve:
        """The curve under the name that it has in this form: erf with a shift is derf, and without one erf.

        >>> from normscope.fits.curves.known import CURVES
        >>> Parametrization(shift=True).called(CURVES["erf"]).name
        'derf'
        >>> Parametrization(shift=False).called(CURVES["derf"]).name
        'erf'
        """
        if self.shift is None:
            return curve
        other = {known.shift_of: known for known in CURVES.values()} if self.shift else CURVES
        return other.get(curve.name if self.shift else curve.shift_of or "", curve)

    def shifted(self, curve: Curve) -> bool:
        """Whether s of a curve is fitted."""
        return not self.theory and (curve.shifted if self.shift is None else self.shift)

    def odd(self, curve: Curve) -> bool:
        """Whether A·f(αx + s) is odd in x."""
        return curve.zero_centred and not self.shifted(curve)

    def objective(self, nodes: Nodes, curve: Curve, levels: Sequence[Level]) -> Objective:
        """Squared error of a curve on the nodes of some levels, with what is not searched held fixed."""
        amplitude = self._amplitude(curve, levels) if self.needs_bound else None
        return Objective(nodes, curve, amplitude, self.alpha, self.shifted(curve))

    def in_theory(self, curve: Curve, levels: Sequence[Level]) -> Solutions:
        """A and α as they follow from the norm."""
        amplitude = self._amplitude(curve, levels)
        at_origin = float(curve.derivative(torch.zeros(1, dtype=torch.float64)))
        slope = torch.tensor([level.slope for level in levels], dtype=torch.float64)
        alpha = slope / (amplitude * at_origin)
        zero, never = torch.zeros_like(alpha), torch.zeros_like(alpha, dtype=torch.bool)
        return Solutions(amplitude, alpha, zero, never, alpha.isfinite())

    def _amplitude(self, curve: Curve, levels: Sequence[Level]) -> Tensor:
        """A with which the curve tends to the bound of |y|."""
        return torch.tensor([level.bound / (curve.limit or 1) for level in levels], dtype=torch.float64)

    def parameters(self, curve: Curve) -> list[str]:
        """Names of the free parameters of a curve.

        >>> from normscope.fits.curves.known import CURVES
        >>> Parametrization().parameters(CURVES["derf"]), Parametrization().parameters(CURVES["linear"])
        (['A', 'α', 's'], ['A'])
        """
        return [
            *(["A"] if not self.needs_bound and not curve.amplitude_is_inverse_scale else []),
            *(["α"] if not self.theory and self.alpha is None and power_law_until(curve) < math.inf else []),
            *(["s"] if self.shifted(curve) else []),
        ]

    def words(self, curve: Curve) -> str:
        """The form in words: what is fitted, and what is not.

        >>> from normscope.fits.curves.known import CURVES
        >>> Parametrization(amplitude="theory", shift=True).words(CURVES["tanh"])
        'α, s; A from theory'
        """
        fixed = [
            *(["A, α from theory"] if self.theory else ["A from theory"] if self.needs_bound else []),
            *([f"α = {self.alpha:g}"] if self.alpha is not None else []),
        ]
        return "; ".join(part for part in (", ".join(self.parameters(curve)), *fixed) if part)
