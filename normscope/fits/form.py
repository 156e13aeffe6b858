"""Form of a fit: which of A, α and s are free, and where the others come from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normscope.curves.known import CURVES, Curve
from normscope.errors import UsageError, unknown
from normscope.fits.nodes import Nodes
from normscope.fits.solver import Objective, Solutions, unbent_until
from normscope.fits.targets import FitTarget

AMPLITUDES = ("free", "theory")


@dataclass(frozen=True)
class FitForm:
    """The free parameters of a fit, as arguments of :func:`normscope.fit`.

    For constant ρ, theory is the derivation of DyT (tanh) and of DyISRU (isru, arXiv 2503.21708).
    """

    amplitude: str = "free"
    theory: bool = False
    alpha: float | None = None
    shift: bool = True

    def __post_init__(self) -> None:
        if self.amplitude not in AMPLITUDES:
            raise UsageError(unknown("amplitude", self.amplitude, AMPLITUDES))
        if self.alpha is not None and not 0 < self.alpha < math.inf:
            raise UsageError(f"alpha is {self.alpha}; it is a positive number, in units of 1/x.")
        if self.theory and (self.amplitude, self.alpha) != ("free", None):
            raise UsageError("Theory determines A and α; leave amplitude and alpha out.")

    @property
    def needs_bound(self) -> bool:
        """True if A follows from the bound of |y|."""
        return self.theory or self.amplitude == "theory"

    def refusal(self, curve: Curve) -> str | None:
        """Reason why a curve does not support this form; None if it does."""
        if self.needs_bound and (curve.limit is None or curve.amplitude_is_inverse_scale):
            return (
                f"{curve.name} is not bounded by an amplitude of its own, so that none follows from the bound of |y|."
            )
        if self.needs_bound and not curve.zero_centred:
            return f"{curve.name} is not centred at zero, so that the bounds ±A of y are not those of its values."
        if self.theory and not curve.linear_at_origin:
            return f"{curve.name} has no slope at the origin, so that no α follows from the norm's."
        return None

    def called(self, curve: Curve) -> Curve:
        """Return the curve under its name in this form: erf with a shift is derf, and derf without one erf.

        >>> from normscope.curves.known import CURVES
        >>> FitForm().called(CURVES["erf"]).name, FitForm(shift=False).called(CURVES["derf"]).name
        ('derf', 'erf')
        """
        if curve.function_name != "erf":
            return curve
        return CURVES["derf" if self.shifted(curve) else "erf"]

    def shifted(self, curve: Curve) -> bool:
        """True if s of a curve is fitted."""
        has_none = curve.amplitude_is_inverse_scale or curve.vertical_at_origin
        return self.shift and not self.theory and not has_none

    def odd(self, curve: Curve) -> bool:
        """True if A·f(αx + s) is odd in x."""
        return curve.zero_centred and not self.shifted(curve)

    def objective(self, nodes: Nodes, curve: Curve, targets: Sequence[FitTarget]) -> Objective:
        amplitude = self._amplitude(curve, targets) if self.needs_bound else None
        alpha = torch.full((len(nodes),), self.alpha, dtype=torch.float64) if self.alpha is not None else None
        return Objective(nodes, curve, amplitude, alpha, self.shifted(curve))

    def in_theory(self, curve: Curve, targets: Sequence[FitTarget]) -> Solutions:
        amplitude = self._amplitude(curve, targets)
        at_origin = float(curve.derivative(torch.zeros(1, dtype=torch.float64)))
        slope = torch.tensor([target.slope for target in targets], dtype=torch.float64)
        alpha = slope / (amplitude * at_origin)
        zero, never = torch.zeros_like(alpha), torch.zeros_like(alpha, dtype=torch.bool)
        return Solutions(amplitude, alpha, zero, never, alpha.isfinite())

    def _amplitude(self, curve: Curve, targets: Sequence[FitTarget]) -> Tensor:
        return torch.tensor([target.bound / (curve.limit or 1) for target in targets], dtype=torch.float64)

    def parameters(self, curve: Curve) -> list[str]:
        """Names of the free parameters of a curve.

        >>> from normscope.curves.known import CURVES
        >>> FitForm().parameters(CURVES["tanh"]), FitForm(shift=False).parameters(CURVES["linear"])
        (['A', 'α', 's'], ['A'])
        """
        free = {
            "A": not self.needs_bound and not curve.amplitude_is_inverse_scale,
            "α": not self.theory and self.alpha is None and unbent_until(curve) < math.inf,
            "s": self.shifted(curve),
        }
        return [name for name, is_free in free.items() if is_free]

    def words(self, curve: Curve) -> str:
        """Describe the free and the fixed parameters.

        >>> from normscope.curves.known import CURVES
        >>> FitForm(amplitude="theory").words(CURVES["tanh"])
        'α, s; A from theory'
        """
        fixed = [
            *(["A, α from theory"] if self.theory else ["A from theory"] if self.needs_bound else []),
            *([f"α = {self.alpha:g}"] if self.alpha is not None else []),
        ]
        return "; ".join(text for text in (", ".join(self.parameters(curve)), *fixed) if text)
