"""The gradient view: a norm's Jacobian beside the curves' derivatives, and how constant what each curve holds is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from normscope.fits.ceiling import ceilings, conditional_mean
from normscope.fits.curve_fit import CurveFit
from normscope.fits.jackknife import Interval, interval_of_r2
from normscope.fits.targets import FitBatch, Nodes, batches, fit_targets, joined, site_level, sums_of
from normscope.pairs.captures import Capture
from normscope.pairs.norms.formulas import FORMS, Form, form_name
from normscope.pairs.norms.sites import NormSite
from normscope.pairs.sums.binning import PAIR_GRID
from normscope.pairs.sums.stats import PairStats
from normscope.runtime.records import Record, Records, Tabled


@dataclass(frozen=True)
class Jacobians:
    """Diagonals and norms of the Jacobians of some tokens, in float64.

    Attributes:
        diagonal: ∂y_i/∂x_i, ``(tokens, d)``.
        rows: sum of the squares of each row's entries, Σ_j (∂y_i/∂x_j)², ``(tokens, d)``. The sum of these is the
            squared Frobenius norm.
        scale: 1/rstd: ρ of an RMSNorm, σ of a LayerNorm, eps in it, ``(tokens,)``.
        others: the scale that the token would have with x_i at the mean of its other elements, or at zero where
            squares are taken about zero, ``(tokens, d)``: what stays as it is while x_i moves. DyISRU's constant C is
            d·others² for an RMSNorm and d²/(d − 1)·others² for a LayerNorm (docs/theory.md, 27 and 28).
    """

    diagonal: Tensor
    rows: Tensor
    scale: Tensor
    others: Tensor

    @property
    def share(self) -> Tensor:
        """The part of the squared Frobenius norm that the diagonal holds, ``(tokens,)``."""
        return self.diagonal.square().sum(1) / self.rows.sum(1)

    @property
    def row_share(self) -> Tensor:
        """The part of each row's squares that the diagonal holds, ``(tokens, d)``; 1 of a row of zeros."""
        return torch.where(self.rows > 0, self.diagonal.square() / self.rows, 1.0)


def jacobians(form: Form, rows: Tensor, eps: float) -> Jacobians:
    """Jacobians of some tokens, from what :meth:`normscope.pairs.norms.formulas.Form.jacobian` makes it of.

    Args:
        form: of the norm.
        rows: tokens, ``(tokens, d)``, of any floating dtype.
        eps: of the norm.

    Returns:
        Their diagonals and norms.

    >>> from normscope.pairs.norms.formulas import FORMS, rms_norm
    >>> taken = jacobians(FORMS[rms_norm], torch.tensor([[3.0, 4.0, 0.0, 0.0]]), 0.0)
    >>> [round(float(slope), 3) for slope in taken.diagonal[0]]  # (1 − y²/d)/ρ, with ρ = 2.5
    [0.256, 0.144, 0.4, 0.4]
    """
    x = rows.double()
    d = x.shape[1]
    n, c = d - form.correction, float(form.centred)
    rstd, pull, z = form.jacobian(x, eps)
    crossed = c / d * z.sum(1, keepdim=True) - z
    within = 1 - c / d + 2 * pull * crossed + pull.square() * z.square().sum(1, keepdim=True)
    about = x - x.mean(1, keepdim=True) if form.about_mean else x
    share = about.square() * (d / (d - 1) if form.about_mean else 1)
    rest = (about.square().sum(1, keepdim=True) - share).clamp_min(0)
    return Jacobians(
        diagonal=form.diagonal(x, eps),
        rows=within.clamp_min(0) * rstd.square(),
        scale=1 / rstd[:, 0],
        others=rest.sqrt().clamp_min(eps) / math.sqrt(d) if form.clamped else (rest / n + eps).sqrt(),
    )


PARTS = ("all", "centre", "tail")
_ALIKE = 0.05  # two spreads that differ by less are called alike: they are over a few dozen tokens


@dataclass(frozen=True)
class Spread(Record):
    """Quantiles 0.16, 0.50 and 0.84 of some positive numbers: two thirds lie between them. NaN of no numbers."""

    p16: float
    p50: float
    p84: float

    _properties = ("ratio",)

    @property
    def ratio(self) -> float:
        """p84/p16: 1 of a constant."""
        return self.p84 / self.p16 if self.p16 > 0 else math.nan


@dataclass(frozen=True)
class Constants(Record):
    """Spreads of what the curves' derivations hold constant, over some pairs of the uniformly drawn tokens.

    Attributes:
        n_pairs: number of pairs.
        scale: 1/rstd, which DyT holds constant: ρ of an RMSNorm, σ of a LayerNorm. A token counts once a pair.
        others: √C, which DyISRU holds constant, in the same unit: the scale that the token's other elements make.
        C: x²(d/y² − 1), in units of x². For an RMSNorm it is d·others². A LayerNorm's takes x as it is, with the
            token's mean in it, and means nothing where y passes through zero.
    """

    n_pairs: int
    scale: Spread
    others: Spread
    C: Spread

    _properties = ("steadier",)

    @property
    def steadier(self) -> Literal["scale", "others"] | None:
        """The one of ``scale`` and ``others`` of smaller ratio; None where they differ by less than 5 %."""
        scale, others = self.scale.ratio, self.others.ratio
        if not abs(math.log(scale / others)) > _ALIKE:
            return None
        return "scale" if scale < others else "others"


def constants_by_part(x: Tensor, y: Tensor, jacobians: Jacobians, tail: float) -> dict[str, Constants]:
    """Constants of all pairs of some tokens, of those of |x| up to ``tail``, and of those beyond.

    Args:
        x: of the tokens, float64 ``(tokens, d)``.
        y: likewise.
        jacobians: of the tokens.
        tail: in units of x.

    Returns:
        The constants of each of :data:`PARTS`.
    """
    d = x.shape[1]
    beyond = x.abs() > tail
    scale = jacobians.scale[:, None].expand_as(x)
    # Where x and y both are zero the pair says nothing; what is left of x²·d/y² is then the token's own.
    slope = torch.where((x == 0) & (y == 0), scale, x / y)
    values = (scale, jacobians.others, d * slope.square() - x.square())
    parts = dict(zip(PARTS, (torch.ones_like(beyond), ~beyond, beyond), strict=True))
    return {
        part: Constants(int(inside.sum()), *(_spread(value[inside]) for value in values))
        for part, inside in parts.items()
    }


def _spread(values: Tensor) -> Spread:
    if not len(values):
        return Spread(math.nan, math.nan, math.nan)
    # Quantiles that are values themselves: between two infinite ones there is nothing to interpolate.
    return Spread(*np.quantile(values.numpy(), (0.16, 0.5, 0.84), method="inverted_cdf").tolist())


Array = NDArray[np.float64]
TAIL_FROM = 0.99  # of the drawn tokens' |x| lie below the tail
_FORMS = {form_name(form): form for form in FORMS.values()}
_GROUPS_AN_OCTAVE = 8  # of the mean that is drawn


@dataclass(frozen=True, repr=False)
class GradientView(Tabled, Record):
    """The Jacobian ∂y_i/∂x_j of one norm site.

    Its diagonal's R² are over all pairs. What needs whole tokens, shares and constants, is over the drawn ones.

    Attributes:
        model: the network.
        weights: its resolved checkpoint and revision.
        data: what went through it.
        site: module path of the norm.
        kind: its name in the table of norms.
        d: number of elements of a token.
        centred: whether the norm takes the token's mean away.
        reason: why there is no closed form here; all numbers are then NaN. None where there is one.
        n_tokens: number of uniformly drawn tokens, which every share and constant is over.
        n_largest: number of tokens of largest |x|, which the smallest shares take too.
        of_tokens: number of tokens that both were drawn from, and that every R² is over.
        folds: what intervals and cross-validation hold out, one at a time; None where there are no folds.
        share: mean over tokens of the part of the Jacobian's squared Frobenius norm that its diagonal holds.
        least_share: the smallest such part; never less than 1 − 1/d for an RMSNorm, 1 − 2/d for a LayerNorm.
        tail_share: mean over the pairs of the tail of the part of row i's squares that ∂y_i/∂x_i holds.
        least_row_share: the smallest such part among all drawn pairs.
        r2_of_x: R² of the best function of x that was found as a prediction of ∂y_i/∂x_i, over all pairs, each
            predicted from other folds: what a function of x alone can say of the diagonal. NaN without folds.
        r2: R² of each fitted curve's derivative as a prediction of ∂y_i/∂x_i, over all pairs and about their mean, by
            the curve's name; NaN where there is nothing to fit.
        intervals: 95 % of each R², by the curve's name and ``of_x``: a jackknife over the folds in which the curve
            stays as it was fitted to all of them. None of what has no folds.
        constants: for ``all`` pairs, for the ``centre`` and for the ``tail``, the hundredth of largest |x|.
    """

    model: str
    weights: str
    data: str
    site: str
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
        """The columns of ``normscope gradient --json``; a number that is none becomes None."""
        row = super().as_dict()
        return row | {"intervals": {f"r2_{name}": bounds for name, bounds in row["intervals"].items()}}


@dataclass(frozen=True)
class DrawnJacobians:
    """The Jacobians of the drawn tokens of one site.

    Attributes:
        x: of the uniformly drawn tokens, float64 ``(tokens, d)``.
        y: likewise.
        uniform: their Jacobians.
        largest_x: of the tokens of largest |x|, float64 ``(tokens, d)``.
        largest: their Jacobians.
        tail: |x| from which on a pair lies in the tail.
    """

    x: Tensor
    y: Tensor
    uniform: Jacobians
    largest_x: Tensor
    largest: Jacobians
    tail: float


def gradient(capture: Capture, fits: Sequence[CurveFit] = ()) -> Records[GradientView]:
    """Compare every site's Jacobian with the derivatives of its fitted curves.

    Args:
        capture: what :func:`normscope.capture` returned with ``diagonal=True``, or was read from a file.
        fits: what :func:`normscope.fit` made of it.

    Returns:
        One :class:`GradientView` a site; its ``reason`` says where there is no closed form.

    Raises:
        DataError: if the capture holds no sums of the Jacobian's diagonal.

    >>> import normscope
    >>> from torch import nn
    >>> x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    >>> seen = normscope.capture(nn.Sequential(nn.LayerNorm(8)), [x], diagonal=True)
    >>> [view] = gradient(seen, normscope.fit(seen))
    >>> view.n_tokens, round(view.share, 2), list(view.r2)  # never less than 1 − 2/d
    (64, 0.78, ['tanh', 'isru'])
    """
    return Records(_view(capture, site, [each for each in fits if each.site == site.name]) for site in capture.sites)


def drawn_jacobians(site: NormSite, stats: PairStats) -> DrawnJacobians | str:
    """Jacobians of a site's drawn tokens, or why there are none, as a clause without a full stop."""
    if site.grouped:
        return "a token is a group, of which a capture keeps a part, and may be normalized by running statistics"
    if site.d < 2:
        return "a token has one element, and its Jacobian nothing off the diagonal"
    uniform, largest = stats.tokens.kept(), stats.largest.kept()
    if not len(uniform.key):
        return "no finite token went through it"
    form = _FORMS.get(site.form or "")
    if form is None:
        return "it is of no form whose Jacobian is known"
    x = uniform.x.double()
    tail = float(np.quantile(x.abs().numpy(), TAIL_FROM, method="inverted_cdf"))
    return DrawnJacobians(
        x=x,
        y=uniform.y.double(),
        uniform=jacobians(form, uniform.x, site.eps),
        largest_x=largest.x.double(),
        largest=jacobians(form, largest.x, site.eps),
        tail=tail,
    )


def mean_diagonal(site: NormSite, stats: PairStats, least_count: int, width: float) -> tuple[Array, Array]:
    """E[∂y_i/∂x_i | x] over all pairs of a site, in groups of neighbouring x; two arrays ``(groups,)``.

    Args:
        site: with a closed form.
        stats: of that site.
        least_count: number of pairs that a group holds at least, where there are as many.
        width: bins that lie within one multiple of it are joined, however many pairs they hold; in units of x.

    Raises:
        DataError: if the capture holds no sums of the diagonal.
    """
    moments = joined(_diagonal_moments(site, stats).sum(0), 2**PAIR_GRID.mantissa_bits // _GROUPS_AN_OCTAVE)
    x, mean, _ = conditional_mean(moments, least_count, width)
    return x, mean


def _view(capture: Capture, site: NormSite, fits: Sequence[CurveFit]) -> GradientView:
    stats = capture.stats[site.name]
    about: dict[str, Any] = {
        **{key: capture.about[key] for key in ("model", "weights", "data")},
        **{"site": site.name, "kind": site.kind, "d": site.d, "centred": site.centred, "of_tokens": stats.n_tokens},
    }
    # The pairs (x, ∂y_i/∂x_i), given as a fit is given those of x and y.
    level = site_level(site, stats, _diagonal_moments(site, stats)) if site.has_diagonal else None
    drawn = drawn_jacobians(site, stats)
    if level is None or isinstance(drawn, str):
        return GradientView(**about, reason=str(drawn), n_tokens=0, n_largest=0)
    in_tail = drawn.x.abs() > drawn.tail
    both = (drawn.uniform, drawn.largest)
    # Bins as they were summed, none joined: a derivative may jump, and there is no search that would take long.
    problems = FitBatch([level], 2**PAIR_GRID.mantissa_bits)
    of_curves = {each.curve: _of_curve(each, problems) for each in fits}
    r2_of_x, of_x = _of_x(problems, capture)
    intervals = {**{curve: bounds for curve, (_, bounds) in of_curves.items()}, "of_x": of_x}
    return GradientView(
        **about,
        reason=None,
        n_tokens=len(drawn.x),
        n_largest=len(drawn.largest_x),
        folds=level.fold_by,
        share=float(drawn.uniform.share.mean()),
        least_share=float(torch.cat([each.share for each in both]).amin()),
        tail_share=float(drawn.uniform.row_share[in_tail].mean()),
        least_row_share=float(torch.cat([each.row_share for each in both]).amin()),
        r2_of_x=r2_of_x,
        r2={curve: r2 for curve, (r2, _) in of_curves.items()},
        intervals={name: bounds for name, bounds in intervals.items() if bounds is not None},
        constants=constants_by_part(drawn.x, drawn.y, drawn.uniform, drawn.tail),
    )


def _diagonal_moments(site: NormSite, stats: PairStats) -> Tensor:
    return sums_of(stats.diagonal_moments, "of the diagonal of the Jacobian of", site, "diagonal")


def _of_curve(fit: CurveFit, problems: FitBatch) -> tuple[float, Interval | None]:
    """R² of a curve's derivative, and its 95 %: the curve stays, and one fold of pairs after another is left out."""
    if fit.degenerate or problems.levels[0].nothing is not None:
        return math.nan, None

    def left(nodes: Nodes) -> Tensor:
        slopes = fit.derivative(nodes.x).where(nodes.weight > 0, 0.0)  # infinite at 0, of some curves
        return nodes.residual(slopes) / nodes.total

    whole, without = left(problems.nodes()), left(problems.without_folds()).view(1, problems.folds)
    low, high = map(float, interval_of_r2(whole, without, torch.where(problems.occupied, problems.n_pairs, 0.0)))
    return float(1 - whole), (low, high) if math.isfinite(low + high) else None


def _of_x(diagonal: FitBatch, capture: Capture) -> tuple[float, Interval | None]:
    """Held-out R² of the best function of x that was found for the diagonal, and its 95 %; NaN without folds."""
    [level] = diagonal.levels
    if level.fold_by is None or level.nothing is not None:
        return math.nan, None
    for _, problems in batches(fit_targets(capture.only([level.site]))):
        [top] = ceilings(problems, diagonal)
        return (top.r2, top.interval) if top else (math.nan, None)
    return math.nan, None
