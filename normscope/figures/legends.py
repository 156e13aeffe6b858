"""What is said of lines and colours: below all panels in a legend, and above each panel in its own colours."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import matplotlib
from matplotlib.artist import Artist
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from normscope.figures.notes import Words, broken
from normscope.figures.panels import Panel, best_of
from normscope.fits.curve_fit import CurveFit
from normscope.fits.curves.known import CURVES, FREE, Curve

_MOST_LISTED = 20


def legend_handles(panels: Sequence[Panel], *, density: bool, sampled: bool, bounds: bool = True) -> list[Artist]:
    """The legend of these panels: greys, lines and dashes.

    ``density`` is whether they show one, ``sampled`` whether of a sample of the tokens alone, and ``bounds`` whether
    they show y itself, which the norm bounds.
    """
    style = panels[0].style
    handles: list[Artist] = []
    if density:
        grey = matplotlib.colormaps[style.density](0.6)
        pairs = "pairs of the sampled tokens" if sampled else "all pairs"
        whose = "one for all panels" if panels[0].scales.shared else "each panel its own"
        handles.append(Patch(facecolor=grey, label=f"{pairs} (log scale, {whose})"))
        handles.append(Line2D([], [], color=style.ink, lw=1.4, label="E[y|x], where there are pairs enough"))
    fits = [fit for panel in panels for fit in panel.fits]
    shifted = {fit.curve for fit in fits if not fit.degenerate and fit.shift}
    for curve, function in {fit.curve: fit.function for fit in fits}.items():
        colour, dashes = panels[0].looks[curve]
        label = _formula_of(curve, function, "αx+s" if curve in shifted else "αx")
        handles.append(Line2D([], [], color=colour, ls=dashes, lw=1.1, label=label.replace("$", r"\$")))
    if bounds and any(panel.site.bound < panel.scales.y[1] for panel in panels):
        handles.append(Line2D([], [], color=style.faint, ls=":", lw=0.9, label="bound: ±√(d−1), without centring ±√d"))
    return handles


def _formula_of(curve: str, function: Curve, argument: str) -> str:
    """What a legend calls a fitted curve: one of one's own by its formula."""
    if curve == FREE:
        return "free: E[y|x] in groups of bins"
    if curve not in CURVES:
        return f"{curve}: A·f({argument}), f(u) = {function.formula}"
    label = f"A·{function.function_name}({argument}), least squares"
    return label if function.function_name == curve else f"{curve}: {label}"


def remarks(panels: Sequence[Panel], fits: Sequence[CurveFit], *, ceilings: bool = True) -> list[str]:
    """Sentences below a legend: what a ceiling is, where any is written, and which curves are not drawn."""
    with_ceiling = [panel for panel in panels if panel.fits and panel.fits[0].r2_ceiling is not None]
    lines = []
    if ceilings and with_ceiling:
        folds = sorted({str(panel.stats.fold_by) for panel in with_ceiling})
        lines.append(f"best f(x): held-out R² of the best function of x that was found, folds by {', '.join(folds)}")
        if any(panel.fits[0].x_repeats for panel in with_ceiling):
            lines[0] += "; *: too low, as x repeats there, finer than bins resolve"
    if others := best_of(fits)[1]:
        more = f" and {len(others) - _MOST_LISTED} more" if len(others) > _MOST_LISTED else ""
        lines.append(f"not drawn, of smaller mean R²: {', '.join(others[:_MOST_LISTED])}{more}")
    return lines


def ceiling_note(panel: Panel) -> list[Words]:
    """The line of the ceiling above a panel; none where there is none."""
    ceiling = panel.fits[0].r2_ceiling if panel.fits else None
    if ceiling is None:
        return []
    mark = "*" if panel.fits[0].x_repeats else ""
    return broken(["best f(x)", f"R² {ceiling:.3f}{mark}"], panel.style.ink, panel.room)


def fit_notes(panel: Panel, result: Callable[[CurveFit], list[str]]) -> list[Words]:
    """The lines above a panel: each fit's name and what is said of it, in its colour."""
    lines: list[Words] = []
    for fit in panel.fits:
        parts = [f"{fit.curve}: nothing to fit"] if fit.degenerate else [fit.curve, *result(fit)]
        colour = panel.style.faint if fit.degenerate else panel.looks[fit.curve][0]
        lines += broken(parts, colour, panel.room)
    return lines
