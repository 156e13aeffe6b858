"""Distances between outputs, a few numbers for each sample, and the one that decides: KL divergence or relative L2."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from normscope.errors import DataError, ModelError
from normscope.inputs.batch import Batch
from normscope.inputs.loaded_model import Kind, Outputs
from normscope.pairs.token_axes import batch_axis
from normscope.runtime.network import SavedBuffers, run

KL, RELATIVE_L2 = "KL divergence", "relative L2"
MOST_OUTPUT_BYTES = 2**30  # of the original's outputs that are kept in memory
_TOP = 5
_AT_ONCE = 1 << 24  # elements in float64 at a time: logits of a long text are gigabytes
Arranged = tuple[Tensor, Tensor | None]  # (samples, positions, features), and a mask of the positions that are data


def output_by_sample(output: Tensor, batch: Batch, kind: Kind) -> Arranged:
    """View a network's output as ``(samples, positions, features)``; ModelError if its axis 0 does not count samples.

    Positions are separate in logits of tokens, in frames, and if some are padding; otherwise there is one.
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
    shape_of_one: torch.Size | None  # shape for one sample; None for samples first
    _position_axis: int = -1  # of the last output in which it was unambiguous

    def by_sample(self, output: Tensor, batch: Batch) -> Arranged:
        """View an output as ``(samples, positions, features)``, with one position if nothing is padded.

        An output whose size does not depend on the number of samples belongs to each of them. DataError if the axis of
        positions, and so padding, is ambiguous.
        """
        samples, valid = len(batch.samples), batch.valid_at(self.path)
        positions = None if valid is None else valid.shape[1]
        axis: int | None = 0
        if self.shape_of_one is not None:
            axis = batch_axis(self.shape_of_one, output.shape, samples, positions)
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
        sums["kl"] = kl_at_positions(a, b)
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


def kl_at_positions(original: Tensor, swapped: Tensor) -> Tensor:
    """Return KL(original ‖ swapped) of the softmaxes of logits along the last axis."""
    a, b = original.log_softmax(-1), swapped.log_softmax(-1)
    return (a.exp() * (a - b)).sum(-1).clamp_min(0)  # Gibbs' inequality, despite rounding


def kl_divergences(output: Tensor, target: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return KL(target ‖ output) of logits ``(samples, positions, classes)`` in nats, the mean over valid positions.

    In float32, a fifth of the time of :func:`distances`; the gradient of a training goes through it.

    >>> target, output = torch.zeros(1, 2, 2), torch.tensor([[[1.0, 3.0], [9.0, 0.0]]]).log()
    >>> kl_divergences(output, target, torch.tensor([[True, False]]))  # ½ log(½ / ¼) + ½ log(½ / ¾)
    tensor([0.1438])
    """
    inside = torch.promote_types(output.dtype, torch.float32)
    kept = torch.ones(output.shape[:2], dtype=torch.bool) if valid is None else valid
    divergences = []
    for mine, theirs, data in zip(output, target, kept.to(output.device), strict=True):  # few logits at a time
        divergences.append(kl_at_positions(theirs[data].to(inside), mine[data].to(inside)).mean())
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
        """Return the error of each sample: float64 ``(samples,)`` on the CPU; ∞ if not finite or not defined."""
        errors = [torch.zeros(0, dtype=torch.float64)]
        for number, batch in enumerate(self.batches):
            target, output = self._target(number), self._output(swapped, batch)
            kind = self.outputs.kind  # may be inferred from the target
            (before, valid), (after, _) = (output_by_sample(values, batch, kind) for values in (target, output))
            if measure_of(kind) == KL:
                errors.append(kl_divergences(after, before, valid).double().cpu())
            else:
                same = (before == after).flatten(1).all(1).cpu()  # zeros, too, whose relative L2 is not defined
                errors.append(distances(before, after, valid).relative_l2.masked_fill(same, 0.0))
        return torch.cat(errors).nan_to_num(nan=torch.inf, posinf=torch.inf)

    def _target(self, number: int) -> Tensor:
        if number in self._kept:
            return self._kept[number]
        batch = self.batches[number]
        output = self._output(self.original, batch)
        if output.nbytes <= self._bytes_left:
            self._bytes_left -= output.nbytes
            self._kept[number] = output
        return output

    @torch.no_grad()
    def _output(self, network: nn.Module, batch: Batch) -> Tensor:
        buffers = SavedBuffers(network)
        output = self.outputs.read(run(network, batch), batch).clone()  # it may be a buffer
        buffers.restore()
        return output
