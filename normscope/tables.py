"""Tables of any record: ``normscope.table``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from normscope.errors import UsageError
from normscope.fits.card import NormCard
from normscope.fits.comparison import Compared
from normscope.fits.curve_fit import CurveFit
from normscope.fits.gradient import GradientView
from normscope.fits.saturation import Saturation
from normscope.fits.scale import TokenSlopes
from normscope.pairs.captures import Capture
from normscope.show.tables.card import card_tables, saturation_table
from normscope.show.tables.catalogs import layers_table
from normscope.show.tables.drift import drift_tables, keep_table
from normscope.show.tables.fit import channels_table, comparison_table, fits_table, slopes_table
from normscope.show.tables.gradient import gradient_tables
from normscope.show.tables.markup import Tables
from normscope.show.tables.table import TextTable
from normscope.swaps.drift.reports import DriftReport, KeepReport
from normscope.tools.bench.reports import BenchReport
from normscope.tools.bench.table import speed_tables
from normscope.tools.check.reports import CheckReport, check_tables
from normscope.tools.heal.reports import HealReport
from normscope.tools.heal.table import healing_tables
from normscope.tools.probe.table import timeline_tables
from normscope.tools.probe.timeline import Timeline
from normscope.tools.simplify.reports import SimplifyReport, simplify_table

_TABLES: dict[type, Callable[[Sequence[Any]], Iterable[TextTable]]] = {
    Capture: lambda captures: [layers_table(capture.sites) for capture in captures],
    CurveFit: lambda fits: [fits_table(fits) if fits[0].channel is None else channels_table(fits)],
    NormCard: card_tables,
    Saturation: lambda functions: [saturation_table(functions)],
    GradientView: gradient_tables,
    TokenSlopes: lambda slopes: [slopes_table(slopes)],
    Compared: lambda rows: [comparison_table(rows)],
    Timeline: lambda timelines: itertools.chain.from_iterable(map(timeline_tables, timelines)),
    DriftReport: drift_tables,
    BenchReport: lambda reports: itertools.chain.from_iterable(map(speed_tables, reports)),
    KeepReport: lambda reports: map(keep_table, reports),
    CheckReport: lambda reports: itertools.chain.from_iterable(map(check_tables, reports)),
    SimplifyReport: lambda reports: map(simplify_table, reports),
    HealReport: lambda reports: itertools.chain.from_iterable(map(healing_tables, reports)),
}


def table(records: Any) -> Tables:
    """Return the tables that the command line prints, of a capture, of a record, or of a list of records of one kind.

    Raises:
        UsageError: if there are none, or they are of no kind that has tables.

    >>> import normscope
    >>> seen = normscope.capture(normscope.load("demo_vit", limit=2), layers="norm")
    >>> print(table(seen))
        site  kind       shape  axis    eps  affine  placement  calls
    16  norm  LayerNorm  64     -1    1e-06  yes     final          1
    """
    rows = list(records) if isinstance(records, (list, tuple)) else [records]
    if not rows:
        raise UsageError("There is no record to make a table of.")
    for kind, tables in _TABLES.items():
        if isinstance(rows[0], kind):
            return Tables(tables(rows))
    kinds = ", ".join(kind.__name__ for kind in _TABLES)
    raise UsageError(f"There is no table of a {type(rows[0]).__name__}; of {kinds}.")
