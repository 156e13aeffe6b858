"""Curves by themselves: f(αx) for three values of α, with the formula."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.mathtext import MathTextParser

from normscope.curves.expressions import curves_named
from normscope.curves.known import Curve
from normscope.errors import UsageError
from normscope.show.figures.sheet import columns_of, inches_of, key, sheet_of
from normscope.show.figures.style import FigureOptions, Style, shades, theme_of
from normscope.show.figures.text import TITLE, literal, wrapped

ALPHAS = {0.5: "-", 1.0: (0, (4, 1.5)), 2.0: (0, (1, 1.2))}  # with their dashes
_INCHES, _LEAST_PANEL, _COLUMNS = 6.6, 0.95, 4
_HEIGHT, _HEIGHT_TO_WIDTH, _LINE_INCHES = 1.1, 0.68, 0.125  # of panels, and of each line above them
_EDGE_INCHES = 0.3  # of a panel, beside its axes
_REACH = 5.0
_X = torch.linspace(-_REACH, _REACH, 601, dtype=torch.float64)
_ABOVE = "f(u) stands above each panel; u = αx"
_UNBROKEN = re.compile(r".+?(?:,\\ |\\,|\\;| / |$)")  # parts of TeX, each but the last with what follows it
_MATH: Any = MathTextParser("path")


def plot_curves(curves: str | Sequence[str | Curve] = "all", **options: Unpack[FigureOptions]) -> Figure:
    """Draw f(αx) of curves for α = 0.5, 1 and 2, a panel each, with its formula above it.

    Curves that differ in their amplitude alone, such as tanh and softcap, share a panel. The panels of hardtanh,
    sigmoid and tanh are figure 7 of arXiv 2503.10622, and that of tanh its figure 3.

    Args:
        curves: names separated by commas or as a list, ``all``, or formulas, as ``func`` of :func:`normscope.fit`.
        options: ``width``, ``title``, ``style``, ``labels``, ``font`` and ``caption``, as of :func:`normscope.plot`.

    Raises:
        UsageError: if there is no such curve, or if an option is not valid.
    """
    theme, panels = theme_of(options), dict[bytes, list[Curve]]()
    for curve in curves_named(curves):
        panels.setdefault(curve.function(_X).numpy().tobytes(), []).append(curve)
    if not panels:
        raise UsageError("There is no curve to draw; name one or more, or all.")
    inches = inches_of(options.get("width"), _INCHES)
    columns = columns_of({"width": inches}, len(panels), _LEAST_PANEL, _COLUMNS)
    across = (inches - 0.3) / columns
    heads = [_heading(alike, across - _EDGE_INCHES) for alike in panels.values()]
    rows, above = math.ceil(len(panels) / columns), _LINE_INCHES * max(head.count("\n") + 1 for head in heads)
    height = (min(_HEIGHT, _HEIGHT_TO_WIDTH * across) + above + 0.07) * rows + 0.3
    colours = shades(theme)(np.linspace(0, 0.8, len(ALPHAS)))
    looks = [(alpha, colour, dashes) for (alpha, dashes), colour in zip(ALPHAS.items(), colours, strict=True)]
    handles = [key(f"α = {alpha:g}", colour, dashes, lw=1.1) for alpha, colour, dashes in looks]
    cut = [curve for head, (curve, *_) in zip(heads, panels.values(), strict=True) if head.endswith("…")]
    foot = [_ABOVE, *(f"{curve.name}: f(u) = {curve.formula}" for curve in cut)]
    with sheet_of(options, theme, inches, height, {}, foot=foot, handles=handles) as figure:
        axes = figure.subplots(rows, columns, squeeze=False, sharex=True)
        for ax in axes.flat[len(panels) :]:
            ax.set_visible(False)
        for number, (ax, (curve, *_), head) in enumerate(zip(axes.flat, panels.values(), heads, strict=False)):
            _draw_curve(ax, curve, head, looks, theme)
            ax.set_ylabel("" if number % columns else "f(αx)")
            if number + columns >= len(panels):
                ax.tick_params(labelbottom=True)
                ax.set_xlabel("x", labelpad=1)
    return figure


def _draw_curve(ax: Axes, curve: Curve, head: str, looks: Sequence[tuple[float, Any, Any]], theme: Style) -> None:
    ax.set_title(head, loc="left", fontproperties=TITLE)
    for alpha, colour, dashes in looks:
        ax.plot(_X, curve.function(alpha * _X), color=colour, ls=dashes, lw=1.1)
    for level in (0.0,) if curve.limit is None else (-curve.limit, 0.0, curve.limit):
        ax.axhline(level, color=theme.faint, lw=0.5, ls=":", zorder=0)
    reach = 1.15 * (curve.limit or 2.0)
    ax.set(xlim=(-_REACH, _REACH), ylim=(-reach, reach))


def _heading(alike: Sequence[Curve], inches: float) -> str:
    """Return the names of curves of one formula and, in lines of a width, the formula."""
    curve, names, lines = alike[0], ", ".join(curve.name for curve in alike), [""]
    for term in _UNBROKEN.findall(curve.tex):
        if lines[-1] and _MATH.parse(f"${lines[-1]}{term}$", 72, TITLE).width / 72 > inches:
            lines.append("")
        lines[-1] += term
    formula = [f"${line}$" for line in lines] if curve.tex else map(literal, wrapped(curve.formula, inches, TITLE))
    return "\n".join((literal(names), *formula))
