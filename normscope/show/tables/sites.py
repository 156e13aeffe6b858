"""Norm sites as a table, and the sites of a swap."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from normscope.show.tables.glossary import DEFINITIONS, TERMS
from normscope.show.tables.table import NONE, Column, TextTable, names, number, several, table_of, words
from normscope.swaps.inits import published_name

if TYPE_CHECKING:
    from normscope.norms.sites import NormSite


def layers_table(sites: Sequence[NormSite]) -> TextTable:
    """Make a table with one line per site; point-wise functions have a curve and α, the median over channels."""
    functions = any(site.pointwise for site in sites)
    columns: list[Column[NormSite]] = [
        Column("", lambda site: str(site.index)),
        names("site", lambda site: site.name),
        words("kind", lambda site: site.kind),
        *several(("f", "α"), _function, shown=functions),
        words("shape", lambda site: "×".join(map(str, site.normalized_shape)), 1),
        words("axis", lambda site: str(site.channel_axis), 5),
        Column("eps", lambda site: f"{site.eps:g}", drop=4),
        words("affine", lambda site: "yes" if site.affine else "no", 3),
        words("placement", lambda site: site.placement or NONE, 2),
        Column("calls", lambda site: str(site.calls), drop=6),
    ]
    return table_of(sites, columns)


def _function(site: NormSite) -> list[str]:
    function = site.pointwise
    return [NONE, NONE] if function is None else [function.curve, f"{statistics.median(function.alpha):.4g}"]


def swapped_table(rows: Sequence[Mapping[str, Any]]) -> TextTable:
    """Make a table with one line per swapped site, with medians over the channels of per-channel curves.

    Args:
        rows: ``site``, ``norm``, ``curve``, ``amplitude``, ``alpha``, ``shift``, ``r2``, ``per_channel``, ``straight``
            and ``weights_by`` of each; a missing number is None.
    """
    straight = any(row["straight"] for row in rows)
    columns: list[Column[Mapping[str, Any]]] = [
        names("site", lambda row: row["site"]),
        words("norm", lambda row: row["norm"], 1),
        words("replaced by", lambda row: published_name(row["curve"])),
        Column("A", lambda row: "straight" if row["straight"] else number(row["amplitude"], ".4g")),
        Column("α", lambda row: NONE if row["straight"] else number(row["alpha"], ".4g")),
        Column("A·α", lambda row: number(row["amplitude"] * row["alpha"], ".4g") if row["straight"] else "", straight),
        Column("s", lambda row: number(row["shift"], ".4g"), any(row["shift"] is not None for row in rows)),
        Column("R²", lambda row: number(row["r2"], ".4f")),
    ]
    caption = ["A, α, s and R² are medians over the channels"] if any(row["per_channel"] for row in rows) else []
    if any(row["weights_by"] == "gamma" for row in rows):
        caption.append("pairs weighted by γ², the error that reaches the next layer; `normscope fit` weights all alike")
    if straight:
        caption.append(f"straight: {DEFINITIONS[TERMS]['straight']}")
    return table_of(rows, columns, caption=caption)
