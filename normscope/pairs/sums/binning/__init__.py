"""From token rows to sums per bin: the grids, and three loops that fill them with the same counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MANTISSA_BITS = 23
_EXPONENT_BIAS = 127
_MAGNITUDE_MASK = 0x7FFFFFFF


@dataclass(frozen=True)
class FloatGrid:
    """Bins of float32 numbers, ``2**mantissa_bits`` an octave from ``2**low`` up to ``2**high``, for both signs.

    Bins are numbered in ascending order of x. The first and the last count everything beyond ``2**high``, the middle
    one everything below ``2**low`` of either sign, including zero.

    >>> grid = FloatGrid(mantissa_bits=6, low=-27, high=18)
    >>> grid.size
    5763
    >>> (grid.index(torch.tensor([-1e9, -1.0, 0.0, 1.0, 1e9])) - grid.centre).tolist()
    [-2881, -1729, 0, 1729, 2881]
    """

    mantissa_bits: int
    low: int
    high: int

    @property
    def centre(self) -> int:
        """Number of the bin that contains zero."""
        return ((self.high - self.low) << self.mantissa_bits) + 1

    @property
    def size(self) -> int:
        """Number of bins, including the outermost and the middle one."""
        return 2 * self.centre + 1

    @property
    def from_bits(self) -> tuple[int, int, int]:
        """Shift from the bits of |x| to its step, the step below the lowest bin, and the bin that contains zero."""
        lowest = (self.low + _EXPONENT_BIAS) << self.mantissa_bits
        return _MANTISSA_BITS - self.mantissa_bits, lowest - 1, self.centre

    def index(self, x: Tensor) -> Tensor:
        """Number the bin of every element of ``x`` (float32, finite, any shape) as int64 of the same shape."""
        bits = x.contiguous().view(torch.int32)
        shift, below, centre = self.from_bits
        steps = (((bits & _MAGNITUDE_MASK) >> shift) - below).clamp_(0, centre)
        return torch.where(bits < 0, -steps, steps).add_(centre).long()

    def edges(self) -> Tensor:
        """Return the ``size + 1`` bounds of the bins in ascending order (float64; the outermost are infinite)."""
        shift, below, centre = self.from_bits
        bits = (torch.arange(1, centre + 1, dtype=torch.int32) + below) << shift
        positive = torch.cat([bits.view(torch.float32), torch.tensor([torch.inf])]).double()
        return torch.cat([-positive.flip(0), positive])


PAIR_GRID = FloatGrid(mantissa_bits=6, low=-27, high=18)
DENSITY_X_GRID = FloatGrid(mantissa_bits=4, low=-27, high=18)
DENSITY_Y_GRID = FloatGrid(mantissa_bits=3, low=-6, high=7)
TOKEN_GRID = FloatGrid(mantissa_bits=3, low=-27, high=18)
CHANNEL_GRID = FloatGrid(mantissa_bits=2, low=-27, high=18)

MOMENTS = ("n", "x", "y", "xx", "xy", "yy")
