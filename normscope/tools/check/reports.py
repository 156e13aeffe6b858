"""Answers of a check of a network's norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from normscope.runtime.records import Record
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


def percent(share: float) -> str:
    """Return a share in percent with two digits, without a space at which a line could break.

    >>> percent(0.0263), percent(0.996), percent(2.5e-6)
    ('2.6%', '100%', '0.00025%')
    """
    return f"{float(f'{100 * share:.2g}'):g}%"
