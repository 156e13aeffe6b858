"""A healing as tables: the drift after each stage, and quality."""

from __future__ import annotations

import math

from normscope.show.tables.drift import quality_table
from normscope.show.tables.table import Column, TextTable, number, several, table_of, words
from normscope.tools.heal.reports import CALIBRATED, START, TRAINED, HealReport

STAGES = {START: "uncalibrated", CALIBRATED: "calibrated", TRAINED: "trained"}
_NONE_KEPT = "training, no state kept"


def healing_table(report: HealReport) -> TextTable:
    """Make a table with one line per stage: held-out drift, and the share of the start's that is gone."""

    def drifts(stage: str) -> list[str]:
        values = [report.drifts[stage][name] for name in ("p10", "median", "p90")]
        return [f"{value:.3g}" if math.isfinite(value) else "not finite" for value in values]

    columns: list[Column[str]] = [
        words("after", lambda stage: STAGES[stage] if stage != TRAINED or report.training_kept else _NONE_KEPT),
        Column("steps", lambda stage: str(report.steps) if stage == TRAINED else ""),
        *several(("10%", "median", "90%"), drifts),
        Column("closed", lambda stage: "" if stage == START else number(report.closed_after(stage), ".1%")),
        Column("kept", lambda stage: "yes" if stage == report.left_with else ""),
    ]
    caption = [
        f"{report.measure} at the output on {report.n_held_out} held-out samples, quantiles over them; learned from "
        f"{report.n_learned}, and {report.n_judged} others decided which state was kept"
    ]
    return table_of(report.drifts, columns, caption=caption)


def healing_tables(report: HealReport) -> list[TextTable]:
    """Make the tables of a healing: its stages, and quality if it was measured."""
    return [healing_table(report), *([quality_table({("swapped", ""): report.quality})] if report.quality else [])]
