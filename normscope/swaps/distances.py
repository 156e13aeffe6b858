"""How far one tensor is from another, sample by sample; every sum in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normscope.outputs import Kind

_TOP = 5
_AT_ONCE = 1 << 24  # elements in float64 at a time: logits of a long text over a large vocabulary are gigabytes


@dataclass(frozen=True)
class Distances:
    """How far the samples of one batch are from the original's, on the CPU.

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
    pieces = [_Sums.of(a, b, kind) for a, b in _pieces(original, swapped, valid)]
    kept = torch.ones(original.shape[:2], dtype=torch.bool) if valid is None else valid.cpu()
    moved, own, other, both = (
        torch.cat([getattr(piece, name) for piece in pieces], dim=1) for name in ("moved", "own", "other", "both")
    )
    own_total, other_total = own.sum(1), other.sum(1)
    left_out = (own_total == 0) | ~own_total.isfinite()
    nonfinite = ~other_total.isfinite() & ~left_out
    cosine = both.sum(1) / (own_total * other_total).sqrt()
    found = Distances(
        left_out,
        nonfinite,
        (moved.sum(1) / own_total).sqrt().masked_fill(nonfinite, torch.inf),
        cosine.masked_fill(other_total == 0, 0.0).masked_fill(nonfinite, -torch.inf),
    )
    if kind == "frames":
        compared = kept & (own > 0) & own.isfinite()
        frames = (moved / own).sqrt().masked_fill(~other.isfinite(), torch.inf)
        return replace(found, frames=frames[compared])
    if kind not in ("classes", "tokens"):
        return found

    def total(name: str) -> Tensor:
        return torch.where(kept, torch.cat([getattr(piece, name) for piece in pieces], dim=1), 0.0).sum(1)

    answers = kept.double().sum(1)
    many = original.shape[-1] > _TOP
    return replace(
        found,
        kl=(total("kl") / answers).masked_fill(nonfinite, torch.inf),
        answers=answers,
        top1=total("top1"),
        top5=total("top5") if many else None,
        top5_overlap=total("overlap") if many else None,
    )


@dataclass(frozen=True)
class _Sums:
    """Sums over the features of some positions: float64 ``(samples, positions)`` on the CPU."""

    moved: Tensor
    own: Tensor
    other: Tensor
    both: Tensor
    kl: Tensor | None = None
    top1: Tensor | None = None
    top5: Tensor | None = None
    overlap: Tensor | None = None

    @classmethod
    def of(cls, a: Tensor, b: Tensor, kind: Kind) -> _Sums:
        sums = [((b - a) ** 2).sum(-1), (a * a).sum(-1), (b * b).sum(-1), (a * b).sum(-1)]
        if kind in ("classes", "tokens"):
            sums += [_kl(a, b), *_agreement(a, b)]
        return cls(*(one.double().cpu() for one in sums))


def _pieces(original: Tensor, swapped: Tensor, valid: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield some positions at a time in float64, with zeros in place of padding."""
    samples, positions, features = original.shape
    step = max(1, _AT_ONCE // max(1, samples * features))
    for first in range(0, positions, step):
        own = slice(first, first + step)
        pair = [_float64(one[:, own]) for one in (original, swapped)]
        if valid is not None:
            data = valid[:, own, None].to(pair[0].device)
            pair = [one.where(data, 0.0) for one in pair]
        yield pair[0], pair[1]


def _float64(tensor: Tensor) -> Tensor:
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()  # mps has no float64


def _kl(a: Tensor, b: Tensor) -> Tensor:
    own, other = a.log_softmax(-1), b.log_softmax(-1)
    return (own.exp() * (own - other)).sum(-1).clamp_min(0)  # by Gibbs' inequality; rounding may pass it


def _agreement(a: Tensor, b: Tensor) -> list[Tensor]:
    """Return top-1 agreement, the original's first among the swapped's five, and the overlap of the fives."""
    finite, top = b.isfinite().all(-1), min(_TOP, a.shape[-1])
    first, fives = a.argmax(-1, keepdim=True), b.topk(top).indices
    overlap = (a.topk(top).indices.unsqueeze(-1) == fives.unsqueeze(-2)).any(-1).double().mean(-1)
    found = [(first == b.argmax(-1, keepdim=True)).squeeze(-1), (first == fives).any(-1), overlap]
    return [torch.where(finite, one.double(), 0.0) for one in found]
