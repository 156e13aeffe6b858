"""Inputs that a capture kept, as the page shows them, and which place of an input each token of a norm is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from normscope.fits.views.card import NormCard
from normscope.inputs.previews import Preview
from normscope.page.arrays import packed
from normscope.pairs.kept_inputs import KeptInput, KeptTokens
from normscope.pairs.norms.sites import NormSite

PATCHES, FRAMES, WORDS, NOWHERE = "patches", "frames", "words", ""
_MOST_BEFORE = 16  # tokens of no patch: the class token, that of distillation, registers
_PATCHES_TO_ONE_BEFORE = 2  # at least: a handful of queries is no small picture after many registers
_OFF_BY = 0.1  # of the threshold of the tail, as a share: the grid of sizes has four edges to the octave


@dataclass(frozen=True)
class Places:
    """Which place of an input each token of a norm is.

    Token ``other * steps[0] + place * steps[1]`` is that of a place, in the row of one of the others; the first
    ``before`` places are no part of the input, the next ones are the cells of the grid, row by row.

    Attributes:
        kind: ``patches`` of the picture, ``frames`` along the time, ``words``; empty where tokens are no places.
        grid: number of rows and of columns of places; one row of frames and words.
        before: tokens of no place, such as the class token; they come first.
        others: size of the axis that does not number places: heads, calls of the norm.
        named: what one of the others is: ``head``, ``call``; empty where there is one.
        steps: from one of the others to the next, and from one place to the next, in tokens.
        said: the same in words.
    """

    kind: str
    grid: tuple[int, int] = (0, 0)
    before: int = 0
    others: int = 1
    named: str = ""
    steps: tuple[int, int] = (0, 1)
    said: str = ""


def inputs_data(inputs: Sequence[KeptInput]) -> list[dict[str, Any]]:
    """What the page shows of each kept input; those that are one input in several parts of the data share a group."""
    groups: dict[tuple[str, str, int], int] = {}
    met: Counter[tuple[str, str, str]] = Counter()
    return [
        {
            "name": one.sample.source if one.part else one.name,
            "part": one.part,
            "sample": one.sample.index,
            "group": groups.setdefault((one.sample.source, one.sample.data, _occurrence(one, met)), len(groups)),
            **_shown(one.preview),
        }
        for one in inputs
    ]


def _occurrence(one: KeptInput, met: Counter[tuple[str, str, str]]) -> int:
    """How many samples of the same source came before in its part of the data."""
    key = one.sample.source, one.sample.data, one.part
    met[key] += 1
    return met[key] - 1


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
    """The tokens of each kept input at a site, in the order of the inputs; None of those that it keeps none of.

    ``tail_from`` is the |x| from which on elements are the tail: the end of the range in which the site's own tanh is
    linear, as the norm card has it, on the nearest edge of the grid that sizes were counted on. None where there is no
    such range, or no such edge.
    """
    kept = [one.tokens.get(site.name) for one in inputs]
    tails = [_tail(tokens, card.linear_up_to) for tokens in kept]
    data = [
        None if tokens is None else _tokens_data(tokens, places_of(tokens.shape, one.preview, site), tail)
        for one, tokens, tail in zip(inputs, kept, tails, strict=True)
    ]
    return {"inputs": data, "tail_from": next((tail[0] for tail in tails if tail is not None), None)}


def _tail(tokens: KeptTokens | None, beyond: float | None) -> tuple[float, Tensor] | None:
    if tokens is None or beyond is None:
        return None
    edge, shares = tokens.tail(beyond)
    return (edge, shares) if abs(edge / beyond - 1) < _OFF_BY else None


def _tokens_data(tokens: KeptTokens, places: Places, tail: tuple[float, Tensor] | None) -> dict[str, Any]:
    return {
        "shape": tokens.shape,
        "places": asdict(places),
        "sigma": packed(tokens.sigma, "f4"),
        "offset": packed(tokens.shift, "f4"),
        "tail": None if tail is None else packed(tail[1], "f2"),
    }


def places_of(shape: tuple[int, ...], preview: Preview, site: NormSite) -> Places:
    """Find which place of an input each token is, from how the tokens lie and what the input shows.

    Args:
        shape: sizes of the axes that number the tokens, as of :class:`normscope.pairs.kept_inputs.KeptTokens`.
        preview: of the input.
        site: the norm. A norm of queries or keys has an axis of heads, one that is called several times one of calls.

    >>> from types import SimpleNamespace
    >>> norm = SimpleNamespace(placement="qk", calls=1)
    >>> places_of((12, 3), Preview(words=("[CLS]", "hello", "[SEP]")), norm).said
    '3 positions of the text, in each of 12 heads'
    """
    if math.prod(shape) == 1:
        return Places(NOWHERE, before=1, said="one token stands for the whole input")
    if site.placement != "qk" and len(shape) == 2 and (whole := _grid(shape, preview)) is not None:
        return whole
    found = [
        replace(places, others=others, named=named, steps=steps, said=f"{places.said}{_in_each(others, named)}")
        for length, others, named, steps in _axes_of_places(shape, site)
        if (places := _along(length, preview)) is not None
    ]
    if not found:
        return Places(NOWHERE, said=f"the tokens of this norm are no places of the input: they lie as {_by(shape)}")
    return max(found, key=lambda places: math.prod(places.grid))


def _axes_of_places(shape: tuple[int, ...], site: NormSite) -> list[tuple[int, int, str, tuple[int, int]]]:
    """The axes that may number places: length, size and name of the axis besides, steps along both."""
    if len(shape) == 1:
        return [(shape[0], 1, "", (0, 1))]
    if len(shape) != 2:
        return []
    first, last = shape
    if site.placement == "qk":
        return [(last, first, "head", (last, 1)), (first, last, "head", (1, last))]
    return [(last, first, "call", (last, 1))] if first == site.calls > 1 else []


def _in_each(others: int, named: str) -> str:
    return f", in each of {others} {named}s" if others > 1 else ""


def _along(length: int, preview: Preview) -> Places | None:
    """Places along one axis of tokens."""
    if preview.words:
        if length == len(preview.words):
            return Places(WORDS, (1, length), said=f"{length:,} positions of the text")
        if preview.pixels is None and preview.envelope is None:
            return None
    if preview.pixels is not None and not preview.along_width:
        return _patches(length, *preview.size)
    times, unit = (preview.length, "samples") if preview.envelope is not None else (preview.size[1], "columns")
    if not 1 < length <= times:
        return None
    return Places(FRAMES, (1, length), said=f"{length:,} frames, one every {times / length:.3g} {unit}")


def _patches(length: int, height: int, width: int) -> Places | None:
    """The largest grid of square patches, of a whole number of pixels, that leaves few tokens over."""
    for size in range(1, math.gcd(height, width) + 1):
        if height % size or width % size:
            continue
        grid = height // size, width // size
        before = length - math.prod(grid)
        if 0 <= before <= min(_MOST_BEFORE, math.prod(grid) // _PATCHES_TO_ONE_BEFORE):
            after = f", after {before} {'token' if before == 1 else 'tokens'} of no patch" if before else ""
            return Places(PATCHES, grid, before, said=f"{_by(grid)} patches of {_by((size, size))} pixels{after}")
    return None


def _grid(shape: tuple[int, ...], preview: Preview) -> Places | None:
    """Tokens that lie as rows and columns of the picture: as many to the pixel along both, to the rounding of one."""
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
