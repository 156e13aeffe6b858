"""Write docs/glossary.md from the table of definitions: ``python scripts/make_glossary.py``."""

from pathlib import Path

from normscope.show.tables.glossary import COMMON, DEFINITIONS, TERMS

PAGE = Path(__file__).parents[1] / "docs" / "glossary.md"
INTRODUCTION = """\
# Glossary

Terms, and the columns of all tables. Capital letters in a heading stand for a name or a number.
"""
BELOW = {COMMON: "", "report": "Columns of the HTML file that are in no table above."}


def glossary() -> str:
    """Return the page's text."""
    parts = [INTRODUCTION]
    for table, entries in DEFINITIONS.items():
        title = table if table in (TERMS, COMMON) else f"`{table}`"
        note = BELOW.get(table, "")
        head = f"| {'term' if table == TERMS else 'heading'} | definition |\n|---|---|"
        rows = [f"| {_cell(name)} | {_cell(definition)} |" for name, definition in entries.items()]
        parts.append("\n".join([f"## {title}", "", *([note, ""] if note else []), head, *rows]) + "\n")
    return "\n".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("*", r"\*")


if __name__ == "__main__":
    PAGE.write_text(glossary(), encoding="utf-8")
    print(PAGE.relative_to(PAGE.parents[1]))
