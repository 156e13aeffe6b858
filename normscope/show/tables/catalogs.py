"""Built-in models and curves, and the norm sites of a network, as tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from normscope.show.tables.table import NONE, Column, TextTable, names, several, table_of, words

if TYPE_CHECKING:
    from normscope.curves.known import Curve
    from normscope.norms.sites import NormSite


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
