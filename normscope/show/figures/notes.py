"""Texts around the panels of S-curves: the legend, lines above each panel, and remarks below all."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Patch

from normscope.curves.known import CURVES, FREE
from normscope.fits.curve_fit import CurveFit
from normscope.fits.saturation import site_saturation
from normscope.runtime.files import visible
from normscope.show.figures.axes import MOST_PAIRS
from normscope.show.figures.panels import BAND, BAND_ALPHA, RANGE_POINTS, RESIDUAL, Panel, best_of
from normscope.show.figures.sheet import key
from normscope.show.figures.style import FULL, NO_LABELS, SHORT
from normscope.show.figures.text import Words, broken, tail, words_inches, write_above
from normscope.show.tables.sinks import sink_sentence

HEAD_INCHES = 0.13
_HEAD = FontProperties(size=7)
_MOST_LISTED = 20
_RANGE = f"{100 * MOST_PAIRS:.0f} % of the pairs"


def legend_handles(panels: Sequence[Panel], rows: Sequence[str], sampled: bool) -> list[Artist]:
    """Return the legend of these rows of panels; ``sampled`` if their pairs are those of a sample of the tokens."""
    style = panels[0].style
    handles: list[Artist] = []
    if "density" in rows:
        grey = matplotlib.colormaps[style.density](0.6)
        handles.append(
            Patch(facecolor=grey, label=f"{'pairs of sampled tokens' if sampled else 'all pairs'} (log scale)")
        )
        handles.append(key("mean, E[y|x]", style.ink, lw=1.4))
    fits = [fit for panel in panels for fit in panel.fits]
    shifted = {fit.curve for fit in fits if not fit.degenerate and fit.shift}
    for curve, function in {fit.curve: fit.function for fit in fits}.items():
        argument = "αx+s" if curve in shifted else "αx"
        if curve == FREE:
            label = "free: E[y|x] in groups of bins"
        elif curve in CURVES:
            alias = "" if function.function_name == curve else f"{curve}: "
            label = f"{alias}A·{function.function_name}({argument})"
        else:
            label = f"{curve}: A·f({argument}), f(u) = {function.formula}"
        handles.append(key(label, *panels[0].looks[curve], lw=1.1))
    with_y = [row for row in rows if row != RESIDUAL]
    if with_y:
        handles.append(key(_RANGE, style.ink, lw=RANGE_POINTS))
    if with_y and any(panel.site.bound < panel.scales.y[1] for panel in panels):
        functions = ", of point-wise functions ±1" if any(panel.site.pointwise for panel in panels) else ""
        handles.append(key(f"bound: ±√(d−1), without centring ±√d{functions}", style.faint, ":"))
    if "channel" in rows:
        handles.append(key("other channels, evenly over x", style.faint, "", marker="o", ms=2.5, mew=0))
    folds = _folds(panels)
    if RESIDUAL in rows and folds:
        label = f"±{BAND:g} standard errors of E[y|x], folds by {folds}"
        handles.append(Patch(facecolor=style.faint, alpha=BAND_ALPHA, label=label))
    return handles


def _folds(panels: Sequence[Panel]) -> str:
    return ", ".join(sorted({str(panel.stats.fold_by) for panel in panels if panel.stats.fold_by}))


def facts(panels: Sequence[Panel], labels: str) -> str:
    """Return class, d and placement of the norms, and their numbers of pairs, as far as no panel names them."""
    if labels == FULL:
        return ""
    sites = [panel.site for panel in panels]
    kinds = " and ".join(dict.fromkeys(site.kind for site in sites))
    placements = " and ".join(dict.fromkeys(site.placement for site in sites if site.placement))
    pairs = f"{_range([panel.stats.n_pairs for panel in panels])} pairs a panel"
    return ", ".join(filter(None, (kinds, f"d = {_range([site.d for site in sites])}", placements, pairs)))


def _range(numbers: Sequence[int]) -> str:
    return " to ".join(f"{n:,}" for n in dict.fromkeys((min(numbers), max(numbers))))


def remarks(panels: Sequence[Panel], fits: Sequence[CurveFit], labels: str = NO_LABELS) -> list[str]:
    """Return sentences below a legend: the meaning of the numbers above panels, and the curves that are not drawn."""
    lines = []
    if labels != NO_LABELS and (with_fits := [panel for panel in panels if panel.fits]):
        folds = _folds([panel for panel in with_fits if panel.fits[0].r2_cv is not None])
        lines.append(f"Above panels: R²{f' on held-out pairs, folds by {folds}' if folds else ''}")
        written = str([notes_of(panel, labels) for panel in with_fits])
        mark = "ceiling:" if "ceiling" in written else "after /: the ceiling," if "'/ " in written else ""
        lines[0] += f"; {mark} that of the best function of x" if mark else ""
        lines[0] += "; *: too low, as x repeats there, finer than bins resolve" if "*" in written else ""
    if sink := sink_sentence(fits):
        lines.append(sink)
    if others := best_of(fits)[1]:
        more = f" and {len(others) - _MOST_LISTED} more" if len(others) > _MOST_LISTED else ""
        lines.append(f"Not drawn, of smaller mean R²: {', '.join(others[:_MOST_LISTED])}{more}")
    return lines


def r2_of(fit: CurveFit) -> str:
    """Return R² in three digits, on held-out pairs if there are any."""
    return f"{fit.r2 if fit.r2_cv is None else fit.r2_cv:.3f}"


def notes_of(panel: Panel, labels: str) -> list[Words]:
    """Return the lines above a panel: R² and ceiling in one line; or all about the site, and a line a curve."""
    ink, site, fits = panel.style.ink, panel.site, panel.fits
    module = broken(_module(panel), ink, panel.room)
    ceiling = fits[0].r2_ceiling if fits else None
    top = [] if ceiling is None else [f"ceiling {ceiling:.3f}{'*' if fits[0].x_repeats else ''}"]
    if labels != FULL:
        return [*module, *fits_in_line(panel, "R²", r2_of, top)] if labels == SHORT else []
    facts_of_site = [f"{visible(site.kind)} d={site.d}", *([site.placement] if site.placement else [])]
    bounds = [f"|y| ≤ {site.bound:.3g}"] if panel.scales.y[1] < site.bound < math.inf else []  # beyond the panel
    path: Words = [(tail(f"{site.index}  {site.name}", panel.room), ink)]
    lines = [path, *broken([*facts_of_site, f"{panel.stats.n_pairs:,} pairs", *bounds], ink, panel.room), *module]
    for fit in fits:
        parts = [f"{fit.curve}: nothing to fit"] if fit.degenerate else [fit.curve, *_result(fit)]
        lines += broken(parts, panel.style.faint if fit.degenerate else panel.looks[fit.curve][0], panel.room)
    return [*lines, *broken(top, ink, panel.room)]


def _module(panel: Panel) -> list[str]:
    """A point-wise function with its own α and s, and the share of pairs that it saturates; nothing for a norm."""
    if (function := site_saturation(panel.site, panel.stats)) is None:
        return []
    shift = [f"s {function.shift.p50:.3g}"] if function.shift.p50 else []
    share = [] if function.saturated is None else [f"{100 * function.saturated:.2g} % saturated"]
    return [f"{function.curve}, α {function.alpha.p50:.3g}", *shift, *share]


def _result(fit: CurveFit) -> list[str]:
    shape = [f"A {fit.amplitude:.3g}", f"α {fit.alpha:.3g}", *([f"s {fit.shift:.3g}"] if fit.shift else [])]
    if fit.doubt == "straight":
        shape = [f"slope {fit.slope:.3g}, straight"]
    elif fit.unidentified:
        shape = ["A and α not identified"]
    held_out = [] if fit.r2_cv is None else [f"held out {fit.r2_cv:.3f}"]
    doubt = ["not converged"] if fit.doubt == "not converged" else []
    return [*([] if fit.curve == FREE else shape), f"R² {fit.r2:.3f}", *held_out, *doubt]


def fits_in_line(panel: Panel, lead: str, value: Callable[[CurveFit], str], after: Sequence[str] = ()) -> list[Words]:
    """Return one line of a number of every fit, in its colour; on a narrow panel with fewer words and no leading zeros.

    Reasons for doubt follow, such as ``straight``.
    """
    ink, fits = panel.style.ink, [fit for fit in panel.fits if not fit.degenerate]
    if not fits:
        return [[("nothing to fit", panel.style.faint)]] if panel.fits else []
    named = [(f"{fit.curve} {value(fit)}", panel.looks[fit.curve][0]) for fit in fits]
    bare = [(value(fit), panel.looks[fit.curve][0]) for fit in fits]
    doubts = [(doubt, ink) for doubt in dict.fromkeys(fit.doubt for fit in fits) if doubt]
    end = [*doubts, *((text, ink) for text in after)]
    slash = [(text.replace("ceiling", "/"), ink) for text, ink in end]
    narrow: list[Words] = [[*named, *end], [*bare, *end], [*bare, *slash], [*bare, *doubts], bare]
    narrow = [[(re.sub(r"\b0\.", ".", text), colour) for text, colour in line] for line in narrow]
    lines: list[Words] = [[(lead, ink), *named, *end], *narrow]
    return [next((line for line in lines if words_inches(line) <= panel.room), narrow[-1])]


def write_heading(ax: Axes, panel: Panel, labels: str, notes: Sequence[Words], least: int) -> None:
    """Write a site's short name above a panel, and notes below it; neighbours have ``least`` lines or fewer."""
    pad = write_above(ax, notes, least)
    if labels != NO_LABELS:
        name = tail(panel.name, panel.room, _HEAD)
        ax.set_title(name, parse_math=False, loc="left", y=1, pad=pad, fontproperties=_HEAD)
