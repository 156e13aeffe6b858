"""Reports of speed: how fast a network is with and without its norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from normscope.runtime.records import Record, Tabled

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
class Case(Record):
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
    """How long a case took, and what that says.

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


@dataclass(frozen=True, repr=False)
class BenchReport(Tabled, Record):
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

    def __repr__(self) -> str:
        return f"BenchReport {self.about.get('model', '')}: {len(self.rows)} timings on {self.device}"


@dataclass(frozen=True)
class Latency:
    """One pair of cells of the published table: seconds of all passes together.

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
class PublishedReport(Record):
    """Our seconds beside the published ones.

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
