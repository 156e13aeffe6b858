"""What the steps of summing up one norm's pairs cost, each alone: ``python benchmarks/capture_parts.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import Measurement, finish, in_own_process, in_turn, options
from normscope.pairs.sums.binning.cpu_arrays import CONSTANTS, Tile
from numba import njit

from normscope import Sample
from normscope.pairs.norms.formulas import FORMS, Lines, layer_norm
from normscope.pairs.sums.binning import cpu, cpu_draw, cpu_loop
from normscope.pairs.sums.stats import PairStats
from normscope.pairs.sums.tokens import Run, Tokens

SHAPES = {"vit_b16": (8, 197, 768), "wav2vec2_large": (1, 148, 1024), "dit_xl": (1, 256, 1152)}
WHOLE = "PairStats.update"
ABOUT = """
What the steps cost in which the CPU's loop sums up the pairs of one call of one LayerNorm (samples, tokens, channels)
of each network: each step alone, over all tokens, one after the other in one process, on one thread, of normally
distributed x. Between them garbage is collected, so that each begins with cold caches, as a hook does. What the loop
leaves of PairStats.update is Python: grouping samples into folds, and handing arrays over to compiled code, which every
step alone pays as well; it weighs more the fewer tokens there are. Reach: max |x|. Sums: of each bin and fold n, Σx,
Σy, Σx², Σxy, Σy²; density: counts of (x, y). layer_norm is torch's own, for scale.
"""


def main() -> None:
    args = options(__doc__, repeats=15).parse_args()
    measurements = []
    for model, shape in SHAPES.items():
        taken = in_own_process(seconds_of_steps, shape, args.repeats, threads=1)
        pairs, case = np.prod(shape), f"{model}, {shape}"
        for step, samples in taken.items():
            measurements.append(Measurement(case, step, "a pair", "ns", [1e9 * one / pairs for one in samples]))
            share = [100 * one / whole for one, whole in zip(samples, taken[WHOLE], strict=True)]
            measurements.append(Measurement(case, step, "of the whole", "%", share))
    finish("capture_parts", ABOUT, measurements, args, threads=[1], libraries=["numba"])


def seconds_of_steps(shape: tuple[int, int, int], repeats: int) -> dict[str, list[float]]:
    """Time each step of one norm, in turn; runs in a process of its own."""
    return in_turn(steps_of(*shape), repeats)


def steps_of(n_samples: int, n_tokens: int, d: int) -> dict[str, Callable[[], object]]:
    """Return each step alone, over all tokens of a norm's input."""
    x = torch.randn(n_samples * n_tokens, d, generator=torch.Generator().manual_seed(0))
    samples = [Sample(f"sample {index}", index, index) for index in range(n_samples)]
    lines, stats = Lines(FORMS[layer_norm], 1e-6), PairStats.empty(d)
    runs = [Run(i * n_tokens, (i + 1) * n_tokens, i % 8, 977 * i, 0, i) for i in range(n_samples)]
    rows = cpu._rows(Tokens(x, lines, runs, d))
    views, (share,) = cpu._views_of(stats), cpu._shared_out(tuple(runs), 1)
    tile = Tile(np.empty(2048, np.float32), *(np.empty((n_samples * n_tokens, d), np.int32) for _ in range(2)))
    sums, every = views.sums, np.arange(n_samples * n_tokens)
    return {
        WHOLE: lambda: stats.update(x, lines, samples),
        "the loop": lambda: cpu_loop.fill(CONSTANTS, rows, share.runs, sums),
        "reach of each token": lambda: reaches(rows),
        "mean and rstd": lambda: find_lines(rows),
        "bins and cells": lambda: find_bins(rows, CONSTANTS, tile),
        "sums and density": lambda: add_pairs(rows, tile, sums),
        "drawn pairs": lambda: draw_pairs(rows, CONSTANTS, tile, sums),
        "channels": lambda: add_to_channels(rows, every, sums),
        "mean/σ and σ": lambda: add_scalars(rows, CONSTANTS, sums),
        "drawn tokens": lambda: cpu_draw.draw(rows, False, *views.samples),
        "layer_norm": lambda: torch.nn.functional.layer_norm(x, (d,)),
    }


@njit
def reaches(rows: Any) -> int:
    largest = 0
    for t in range(rows.keys.size):
        largest = max(largest, cpu_loop._largest_magnitude(rows.rows[t].view(np.int32)))
    return largest


@njit
def find_lines(rows: Any) -> None:
    for t in range(rows.keys.size):
        rows.shift[t], rows.rstd[t] = cpu_loop._line(rows.rows[t], rows.eps, rows.form)


@njit
def find_bins(rows: Any, constants: Any, tile: Any) -> None:
    for t in range(rows.keys.size):
        cpu_loop._index(rows.rows[t], rows.shift[t], rows.rstd[t], constants, tile.y, tile.bins[t], tile.cells[t])


@njit
def add_pairs(rows: Any, tile: Any, sums: Any) -> None:
    density = sums.density.reshape(-1)
    for t in range(rows.keys.size):
        x, bins, cells = rows.rows[t], tile.bins[t], tile.cells[t]
        cpu_loop._add_pairs(x, rows.shift[t], rows.rstd[t], bins, cells, sums.moments[0], density)


@njit
def draw_pairs(rows: Any, constants: Any, tile: Any, sums: Any) -> None:
    for t in range(rows.keys.size):
        cpu_loop._draw_pairs(rows, t, 0, rows.rows.shape[1], tile.bins[t], constants, sums)


@njit
def add_to_channels(rows: Any, every: Any, sums: Any) -> None:
    cpu_loop._add_to_channels(rows.rows, every, 0, rows.rows.shape[1], sums)


@njit
def add_scalars(rows: Any, constants: Any, sums: Any) -> None:
    for t in range(rows.keys.size):
        cpu_loop._add_scalars(rows, t, constants, sums)


if __name__ == "__main__":
    main()
