"""Drift and healing as tables for a terminal: a row a swap, a part of the data, a site, or a stage."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from normscope.swaps.heal.reports import BLOCKS, SITES, START, WHOLE, HealReport
from normscope.tables.table import as_cell, new_table, table_by_site, unbroken

if TYPE_CHECKING:
    from normscope.swaps.drift.reports import Drift, DriftReport, Quantiles


_NONE = "–"
_NEAR = 0.1  # of the output's length
_L2 = "relative L2: ‖swapped − original‖ / ‖original‖, median and 90th percentile over inputs"


def drift_table(reports: Sequence[DriftReport]) -> Table:
    """One line a swap: how far the network's output moved with all sites swapped."""
    rows = [report.all for report in reports]
    logits, frames, ends = (
        any(row.kl is not None for row in rows),
        any(row.frames is not None for row in rows),
        any(report.end is not None for report in reports),
    )
    top5, orders = any(row.top5 is not None for row in rows), any(report.cumulative for report in reports)
    table = _by_swap(
        *("sites", "inputs", "L2", "p90", "cosine", "p10"),
        *([f"≤ {_NEAR}"] if orders else []),
        *(["KL", "p90", "top-1"] if logits else []),
        *(["top-5", "of 5"] if top5 else []),
        *(["frame L2", "p90"] if frames else []),
        *(["end L2", "p90", "cosine"] if ends else []),
        *_spoilt_column(rows),
    )
    for report, row in zip(reports, rows, strict=True):
        answers = [_share(row.top5), _share(row.top5_overlap)] if top5 else []
        end = report.end
        table.add_row(
            *_names(report),
            str(row.sites_swapped),
            str(row.inputs),
            *_l2(row),
            *_lower(row.cosine),
            *([_near(report)] if orders else []),
            *([*_upper(row.kl), _share(row.top1)] if logits else []),
            *answers,
            *(_upper(row.frames) if frames else []),
            *([*_l2(end), _lower(end.cosine if end else None)[0]] if ends else []),
            *_spoilt(row, rows),
        )
    table.caption = " · ".join(_explained(rows, orders=orders, logits=logits, top5=top5, frames=frames, ends=ends))
    return unbroken(table)


def parts_table(reports: Sequence[DriftReport]) -> Table:
    """One line a swap and part of the data: the output with all sites swapped, timestep by timestep for example."""
    rows = [row for report in reports for row in report.by_part]
    table = _by_swap("part", "inputs", "L2", "p90", "max", "cosine", "p10", *_spoilt_column(rows))
    table.columns[2].justify = "left"
    for report in reports:
        for number, row in enumerate(report.by_part):
            table.add_row(
                *(_names(report) if number == 0 else ("", "")),
                as_cell(row.part),
                str(row.inputs),
                *_l2(row),
                _number(row.relative_l2.max),
                *_lower(row.cosine),
                *_spoilt(row, rows),
            )
    table.caption = f"The output with all sites swapped. {_L2}; cosine: median and 10th percentile"
    return unbroken(table)


def sites_table(reports: Sequence[DriftReport]) -> Table:
    """One line a site, a column a swap: how far the network's output moved with this site alone swapped."""
    inits = {report.init for report in reports}
    names = [report.func if len(inits) == 1 else f"{report.func} {report.init}".strip() for report in reports]
    table = table_by_site(*map(as_cell, names))
    for path in dict.fromkeys(path for report in reports for path in report.sites):
        table.add_row(as_cell(path), *(_alone(_of(report.by_site, path)) for report in reports))
    table.caption = (
        "One site alone swapped: median over inputs of the relative L2 at the network's output; "
        "!: of some inputs not finite"
    )
    return unbroken(table)


def _near(report: DriftReport) -> str:
    """Say how many sites can be swapped, one after the other, before the median passes what is still near."""
    if not report.cumulative:
        return _NONE
    near = itertools.takewhile(lambda row: row.relative_l2.p50 <= _NEAR, report.cumulative)
    return str(sum(1 for _ in near))


def _alone(row: Drift | None) -> str:
    return _NONE if row is None else _number(row.relative_l2.p50) + ("!" if row.nonfinite else "")


def _by_swap(*names: str) -> Table:
    table = new_table()
    for name in ("func", "init"):
        table.add_column(name, no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _names(report: DriftReport) -> tuple[str, str]:
    return as_cell(report.func), as_cell(report.init)


def _of(rows: Iterable[Drift], path: str) -> Drift | None:
    return next((row for row in rows if row.site == path), None)


def _l2(row: Drift | None) -> list[str]:
    return _upper(None if row is None else row.relative_l2)


def _upper(found: Quantiles | None) -> list[str]:
    """The median and the 90th percentile of what is better small."""
    return [_NONE, _NONE] if found is None else [_number(found.p50), _number(found.p90)]


def _lower(found: Quantiles | None) -> list[str]:
    """The median and the 10th percentile of a cosine, which is none where the values are not finite."""
    if found is None:
        return [_NONE, _NONE]
    return ["NaN" if value == -math.inf else _cosine(value) for value in (found.p50, found.p10)]


def _cosine(value: float) -> str:
    return _NONE if math.isnan(value) else f"{value:.4f}"


def _number(value: float) -> str:
    if math.isnan(value):
        return _NONE
    return "∞" if math.isinf(value) else f"{value:#.3g}".rstrip(".")


def _share(value: float | None) -> str:
    return _NONE if value is None else f"{value:.1%}"


def _spoilt_column(rows: Iterable[Drift]) -> list[str]:
    return ["not finite"] if any(row.nonfinite for row in rows) else []


def _spoilt(row: Drift, rows: Iterable[Drift]) -> list[str]:
    """How many inputs gave a NaN or an infinity, where the table has a column for it."""
    return [f"{row.nonfinite} of {row.inputs}" if row.nonfinite else ""] if _spoilt_column(rows) else []


def _explained(
    rows: Sequence[Drift], *, orders: bool, logits: bool, top5: bool, frames: bool, ends: bool
) -> Iterable[str]:
    """What the columns mean, as far as there is something in them."""
    yield f"All sites swapped. {_L2}; cosine: median and 10th percentile"
    if orders:
        yield f"≤ {_NEAR}: how many sites, the least harmful first, leave a median L2 up to that"
    if logits:
        answers = max(row.answers or 0 for row in rows)
        yield f"KL(original ‖ swapped) in nats; top-1: same first answer, of {answers:,}"
    if top5:
        yield "top-5: the original's first among the swapped's five; of 5: share of the original's five among them"
    if frames:
        yield "frame L2: relative L2 of single frames"
    if ends:
        yield "end: of the latents at the end of trajectories"
    if any(row.nonfinite for row in rows):
        yield "not finite: inputs that gave a NaN or an infinity, which count as infinitely far"
    if left_out := max((row.left_out for row in rows), default=0):
        yield f"{left_out:,} more left out: the original's own output is zero throughout or not finite"


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
