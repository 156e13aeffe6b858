"""Built-in models and curves as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from normscope.show.tables.table import Column, TextTable, names, table_of, words

if TYPE_CHECKING:
    from normscope.curves.known import Curve


def models_table(entries: Sequence[Any]) -> TextTable:
    """Make a table with one line per model; an entry has name, family, description and source."""
    columns: list[Column[Any]] = [
        words("model", lambda entry: entry.name),
        words("family", lambda entry: entry.family, 2),
        names("what it is", lambda entry: entry.description),
        names("weights", lambda entry: entry.source, 1),
    ]
    return table_of(entries, columns)


def curves_table(curves: Sequence[Curve]) -> TextTable:
    """Make a table with one line per curve: its name, its other names, and that of its layer with a shift."""
    from normscope.curves.known import CURVES  # imports torch

    shifted = {
        curve.name: [f"{variant.name} (with s)" for variant in CURVES.values() if variant.shift_of == curve.name]
        for curve in curves
    }
    columns: list[Column[Curve]] = [
        names("curve", lambda curve: ", ".join((curve.name, *curve.aliases, *shifted[curve.name]))),
        names("f(u), u = αx + s", lambda curve: curve.formula),
        names("from", lambda curve: curve.source),
    ]
    return table_of(curves, columns)
