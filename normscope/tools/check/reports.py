"""Answers of a check of a network's norms, and their tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from normscope.runtime.records import Record
from normscope.show.tables.table import NONE, Column, TextTable, names, rounded, several, table_of, words
from normscope.swaps.reports import AboutNetwork

Verdict = Literal["ok", "note", "problem", "omitted"]


@dataclass(frozen=True)
class Answer(Record):
    """One question about a network's norms, answered.

    Attributes:
        question: its name, such as ``float16``.
        verdict: ``ok``, ``note`` for what an engineer should know, ``problem`` for what fails, or ``omitted``.
        sentence: the answer, with the worst site and its value; of an omitted question, the reason.
        site: name of the worst site; None if no site stands out.
        sites: the numbers behind the answer, a row per site that the question is about; each begins with ``site``.
    """

    question: str
    verdict: Verdict
    sentence: str
    site: str | None = None
    sites: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, repr=False)
class CheckReport(AboutNetwork):
    """Answers to all questions of :func:`normscope.check`, in their order.

    Attributes:
        answers: one per question.
        about: ``model``, ``weights`` and ``data`` in words.
    """

    answers: Sequence[Answer]
    about: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        problems = [answer.question for answer in self.answers if answer.verdict == "problem"]
        return f"CheckReport {self.about.get('model', '')}: {', '.join(problems) or 'no problem'}"

    def __getitem__(self, question: str) -> Answer:
        """Return the answer to a question by its name; KeyError if there is none."""
        return {answer.question: answer for answer in self.answers}[question]


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
