"""``normscope models``."""

from __future__ import annotations

from dataclasses import asdict

import normscope
from normscope.cli import options
from normscope.cli.output import Output
from normscope.show.tables.catalogs import models_table


@options.with_groups("normscope models --json", without=("columns",), first_rank_only=True)
def models(*, out: Output) -> None:
    """List the names of models."""
    entries = normscope.list_models()
    out.table(models_table(entries))
    rows = [asdict(entry) | {"embedded": entry.embedded} for entry in entries]
    out.document({"models": rows}, rows)
