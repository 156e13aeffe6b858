"""From samples to what they say: a verdict for each row, beside the norm that it would replace."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from normscope.speeds import ALIKE, BESIDE, COPY, FASTER, NATIVE, NOT_RUN, SLOWER, TOO_FEW, Case, Passes, Timing
from normscope.swaps.timing import Spread, spread

# Three samples that all lie below three others are one draw in twenty where nothing differs; two are one in six.
LEAST_SAMPLES = 3
_TENSORS: dict[Passes, int] = {"forward": 2, "forward + backward": 4}


@dataclass(frozen=True)
class Measured:
    """The samples of a case.

    Attributes:
        case: what was timed.
        samples: in seconds; none where it did not run.
        compile_seconds: as of :class:`Timing`.
        note: as of :class:`Timing`.
    """

    case: Case
    samples: Sequence[float] = field(default=())
    compile_seconds: float | None = None
    note: str = ""


def bytes_moved(passes: Passes, elements: int, itemsize: int) -> int:
    """Return how many bytes a norm alone cannot but move: x and y forward, x, y, dy and dx forward + backward.

    Each is counted once, though a backward pass on its own reads x again: what is shared by all ways to compute it.

    >>> bytes_moved("forward", 1000, 4), bytes_moved("forward + backward", 1000, 2)
    (8000, 8000)
    """
    return _TENSORS[passes] * elements * itemsize


def judged(measured: Sequence[Measured]) -> list[Timing]:
    """Set each row beside the native norm's and the copy's of the same run."""
    plain = {row.case: _timing(row) for row in measured}
    copies = {(case.dtype, case.timer): row.gb_per_s for case, row in plain.items() if case.variant == COPY}
    natives = {_setting(case): row for case, row in plain.items() if case.variant == NATIVE}
    return [_beside(row, natives.get(_reference(case)), copies) for case, row in plain.items()]


def _timing(row: Measured) -> Timing:
    case = {each.name: getattr(row.case, each.name) for each in dataclasses.fields(Case)}
    if not row.samples:
        return Timing(**case, verdict=NOT_RUN, compile_seconds=row.compile_seconds, note=row.note)
    times = spread(row.samples)
    nbytes = row.case.nbytes
    # The identity is an empty CUDA graph, whose replays a clock may not see.
    rate = None if nbytes is None or times.median == 0 else nbytes / times.median / 1e9
    return Timing(
        **case,
        samples=tuple(row.samples),
        minimum=times.minimum,
        median=times.median,
        p20=times.p20,
        p80=times.p80,
        gb_per_s=rate,
        compile_seconds=row.compile_seconds,
        note=row.note,
    )


def _beside(row: Timing, native: Timing | None, copies: dict[tuple[str, str], float | None]) -> Timing:
    median = row.median
    if median is None:
        return row
    rate, copy = row.gb_per_s, copies.get((row.dtype, row.timer))
    if rate is not None and copy is not None:
        row = dataclasses.replace(row, share_of_copy=rate / copy)
    if row.variant in (NATIVE, COPY) or native is None or native.median is None:
        return row
    return dataclasses.replace(row, ratio=median / native.median, verdict=verdict(row.samples, native.samples))


def verdict(samples: Sequence[float], native: Sequence[float]) -> str:
    """Say whether one is faster or slower than the other: only what minimum, median and spread say alike.

    >>> verdict([1.0, 1.1, 1.2], [2.0, 2.1, 2.2]), verdict([1.9, 3.1, 3.2], [2.0, 2.1, 2.2])
    ('faster', 'alike')
    """
    own, other = spread(samples), spread(native)
    if _below(own, other):
        found = FASTER
    elif _below(other, own):
        found = SLOWER
    else:
        return ALIKE
    return found if min(len(samples), len(native)) >= LEAST_SAMPLES else TOO_FEW


def _below(one: Spread, other: Spread) -> bool:
    """Return whether one took less: at its best, and nearly always; the medians lie between p20 and p80."""
    return one.minimum < other.minimum and one.p80 < other.p20


def _setting(case: Case) -> tuple[str, ...]:
    return case.way, case.scope, case.passes, case.dtype, case.timer


def _reference(case: Case) -> tuple[str, ...]:
    _, *others = _setting(case)
    return BESIDE.get(case.way, case.way), *others
