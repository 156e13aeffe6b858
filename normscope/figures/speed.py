"""Times as bars: a panel for the norm alone and for the whole network, forward and forward + backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import MaxNLocator

from normscope.errors import UsageError
from normscope.figures.drift import curve_name
from normscope.figures.panels import outline
from normscope.figures.style import (
    LEAST_POINTS,
    FigureOptions,
    Style,
    columns_of,
    inches_of,
    sheet_of,
    theme_of,
    width_of,
)
from normscope.swaps.inits import published_name
from normscope.swaps.reports import BESIDE, FASTER, INCONCLUSIVE, SLOWER, TOO_FEW, BenchReport, Timing
from normscope.tables.swaps import SCOPES, duration

_PANEL_INCHES, _LEAST_PANEL_INCHES, _BAR_INCHES, _GAP = 2.6, 2.3, 0.155, 0.9
_BARS_INCHES = 1.9  # of a panel, beside the names of the bars
_NATIVE, _COPY = "native", "copy"
_MOST_ACROSS = 4
_MOST_MEDIANS = 1.3  # of the longest bar, to which an axis goes; a whisker that would leave the panel ends in an arrow
_UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
_TITLE, _SMALL = FontProperties(size=7), FontProperties(size=LEAST_POINTS)


def plot_speed(report: BenchReport, **options: Unpack[FigureOptions]) -> Figure:
    """Draw how long every variant takes, grouped by way: medians as bars, whiskers from p20 to p80.

    A whisker that continues beyond the panel ends in an arrow. A dotted line through each group is the native norm's
    median: the eager one's for ``fused``, the compiled one's for ``compile + fused``. A ratio to it, bold for the
    verdict ``faster`` and in italics for ``slower``, stands at each bar; its time instead if the passes are too few.
    A panel each has the norm alone and the whole network, each number of passes, dtype and timer.

    Args:
        report: what :func:`normscope.bench` returned.
        options: ``width``, ``title``, ``style``, ``labels``, ``font`` and ``caption``, as of :func:`normscope.plot`.

    Raises:
        UsageError: if nothing was timed, or if an option is not valid.
    """
    theme = theme_of(options)
    kinds = dict.fromkeys((row.scope, row.passes) for row in report.rows)
    panels = [rows for scope, passes in kinds for rows in _rows_of(report.rows, scope, passes)]
    if not panels:
        raise UsageError("Nothing was timed, so that there is nothing to draw.")
    across = columns_of(options, len(panels), _LEAST_PANEL_INCHES, _MOST_ACROSS)
    rows_of_panels = [panels[first : first + across] for first in range(0, len(panels), across)]
    heights = [max(map(_height, beside)) for beside in rows_of_panels]
    inches = inches_of(options.get("width"), max(4.6, 0.3 + _PANEL_INCHES * across))
    height = sum(0.5 + _BAR_INCHES * height for height in heights)
    with sheet_of(options, theme, inches, height, report.about, detail=report.device, foot=[_signs(report)]) as figure:
        axes = figure.subplots(
            len(heights), across, squeeze=False, height_ratios=[0.4 / _BAR_INCHES + h for h in heights]
        )
        for ax in axes.flat[len(panels) :]:
            ax.set_visible(False)
        for number, (ax, rows) in enumerate(zip(axes.flat, panels, strict=False)):
            _draw(ax, rows, heights[number // across], theme)
    return figure


def _rows_of(rows: Sequence[Timing], scope: str, passes: str) -> list[list[Timing]]:
    """The timings of a column, a list for each dtype and timer; what did not run is with the first of its dtype."""
    timings = [row for row in rows if (row.scope, row.passes) == (scope, passes)]
    parts = list(dict.fromkeys((row.dtype, row.timer) for row in timings if row.timer or row.median is not None))
    parts = parts or [(timings[0].dtype, "")]
    first = dict(reversed(parts))
    return [
        [row for row in timings if row.dtype == dtype and (row.timer or first[dtype]) == timer]
        for dtype, timer in parts
    ]


def _by_way(rows: Sequence[Timing]) -> list[tuple[str, list[Timing]]]:
    return [(way, [row for row in rows if row.way == way]) for way in dict.fromkeys(row.way for row in rows)]


def _height(rows: Sequence[Timing]) -> float:
    """Height of a panel in bars, with a heading and a gap for each group."""
    return len(rows) + (_GAP + 1) * len(_by_way(rows)) - _GAP


def _draw(ax: Axes, rows: Sequence[Timing], height: float, style: Style) -> None:
    medians = [row.median for row in rows if row.median is not None]
    unit = duration(max(medians, default=1.0)).split()[1]
    scale = _UNITS[unit]
    right = _MOST_MEDIANS * max(medians, default=1.0) / scale
    labels: list[tuple[float, str]] = []
    y = 0.0
    for way, group in _by_way(rows):
        ax.text(0, y, way, ha="left", va="center", fontproperties=_TITLE, color=style.ink)
        beside = BESIDE.get(group[0].way, way)
        native = next((row.median for row in rows if (row.way, row.variant) == (beside, _NATIVE)), None)
        if native is not None:
            ends = [y + 0.5, y + len(group) + 0.5]
            ax.plot([native / scale] * 2, ends, color=style.ink, ls=":", lw=0.9, zorder=4)
        for row in group:
            y += 1
            labels.append((y, published_name(row.variant)))
            _bar(ax, row, y, scale, right, style)
        y += _GAP + 1
    ax.set_xlim(0, right)
    ax.set_ylim(height - 0.3, -0.6)
    ax.set_yticks([place for place, _ in labels], [name for _, name in labels], parse_math=False)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.xaxis.set_major_locator(MaxNLocator(4))
    first = rows[0]
    ax.set_xlabel(f"time [{unit}]", labelpad=1)
    timer = next((row.timer for row in rows if row.timer), "")
    detail = " · ".join(filter(None, ("×".join(map(str, first.shape)), first.dtype, timer)))
    ax.set_title(f"{SCOPES[first.scope].removeprefix('the ')}, {first.passes}\n{detail}", fontproperties=_TITLE)


def _bar(ax: Axes, row: Timing, y: float, scale: float, right: float, style: Style) -> None:
    if row.median is None or row.p20 is None or row.p80 is None:
        ax.text(0.01 * right, y, "not run", color=style.faint, va="center", fontproperties=_SMALL)
        return
    hatch = "////" if row.variant == _COPY else None
    colour = _colour(row.variant, style)
    face = "none" if hatch else colour
    ax.barh(y, row.median / scale, height=0.72, color=face, edgecolor=colour, hatch=hatch, lw=0.6, zorder=2)
    low, high = row.p20 / scale, row.p80 / scale
    text = duration(row.median) if row.ratio is None or row.verdict == TOO_FEW else f"×{row.ratio:#.3g}".rstrip(".")
    font = FontProperties(size=LEAST_POINTS, weight="bold" if row.verdict == FASTER else "normal")
    if row.verdict == SLOWER:
        font.set_style("italic")
    room = width_of(text, font) / _BARS_INCHES * right
    behind = {"facecolor": style.background, "edgecolor": "none", "pad": 0.5}
    place = min(max(row.median / scale, high) + 0.02 * right, right - room)
    ends = [low, max(low, min(high, place))]
    arrow = ">" if high > ends[1] else ""  # the whisker goes on beyond the panel
    (whisker,) = ax.plot(ends, [y, y], color=style.ink, lw=0.8, zorder=5, path_effects=outline(style))
    whisker.set(marker=arrow, markevery=[1], markersize=3, markeredgewidth=0)
    ax.text(place, y, text, va="center", fontproperties=font, color=style.ink, bbox=behind, zorder=6)


def _colour(variant: str, style: Style) -> Any:
    """Return a curve's colour in all figures; other variants are faint."""
    if variant == _NATIVE:
        return style.ink
    colour, _ = style.looks().get(curve_name(variant.partition(",")[0]), (style.faint, ""))
    return colour


def _signs(report: BenchReport) -> str:
    """Return the meaning of bars, whiskers, lines, numbers and fonts."""
    verdicts = {row.verdict for row in report.rows}
    beside = [f"{BESIDE[way]} for {way}" for way in BESIDE if any(row.way == way for row in report.rows)]
    numbers = sorted({len(row.samples) for row in report.rows if row.samples}) or [0]
    signs = [f"Bars: median of n = {'–'.join(map(str, dict.fromkeys((numbers[0], numbers[-1]))))} times"]
    signs.append("whiskers: 20th to 80th percentile")
    signs.append(", ".join(["dotted: native norm", *beside]))
    if any(row.ratio is not None for row in report.rows):
        fonts = [f"{font} if {verdict}" for verdict, font in _FONTS.items() if verdict in verdicts]
        signs.append(", ".join(["×: multiple of its time", *fonts]))
    if TOO_FEW in verdicts:
        signs.append("no ×: too few passes to compare")
    return "; ".join(signs)


_FONTS = {FASTER: "bold", SLOWER: "in italics", INCONCLUSIVE: "plain"}
