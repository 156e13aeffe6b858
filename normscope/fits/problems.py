"""Several levels as one batch of least-squares problems: with all pairs, without a fold, and of that fold alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from normscope.fits.goodness import tails
from normscope.fits.levels import Level
from normscope.fits.nodes import Nodes, joined, nodes_of

_BINS_AN_OCTAVE = 16
_FEW_BINS = 512  # so many need not be joined: x that lies within a few octaves is resolved as finely as it was binned
_COARSER = 8  # times fewer bins, for the first look
_ROUGH_BINS_AN_OCTAVE = 4  # which leave α right to a hundredth, and the error at it to a millionth
_NEGLIGIBLE = 1e-3  # share of Σy² beyond the grid, or of Σx² below it
_STRAIGHT_UP_TO = 0.1  # u below which curves depart little from their tangent
_BINS_AT_ONCE = 2**20  # of all folds and levels: some tens of megabytes


class Problems:
    """Levels on one grid of bins.

    Attributes:
        levels: in the order of the problems.
        folds: number of folds of each, whether they hold pairs or not.
    """

    def __init__(self, levels: Sequence[Level], bins_an_octave: int) -> None:
        """Bring the sums of all levels together, on bins of so many an octave."""
        self.levels, self.folds = levels, len(levels[0].moments)
        self._made: dict[tuple[str, bool], Nodes] = {}
        grid = levels[0].grid
        self._bins_an_octave = bins_an_octave
        width = 2**grid.mantissa_bits // bins_an_octave
        self._moments = _stacked([level.moments for level in levels], width)
        self._counts = _stacked([level.counts for level in levels], width)

    def __len__(self) -> int:
        """Return the number of problems."""
        return len(self.levels)

    @functools.cached_property
    def n_pairs(self) -> Tensor:
        """Number of pairs in each fold, float64 ``(problems, folds)``."""
        return self._counts.sum(-1)

    @functools.cached_property
    def _whole(self) -> Tensor:
        """Moments of all pairs, float64 ``(problems, 6, bins)``."""
        return self._moments.sum(1) if self.folds > 1 else self._moments[:, 0]

    @functools.cached_property
    def occupied(self) -> Tensor:
        """Which folds hold pairs, of levels that have folds: bool ``(problems, folds)``."""
        has_folds = torch.tensor([level.fold_by is not None for level in self.levels])
        return (self.n_pairs > 0) & has_folds[:, None]

    @functools.cached_property
    def off_grid(self) -> Tensor:
        """Say where much of x or of y lies in a bin without width, below the grid or beyond; bool ``(problems,)``."""
        centre = self._whole.shape[-1] // 2
        xx, yy = self._whole[:, 3], self._whole[:, 5]
        beyond = yy[:, [0, -1]].sum(-1) > _NEGLIGIBLE * yy.sum(-1)
        return beyond | (xx[:, centre] > _NEGLIGIBLE * xx.sum(-1))

    def unresolved(self, alpha: Tensor) -> Tensor:
        """Say where the grid is too narrow for a curve: it is for x or y, or for the bend; bool ``(problems,)``."""
        below = self._whole[:, 3, self._whole.shape[-1] // 2] > 0
        return self.off_grid | ((alpha * 2.0 ** self.levels[0].grid.low > _STRAIGHT_UP_TO) & below)

    def nodes(self, *, odd: bool = False) -> Nodes:
        """All pairs of each problem."""
        return self._once("all", odd, lambda: self._whole)

    @functools.cached_property
    def tails(self) -> Tensor:
        """Which nodes lie in the tails, bool ``(problems, nodes)``."""
        return tails(self.nodes())

    def coarse(self, *, odd: bool = False) -> Nodes:
        """All pairs of each problem, on far fewer nodes."""
        return self._once("coarse", odd, lambda: joined(self._whole, min(_COARSER, self._bins_an_octave)))

    def without_folds(self, *, odd: bool = False) -> Nodes:
        """All pairs but those of one fold: ``problems · folds`` problems, the folds of one problem side by side."""
        return self._once("without", odd, lambda: self._others)

    def rough_without_folds(self, *, odd: bool = False) -> Nodes:
        """All pairs but those of one fold, likewise, on fewer nodes."""
        return self._once("rough without", odd, lambda: joined(self._others, self._rougher))

    @functools.cached_property
    def _others(self) -> Tensor:
        """Moments of all pairs but those of one fold, ``(problems · folds, 6, bins)``."""
        # Subtracting one fold from the whole leaves rounding, not pairs, in bins that only that fold fills.
        held = self._counts.sum(1, keepdim=True) - self._counts > 0.5
        return (self._whole[:, None] - self._moments).where(held[:, :, None], 0.0).flatten(0, 1)

    @property
    def _rougher(self) -> int:
        """How many bins become one of the rough ones; those that need not be joined are not."""
        return self._bins_an_octave // _ROUGH_BINS_AN_OCTAVE if self._bins_an_octave == _BINS_AN_OCTAVE else 1

    def of_folds(self, *, odd: bool = False) -> Nodes:
        """The pairs of one fold each: ``problems · folds`` problems, likewise."""
        return self._once("folds", odd, lambda: self._moments.flatten(0, 1))

    def _once(self, name: str, odd: bool, moments: Callable[[], Tensor]) -> Nodes:
        """Make nodes when they are first needed: all curves of a kind share them."""
        if (name, odd) not in self._made:
            self._made[name, odd] = nodes_of(moments(), odd=odd)
        return self._made[name, odd]


def _stacked(sums: Sequence[Tensor], width: int) -> Tensor:
    """Join so many neighbouring bins of each, and bring all together, ``(levels, …, bins)``."""
    return torch.stack([joined(one, width) for one in sums] if width > 1 else list(sums))


def batches(levels: Sequence[Level]) -> Iterator[tuple[list[int], Problems]]:
    """Put levels that have something to fit into batches; yield their numbers among ``levels`` with each."""
    alike: dict[tuple[int, int], list[int]] = {}
    for number, level in enumerate(levels):
        if level.nothing is None:
            octave = 2**level.grid.mantissa_bits
            few = octave <= _BINS_AN_OCTAVE or int((level.counts > 0).any(0).sum()) <= _FEW_BINS
            alike.setdefault((octave, octave if few else _BINS_AN_OCTAVE), []).append(number)
    for (_, bins_an_octave), numbers in alike.items():
        first = levels[numbers[0]]
        bins = first.counts.numel() * bins_an_octave // 2**first.grid.mantissa_bits
        at_once = max(1, _BINS_AT_ONCE // bins)
        for start in range(0, len(numbers), at_once):
            part = numbers[start : start + at_once]
            yield part, Problems([levels[number] for number in part], bins_an_octave)
