"""The gradient view as tables for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from normscope.tables.table import NARROWEST_NAME, as_cell, new_table, unbroken, with_interval

if TYPE_CHECKING:
    from normscope.fits.views.gradient import GradientView
    from normscope.fits.views.jacobians import Constants, Spread

_HOLDS = {"scale": "DyT", "others": "DyISRU", None: "alike"}


def jacobians_table(views: Sequence[GradientView]) -> Table:
    """One line a site: what the diagonal holds, and how well each curve's derivative predicts it."""
    curves = list(dict.fromkeys(curve for view in views for curve in view.r2))
    head = ("site", "norm", "d", "tokens", "share", "least", "in tail", "ceiling")
    rows = []
    for view in views:
        drawn = [view.site, view.kind, str(view.d), f"{view.n_tokens} of {view.of_tokens:,}"]
        r2 = {"of_x": view.r2_of_x, **{curve: view.r2.get(curve, math.nan) for curve in curves}}
        numbers = [_number(value, "{:.4f}") for value in (view.share, view.least_share, view.tail_share)]
        numbers += [with_interval(_number(r2[name], "{:.4f}"), view.intervals.get(name)) for name in r2]
        rows.append(drawn + (numbers if view.reason is None else ["not covered"]))
    table = _table([*head, *(f"R² {curve}′" for curve in curves)], rows)
    n_largest = max((view.n_largest for view in views), default=0)
    table.caption = (
        "share: of ‖∂y/∂x‖² that the diagonal holds, mean over the tokens drawn; "
        f"least: the smallest, among the {n_largest} tokens of largest |x| too; "
        "in tail: of a row's squares, mean over the 1 % of drawn pairs of largest |x|; "
        "R²: of ∂y_i/∂x_i over all pairs, by each curve's derivative; "
        f"{_held_out(views)}"
    )
    for view in views:
        if view.reason is not None:
            table.caption += f"\nnot covered: {as_cell(f'{view.site}: {view.reason}')}"
    return table


def _held_out(views: Sequence[GradientView]) -> str:
    over = ", ".join(sorted({view.folds for view in views if view.folds}))
    if not over:
        return "no folds, and so no intervals and no ceiling"
    return (
        "ceiling: by the best held-out function of x that was found; "
        f"±: half of the 95 % interval, a jackknife over folds by {over}"
    )


def constants_table(views: Sequence[GradientView]) -> Table:
    """Two lines a site, its centre and its tail: how constant is what DyT holds so, and what DyISRU does."""
    rows = []
    for view in views:
        if view.reason is not None:
            rows.append([view.site, "", "not covered"])
        for part in ("centre", "tail") if view.reason is None else ():
            found = view.constants[part]
            name = view.site if part == "centre" else ""
            rows.append([name, f"{found.n_pairs:,}", part, *_spreads(found), _holds(found)])
    head = ("site", "pairs", "of", "1/rstd", "p84/p16", "√C", "p84/p16", "raw √C", "steadier for")
    table = _table(head, rows)
    table.caption = (
        "1/rstd (σ, or ρ without centring): what DyT holds constant; √C: what DyISRU does, in the same unit; medians "
        "over the pairs of the tokens drawn, and the ratio of the quantiles 0.84 and 0.16, which is 1 where the "
        "assumption is true; alike: within 5 %; raw √C: the ratio for √(x²(d/y² − 1)), with the token's mean in x; "
        "tail: the 1 % of these pairs of largest |x|"
    )
    return table


def _spreads(found: Constants) -> list[str]:
    def cells(spread: Spread) -> list[str]:
        return [_number(spread.p50, "{:.4g}"), _number(spread.ratio, "{:.4g}")]

    return [*cells(found.scale), *cells(found.others), _number(found.C.ratio**0.5, "{:.4g}")]


def _holds(found: Constants) -> str:
    return _HOLDS[found.steadier] if found.n_pairs else "–"


def _number(value: float, form: str) -> str:
    return form.format(value) if math.isfinite(value) else "–"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A column each; words stand left, as does what has no number in it."""
    table = new_table()
    for place, name in enumerate(head):
        cells = [row[place] for row in rows if place < len(row)]
        left = not any(character.isdigit() for cell in cells for character in cell)
        if place == 0:
            table.add_column(name, overflow="fold", min_width=NARROWEST_NAME)
        else:
            table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(as_cell, row))
    return unbroken(table)
