"""What a terminal shows in the end: medians alone, as narrow as they go. All samples are in the file."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from common import measurements_of, tables_of

_NARROW = 10  # characters, below which a heading is not broken into lines


def tables(parts: Sequence[Mapping[str, Any]]) -> str:
    """Write what parts show: a case as a line, and below it a line for each way; in one where it has one way only.

    >>> entry = {"case": "a case", "way": "a way", "quantity": "time", "unit": "ms", "samples": [3.0, 1.0, 2.0]}
    >>> print(tables([{"measurements": [entry]}]))
                    time, ms
      a case, a way        2
    """
    medians = [replace(one, samples=[statistics.median(one.samples)]) for one in measurements_of({"parts": parts})]
    found = tables_of({"measurements": [asdict(one) for one in medians]})
    return "\n\n".join("\n".join(_lines(headings, rows)) for headings, rows in found)


def _lines(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    by_case: dict[str, list[Sequence[str]]] = {}
    for row in rows:
        by_case.setdefault(row[0], []).append(row)
    single = all(len(own) == 1 for own in by_case.values())
    names = [f"  {f'{row[0]}, ' if single else ''}{row[1]}" for own in by_case.values() for row in own]
    columns = [
        (textwrap.wrap(heading, max(_NARROW, *(len(row[number]) for row in rows)), break_long_words=False), number)
        for number, heading in enumerate(headings[2:], 2)
    ]
    widths = [max(map(len, [*broken, *(row[number] for row in rows)])) for broken, number in columns]
    first, height = max(map(len, names)), max(len(broken) for broken, _ in columns)

    def line(name: str, cells: Sequence[str]) -> str:
        right = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        return " ".join([name.ljust(first), *right]).rstrip()

    for level in range(height):  # headings end on the same line
        yield line("", [([""] * (height - len(broken)) + broken)[level] for broken, _ in columns])
    remaining = iter(names)
    for case, own in by_case.items():
        if not single:
            yield case
        for row in own:
            yield line(next(remaining), row[2:])
