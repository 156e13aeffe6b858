"""Curves by themselves: f(αx) for three values of α, with the formula."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Unpack

import torch
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.mathtext import MathTextParser

from normscope.curves.expressions import curves_named
from normscope.curves.known import Curve
from normscope.errors import UsageError
from normscope.show.figures.sheet import columns_of, inches_of, key, sheet_of
from normscope.show.figures.style import FigureOptions, theme_of
from normscope.show.figures.text import literal, tail

ALPHAS = {0.5: "-", 1.0: (0, (4, 1.5)), 2.0: (0, (1, 1.2))}  # with their dashes
_PANEL_INCHES, _HEIGHT, _WIDEST = 1.65, 1.1, 6.6
_COLUMNS = 4
_GAP_INCHES = 0.2  # between two formulas, and after the last
_REACH, _POINTS = 5.0, 601
_ABOVE = "f(u) stands above each panel; u = αx"
_FORMULA = FontProperties(size=7)
_MATH: Any = MathTextParser("path")


def plot_curves(curves: str | Sequence[str | Curve] = "all", **options: Unpack[FigureOptions]) -> Figure:
    """Draw f(αx) of curves for α = 0.5, 1 and 2, a panel each, with its formula above it.

    The panels of hardtanh, sigmoid and tanh are figure 7 of arXiv 2503.10622, and that of tanh its figure 3.

    Args:
        curves: names separated by commas or as a list, ``all``, or formulas, as ``func`` of :func:`normscope.fit`.
        options: ``width``, ``title``, ``style``, ``labels``, ``font`` and ``caption``, as of :func:`normscope.plot`.

    Raises:
        UsageError: if there is no such curve, or if an option is not valid.
    """
    chosen, theme = curves_named(curves), theme_of(options)
    if not chosen:
        raise UsageError("There is no curve to draw; name one or more, or all.")
    formulas = [f"${curve.tex}$" if curve.tex else literal(curve.formula) for curve in chosen]
    widest = max(_PANEL_INCHES, _GAP_INCHES + max(map(_inches_of_math, formulas)))
    widest = min(widest, (options.get("width") or _WIDEST) - 0.3)
    columns = columns_of(options, len(chosen), widest, _COLUMNS)
    inches = inches_of(options.get("width"), 0.3 + widest * columns)
    rows = math.ceil(len(chosen) / columns)
    looks = [(alpha, theme.curves[place], dashes) for place, (alpha, dashes) in enumerate(ALPHAS.items())]
    handles = [key(f"α = {alpha:g}", colour, dashes, lw=1.1) for alpha, colour, dashes in looks]
    height = 0.25 + (_HEIGHT + 0.45) * rows
    with sheet_of(options, theme, inches, height, {}, foot=[_ABOVE], handles=handles) as figure:
        axes = figure.subplots(rows, columns, squeeze=False, sharex=True)
        for ax in axes.flat[len(chosen) :]:
            ax.set_visible(False)
        x = torch.linspace(-_REACH, _REACH, _POINTS, dtype=torch.float64)
        for number, (ax, curve, formula) in enumerate(zip(axes.flat, chosen, formulas, strict=False)):
            for alpha, colour, dashes in looks:
                ax.plot(x, curve.function(alpha * x), color=colour, ls=dashes, lw=1.1)
            for level in (0.0,) if curve.limit is None else (-curve.limit, 0.0, curve.limit):
                ax.axhline(level, color=theme.faint, lw=0.5, ls=":", zorder=0)
            reach = 1.15 * (curve.limit or 2.0)
            ax.set(xlim=(-_REACH, _REACH), ylim=(-reach, reach), ylabel="" if number % columns else "f(αx)")
            if _inches_of_math(formula) > widest - _GAP_INCHES:
                formula = literal(tail(curve.formula, widest - _GAP_INCHES, _FORMULA))
            ax.set_title(f"{literal(curve.name)}\n{formula}", loc="left", fontproperties=_FORMULA)
            if number + columns >= len(chosen):
                ax.tick_params(labelbottom=True)
                ax.set_xlabel("x", labelpad=1)
    return figure


def _inches_of_math(text: str) -> float:
    return float(_MATH.parse(text, 72, _FORMULA).width) / 72
