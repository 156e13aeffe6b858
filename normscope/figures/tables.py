"""Records as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from normscope.fits.curve_fit import CurveFit
    from normscope.pairs.sites import NormSite


_NARROWEST_NAME = 12


def fits_table(fits: Sequence[CurveFit]) -> Table:
    """One line a site and curve; where the pairs do not bend, A and α give way to the word 'straight'."""
    table = _table()
    table.add_column("site", overflow="fold", min_width=_NARROWEST_NAME)
    table.add_column("func", no_wrap=True)
    for name in ("A", "α", "slope", "R²", "ceiling", "RMSE", "pairs"):
        table.add_column(name, justify="right", no_wrap=True)
    previous = None
    for found in fits:
        site = "" if found.site == previous else escape(found.site)
        table.add_row(site, found.curve, *_numbers(found), f"{found.n_pairs:,}")
        previous = found.site
    folds = {found.folds for found in fits}
    over = ", ".join(sorted(fold for fold in folds if fold))
    table.caption = f"y ≈ A·f(αx); ceiling: cross-validated over folds by {over}" if over else "y ≈ A·f(αx); no folds"
    if any(found.r2_ceiling is not None and found.r2 > found.r2_ceiling for found in fits):
        table.caption += "; one below R²: too little data to tell"
    return table


def layers_table(sites: Sequence[NormSite]) -> Table:
    """One line a norm site."""
    table = _table()
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("site", overflow="fold", min_width=_NARROWEST_NAME)
    for name in ("kind", "shape", "axis", "eps", "affine", "placement", "calls"):
        table.add_column(name, justify="right" if name in ("eps", "calls") else "left", no_wrap=True)
    for site in sites:
        table.add_row(
            str(site.index),
            escape(site.name),
            escape(site.kind),
            "×".join(map(str, site.normalized_shape)),
            str(site.channel_axis),
            f"{site.eps:g}",
            "yes" if site.affine else "no",
            site.placement or "–",
            str(site.calls),
        )
    return table


def models_table(entries: Sequence[Any]) -> Table:
    """One line a model; an entry has name, family, description and source."""
    table = _table()
    for name in ("model", "family"):
        table.add_column(name, no_wrap=True)
    for name in ("what it is", "weights"):
        table.add_column(name, overflow="fold", min_width=_NARROWEST_NAME)
    for entry in entries:
        table.add_row(*(escape(text) for text in (entry.name, entry.family, entry.description, entry.source)))
    return table


def _table() -> Table:
    return Table(box=None, pad_edge=False, caption_justify="left")


def _numbers(found: CurveFit) -> list[str]:
    if found.degenerate:
        return ["nothing to fit", "", "", "", "", ""]
    shape = ["straight", ""] if found.straight else [f"{found.amplitude:.4g}", f"{found.alpha:.4g}"]
    if not found.converged:
        shape = ["not converged", ""]
    top = "–" if found.r2_ceiling is None else f"{found.r2_ceiling:.4f}"
    return [*shape, f"{found.slope:.4g}", f"{found.r2:.4f}", top, f"{found.rmse:.4g}"]
