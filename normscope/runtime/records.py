"""Records as JSON, and checked values back from JSON documents: one way for all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar


class Record:
    """A dataclass that JSON holds: its fields by their names, then the properties that ``_properties`` names."""

    _properties: ClassVar[tuple[str, ...]] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON holds; a number that is not finite is None."""
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]
        return {name: as_json(getattr(self, name)) for name in (*names, *self._properties)}


def as_json(value: Any) -> Any:
    """Nested records, mappings and sequences as dicts and lists; a number that is not finite as None.

    >>> as_json({"shape": (2, 3), "r2": float("nan")})
    {'shape': [2, 3], 'r2': None}
    """
    if is_dataclass(value):
        if isinstance(value, Record):
            return value.as_dict()
        return {field.name: as_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {name: as_json(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def checked(document: Mapping[str, Any], holds: Mapping[str, Callable[[Any], bool]], what: str) -> dict[str, Any]:
    """Return the values of a document by the names in ``holds``; ValueError where one is missing or wrong.

    >>> checked({"eps": 1e-5, "more": 1}, {"eps": is_bool}, "site")
    Traceback (most recent call last):
    ValueError: the eps of a site is 1e-05
    """
    for name, right in holds.items():
        if name not in document:
            raise ValueError(f"the {name} of a {what} is missing")
        if not right(document[name]):
            raise ValueError(f"the {name} of a {what} is {document[name]!r:.60}")
    return {name: document[name] for name in holds}


def is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def is_int(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**63  # a bool is an int to isinstance


def is_count(value: Any) -> bool:
    return is_int(value) and value >= 0


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_shape(value: Any) -> bool:
    positive = isinstance(value, tuple) and value != () and all(is_int(size) and size > 0 for size in value)
    return positive and math.prod(value) < 2**63
