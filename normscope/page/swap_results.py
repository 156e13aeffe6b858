"""Results of swaps, from records or a file of ``swap-bench --json``, validated before they are shown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from normscope.errors import DataError, UsageError
from normscope.runtime.records import converted
from normscope.swaps.drift.reports import DriftReport
from normscope.swaps.inits import published_name
from normscope.tools.bench.reports import BenchReport

SwapResults: TypeAlias = "DriftReport | BenchReport | Sequence[DriftReport | BenchReport] | Mapping[str, Any]"

_MOST_BYTES = 2**28  # of a file


def swap_results(results: SwapResults | None) -> dict[str, Any]:
    """Return drift and speed of swaps as the page shows them: ``{"drift": […], "speed": […]}``, both empty for None.

    UsageError for other results; DataError for a document that contains neither drift nor speed, or is malformed.
    """
    if results is None:
        return {"drift": [], "speed": []}
    if isinstance(results, Mapping):
        return _checked(results, "the document")
    reports = [results] if isinstance(results, (DriftReport, BenchReport)) else list(results)
    for report in reports:
        if not isinstance(report, (DriftReport, BenchReport)):
            raise UsageError(f"A report shows results of normscope.drift and .bench, not a {type(report).__name__}.")
    drift = [report.as_dict() for report in reports if isinstance(report, DriftReport)]
    speed = [report.as_dict() for report in reports if isinstance(report, BenchReport)]
    return _checked({"drift": drift, "speed": speed}, "the records")


def read_swap_results(path: Path) -> dict[str, Any]:
    """Read a file that ``normscope swap-bench --json`` wrote; DataError if it is none."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise DataError(f"{path} has more than {_MOST_BYTES >> 20} MB: it is no result of swap-bench.")
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no JSON; `normscope swap-bench MODEL --json > {path}` writes it.") from error
    if not isinstance(document, Mapping):
        raise DataError(f"{path} holds a JSON {type(document).__name__}, not the document of `swap-bench --json`.")
    return _checked(document, str(path))


def _checked(document: Mapping[str, Any], where: str) -> dict[str, Any]:
    drift, speed = document.get("drift", []), document.get("speed", [])
    if not isinstance(drift, list) or not isinstance(speed, list) or not (drift or speed):
        raise DataError(f"There is no drift and no speed in {where}; `normscope swap-bench MODEL --json` prints both.")
    try:
        return {"drift": [_drift(report) for report in drift], "speed": [_speed(report) for report in speed]}
    except ValueError as error:
        raise DataError(f"In {where}, {error}.") from error


def _drift(report: Any) -> dict[str, Any]:
    drift = converted(DriftReport, report, "drift", null_is_nan=True).as_dict()
    return drift | {"func": published_name(drift["func"]), "about": _about(report)}


def _speed(report: Any) -> dict[str, Any]:
    speed = converted(BenchReport, report, "speed", null_is_nan=True).as_dict()
    for row in speed["rows"]:
        row |= {"variant": published_name(row["variant"]), "n": len(row.pop("samples"))}
    return speed | {"about": _about(speed["about"])}


def _about(words: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(words[name]) for name in ("model", "weights", "data") if name in words}
