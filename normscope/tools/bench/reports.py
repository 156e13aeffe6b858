"""Records of speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from normscope.runtime.records import Record, Tabled

Way = Literal["eager", "compile", "fused"]
Scope = Literal["norm", "model"]
Passes = Literal["forward", "forward + backward"]
PASSES: tuple[Passes, ...] = ("forward", "forward + backward")
NATIVE = "native"
FASTER, SLOWER, INCONCLUSIVE, NOT_RUN = "faster", "slower", "inconclusive", "not run"


@dataclass(frozen=True)
class Timing(Record):
    """Times of one case, and the verdict.

    Attributes:
        variant: ``native``, ``rmsnorm``, ``identity``, or a curve.
        way: ``eager``, plain torch; ``compile``, torch.compile; ``fused``, by normscope's kernels in an eager network.
        scope: the ``norm`` alone or the whole ``model``.
        passes: ``forward``, without gradients, or ``forward + backward``.
        dtype: of the network's parameters.
        shape: of the norm's input, or of the model's first tensor.
        sites: number of norms of this class and shape; of a model, number of norms that were replaced, or are native.
        samples: seconds of single passes; none if it did not run.
        median: of the samples.
        p25, p75: their first and third quartile.
        ratio: of the median to that of the native norm, which is eager if the case is fused; above 1 is slower.
        verdict: ``faster`` or ``slower`` if the interquartile ranges of at least three samples do not overlap;
            otherwise ``inconclusive``; ``not run``; or nothing, for the native norm itself.
        note: reason why it did not run, or sites that were left as they are.
    """

    variant: str
    way: Way
    scope: Scope
    passes: Passes
    dtype: str
    shape: tuple[int, ...]
    sites: int
    samples: tuple[float, ...] = ()
    median: float | None = None
    p25: float | None = None
    p75: float | None = None
    ratio: float | None = None
    verdict: str = ""
    note: str = ""


@dataclass(frozen=True, repr=False)
class BenchReport(Tabled, Record):
    """Speed of a network with each point-wise function in the place of its norms.

    Attributes:
        about: model, weights and data.
        device: the device in words.
        rows: timings, in the order in which they were asked for.
        left_out: cases that were not timed, with the reason, a sentence each.
    """

    about: dict[str, str]
    device: str
    rows: tuple[Timing, ...]
    left_out: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"BenchReport {self.about.get('model', '')}: {len(self.rows)} timings on {self.device}"
