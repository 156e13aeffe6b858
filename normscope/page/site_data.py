"""Data of one norm site for the page: sums as weighted points, drawn pairs and fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from normscope.errors import DataError
from normscope.fits.card import MASSIVE_RATIO, MASSIVE_SIZE, NormCard
from normscope.fits.curve_fit import CurveFit
from normscope.fits.gradient import drawn_jacobians, mean_diagonal
from normscope.fits.nodes import Nodes
from normscope.norms.sites import NormSite
from normscope.page.packing import packed, packed_scaled
from normscope.pairs.sums.stats import PairStats
from normscope.runtime.files import visible
from normscope.runtime.records import as_json
from normscope.show.figures.axes import ASINH, LINEAR, Limits, XAxis, mean_line, pairs_beyond, scales_of
from normscope.show.figures.panel_data import drawn_pairs, image, residuals
from normscope.show.tables.card import card_tables
from normscope.show.tables.glossary import definitions
from normscope.show.tables.table import NONE

Array = NDArray[np.float64]

COLUMNS, ROWS = 240, 140  # of a density
LINE_POINTS = 241  # of a curve, odd: one of them is zero
_FEWEST = 0.1  # pairs, spread over pixels, that a density still shows
_LEVELS = 254
_GROUPS = 240  # across an asinh axis, of the residuals
_WIDTH_INCHES = 6.0  # of the page's panels, for the fineness of E[y|x]
_LEAST_COUNT = 32  # pairs in a point of the mean diagonal
_GROUPS_TO_THE_MEDIAN = 8  # of that mean, up to the median of |x|
_SHARE_OF_LARGEST = 0.4  # of the tokens that are shown are among those of largest |x|, if there are so many
_FEWEST_TOKENS = 4
_MOST_SLOPES = 3000  # points of the diagonal
_MOST_PAIRS = 6000  # of grouped norms, whose tokens do not know their channels
_ALSO_OF_A_FIT = ("doubt", "amplitude", "alpha", "shift")  # which JSON of the free curve lacks


def site_data(
    site: NormSite, stats: PairStats, fits: Sequence[CurveFit], card: NormCard, nodes: Nodes | None, elements: int
) -> dict[str, Any]:
    """Return the data of one site as JSON: its numbers, and ``drawn``, which only its figures need.

    ``nodes`` are the weighted points that its fits were made on, None without pairs to fit; whole tokens with roughly
    ``elements`` elements are shown.
    """
    data: dict[str, Any] = {
        **{name: getattr(site, name) for name in ("index", "name", "kind", "placement", "d", "eps")},
        "channels": None if stats.grouped else stats.channels,
        "pairs": stats.n_pairs,
        "tokens": stats.n_tokens,
        "left_out": int(stats.nonfinite_tokens),
        "folds": stats.fold_by,
        "bound": site.bound if math.isfinite(site.bound) else None,
        "nothing": card.degenerate or ("" if stats.n_pairs else "no pair"),
        "card": card_data(card),
        "numbers": as_json(numbers(card, stats)),
        "fits": [fit.as_dict() | {name: as_json(getattr(fit, name)) for name in _ALSO_OF_A_FIT} for fit in fits],
        "drawn": None,
    }
    if data["nothing"]:
        return data
    scales = {scale: scales_of([(site, stats)], scale) for scale in (LINEAR, ASINH)}
    axis = scales[ASINH].x  # finer about zero: the one along which sums and curves are sampled
    x = torch.from_numpy(axis.evenly(LINE_POINTS))
    data["drawn"] = {
        "axes": {name: axis_data(stats, scale.x, scale.y) for name, scale in scales.items()},
        "lines": {
            fit.curve: {"line": packed(fit(x), "f4"), "derivative": packed(fit.derivative(x), "f4")}
            for fit in fits
            if not fit.degenerate
        },
        "nodes": None if nodes is None else nodes_data(nodes),
        "mean": _points(*mean_line(stats.moments.sum(0), axis, _WIDTH_INCHES)),
        "shown": tokens_data(stats, elements),
        "by_channel": channels_data(stats),
        "residuals": residual_data(stats, fits, axis),
        "diagonal": diagonal_data(site, stats, axis),
    }
    return data


def card_data(card: NormCard) -> list[list[str]]:
    """Return heading, number and definition of every column of a card's tables."""
    tables, terms = card_tables([card]), definitions("stats")
    cells = [cell for table in tables for cell in list(zip(table.headings, table.rows[0], strict=True))[1:]]
    return [[heading, visible(cell), terms.get(heading, "")] for heading, cell in cells if cell != NONE]


def axis_data(stats: PairStats, axis: XAxis, y: Limits) -> dict[str, Any]:
    """Return an axis of x with its limits of y, the number of pairs beyond it, and the density along it."""
    beyond, density = pairs_beyond(stats.moments.sum(0), axis.limits), density_data(stats, axis, y)
    return {"limits": axis.limits, "width": axis.linear_width, "y": y, "beyond": beyond, "density": density}


def numbers(card: NormCard, stats: PairStats) -> dict[str, Any]:
    """Return the numbers of a site that the overview draws; None for missing ones."""
    centring, scale, tails = card.centring, card.scale, card.tails
    numbers: dict[str, Any] = {
        "offset": centring and centring.offset_p50,
        "offset_p95": centring and centring.offset_p95,
        "sigma": scale and scale.sigma_p50,
        "spread": scale and scale.spread,
        "bent": None if card.linear is None else 1 - card.linear,
        **{name: tails and getattr(tails, name) for name in ("largest", "median")},
        "channel_share": tails and sum(channel.share for channel in tails.channels[:3]),
        "massive": tails and tails.massive,
    }
    if tails is None or not tails.median:
        return numbers | {"massive_channels": None, "massive_tokens": None}
    limit = max(MASSIVE_SIZE, MASSIVE_RATIO * tails.median)
    tokens = sum(abs(token.x) > limit for token in tails.tokens)
    return numbers | {"massive_channels": int((stats.reach > limit).sum()), "massive_tokens": tokens}


def nodes_data(nodes: Nodes) -> dict[str, Any]:
    """Return the points that represent pairs, in float64: the page's R² equals that of a fit, to rounding."""
    filled = nodes.weight[0] > 0
    columns = {name: packed(getattr(nodes, name)[0, filled], "f8") for name in ("x", "y", "weight", "scatter")}
    return columns | {"total": float(nodes.total[0])}


def density_data(stats: PairStats, axis: XAxis, y: Limits) -> dict[str, Any]:
    """Return pairs per pixel on a logarithmic scale of levels from 1, column by column from the first filled row."""
    counts = image(stats, axis.evenly(COLUMNS + 1), np.linspace(*y, ROWS + 1))
    most = max(round(float(counts.max())), 2)
    filled = counts >= _FEWEST
    with np.errstate(divide="ignore"):
        levels = 1 + np.floor(_LEVELS * np.log(counts) / math.log(most))
    levels = np.where(filled, np.clip(levels, 1, 1 + _LEVELS), 0).astype(np.uint8)
    first = np.where(filled.any(0), filled.argmax(0), 0)
    length = np.where(filled.any(0), ROWS - filled[::-1].argmax(0) - first, 0)
    columns = [levels[begin : begin + rows, at] for at, (begin, rows) in enumerate(zip(first, length, strict=True))]
    return {
        "first": packed(first, "u1"),
        "length": packed(length, "u1"),
        "levels": packed(np.concatenate(columns), "u1"),
        "most": most,
    }


def tokens_data(stats: PairStats, elements: int) -> dict[str, Any]:
    """Return whole tokens, each a line x = offset + σ·y: the first of the uniform sample, then those of largest |x|.

    The tokens of least key are the same at every site that sees as many.
    """
    width = max(stats.tokens.x.shape[1], 1)
    room = max(elements // width, _FEWEST_TOKENS)
    largest = min(len(stats.largest.key), max(round(_SHARE_OF_LARGEST * room), room - len(stats.tokens.key)))
    uniform = min(len(stats.tokens.key), room - largest)
    parts = [(stats.tokens, uniform), (stats.largest, largest)]

    columns = {
        name: torch.cat([getattr(sample, name)[:number] for sample, number in parts]).double().numpy()
        for name in ("x", "y", "rstd", "sample", "position")
    }
    x, y, sigma = columns["x"], columns["y"], 1 / columns["rstd"]
    offset = np.median(x - sigma[:, None] * y, axis=1) if x.size else np.zeros(len(x))
    data = {
        "width": width,
        "uniform": uniform,
        "sample": packed(columns["sample"], "i4"),
        "position": packed(columns["position"], "i4"),
        "key": [f"{int(key):x}" for sample, number in parts for key in sample.key[:number]],
        "sigma": packed(sigma, "f4"),
        "offset": packed(offset, "f4"),
        "y": packed_scaled(y),
    }
    if x.size and np.abs(offset[:, None] + sigma[:, None] * y - x).max() > 1e-3 * np.abs(x).max():
        data["x"] = packed(x, "f4")  # a user's own formula, which is no line
    return data


def channels_data(stats: PairStats) -> dict[str, Any]:
    """Return the largest |x| and share of Σx² of each channel; for grouped norms also drawn pairs by channel."""
    squares = stats.channel_sums[1]
    data: dict[str, Any] = {
        "reach": packed(stats.reach, "f4"),
        "share": packed(squares / squares.sum().clamp_min(1e-300), "f4"),
    }
    if stats.grouped:
        x, y, channel = drawn_pairs(stats)
        order = x.argsort()[:: max(1, math.ceil(len(x) / _MOST_PAIRS))]
        data |= {"x": packed(x[order], "f4"), "y": packed(y[order], "f4"), "channel": packed(channel[order], "i4")}
    return data


def residual_data(stats: PairStats, fits: Sequence[CurveFit], axis: XAxis) -> dict[str, Any]:
    """Return the residuals of E[y|x] after each fit, with its standard errors."""
    fitted = [fit for fit in fits if not fit.degenerate]
    width = float(np.ptp(axis.along(np.array(axis.limits)))) / _GROUPS
    groups = residuals(stats.moments, fitted, width, along=axis.along)
    return {
        "x": packed(groups.x, "f4"),
        "error": packed(groups.error, "f4"),
        "off": {fit.curve: packed(off, "f4") for fit, off in zip(fitted, groups.off, strict=True)},
    }


def diagonal_data(site: NormSite, stats: PairStats, axis: XAxis) -> dict[str, Any]:
    """Return ∂y_i/∂x_i of drawn tokens and, if it was summed, its mean over all pairs; or the reason for neither."""
    drawn = drawn_jacobians(site, stats)
    if isinstance(drawn, str):
        return {"reason": drawn}
    x = torch.cat([drawn.x.flatten(), drawn.largest_x.flatten()]).numpy()
    slopes = torch.cat([drawn.uniform.diagonal.flatten(), drawn.largest.diagonal.flatten()]).numpy()
    order = x.argsort()
    # Points spaced evenly among the pairs alone would leave a handful in the tails.
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
