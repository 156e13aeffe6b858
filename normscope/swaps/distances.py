"""Distances between outputs, a few numbers for each sample."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from normscope.errors import DataError, ModelError
from normscope.inputs.batch import Batch
from normscope.inputs.loaded_model import Kind, Outputs
from normscope.pairs.ranks import Ranks
from normscope.pairs.token_axes import batch_axis
from normscope.runtime.network import KeptBuffers, run
from normscope.swaps.reports import END, OUTPUT, Drift, Quantiles, Swapped

Arranged = tuple[Tensor, Tensor | None]  # (samples, positions, features), and a mask of the positions that are data


def output_by_sample(output: Tensor, batch: Batch, kind: Kind) -> Arranged:
    """View a network's output, whose axis 0 counts samples, as ``(samples, positions, features)``.

    Positions are separate in logits of tokens, in frames, and if some are padding; otherwise there is one.

    Raises:
        ModelError: if axis 0 does not count the samples of the batch.
    """
    samples = len(batch.samples)
    if not output.ndim or len(output) != samples:
        raise ModelError(
            f"The compared output is {tuple(output.shape)}, but axis 0 has to count the samples, here {samples}; pass "
            "a normscope.inputs.loaded_model.Outputs that reads it."
        )
    padded = batch.valid is not None and output.ndim > 2 and output.shape[1] == batch.valid.shape[1]
    if kind in ("tokens", "frames") or (kind == "tensor" and padded):
        return output.reshape(samples, output.shape[1], -1), batch.valid if padded else None
    return output.reshape(samples, 1, -1), None


@dataclass
class SiteLayout:
    """Layout of the output of a norm site."""

    path: str
    of_one_sample: torch.Size | None  # shape for one sample; None for samples first
    _position_axis: int = -1  # of the last output in which it was unambiguous

    def by_sample(self, output: Tensor, batch: Batch) -> Arranged:
        """View an output as ``(samples, positions, features)``, with one position if nothing is padded.

        An output whose size does not depend on the number of samples belongs to each of them.

        Raises:
            DataError: if the axis of positions, and so padding, is ambiguous.
        """
        samples, valid = len(batch.samples), batch.valid_at(self.path)
        positions = None if valid is None else valid.shape[1]
        axis: int | None = 0
        if self.of_one_sample is not None:
            axis = batch_axis(self.of_one_sample, output.shape, samples, positions)
        if axis is None or output.shape[axis] % samples:
            return output.reshape(1, 1, -1).expand(samples, -1, -1), None
        first = output.movedim(axis, 0)
        if len(first) != samples:  # several rows per sample: windows, heads or positions
            first = first.reshape(samples, -1, *first.shape[1:])
        if valid is None or bool(valid.all()):
            return first.reshape(samples, 1, -1), None
        along = [axis for axis in range(1, first.ndim) if first.shape[axis] == positions]
        if not along:
            return first.reshape(samples, 1, -1), None
        if len(along) == 1:
            self._position_axis = along[0]
        if self._position_axis not in along:
            raise DataError(
                f"At the norm {self.path} (output {tuple(first.shape)}) the axis of {positions} positions, and so the "
                "padding, is ambiguous. Pass samples of one length, or one at a time (--batch-size 1)."
            )
        return first.movedim(self._position_axis, 1).reshape(samples, valid.shape[1], -1), valid


_TOP = 5
_AT_ONCE = 1 << 24  # elements in float64 at a time: logits of a long text are gigabytes


@dataclass(frozen=True)
class Distances:
    """Distances of the samples of one batch, named as in :class:`Drift`: ``(samples,)`` each, on the CPU.

    Shares are sums over a sample's ``answers``, its positions with logits; ``frames`` has one element for each frame.
    Values of a sample that is ``left_out`` are undefined. A ``nonfinite`` sample has an infinite ``relative_l2`` and
    ``kl``, and a cosine of −∞.
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
    """Compare two tensors sample by sample, in float64.

    Args:
        original: ``(samples, positions, features)``, of any floating dtype and device.
        swapped: likewise.
        valid: mask of the positions that are data, ``(samples, positions)``; None for all.
        kind: ``classes`` and ``tokens`` for logits along the last axis, ``frames`` for distances of single positions.
    """
    pieces = [_sums(a, b, kind) for a, b in _pieces(original, swapped, valid)]
    sums = {name: torch.cat([piece[name] for piece in pieces], dim=1) for name in pieces[0]}
    kept = torch.ones(original.shape[:2], dtype=torch.bool) if valid is None else valid.cpu()
    moved, before, after = sums["moved"], sums["before"], sums["after"]
    before_total, after_total = before.sum(1), after.sum(1)
    left_out = (before_total == 0) | ~before_total.isfinite()
    nonfinite = ~after_total.isfinite() & ~left_out
    cosine = sums["both"].sum(1) / (before_total * after_total).sqrt()
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
    if "kl" not in sums:
        return result
    answers = kept.double().sum(1)
    totals = {name: torch.where(kept, sums[name], 0.0).sum(1) for name in ("kl", "top1", "top5", "top5_overlap")}
    totals["kl"] = (totals["kl"] / answers).masked_fill(nonfinite, torch.inf)
    if original.shape[-1] <= _TOP:
        del totals["top5"], totals["top5_overlap"]
    return replace(result, answers=answers, **totals)


def _sums(a: Tensor, b: Tensor, kind: Kind) -> dict[str, Tensor]:
    """Return sums over the features of each position: float64 ``(samples, positions)`` on the CPU."""
    sums = {
        "moved": ((b - a) ** 2).sum(-1),
        "before": (a * a).sum(-1),
        "after": (b * b).sum(-1),
        "both": (a * b).sum(-1),
    }
    if kind in ("classes", "tokens"):
        finite, top = b.isfinite().all(-1), min(_TOP, a.shape[-1])
        first, fives = a.argmax(-1, keepdim=True), b.topk(top).indices
        shares = {
            "top1": (first == b.argmax(-1, keepdim=True)).squeeze(-1),
            "top5": (first == fives).any(-1),
            "top5_overlap": (a.topk(top).indices.unsqueeze(-1) == fives.unsqueeze(-2)).any(-1).double().mean(-1),
        }
        sums |= {name: torch.where(finite, share.double(), 0.0) for name, share in shares.items()}
        sums["kl"] = _kl(a, b)
    return {name: total.double().cpu() for name, total in sums.items()}


def _pieces(original: Tensor, swapped: Tensor, valid: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield some positions at a time in float64, with zeros in place of padding."""
    samples, positions, features = original.shape
    step = max(1, _AT_ONCE // max(1, samples * features))
    for first in range(0, positions, step):
        window = slice(first, first + step)
        a, b = in_float64(original[:, window]), in_float64(swapped[:, window])
        if valid is not None:
            data = valid[:, window, None].to(a.device)
            a, b = a.where(data, 0.0), b.where(data, 0.0)
        yield a, b


def in_float64(tensor: Tensor) -> Tensor:
    """Convert to float64, on the CPU if the device is mps, which does not support it."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def _kl(original: Tensor, swapped: Tensor) -> Tensor:
    a, b = original.log_softmax(-1), swapped.log_softmax(-1)
    return (a.exp() * (a - b)).sum(-1).clamp_min(0)  # Gibbs' inequality, despite rounding


_FOR_ALL = ("left_out", "frames")  # columns that do not have one element per compared sample
_Key = tuple[int, str, str]  # number of the configuration, where it was measured, and the part of the data
_Columns = dict[str, Tensor]  # by name in Distances


@dataclass(frozen=True)
class Configuration:
    """Sites that are swapped together.

    ``swapped`` and ``site`` are as in :class:`normscope.swaps.reports.Drift`; ``paths`` are all swapped sites.
    """

    swapped: Swapped
    site: str | None
    paths: tuple[str, ...]


@dataclass
class Tallies:
    """Distances of several configurations, batch after batch.

    Quantiles do not depend on the order of values, and sums are exact before they are rounded. So the result is the
    same however ranks divide the batches.
    """

    configurations: Sequence[Configuration]  # in the order of their rows
    _kept: dict[_Key, list[tuple[tuple[int, int], _Columns]]] = field(default_factory=dict)

    def add(self, done: Configuration, at: str, part: str, compared: Distances, came: tuple[int, int]) -> None:
        """Add the distances of a batch; ``came`` numbers its chunk among all ranks, and the batch in the chunk."""
        compared_samples = ~compared.left_out
        columns = {
            name: values if name in _FOR_ALL else values[compared_samples]
            for name, values in vars(compared).items()
            if values is not None
        }
        key = self.configurations.index(done), at, part
        self._kept.setdefault(key, []).append((came, columns))

    def gathered(self, ranks: Ranks) -> Tallies:
        """Merge the tallies of all ranks; every rank calls it, also one without a batch."""
        if ranks.size == 1:
            return self
        mine = [
            (key, self._came(key), {name: values.tolist() for name, values in self._columns(key).items()})
            for key in self._kept
        ]
        whole = Tallies(self.configurations)
        for key, came, lists in itertools.chain.from_iterable(ranks.gather(mine)):
            columns = {name: torch.tensor(values, dtype=torch.float64) for name, values in lists.items()}
            whole._kept.setdefault(tuple(key), []).append((tuple(came), columns))
        return whole

    def rows(self, sites: Sequence[str]) -> list[Drift]:
        """Return quantiles and shares: by configuration, by place in the order of the sites, by part as they came."""
        order = {at: number for number, at in enumerate([OUTPUT, *sites, END])}
        return [
            self._row(*key)
            for key in sorted(self._kept, key=lambda key: (key[0], order[key[1]], key[2] != "", self._came(key)))
        ]

    def _came(self, key: _Key) -> tuple[int, int]:
        return min(came for came, _ in self._kept[key])

    def _columns(self, key: _Key) -> _Columns:
        batches = [columns for _, columns in self._kept[key]]
        return {name: torch.cat([columns[name] for columns in batches]).double() for name in batches[0]}

    def _row(self, number: int, at: str, part: str) -> Drift:
        columns = {name: values.tolist() for name, values in self._columns((number, at, part)).items()}
        answers = math.fsum(columns["answers"]) if "answers" in columns else None
        optional: dict[str, Any] = {}
        if answers:
            shares = [name for name in ("top1", "top5", "top5_overlap") if name in columns]
            optional = {name: math.fsum(columns[name]) / answers for name in shares}
            optional["kl"] = Quantiles.of(columns["kl"])
        if "frames" in columns:
            optional["frames"] = Quantiles.of(columns["frames"])
        done = self.configurations[number]
        return Drift(
            *("", ""),  # of the curve and the start values, which drift() adds
            done.swapped,
            done.site,
            len(done.paths),
            at,
            part,
            inputs=len(columns["relative_l2"]),
            nonfinite=int(sum(columns["nonfinite"])),
            left_out=int(sum(columns["left_out"])),
            relative_l2=Quantiles.of(columns["relative_l2"]),
            cosine=Quantiles.of(columns["cosine"]),
            answers=None if answers is None else int(answers),
            **optional,
        )


KL, RELATIVE_L2 = "KL divergence", "relative L2"


def relative_errors(output: Tensor, target: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return ‖output − target‖ / ‖target‖ of each sample ``(samples, …)`` without padding, in float32 at least.

    >>> relative_errors(torch.tensor([[3.0, 5.0], [1.0, 0.0]]), torch.tensor([[3.0, 4.0], [1.0, 0.0]]))
    tensor([0.2000, 0.0000])
    """
    inside = torch.promote_types(output.dtype, torch.float32)
    output, target = (without_padding(values.to(inside), valid) for values in (output, target))
    norms = vector_norm(target.flatten(1), dim=1).clamp_min(torch.finfo(inside).tiny)
    errors: Tensor = vector_norm((output - target).flatten(1), dim=1) / norms
    return errors


def without_padding(values: Tensor, valid: Tensor | None) -> Tensor:
    """Put zeros in place of padding if the mask has the first axes ``(samples, positions)`` of the values."""
    if valid is None or values.ndim < 3 or values.shape[:2] != valid.shape:
        return values
    return values * valid.to(values.device).view(*valid.shape, *[1] * (values.ndim - 2))


def kl_divergences(output: Tensor, target: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return KL(target ‖ output) of logits ``(samples, …, classes)`` in nats, the mean over a sample's valid positions.

    >>> target, output = torch.zeros(1, 2, 2), torch.tensor([[[1.0, 3.0], [9.0, 0.0]]]).log()
    >>> kl_divergences(output, target, torch.tensor([[True, False]]))  # ½ log(½ / ¼) + ½ log(½ / ¾)
    tensor([0.1438])
    """
    inside = torch.promote_types(output.dtype, torch.float32)
    if valid is None or output.shape[:2] != valid.shape:
        valid = torch.ones(len(output), 1, dtype=torch.bool).expand(-1, output[0].numel() // output.shape[-1])
    divergences = []
    for mine, theirs, kept in zip(output, target, valid.to(output.device), strict=True):  # few logits at a time
        a, b = (x.reshape(-1, x.shape[-1])[kept].to(inside) for x in (theirs, mine))
        divergences.append(_kl(a, b).mean())
    return torch.stack(divergences)


def measure_of(kind: Kind) -> str:
    """Return the name of the error for outputs of a kind: KL divergence for logits.

    >>> measure_of("tokens"), measure_of("frames")
    ('KL divergence', 'relative L2')
    """
    return KL if kind in ("classes", "tokens") else RELATIVE_L2


def output_errors(original: nn.Module, swapped: nn.Module, batches: Iterable[Batch], outputs: Outputs) -> Tensor:
    """Return the errors of :class:`OutputErrors` for batches that need not fit into memory together."""
    errors = (OutputErrors(original, [batch], outputs).of(swapped) for batch in batches)
    return torch.cat([torch.zeros(0, dtype=torch.float64), *errors])


MOST_OUTPUT_BYTES = 2**30  # of the original's outputs that are kept in memory


@dataclass
class OutputErrors:
    """Errors of networks at the output, relative to an original, for batches in memory.

    The original's outputs are computed when first needed, and a gibibyte of them is kept. Passes leave the batches, and
    the buffers of the networks, unchanged.
    """

    original: nn.Module
    batches: Sequence[Batch]
    outputs: Outputs

    def __post_init__(self) -> None:
        self._kept: dict[int, Tensor] = {}
        self._bytes_left = MOST_OUTPUT_BYTES

    def of(self, swapped: nn.Module) -> Tensor:
        """Return the error of each sample: float64 ``(samples,)`` on the CPU; ∞ if it is not finite.

        Raises:
            ModelError: if axis 0 of the output does not count the samples.
        """
        errors = [torch.zeros(0, dtype=torch.float64)]
        for number, batch in enumerate(self.batches):
            target = self._target(number)  # of which the kind of outputs may be inferred
            measure = kl_divergences if measure_of(self.outputs.kind) == KL else relative_errors
            errors.append(measure(self._output(swapped, batch), target, batch.valid).double().cpu())
        return torch.cat(errors).nan_to_num(nan=torch.inf)

    def _target(self, number: int) -> Tensor:
        if number in self._kept:
            return self._kept[number]
        batch = self.batches[number]
        output = self._output(self.original, batch)
        output_by_sample(output, batch, self.outputs.kind)  # raises ModelError without an axis of samples
        if output.nbytes <= self._bytes_left:
            self._bytes_left -= output.nbytes
            self._kept[number] = output
        return output

    @torch.no_grad()
    def _output(self, network: nn.Module, batch: Batch) -> Tensor:
        buffers = KeptBuffers(network)
        output = self.outputs.read(run(network, batch), batch).clone()  # it may be a buffer
        buffers.put_back()
        return output
