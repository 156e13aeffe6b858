"""The known curves themselves: bare, and as their scale changes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from normscope.errors import UsageError
from normscope.figures.notes import LINE_POINTS, NONE, NOTE, framed, inches_of, write_above
from normscope.figures.style import Style, style_named, wrapped
from normscope.fits.curves.expressions import curves_named
from normscope.fits.curves.known import Curve

_PANEL_INCHES = 1.55
_HEIGHT = 1.1
_COLUMNS = 4
_REACH = 5.0
_POINTS = 601
ALPHAS = (0.5, 1.0, 2.0)


def plot_curves(
    curves: str | Sequence[str | Curve] = "all",
    *,
    width: float | None = None,
    title: str | None = None,
    style: str = "light",
) -> Figure:
    """Draw f(αx) of curves for α = 0.5, 1 and 2, a panel each, with its formula above it.

    The panels of hardtanh, sigmoid and tanh are figure 7 of arXiv 2503.10622, and that of tanh its figure 3.

    Args:
        curves: names separated by commas or as a list, ``all``, or formulas, as ``func`` of :func:`normscope.fit`.
        width: of the figure, in inches.
        title: above all panels; by default, and with ``none``, there is none.
        style: ``light`` or ``dark``.

    Returns:
        A matplotlib figure.

    Raises:
        UsageError: if there is no such curve or style, or if the width is under 2 inches.
    """
    chosen, theme = curves_named(curves), style_named(style)
    if not chosen:
        raise UsageError("There is no curve to draw; name one or more, or all.")
    columns = min(_COLUMNS, len(chosen)) if width is None else max(1, min(len(chosen), int(width / 1.3)))
    inches = inches_of(width, 0.3 + _PANEL_INCHES * columns)
    rows = math.ceil(len(chosen) / columns)
    with matplotlib.rc_context(theme.rc()):
        handles = [
            Line2D([], [], color=colour, lw=1.1, label=f"α = {alpha:g}")
            for alpha, colour in zip(ALPHAS, theme.curves, strict=False)
        ]
        above = "" if title in (None, NONE) else str(title)
        figure = framed(inches, 0.1 + (_HEIGHT + 0.55) * rows, above, [], theme, handles)
        axes = figure.subplots(rows, columns, squeeze=False, sharex=True)
        for ax in axes.flat[len(chosen) :]:
            ax.set_visible(False)
        for number, (ax, curve) in enumerate(zip(axes.flat, chosen, strict=False)):
            _draw(ax, curve, theme, inches / columns - 0.35)
            ax.tick_params(labelbottom=number + columns >= len(chosen))
    return figure


def _draw(ax: Axes, curve: Curve, theme: Style, inches: float) -> None:
    x = torch.linspace(-_REACH, _REACH, _POINTS, dtype=torch.float64)
    for place, alpha in enumerate(ALPHAS):
        ax.plot(x, curve.function(alpha * x), color=theme.curves[place], lw=1.1)
    for level in (0.0,) if curve.limit is None else (-curve.limit, 0.0, curve.limit):
        ax.axhline(level, color=theme.faint, lw=0.5, ls=":", zorder=0)
    reach = 1.15 * (curve.limit or 2.0)
    ax.set(xlim=(-_REACH, _REACH), ylim=(-reach, reach))
    formula = wrapped(f"f(u) = {curve.formula}", inches, NOTE)
    pad = write_above(ax, [[(line, theme.ink)] for line in formula])
    ax.set_title(curve.name, loc="left", pad=max(pad, LINE_POINTS), parse_math=False)
