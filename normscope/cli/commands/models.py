"""``normscope models``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

import normscope
from normscope.cli.output import Output
from normscope.runtime.processes import Place
from normscope.tables.table import models_table

EXAMPLES = "Example: normscope models --json"


def models(as_json: bool = False, as_csv: bool = False, output: Path | None = None, quiet: bool = False) -> None:
    """List the models that can be named."""
    if not Place.from_environment().speaks:
        raise typer.Exit
    say = Output(as_json, quiet, output, as_csv=as_csv)
    entries = normscope.list_models()
    say.result(models_table(entries))
    rows = [asdict(entry) | {"embedded": entry.embedded} for entry in entries]
    say.document({"models": rows}, rows)
