"""Healings as tables for a terminal: a row a stage."""

from __future__ import annotations

import math

from rich.table import Table

from normscope.figures.tables import new_table, unbroken
from normscope.healings import BLOCKS, SITES, START, WHOLE, HealReport

_NAMES = {START: "start values", SITES: "each site alone", BLOCKS: "blocks", WHOLE: "end to end"}


def healing_table(report: HealReport) -> Table:
    """One line a stage: the drift on the held-out inputs after it, and how much of the start's is gone."""
    table = new_table()
    table.add_column("after", no_wrap=True)
    for name in ("steps", "kept", "10 %", "median", "90 %", "closed"):
        table.add_column(name, justify="right", no_wrap=True)
    for stage, own in report.drifts.items():
        points = [point for point in report.points if point.stage == stage]
        kept = sum(point.kept for point in points)
        steps = max((point.step for point in points), default=0)
        table.add_row(
            _NAMES[stage],
            str(steps) if stage not in (START, SITES) else "",
            f"{kept}/{len(points)}" if points else "",
            *(_written(own[name]) for name in ("p10", "median", "p90")),
            "" if stage == START else f"{report.closed_after(stage):.1%}",
        )
    table.caption = (
        f"relative L2 at the output on {report.n_held_out} held-out samples, quantiles over them; learned from "
        f"{report.n_learned}; kept: intervals of steps, or sites, after which the median had fallen on "
        f"{report.n_judged} others"
    )
    return unbroken(table)


def _written(number: float) -> str:
    return f"{number:.4f}" if math.isfinite(number) else "not finite"
