"""What of A, α and s is fitted, and what follows from the norm instead."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from normscope.errors import UsageError, unknown
from normscope.fits.curves import CURVES, Curve
from normscope.fits.levels import Level
from normscope.fits.objective import Constraints, Solutions, power_law_until

AMPLITUDES = ("free", "theory")


@dataclass(frozen=True)
class Form:
    """Which parameters are free.

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
        """Refuse what contradicts itself."""
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
        """Say why a curve has no such form, if so."""
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
        """Return the curve under the name that it has in this form: erf with a shift is derf, and without one erf.

        >>> from normscope.fits.curves import CURVES
        >>> Form(shift=True).called(CURVES["erf"]).name, Form(shift=False).called(CURVES["derf"]).name
        ('derf', 'erf')
        """
        if self.shift is None:
            return curve
        other = {known.shift_of: known for known in CURVES.values()} if self.shift else CURVES
        return other.get(curve.name if self.shift else curve.shift_of or "", curve)

    def shifted(self, curve: Curve) -> bool:
        """Whether s of a curve is fitted."""
        return not self.theory and (curve.shifted if self.shift is None else self.shift)

    def constraints(self, curve: Curve, levels: Sequence[Level]) -> Constraints:
        """Return what is not searched at some levels."""
        amplitude = torch.tensor([level.bound / (curve.limit or 1) for level in levels], dtype=torch.float64)
        return Constraints(amplitude if self.needs_bound else None, self.alpha, self.shifted(curve))

    def in_theory(self, curve: Curve, levels: Sequence[Level]) -> Solutions:
        """Return A and α as they follow from the norm; the residual is left open."""
        amplitude = torch.tensor([level.bound / (curve.limit or 1) for level in levels], dtype=torch.float64)
        at_origin = float(curve.derivative(torch.zeros(1, dtype=torch.float64)))
        slope = torch.tensor([level.slope for level in levels], dtype=torch.float64)
        alpha = slope / (amplitude * at_origin)
        none, fitted = torch.zeros_like(alpha), torch.zeros_like(alpha, dtype=torch.bool)
        return Solutions(amplitude, alpha, none, torch.full_like(alpha, torch.nan), fitted, alpha.isfinite())

    def parameters(self, curve: Curve) -> list[str]:
        """Name the free parameters of a curve.

        >>> from normscope.fits.curves import CURVES
        >>> Form().parameters(CURVES["derf"]), Form().parameters(CURVES["linear"])
        (['A', 'α', 's'], ['A'])
        """
        return [
            *(["A"] if not self.needs_bound and not curve.amplitude_is_inverse_scale else []),
            *(["α"] if not self.theory and self.alpha is None and power_law_until(curve) < math.inf else []),
            *(["s"] if self.shifted(curve) else []),
        ]

    def words(self, curve: Curve) -> str:
        """Say what was fitted, and what was not.

        >>> from normscope.fits.curves import CURVES
        >>> Form(amplitude="theory", shift=True).words(CURVES["tanh"])
        'α, s; A from theory'
        """
        given = [
            *(["A, α from theory"] if self.theory else ["A from theory"] if self.needs_bound else []),
            *([f"α = {self.alpha:g}"] if self.alpha is not None else []),
        ]
        return "; ".join(part for part in (", ".join(self.parameters(curve)), *given) if part)


FITTED = Form()
