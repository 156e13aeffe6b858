"""The sites of a swap, its drift and quality, and norms kept, as tables."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from normscope.show.tables.glossary import DEFINITIONS, TERMS
from normscope.show.tables.table import NONE, Column, TextTable, names, number, several, table_of, words
from normscope.swaps.drift.reports import DriftReport, KeepReport, KeepStep
from normscope.swaps.inits import published_name
from normscope.swaps.reports import Drift, Quality, Quantiles

Swap = tuple[DriftReport, Drift]
_NEAR = 0.1  # of the output's length
_OF_OUTPUT = "L2: ‖swapped − original‖ / ‖original‖ of the output; medians and percentiles over inputs"


def swapped_table(rows: Sequence[Mapping[str, Any]]) -> TextTable:
    """Make a table with one line per swapped site, with medians over the channels of per-channel curves.

    Each row has ``site``, ``norm``, ``curve``, ``amplitude``, ``alpha``, ``shift``, ``r2``, ``per_channel``,
    ``straight`` and ``weights_by``; a missing number is None.
    """
    straight = any(row["straight"] for row in rows)
    columns: list[Column[Mapping[str, Any]]] = [
        names("site", lambda row: row["site"]),
        words("norm", lambda row: row["norm"], 1),
        words("replaced by", lambda row: published_name(row["curve"])),
        Column("A", lambda row: "straight" if row["straight"] else number(row["amplitude"], ".4g")),
        Column("α", lambda row: NONE if row["straight"] else number(row["alpha"], ".4g")),
        Column("A·α", lambda row: number(row["amplitude"] * row["alpha"], ".4g") if row["straight"] else "", straight),
        Column("s", lambda row: number(row["shift"], ".4g"), any(row["shift"] is not None for row in rows)),
        Column("R²", lambda row: number(row["r2"], ".4f")),
    ]
    caption = ["A, α, s and R² are medians over the channels"] if any(row["per_channel"] for row in rows) else []
    if any(row["weights_by"] == "gamma" for row in rows):
        caption.append("pairs weighted by γ², the error that reaches the next layer; `normscope fit` weights all alike")
    if straight:
        caption.append(f"straight: {DEFINITIONS[TERMS]['straight']}")
    return table_of(rows, columns, caption=caption)


def drift_tables(reports: Sequence[DriftReport]) -> list[TextTable]:
    """Make the tables of drift for swaps of one network: all sites, by part, by site, and quality."""
    tables = [drift_table(reports)]
    if any(report.by_part for report in reports):
        tables.append(parts_table(reports))
    if any(report.by_site for report in reports):
        tables.append(sites_table(reports))
    if qualities := {(report.func, report.init): report.quality for report in reports if report.quality}:
        tables.append(quality_table(qualities))
    return tables


def drift_table(reports: Sequence[DriftReport]) -> TextTable:
    """Make a table with one line per swap: drift of the output with all sites swapped."""
    rows = [report.all for report in reports]
    orders, ends = any(report.cumulative for report in reports), any(report.end is not None for report in reports)
    logits, frames = any(row.kl is not None for row in rows), any(row.frames is not None for row in rows)
    top5 = any(row.top5 is not None for row in rows)
    end_headings = ("end L2", "p90 of end L2", "end cosine")
    columns: list[Column[Swap]] = [
        words("func", lambda swap: published_name(swap[0].func)),
        words("init", lambda swap: swap[0].init, 2),
        Column("sites", lambda swap: str(swap[1].sites_swapped), drop=3),
        Column("inputs", lambda swap: str(swap[1].inputs), drop=5),
        *several(("L2", "p90 of L2"), lambda swap: _upper(swap[1].relative_l2), (0, 2)),
        *several(("cosine", "p10 of cosine"), lambda swap: _lower(swap[1].cosine), (0, 3)),
        Column(f"≤ {_NEAR}", lambda swap: _near(swap[0]), orders, drop=1),
        *several(("KL", "p90 of KL"), lambda swap: _upper(swap[1].kl), (1, 4), shown=logits),
        Column("top-1", lambda swap: number(swap[1].top1, ".1%"), logits, drop=1),
        Column("top-5", lambda swap: number(swap[1].top5, ".1%"), top5, drop=3),
        Column("of 5", lambda swap: number(swap[1].top5_overlap, ".1%"), top5, drop=4),
        *several(("frame L2", "p90 of frame L2"), lambda swap: _upper(swap[1].frames), (2, 4), shown=frames),
        *several(end_headings, lambda swap: _end(swap[0].end), (2, 4, 4), shown=ends),
        _spoilt(rows),
    ]
    caption = [f"All sites swapped. {_OF_OUTPUT}"]
    if logits:
        caption.append(f"top-1 of {max(row.answers or 0 for row in rows):,} answers")
    if left_out := max((row.left_out for row in rows), default=0):
        caption.append(f"{left_out:,} inputs left out: the original's own output is zero throughout or not finite")
    caption += _calibrated(reports)
    return table_of(list(zip(reports, rows, strict=True)), columns, caption=caption, about="swap-bench")


def parts_table(reports: Sequence[DriftReport]) -> TextTable:
    """Make a table with one line per swap and part of the data, for example a timestep, with all sites swapped."""
    rows = [(report, row) for report in reports for row in report.by_part]
    columns: list[Column[Swap]] = [
        words("func", lambda swap: published_name(swap[0].func) if swap[1] is swap[0].by_part[0] else ""),
        words("init", lambda swap: swap[0].init if swap[1] is swap[0].by_part[0] else "", 2),
        words("part", lambda swap: swap[1].part),
        Column("inputs", lambda swap: str(swap[1].inputs), drop=4),
        *several(("L2", "p90 of L2"), lambda swap: _upper(swap[1].relative_l2), (0, 1)),
        Column("max", lambda swap: _distance(swap[1].relative_l2.max), drop=3),
        *several(("cosine", "p10 of cosine"), lambda swap: _lower(swap[1].cosine), (0, 3)),
        _spoilt([row for _, row in rows]),
    ]
    return table_of(rows, columns, caption=[f"All sites swapped. {_OF_OUTPUT}"])


def sites_table(reports: Sequence[DriftReport]) -> TextTable:
    """Make a table with one line per site and one column per swap: drift with this site alone swapped."""
    same_init = len({report.init for report in reports}) == 1

    def moved(row: Drift | None) -> str:
        return NONE if row is None else _distance(row.relative_l2.p50) + ("!" if row.nonfinite else "")

    columns: list[Column[str]] = [names("site", lambda path: path)]
    for n, report in enumerate(reports):
        heading = published_name(report.func) + ("" if same_init else f" {report.init}".rstrip())
        rows = {row.site: row for row in reversed(report.by_site)}
        columns.append(Column(heading, lambda path, rows=rows: moved(rows.get(path)), drop=int(n > 0)))  # type: ignore[misc]
    caption = ["One site alone swapped: L2 of the output, median over inputs", "!: not finite for some inputs"]
    if any(_calibrated(reports)):
        caption.append("calibrated with that site alone swapped")
    return table_of(dict.fromkeys(path for report in reports for path in report.sites), columns, caption=caption)


def _calibrated(reports: Sequence[DriftReport]) -> list[str]:
    """Describe the inputs of calibrated rows."""
    inputs = [report.calibration.in_words for report in reports if report.calibration]
    return [f"calibrated: each row {text}" for text in dict.fromkeys(inputs)]


def _near(report: DriftReport) -> str:
    """Return how many sites can be swapped in turn before the median L2 exceeds the limit."""
    near = itertools.takewhile(lambda row: row.relative_l2.p50 <= _NEAR, report.cumulative)
    return str(len(list(near))) if report.cumulative else NONE


def _end(row: Drift | None) -> list[str]:
    return [NONE] * 3 if row is None else [*_upper(row.relative_l2), _lower(row.cosine)[0]]


def _upper(quantiles: Quantiles | None) -> list[str]:
    """The median and the 90th percentile of what is better small."""
    return [NONE, NONE] if quantiles is None else [_distance(quantiles.p50), _distance(quantiles.p90)]


def _lower(cosines: Quantiles) -> list[str]:
    """The median and the 10th percentile of a cosine, which is none where the values are not finite."""
    return ["NaN" if value == -math.inf else number(value, ".4f") for value in (cosines.p50, cosines.p10)]


def _distance(value: float | None) -> str:
    return "∞" if value == math.inf else number(value, "#.3g").rstrip(".")


def _spoilt(rows: Sequence[Drift]) -> Column[Swap]:
    return Column(
        "not finite",
        lambda swap: f"{swap[1].nonfinite} of {swap[1].inputs}" if swap[1].nonfinite else "",
        any(row.nonfinite for row in rows),
    )


def quality_table(qualities: Mapping[tuple[str, str], Quality]) -> TextTable:
    """Make a table with one line per network: its quality, the original's first.

    ``qualities`` are by function and init; all share the original's score.
    """
    first = next(iter(qualities.values()))
    networks = {("original", ""): first.scores["original"]}
    for (func, init), quality in qualities.items():
        networks[func, init] = quality.scores["swapped"]
        if healed := quality.scores.get("healed"):
            networks[f"{func}, after heal", init] = healed

    def bounds(network: tuple[str, str]) -> str:
        return " – ".join(_score(first, bound) for bound in networks[network].interval or ())

    columns: list[Column[tuple[str, str]]] = [
        words("norms", lambda network: published_name(network[0])),
        words("init", lambda network: network[1]),
        Column(first.name, lambda network: _score(first, networks[network].value)),
        Column("95%", bounds, any(score.interval for score in networks.values())),
    ]
    words_of = {True: "higher is better", False: "lower is better", None: "a function of your own"}
    better = words_of[first.higher_is_better]
    interval = "95%: Wilson's interval" if networks["original", ""].interval else ""
    return table_of(networks, columns, caption=filter(None, [first.over, better, interval]))


def _score(quality: Quality, value: float) -> str:
    return "∞" if value == math.inf else number(value, ".1%" if quality.name.endswith("accuracy") else "#.5g")


def keep_table(report: KeepReport) -> TextTable:
    """Make a table with one line per number of norms kept: the norm put back, and the drift of the output."""
    quality, steps = report.quality, report.taken
    held_out = any(step.held_out is not None for step in steps)
    worked_on = any(step.worked_on is not None for step in report.steps)
    shown = report.steps if worked_on else steps  # of what was tried and not taken, too
    measured = quality.name if quality else "quality"

    def score(step: KeepStep) -> str:
        scored = quality.scores.get(f"{step.kept} kept") if quality else None
        return _score(quality, scored.value) if quality and scored else NONE

    columns: list[Column[KeepStep]] = [
        Column("kept", lambda step: str(step.kept)),
        names("norm put back", lambda step: step.site or NONE),
        Column("swapped", lambda step: str(step.swapped), drop=1),
        Column("L2" if report.measure.endswith("L2") else "KL", lambda step: _distance(step.error.p50)),
        *several(("held out", "p90"), lambda step: _upper(step.held_out), (0, 2), shown=held_out),
        Column("calibrated", lambda step: _distance(step.worked_on), worked_on),
        Column(measured, score, quality is not None),
    ]
    caption = [f"{report.measure} at the output, median over {report.n_chosen_on} samples that the choice was made on"]
    if quality:
        original = _score(quality, quality.scores["original"].value)
        caption.append(f"{quality.name} of the original: {original}, {quality.over}")
    return table_of(shown, columns, caption=caption, about="swap")
