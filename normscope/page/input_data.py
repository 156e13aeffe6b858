"""Data of kept inputs for the page: previews, and the place of an input that each token of a norm is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from normscope.errors import count
from normscope.fits.card import NormCard
from normscope.inputs.previews import Preview
from normscope.norms.sites import NormSite
from normscope.page.packing import packed, packed_scaled
from normscope.pairs.kept_inputs import KeptInput

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
        repeats: size of the axis that does not number places: heads, calls of the norm.
        named: name of that axis, ``head`` or ``call``; empty if there is none.
        steps: from one of the repeats to the next, and from one place to the next, in tokens.
        said: description in words.
    """

    kind: str
    grid: tuple[int, int] = (0, 0)
    before: int = 0
    repeats: int = 1
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
    for length, repeats, named, steps in candidates:
        if (places := _along(length, preview)) is not None:
            suffix = f", in each of {repeats} {named}s" if repeats > 1 else ""
            layouts.append(replace(places, repeats=repeats, named=named, steps=steps, said=places.said + suffix))
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
