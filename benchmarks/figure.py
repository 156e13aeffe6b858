"""How long a figure takes, whatever the number of pairs, beside an empty one: ``python benchmarks/figure.py``."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from common import Measurement, finish, in_turn, options, ratios
from matplotlib.figure import Figure
from tails import heavy_tailed
from torch import Tensor, nn

import normscope
from normscope.figures.scurves import save_figure
from normscope.pairs.capture import captured as captured_with
from normscope.pairs.recorder import Summing

SITES, CHANNELS, TOKENS = 4, 768, 1576
INCHES = (9.9, 3.0)  # of normscope's row of four
DPI = 150
ROWS = {"density": "density", "all rows": "density,token,channel"}
ABOUT = """
How long it takes to draw and to write a PNG of {dpi} dpi of four norm sites, from a capture and its fits: normscope's
row of densities, and its whole figure of densities, tokens and channels. Empty figures are of the same size, layout,
axes, insets and colour bars, and hold nothing; an empty row of four panels without insets is there for scale. The peers
draw the same pairs into four such panels: matplotlib's scatter, rasterized, and hexbin. The pairs are those of four
LayerNorms of {channels} channels over heavy-tailed tokens, a quarter of them each.
"""


def main() -> None:
    parser = options(__doc__, repeats=5)
    parser.add_argument("--pairs", default="1000000,10000000", help="in the figure (%(default)s)")
    parser.add_argument("--scatter-up-to", type=int, default=1_000_000, help="pairs (%(default)s); more takes minutes")
    args = parser.parse_args()

    ways: dict[tuple[str, str], Callable[[], Figure]] = {}
    for pairs in (int(number) for number in args.pairs.split(",")):
        seen, raw = captured(pairs)
        fits = normscope.fit(seen)
        case = f"{sum(stats.n_pairs for stats in seen.stats.values()):,} pairs"
        for name, rows in ROWS.items():
            ways[case, f"normscope, {name}"] = functools.partial(normscope.plot, seen, fits, rows=rows)
        if pairs <= args.scatter_up_to:
            ways[case, "scatter"] = functools.partial(scattered, raw)
        ways[case, "hexbin"] = functools.partial(hexbinned, raw)
    for name, rows in ROWS.items():
        ways["nothing", f"empty, {name}"] = functools.partial(emptied, normscope.plot(seen, fits, rows=rows))
    ways["nothing", "empty, four panels"] = lambda: panels()[0]
    seconds = drawn_and_written(ways, seen, args.repeats)
    finish(
        "figure",
        ABOUT.format(dpi=DPI, channels=CHANNELS),
        measured(seconds),
        args,
        threads=[torch.get_num_threads()],
        libraries=["matplotlib"],
    )


def drawn_and_written(ways, seen: normscope.Capture, repeats: int) -> dict[tuple[str, str], list[float]]:
    """Time every way of making a figure, and the writing of it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figure.png"
        whole = {
            place: functools.partial(lambda draw: save_figure(draw(), path, seen, DPI), way)
            for place, way in ways.items()
        }
        return in_turn(whole, repeats)


def measured(seconds: dict[tuple[str, str], list[float]]) -> list[Measurement]:
    """Compare each figure with an empty one of the same axes."""
    measurements = []
    for (case, way), own in seconds.items():
        like = way.removeprefix("normscope, ")
        empty = seconds.get(("nothing", f"empty, {like}"), seconds["nothing", "empty, four panels"])
        measurements.append(Measurement(case, way, "draw and write", "s", own))
        measurements.append(Measurement(case, way, "of an empty figure of the same axes", "×", ratios(own, empty)))
        bare = seconds["nothing", "empty, four panels"]
        measurements.append(Measurement(case, way, "of four empty panels", "×", ratios(own, bare)))
    return measurements


def captured(pairs: int) -> tuple[normscope.Capture, list[tuple[np.ndarray, np.ndarray]]]:
    """Capture four LayerNorms, and keep the raw x and y of each for the peers."""
    model = nn.ModuleList([nn.LayerNorm(CHANNELS, elementwise_affine=False) for _ in range(SITES)])
    model.forward = lambda x: [norm(x + number) for number, norm in enumerate(model)]
    raw: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def keep(site, x: Tensor, y: Tensor) -> None:
        raw.setdefault(site.name, []).append((x.flatten().clone(), y.flatten().clone()))

    about = {"model": "four LayerNorms", "weights": "none", "data": "heavy-tailed tokens, seed 0"}
    seen = captured_with(model, batches(max(1, pairs // SITES // CHANNELS)), Summing(observe=keep), about=about)
    return seen, [tuple(torch.cat(own).numpy() for own in zip(*parts, strict=True)) for parts in raw.values()]


def batches(tokens: int) -> Iterator[Tensor]:
    """Yield so many tokens, a few at a time."""
    for start in range(0, tokens, TOKENS):
        yield heavy_tailed(min(TOKENS, tokens - start), CHANNELS, seed=start)[None]


def panels() -> tuple[Figure, np.ndarray]:
    """Make four empty panels."""
    figure = Figure(figsize=INCHES, layout="constrained")
    return figure, figure.subplots(1, SITES)


def emptied(like: Figure) -> Figure:
    """Make a figure of the same size, layout, axes and axes within them, and draw nothing into it."""
    figure = Figure(figsize=like.get_size_inches(), layout="constrained")
    grid = like.axes[0].get_gridspec()
    for ax, own in zip(like.axes, figure.subplots(*grid.get_geometry(), squeeze=False).flat, strict=True):
        for child in ax.child_axes:
            own.inset_axes((0.1, 0.6, 0.3, 0.3)).set_in_layout(child.get_in_layout())
    return figure


def scattered(raw: list[tuple[np.ndarray, np.ndarray]]) -> Figure:
    """Draw every pair as a point, coloured by |y|."""
    figure, axes = panels()
    for ax, (x, y) in zip(axes, raw, strict=True):
        ax.scatter(x, y, c=np.abs(y), s=1.6, lw=0, rasterized=True)
    return figure


def hexbinned(raw: list[tuple[np.ndarray, np.ndarray]]) -> Figure:
    """Count every pair in a hexagon."""
    figure, axes = panels()
    for ax, (x, y) in zip(axes, raw, strict=True):
        ax.hexbin(x, y, gridsize=220, bins="log")
    return figure


if __name__ == "__main__":
    main()
