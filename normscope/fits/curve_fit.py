"""Result of fitting one curve at one norm site, with all numbers that a paper reports."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from normscope.curves.known import FREE, Curve
from normscope.fits.jackknife import Interval
from normscope.fits.sinks import Sink
from normscope.norms.sites import NormSite
from normscope.pairs.captures import Capture
from normscope.runtime.records import Tabled, as_json


@dataclass(frozen=True, repr=False)
class SiteRecord(Tabled):
    """Record about one norm site of a capture.

    Attributes:
        model, weights, data: the network, its resolved checkpoint and revision, and its inputs.
        site: module path of the norm; of pooled sites, what they have in common.
    """

    model: str
    weights: str
    data: str
    site: str


def about_site(capture: Capture, site: str) -> dict[str, Any]:
    """Attributes of a :class:`SiteRecord`."""
    return {**{name: capture.about[name] for name in ("model", "weights", "data")}, "site": site}


@dataclass(frozen=True, repr=False)
class CurveFit(SiteRecord):
    """y ≈ A·f(αx + s) at one norm site, or one of its channels, by least squares over all of its pairs.

    Numbers are NaN if there was nothing to fit.

    Attributes:
        curve, function: name of f, and f itself.
        n_pairs: number of pairs.
        amplitude, alpha, shift: A, α in units of 1/x, and s inside f, which is no bias; zero if it was not fitted.
        r2: R² about the mean of y.
        rmse: root of the mean squared error, in units of y.
        r2_cv: R² of held-out folds; None without folds.
        r2_ceiling: held-out R² of the best function of x found there (:mod:`normscope.fits.ceiling`), to compare with
            r2_cv; None without folds, or if the grid of bins does not resolve x.
        folds: unit of the folds that intervals and cross-validation leave out, one at a time.
        straight: True if the pairs do not bend inwards: a line, through the origin only without s, of which the slope
            A·α is identified, not A and α.
        converged: True if the search for α ended inside its range, and the pairs lie within the grid.
        form: fitted parameters, in words: ``A, α`` by default.
        weights_by: weighting of the pairs: ``pairs`` alike, by ``gamma``², or evenly over ``x``.
        channel, sites: number of the channel, None for all; module paths of pooled sites.
        tail_rmse, centre_rmse: RMSE of the pairs with |x| beyond the 99th percentile, and of the others.
        largest_error, largest_error_at: largest distance between curve and mean y of neighbouring pairs; their x.
        saturated: share of the pairs at which |f′| is under 5 % of its largest value.
        reach: α·max|x|.
        intervals: 95 % of amplitude, alpha, shift, C, slope, r2 and r2_ceiling, by a jackknife over the folds, for the
            numbers that the pairs identify.
        refits: α and slope of the fit to all pairs but those of each fold; empty without folds.
        unidentified: True if the curve bends alike at every scale that the pairs reach, as x³ and |x| do: any α with
            its own A fits alike.
        parameters: number of free parameters.
        rank: by held-out error among the curves with as many free parameters at that site; by error without folds.
            Curves whose R² differ by at most 1e-6 share a rank.
        in_noise: True if the first in rank is better by less than the folds differ; None without folds.
        best: True for the curve that ``best`` selected.
        x_repeats: True if many x are equal to the last bit, as in blank patches: the ceiling is then too low.
        nothing: reason why there was nothing to fit; None if there was.
        sink: the position that carries more than half of Σx², if there is one, with the curve's R² without it; None for
            channels and pools.
        norm: the norm site, for the function that replaces it; None for pooled sites.
    """

    curve: str
    function: Curve = field(repr=False, compare=False)
    n_pairs: int
    amplitude: float = math.nan
    alpha: float = math.nan
    shift: float = math.nan
    r2: float = math.nan
    rmse: float = math.nan
    r2_cv: float | None = None
    r2_ceiling: float | None = None
    folds: Literal["source", "sample"] | None = None
    straight: bool = False
    converged: bool = False
    form: str = "A, α"
    weights_by: str = "pairs"
    channel: int | None = None
    sites: tuple[str, ...] = ()
    tail_rmse: float = math.nan
    centre_rmse: float = math.nan
    largest_error: float = math.nan
    largest_error_at: float = math.nan
    saturated: float = math.nan
    reach: float = math.nan
    intervals: Mapping[str, Interval] = field(default_factory=dict, hash=False)
    refits: Sequence[tuple[float, float]] = field(default=(), repr=False, compare=False)
    unidentified: bool = False
    parameters: int | None = None
    rank: int | None = None
    in_noise: bool | None = None
    best: bool = False
    x_repeats: bool = False
    nothing: str | None = None
    sink: Sink | None = None
    norm: NormSite | None = field(default=None, repr=False, compare=False)

    @property
    def slope(self) -> float:
        """Slope at x = 0, A·α·f′(s), not at the centre −s/α of the curve; NaN if the pairs do not identify it."""
        unknown = self.degenerate or self.unidentified or self.function.vertical_at_origin
        if unknown or self.curve == FREE:  # the slope of E[y|x] at one point is noise
            return math.nan
        return float(self.derivative(torch.zeros(1)))

    @property
    def doubt(self) -> Literal["not converged", "straight", "A and α not identified"] | None:
        """Reason why A and α are not identified separately; None if they are."""
        if self.degenerate or self.curve == FREE:
            return None
        if not self.converged:
            return "not converged"
        return "straight" if self.straight else "A and α not identified" if self.unidentified else None

    @property
    def identified(self) -> bool:
        """True if the pairs identify A and α separately."""
        return not (self.doubt or self.degenerate or self.curve == FREE)

    @property
    def C(self) -> float:  # noqa: N802 - the paper's own sign
        """DyISRU's constant, 1/α² (arXiv 2503.21708)."""
        return 1 / self.alpha**2

    @property
    def of_ceiling(self) -> float | None:
        """Held-out R² over the ceiling."""
        return self.r2_cv / self.r2_ceiling if self.r2_ceiling and self.r2_cv is not None else None

    @property
    def degenerate(self) -> bool:
        """True if there was nothing to fit."""
        return self.nothing is not None

    def __repr__(self) -> str:
        label = self.site if self.channel is None else f"{self.site}, channel {self.channel}"
        if self.degenerate:
            return f"CurveFit {self.curve} at {label}: {self.nothing}"
        shift = f", s {self.shift:.3g}" if self.shift else ""
        numbers = self.doubt or f"A {self.amplitude:.4g}, α {self.alpha:.4g}{shift}"
        r2 = {"R²": self.r2, "held out": self.r2_cv, "ceiling": self.r2_ceiling}
        parts = [f"{name} {value:.4f}" for name, value in r2.items() if value is not None]
        return f"CurveFit {self.curve} at {label}: {', '.join(parts if self.curve == FREE else [numbers, *parts])}"

    def __call__(self, x: Tensor) -> Tensor:
        """Evaluate the fitted curve at x, of any shape, in float64."""
        return self.amplitude * self.function.function(self.alpha * x.double() + self.shift)

    def extended(self, x: Tensor) -> Tensor:
        """Evaluate the fitted curve, or the line if only that is identified, also beyond the pairs."""
        return self.slope * (x.double() + self.shift / self.alpha) if self.straight else self(x)

    def derivative(self, x: Tensor) -> Tensor:
        """Evaluate the derivative by x of the fitted curve, A·α·f′(αx + s), likewise."""
        return self.amplitude * self.alpha * self.function.derivative(self.alpha * x.double() + self.shift)

    def as_dict(self) -> dict[str, Any]:
        """Return the columns of ``normscope fit --json``; a number that is not finite is None."""
        row = {name: as_json(getattr(self, name)) for name in _ATTRIBUTES}
        return row | dict.fromkeys(("amplitude", "alpha", "shift", "C") if self.curve == FREE else ())


_ATTRIBUTES = (
    *("model", "weights", "data", "site", "curve", "amplitude", "alpha", "shift", "C", "slope", "r2", "r2_cv"),
    *("r2_ceiling", "of_ceiling", "rmse", "n_pairs", "converged", "straight", "unidentified", "folds"),
    *("channel", "sites", "form", "weights_by", "tail_rmse", "centre_rmse", "largest_error", "largest_error_at"),
    *("saturated", "reach", "parameters", "rank", "in_noise", "best", "x_repeats", "nothing", "sink"),
    "intervals",
)
