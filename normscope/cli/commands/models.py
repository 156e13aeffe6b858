"""``normscope models``."""

from __future__ import annotations

from dataclasses import asdict

import typer

import normscope
from normscope.cli.options import declared
from normscope.cli.output import Output
from normscope.runtime.processes import Place
from normscope.tables.table import models_table

EXAMPLES = "Example: normscope models --json"


@declared()
def models(*, say: Output) -> None:
    """List the models that can be named."""
    if not Place.from_environment().speaks:
        raise typer.Exit
    entries = normscope.list_models()
    say.result(models_table(entries))
    rows = [asdict(entry) | {"embedded": entry.embedded} for entry in entries]
    say.document({"models": rows}, rows)
