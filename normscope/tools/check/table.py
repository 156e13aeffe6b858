"""Answers of a check as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from normscope.show.tables.table import NONE, Column, TextTable, names, rounded, several, table_of, words
from normscope.tools.check.reports import Answer, CheckReport


def check_tables(report: CheckReport, *, sites: bool = False) -> Iterator[TextTable]:
    """Yield a table with one line per question, and with ``sites`` one per question with a line per site."""
    columns: list[Column[Answer]] = [
        words("question", lambda answer: answer.question),
        words("verdict", lambda answer: answer.verdict),
        names("answer", lambda answer: answer.sentence),
    ]
    yield table_of(report.answers, columns)
    if sites:
        yield from (_sites_table(answer) for answer in report.answers if answer.sites)


def _sites_table(answer: Answer) -> TextTable:
    keys = dict.fromkeys(key for row in answer.sites for key in row if key != "site")
    columns: list[Column[Mapping[str, Any]]] = [names("site", lambda row: row["site"])]
    headings = [key.replace("_", " ") for key in keys]
    columns += several(headings, lambda row: [_cell(row.get(key)) for key in keys], range(len(keys)))
    return replace(table_of(answer.sites, columns, about="check"), title=answer.question)


def _cell(value: Any) -> str:
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], (list, tuple)):  # with their numbers
        return ", ".join(f"{of} ({number})" for of, number in value)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_cell, value)) or NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    return NONE if value is None else rounded(value) if isinstance(value, float) else str(value)
