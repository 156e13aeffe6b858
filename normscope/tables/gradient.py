"""The gradient view as tables for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from normscope.tables.layout import Explanation
from normscope.tables.table import NONE, Column, as_cell, names, number, several, table_of, with_interval, words

if TYPE_CHECKING:
    from normscope.fits.views.gradient import Constants, GradientView

_STEADIER = {"scale": "DyT", "others": "DyISRU", None: "alike"}
_NOT_COVERED = "not covered"


def gradient_tables(views: Sequence[GradientView]) -> list[Table]:
    """What the diagonals of some norms' Jacobians hold, and what is constant in them."""
    return [jacobians_table(views), constants_table(views)]


def jacobians_table(views: Sequence[GradientView]) -> Table:
    """One line a site: what the diagonal holds, and how well each curve's derivative predicts it."""
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
    n_largest = max((view.n_largest for view in views), default=0)
    caption = [
        Explanation("share: of ‖∂y/∂x‖² that the diagonal holds, mean over the tokens drawn", ("share",)),
        Explanation(f"least: the smallest share, among the {n_largest} tokens of largest |x| too", ("least",), "; "),
        Explanation("in tail: of a row's squares, mean over the 1 % of drawn pairs of largest |x|", ("in tail",), "; "),
        Explanation("R²: of ∂y_i/∂x_i over all pairs, by each curve's derivative", after="; "),
        *_held_out(views),
    ]
    missing = [as_cell(f"{view.site}: {view.reason}") for view in views if view.reason is not None]
    caption += [Explanation(f"{_NOT_COVERED}: {line}", after="\n") for line in missing]
    return _aligned(table_of(views, columns, caption=caption, remark=_remark, named=4))


def _aligned(table: Table) -> Table:
    """Let columns without a number stand at their left."""
    for column in table.columns:
        if column is not table.columns[0]:
            column.justify = "right" if any(letter.isdigit() for letter in "".join(map(str, column.cells))) else "left"
    return table


def _remark(view: GradientView) -> str | None:
    return None if view.reason is None else _NOT_COVERED


def _r2(view: GradientView, curves: Sequence[str]) -> list[str]:
    r2 = {"of_x": view.r2_of_x, **{curve: view.r2.get(curve, math.nan) for curve in curves}}
    return [with_interval(number(r2[name], ".4f"), view.intervals.get(name)) for name in r2]


def _held_out(views: Sequence[GradientView]) -> list[Explanation]:
    over = ", ".join(sorted({view.folds for view in views if view.folds}))
    if not over:
        return [Explanation("no folds, and so no intervals and no ceiling", after="; ")]
    return [
        Explanation("ceiling: by the best held-out function of x that was found", ("ceiling",), "; "),
        Explanation(f"±: half of the 95 % interval, a jackknife over folds by {over}", after="; "),
    ]


def constants_table(views: Sequence[GradientView]) -> Table:
    """Two lines a site, its centre and its tail: how constant what DyT and DyISRU assume constant is."""
    rows = [(view, part) for view in views for part in (("centre", "tail") if view.reason is None else ("",))]
    columns: list[Column[tuple[GradientView, str]]] = [
        names("site", lambda row: row[0].site if row[1] != "tail" else ""),
        Column("pairs", lambda row: f"{row[0].constants[row[1]].n_pairs:,}" if row[1] else "", drop=3),
        words("of", lambda row: row[1] or _NOT_COVERED),
        *several(
            ("1/rstd", "p84/p16", "√C", "p84/p16", "raw √C"),
            lambda row: _spreads(row[0].constants[row[1]]) if row[1] else [""] * 5,
            (0, 0, 0, 0, 2),
        ),
        words("steadier for", lambda row: _steadier(row[0].constants[row[1]]) if row[1] else "", 1),
    ]
    caption = [
        Explanation(
            "1/rstd (σ, or ρ without centring): what DyT holds constant; √C: what DyISRU does, in the same unit; "
            "medians over the pairs of the tokens drawn, and the ratio of the quantiles 0.84 and 0.16, which is 1 "
            "where the assumption is true"
        ),
        Explanation("alike: within 5 %", ("steadier for",), "; "),
        Explanation("raw √C: the ratio for √(x²(d/y² − 1)), with the token's mean in x", ("raw √C",), "; "),
        Explanation("tail: the 1 % of these pairs of largest |x|", after="; "),
    ]
    return _aligned(table_of(rows, columns, caption=caption))


def _spreads(constants: Constants) -> list[str]:
    of_dyt, of_dyisru = constants.scale, constants.others
    values = (of_dyt.p50, of_dyt.ratio, of_dyisru.p50, of_dyisru.ratio, constants.C.ratio**0.5)
    return [number(value, ".4g") for value in values]


def _steadier(constants: Constants) -> str:
    return _STEADIER[constants.steadier] if constants.n_pairs else NONE
