"""Results of swaps, from records or a file of ``swap-bench --json``, validated before they are shown."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from normscope.errors import DataError, UsageError
from normscope.runtime.records import checked, is_count, is_text
from normscope.swaps.reports import BenchReport, DriftReport

SwapResults: TypeAlias = "DriftReport | BenchReport | Sequence[DriftReport | BenchReport] | Mapping[str, Any]"

_MOST_BYTES = 2**28  # of a file


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value))


def _is_text_or_none(value: Any) -> bool:
    return value is None or is_text(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


_QUANTILES = dict.fromkeys(("p10", "p50", "p90"), _is_number)
_DRIFT: dict[str, Callable[[Any], bool]] = {
    **{"func": is_text, "init": is_text, "sites": _is_list, "rows": _is_list, "no_quality": is_text},
}
_ROW: dict[str, Callable[[Any], bool]] = {
    **{"swapped": is_text, "site": _is_text_or_none, "at": is_text, "part": is_text, "sites_swapped": is_count},
    **{"inputs": is_count, "nonfinite": is_count, "top1": _is_number},
}
_QUALITY: dict[str, Callable[[Any], bool]] = {"name": is_text, "over": is_text}
_TIMING: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("variant", "way", "scope", "passes", "dtype", "verdict", "note"), is_text),
    **dict.fromkeys(("minimum", "median", "p20", "p80", "gb_per_s", "share_of_copy", "ratio"), _is_number),
    "shape": _is_list,
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
    held = checked(_mapping(report, "drift"), _DRIFT, "drift")
    if not all(map(is_text, held["sites"])):
        raise ValueError("the sites of a drift are no names")
    quality = report.get("quality")
    return {
        **held,
        "about": _about(report),
        "rows": [_row(row) for row in held["rows"]],
        "quality": None if quality is None else _quality(quality),
    }


def _row(row: Any) -> dict[str, Any]:
    held = checked(_mapping(row, "row of a drift"), _ROW, "row of a drift")
    spread = {
        name: checked(_mapping(row.get(name), f"{name} of a row"), _QUANTILES, name)
        for name in ("relative_l2", "cosine")
    }
    return held | spread


def _quality(quality: Any) -> dict[str, Any]:
    held = checked(_mapping(quality, "quality"), _QUALITY, "quality")
    scores = {}
    for network, score in _mapping(quality.get("scores"), "scores of a quality").items():
        value = checked(_mapping(score, "score"), {"value": _is_number}, "score")["value"]
        interval = score.get("interval")
        if interval is not None and not (_is_list(interval) and len(interval) == 2 and all(map(_is_number, interval))):
            raise ValueError(f"the interval of a score is {interval!r:.60}")
        scores[str(network)] = {"value": value, "interval": interval}
    return held | {"scores": scores, "higher_is_better": quality.get("higher_is_better") is not False}


def _speed(report: Any) -> dict[str, Any]:
    held = checked(_mapping(report, "speed"), {"device": is_text, "rows": _is_list, "left_out": _is_list}, "speed")
    rows = [checked(_mapping(row, "timing"), _TIMING, "timing") for row in held["rows"]]
    left_out = [line for line in held["left_out"] if is_text(line)]
    return {**held, "left_out": left_out, "rows": rows, "about": _about(report.get("about", {}))}


def _about(document: Any) -> dict[str, str]:
    words = _mapping(document, "about")
    return {name: str(words[name]) for name in _ABOUT if name in words}


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"a {what} is {value!r:.60}")
    return value
