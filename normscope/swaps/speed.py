"""From samples to what they say: a verdict for each row, beside the norm that it would replace."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from normscope.speeds import BESIDE, COPY, FASTER, NATIVE, NO_SPEED_UP, NOT_RUN, TOO_FEW, Case, Passes, Timing
from normscope.swaps.timing import spread

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
    return dataclasses.replace(row, ratio=median / native.median, verdict=_verdict(row, native))


def _verdict(row: Timing, native: Timing) -> str:
    if row.p80 is None or native.p20 is None or row.p80 >= native.p20:
        return NO_SPEED_UP
    return FASTER if min(len(row.samples), len(native.samples)) >= LEAST_SAMPLES else TOO_FEW


def _setting(case: Case) -> tuple[str, ...]:
    return case.way, case.scope, case.passes, case.dtype, case.timer


def _reference(case: Case) -> tuple[str, ...]:
    _, *others = _setting(case)
    return BESIDE.get(case.way, case.way), *others
