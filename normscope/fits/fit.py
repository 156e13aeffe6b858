"""From a capture to curves: one fit per norm site and curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from normscope.fits.curves import CURVES, curves_named
from normscope.fits.goodness import ceiling
from normscope.fits.nodes import nodes_of, unresolved
from normscope.fits.solve import least_squares
from normscope.pairs.captures import Capture
from normscope.pairs.sites import NormSite


@dataclass(frozen=True)
class CurveFit:
    """y ≈ A·f(αx + shift) at one norm site, by least squares over all of its pairs.

    Attributes:
        model: the network.
        weights: its resolved checkpoint and revision.
        data: what went through it.
        site: module path of the norm.
        curve: name of f.
        amplitude: A. NaN, with all other numbers, where the site is degenerate (constant input or output).
        alpha: α, in units of 1/x.
        shift: s; this form of the fit keeps it at zero.
        r2: R² about the mean of y.
        r2_ceiling: R² that no function of x alone passes there, cross-validated; None without folds.
        folds: what the ceiling is cross-validated over.
        rmse: root of the mean squared error, in units of y.
        n_pairs: number of pairs.
        straight: the pairs do not bend inwards: A and α mean nothing by themselves, only ``slope`` does.
        converged: whether the search for α ended inside its range, and the pairs lie within the grid's.
    """

    model: str
    weights: str
    data: str
    site: str
    curve: str
    amplitude: float
    alpha: float
    shift: float
    r2: float
    r2_ceiling: float | None
    folds: Literal["source", "sample"] | None
    rmse: float
    n_pairs: int
    straight: bool
    converged: bool

    @property
    def slope(self) -> float:
        """Slope at the origin: A·α·f′(shift)."""
        at = torch.tensor(self.shift, dtype=torch.float64)
        return self.amplitude * self.alpha * float(CURVES[self.curve].derivative(at))

    @property
    def C(self) -> float:  # noqa: N802 - the paper's own sign
        """DyISRU's constant, 1/α² (arXiv 2503.21708)."""
        return 1 / self.alpha**2

    @property
    def degenerate(self) -> bool:
        """Whether there was nothing to fit: the site's input or output is constant."""
        return math.isnan(self.alpha)

    def __call__(self, x: Tensor) -> Tensor:
        """Evaluate the fitted curve at x, of any shape, in float64."""
        return self.amplitude * CURVES[self.curve].function(self.alpha * x.double() + self.shift)

    def as_dict(self) -> dict[str, Any]:
        """Return what ``normscope fit --json`` prints; a number that is none becomes None."""
        numbers = {
            "A": self.amplitude,
            "alpha": self.alpha,
            "shift": self.shift,
            "C": self.C,
            "slope": self.slope,
            "r2": self.r2,
            "r2_ceiling": self.r2_ceiling,
            "rmse": self.rmse,
        }
        return {
            "model": self.model,
            "weights": self.weights,
            "data": self.data,
            "site": self.site,
            "func": self.curve,
            **{key: None if value is None or not math.isfinite(value) else value for key, value in numbers.items()},
            "n_pairs": self.n_pairs,
            "converged": self.converged,
            "straight": self.straight,
            "folds": self.folds,
        }


def fit(capture: Capture, curves: str | Sequence[str] = ("tanh", "isru")) -> list[CurveFit]:
    """Fit curves to every site of a capture, from its binned sums: the cost does not depend on the number of pairs.

    Args:
        capture: what :func:`normscope.capture` returned.
        curves: names of curves; ``dyt`` is tanh and ``dyisru`` is isru.

    Returns:
        One :class:`CurveFit` for each site and curve, sites first.

    Raises:
        UsageError: if there is no such curve.

    >>> import normscope
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    >>> seen = normscope.capture(model, [torch.randn(64, 4, generator=torch.Generator().manual_seed(0))])
    >>> [found.curve for found in fit(seen, "dyt")]
    ['tanh']
    """
    found = curves_named(curves)
    return [one for site in capture.sites for one in _fits_of(capture, site, [curve.name for curve in found])]


def _fits_of(capture: Capture, site: NormSite, curves: Sequence[str]) -> list[CurveFit]:
    stats = capture.stats[site.name]
    moments = torch.from_numpy(stats.moments.numpy().sum(0))
    nodes = nodes_of(moments)
    best, folds = ceiling(stats.moments), stats.fold_by
    n_pairs = int(moments[0].sum())
    fits = []
    for curve in curves:
        found = least_squares(nodes, CURVES[curve])
        fits.append(
            CurveFit(
                model=capture.about["model"],
                weights=capture.about["weights"],
                data=capture.about["data"],
                site=site.name,
                curve=curve,
                amplitude=found.amplitude if found else math.nan,
                alpha=found.alpha if found else math.nan,
                shift=0.0,
                r2=1 - found.residual / nodes.total if found else math.nan,
                r2_ceiling=best,
                folds=folds,
                rmse=math.sqrt(found.residual / n_pairs) if found else math.nan,
                n_pairs=n_pairs,
                straight=bool(found and found.straight),
                converged=bool(found and found.converged and not unresolved(moments, found.alpha)),
            )
        )
    return fits
