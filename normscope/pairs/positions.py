"""Positions of tokens in their samples: the axis that numbers them at each site, and the number of each token."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from normscope.errors import UsageError
from normscope.norms.sites import NormSite
from normscope.norms.trace import NormReport

# Axes of a norm's input that number its tokens, that of samples first; and the index of that of positions among them.
Layout = tuple[tuple[int, ...], int]


def layouts(report: NormReport) -> dict[str, Layout | str]:
    """Return each site's layout, or the reason why its tokens are not one position of one sample each."""
    by_shape = {site.name: _layout(site, report, ()) for site in report.sites}
    lengths = {report.shapes[name][axes[0][1]] for name, axes in by_shape.items() if not isinstance(axes, str)}
    return {site.name: _layout(site, report, lengths) for site in report.sites}


def _layout(site: NormSite, report: NormReport, lengths: Collection[int]) -> Layout | str:
    """Find the layout from the shape for one sample; queries and keys have heads beside positions of known lengths."""
    shape = report.shapes[site.name]
    if site.grouped:
        return "its token contains all positions of a sample"
    if site.name in report.weight_norms:
        return "its tokens are made of weights, and belong to no sample"
    channels = site.channel_axis if isinstance(site.channel_axis, tuple) else (site.channel_axis,)
    axes = tuple(sorted({*range(len(shape))} - {axis % len(shape) for axis in channels}))
    sizes = [shape[axis] for axis in axes]
    if len(axes) == 2 and 1 in sizes:
        return axes if sizes[0] == 1 else axes[::-1], 1
    why = {1: "no axis of positions", 2: "no axis of samples alone"}.get(len(axes), "positions along several axes")
    if site.placement == "qk" and len(axes) == 3 and sizes[0] == 1:
        along = [index for index in (1, 2) if sizes[index] in lengths]
        if len(along) == 1:
            return axes, along[0]
        why = "heads and positions that cannot be told apart"
    return f"its input {tuple(shape)} of one sample has {why}"


def refuse_skipping(layouts: Iterable[tuple[str, Layout | str]]) -> None:
    """Raise UsageError, with the reasons, if a site has no layout."""
    reasons = [f"{name} ({layout})" for name, layout in layouts if isinstance(layout, str)]
    if reasons:
        raise UsageError(
            "skip leaves out the first positions of each sample, where a token is one position of one sample. It is "
            f"not at {'; '.join(reasons)}. Choose other layers, or leave skip out."
        )


def positions_along(sizes: tuple[int, ...], axis: int, device: torch.device, valid: Tensor | None = None) -> Tensor:
    """Number the data of each sequence, of tokens along axes of these sizes: int64 ``(tokens,)``.

    ``valid`` is False for padding, bool ``(tokens,)``; ``axis`` is that of positions.

    >>> positions_along((1, 3), 1, torch.device("cpu"), torch.tensor([False, True, True])).tolist()
    [-1, 0, 1]
    """
    if valid is not None:
        return (valid.view(sizes).cumsum(axis) - 1).flatten()
    return _without_padding(sizes, axis, device)


@functools.lru_cache(maxsize=4)  # the norms of a pass mostly share their sizes
def _without_padding(sizes: tuple[int, ...], axis: int, device: torch.device) -> Tensor:
    numbers = torch.arange(sizes[axis], device=device)
    return numbers.view([-1 if n == axis else 1 for n in range(len(sizes))]).expand(sizes).flatten()
