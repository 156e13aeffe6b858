"""Times as bars: a panel for the norm alone and for the whole network, forward and forward + backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import MaxNLocator

from normscope.errors import UsageError
from normscope.show.figures.drift import colours_of
from normscope.show.figures.panels import outline
from normscope.show.figures.sheet import columns_of, inches_of, row_inches, sheet_of
from normscope.show.figures.style import LEAST_POINTS, FigureOptions, Style, theme_of
from normscope.show.figures.text import TITLE, tail, wrapped, write_at
from normscope.swaps.inits import published_name
from normscope.tools.bench.reports import FASTER, INCONCLUSIVE, NATIVE, SLOWER, BenchReport, Timing
from normscope.tools.bench.table import SCOPES, duration, unit_of

_PANEL_INCHES, _LEAST_PANEL_INCHES, _GAP = 2.6, 1.4, 0.9
_BAR_INCHES, _LEAST_BAR_INCHES = 0.155, 0.1
_NAME_INCHES = 0.6  # of a variant, beside its bar
_ABOVE_INCHES, _LINE_INCHES = 0.3, 0.11  # of axis and label, and of each line above a panel
_MOST_ACROSS = 4
_MOST_MEDIANS = 1.15  # of the longest bar, to which an axis goes; a whisker that would leave the panel ends in an arrow
_FONTS = {FASTER: "bold", SLOWER: "in italics", INCONCLUSIVE: "plain"}
_SMALL = FontProperties(size=LEAST_POINTS)


def plot_speed(report: BenchReport, **options: Unpack[FigureOptions]) -> Figure:
    """Draw how long every variant takes, grouped by way: medians as bars, quartiles as whiskers.

    A whisker that continues beyond the panel ends in an arrow. A dotted line through each group is the native norm's
    median: the eager one's for ``fused``. Right of each bar is the ratio to it, bold for the verdict ``faster`` and in
    italics for ``slower``. The norm alone and the whole network have a panel for each number of passes.

    Args:
        report: what :func:`normscope.bench` returned.
        options: ``width``, ``title``, ``style``, ``labels``, ``font`` and ``caption``, as of :func:`normscope.plot`.

    Raises:
        UsageError: if nothing was timed, or if an option is not valid.
    """
    theme = theme_of(options)
    kinds = dict.fromkeys((row.scope, row.passes) for row in report.rows)
    panels = [[row for row in report.rows if (row.scope, row.passes) == kind] for kind in kinds]
    if not panels:
        raise UsageError("Nothing was timed, so that there is nothing to draw.")
    across = columns_of(options, len(panels), _LEAST_PANEL_INCHES, _MOST_ACROSS)
    rows_of_panels = [panels[first : first + across] for first in range(0, len(panels), across)]
    # In bars, with a heading and a gap for each group.
    heights = [max(len(r) + (_GAP + 1) * len(_by_way(r)) - _GAP for r in beside) for beside in rows_of_panels]
    inches = inches_of(options.get("width"), max(4.6, 0.3 + _PANEL_INCHES * across))
    heads = [_head(rows[0], (inches - 0.3) / across) for rows in panels]
    texts = _ABOVE_INCHES + _LINE_INCHES * max(head.count("\n") + 1 for head in heads)
    bar = row_inches(_BAR_INCHES, sum(heights), texts * len(heights), _LEAST_BAR_INCHES)
    height = texts * len(heights) + bar * sum(heights)
    with sheet_of(options, theme, inches, height, report.about, detail=report.device, foot=[_signs(report)]) as figure:
        axes = figure.subplots(len(heights), across, squeeze=False, height_ratios=[texts / bar + h for h in heights])
        for ax in axes.flat[len(panels) :]:
            ax.set_visible(False)
        for number, (ax, rows) in enumerate(zip(axes.flat, panels, strict=False)):
            _draw(ax, rows, heights[number // across], theme)
            ax.set_title(heads[number], fontproperties=TITLE)
    return figure


def _head(row: Timing, inches: float) -> str:
    """Return what a panel times, and of which input, in lines of a width."""
    texts = (
        f"{SCOPES[row.scope].removeprefix('the ')}, {row.passes}",
        f"input {'×'.join(map(str, row.shape))}, {row.dtype}",
    )
    return "\n".join(line for text in texts for line in wrapped(text, inches, TITLE))


def _by_way(rows: Sequence[Timing]) -> list[tuple[str, list[Timing]]]:
    return [(way, [row for row in rows if row.way == way]) for way in dict.fromkeys(row.way for row in rows)]


def _draw(ax: Axes, rows: Sequence[Timing], height: float, style: Style) -> None:
    medians = [row.median for row in rows if row.median is not None]
    longest = max(medians, default=1.0)
    scale, unit = unit_of(longest)
    right = _MOST_MEDIANS * longest / scale
    labels: list[tuple[float, str]] = []
    y = 0.0
    for way, group in _by_way(rows):
        ax.text(0, y, way, ha="left", va="center", fontproperties=TITLE, color=style.ink)
        beside = "eager" if way == "fused" else way
        native = next((row.median for row in rows if (row.way, row.variant) == (beside, NATIVE)), None)
        if native is not None:
            ends = [y + 0.5, y + len(group) + 0.5]
            ax.plot([native / scale] * 2, ends, color=style.ink, ls=":", lw=0.9, zorder=4)
        for row in group:
            y += 1
            labels.append((y, tail(published_name(row.variant), _NAME_INCHES)))
            _bar(ax, row, y, scale, right, style)
        y += _GAP + 1
    ax.set_xlim(0, right)
    ax.set_ylim(height - 0.3, -0.6)
    ax.set_yticks([y for y, _ in labels], [name for _, name in labels], parse_math=False)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.set_xlabel(f"time [{unit}]", labelpad=1)


def _bar(ax: Axes, row: Timing, y: float, scale: float, right: float, style: Style) -> None:
    if row.median is None or row.p25 is None or row.p75 is None:
        ax.text(0.01 * right, y, "not run", color=style.faint, va="center", fontproperties=_SMALL)
        return
    colour = style.ink if row.variant == NATIVE else colours_of([row.variant], style)[row.variant]
    ax.barh(y, row.median / scale, height=0.72, color=colour, lw=0.6, zorder=2)
    low, high = row.p25 / scale, row.p75 / scale
    text = duration(row.median) if row.ratio is None else f"×{row.ratio:#.3g}".rstrip(".")
    font = FontProperties(size=LEAST_POINTS, weight="bold" if row.verdict == FASTER else "normal")
    if row.verdict == SLOWER:
        font.set_style("italic")
    ends = [low, max(low, min(high, right))]
    arrow = ">" if high > right else ""  # the whisker goes on beyond the panel
    (whisker,) = ax.plot(ends, [y, y], color=style.ink, lw=0.8, zorder=5, path_effects=outline(style))
    whisker.set(marker=arrow, markevery=[1], markersize=3, markeredgewidth=0)
    write_at(ax, text, (1, y), (2, 0), ("axes fraction", "data"), va="center", fontproperties=font, color=style.ink)


def _signs(report: BenchReport) -> str:
    """Return the meaning of bars, whiskers, lines, numbers and fonts."""
    verdicts = {row.verdict for row in report.rows}
    numbers = sorted({len(row.samples) for row in report.rows if row.samples}) or [0]
    signs = [f"Bars: median of n = {'–'.join(map(str, dict.fromkeys((numbers[0], numbers[-1]))))} times"]
    signs.append("whiskers: first to third quartile")
    fused = any(row.way == "fused" for row in report.rows)
    signs.append("dotted: native norm" + ", eager for fused" * fused)
    if any(row.ratio is not None for row in report.rows):
        fonts = [f"{font} if {verdict}" for verdict, font in _FONTS.items() if verdict in verdicts]
        signs.append(", ".join(["×: multiple of its time", *fonts]))
    return "; ".join(signs)
