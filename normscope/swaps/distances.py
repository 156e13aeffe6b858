"""Distances between outputs, sample by sample in float64; a few numbers are kept per input."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from normscope.errors import DataError, ModelError
from normscope.inputs.batch import Batch
from normscope.inputs.loaded_model import Kind, Outputs
from normscope.pairs.ranks import Ranks
from normscope.pairs.sums.tokens import batch_axis
from normscope.runtime.network import KeptBuffers, run
from normscope.swaps.reports import END, OUTPUT, Drift, Quantiles, Swapped

Arranged = tuple[Tensor, Tensor | None]  # (samples, positions, features), and which positions are data


def output_by_sample(output: Tensor, batch: Batch, kind: Kind) -> Arranged:
    """View a network's output, whose axis 0 counts samples, as ``(samples, positions, features)``.

    Positions are told apart where they mean something: in logits of tokens, in frames, and where padding lies there.

    Raises:
        ModelError: if axis 0 does not count the samples of the batch.
    """
    samples = len(batch.samples)
    if not output.ndim or len(output) != samples:
        raise ModelError(
            f"The output that is compared is {tuple(output.shape)}, but axis 0 has to count the samples, of which the "
            f"batch holds {samples}. Say with normscope.inputs.loaded_model.Outputs how to read it."
        )
    padded = batch.valid is not None and output.ndim > 2 and output.shape[1] == batch.valid.shape[1]
    if kind in ("tokens", "frames") or (kind == "tensor" and padded):
        return output.reshape(samples, output.shape[1], -1), batch.valid if padded else None
    return output.reshape(samples, 1, -1), None


class SiteLayout:
    """Layout of the output of one norm site; remembers the axis of positions once it is unambiguous.

    Args:
        path: of the site.
        of_one_sample: shape of its output of one sample; None where that is not known, and samples come first.
    """

    def __init__(self, path: str, of_one_sample: torch.Size | None) -> None:
        self.path, self.of_one_sample = path, of_one_sample
        self._position_axis: int | None = None

    def by_sample(self, output: Tensor, batch: Batch) -> Arranged:
        """View it as ``(samples, positions, features)``, with one position where nothing is padded.

        What does not grow with the number of samples belongs to each of them.

        Raises:
            DataError: if it cannot be told which of its elements are padding.
        """
        samples, valid = len(batch.samples), batch.valid_at(self.path)
        positions = None if valid is None else valid.shape[1]
        axis: int | None = 0
        if self.of_one_sample is not None:
            axis = batch_axis(self.of_one_sample, output.shape, samples, positions)
        if axis is None or output.shape[axis] % samples:
            return output.reshape(1, 1, -1).expand(samples, -1, -1), None
        first = output.movedim(axis, 0)
        if len(first) != samples:  # several rows a sample: its windows, its heads or its positions
            first = first.reshape(samples, -1, *first.shape[1:])
        if valid is None or bool(valid.all()):
            return first.reshape(samples, 1, -1), None
        along = self._positions(first, valid)
        if along is None:
            return first.reshape(samples, 1, -1), None
        return first.movedim(along, 1).reshape(samples, valid.shape[1], -1), valid

    def _positions(self, first: Tensor, valid: Tensor) -> int | None:
        along = [axis for axis in range(1, first.ndim) if first.shape[axis] == valid.shape[1]]
        if len(along) == 1:
            self._position_axis = along[0]
        if along and self._position_axis not in along:
            raise DataError(
                f"At the norm {self.path} (output {tuple(first.shape)}) it cannot be told which elements are padding, "
                f"of {valid.shape[1]} positions. Pass samples of one length, or one at a time (--batch-size 1)."
            )
        return self._position_axis if along else None


_TOP = 5
_AT_ONCE = 1 << 24  # elements in float64 at a time: logits of a long text over a large vocabulary are gigabytes


@dataclass(frozen=True)
class Distances:
    """Distances between the samples of one batch and the original's, on the CPU.

    Attributes:
        left_out: samples with nothing to compare to: the original is zero throughout or not finite; bool
            ``(samples,)``. What the others say of these samples means nothing.
        nonfinite: samples whose swapped values are not finite, bool ``(samples,)``.
        relative_l2: ‖swapped − original‖ / ‖original‖, float64 ``(samples,)``; ∞ where not finite.
        cosine: float64 ``(samples,)``; 0 where the swapped values are zero throughout, −∞ where they are not finite.
        kl: KL(original ‖ swapped) in nats, a sample's mean over its positions, float64 ``(samples,)``; ∞ where not
            finite.
        answers: number of positions with logits, float64 ``(samples,)``.
        top1: number of them where the largest logit is the same, ``(samples,)``.
        top5: number of them where the original's largest is among the swapped's five largest; None where there are no
            more than five.
        top5_overlap: sum over them of the share of the original's five largest among the swapped's five largest.
        frames: relative L2 of every single frame, float64 ``(frames,)``.
    """

    left_out: Tensor
    nonfinite: Tensor
    relative_l2: Tensor
    cosine: Tensor
    kl: Tensor | None = None
    answers: Tensor | None = None
    top1: Tensor | None = None
    top5: Tensor | None = None
    top5_overlap: Tensor | None = None
    frames: Tensor | None = None


def distances(original: Tensor, swapped: Tensor, valid: Tensor | None = None, kind: Kind = "tensor") -> Distances:
    """Compare two tensors sample by sample.

    Args:
        original: ``(samples, positions, features)``, of any floating dtype and device.
        swapped: likewise.
        valid: which positions are data and not padding, bool ``(samples, positions)``; None for all.
        kind: ``classes`` and ``tokens`` for logits along the last axis, ``frames`` for distances of single positions.
    """
    pieces = [_DistanceSums.of(a, b, kind) for a, b in _pieces(original, swapped, valid)]
    kept = torch.ones(original.shape[:2], dtype=torch.bool) if valid is None else valid.cpu()
    moved, before, after, both = (
        torch.cat([getattr(piece, name) for piece in pieces], dim=1) for name in ("moved", "before", "after", "both")
    )
    before_total, after_total = before.sum(1), after.sum(1)
    left_out = (before_total == 0) | ~before_total.isfinite()
    nonfinite = ~after_total.isfinite() & ~left_out
    cosine = both.sum(1) / (before_total * after_total).sqrt()
    result = Distances(
        left_out,
        nonfinite,
        (moved.sum(1) / before_total).sqrt().masked_fill(nonfinite, torch.inf),
        cosine.masked_fill(after_total == 0, 0.0).masked_fill(nonfinite, -torch.inf),
    )
    if kind == "frames":
        compared = kept & (before > 0) & before.isfinite()
        frames = (moved / before).sqrt().masked_fill(~after.isfinite(), torch.inf)
        return replace(result, frames=frames[compared])
    if kind not in ("classes", "tokens"):
        return result

    def total(name: str) -> Tensor:
        return torch.where(kept, torch.cat([getattr(piece, name) for piece in pieces], dim=1), 0.0).sum(1)

    answers = kept.double().sum(1)
    many = original.shape[-1] > _TOP
    return replace(
        result,
        kl=(total("kl") / answers).masked_fill(nonfinite, torch.inf),
        answers=answers,
        top1=total("top1"),
        top5=total("top5") if many else None,
        top5_overlap=total("overlap") if many else None,
    )


@dataclass(frozen=True)
class _DistanceSums:
    """Sums over the features of some positions: float64 ``(samples, positions)`` on the CPU."""

    moved: Tensor
    before: Tensor
    after: Tensor
    both: Tensor
    kl: Tensor | None = None
    top1: Tensor | None = None
    top5: Tensor | None = None
    overlap: Tensor | None = None

    @classmethod
    def of(cls, a: Tensor, b: Tensor, kind: Kind) -> _DistanceSums:
        sums = [((b - a) ** 2).sum(-1), (a * a).sum(-1), (b * b).sum(-1), (a * b).sum(-1)]
        if kind in ("classes", "tokens"):
            sums += [_kl(a, b), *_agreement(a, b)]
        return cls(*(one.double().cpu() for one in sums))


def _pieces(original: Tensor, swapped: Tensor, valid: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield some positions at a time in float64, with zeros in place of padding."""
    samples, positions, features = original.shape
    step = max(1, _AT_ONCE // max(1, samples * features))
    for first in range(0, positions, step):
        window = slice(first, first + step)
        pair = [in_float64(one[:, window]) for one in (original, swapped)]
        if valid is not None:
            data = valid[:, window, None].to(pair[0].device)
            pair = [one.where(data, 0.0) for one in pair]
        yield pair[0], pair[1]


def in_float64(tensor: Tensor) -> Tensor:
    """Return it in float64, on its device or, where that has none, on the CPU."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()  # mps has no float64


def _kl(a: Tensor, b: Tensor) -> Tensor:
    of_a, of_b = a.log_softmax(-1), b.log_softmax(-1)
    return (of_a.exp() * (of_a - of_b)).sum(-1).clamp_min(0)  # by Gibbs' inequality; rounding may pass it


def _agreement(a: Tensor, b: Tensor) -> list[Tensor]:
    """Return top-1 agreement, the original's first among the swapped's five, and the overlap of the fives."""
    finite, top = b.isfinite().all(-1), min(_TOP, a.shape[-1])
    first, fives = a.argmax(-1, keepdim=True), b.topk(top).indices
    overlap = (a.topk(top).indices.unsqueeze(-1) == fives.unsqueeze(-2)).any(-1).double().mean(-1)
    shares = [(first == b.argmax(-1, keepdim=True)).squeeze(-1), (first == fives).any(-1), overlap]
    return [torch.where(finite, one.double(), 0.0) for one in shares]


_OF_ALL = ("left_out", "frames")  # known of more than the samples that are compared

_Key = tuple[int, str, str]  # which configuration, where it was measured, and the part of the data
Came = tuple[int, int]


@dataclass(frozen=True)
class Configuration:
    """Sites that are swapped together.

    Attributes:
        swapped: why just these.
        site: the one, or the one added last.
        paths: all of them.
    """

    swapped: Swapped
    site: str | None
    paths: tuple[str, ...]


@dataclass
class Tally:
    """The distances of one configuration at one place, batch after batch.

    Quantiles do not depend on the order of their values, and sums are exact before they are rounded: who compared which
    batch makes no difference.

    Attributes:
        came: the chunk that the first of the batches was in, and its number therein.
    """

    came: Came
    _columns: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, compared: Distances) -> None:
        """Add the distances of one more batch; samples with nothing to compare to are only counted."""
        for column in fields(compared):
            values = getattr(compared, column.name)
            if values is not None:
                self.extend(column.name, values if column.name in _OF_ALL else values[~compared.left_out])

    def extend(self, name: str, values: Tensor) -> None:
        """Take more values of one kind, by its name in :class:`Distances`."""
        self._columns.setdefault(name, []).append(values)

    def columns(self) -> dict[str, Tensor]:
        """Return all values of each kind that there is: float64."""
        return {name: torch.cat(parts).double() for name, parts in self._columns.items()}

    def row(self, func: str, init: str, done: Configuration, at: str, part: str = "") -> Drift:
        """Return their quantiles."""
        columns = {name: values.tolist() for name, values in self.columns().items()}
        totals = {
            name: math.fsum(columns[name]) for name in ("answers", "top1", "top5", "top5_overlap") if name in columns
        }
        answers = totals.get("answers")
        return Drift(
            func=func,
            init=init,
            swapped=done.swapped,
            site=done.site,
            sites_swapped=len(done.paths),
            at=at,
            part=part,
            inputs=len(columns["relative_l2"]),
            nonfinite=int(sum(columns["nonfinite"])),
            left_out=int(sum(columns["left_out"])),
            relative_l2=Quantiles.of(columns["relative_l2"]),
            cosine=Quantiles.of(columns["cosine"]),
            kl=Quantiles.of(columns["kl"]) if answers else None,
            top1=_share(totals.get("top1"), answers),
            top5=_share(totals.get("top5"), answers),
            top5_overlap=_share(totals.get("top5_overlap"), answers),
            answers=None if answers is None else int(answers),
            frames=Quantiles.of(columns["frames"]) if "frames" in columns else None,
        )


@dataclass
class Tallies:
    """The distances of one round of passes: a tally for each configuration, place and part of the data.

    Attributes:
        wanted: the configurations, in the order of their rows.
    """

    wanted: Sequence[Configuration]
    _kept: dict[_Key, Tally] = field(default_factory=dict)

    def add(self, done: Configuration, at: str, part: str, compared: Distances, came: Came) -> None:
        """Take the distances of one more batch, which came as this one of this chunk."""
        self._tally((self.wanted.index(done), at, part), came).add(compared)

    @property
    def at_output(self) -> bool:
        """True if the output of any batch was compared."""
        return any(at == OUTPUT for _, at, _ in self._kept)

    def gathered(self, ranks: Ranks) -> Tallies:
        """The tallies of all ranks together; every rank calls it, also one without a batch."""
        if ranks.size == 1:
            return self
        columns = {key: tally.columns() for key, tally in self._kept.items()}
        lengths = [
            [key, self._kept[key].came, {name: len(column) for name, column in of.items()}]
            for key, of in columns.items()
        ]
        of_ranks = ranks.told(lengths)
        here = [values for of in columns.values() for values in of.values()]
        everyone = ranks.gathered(torch.cat([torch.zeros(0, dtype=torch.float64), *here]))
        whole = Tallies(self.wanted)
        for of_rank, values in zip(of_ranks, everyone, strict=True):
            parts = iter(torch.split(values, [length for _, _, of in of_rank for length in of.values()]))
            for (number, at, part), came, of in of_rank:
                tally = whole._tally((number, at, part), tuple(came))
                for name in of:
                    tally.extend(name, next(parts))
        return whole

    def take(self, number: int, other: Tallies) -> None:
        """Take the tallies of other passes, over one configuration alone, for those of the one of this number."""
        self._kept |= {(number, at, part): tally for (_, at, part), tally in other._kept.items()}

    def rows(self, func: str, init: str, sites: Sequence[str]) -> list[Drift]:
        """Return the quantiles: by configuration, by place in the network's order, by part as they came."""
        order = {at: number for number, at in enumerate([OUTPUT, *sites, END])}
        ordered = sorted(self._kept, key=lambda key: (key[0], order[key[1]], key[2] != "", self._kept[key].came))
        return [self._kept[key].row(func, init, self.wanted[key[0]], *key[1:]) for key in ordered]

    def _tally(self, key: _Key, came: Came) -> Tally:
        tally = self._kept.setdefault(key, Tally(came))
        tally.came = min(tally.came, came)
        return tally


def _share(total: float | None, of: float | None) -> float | None:
    return total / of if total is not None and of else None


KL, RELATIVE_L2 = "KL divergence", "relative L2"


def relative_errors(output: Tensor, wanted: Tensor, valid: Tensor | None = None) -> Tensor:
    """Relative L2 of each sample, ‖output − wanted‖ / ‖wanted‖ over all that is not padding.

    Args:
        output: ``(samples, …)``.
        wanted: likewise.
        valid: which positions are data, bool ``(samples, positions)``; None for all, and where the tensors do not have
            those positions.

    Returns:
        ``(samples,)``, in the dtype of ``output``, float32 at least.

    >>> relative_errors(torch.tensor([[3.0, 5.0], [1.0, 0.0]]), torch.tensor([[3.0, 4.0], [1.0, 0.0]]))
    tensor([0.2000, 0.0000])
    """
    inside = torch.promote_types(output.dtype, torch.float32)
    output, wanted = output.to(inside), wanted.to(inside)
    if valid is not None and output.ndim > 2 and output.shape[:2] == valid.shape:
        kept = valid.to(output.device).view(*valid.shape, *[1] * (output.ndim - 2))
        output, wanted = output * kept, wanted * kept
    norms = vector_norm(wanted.flatten(1), dim=1).clamp_min(torch.finfo(inside).tiny)
    errors: Tensor = vector_norm((output - wanted).flatten(1), dim=1) / norms
    return errors


def kl_divergences(output: Tensor, wanted: Tensor, valid: Tensor | None = None) -> Tensor:
    """KL(wanted ‖ output) of logits in nats, the mean over each sample's positions that are not padding.

    Args:
        output: ``(samples, …, classes)``.
        wanted: likewise.
        valid: as for :func:`relative_errors`.

    Returns:
        ``(samples,)``, in the dtype of ``output``, float32 at least.

    >>> wanted, output = torch.zeros(1, 2, 2), torch.tensor([[[1.0, 3.0], [9.0, 0.0]]]).log()
    >>> kl_divergences(output, wanted, torch.tensor([[True, False]]))  # ½ log(½ / ¼) + ½ log(½ / ¾)
    tensor([0.1438])
    """
    inside = torch.promote_types(output.dtype, torch.float32)
    if valid is None or output.shape[:2] != valid.shape:
        valid = torch.ones(len(output), 1, dtype=torch.bool).expand(-1, output[0].numel() // output.shape[-1])
    found = []
    for mine, theirs, kept in zip(output, wanted, valid.to(output.device), strict=True):  # few logits at a time
        a, b = (x.reshape(-1, x.shape[-1])[kept].to(inside).log_softmax(-1) for x in (theirs, mine))
        found.append((a.exp() * (a - b)).sum(-1).clamp_min(0).mean())  # rounding may pass Gibbs' inequality
    return torch.stack(found)


def measure_of(kind: Kind) -> str:
    """Name the error by which outputs of a kind are judged: logits by what they say of each class, not by their size.

    >>> measure_of("tokens"), measure_of("frames")
    ('KL divergence', 'relative L2')
    """
    return KL if kind in ("classes", "tokens") else RELATIVE_L2


def errors_by_kind(output: Tensor, wanted: Tensor, batch: Batch, kind: Kind) -> Tensor:
    """Return the error of each sample's output that :func:`measure_of` names: ``(samples,)``."""
    return (kl_divergences if measure_of(kind) == KL else relative_errors)(output, wanted, batch.valid)


def output_errors(original: nn.Module, swapped: nn.Module, batches: Iterable[Batch], outputs: Outputs) -> Tensor:
    """Return the error at the output of every sample: float64 ``(samples,)`` on the CPU, ∞ where not finite.

    Every pass begins from the buffers that the networks have now, and leaves them and its batch so.

    Raises:
        ModelError: if axis 0 of the output does not count the samples.
    """
    errors = (OutputErrors(original, [batch], outputs).of(swapped) for batch in batches)
    return torch.cat([torch.zeros(0, dtype=torch.float64), *errors])


MOST_OUTPUT_BYTES = 2**30  # of what the original gave, that is kept in memory


class OutputErrors:
    """Outputs of a network for some batches, computed once, and the distance of others from them.

    Args:
        original: the network; called when it is first needed, and for outputs beyond a gibibyte again each time.
        batches: in memory; each is taken as :func:`normscope.swaps.distances.output_errors` takes it.
        outputs: how to read what the networks return.
    """

    def __init__(self, original: nn.Module, batches: Sequence[Batch], outputs: Outputs) -> None:
        self._original, self._batches, self._outputs = original, batches, outputs
        self._kept: dict[int, Tensor] = {}
        self._bytes_left = MOST_OUTPUT_BYTES

    def of(self, swapped: nn.Module) -> Tensor:
        """Return the error at the output of every sample: float64 ``(samples,)`` on the CPU, ∞ where not finite.

        Raises:
            ModelError: if axis 0 of the output does not count the samples.
        """
        errors = [torch.zeros(0, dtype=torch.float64)]
        for number, batch in enumerate(self._batches):
            wanted = self._wanted(number)
            errors.append(errors_by_kind(self._given(swapped, batch), wanted, batch, self._outputs.kind).double().cpu())
        return torch.cat(errors).nan_to_num(nan=torch.inf)

    def _wanted(self, number: int) -> Tensor:
        if number in self._kept:
            return self._kept[number]
        batch = self._batches[number]
        wanted = self._given(self._original, batch)
        output_by_sample(wanted, batch, self._outputs.kind)  # which refuses what has no axis of samples
        if wanted.nbytes <= self._bytes_left:
            self._bytes_left -= wanted.nbytes
            self._kept[number] = wanted
        return wanted

    @torch.no_grad()
    def _given(self, network: nn.Module, batch: Batch) -> Tensor:
        buffers = KeptBuffers(network)
        given = self._outputs.read(run(network, batch), batch).clone()  # it may be a buffer
        buffers.put_back()
        return given
