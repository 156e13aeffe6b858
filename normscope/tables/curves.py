"""The known curves as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from normscope.fits.curves.known import Curve
from normscope.tables.table import Column, names, table_of


def curves_table(curves: Sequence[Curve]) -> Table:
    """Name each curve, its other names, its formula and where it is from."""
    columns: list[Column[Curve]] = [
        names("curve", lambda curve: ", ".join((curve.name, *curve.aliases))),
        names("f(u), u = αx + s", lambda curve: curve.formula),
        names("from", lambda curve: curve.source),
    ]
    return table_of(curves, columns)
