"""Data of one norm site for the page: sums as weighted points, drawn pairs, fits, and tokens of kept inputs."""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from normscope.errors import DataError, count
from normscope.fits.card import MASSIVE_RATIO, MASSIVE_SIZE, NormCard
from normscope.fits.curve_fit import CurveFit
from normscope.fits.gradient import drawn_jacobians, mean_diagonal
from normscope.fits.nodes import Nodes
from normscope.inputs.previews import Preview
from normscope.norms.sites import NormSite
from normscope.pairs.kept_inputs import KeptInput
from normscope.pairs.sums.stats import PairStats
from normscope.runtime.files import visible
from normscope.runtime.records import as_json
from normscope.show.figures.axes import ASINH, LINEAR, Limits, XAxis, mean_line, pairs_beyond, scales_of
from normscope.show.figures.panels import drawn_pairs, image, residuals
from normscope.show.tables.card import card_lines

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
_OF_A_FIT = (
    *("curve", "amplitude", "alpha", "shift", "slope", "r2", "r2_ceiling", "r2_cv", "rmse", "tail_rmse", "saturated"),
    *("form", "doubt", "nothing", "intervals", "x_repeats"),
)


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
        "card": [[question, visible(answer)] for question, answer in card_lines(card)],
        "numbers": as_json(numbers(card, stats)),
        "fits": [{name: as_json(getattr(fit, name)) for name in _OF_A_FIT} for fit in fits],
        "drawn": None,
    }
    if data["nothing"]:
        return data
    scales = {scale: scales_of([(site, stats)], scale, fits) for scale in (LINEAR, ASINH)}
    axis = scales[ASINH].x  # finer about zero: the one along which sums and curves are sampled
    data["drawn"] = {
        "axes": {scale: axis_data(stats, of_scale.x, of_scale.y) for scale, of_scale in scales.items()},
        "lines": {fit.curve: line_data(fit, axis) for fit in fits if not fit.degenerate},
        "nodes": None if nodes is None else nodes_data(nodes),
        "mean": _points(*mean_line(stats.moments.sum(0), axis, _WIDTH_INCHES)),
        "shown": tokens_data(stats, elements),
        "by_channel": channels_data(stats),
        "residuals": residual_data(stats, fits, axis),
        "diagonal": diagonal_data(site, stats, axis),
    }
    return data


def axis_data(stats: PairStats, axis: XAxis, y: Limits) -> dict[str, Any]:
    """Return an axis of x with its limits of y, the number of pairs beyond it, and the density along it."""
    beyond, density = pairs_beyond(stats.moments.sum(0), axis.limits), density_data(stats, axis, y)
    return {"limits": axis.limits, "width": axis.linear_width, "y": y, "beyond": beyond, "density": density}


def numbers(card: NormCard, stats: PairStats) -> dict[str, Any]:
    """Return the numbers of a site that the overview draws; None for missing ones."""
    centring, scale, tails = card.centring, card.scale, card.tails
    of_site: dict[str, Any] = {
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
        return of_site | {"massive_channels": None, "massive_tokens": None}
    limit = max(MASSIVE_SIZE, MASSIVE_RATIO * tails.median)
    tokens = sum(abs(token.x) > limit for token in tails.tokens)
    return of_site | {"massive_channels": int((stats.reach > limit).sum()), "massive_tokens": tokens}


def line_data(fit: CurveFit, axis: XAxis) -> dict[str, Any]:
    """Return a fitted curve and its derivative at points spaced evenly along an axis."""
    x = torch.from_numpy(axis.evenly(LINE_POINTS))
    return {"line": packed(fit(x), "f4"), "derivative": packed(fit.derivative(x), "f4")}


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

    def of(name: str) -> Array:
        joined: Array = torch.cat([getattr(sample, name)[:number] for sample, number in parts]).double().numpy()
        return joined

    x, y, sigma = of("x"), of("y"), 1 / of("rstd")
    offset = np.median(x - sigma[:, None] * y, axis=1) if x.size else np.zeros(len(x))
    data = {
        "width": width,
        "uniform": uniform,
        "sample": packed(of("sample"), "i4"),
        "position": packed(of("position"), "i4"),
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
        every = max(1, math.ceil(len(x) / _MOST_PAIRS))
        order = x.argsort()[::every]
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


def packed(values: Any, kind: str) -> dict[str, str]:
    """Encode an array, flat: a numpy dtype without byte order, and base64 of its little-endian bytes.

    >>> packed([1.0, 2.0], "f4")
    {'kind': 'f4', 'bytes': 'AACAPwAAAEA='}
    """
    array = np.ascontiguousarray(values, f"<{kind}")
    return {"kind": kind, "bytes": base64.b64encode(array.tobytes()).decode("ascii")}


def packed_scaled(floats: Any) -> dict[str, Any]:
    """Encode floats as multiples of a 32,767th of the largest one, in 16 bits."""
    values = np.asarray(floats, np.float64)
    scale = float(np.abs(values).max(initial=1e-30)) / 32767
    return packed(np.round(values / scale), "i2") | {"scale": scale}


PATCHES, FRAMES, WORDS, NOWHERE = "patches", "frames", "words", ""
_MOST_BEFORE = 16  # tokens of no patch: class and distillation tokens, registers
_PATCHES_TO_ONE_BEFORE = 2  # at least: a handful of queries is no small picture after many registers
_OFF_BY = 0.1  # of the threshold of the tail, as a share: the grid of sizes has four edges to the octave


@dataclass(frozen=True)
class Places:
    """Map from a norm's tokens to places of an input.

    Place ``place`` in row ``other`` is token ``other * steps[0] + place * steps[1]``. The first ``before`` places, such
    as the class token, are no part of the input; the next ones are the cells of the grid, row by row.

    Attributes:
        kind: ``patches`` of the picture, ``frames`` along the time, ``words``; empty if tokens are no places.
        grid: number of rows and of columns of places; one row of frames and words.
        before: number of tokens of no place.
        others: size of the axis that does not number places: heads, calls of the norm.
        named: name of that axis, ``head`` or ``call``; empty if there is none.
        steps: from one of the others to the next, and from one place to the next, in tokens.
        said: description in words.
    """

    kind: str
    grid: tuple[int, int] = (0, 0)
    before: int = 0
    others: int = 1
    named: str = ""
    steps: tuple[int, int] = (0, 1)
    said: str = ""


def inputs_data(inputs: Sequence[KeptInput]) -> list[dict[str, Any]]:
    """Return previews of the kept inputs; one input in several parts of the data has one group."""
    groups: dict[Any, int] = {}
    counts: Counter[Any] = Counter()  # of samples of the same source in one part of the data
    rows = []
    for kept in inputs:
        sample, part = kept.sample, kept.part
        counts[sample.source, sample.data, part] += 1
        key = sample.source, sample.data, counts[sample.source, sample.data, part]
        group = groups.setdefault(key, len(groups))
        name = sample.source if part else kept.name
        rows.append({"name": name, "part": part, "sample": sample.index, "group": group, **_shown(kept.preview)})
    return rows


def _shown(preview: Preview) -> dict[str, Any]:
    data: dict[str, Any] = {"note": preview.note, "picture": None, "waveform": None, "words": list(preview.words)}
    if (pixels := preview.pixels) is not None:
        height, width, channels = pixels.shape
        data["picture"] = {
            **{"height": height, "width": width, "channels": channels, "pixels": packed(pixels, "u1")},
            **{"size": preview.size, "along_width": preview.along_width},
        }
    if (envelope := preview.envelope) is not None:
        low, high = (packed(values, "f4") for values in envelope)
        data["waveform"] = {"low": low, "high": high, "length": preview.length}
    return data


def site_inputs(inputs: Sequence[KeptInput], site: NormSite, card: NormCard) -> dict[str, Any]:
    """Return the tokens of each kept input at a site, or None, and the |x| from which on elements are the tail.

    ``tail_from`` is the end of the linear range of the site's own tanh, as in the norm card, on the nearest edge of the
    grid that sizes were counted on; None without such a range or edge.
    """
    data, tail_from = list[dict[str, Any] | None](), None
    for kept in inputs:
        if (tokens := kept.tokens.get(site.name)) is None:
            data.append(None)
            continue
        row = {"shape": tokens.shape, "places": asdict(places_of(tokens.shape, kept.preview, site)), "tail": None}
        if card.linear_up_to is not None:
            edge, shares = tokens.tail(card.linear_up_to)
            if abs(edge / card.linear_up_to - 1) < _OFF_BY:
                tail_from, row["tail"] = edge, packed_scaled(shares)
        data.append(row | {"sigma": packed(tokens.sigma, "f4"), "offset": packed(tokens.shift, "f4")})
    return {"inputs": data, "tail_from": tail_from}


def places_of(shape: tuple[int, ...], preview: Preview, site: NormSite) -> Places:
    """Return the place of an input that each token is, from the tokens' layout and the preview.

    ``shape`` is as in :class:`normscope.pairs.kept_inputs.KeptTokens`. A norm of queries or keys has an axis of heads;
    a norm that is called several times has an axis of calls.

    >>> from types import SimpleNamespace
    >>> norm = SimpleNamespace(placement="qk", calls=1)
    >>> places_of((12, 3), Preview(words=("[CLS]", "hello", "[SEP]")), norm).said
    '3 positions of the text, in each of 12 heads'
    """
    if math.prod(shape) == 1:
        return Places(NOWHERE, before=1, said="one token stands for the whole input")
    is_qk = site.placement == "qk"
    if not is_qk and len(shape) == 2 and (picture := _grid(shape, preview)) is not None:
        return picture
    candidates = []  # length of the axis of places; size and name of the other axis; steps along both
    if len(shape) == 1:
        candidates = [(shape[0], 1, "", (0, 1))]
    elif len(shape) == 2 and (is_qk or shape[0] == site.calls > 1):
        first, last = shape
        candidates = [(last, first, "head" if is_qk else "call", (last, 1))]
        candidates += [(first, last, "head", (1, last))] if is_qk else []
    layouts = []
    for length, others, named, steps in candidates:
        if (places := _along(length, preview)) is not None:
            each = f", in each of {others} {named}s" if others > 1 else ""
            layouts.append(replace(places, others=others, named=named, steps=steps, said=places.said + each))
    if not layouts:
        return Places(NOWHERE, said=f"the tokens of this norm are no places of the input: they lie as {_by(shape)}")
    return max(layouts, key=lambda places: math.prod(places.grid))


def _along(length: int, preview: Preview) -> Places | None:
    """Return the places along one axis of tokens."""
    if preview.words and length == len(preview.words):
        return Places(WORDS, (1, length), said=f"{length:,} positions of the text")
    if preview.words and preview.pixels is None and preview.envelope is None:
        return None
    if preview.pixels is not None and not preview.along_width:
        return _patches(length, *preview.size)
    times, unit = (preview.length, "samples") if preview.envelope is not None else (preview.size[1], "columns")
    if not 1 < length <= times:
        return None
    return Places(FRAMES, (1, length), said=f"{length:,} frames, one every {times / length:.3g} {unit}")


def _patches(length: int, height: int, width: int) -> Places | None:
    """Return the largest grid of square patches, of a whole number of pixels, that leaves few tokens over."""
    for size in range(1, math.gcd(height, width) + 1):
        if height % size or width % size:
            continue
        grid = height // size, width // size
        before = length - math.prod(grid)
        if 0 <= before <= min(_MOST_BEFORE, math.prod(grid) // _PATCHES_TO_ONE_BEFORE):
            after = f", after {count(before, 'token')} of no patch" if before else ""
            return Places(PATCHES, grid, before, said=f"{_by(grid)} patches of {_by((size, size))} pixels{after}")
    return None


def _grid(shape: tuple[int, ...], preview: Preview) -> Places | None:
    """Return the grid of tokens in rows and columns whose patches are square, up to the rounding of one patch."""
    if preview.pixels is None or preview.along_width:
        return None
    (rows, columns), (height, width) = shape, preview.size
    if rows > height or columns > width or abs(rows * width - columns * height) >= max(height, width):
        return None
    size = height / rows, width / columns
    about = "" if all(map(float.is_integer, size)) else "about "
    said = f"{_by((rows, columns))} patches of {about}{size[0]:.3g} × {size[1]:.3g} pixels"
    return Places(PATCHES, (rows, columns), said=said)


def _by(sizes: tuple[int, ...]) -> str:
    return " × ".join(map(str, sizes))
