"""From token rows to sums per bin: the grids, and three loops that fill them with the same counts.

:mod:`reference` says in plain torch what is summed, on any device; :mod:`cpu` does it in one pass, compiled by numba,
and :mod:`cuda` in one Triton kernel.
"""

from normscope.pairs.binning.grids import (
    CHANNEL_GRID,
    DENSITY_X_GRID,
    DENSITY_Y_GRID,
    MOMENTS,
    PAIR_GRID,
    TOKEN_GRID,
    FloatGrid,
)

__all__ = ["CHANNEL_GRID", "DENSITY_X_GRID", "DENSITY_Y_GRID", "MOMENTS", "PAIR_GRID", "TOKEN_GRID", "FloatGrid"]
