"""Records that reports of swaps share: quantiles, drift, quality; and the records of speed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from normscope.runtime.records import Record, Tabled

OUTPUT, END = "output", "end of trajectory"
Swapped = Literal["all", "one", "cumulative"]


class AboutNetwork(Tabled, Record):
    """Report whose JSON has model, weights and data at its top level."""

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON, with the description of the network at its top level."""
        document = super().as_dict()
        return {**document.pop("about"), **document}


@dataclass(frozen=True)
class Quantiles:
    """Distribution of n values over inputs: extremes, the 10th and 90th percentile, and the median.

    Quantiles are interpolated as numpy does by default, but infinite where a neighbour is; of no values they are NaN.
    """

    min: float
    p10: float
    p50: float
    p90: float
    max: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles:
        """Compute the quantiles of values, some of which may be infinite.

        >>> Quantiles.of([3.0, 1.0, 2.0]).p50, Quantiles.of([1.0, 2.0, math.inf]).p90
        (2.0, inf)
        """
        ordered = sorted(values)
        smallest, p10, p50, p90, largest = (_quantile(ordered, share) for share in (0.0, 0.1, 0.5, 0.9, 1.0))
        return cls(smallest, p10, p50, p90, largest, len(ordered))


def _quantile(ordered: Sequence[float], share: float) -> float:
    if not ordered:
        return math.nan
    place = (len(ordered) - 1) * share
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]  # between which numpy has NaN where one is ∞
    if math.isinf(low) or math.isinf(high):
        return low if low == high or math.isinf(low) else high
    return low + (high - low) * (place - math.floor(place))


@dataclass(frozen=True)
class Drift(Record):
    """Distance of a network from the original at one place, with some of its norms replaced.

    An input whose swapped values are not finite counts as infinitely far in the quantiles, with a cosine of −∞.

    Attributes:
        func: curve in the norms' place.
        init: start values; empty if there are none, as for an RMSNorm.
        swapped: ``all`` sites; ``one`` alone; or ``cumulative``: those up to this one, the least harmful first.
        site: the one, or the one added last; None for all.
        sites_swapped: number of sites swapped.
        at: place of the measurement: ``output``, a site's path, or ``end of trajectory``.
        part: part of the data, such as ``timestep 980``; empty for all of it.
        inputs: number of inputs that were compared, non-finite ones included.
        nonfinite: number of inputs with a NaN or an infinity once the norms were swapped.
        left_out: number of further inputs at which the original itself is not finite, or zero throughout.
        relative_l2: ‖swapped − original‖ / ‖original‖ over all values of an input.
        cosine: of the angle between the two.
        kl: KL(original ‖ swapped) of the softmaxes in nats, for tokens an input's mean over its positions. This and the
            following are None if the output is no logits.
        top1: share of the answers (inputs; for tokens, positions) with the same largest logit.
        top5: share of the answers where the original's largest is among the swapped's five largest; None for five
            classes and fewer.
        top5_overlap: share of the original's five largest among the swapped's five largest.
        answers: number of answers; one that is not finite agrees in nothing.
        frames: relative L2 of single frames of all inputs, at the output with all sites swapped.
    """

    func: str
    init: str
    swapped: Swapped
    site: str | None
    sites_swapped: int
    at: str
    part: str
    inputs: int
    nonfinite: int
    left_out: int
    relative_l2: Quantiles
    cosine: Quantiles
    kl: Quantiles | None = None
    top1: float | None = None
    top5: float | None = None
    top5_overlap: float | None = None
    answers: int | None = None
    frames: Quantiles | None = None

    @property
    def error(self) -> Quantiles:
        """The error that decides: KL divergence of logits, relative L2 of other outputs."""
        return self.relative_l2 if self.kl is None else self.kl


@dataclass(frozen=True)
class Score(Record):
    """Quality of one network at its task, with the 95 % Wilson interval of a share of independent inputs."""

    value: float
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Quality(Record):
    """Quality of a network at its task, with its norms and with replacements.

    Attributes:
        name: the measure: ``top-1 accuracy``, ``perplexity``, …, or the name of the user's function.
        higher_is_better: None if only the user knows, as for n.
        n: number of images, words, tokens or pairs.
        over: the same in words.
        scores: by network: ``original``, ``swapped``, and after healing ``healed``.
    """

    name: str
    higher_is_better: bool | None
    n: int | None
    over: str
    scores: Mapping[str, Score]


Way = Literal["eager", "compile", "fused", "compile + fused"]
Scope = Literal["norm", "model"]
Passes = Literal["forward", "forward + backward"]
BESIDE: dict[Way, Way] = {"fused": "eager", "compile + fused": "compile"}  # the native norm has no kernel of ours
FUSED = tuple(BESIDE)
PASSES: tuple[Passes, ...] = ("forward", "forward + backward")
Norms = Literal["eager", "compile", "fused"]
NATIVE, COPY = "native", "copy"
FASTER, SLOWER, INCONCLUSIVE = "faster", "slower", "inconclusive"
TOO_FEW, NOT_RUN = "too few passes to tell", "not run"
SOURCE = "arXiv 2503.10622, one H100"


@dataclass(frozen=True)
class Case(Record):
    """Subject of a timing.

    Attributes:
        variant: ``native``, ``rmsnorm``, ``identity``, a curve, or ``copy``: a tensor of the norm's size, copied.
        way: ``eager``, plain torch; ``compile``, torch.compile; ``fused``, one kernel in an eager network;
            ``compile + fused``, that kernel in a compiled network, to which it is opaque.
        scope: the ``norm`` alone or the whole ``model``.
        passes: ``forward``, without gradients, or ``forward + backward``.
        dtype: ``float32``, ``bfloat16`` or ``float16``.
        timer: ``blocks`` of torch.utils.benchmark; single ``passes``; on CUDA ``do_bench``, or ``graph``: a CUDA
            graph's replay.
        shape: of the norm's input, or of the model's first tensor.
        sites: number of norms of this class and shape; of a model, number of norms that were replaced, or are native.
        nbytes: least traffic of the norm, see :func:`bytes_moved`; None for a whole model.
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
    """Times of one case, and the verdict.

    Attributes:
        samples: seconds of single passes; none if it did not run.
        minimum: of the samples, as the median and the quantiles.
        p20: quantile 0.2, or the sample below it.
        p80: quantile 0.8, or the sample above it.
        gb_per_s: ``nbytes`` over the median, in 10⁹ bytes; None for a whole model.
        share_of_copy: of a same-size copy's GB/s in the same run.
        ratio: of the median to the native norm's, which is compiled if the case is; above 1 is slower.
        verdict: ``faster`` or ``slower`` if minimum, median and the interval from p20 to p80 all are; ``too few passes
            to tell`` if they are, of fewer than three samples; otherwise ``inconclusive``; ``not run``; or nothing, for
            the native norm and the copy themselves.
        compile_seconds: duration of the first call, which no sample contains; less with torch's cache on disk.
        note: reason why it did not run, or sites that were left as they are.
    """

    samples: tuple[float, ...] = ()
    minimum: float | None = None
    median: float | None = None
    p20: float | None = None
    p80: float | None = None
    gb_per_s: float | None = None
    share_of_copy: float | None = None
    ratio: float | None = None
    verdict: str = ""
    compile_seconds: float | None = None
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


@dataclass(frozen=True)
class Latency:
    """One pair of cells of the published table: seconds of all passes together.

    Attributes:
        variant: ``native`` (an RMSNorm), or a curve.
        norms: ``eager``, ``compile``, or ``fused``, by normscope's kernels; the rest of the network is eager.
        passes: ``forward``, or ``forward + backward``, which the paper calls training.
        layer: seconds of the network's norms.
        model: seconds of the whole network.
    """

    variant: str
    norms: Norms
    passes: Passes
    layer: float
    model: float


PUBLISHED = (
    Latency(NATIVE, "eager", PASSES[0], 2.1, 14.1),
    Latency(NATIVE, "eager", PASSES[1], 8.3, 42.6),
    Latency("dyt", "eager", PASSES[0], 1.0, 13.0),
    Latency("dyt", "eager", PASSES[1], 4.8, 39.1),
    Latency(NATIVE, "compile", PASSES[0], 0.3, 12.3),
    Latency(NATIVE, "compile", PASSES[1], 3.9, 38.9),
    Latency("dyt", "compile", PASSES[0], 0.3, 12.3),
    Latency("dyt", "compile", PASSES[1], 3.9, 38.9),
)


@dataclass(frozen=True)
class PublishedReport(Record):
    """Our seconds beside the published ones.

    Attributes:
        device: device of our rows.
        rows: our seconds.
        published: the paper's seconds, from ``source``.
        tokens: length of the one sequence.
        n_passes: number of passes of each of our figures.
        notes: differences from the paper's setup, and cases that were not run.
    """

    device: str
    rows: tuple[Latency, ...]
    tokens: int
    n_passes: int
    notes: tuple[str, ...] = ()
    published: tuple[Latency, ...] = PUBLISHED
    source: str = SOURCE
