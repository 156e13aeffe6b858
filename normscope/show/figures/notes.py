"""Texts around the panels of S-curves: the legend, lines above each panel, and remarks below all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from normscope.curves.known import CURVES, FREE
from normscope.errors import count
from normscope.fits.curve_fit import CurveFit
from normscope.fits.saturation import site_saturation
from normscope.show.figures.fit_numbers import NO_CEILING, is_too_low
from normscope.show.figures.panel_data import extreme_channels
from normscope.show.figures.panels import BAND, BAND_ALPHA, CURVE_WIDTH, MEAN_WIDTH, RESIDUAL, Panel, best_of
from normscope.show.figures.sheet import key
from normscope.show.figures.style import FULL, NO_LABELS, densities
from normscope.show.figures.text import TITLE, Words, lines_of_words, signed, tail, words_inches, wrapped, write_above
from normscope.show.tables.card import sink_sentence
from normscope.show.tables.table import percent

HEAD_INCHES = 0.13
_LEAST_ROOM = 1.2  # inches, for the word "channels"
# What a line of numbers contains beside R²: the curves' names, and the ceiling; in colours alone two take least room.
_FORMS = ((True, True), (True, False), (False, False))


def legend_handles(panels: Sequence[Panel], rows: Sequence[str], sampled: bool) -> list[Artist]:
    """Return the legend of these rows of panels; ``sampled`` if their pairs are those of a sample of the tokens."""
    style = panels[0].style
    handles: list[Artist] = []
    if "density" in rows:
        pairs = f"{'pairs of sampled tokens' if sampled else 'all pairs'} (log scale)"
        handles += [Patch(facecolor=densities(style)(0.5), label=pairs), key("mean, E[y|x]", style.ink, lw=MEAN_WIDTH)]
    fits = [fit for panel in panels for fit in panel.fits]
    shifted = {fit.curve for fit in fits if not fit.degenerate and fit.shift}
    named = any(fit.curve not in CURVES or fit.function.function_name != fit.curve for fit in fits)
    for curve, function in {fit.curve: fit.function for fit in fits}.items():
        argument = "αx+s" if curve in shifted else "αx"
        if curve == FREE:
            label = "free: E[y|x] in groups of bins"
        elif curve in CURVES:
            label = f"{f'{curve}: ' * named}A·{function.function_name}({argument})"
        else:
            label = f"{curve}: A·f({argument}), f(u) = {function.formula}"
        handles.append(key(label, *panels[0].looks[curve], lw=CURVE_WIDTH))
    bounded = [panel.site for panel in panels if panel.site.bound < max(map(abs, panel.scales.y))]
    if bounded and any(row != RESIDUAL for row in rows):
        bounds = ("±1" if site.pointwise else "±√(d−1)" if site.centred else "±√d" for site in bounded)
        handles.append(key(f"bound {' or '.join(dict.fromkeys(bounds))}", style.faint, ":"))
    if "channel" in rows:
        handles.append(key("other channels, sampled evenly over x", style.faint, "", marker="o", ms=2.5, mew=0))
    folds = _folds(panels)
    if RESIDUAL in rows and folds:
        label = f"±{BAND:g} standard errors of E[y|x], folds by {folds}"
        handles.append(Patch(facecolor=style.faint, alpha=BAND_ALPHA, label=label))
    return handles


def _folds(panels: Sequence[Panel]) -> str:
    return ", ".join(sorted({str(panel.stats.fold_by) for panel in panels if panel.stats.fold_by}))


def facts(panels: Sequence[Panel]) -> str:
    """Return class, d and placement of the norms, and their numbers of pairs."""
    sites = [panel.site for panel in panels]
    kinds = " and ".join(dict.fromkeys(site.kind for site in sites))
    placements = " and ".join(dict.fromkeys(site.placement for site in sites if site.placement))
    pairs = f"{_range([panel.stats.n_pairs for panel in panels])} pairs a panel"
    return ", ".join(filter(None, (kinds, f"d = {_range([site.d for site in sites])}", placements, pairs)))


def _range(numbers: Sequence[int]) -> str:
    return " to ".join(f"{n:,}" for n in dict.fromkeys((min(numbers), max(numbers))))


def remarks(panels: Sequence[Panel], fits: Sequence[CurveFit], labels: str = NO_LABELS) -> list[str]:
    """Return sentences below a legend: on the numbers above panels, sinks, and the number of curves not drawn."""
    lines, too_low = [], not panels and any(map(is_too_low, fits))
    if labels != NO_LABELS and (with_fits := [panel for panel in panels if panel.fits]):
        folds = _folds([panel for panel in with_fits if panel.fits[0].r2_cv is not None])
        lines.append(f"R² on {f'held-out pairs, folds by {folds}' if folds else 'all pairs'}")
        with_ceiling = [panel for panel in with_fits if panel.fits[0].r2_ceiling is not None]
        shown = "ceiling" in str(lines_above(panels, ["density"], labels))
        lines[0] += "; ceiling: that of the best function of x" * shown
        written = [panel for panel in with_ceiling if _ceiling(panel)]
        too_low = len(written) < len(with_ceiling) and (shown or not written)
    if too_low:
        lines.append(NO_CEILING)
    if sink := sink_sentence(fits):
        lines.append(sink)
    if not_drawn := best_of(fits)[1]:
        lines.append(f"{count(len(not_drawn), 'curve')} of smaller mean R² not drawn")
    return lines


def r2_of(fit: CurveFit) -> str:
    """Return R² in three digits, on held-out pairs if there are any."""
    return signed(f"{fit.r2 if fit.r2_cv is None else fit.r2_cv:.3f}")


def lines_above(panels: Sequence[Panel], rows: Sequence[str], labels: str) -> list[list[list[Words]]]:
    """Return the lines above each panel of each row, ``[row][panel]``; above the first row also those of the site."""
    lines: list[list[list[Words]]] = [[[] for _ in panels] for _ in rows]
    if labels != NO_LABELS:
        paths = [wrapped(panel.site.name, panel.room) if labels == FULL else [] for panel in panels]
        numbers = _numbers(panels, "R²", r2_of, _ceiling)
        lines[0] = [
            [*([(line, panel.style.ink)] for line in path), *_module(panel), *above]
            for panel, path, above in zip(panels, paths, numbers, strict=True)
        ]
    lines_by_row: dict[str, Callable[[], list[list[Words]]]] = {
        "token": lambda: [[scale_of(panel)] for panel in panels],
        "channel": lambda: [[_channels(panel)] for panel in panels],
        RESIDUAL: lambda: _numbers(panels, "RMSE", lambda fit: f"{fit.rmse:.3g}"),
    }
    for number, row in enumerate(rows):
        if row in lines_by_row:
            lines[number] = [[*above, *more] for above, more in zip(lines[number], lines_by_row[row](), strict=True)]
    return lines


def scale_of(panel: Panel) -> Words:
    """Return the range of σ among the tokens of a panel."""
    low, high = panel.scales.sigma
    return [(f"σ {low:.2g} to {high:.2g}", panel.style.ink)]


def _channels(panel: Panel) -> Words:
    extreme = zip(map(str, extreme_channels(panel.stats)), panel.style.channels, strict=False)
    words = [("channels" if panel.room > _LEAST_ROOM else "ch.", panel.style.ink), *extreme]
    while words_inches(words) > panel.room:
        words.pop()
    return words


def _ceiling(panel: Panel) -> str:
    """Return the ceiling of a panel in three digits; nothing if it is known to be too low."""
    for fit in panel.fits[:1]:
        reached = max(drawn.r2 if drawn.r2_cv is None else drawn.r2_cv for drawn in panel.fits)
        if fit.r2_ceiling is not None and not is_too_low(fit) and fit.r2_ceiling > reached - 5e-4:
            return f"ceiling {fit.r2_ceiling:.3f}"
    return ""


def _module(panel: Panel) -> list[Words]:
    """A point-wise function with its own α and s, and the share of pairs that it saturates; nothing for a norm."""
    if (function := site_saturation(panel.site, panel.stats)) is None:
        return []
    shift = [signed(f"s {function.shift.p50:.3g}")] if function.shift.p50 else []
    share = [] if function.saturated is None else [f"{percent(function.saturated)} saturated"]
    parts = [f"{function.curve}, α {function.alpha.p50:.3g}", *shift, *share]
    return lines_of_words([(text, panel.style.ink) for text in parts], panel.room)


def _numbers(
    panels: Sequence[Panel], lead: str, value: Callable[[CurveFit], str], after: Callable[[Panel], str] = lambda _: ""
) -> list[list[Words]]:
    """Return lines of a number of every fit above each panel: in all panels of the same form, the first that fits.

    Reasons for doubt follow, such as ``straight``. A line that does not fit in any form is broken.
    """
    colours = [panel.looks[fit.curve][0] for panel in panels[:1] for fit in panel.fits]
    forms = _FORMS if len({*colours}) == len(colours) < 3 else _FORMS[:2]
    for named, with_ceiling in forms:
        lines: list[Words] = []
        for panel in panels:
            ink, fits = panel.style.ink, [fit for fit in panel.fits if not fit.degenerate]
            numbers = [(f"{fit.curve} " * named + value(fit), panel.looks[fit.curve][0]) for fit in fits]
            words = [*dict.fromkeys(fit.doubt for fit in fits), after(panel) if with_ceiling else ""]
            nothing = [("nothing to fit", panel.style.faint)] if panel.fits else []
            lines.append([(lead, ink), *numbers, *((text, ink) for text in words if text)] if fits else nothing)
        if all(words_inches(line) <= panel.room for panel, line in zip(panels, lines, strict=True)):
            break
    return [lines_of_words(line, panel.room) for panel, line in zip(panels, lines, strict=True)]


def write_heading(ax: Axes, panel: Panel, labels: str, lines: Sequence[Words]) -> None:
    """Write a site's short name above a panel, and lines below it."""
    pad = write_above(ax, lines)
    if labels != NO_LABELS:
        name = tail(panel.name, panel.room, TITLE)
        ax.set_title(name, parse_math=False, loc="left", y=1, pad=pad, fontproperties=TITLE)
