"""Records as JSON, as flat columns and as tables; and from JSON back into dataclasses."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import TYPE_CHECKING, Any, ClassVar, SupportsIndex, TypeVar, get_args, get_type_hints, overload

from normscope.errors import UsageError, unknown

if TYPE_CHECKING:
    import pandas

_INTERVALS = "intervals"
R = TypeVar("R")


class Record:
    """A dataclass as JSON: its fields by their names, then the properties that ``_properties`` names."""

    _properties: ClassVar[tuple[str, ...]] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON object; a number that is not finite is None."""
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]
        return {name: as_json(getattr(self, name)) for name in (*names, *self._properties)}


class Tabled:
    """Record that :func:`normscope.table` shows: in a notebook by itself, in a terminal by ``table()``."""

    table: Callable[[], Any]  # a method that normscope/__init__.py attaches, as tables import records

    def _repr_html_(self) -> str:
        html: str = self.table()._repr_html_()
        return html

    def __repr__(self) -> str:
        about = [getattr(self, name) for name in ("curve", "site", "model") if hasattr(self, name)]
        return " · ".join([type(self).__name__, *map(str, about)])


class Records(list[R], Tabled):
    """Records of one kind: a list that is also indexed by site, or by site and curve.

    >>> from types import SimpleNamespace
    >>> fits = Records(SimpleNamespace(site=site, curve=curve) for site in ("a", "b") for curve in ("tanh", "isru"))
    >>> fits["b", "isru"] is fits[3], len(fits["a"])
    (True, 2)
    """

    @overload
    def __getitem__(self, index: SupportsIndex | tuple[str, str]) -> R: ...
    @overload
    def __getitem__(self, index: slice | str) -> Records[R]: ...
    def __getitem__(self, index: Any) -> Any:
        """Return a record by its number; those of a slice or of a site; or that of a site and a curve.

        Raises:
            UsageError: if there is no such site, or no such curve there.
        """
        if isinstance(index, str):
            return Records(_those(self, "site", index))
        if isinstance(index, tuple):
            site, curve = index
            at_site = _those(self, "site", site)
            aliased = [fit for fit in at_site if curve in getattr(getattr(fit, "function", None), "aliases", ())]
            return (aliased or _those(at_site, "curve", curve))[0]
        return Records(super().__getitem__(index)) if isinstance(index, slice) else super().__getitem__(index)

    def __repr__(self) -> str:
        if not self:
            return "no records"
        counts = {name: len(_values(self, name)) for name in ("site", "curve")}
        over = " × ".join(f"{number} {name}{'s' * (number > 1)}" for name, number in counts.items() if number)
        return f"{len(self)} {type(self[0]).__name__}{'s' * (len(self) > 1)}{over and f': {over}'}"

    def to_pandas(self) -> pandas.DataFrame:
        """Return a DataFrame with the columns of the command's CSV: intervals as ``alpha_low`` and ``alpha_high``.

        Raises:
            UsageError: if pandas is not installed.
        """
        try:
            library = importlib.import_module("pandas")
        except ImportError as error:
            raise UsageError("to_pandas needs pandas. Install it: pip install 'pandas>=2.2'.") from error
        frame: pandas.DataFrame = library.DataFrame([flat(as_json(record)) for record in self])
        return frame


def _values(records: Iterable[Any], name: str) -> list[Any]:
    return list(dict.fromkeys(getattr(record, name) for record in records if hasattr(record, name)))


def _those(records: Iterable[R], name: str, value: str) -> list[R]:
    chosen = [record for record in records if getattr(record, name, None) == value]
    if not chosen:
        raise UsageError(unknown(name, value, [str(choice) for choice in _values(records, name)]))
    return chosen


def as_json(value: Any) -> Any:
    """Nested records, mappings and sequences as dicts and lists; a number that is not finite as None.

    >>> as_json({"shape": (2, 3), "r2": float("nan")})
    {'shape': [2, 3], 'r2': None}
    """
    if hasattr(value, "as_dict"):
        return value.as_dict()
    if is_dataclass(value):
        return {field.name: as_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {name: as_json(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Bring a row's nested values into columns of their own, or into one text.

    A pair of numbers in ``intervals`` becomes two columns, ``alpha_low`` and ``alpha_high``; an entry of any other
    mapping a column ``mapping_entry``; and every list one text, its elements separated by semicolons.

    >>> flat({"site": "norm", "intervals": {"alpha": [0.5, 0.7]}, "normalized_shape": [3, 4]})
    {'site': 'norm', 'alpha_low': 0.5, 'alpha_high': 0.7, 'normalized_shape': '3;4'}
    """
    columns: dict[str, Any] = {}
    for name, value in row.items():
        if name == _INTERVALS:
            for key, interval in (value or {}).items():
                columns[f"{key}_low"], columns[f"{key}_high"] = interval or (None, None)
        elif isinstance(value, Mapping):
            columns |= flat({f"{name}_{entry}": inner for entry, inner in value.items()})
        elif isinstance(value, list | tuple):
            columns[name] = ";".join(
                str(element).lower() if isinstance(element, bool) else str(element) for element in value
            )
        else:
            columns[name] = value
    return columns


def converted(kind: type[R], document: Any, name: str, *, null_is_nan: bool = False) -> R:
    """Convert a JSON object strictly into a dataclass; a missing member takes the field's default.

    With ``null_is_nan``, null stands for NaN where a field is a float, as :func:`as_json` writes it.

    Raises:
        ValueError: if a member is missing or of another type, or a number is not finite or beyond 64 bits.

    >>> from dataclasses import make_dataclass
    >>> Site = make_dataclass("Site", [("shape", tuple[int, ...])])
    >>> converted(Site, {"shape": [2, 3], "more": 1}, "site")
    Site(shape=(2, 3))
    >>> converted(Site, {"shape": [2, True]}, "site")
    Traceback (most recent call last):
    ValueError: the site is malformed: Expected `int`, got `bool` - at `$.shape[1]`
    """
    import msgspec

    for number in _numbers(document):  # msgspec accepts all of Python's
        if not (math.isfinite(number) if isinstance(number, float) else abs(number) < 2**63):
            raise ValueError(f"the {name} contains the number {number!r:.60}")
    if null_is_nan:
        document = _with_nan(kind, document)
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"the {name} is malformed: {error}") from None


def _with_nan(kind: Any, value: Any) -> Any:
    """Replace None by NaN in the fields of a dataclass, and of those that it contains, that are floats."""
    if value is None:
        return math.nan if kind is float else None
    if isinstance(kind, UnionType):
        kind = get_args(kind)[0]
    first, *_, last = get_args(kind) * 2 or (None, None)
    if isinstance(value, Mapping):
        kinds = get_type_hints(kind) if is_dataclass(kind) else dict.fromkeys(value, last)
        return {name: _with_nan(kinds.get(name), entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_with_nan(first, entry) for entry in value]
    return value


def _numbers(document: Any) -> Iterator[int | float]:
    if isinstance(document, Mapping):
        document = list(document.values())
    if isinstance(document, (list, tuple)):
        for entry in document:
            yield from _numbers(entry)
    elif isinstance(document, (int, float)):
        yield document
