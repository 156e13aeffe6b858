"""What the curves leave of E[y|x], beside how far the folds differ in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle
from numpy.typing import NDArray
from torch import Tensor

from normscope.figures.axes import XAxis
from normscope.figures.panels import Panel, enlarged_range, inset_of, outline
from normscope.fits.curve_fit import CurveFit

Array = NDArray[np.float64]

_GROUPS = 120  # across a panel at most
_LEAST_COUNT = 128  # pairs that a group holds at least
_BAND = 2.0  # standard errors
_MARGIN = 1.08
_INSET_SHARE = 0.46  # of a panel's height
_BAND_ALPHA = 0.35


@dataclass(frozen=True)
class Residuals:
    """Of groups of neighbouring bins, in ascending order of x.

    Attributes:
        x: mean x, float64 ``(groups,)``.
        error: standard error of E[y|x], in units of y, ``(groups,)``; NaN where the pairs are of a single fold.
        off: E[y|x] − A·f(αx + s), in units of y, ``(fits, groups)``.
    """

    x: Array
    error: Array
    off: Array


def residuals(
    moments: Tensor,
    fits: Sequence[CurveFit],
    width: float,
    least_count: int = _LEAST_COUNT,
    along: Callable[[Array], Array] = lambda x: x,
) -> Residuals:
    """Average over each group of bins what the curves leave of y there, and see how far the folds differ.

    The folds are independent, pairs are not: with the share w of a group's pairs that each fold holds, and the folds'
    means m of y there, the standard error is that of a mean of so many folds, √(Σw² · Σw(m − Σwm)² / (1 − Σw²)),
    which is the standard deviation over folds / √folds where all hold the same number.

    Args:
        moments: n, Σx, Σy, … per fold and bin of x: float64 ``(folds, 6, bins)``.
        fits: of this site, none degenerate.
        width: a group reaches over no more of x than this, unless it would hold too few pairs.
        least_count: how many pairs a group holds at least, where there are as many.
        along: places of x on an axis, in whose units the width is.

    Returns:
        The residuals, of no group where there is no pair.

    >>> n, y = torch.full((4, 1), 50.0), torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    >>> found = residuals(torch.stack([n, n, n * y, n, n, n], 1).double(), (), 1.0)
    >>> round(float(found.error[0]), 6), round(float(y.std() / 4**0.5), 6)
    (0.645497, 0.645497)
    """
    filled = moments[:, 0].sum(0) > 0
    n, sum_x, sum_y = moments[:, :3, filled].numpy().transpose(1, 0, 2)
    if not n.size:
        return Residuals(np.empty(0), np.empty(0), np.empty((len(fits), 0)))
    x = sum_x.sum(0) / n.sum(0)
    starts = _starts(n.sum(0), along(x), width, least_count)
    by_fold, y_by_fold = np.add.reduceat(n, starts, axis=1), np.add.reduceat(sum_y, starts, axis=1)
    held = by_fold.sum(0)
    mean = y_by_fold.sum(0) / held
    share = by_fold / held
    fold_means = np.divide(y_by_fold, by_fold, out=np.zeros_like(by_fold), where=by_fold > 0)
    alike = (share**2).sum(0)
    several = np.count_nonzero(by_fold, axis=0) > 1
    error = np.full_like(mean, np.nan)
    np.divide(alike * (share * (fold_means - mean) ** 2).sum(0), 1 - alike, out=error, where=several)
    expected = np.stack([fit(torch.from_numpy(x)).numpy() for fit in fits]) if fits else np.empty((0, len(x)))
    at_fit = np.add.reduceat(n.sum(0) * expected, starts, axis=1) / held
    return Residuals(np.add.reduceat(sum_x.sum(0), starts) / held, np.sqrt(error), mean - at_fit)


def _starts(n: Array, x: Array, width: float, least_count: int) -> NDArray[np.intp]:
    """First bins of the groups: at most one in a multiple of ``width``, each of ``least_count`` pairs if there are."""
    cuts = np.flatnonzero(np.diff(np.floor(x / width), prepend=-np.inf))
    starts, held = [0], 0.0
    for place, count in zip(cuts, np.add.reduceat(n, cuts), strict=True):
        if held >= least_count:
            starts.append(int(place))
            held = 0.0
        held += count
    return np.array(starts[:-1] if held < least_count and len(starts) > 1 else starts)


def draw_residuals(ax: Axes, panel: Panel) -> None:
    """E[y|x] − A·f(αx + s) of every fitted curve over ± 2 standard errors of E[y|x]."""
    centre = enlarged_range(panel)
    _draw_within(ax, panel, panel.axis, _INSET_SHARE if centre else 0)
    panel.axis.set_on(ax, panel.inches)
    if centre:
        _draw_within(inset_of(ax, panel, centre[0]), panel, XAxis(centre[0]), 0)


def _draw_within(ax: Axes, panel: Panel, axis: XAxis, free: float) -> None:
    """Draw what lies between these limits; above it a share of the height stays free."""
    fits = [fit for fit in panel.fits if not fit.degenerate]
    low, high = axis.along(np.array(axis.limits))
    groups = residuals(panel.stats.moments, fits, (high - low) / _GROUPS, along=axis.along)
    band = _BAND * groups.error
    inside = (groups.x >= axis.limits[0]) & (groups.x <= axis.limits[1])
    reach = _MARGIN * float(np.nanmax(np.abs(np.array([*groups.off, *([] if fits else [band])])[:, inside]), initial=0))
    reach = reach if reach > 0 else 1.0
    if axis.linear_width is not None:
        ax.set_xscale("asinh", linear_width=axis.linear_width)
    ax.set(xlim=axis.limits, ylim=(-reach, reach * (1 + free) / (1 - free)))
    drawn: list[Artist] = [
        ax.fill_between(groups.x, -band, band, color=panel.style.faint, alpha=_BAND_ALPHA, lw=0, zorder=1)
    ]
    ax.axhline(0, color=panel.style.ink, lw=0.6, zorder=2)
    for fit, off in zip(fits, groups.off, strict=True):
        colour, dashes = panel.looks[fit.curve]
        drawn += ax.plot(
            groups.x, off, color=colour, ls=dashes, lw=1.0, zorder=4, path_effects=outline(panel.style, 0.6)
        )
    left, right = axis.limits
    for artist in drawn if free else []:
        artist.set_clip_path(Rectangle((left, -reach), right - left, 2 * reach, transform=ax.transData))


def residual_handles(panels: Sequence[Panel]) -> list[Artist]:
    """The legend of the band, and of its folds; nothing where no site has any."""
    over = sorted({str(panel.stats.fold_by) for panel in panels if panel.stats.fold_by})
    if not over:
        return []
    label = f"±{_BAND:g} standard errors of E[y|x], folds by {', '.join(over)}"
    return [Patch(facecolor=panels[0].style.faint, alpha=_BAND_ALPHA, label=label)]
