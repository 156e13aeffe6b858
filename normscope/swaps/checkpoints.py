"""Trainings as files: what they go on from, safetensors with a JSON header."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from normscope.errors import DataError, UsageError
from normscope.healings import START
from normscope.pairs.checked_files import read_checked, write_checked
from normscope.swaps.course import Course, restore

_FORMAT = "normscope-healing"
_VERSION = 3
_AGAIN = "remove it to begin anew, as `normscope heal --restart` does"
_ASKED = "asked"


def save_checkpoint(
    path: Path,
    asked: Mapping[str, Any],
    settings: Mapping[str, Any],
    course: Course,
    parameters: Mapping[str, nn.Parameter],
) -> None:
    """Write where a training stands, whole or not at all.

    Args:
        path: of the file.
        asked: what :func:`check_asked` compares.
        settings: what was trained, of what and on what; only the same goes on from it.
        course: where it stands.
        parameters: of the network, by name.

    Raises:
        UsageError: if it cannot be written there.
    """
    tensors = {f"parameter/{name}": value.detach().cpu().contiguous().clone() for name, value in parameters.items()}
    for name, own in course.moments.items():
        tensors |= {f"moment/{key}/{name}": value.cpu().contiguous().clone() for key, value in own.items()}
    header = {"format": _FORMAT, "version": _VERSION, _ASKED: dict(asked), "settings": dict(settings)}
    write_checked(path, {**header, "course": course.as_dict()}, tensors)


def check_asked(path: Path, asked: Mapping[str, Any]) -> None:
    """Refuse to go on from what was asked for otherwise, before any work; a file that is not there is none.

    Args:
        path: of the file.
        asked: what tells one healing from others before a network is loaded: options, by name.

    Raises:
        UsageError: if the checkpoint is of another training.
        DataError: if the file is damaged, or of another kind or version.
    """
    if not path.exists():
        return
    header, _ = read_checked(path, _FORMAT, _VERSION, _AGAIN)
    known = header.get(_ASKED)
    for name, value in asked.items():
        before = known.get(name) if isinstance(known, dict) else None
        if before != value:
            raise _of_another(path, f"its {name} is {before!r:.60}, not {value!r:.60}")


def load_checkpoint(path: Path, settings: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> Course | None:
    """Put a network where a training left it, and return the course that goes on; None where there is no file.

    Raises:
        UsageError: if the checkpoint is of another training.
        DataError: if the file is damaged, or of another kind or version.
    """
    if not path.exists():
        return None
    header, tensors = read_checked(path, _FORMAT, _VERSION, _AGAIN)
    check_settings(path, header.get("settings"), settings)
    try:
        course = Course.of(header["course"], _moments(tensors, parameters))
        for own in (course.drifts[START], *course.drifts.values()):
            if not all(isinstance(own[name], float) for name in ("p10", "median", "p90")):
                raise TypeError(f"a drift is {own}")
        values = {name: tensors[f"parameter/{name}"] for name in parameters}
        for name, value in values.items():
            if value.shape != parameters[name].shape or value.dtype != parameters[name].dtype:
                raise ValueError(f"{name} is {value.dtype} {tuple(value.shape)}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"The checkpoint {path} is damaged: {type(error).__name__}: {error}; {_AGAIN}.") from error
    restore(parameters, values)
    return course


def check_settings(path: Path, found: Any, settings: Mapping[str, Any]) -> None:
    """Refuse to go on from what was begun otherwise; UsageError that names the first thing that differs."""
    known = found if isinstance(found, dict) else {}
    for name, value in settings.items():
        if known.get(name) != value:
            # A list of all sites, or a hash, would tell nobody anything.
            told = f"its {name} is {known.get(name)!r:.60}, not {value}" if isinstance(value, int) else f"other {name}"
            raise _of_another(path, told)


def _of_another(path: Path, told: str) -> UsageError:
    return UsageError(f"{path} is of another healing: {told}; {_AGAIN}, or name another.")


def _moments(tensors: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> dict[str, dict[str, Tensor]]:
    moments: dict[str, dict[str, Tensor]] = {}
    for full, value in tensors.items():
        kind, _, rest = full.partition("/")
        if kind == "moment":
            key, _, name = rest.partition("/")
            where = value.device if key == "step" else parameters[name].device
            moments.setdefault(name, {})[key] = value.to(where)
    return moments
