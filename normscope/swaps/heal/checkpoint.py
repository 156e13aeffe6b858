"""The checkpoint that an interrupted healing goes on from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from normscope.errors import DataError, UsageError
from normscope.runtime.sealed_files import read_checked, write_checked
from normscope.swaps.heal.reports import START
from normscope.swaps.heal.training import Course

_FORMAT = "normscope-healing"
_VERSION = 5
_AGAIN = "remove it to begin anew, as `normscope heal --restart` does"
_ASKED = "asked"


def save_checkpoint(path: Path, asked: Mapping[str, Any], settings: Mapping[str, Any], course: Course) -> None:
    """Write the state of a healing, whole or not at all.

    Args:
        path: of the file.
        asked: what :func:`check_asked` compares.
        settings: what is healed, of what and on what; only the same goes on from it.
        course: where it stands.

    Raises:
        UsageError: if it cannot be written there.
    """
    tensors = {name: value.cpu().contiguous() for name, value in course.tensors.items()}
    header = {"format": _FORMAT, "version": _VERSION, _ASKED: dict(asked), "settings": dict(settings)}
    write_checked(path, {**header, "course": course.as_dict()}, tensors)


def check_asked(path: Path, asked: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of a healing with other options, before any work; no file is no checkpoint.

    Args:
        path: of the file.
        asked: what tells one healing from others before a network is loaded: options, by name.

    Raises:
        UsageError: if the checkpoint is of another healing.
        DataError: if the file is damaged, or of another kind or version.
    """
    if not path.exists():
        return
    header, _ = read_checked(path, _FORMAT, (_VERSION,), _AGAIN)
    for name, before, value in _differing(header.get(_ASKED), asked):
        raise _of_another(path, f"its {name} is {before!r:.60}, not {value!r:.60}")


def load_checkpoint(path: Path, settings: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> Course | None:
    """Read where a healing stands; None where there is no file.

    Args:
        path: of the file.
        settings: as for :func:`save_checkpoint`.
        parameters: of the swapped network, which the tensors have to fit.

    Raises:
        UsageError: if the checkpoint is of another healing.
        DataError: if the file is damaged, or of another kind or version.
    """
    if not path.exists():
        return None
    header, tensors = read_checked(path, _FORMAT, (_VERSION,), _AGAIN)
    for name, before, value in _differing(header.get("settings"), settings):
        # A list of all sites, or a hash, would say nothing.
        plain = value is None or isinstance(value, (int, float))
        raise _of_another(path, f"its {name} is {before!r:.60}, not {value}" if plain else f"other {name}")
    try:
        course = Course.of(header["course"], tensors)
        for quantiles in (course.drifts[START], *course.drifts.values()):
            if not all(isinstance(quantiles[name], float) for name in ("p10", "median", "p90")):
                raise TypeError(f"a drift is {quantiles}")
        for full, value in tensors.items():
            _check_fits(full, value, parameters)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"The checkpoint {path} is damaged: {type(error).__name__}: {error}; {_AGAIN}.") from error
    return course


def _check_fits(full: str, value: Tensor, parameters: Mapping[str, nn.Parameter]) -> None:
    group, _, name = full.partition("/")
    like = parameters[name]
    if group != "moment.step" and (value.shape != like.shape or value.dtype != like.dtype):
        raise ValueError(f"{name} is {value.dtype} {tuple(value.shape)}")


def _differing(stored: Any, wanted: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    known = stored if isinstance(stored, dict) else {}
    return ((name, known.get(name), value) for name, value in wanted.items() if known.get(name) != value)


def _of_another(path: Path, what: str) -> UsageError:
    return UsageError(f"{path} is of another healing: {what}; {_AGAIN}, or name another.")
