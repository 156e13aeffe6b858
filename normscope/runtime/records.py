"""Records as JSON: one way for all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any


class Record:
    """A dataclass that tells itself as JSON holds it: its fields by their names."""

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON holds; a number that is not finite is None."""
        return {field.name: as_json(getattr(self, field.name)) for field in fields(self)}  # type: ignore[arg-type]


def as_json(value: Any) -> Any:
    """Return records, mappings and sequences, one in another, as dicts and lists; a number that is none as None.

    >>> as_json({"shape": (2, 3), "r2": float("nan")})
    {'shape': [2, 3], 'r2': None}
    """
    if is_dataclass(value):
        return value.as_dict() if isinstance(value, Record) else Record.as_dict(value)  # type: ignore[arg-type]
    if isinstance(value, Mapping):
        return {name: as_json(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
