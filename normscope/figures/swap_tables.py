"""What was swapped in, as a table for a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from normscope.figures.tables import as_cell, table_by_site, unbroken

_NONE = "–"


def swapped_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One line a site; where each channel has numbers of its own, their medians.

    Args:
        rows: ``site``, ``norm``, ``func``, ``A``, ``alpha``, ``shift``, ``r2`` and ``per_channel`` of each; a number
            that is none is None.
    """
    shifted = any(row["shift"] is not None for row in rows)
    table = table_by_site("norm", "replaced by", "A", "α", *(["s"] if shifted else []), "R²")
    for column in table.columns[1:3]:
        column.justify = "left"
    for row in rows:
        numbers = [_shown(row[name], ".4g") for name in ("A", "alpha", *(["shift"] if shifted else []))]
        names = [as_cell(row[name]) for name in ("site", "norm", "func")]
        table.add_row(*names, *numbers, _shown(row["r2"], ".4f"))
    if any(row["per_channel"] for row in rows):
        table.caption = "A, α, s and R² are medians over the channels"
    return unbroken(table)


def _shown(value: float | None, form: str) -> str:
    return _NONE if value is None or not math.isfinite(value) else format(value, form)
