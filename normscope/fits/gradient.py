"""The gradient view: a norm's Jacobian, the curves' derivatives, and the spread of what each curve holds constant."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from normscope.fits.ceiling import ceilings, groups_of_bins
from normscope.fits.curve_fit import CurveFit, SiteRecord, about_site
from normscope.fits.jackknife import Interval, interval_of_r2
from normscope.fits.nodes import FitBatch, Nodes, batches, coarsened
from normscope.fits.targets import as_capture, fit_targets, site_target, sums_of
from normscope.norms.formulas import FORMS, Form
from normscope.norms.sites import NormSite
from normscope.pairs.captures import Capture
from normscope.pairs.sums.binning import PAIR_GRID
from normscope.pairs.sums.magnitudes import Array
from normscope.pairs.sums.stats import PairStats
from normscope.runtime.records import Record, Records

TAIL_FROM = 0.99  # share of the drawn tokens' |x| below the tail
_ALIKE = 0.05  # in the logarithm: spreads over a few dozen tokens that differ by less are alike
_GROUPS_AN_OCTAVE = 8  # of the mean in figures


@dataclass(frozen=True)
class Jacobians:
    """Diagonals and norms of the Jacobians of some tokens, in float64.

    ``others`` is the scale with x_i at the mean of the token's other elements, or at zero if squares are taken about
    zero. DyISRU's constant C is d·others² for an RMSNorm and d²/(d − 1)·others² for a LayerNorm (docs/theory.md, 27 and
    28).
    """

    diagonal: Tensor  # ∂y_i/∂x_i, (tokens, d)
    rows: Tensor  # squared norm of each row, Σ_j (∂y_i/∂x_j)², (tokens, d)
    scale: Tensor  # 1/rstd: ρ of an RMSNorm, σ of a LayerNorm, with eps, (tokens,)
    others: Tensor  # (tokens, d)

    @property
    def share(self) -> Tensor:
        """Share of the diagonal in the squared Frobenius norm, ``(tokens,)``."""
        return self.diagonal.square().sum(1) / self.rows.sum(1)

    @property
    def row_share(self) -> Tensor:
        """Share of the diagonal in each row's squared norm, ``(tokens, d)``; 1 for a row of zeros."""
        return torch.where(self.rows > 0, self.diagonal.square() / self.rows, 1.0)


def jacobians(form: Form, rows: Tensor, eps: float) -> Jacobians:
    """Jacobians of tokens, ``(tokens, d)`` of any floating dtype.

    >>> from normscope.norms.formulas import rms_norm
    >>> token = jacobians(rms_norm, torch.tensor([[3.0, 4.0, 0.0, 0.0]]), 0.0)
    >>> [round(float(slope), 3) for slope in token.diagonal[0]]  # (1 − y²/d)/ρ, with ρ = 2.5
    [0.256, 0.144, 0.4, 0.4]
    """
    x = rows.double()
    d = x.shape[1]
    c = float(form.centred)
    rstd, pull, z = form.jacobian(x, eps)
    crossed = c / d * z.sum(1, keepdim=True) - z
    within = 1 - c / d + 2 * pull * crossed + pull.square() * z.square().sum(1, keepdim=True)
    about = x - x.mean(1, keepdim=True) if form.about_mean else x
    share = about.square() * (d / (d - 1) if form.about_mean else 1)
    remainder = (about.square().sum(1, keepdim=True) - share).clamp_min(0)
    return Jacobians(
        diagonal=form.diagonal(x, eps),
        rows=within.clamp_min(0) * rstd.square(),
        scale=1 / rstd[:, 0],
        others=1 / form.slope(remainder, d, eps),
    )


@dataclass(frozen=True)
class Spread(Record):
    """Quantiles 0.16, 0.50 and 0.84 of positive numbers, with two thirds between them; NaN without any."""

    p16: float
    p50: float
    p84: float

    _properties = ("ratio",)

    @property
    def ratio(self) -> float:
        """p84/p16: 1 for a constant."""
        return self.p84 / self.p16 if self.p16 > 0 else math.nan


@dataclass(frozen=True)
class Constants(Record):
    """Spreads of what the curves' derivations hold constant, over some pairs of the uniformly drawn tokens.

    Attributes:
        n_pairs: number of pairs.
        scale: 1/rstd, which DyT holds constant, once per pair: ρ of an RMSNorm, σ of a LayerNorm.
        others: √C, which DyISRU holds constant, in the same unit: the scale of the token's other elements.
        C: x²(d/y² − 1), in units of x². For an RMSNorm it is d·others². For a LayerNorm x includes the token's mean, so
            that it means nothing near y = 0.
    """

    n_pairs: int
    scale: Spread
    others: Spread
    C: Spread

    _properties = ("steadier",)

    @property
    def steadier(self) -> Literal["scale", "others"] | None:
        """The one of ``scale`` and ``others`` of smaller ratio; None if they differ by less than 5 %."""
        scale, root_c = self.scale.ratio, self.others.ratio
        if not abs(math.log(scale / root_c)) > _ALIKE:
            return None
        return "scale" if scale < root_c else "others"


def constants_by_part(x: Tensor, y: Tensor, jacobians: Jacobians, tail: float) -> dict[str, Constants]:
    """Constants of ``all`` pairs of tokens, of the ``centre``, |x| up to ``tail``, and of the ``tail`` beyond.

    ``x`` and ``y`` are float64 ``(tokens, d)``.
    """
    d = x.shape[1]
    beyond = x.abs() > tail
    scale = jacobians.scale[:, None].expand_as(x)
    # At x = y = 0 the slope is unknown; with the token's own, x²·d/y² is that of the token.
    slope = torch.where((x == 0) & (y == 0), scale, x / y)
    values = (scale, jacobians.others, d * slope.square() - x.square())
    parts = {"all": torch.ones_like(beyond), "centre": ~beyond, "tail": beyond}
    return {
        region: Constants(int(inside.sum()), *(_spread(value[inside]) for value in values))
        for region, inside in parts.items()
    }


def _spread(values: Tensor) -> Spread:
    if not len(values):
        return Spread(math.nan, math.nan, math.nan)
    # Without interpolation, which is undefined between infinite values.
    return Spread(*np.quantile(values.numpy(), (0.16, 0.5, 0.84), method="inverted_cdf").tolist())


@dataclass(frozen=True, repr=False)
class GradientView(SiteRecord, Record):
    """The Jacobian ∂y_i/∂x_j of one norm site.

    R² of its diagonal are over all pairs; shares and constants, which need whole tokens, over the drawn tokens.

    Attributes:
        kind, d, centred: name in the table of norms, elements of a token, and True if the norm subtracts its mean.
        reason: reason why there is no closed form, so that all numbers are NaN; None if there is one.
        n_tokens, of_tokens: numbers of uniformly drawn tokens, for shares and constants, and of all tokens.
        n_largest: number of tokens of largest |x|, also included in the smallest shares.
        folds: unit of the folds that intervals and cross-validation leave out, one at a time; None without folds.
        share: share of the diagonal in the Jacobian's squared Frobenius norm, averaged over tokens.
        least_share: the smallest such share; at least 1 − 1/d for an RMSNorm, 1 − 2/d for a LayerNorm.
        tail_share: share of ∂y_i/∂x_i in the squared norm of row i, averaged over the pairs of the tail.
        least_row_share: the smallest such share among all drawn pairs.
        r2_of_x: held-out R² of the best function of x found as a prediction of ∂y_i/∂x_i; NaN without folds.
        r2: R² of each fitted curve's derivative as a prediction of ∂y_i/∂x_i, about the mean, by the curve's name; NaN
            if there is nothing to fit.
        intervals: 95 % of each R², by the curve's name and ``of_x``: a jackknife over the folds with the curve fixed.
        constants: for ``all`` pairs, for the ``centre`` and for the ``tail``, the hundredth of largest |x|.
    """

    kind: str
    d: int
    centred: bool
    reason: str | None
    n_tokens: int
    n_largest: int
    of_tokens: int
    folds: Literal["source", "sample"] | None = None
    share: float = math.nan
    least_share: float = math.nan
    tail_share: float = math.nan
    least_row_share: float = math.nan
    r2_of_x: float = math.nan
    r2: dict[str, float] = field(default_factory=dict)
    intervals: dict[str, Interval] = field(default_factory=dict)
    constants: dict[str, Constants] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the columns of ``normscope gradient --json``; a number that is not finite is None."""
        row = super().as_dict()
        return row | {"intervals": {f"r2_{name}": bounds for name, bounds in row["intervals"].items()}}


@dataclass(frozen=True)
class DrawnJacobians:
    """Jacobians of the drawn tokens of one site."""

    x: Tensor  # of the uniformly drawn tokens, float64 (tokens, d)
    y: Tensor
    uniform: Jacobians
    largest_x: Tensor  # of the tokens of largest |x|, likewise
    largest: Jacobians
    tail: float  # |x| at which the tail begins


def gradient(capture: Capture, fits: Sequence[CurveFit] = ()) -> Records[GradientView]:
    """Compare every site's Jacobian with the derivatives of its fitted curves.

    Args:
        capture: result of :func:`normscope.capture` with ``diagonal=True``.
        fits: result of :func:`normscope.fit` for it; with its shift, so that A and α are those of other views.

    Returns:
        One :class:`GradientView` per site, with a ``reason`` if there is no closed form.

    Raises:
        DataError: if the capture lacks sums of the Jacobian's diagonal.

    >>> import normscope
    >>> from torch import nn
    >>> x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    >>> seen = normscope.capture(nn.Sequential(nn.LayerNorm(8)), [x], diagonal=True)
    >>> [view] = gradient(seen, normscope.fit(seen))
    >>> view.n_tokens, round(view.share, 2), list(view.r2)  # at least 1 − 2/d
    (64, 0.78, ['tanh', 'isru'])
    """
    capture = as_capture(capture, "gradient")
    return Records(_view(capture, site, [fit for fit in fits if fit.site == site.name]) for site in capture.sites)


def drawn_jacobians(site: NormSite, stats: PairStats) -> DrawnJacobians | str:
    """Jacobians of a site's drawn tokens; or the reason why there are none, as a clause."""
    if site.pointwise is not None:
        return "a point-wise function: its Jacobian is diagonal"
    if site.grouped:
        return "a token is a group, of which a capture keeps a part, and may be normalized by running statistics"
    if site.d < 2:
        return "a token has one element, and its Jacobian nothing off the diagonal"
    uniform, largest = stats.tokens.kept(), stats.largest.kept()
    if not len(uniform.key):
        return "no finite token went through it"
    form = FORMS.get(site.form or "")
    if form is None:
        return "it is of no form whose Jacobian is known"
    x = uniform.x.double()
    return DrawnJacobians(
        x=x,
        y=uniform.y.double(),
        uniform=jacobians(form, uniform.x, site.eps),
        largest_x=largest.x.double(),
        largest=jacobians(form, largest.x, site.eps),
        tail=float(np.quantile(x.abs().numpy(), TAIL_FROM, method="inverted_cdf")),
    )


def mean_diagonal(site: NormSite, stats: PairStats, least_count: int, width: float) -> tuple[Array, Array]:
    """E[∂y_i/∂x_i | x] over all pairs of a site: mean x and mean ∂y_i/∂x_i of groups of neighbouring bins.

    A group contains at least ``least_count`` pairs; bins within one multiple of ``width`` are joined in any case.

    Raises:
        DataError: if the capture lacks sums of the diagonal.
    """
    moments = coarsened(_diagonal_moments(site, stats).sum(0), 2**PAIR_GRID.mantissa_bits // _GROUPS_AN_OCTAVE)
    bins = moments[:3, moments[0] > 0].numpy()
    if width > 0:
        multiple = np.floor(bins[1] / bins[0] / width)
        bins = np.add.reduceat(bins, np.flatnonzero(np.diff(multiple, prepend=-np.inf)), axis=1)
    n, x, diagonal = np.add.reduceat(bins, groups_of_bins(bins[0], least_count), axis=1)
    return x / n, diagonal / n


def _view(capture: Capture, site: NormSite, fits: Sequence[CurveFit]) -> GradientView:
    stats = capture.stats[site.name]
    about: dict[str, Any] = {
        **about_site(capture, site.name),
        **{"kind": site.kind, "d": site.d, "centred": site.centred, "of_tokens": stats.n_tokens},
    }
    drawn = drawn_jacobians(site, stats)
    if isinstance(drawn, str):
        return GradientView(**about, reason=drawn, n_tokens=0, n_largest=0)
    # The pairs (x, ∂y_i/∂x_i) take the place of (x, y).
    target = site_target(site, stats, _diagonal_moments(site, stats))
    in_tail = drawn.x.abs() > drawn.tail
    both = (drawn.uniform, drawn.largest)
    # Bins are not joined: a derivative may jump, and there is no search that would take long.
    problems = FitBatch([target], 2**PAIR_GRID.mantissa_bits)
    r2_by_name = {fit.curve: _curve_r2(fit, problems) for fit in fits}
    # The ceiling is that of the best function found, which may be a curve.
    r2_by_name["of_x"] = max([_ceiling_r2(problems, capture), *r2_by_name.values()], key=itemgetter(0))
    return GradientView(
        **about,
        reason=None,
        n_tokens=len(drawn.x),
        n_largest=len(drawn.largest_x),
        folds=target.fold_by,
        share=float(drawn.uniform.share.mean()),
        least_share=float(torch.cat([matrices.share for matrices in both]).amin()),
        tail_share=float(drawn.uniform.row_share[in_tail].mean()),
        least_row_share=float(torch.cat([matrices.row_share for matrices in both]).amin()),
        r2_of_x=r2_by_name["of_x"][0],
        r2={fit.curve: r2_by_name[fit.curve][0] for fit in fits},
        intervals={name: bounds for name, (_, bounds) in r2_by_name.items() if bounds is not None},
        constants=constants_by_part(drawn.x, drawn.y, drawn.uniform, drawn.tail),
    )


def _diagonal_moments(site: NormSite, stats: PairStats) -> Tensor:
    return sums_of(stats.diagonal_moments, "of the diagonal of the Jacobian of", site, "diagonal")


def _curve_r2(fit: CurveFit, problems: FitBatch) -> tuple[float, Interval | None]:
    """R² of a fixed curve's derivative, and its 95 %."""
    if fit.degenerate or problems.targets[0].nothing is not None:
        return math.nan, None

    def left(nodes: Nodes) -> Tensor:
        slopes = fit.derivative(nodes.x).where(nodes.weight > 0, 0.0)  # infinite at 0, of some curves
        return nodes.residual(slopes) / nodes.total

    whole, without = left(problems.nodes()), left(problems.nodes("others")).view(1, problems.folds)
    low, high = map(float, interval_of_r2(whole, without, torch.where(problems.occupied, problems.n_pairs, 0.0)))
    return float(1 - whole), (low, high) if math.isfinite(low + high) else None


def _ceiling_r2(diagonal: FitBatch, capture: Capture) -> tuple[float, Interval | None]:
    """Ceiling of the diagonal, and its 95 %; NaN without folds."""
    [target] = diagonal.targets
    if target.fold_by is None or target.nothing is not None:
        return math.nan, None
    top = None
    for _, problems in batches(fit_targets(capture.only([target.site]))):  # none, if there is nothing to fit
        [top] = ceilings(problems, diagonal)
    return (top.r2, top.interval) if top else (math.nan, None)
