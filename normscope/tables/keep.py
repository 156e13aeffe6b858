"""Which norms to keep, as a table for a terminal: a row for each number of norms that are kept."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.table import Table

from normscope.tables.layout import Explanation
from normscope.tables.table import NONE, Column, names, number, several, table_of

if TYPE_CHECKING:
    from normscope.swaps.reports import KeepReport, KeepStep, Quantiles


def keep_table(report: KeepReport) -> Table:
    """One line for each number of norms kept, from none on: which one came back, and how far the output is moved."""
    quality, steps = report.quality, report.taken
    held_out = any(step.held_out is not None for step in steps)
    worked_on = any(step.worked_on is not None for step in report.steps)
    shown = report.steps if worked_on else steps  # of what was tried and not taken, too
    measured = quality.name if quality else "quality"
    form = ".1%" if measured.endswith("accuracy") else "#.5g"

    def score(step: KeepStep) -> str:
        own = quality.scores.get(f"{step.kept} kept") if quality else None
        return NONE if own is None else number(own.value, form)

    columns: list[Column[KeepStep]] = [
        Column("kept", lambda step: str(step.kept)),
        names("norm put back", lambda step: step.site or NONE),
        Column("swapped", lambda step: str(step.swapped), drop=1),
        Column("L2" if report.measure.endswith("L2") else "KL", lambda step: _median(step.error)),
        *several(("held out", "p90"), lambda step: _held_out(step.held_out), (0, 2), shown=held_out),
        Column("calibrated", lambda step: _distance(step.worked_on), worked_on),
        Column(measured, score, quality is not None),
    ]
    caption = [
        Explanation(
            f"{report.measure} at the output, median over {report.n_chosen_on} samples that the choice was made on"
        ),
    ]
    if held_out:
        caption.append(Explanation("held out: over inputs that nothing was chosen by", ("held out",), "; "))
    if worked_on:
        caption.append(Explanation("calibrated: on the inputs that decided", ("calibrated",), "; "))
    if quality:
        original = number(quality.scores["original"].value, form)
        caption.append(Explanation(f"{quality.name} of the original: {original}, {quality.over}", (measured,), "; "))
    return table_of(shown, columns, caption=caption)


def _held_out(quantiles: Quantiles | None) -> list[str]:
    return [NONE, NONE] if quantiles is None else [_distance(quantiles.p50), _distance(quantiles.p90)]


def _median(quantiles: Quantiles) -> str:
    return _distance(quantiles.p50)


def _distance(value: float | None) -> str:
    if value is None:
        return NONE
    return "∞" if math.isinf(value) else number(value, "#.3g").rstrip(".")
