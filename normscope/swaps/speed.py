"""What was timed and what it says: a record a row, with its verdict beside the norm it would replace."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from normscope.swaps.timing import spread

Way = Literal["eager", "compile", "fused"]
Scope = Literal["norm", "model"]
Passes = Literal["forward", "forward + backward"]
WAYS: tuple[Way, ...] = ("eager", "compile", "fused")
PASSES: tuple[Passes, ...] = ("forward", "forward + backward")
NATIVE, COPY = "native", "copy"
FASTER, NO_SPEED_UP, TOO_FEW, NOT_RUN = "faster", "no speed-up", "too few passes to tell", "not run"
# Three samples that all lie below three others are one draw in twenty where nothing differs; two are one in six.
LEAST_SAMPLES = 3
_TENSORS: dict[Passes, int] = {"forward": 2, "forward + backward": 4}


@dataclass(frozen=True)
class Case:
    """What is timed.

    Attributes:
        variant: ``native``, ``rmsnorm``, ``identity``, a curve, or ``copy``: a tensor of the norm's size, copied.
        way: ``eager``; ``compile``, by torch.compile; ``fused``, by one kernel made for it.
        scope: the ``norm`` alone or the whole ``model``.
        passes: ``forward``, without gradients, or ``forward + backward``.
        dtype: ``float32``, ``bfloat16`` or ``float16``.
        timer: ``blocks`` of torch.utils.benchmark; single ``passes``; on CUDA ``do_bench``, or ``graph``: a CUDA
            graph's replay.
        shape: of the norm's input; of a whole model, of the first tensor that goes in.
        sites: how many norms of this class and shape the network has; of a whole model, how many were replaced, and
            of the native one, how many there are.
        nbytes: that the norm cannot but move, see :func:`bytes_moved`; None for a whole model.
    """

    variant: str
    way: Way
    scope: Scope
    passes: Passes
    dtype: str
    timer: str
    shape: tuple[int, ...]
    sites: int
    nbytes: int | None = None


@dataclass(frozen=True)
class Timing(Case):
    """How long it took, and what that says.

    Attributes:
        samples: seconds of one pass, each; none where it did not run.
        median: of them.
        p20: quantile 0.2, or the sample below it.
        p80: quantile 0.8, or the sample above it.
        gb_per_s: ``nbytes`` over the median, in 10⁹ bytes; None for a whole model.
        share_of_copy: of a same-size copy's GB/s in the same run.
        ratio: of the median to the native norm's of the same way (of ``fused``, to the eager one's); above 1 is slower.
        verdict: ``faster`` only where the whole interval from p20 to p80 lies below the native norm's and there are
            three samples of each; ``no speed-up``; ``too few passes to tell``; ``not run``; or nothing, of the native
            norm and the copy themselves.
        compile_seconds: of the first call of what is compiled, the first of all with the start of the compiler; less
            where torch's cache on disk has it. In no sample.
        note: what else is to be known: why it did not run, which sites were left as they are.
    """

    samples: tuple[float, ...] = ()
    median: float | None = None
    p20: float | None = None
    p80: float | None = None
    gb_per_s: float | None = None
    share_of_copy: float | None = None
    ratio: float | None = None
    verdict: str = ""
    compile_seconds: float | None = None
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return a row of JSON, its samples as a list."""
        return {**dataclasses.asdict(self), "shape": list(self.shape), "samples": list(self.samples)}


@dataclass(frozen=True)
class BenchReport:
    """How fast a network is with each point-wise function in the place of its norms.

    Attributes:
        about: model, weights and data, as of :attr:`normscope.models.base.LoadedModel.about`.
        device: what it ran on, in words.
        rows: in the order in which they were asked for.
        left_out: what was not timed and why, a sentence each.
    """

    about: dict[str, str]
    device: str
    rows: tuple[Timing, ...]
    left_out: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON holds."""
        rows = [row.as_dict() for row in self.rows]
        return {**dataclasses.asdict(self), "rows": rows, "left_out": list(self.left_out)}


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
    rate = None if nbytes is None else nbytes / times.median / 1e9
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
    way, *others = _setting(case)
    return "eager" if way == "fused" else way, *others
