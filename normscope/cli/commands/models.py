"""``normscope models``."""

from __future__ import annotations

from dataclasses import asdict

import normscope
from normscope.cli import options
from normscope.cli.output import Output
from normscope.show.tables.table import models_table


@options.with_groups("normscope models --json", without=("columns",), first_rank_only=True)
def models(*, say: Output) -> None:
    """List the names of models."""
    entries = normscope.list_models()
    say.table(models_table(entries))
    rows = [asdict(entry) | {"embedded": entry.embedded} for entry in entries]
    say.document({"models": rows}, rows)
