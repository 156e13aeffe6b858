"""Advice on starts as a table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from normscope.figures.tables import NARROWEST_NAME, as_cell, new_table, unbroken

if TYPE_CHECKING:
    from normscope.fits.advice import Advice, Start


def advice_table(advice: Sequence[Advice]) -> Table:
    """One line a kind of site and curve: where its point-wise functions start, and what was published for such."""
    from normscope.fits.advice import NOTE

    table = new_table()
    table.add_column("kind of site", overflow="fold", min_width=NARROWEST_NAME)
    for name in ("func", "feeds"):
        table.add_column(name, no_wrap=True)
    shifted = any(found.shift and (found.shift.least or found.shift.most) for found in advice)
    for name in ("α", "C", *(["s"] if shifted else []), "A", "sites"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("left out", overflow="fold", min_width=8)
    table.add_column("published α₀", overflow="fold", min_width=NARROWEST_NAME)
    kind = None
    for found in advice:
        table.add_row(
            "" if found.kind == kind else as_cell(found.kind),
            found.curve,
            found.feeds or "unknown",
            _start(found.alpha),
            "–" if found.C is None else f"{found.C:.3g}",
            *([_start(found.shift)] if shifted else []),
            _start(found.amplitude),
            str(found.sites),
            _left_out(found),
            f"{found.published.alpha:g} ({found.published.of})" if found.published else "–",
        )
        kind = found.kind
    table.caption = f"Medians of the sites of a kind that bend; in brackets, their range. {NOTE}"
    return unbroken(table)


def _start(start: Start | None) -> str:
    if start is None:
        return "–"
    if start.least == start.most:
        return f"{start.value:.3g}"
    return f"{start.value:.3g} ({start.least:.3g} to {start.most:.3g})"


def _left_out(found: Advice) -> str:
    numbers = ((found.straight, "straight"), (found.not_converged, "not converged"), (found.nothing, "nothing to fit"))
    return ", ".join(f"{number} {why}" for number, why in numbers if number) or "–"
