"""Axes of samples and positions of a norm's input, the mask of its tokens that are data, and their positions."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from normscope.errors import DataError, UsageError
from normscope.norms.kinds import NormKind, token_axes
from normscope.norms.sites import NormSite
from normscope.norms.trace import NormReport
from normscope.pairs.sums.site_sums import Positions

# Axes of a norm's input that number its tokens, that of samples first; and the index of that of positions among them.
_Layout = tuple[tuple[int, ...], int]


def batch_axis(single: torch.Size, shape: torch.Size, n_samples: int, positions: int | None) -> int | None:
    """Find the axis that grew with the number of samples, which need not be the first.

    It may also count the positions of all samples, which may have other lengths than the first sample. None if there is
    no such axis, so that tokens belong to no known sample: learned queries, for example.
    """
    if n_samples == 1:
        return 0
    if len(single) != len(shape):
        return None
    counts = {n_samples * positions} if positions else set()
    grown = [axis for axis, size in enumerate(single) if shape[axis] in {size * n_samples, *counts}]
    return min(grown, key=lambda axis: single[axis], default=None)


def serves_all(single: torch.Size, shape: torch.Size, single_positions: int | None, positions: int | None) -> bool:
    """True if all samples share an input, given that no axis grew with their number.

    Its axes are then as long as for one sample, except for positions. With fewer positions than that sample had, the
    answer is False, as two short samples may have as many tokens as a long one.

    >>> single = torch.Size([1, 9, 8])
    >>> serves_all(single, torch.Size([1, 12, 8]), 9, 12), serves_all(single, torch.Size([3, 9, 8]), 9, 9)
    (True, False)
    """
    if single_positions is None or positions is None or positions < single_positions:
        return False
    sizes = list(zip(single, shape, strict=False))
    unchanged = all(first == now or (first, now) == (single_positions, positions) for first, now in sizes)
    return len(single) == len(shape) and unchanged


def padded(x: Tensor, packed: int, mask: Tensor) -> Tensor:
    """Return tokens of a packed axis at their positions, ``(samples, positions, …)``, with zeros for padding."""
    x, mask = x.movedim(packed, 0), mask.to(x.device)
    padded = x.new_zeros(*mask.shape, *x.shape[1:])
    padded[mask] = x
    return padded


def _layouts(report: NormReport) -> dict[str, _Layout | str]:
    """Return each site's layout, or the reason why its tokens are not one position of one sample each."""
    by_shape = {site.name: _layout(site, report, ()) for site in report.sites}
    lengths = {report.shapes[name][axes[0][1]] for name, axes in by_shape.items() if not isinstance(axes, str)}
    return {site.name: _layout(site, report, lengths) for site in report.sites}


def _layout(site: NormSite, report: NormReport, lengths: Collection[int]) -> _Layout | str:
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


def _refuse_skipping(reasons: Mapping[str, str]) -> None:
    """Raise UsageError if there are sites, by their names, with reasons against skipping."""
    if reasons:
        listed = "; ".join(f"{name} ({reason})" for name, reason in reasons.items())
        raise UsageError(
            "skip leaves out the first positions of each sample, where a token is one position of one sample. It is "
            f"not at {listed}. Choose other layers, or leave skip out."
        )


class TokenAxes:
    """Axes of the norms' inputs, identified by their sizes in each call and in the first pass, of one sample."""

    def __init__(self, report: NormReport) -> None:
        self._report = report
        self._layouts = _layouts(report)
        self._positions: dict[str, int] = {}  # axis of positions of a site, once a call has shown it
        self._serve_all: set[str] = set()  # sites whose input has no axis of samples

    def sample_axis(self, name: str, shape: torch.Size, n_samples: int, mask: Tensor | None) -> int | None:
        """Find the axis of samples; None where there is none, or it cannot be identified.

        Tokens of a norm without it belong to no sample and no fold, once for each batch.
        """
        single, positions = self._report.shapes[name], None if mask is None else mask.shape[1]
        axis = batch_axis(single, shape, n_samples, positions)
        if n_samples == 1:
            return axis
        on_weight = name in self._report.weight_norms and shape == single
        length = self._report.positions.get(name)
        if on_weight or (axis is None and serves_all(single, shape, length, positions)):
            self._serve_all.add(name)
        return None if name in self._serve_all else axis

    def packed(
        self, site: NormSite, kind: NormKind, module: nn.Module, x: Tensor, batch_axis: int | None, valid: Tensor
    ) -> int | None:
        """Return the axis of the data of all samples, where the network took the padding out; None elsewhere."""
        axes = token_axes(x, kind.axes(module, x.ndim))
        sizes = [x.shape[axis] for axis in axes]
        in_place = (
            valid.numel() in sizes or sizes == [len(valid)] or (batch_axis is not None and valid.shape[1] in sizes)
        )
        channels_last = max(axes, default=0) < len(axes)
        if in_place or not channels_last or site.name in self._report.weight_norms or site.name in self._serve_all:
            return None
        n_data = int(valid.sum())
        packed = [axis for axis in axes if x.shape[axis] == n_data and (batch_axis in (None, axis) or len(valid) == 1)]
        return packed[0] if len(packed) == 1 or (packed and len(valid) == 1) else None

    def valid_tokens(
        self, site: NormSite, kind: NormKind, module: nn.Module, x: Tensor, batch_axis: int | None, valid: Tensor
    ) -> Tensor | None:
        """Return the mask of rows that are data, of a mask of positions: bool ``(tokens,)``, or None for all."""
        if site.name in self._report.weight_norms or site.name in self._serve_all:
            return None
        valid = valid.to(x.device)
        axes = [] if kind.over_positions else token_axes(x, kind.axes(module, x.ndim), batch_axis or 0)
        sizes = [x.shape[axis] for axis in axes]
        if sizes == [valid.numel()]:  # samples and positions in one axis
            return valid.flatten()
        if sizes == [len(valid)]:  # one token a sample, and no position
            return None
        along = [axis for axis, size in zip(axes[1:], sizes[1:], strict=True) if size == valid.shape[1]]
        if not along and len(valid) == 1 and sizes[:1] == [valid.shape[1]]:  # positions come first, then the one sample
            along = axes[:1]
        if len(along) == 1:
            self._positions[site.name] = along[0]
        positions = self._positions.get(site.name)
        if batch_axis is None or positions not in along:
            why = "no axis is as long as the mask" if not along else "several axes are as long as the mask"
            why = "no axis counts the samples" if along and batch_axis is None else why
            remedy = f", or say it in the valid_within of a normscope.Batch: {{{site.path!r}: …}}, None for data alone"
            if kind.groups:
                why, remedy = "its tokens extend over all", ""
            raise DataError(
                f"At the norm {site.name} (input {tuple(x.shape)}) it cannot be told which tokens are padding: {why}, "
                f"of {valid.shape[1]} positions. Pass samples of one length, or one at a time, without padding "
                f"(--batch-size 1){remedy}."
            )
        shape = [size if axis in (batch_axis, positions) else 1 for axis, size in zip(axes, sizes, strict=True)]
        return valid.view(shape).expand(sizes).flatten()

    def refuse_skipping(self, sites: Sequence[NormSite]) -> None:
        """Raise UsageError if tokens of a site are not one position of one sample each."""
        layouts = {site.name: self._layouts[site.name] for site in sites}
        _refuse_skipping({name: layout for name, layout in layouts.items() if isinstance(layout, str)})

    def positions(
        self, name: str, shape: torch.Size, batch_axis: int | None, n_samples: int, data: Tensor, skip: int
    ) -> Positions | None:
        """Return the positions of the tokens in their samples; None where no axis numbers them.

        ``data`` is False for padding, bool ``(tokens,)``. With ``skip``, the number of first positions that are left
        out, a norm without such an axis raises UsageError.
        """
        layout = self._layouts[name]
        if not isinstance(layout, str) and len(shape) == len(self._report.shapes[name]):
            axes, along = layout
            sizes = tuple(shape[axis] for axis in axes)
            if sizes[0] == n_samples and batch_axis in ((0, axes[0]) if n_samples == 1 else axes[:1]):
                numbers = data.view(sizes).cumsum(along) - 1
                return Positions(numbers.flatten(), skip, math.prod(sizes) // max(sizes[along], 1))
        if skip:
            _refuse_skipping({name: f"its input {tuple(shape)} has no axes of samples and of positions"})
        return None
