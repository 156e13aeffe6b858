"""Records of drift, healing, the choice of norms to keep, exact rewrites, and speed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from normscope.errors import UsageError, count
from normscope.runtime.records import Record, Tabled, as_json

OUTPUT, END = "output", "end of trajectory"
Swapped = Literal["all", "one", "cumulative"]


class _AboutNetwork(Tabled, Record):
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


@dataclass(frozen=True)
class DriftCalibration(Record):
    """Inputs that each row of a drift was calibrated on; it is measured on others.

    Attributes:
        data: the inputs in words, or empty.
        refit: ``neighbours`` or ``norms``, as in :func:`normscope.calibrate`.
        n_learned: number of samples to learn from.
        n_judged: number of samples that decided what was kept.
        left_out: number of samples that did not fit into memory.
        restored: number of rows with their start values, as calibration did not lower the drift where it is decided.
        left: reason why a linear layer was left as it was, by path, with all sites swapped.
    """

    data: str
    refit: str
    n_learned: int = 0
    n_judged: int = 0
    left_out: int = 0
    restored: int = 0
    left: Mapping[str, str] = field(default_factory=dict)

    @property
    def in_words(self) -> str:
        """One line of text.

        >>> DriftCalibration("digits", "norms", 36, 12).in_words
        'by itself, functions alone, on 48 other samples than it is measured on (12 of them decided)'
        """
        alone = ", functions alone" if self.refit == "norms" else ""
        samples = count(self.n_learned + self.n_judged, "other sample")
        return f"by itself{alone}, on {samples} than it is measured on ({self.n_judged} of them decided)"


@dataclass(frozen=True, repr=False)
class DriftReport(_AboutNetwork):
    """Effect of one swap on a network's outputs.

    Attributes:
        func, init: as in each :class:`Drift`.
        sites: paths of the swapped sites, in the network's order.
        rows: all measurements.
        about: ``model``, ``weights`` and ``data`` in words, if known.
        quality: quality at the network's task on the same inputs, with no site swapped and with all; or None.
        no_quality: reason why there is none.
        calibration: inputs that every row was calibrated on, with ``init="calibrated"``.
    """

    func: str
    init: str
    sites: Sequence[str]
    rows: Sequence[Drift]
    about: Mapping[str, str] = field(default_factory=dict)
    quality: Quality | None = None
    no_quality: str = ""
    calibration: DriftCalibration | None = None

    def __repr__(self) -> str:
        how = " ".join(filter(None, ("DriftReport", self.func, self.init)))
        kl = "" if self.all.kl is None else f"KL {self.all.kl.p50:.3g}, "
        return f"{how}: {count(len(self.sites), 'site')} swapped, {kl}relative L2 {self.all.relative_l2.p50:.3g}"

    @property
    def start_in_words(self) -> str:
        """The init, and the number of samples of a calibration."""
        done = self.calibration
        if done is None:
            return self.init
        alone = " (functions alone)" if done.refit == "norms" else ""
        return f"{self.init}{alone} on {count(done.n_learned + done.n_judged, 'other sample')}"

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
        """The network's output with each site swapped alone, in the network's order; may be empty."""
        return [row for row in self.rows if row.swapped == "one"]

    @property
    def cumulative(self) -> list[Drift]:
        """The network's output with one site, two sites, … swapped; may be empty."""
        return [row for row in self.rows if row.swapped == "cumulative"]

    def least_harmful(self, number: int) -> list[str]:
        """Return the paths of the sites with the least median error when each is swapped alone, the least first.

        Raises:
            UsageError: if there are not so many sites, or if no site was swapped alone.
        """
        if not self.by_site:
            raise UsageError("The least harmful sites are known only if each was swapped alone: one_at_a_time=True.")
        if not 1 <= number <= len(self.sites):
            raise UsageError(f"number is {number}; it has to be from 1 to {len(self.sites)}, the number of sites.")
        medians = {row.site: row.error.p50 for row in self.by_site}
        return sorted(self.sites, key=lambda path: (math.isnan(medians[path]), medians[path]))[:number]


START, CALIBRATED, TRAINED = "start", "calibrated", "trained"


@dataclass(frozen=True)
class TrainingCheck:
    """State of a training at one step.

    Attributes:
        step: number of steps done.
        loss: mean training loss since the check before; None if it was not finite.
        drift: median error at the output, on the inputs that decide; None if it was not finite.
        kept: True if this state is the best so far, and its 90th percentile is not above the start's.
    """

    step: int
    loss: float | None
    drift: float | None
    kept: bool


@dataclass(frozen=True, repr=False)
class HealReport(_AboutNetwork):
    """Result of a healing: the error at the output against the original, in quantiles over samples.

    Attributes:
        drifts: ``p10``, ``median`` and ``p90`` on the held-out inputs, at the ``start`` and after each stage,
            ``calibrated`` and ``trained``; ∞ for outputs that were not finite. ``trained`` is the best state of the
            training; if no check was ``kept``, that is the state before the first step.
        left_with: stage that the network is in: the least held-out median whose 90th percentile is not above the
            start's.
        checks: the course of the training.
        steps: number of training steps.
        train: trained weights: ``norms``, ``neighbours`` or ``all``.
        n_learned: number of samples to learn from.
        n_judged: number of samples that decided which state is kept.
        n_held_out: number of held-out samples.
        left_out: number of samples to learn from that did not fit into memory.
        not_refitted: reason why a layer beside a swapped norm was not calibrated, by path.
        quality: quality at the network's task of ``original``, ``swapped`` and ``healed``, on the held-out inputs.
        no_quality: reason why there is none.
        about: model, weights and held-out data; empty for a plain module.
        measure: of all errors: ``KL divergence`` of logits, in nats, or ``relative L2`` of other outputs.
        before_training: median error on the inputs that decide, before the first step; None if it was not finite.
    """

    drifts: Mapping[str, Mapping[str, float]]
    left_with: str
    checks: Sequence[TrainingCheck]
    steps: int
    train: str
    n_learned: int
    n_judged: int
    n_held_out: int
    left_out: int
    not_refitted: Mapping[str, str] = field(default_factory=dict)
    quality: Quality | None = None
    no_quality: str = ""
    about: Mapping[str, str] = field(default_factory=dict)
    measure: str = "relative L2"
    before_training: float | None = None

    _properties: ClassVar[tuple[str, ...]] = ("restored",)

    def __repr__(self) -> str:
        return (
            f"HealReport: {self.measure} {self.before['median']:.3g} → {self.after['median']:.3g} in {self.steps} steps"
        )

    @property
    def restored(self) -> bool:
        """True if the network has its start values, because nothing lowered the held-out median."""
        return self.left_with == START

    @property
    def training_kept(self) -> bool:
        """True if a state of the training was kept; otherwise ``trained`` in the drifts is the state before it."""
        return any(check.kept for check in self.checks)

    @property
    def before(self) -> Mapping[str, float]:
        """Quantiles of the drift on the held-out inputs with the start values."""
        return self.drifts[START]

    @property
    def after(self) -> Mapping[str, float]:
        """Quantiles of the drift on the held-out inputs at the stage that the network was left in."""
        return self.drifts[self.left_with]

    @property
    def closed(self) -> float:
        """Share of the median drift that is gone.

        >>> drifts = {"start": {"median": 0.5}, "trained": {"median": 0.1}}
        >>> HealReport(drifts, "trained", [], 1, "all", 1, 1, 1, 0).closed
        0.8
        """
        return self.closed_after(self.left_with)

    def closed_after(self, stage: str) -> float:
        """Share of the median drift that was gone after a stage."""
        left, start = self.drifts[stage]["median"], self.before["median"]
        if not math.isfinite(start):
            return 1.0 if math.isfinite(left) else 0.0
        return 1 - left / start if start else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON, with the description of the network at its top level."""
        document = super().as_dict()
        about = {name: document.pop(name) for name in self.about}
        stages, checks = document.pop("drifts"), document.pop("checks")
        del stages[START]
        summary = {"before": self.before, "after": self.after, "closed": self.closed}
        return {**about, **as_json(summary), "stages": stages, **document, "checks": checks}


@dataclass(frozen=True)
class KeepStep(Record):
    """Error of the network with one norm more restored.

    Attributes:
        site: path of the norm restored in this step; None for the first, with all sites swapped.
        kept: number of norms restored.
        swapped: number of sites that are swapped.
        error: at the output, over the inputs for the choice.
        held_out: error over held-out inputs; None without any, and for steps that were not taken.
        worked_on: median error that ``after`` returned, for example after a calibration; or None.
    """

    site: str | None
    kept: int
    swapped: int
    error: Quantiles
    held_out: Quantiles | None = None
    worked_on: float | None = None


@dataclass(frozen=True, repr=False)
class KeepReport(_AboutNetwork):
    """Norms of a network to keep, and the error with each number of them kept.

    Attributes:
        sites: paths of all sites, in the network's order.
        kept: paths of the norms to keep, the most valuable first.
        steps: one for each number of norms kept, beginning with none; the last ones may not have been taken.
        n_chosen_on: number of samples that the choice was made on.
        func: curve in the norms' place.
        init: start values.
        about: ``model``, ``weights`` and ``data`` in words, if known.
        quality: quality at the network's task on held-out inputs: ``original``, ``0 kept``, ``1 kept``, …; or None.
        measure: of all errors: ``KL divergence`` of logits, ``relative L2`` of other outputs.
        calibrated: error over held-out inputs once the rest is swapped and calibrated, as ``normscope swap`` does.
    """

    sites: Sequence[str]
    kept: Sequence[str]
    steps: Sequence[KeepStep]
    n_chosen_on: int
    func: str = ""
    init: str = ""
    about: Mapping[str, str] = field(default_factory=dict)
    quality: Quality | None = None
    measure: str = "relative L2"
    calibrated: Quantiles | None = None

    def __repr__(self) -> str:
        medians = f"{self.steps[0].error.p50:.3g} → {self.taken[-1].error.p50:.3g}"
        return f"KeepReport: {count(len(self.kept), 'norm')} of {len(self.sites)} kept, {self.measure} {medians}"

    @property
    def swapped(self) -> list[str]:
        """Paths of the sites that stay swapped, in the network's order."""
        return [path for path in self.sites if path not in self.kept]

    @property
    def taken(self) -> Sequence[KeepStep]:
        """The steps up to the number of norms that are kept."""
        return self.steps[: len(self.kept) + 1]


@dataclass(frozen=True)
class SimplifiedNorm(Record):
    """Exact rewrites of one norm.

    Attributes:
        site: path of the norm.
        kind: its name in the table of norms.
        blocked: reason why no RMSNorm has taken its place, or empty.
        folded: ``γ``, ``γ and β`` or empty: parameters that the linear layers behind the norm contain now.
        unfolded: reason why none was folded, or empty.
        change: relative L2 of the norm's output in float64, before γ and β moved; None if it could not be compared.
    """

    site: str
    kind: str
    blocked: str
    folded: str
    unfolded: str
    change: float | None = None

    _properties: ClassVar[tuple[str, ...]] = ("exact",)

    @property
    def exact(self) -> bool:
        """True if an RMSNorm has taken the place of the LayerNorm."""
        return not self.blocked


@dataclass(frozen=True, repr=False)
class SimplifyReport(_AboutNetwork):
    """Rewrites of a network that change nothing but rounding.

    Attributes:
        norms: all norms, in the order of calls, and then those that cannot be observed.
        float64: relative L2 of the output in float64, at most 1e-9.
        own: relative L2 of the output in ``dtype``, in which the network was rewritten.
        dtype: of the network's first parameter.
        samples: number of inputs that were compared.
        untied: paths of linear layers that no longer share an embedding's weight.
        training: True if the network is in training mode; the comparison is in eval mode.
        dropout: number of dropout layers, with which training would change the outputs of centred parameters.
        about: ``model``, ``weights`` and ``data`` in words, if known.
    """

    norms: Sequence[SimplifiedNorm]
    float64: float
    own: float
    dtype: str
    samples: int
    untied: tuple[str, ...] = ()
    training: bool = False
    dropout: int = 0
    about: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        exact = f"{len(self.exact)} of {count(len(self.norms), 'norm')} exact"
        return f"SimplifyReport: {exact}, output changed by {self.own:.0e} in {self.dtype}"

    @property
    def exact(self) -> list[SimplifiedNorm]:
        """The norms that are RMSNorms now and were LayerNorms."""
        return [norm for norm in self.norms if norm.exact]

    @property
    def folded(self) -> list[SimplifiedNorm]:
        """The norms whose parameters the layers behind them contain now."""
        return [norm for norm in self.norms if norm.folded]


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
