"""Definitions of terms and columns: one of each, and a page with all of them."""

import runpy
from pathlib import Path

from normscope.show.tables.glossary import DEFINITIONS

SCRIPT = Path(__file__).parents[3] / "scripts" / "make_glossary.py"


def test_the_page_is_current():
    written = runpy.run_path(str(SCRIPT))
    assert written["PAGE"].read_text(encoding="utf-8") == written["glossary"](), f"run {SCRIPT.name} again"


def test_definitions_are_short_phrases():
    for term, definition in (entry for entries in DEFINITIONS.values() for entry in entries.items()):
        assert 0 < len(definition.split()) <= 22, term
        assert definition == definition.strip().removesuffix(".") != term and ". " not in definition, term
