"""Jacobians of norms as tables: shares of their diagonals, and the terms that curves hold constant."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from normscope.show.tables.table import NONE, Column, TextTable, measured, names, number, several, table_of, words

if TYPE_CHECKING:
    from normscope.fits.gradient import Constants, GradientView

_STEADIER = {"scale": "DyT", "others": "DyISRU", None: "alike"}
_NOT_COVERED = "not covered"


def gradient_tables(views: Sequence[GradientView]) -> list[TextTable]:
    """Make the tables of the norms' Jacobians: shares of their diagonals, and constants."""
    return [jacobians_table(views), constants_table(views)]


def jacobians_table(views: Sequence[GradientView]) -> TextTable:
    """Make a table with one line per site: share of the diagonal, and R² of each curve's derivative."""
    curves = list(dict.fromkeys(curve for view in views for curve in view.r2))
    columns: list[Column[GradientView]] = [
        names("site", lambda view: view.site),
        words("norm", lambda view: view.kind, 9),
        Column("d", lambda view: str(view.d), drop=8),
        Column("tokens", lambda view: f"{view.n_tokens} of {view.of_tokens:,}", drop=7),
        Column("share", lambda view: number(view.share, ".4f"), drop=4),
        Column("least", lambda view: number(view.least_share, ".4f"), drop=6),
        Column("in tail", lambda view: number(view.tail_share, ".4f"), drop=5),
        *several(
            ["ceiling", *(f"R² {curve}′" for curve in curves)],
            lambda view: _r2(view, curves),
            (3, 0, *[1] * (len(curves) - 1)),
        ),
    ]
    over = ", ".join(sorted({view.folds for view in views if view.folds}))
    caption = [
        "R²: of ∂y_i/∂x_i over all pairs, by each curve's derivative",
        f"±: half of the 95% interval, a jackknife over folds by {over}" if over else "no folds, and so no intervals",
    ]

    return table_of(
        views,
        columns,
        caption=caption,
        about="gradient",
        remark=lambda view: view.reason and f"{_NOT_COVERED}: {view.site}: {view.reason}",
        named=4,
    )


def _r2(view: GradientView, curves: Sequence[str]) -> list[str]:
    r2 = {"of_x": view.r2_of_x, **{curve: view.r2.get(curve, math.nan) for curve in curves}}
    return [measured(r2[name], view.intervals.get(name), ".4f", half=name != "of_x") for name in r2]


def constants_table(views: Sequence[GradientView]) -> TextTable:
    """Make a table with two lines per site, centre and tail: spread of the terms that DyT and DyISRU hold constant."""

    def steadier(row: tuple[GradientView, str]) -> str:
        constants = row[0].constants[row[1]] if row[1] else None
        if constants is None:
            return ""
        return _STEADIER[constants.steadier] if constants.n_pairs else NONE

    rows = [(view, region) for view in views for region in (("centre", "tail") if view.reason is None else ("",))]
    columns: list[Column[tuple[GradientView, str]]] = [
        names("site", lambda row: row[0].site if row[1] != "tail" else ""),
        Column("pairs", lambda row: f"{row[0].constants[row[1]].n_pairs:,}" if row[1] else "", drop=3),
        words("of", lambda row: row[1] or _NOT_COVERED),
        *several(
            ("1/rstd", "p84/p16", "√C", "p84/p16", "raw √C"),
            lambda row: _spreads(row[0].constants[row[1]]) if row[1] else [""] * 5,
            (0, 0, 0, 0, 2),
        ),
        words("steadier for", steadier, 1),
    ]
    return table_of(rows, columns, about="gradient")


def _spreads(constants: Constants) -> list[str]:
    scale, root_c = constants.scale, constants.others
    values = (scale.p50, scale.ratio, root_c.p50, root_c.ratio, constants.C.ratio**0.5)
    return [number(value, ".4g") for value in values]
