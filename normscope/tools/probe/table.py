"""Timelines as tables for a terminal: a row a site and curve, with each number at the first and the last step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from normscope.errors import count
from normscope.show.tables.table import NONE, Column, TextTable, names, number, table_of, words

if TYPE_CHECKING:
    from normscope.fits.curve_fit import CurveFit
    from normscope.tools.probe.timeline import Timeline

_Row = tuple[int, str]  # number of a site, and a curve
_ARROW = " → "


def timeline_tables(timeline: Timeline, fits: Sequence[Sequence[CurveFit]] = ()) -> list[TextTable]:
    """Make a table of the norms and one of the point-wise functions, as far as there are any.

    Each cell has the first and the last step; ``fits`` of their captures have the ceilings.
    """

    def column(heading: str, metric: str, form: str, drop: int = 0) -> Column[_Row]:
        def cell(row: _Row) -> str:
            site, curve = row
            return _ARROW.join(number(v, form) for v in timeline.values(metric.format(curve))[timeline.ends, site])

        return Column(heading, cell, drop=drop)

    def name(row: _Row) -> str:
        return timeline.sites[row[0]].name

    ceilings = [{fit.site: fit.r2_ceiling for fit in step_fits} for step_fits in fits[: len(timeline.ends)]]

    def ceiling(row: _Row) -> str:
        return _ARROW.join(number(site_ceilings.get(name(row)), ".3f") for site_ceilings in ceilings)

    norm_columns: list[Column[_Row]] = [
        names("site", name, once=True),
        words("curve", lambda row: row[1]),
        column("R²", "r2/{}", ".3f"),
        Column("ceiling", ceiling, bool(fits), drop=3),
        column("α", "alpha/{}", ".3g"),
        column(">1", "beyond/{}", ".1%", drop=4),
        column("95:5", "spread", ".3g", drop=1),
        column("|μ|/σ", "offset", ".2g", drop=5),
        column("max |x|", "largest", ".4g"),
        column("massive", "massive", ".0f", drop=2),
    ]
    function_columns: list[Column[_Row]] = [
        names("site", name),
        words("f", lambda row: row[1], 1),
        column("α", "module_alpha", ".3g"),
        column("1/std", "inverse_std", ".3g"),
        *(column(f">{end}", f"beyond_{end}", ".1%", drop=end) for end in (1, 2, 3)),
        column("max |x|", "largest", ".4g", drop=4),
    ]
    norms = [(n, curve) for n, site in enumerate(timeline.sites) if not site.curve for curve in timeline.curves]
    functions = [(n, site.curve) for n, site in enumerate(timeline.sites) if site.curve]
    steps = _ARROW.join(f"step {step:,}" for step in timeline.steps[timeline.ends])
    caption = [f"{steps}, of {count(len(timeline.steps), 'step')} · {NONE}: not identified, or none"]
    tables = ((norms, norm_columns), (functions, function_columns))
    return [table_of(rows, columns, caption=caption, about="timeline") for rows, columns in tables if rows]
