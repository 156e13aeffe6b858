"""Reports: how far a swap moved the outputs, how fast it is, and how far healing brought it back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from normscope.errors import UsageError

OUTPUT, END = "output", "end of trajectory"
Swapped = Literal["all", "one", "cumulative"]


@dataclass(frozen=True)
class Quantiles:
    """How values are distributed over inputs.

    Between two of them a quantile is interpolated, as numpy does by default; it is infinite where either is.

    Attributes:
        min: the smallest.
        p10: quantile 0.1.
        p50: the median.
        p90: quantile 0.9.
        max: the largest.
        n: number of values; of none, all of these are NaN.
    """

    min: float
    p10: float
    p50: float
    p90: float
    max: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles:
        """Take the quantiles of some values, among which may be infinite ones.

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
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    if math.isinf(low) or math.isinf(high):
        return low if low == high or math.isinf(low) else high
    return low + (high - low) * (place - math.floor(place))


@dataclass(frozen=True)
class Drift:
    """How far one place of a network moved when something else took the place of some of its norms.

    An input whose swapped values are not finite counts as the worst in the order of the quantiles: infinitely far,
    with a cosine of −∞. No mean is taken over inputs.

    Attributes:
        func: what took the norms' place.
        init: with which start values; empty where there are none, as of an RMSNorm.
        swapped: ``all`` the sites; ``one`` alone; or ``cumulative``: those up to this one, the least harmful first.
        site: the one, or the one added last; None for all.
        sites_swapped: number of sites swapped.
        at: where it was measured: ``output``, a site's path, or ``end of trajectory``.
        part: the part of the data, ``timestep 980`` for example; empty for all of it.
        inputs: number of inputs that were compared, those among them that are not finite included.
        nonfinite: how many of them gave a NaN or an infinity once the norms were swapped.
        left_out: number of further inputs at which the original itself is not finite, or zero throughout.
        relative_l2: ‖swapped − original‖ / ‖original‖ over all that belongs to an input.
        cosine: of the angle between the two.
        kl: KL(original ‖ swapped) of the softmaxes, in nats; of tokens, an input's mean over its positions. None for
            what is no logits.
        top1: share of the answers (inputs; of tokens, positions) where the largest logit is the same.
        top5: share of the answers where the original's largest is among the swapped's five largest, as top-5 accuracy
            counts it, with the original for the truth; None of five classes and fewer.
        top5_overlap: share of the original's five largest that are among the swapped's five largest.
        answers: number of answers that these are shares of; one that is not finite agrees in nothing.
        frames: relative L2 of single frames, over the frames of all inputs; where all sites are swapped, at the output.
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

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON takes it: what is no finite number is None."""
        return {name: _finite(value) for name, value in asdict(self).items()}


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(own) for name, own in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class DriftReport:
    """What one swap did to a network's outputs.

    Attributes:
        func: what took the norms' place.
        init: with which start values; empty where there are none, as of an RMSNorm.
        sites: paths of the swapped sites, in the network's order.
        rows: everything that was measured.
        about: ``model``, ``weights`` and ``data`` in words, as far as they were told.
    """

    func: str
    init: str
    sites: Sequence[str]
    rows: Sequence[Drift]
    about: Mapping[str, str] = field(default_factory=dict)

    @property
    def all(self) -> Drift:
        """The output with all sites swapped."""
        return next(row for row in self.rows if row.swapped == "all" and row.at == OUTPUT and not row.part)

    @property
    def by_part(self) -> list[Drift]:
        """The output with all sites swapped, for each part of the data, in the order in which they came."""
        return [row for row in self.rows if row.swapped == "all" and row.at == OUTPUT and row.part]

    @property
    def end(self) -> Drift | None:
        """The ends of trajectories with all sites swapped; None where none were run."""
        return next((row for row in self.rows if row.at == END), None)

    @property
    def at_sites(self) -> list[Drift]:
        """The output of each site with all sites swapped, in the network's order."""
        return [row for row in self.rows if row.swapped == "all" and row.at in self.sites]

    @property
    def by_site(self) -> list[Drift]:
        """The network's output with each site swapped alone, in the network's order; empty if it was not asked for."""
        return [row for row in self.rows if row.swapped == "one"]

    @property
    def cumulative(self) -> list[Drift]:
        """The network's output with one site, two sites, … swapped; empty if it was not asked for."""
        return [row for row in self.rows if row.swapped == "cumulative"]

    def least_harmful(self, number: int) -> list[str]:
        """Return the paths of those sites that move the output least when each is swapped alone, the least first.

        By the median over inputs, a median that is not finite last; of equals, the first in the network.

        Raises:
            UsageError: if there are not so many sites, or if no site was swapped alone.
        """
        if not self.by_site:
            raise UsageError("Which sites are least harmful is known once each was swapped alone: one_at_a_time=True.")
        if not 1 <= number <= len(self.sites):
            raise UsageError(f"{number} sites were asked for; there are {len(self.sites)}, and at least one is taken.")
        medians = {row.site: row.relative_l2.p50 for row in self.by_site}
        known = {path: math.inf if math.isnan(medians[path]) else medians[path] for path in self.sites}
        return sorted(self.sites, key=known.__getitem__)[:number]

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        return {
            **self.about,
            "func": self.func,
            "init": self.init,
            "sites": list(self.sites),
            "rows": [row.as_dict() for row in self.rows],
        }


START, SITES, BLOCKS, WHOLE = "start", "sites", "blocks", "whole"


@dataclass(frozen=True)
class Point:
    """One interval of a training.

    Attributes:
        stage: ``sites``, ``blocks`` or ``whole``.
        step: steps of the stage by its end; of ``sites`` the number of sites tried.
        loss: mean training loss over its steps; of ``sites``, or where it was not finite, None.
        drift: median relative L2 at the output by its end, on the inputs that decide; None where it was not finite.
        kept: whether the drift fell, so that the steps were kept.
    """

    stage: str
    step: int
    loss: float | None
    drift: float | None
    kept: bool


@dataclass(frozen=True)
class HealReport:
    """What a healing did: relative L2 at the output against the original, in quantiles over samples.

    Attributes:
        drifts: on the held-out inputs, which nothing else has seen: ``p10``, ``median`` and ``p90`` at the ``start``
            and after each stage, ``sites``, ``blocks``, ``whole``; ∞ where outputs were not finite.
        restored: whether the network was left with its start values, as training had not lowered the held-out median.
        points: the course: every interval of steps, and whether it was kept.
        steps: the steps asked for.
        n_learned: samples that were learned from.
        n_judged: samples that decided which steps are kept.
        n_held_out: samples that the drifts are of.
        left_out: samples to learn from that did not fit into memory.
    """

    drifts: Mapping[str, Mapping[str, float]]
    restored: bool
    points: Sequence[Point]
    steps: int
    n_learned: int
    n_judged: int
    n_held_out: int
    left_out: int

    @property
    def before(self) -> Mapping[str, float]:
        """Quantiles of the drift on the held-out inputs with the start values."""
        return self.drifts[START]

    @property
    def after(self) -> Mapping[str, float]:
        """The same, with what the network was left with."""
        return self.before if self.restored else self.drifts[list(self.drifts)[-1]]

    @property
    def closed(self) -> float:
        """Share of the median drift that is gone.

        >>> report = HealReport({"start": {"median": 0.5}, "whole": {"median": 0.1}}, False, [], 1, 1, 1, 1, 0)
        >>> report.closed
        0.8
        """
        return self.closed_after(None)

    def closed_after(self, stage: str | None) -> float:
        """Share of the median drift that was gone after a stage; None for what the network was left with."""
        left = (self.after if stage is None else self.drifts[stage])["median"]
        start = self.before["median"]
        if not math.isfinite(start):
            return 1.0 if math.isfinite(left) else 0.0
        return 1 - left / start if start else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON takes it; a drift that was not finite is None."""

        def finite(quantiles: Mapping[str, float]) -> dict[str, float | None]:
            return {name: value if math.isfinite(value) else None for name, value in quantiles.items()}

        closed = self.closed
        return {
            "before": finite(self.before),
            "after": finite(self.after),
            "closed": closed if math.isfinite(closed) else None,
            "restored": self.restored,
            "stages": {stage: finite(own) for stage, own in self.drifts.items() if stage != START},
            "steps": self.steps,
            "n_learned": self.n_learned,
            "n_judged": self.n_judged,
            "n_held_out": self.n_held_out,
            "left_out": self.left_out,
            "points": [asdict(point) for point in self.points],
        }


Way = Literal["eager", "compile", "fused", "compile + fused"]
Scope = Literal["norm", "model"]
Passes = Literal["forward", "forward + backward"]
BESIDE: dict[Way, Way] = {"fused": "eager", "compile + fused": "compile"}  # the native norm has no kernel of ours
FUSED = tuple(BESIDE)
PASSES: tuple[Passes, ...] = ("forward", "forward + backward")
Norms = Literal["eager", "compile", "fused"]
NATIVE, COPY = "native", "copy"
FASTER, SLOWER, ALIKE = "faster", "slower", "alike"
TOO_FEW, NOT_RUN = "too few passes to tell", "not run"
SOURCE = "arXiv 2503.10622, one H100"


@dataclass(frozen=True)
class Case:
    """What is timed.

    Attributes:
        variant: ``native``, ``rmsnorm``, ``identity``, a curve, or ``copy``: a tensor of the norm's size, copied.
        way: ``eager``, plain torch; ``compile``, plain torch by torch.compile; ``fused``, by one kernel made for it, in
            an eager network; ``compile + fused``, by that kernel in a network by torch.compile, to which it is opaque.
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
        minimum: of them.
        median: of them.
        p20: quantile 0.2, or the sample below it.
        p80: quantile 0.8, or the sample above it.
        gb_per_s: ``nbytes`` over the median, in 10⁹ bytes; None for a whole model, and of what took no time.
        share_of_copy: of a same-size copy's GB/s in the same run.
        ratio: of the median to the native norm's of the same way (of ``fused``, to the eager one's; of
            ``compile + fused``, to the compiled one's); above 1 is slower.
        verdict: ``faster`` only where minimum, median and the whole interval from p20 to p80 lie below the native
            norm's, and ``slower`` where all of them lie above; ``too few passes to tell`` where they do, of fewer than
            three samples of either; ``alike`` where they do not; ``not run``; or nothing, of the native norm and the
            copy themselves.
        compile_seconds: of the first call of what is compiled, the first of all with the start of the compiler; less
            where torch's cache on disk has it. In no sample.
        note: what else is to be known: why it did not run, which sites were left as they are.
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

    def as_dict(self) -> dict[str, Any]:
        """Return a row of JSON, its samples as a list."""
        return {**dataclasses.asdict(self), "shape": list(self.shape), "samples": list(self.samples)}


@dataclass(frozen=True)
class BenchReport:
    """How fast a network is with each point-wise function in the place of its norms.

    Attributes:
        about: model, weights and data, as of :attr:`normscope.inputs.loaded_model.LoadedModel.about`.
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
class Latency:
    """One cell pair of the table: seconds of all passes together.

    Attributes:
        variant: ``native`` (an RMSNorm), or a curve.
        norms: whether they run ``eager``, each by torch.compile, or ``fused``, by normscope's kernels; the rest is
            eager.
        passes: ``forward``, or ``forward + backward``, which the paper calls training.
        layer: seconds that the network's norms take by themselves.
        model: seconds that the whole network takes.
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
class PublishedReport:
    """Ours beside what was published, never one for the other.

    Attributes:
        device: what ours ran on.
        rows: ours.
        published: theirs.
        source: of theirs.
        tokens: of the one sequence.
        n_passes: that each number of ours is of.
        notes: what differs from the paper's, and what was not run.
    """

    device: str
    rows: tuple[Latency, ...]
    tokens: int
    n_passes: int
    notes: tuple[str, ...] = ()
    published: tuple[Latency, ...] = PUBLISHED
    source: str = SOURCE

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON holds."""
        return dataclasses.asdict(self)
