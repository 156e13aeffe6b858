"""One norm site as the page shows it: its sums as weighted points, what is drawn of its pairs, what is said of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.text import Text

from normscope.errors import DataError
from normscope.figures.axes import ASINH, AUTO, LINEAR, Scales, XAxis, mean_line, scales_of
from normscope.figures.panels import drawn_pairs, image, residuals
from normscope.fits.curve_fit import CurveFit
from normscope.fits.solving.nodes import Nodes
from normscope.fits.views.card import MASSIVE_RATIO, MASSIVE_SIZE, NormCard
from normscope.fits.views.gradient import drawn_jacobians, mean_diagonal
from normscope.page.arrays import packed, packed_halves
from normscope.pairs.norms.sites import NormSite
from normscope.pairs.sums.sampling import TokenSample
from normscope.pairs.sums.stats import PairStats
from normscope.runtime.records import as_json
from normscope.tables.card import card_table

Array = NDArray[np.float64]

COLUMNS, ROWS = 240, 140  # of the density
LINE_POINTS = 241  # of a curve, odd: one of them is zero
_FEWEST = 0.1  # pairs, spread over pixels, that the density still shows
_LEVELS = 254
_GROUPS = 120  # across an axis, of the residuals
_WIDTH_INCHES = 6.0  # of the page's panels, for the fineness of E[y|x]
_LEAST_COUNT = 32  # pairs in a point of the mean diagonal
_GROUPS_TO_THE_MEDIAN = 8  # of that mean, up to the median of |x|
_SHARE_OF_LARGEST = 0.4  # of the tokens that are shown are among those of largest |x|, if there are so many
_FEWEST_TOKENS = 4
_MOST_SLOPES = 3000  # points of the diagonal
_MOST_PAIRS = 6000  # of grouped norms, whose tokens do not know their channels
_OF_A_FIT = (
    *("curve", "amplitude", "alpha", "shift", "slope", "r2", "r2_ceiling", "r2_cv", "rmse", "tail_rmse", "saturated"),
    *("rank", "in_noise", "form", "parameters", "doubt", "nothing", "intervals", "reach", "largest_error", "x_repeats"),
)


def site_data(
    site: NormSite,
    stats: PairStats,
    fits: Sequence[CurveFit],
    card: NormCard,
    nodes: Nodes | None,
    elements: int,
) -> dict[str, Any]:
    """Everything that the page knows of one site, as JSON holds it.

    Args:
        site: the norm.
        stats: its sums.
        fits: of this site.
        card: its norm card.
        nodes: the weighted points that its fits were made on, one problem; None where there is nothing to fit.
        elements: how many elements of whole tokens are shown, roughly.
    """
    data: dict[str, Any] = {
        **{name: getattr(site, name) for name in ("index", "name", "kind", "placement", "d", "eps", "calls")},
        "channels": None if stats.grouped else stats.channels,
        "pairs": stats.n_pairs,
        "tokens": stats.n_tokens,
        "left_out": int(stats.nonfinite_tokens),
        "folds": stats.fold_by,
        "bound": site.bound if math.isfinite(site.bound) else None,
        "nothing": card.degenerate,
        "card": card_lines(card),
        "numbers": as_json(numbers(card, stats)),
        "fits": [],
    }
    if not stats.n_pairs:
        return data
    # Finer about zero, whichever axis people look at it on.
    scales, usual = scales_of([(site, stats)], ASINH), scales_of([(site, stats)], AUTO).x
    return data | {
        "axis": {
            "limits": scales.x.limits,
            "linear": scales.x.linear_width,
            "usual": LINEAR if usual.linear_width is None else ASINH,
            "y": scales.y,
        },
        "fits": [fit_data(fit, scales.x) for fit in fits],
        "nodes": None if nodes is None else nodes_data(nodes),
        "mean": _points(*mean_line(stats.moments.sum(0), scales.x, _WIDTH_INCHES)),
        "density": density_data(stats, scales),
        "shown": tokens_data(stats, elements),
        "by_channel": channels_data(stats),
        "residuals": residual_data(stats, fits, usual),
        "diagonal": diagonal_data(site, stats, scales.x),
    }


def card_lines(card: NormCard) -> list[list[str]]:
    """The lines of a norm card, question and answer, as the command ``stats`` words them."""
    cells = [[Text.from_markup(str(cell)).plain for cell in column.cells] for column in card_table(card).columns]
    return [list(line) for line in zip(*cells, strict=True)]


def numbers(card: NormCard, stats: PairStats) -> dict[str, float | int | None]:
    """What the overview draws of a site besides its fits; None of what there is not."""
    of_site: dict[str, float | int | None] = dict.fromkeys(
        ("offset", "offset_p95", "sigma", "spread", "bent", "kurtosis", "largest", "median")
    )
    of_site |= dict.fromkeys(("channel_share", "massive", "massive_channels", "massive_tokens"))
    if card.centring is not None:
        of_site |= {"offset": card.centring.offset_p50, "offset_p95": card.centring.offset_p95}
    if card.scale is not None:
        of_site |= {"sigma": card.scale.sigma_p50, "spread": card.scale.spread}
    if card.linear is not None:
        of_site["bent"] = 1 - card.linear
    if (tails := card.tails) is not None:
        limit = max(MASSIVE_SIZE, MASSIVE_RATIO * tails.median)
        of_site |= {name: getattr(tails, name) for name in ("kurtosis", "largest", "median", "massive")}
        of_site["channel_share"] = sum(channel.share for channel in tails.channels)
        if tails.median > 0:
            of_site["massive_channels"] = int((stats.reach > limit).sum())
            of_site["massive_tokens"] = sum(abs(token.x) > limit for token in tails.tokens)
    return of_site


def fit_data(fit: CurveFit, axis: XAxis) -> dict[str, Any]:
    """A fit's numbers, and the curve and its derivative at places that stand evenly along the axis."""
    data = {name: as_json(getattr(fit, name)) for name in _OF_A_FIT}
    if fit.degenerate:
        return data
    x = torch.from_numpy(axis.evenly(LINE_POINTS))
    return data | {"line": packed(fit(x), "f4"), "derivative": packed(fit.derivative(x), "f4")}


def nodes_data(nodes: Nodes) -> dict[str, Any]:
    """The points of a problem that stand for pairs, in float64: R² in the page is R² of a fit, to rounding."""
    filled = nodes.weight[0] > 0
    columns = {name: packed(getattr(nodes, name)[0, filled], "f8") for name in ("x", "y", "weight", "scatter")}
    return columns | {"total": float(nodes.total[0])}


def density_data(stats: PairStats, scales: Scales) -> dict[str, Any]:
    """Number of pairs per pixel on a logarithmic scale of 254 levels, column by column from its first filled row."""
    y_edges = np.linspace(*scales.y, ROWS + 1)
    counts = image(stats, scales.x.evenly(COLUMNS + 1), y_edges)
    most = max(float(counts.max()), 1.0)
    with np.errstate(divide="ignore"):
        levels = 1 + np.floor(_LEVELS * np.log(counts / _FEWEST) / math.log(most / _FEWEST))
    levels = np.where(counts >= _FEWEST, np.clip(levels, 1, 1 + _LEVELS), 0).astype(np.uint8)
    filled = levels > 0
    first = np.where(filled.any(0), filled.argmax(0), 0)
    length = np.where(filled.any(0), ROWS - filled[::-1].argmax(0) - first, 0)
    columns = [levels[begin : begin + rows, at] for at, (begin, rows) in enumerate(zip(first, length, strict=True))]
    return {
        "first": packed(first, "u1"),
        "length": packed(length, "u1"),
        "levels": packed(np.concatenate(columns), "u1"),
        "most": most,
        "fewest": _FEWEST,
    }


def tokens_data(stats: PairStats, elements: int) -> dict[str, Any]:
    """Whole tokens, each a line x = offset + σ·y: the first of the uniform sample, then those of largest |x|.

    Of the uniform sample those of least key are shown, which are the same tokens at every site that sees as many.
    """
    width = max(stats.tokens.x.shape[1], 1)
    room = max(elements // width, _FEWEST_TOKENS)
    largest = min(len(stats.largest.key), max(round(_SHARE_OF_LARGEST * room), room - len(stats.tokens.key)))
    uniform = min(len(stats.tokens.key), room - largest)
    parts = [(stats.tokens, uniform), (stats.largest, largest)]

    def of(name: str) -> Array:
        joined: Array = torch.cat([getattr(sample, name)[:number] for sample, number in parts]).double().numpy()
        return joined

    x, y, sigma = of("x"), of("y"), 1 / of("rstd")
    offset = np.median(x - sigma[:, None] * y, axis=1) if x.size else np.zeros(len(x))
    known = [_keys(sample, number) for sample, number in parts]
    data = {
        "width": width,
        "uniform": uniform,
        "drawn": len(stats.tokens.key) + len(stats.largest.key),
        "sample": packed(of("sample"), "i4"),
        "position": packed(of("position"), "i4"),
        "key": [*known[0], *known[1]],
        "sigma": packed(sigma, "f4"),
        "offset": packed(offset, "f4"),
        "y": packed_halves(y),
    }
    if x.size and np.abs(offset[:, None] + sigma[:, None] * y - x).max() > 1e-3 * np.abs(x).max():
        data["x"] = packed(x, "f4")  # of a formula of the user's own that is no line
    return data


def _keys(sample: TokenSample, number: int) -> list[str]:
    """Text by which a token is told from all others of its data set, at whichever site."""
    return [f"{int(key):x}" for key in sample.key[:number]]


def channels_data(stats: PairStats) -> dict[str, Any]:
    """Largest |x| and share of Σx² of each channel; of grouped norms the drawn pairs, too, which know their channel."""
    squares = stats.channel_sums[1]
    data: dict[str, Any] = {
        "reach": packed(stats.reach, "f4"),
        "share": packed(squares / squares.sum().clamp_min(1e-300), "f4"),
    }
    if stats.grouped:
        x, y, channel = drawn_pairs(stats)
        every = max(1, math.ceil(len(x) / _MOST_PAIRS))
        order = x.argsort()[::every]
        data |= {"x": packed(x[order], "f4"), "y": packed(y[order], "f4"), "channel": packed(channel[order], "i4")}
    return data


def residual_data(stats: PairStats, fits: Sequence[CurveFit], axis: XAxis) -> dict[str, Any]:
    """What the curves leave of E[y|x], beside two standard errors of it."""
    fitted = [fit for fit in fits if not fit.degenerate]
    low, high = axis.along(np.array(axis.limits))
    groups = residuals(stats.moments, fitted, float(high - low) / _GROUPS, along=axis.along)
    return {
        "x": packed(groups.x, "f4"),
        "error": packed(groups.error, "f4"),
        "off": {fit.curve: packed(off, "f4") for fit, off in zip(fitted, groups.off, strict=True)},
    }


def diagonal_data(site: NormSite, stats: PairStats, axis: XAxis) -> dict[str, Any]:
    """∂y_i/∂x_i of drawn tokens, and its mean over all pairs where it was summed; or why there is none."""
    drawn = drawn_jacobians(site, stats)
    if isinstance(drawn, str):
        return {"reason": drawn}
    x = torch.cat([drawn.x.flatten(), drawn.largest_x.flatten()]).numpy()
    slopes = torch.cat([drawn.uniform.diagonal.flatten(), drawn.largest.diagonal.flatten()]).numpy()
    order = x.argsort()
    # Evenly along the axis as well as among the pairs: the tails would be a handful of points.
    places = np.searchsorted(x[order], axis.evenly(_MOST_SLOPES // 2)[1:-1]).clip(0, len(x) - 1)
    shown = order[np.union1d(places, np.linspace(0, len(x) - 1, _MOST_SLOPES // 2).astype(int))]
    data = _points(x[shown], slopes[shown])
    try:
        mean = mean_diagonal(site, stats, _LEAST_COUNT, float(np.median(np.abs(x))) / _GROUPS_TO_THE_MEDIAN)
    except DataError:
        return data  # the capture did not sum it
    return data | {"mean": _points(*mean)}


def _points(x: Array, y: Array) -> dict[str, Any]:
    return {"x": packed(x, "f4"), "y": packed(y, "f4")}
