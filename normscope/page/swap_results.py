"""Results of swaps, from records or a file of ``swap-bench --json``, validated before they are shown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from normscope.errors import DataError, UsageError
from normscope.runtime.records import checked
from normscope.swaps.reports import BenchReport, DriftReport

SwapResults: TypeAlias = "DriftReport | BenchReport | Sequence[DriftReport | BenchReport] | Mapping[str, Any]"

_MOST_BYTES = 2**28  # of a file


_NUMBER = float | None
_QUANTILES = dict.fromkeys(("p10", "p50", "p90"), _NUMBER)
_DRIFT = {"func": str, "init": str, "sites": tuple[str, ...], "rows": list, "no_quality": str}
_ROW = {
    **{"swapped": str, "site": str | None, "at": str, "part": str, "sites_swapped": int},
    **{"inputs": int, "nonfinite": int, "top1": _NUMBER},
}
_TIMING = {
    **dict.fromkeys(("variant", "way", "scope", "passes", "dtype", "verdict", "note"), str),
    **dict.fromkeys(("minimum", "median", "p20", "p80", "gb_per_s", "share_of_copy", "ratio"), _NUMBER),
    "shape": list,
}
_ABOUT = ("model", "weights", "data")


def swap_results(results: SwapResults | None) -> dict[str, Any]:
    """Drift and speed of some swaps as the page shows them, ``{"drift": […], "speed": […]}``; empty of None.

    Args:
        results: what :func:`normscope.drift` or :func:`normscope.bench` returned, several of these, or the document
            that ``normscope swap-bench --json`` prints.

    Raises:
        UsageError: if it is something else.
        DataError: if the document holds no drift and no speed, or if something in it is not what it should be.
    """
    if results is None:
        return {"drift": [], "speed": []}
    if isinstance(results, Mapping):
        return _checked(results, "the document")
    reports = [results] if isinstance(results, (DriftReport, BenchReport)) else list(results)
    for report in reports:
        if not isinstance(report, (DriftReport, BenchReport)):
            raise UsageError(
                f"A report shows what normscope.drift and normscope.bench return, not a {type(report).__name__}."
            )
    drift = [report.as_dict() for report in reports if isinstance(report, DriftReport)]
    speed = [report.as_dict() for report in reports if isinstance(report, BenchReport)]
    return _checked({"drift": drift, "speed": speed}, "the records")


def read_swap_results(path: Path) -> dict[str, Any]:
    """Read a file that ``normscope swap-bench --json`` wrote.

    Raises:
        DataError: if it cannot be read, is no JSON, or holds nothing of a swap.
    """
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
    held = checked(report, _DRIFT, "drift")
    quality = report.get("quality")
    return {
        **held,
        "about": _about(report),
        "rows": [_row(row) for row in held["rows"]],
        "quality": None if quality is None else _quality(quality),
    }


def _row(row: Any) -> dict[str, Any]:
    held = checked(row, _ROW, "row of a drift")
    return held | {name: checked(row.get(name), _QUANTILES, f"{name} of a row") for name in ("relative_l2", "cosine")}


def _quality(quality: Any) -> dict[str, Any]:
    held = checked(quality, {"name": str, "over": str}, "quality")
    types = {"value": _NUMBER, "interval": tuple[_NUMBER, _NUMBER] | None}
    scores = {
        str(network): checked({"interval": None, **_mapping(score, "score")}, types, "score")
        for network, score in _mapping(quality.get("scores"), "scores of a quality").items()
    }
    return held | {"scores": scores, "higher_is_better": quality.get("higher_is_better") is not False}


def _speed(report: Any) -> dict[str, Any]:
    held = checked(report, {"device": str, "rows": list, "left_out": list}, "speed")
    rows = [checked(row, _TIMING, "timing") for row in held["rows"]]
    left_out = [line for line in held["left_out"] if isinstance(line, str)]
    return {**held, "left_out": left_out, "rows": rows, "about": _about(report.get("about", {}))}


def _about(document: Any) -> dict[str, str]:
    words = _mapping(document, "about")
    return {name: str(words[name]) for name in _ABOUT if name in words}


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"a {what} is {value!r:.60}")
    return value
