"""Shards in, one capture out: what the processes of torchrun exchange through torch.distributed.

Nothing is pickled: texts travel as bytes in tensors. Every rank has the result.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from normscope.errors import DataError, RankLostError
from normscope.inputs.splits import LeftOut
from normscope.pairs import kept_inputs
from normscope.pairs.kept_inputs import KeptInput
from normscope.pairs.norms.sites import SkippedNorm
from normscope.pairs.recorder import Recorder, Seen
from normscope.pairs.sums.sampling import LARGEST_TOKENS, UNIFORM_TOKENS, PairSample, SourcesSeen, TokenSample
from normscope.pairs.sums.stats import PairStats
from normscope.runtime.processes import Place

# Ranks wait for the slowest, whose share of recordings may be the longest; a lost one is torchrun's to notice.
_PATIENCE = timedelta(days=7)
_joins = itertools.count()  # of this process: a command joins once for each model, as all ranks do


@dataclass(frozen=True)
class Ranks:
    """The processes that divide a capture among them.

    Attributes:
        rank: number of this one.
        size: how many there are.
        device: where tensors that are told to the others lie.
    """

    rank: int = 0
    size: int = 1
    device: torch.device | str = "cpu"

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor, in the order of ranks; they may differ in size along axis 0 alone."""
        if self.size == 1:
            return [tensor]
        here = tensor.to(self.device).contiguous()
        lengths = [torch.zeros((), dtype=torch.int64, device=self.device) for _ in range(self.size)]
        _together(dist.all_gather, lengths, torch.tensor(len(here), device=self.device))
        longest = max(int(length) for length in lengths)
        padded = here.new_zeros(longest, *here.shape[1:])
        padded[: len(here)] = here
        everyone = [torch.empty_like(padded) for _ in range(self.size)]
        _together(dist.all_gather, everyone, padded)
        return [one[: int(length)].to(tensor.device) for one, length in zip(everyone, lengths, strict=True)]

    def told(self, message: Any) -> list[Any]:
        """Return every rank's message, anything that JSON holds, in the order of ranks."""
        if self.size == 1:
            return [message]
        text = json.dumps(message).encode("utf-8", "surrogateescape")
        everyone = self.gathered(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        return [json.loads(one.cpu().numpy().tobytes().decode("utf-8", "surrogateescape")) for one in everyone]

    def from_first(self, flags: bytes) -> bytes:
        """Rank 0's bytes, on every rank."""
        of_rank = torch.frombuffer(bytearray(flags), dtype=torch.uint8) if flags else torch.zeros(0, dtype=torch.uint8)
        return self.gathered(of_rank if self.rank == 0 else of_rank[:0])[0].cpu().numpy().tobytes()

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum of every rank's tensor, in its memory layout."""
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def least(self, tensor: Tensor) -> Tensor:
        """Return, element by element, the smallest of every rank's tensor."""
        return self._reduced(tensor, dist.ReduceOp.MIN)

    def merged(self, stats: PairStats) -> PairStats:
        """Return the sums over the pairs of all ranks: what :meth:`PairStats.merge` of them gives, by all-reduce."""
        if self.size == 1:
            return stats
        seen = [SourcesSeen(**one) for one in self.told(asdict(stats.sources))]
        regrouped = stats.regrouped(functools.reduce(SourcesSeen.merged, seen))
        low, high = regrouped.channel_extremes.unbind(0)
        totals: dict[str, Any] = {name: self.total(value) for name, value in regrouped.sums.items()}
        return replace(
            regrouped,
            **totals,
            channel_extremes=torch.stack([self.least(low), -self.least(-high)]),
            tokens=self._tokens(regrouped.tokens, UNIFORM_TOKENS),
            largest=self._tokens(regrouped.largest, LARGEST_TOKENS),
            pairs=self._pairs(regrouped.pairs),
        )

    def _reduced(self, tensor: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        if self.size == 1:
            return tensor
        # In memory the moments of a bin lie together, which is contiguous with its last two axes exchanged.
        turned = tensor.ndim > 1 and not tensor.is_contiguous()
        sent = (tensor.mT if turned else tensor).to(self.device).contiguous().clone()
        _together(dist.all_reduce, sent, how)
        received = sent.to(tensor.device)
        return received.mT if turned else received

    def _tokens(self, sample: TokenSample, capacity: int) -> TokenSample:
        kept = sample.kept()
        columns = [self.gathered(getattr(kept, field.name)) for field in fields(TokenSample)]
        everyone = [TokenSample(*of_rank) for of_rank in zip(*columns, strict=True)]
        return functools.reduce(lambda one, other: one.with_more(other, capacity), everyone)

    def _pairs(self, sample: PairSample) -> PairSample:
        """Return, place by place, the pair of least key; of equal keys that of the lowest rank."""
        key = self.least(sample.key)
        claim = torch.where(sample.filled & (sample.key == key), self.rank, self.size)
        mine = (self.least(claim) == self.rank) & (claim == self.rank)
        values = {name: getattr(sample, name) for name in ("x", "y", "channel")}
        return PairSample(key, **{name: self.total(value.where(mine, 0)) for name, value in values.items()})


ALONE = Ranks()


@contextlib.contextmanager
def joined(place: Place, device: torch.device) -> Iterator[Ranks]:
    """Join the processes that torchrun started for the time of the block; alone without torchrun.

    Args:
        place: of this process.
        device: where its network runs: tensors on CUDA travel by nccl, all others by gloo.
    """
    if place.alone:
        yield ALONE
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store, rank, size = next(rendezvous("env://", timeout=_PATIENCE))
    # A name of its own: what a lost rank left in the store, such as its address, would mislead the restarted ones, and
    # so would what was left there when ranks joined for the model before.
    store_of_run = dist.PrefixStore(f"normscope, restart {place.restarts}, {next(_joins)}", store)  # type: ignore[attr-defined]
    backend = "nccl" if device.type == "cuda" else "gloo"
    _together(dist.init_process_group, backend, store=store_of_run, rank=rank, world_size=size, timeout=_PATIENCE)
    try:
        yield Ranks(place.rank, place.ranks, device if device.type == "cuda" else torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def agree_on_batches(batches: object, ranks: Ranks) -> None:
    """Give inputs the smallest batch size of all ranks, so that each cuts the same chunks: what fits there fits here.

    Args:
        batches: of this rank; what has no ``batch_size`` that can be set stays as it is.
        ranks: all of them.
    """
    if ranks.size == 1:
        return
    batch_size = getattr(batches, "batch_size", None)
    sizes = [size for size in ranks.told(batch_size) if size is not None]
    if batch_size is not None and batch_size != min(sizes):  # a DataLoader's cannot be set
        batches.batch_size = min(sizes)  # type: ignore[attr-defined]


def merge_seen(recorder: Recorder, ranks: Ranks) -> None:
    """Give the recorder what all ranks have seen, in place of its own share.

    Args:
        recorder: of this rank; all observe the same sites.
        ranks: all of them.
    """
    if ranks.size == 1:
        return
    seen = recorder.seen
    named = {part: list(stats) for part, stats in seen.stats.items()}
    late = [norm.as_dict() for norm in seen.late.values()]
    of_ranks = ranks.told({"named": named, "samples": seen.n_samples, "late": late, "first": seen.first})
    sites = {site.name: site for site in recorder.sites}
    wanted = _union([one["named"] for one in of_ranks])
    stats: dict[str, dict[str, PairStats]] = {}
    for part, names in wanted.items():
        mine = seen.stats.get(part, {})
        stats[part] = {
            name: ranks.merged(mine.get(name) or recorder.empty(sites[name], torch.device(ranks.device)))
            for name in names
        }
    others = [_seen(one["samples"], one["late"], one["first"]) for one in of_ranks]
    inputs = [one for of_rank in _told_inputs(recorder, ranks) for one in of_rank]
    recorder.seen = replace(functools.reduce(Seen.merge, others), stats=stats, inputs=inputs)


def _told_inputs(recorder: Recorder, ranks: Ranks) -> list[list[KeptInput]]:
    """Return the inputs that each rank keeps; on every rank, as tensors in one file a rank."""
    entries = ranks.told(kept_inputs.described(recorder.seen.inputs, recorder.sites))
    tensors = kept_inputs.tensors_of(recorder.seen.inputs, recorder.sites)
    files = ranks.gathered(torch.frombuffer(bytearray(safetensors.torch.save(tensors)), dtype=torch.uint8))
    return [
        kept_inputs.rebuilt(of_rank, recorder.sites, safetensors.torch.load(file.cpu().numpy().tobytes()))
        for of_rank, file in zip(entries, files, strict=True)
    ]


def _seen(samples: Mapping[str, int], late: Iterable[Mapping[str, Any]], first: Mapping[str, int]) -> Seen:
    """What a rank has seen, from its message: without the sums."""
    norms = [SkippedNorm(**norm) for norm in late]
    return Seen({}, Counter(samples), {norm.name: norm for norm in norms}, dict(first))


def merge_left_out(left_out: LeftOut, ranks: Ranks) -> LeftOut:
    """Return what all ranks left out."""
    merged = LeftOut()
    for one in ranks.told({"unreadable": list(left_out.unreadable.items()), "cut": left_out.cut}):
        merged.add(LeftOut(dict(one["unreadable"]), one["cut"]))
    return merged


def _together(collective: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """Call a collective of torch.distributed; RankLostError where a rank is gone."""
    try:
        collective(*arguments, **options)
    except RuntimeError as error:
        raise RankLostError(
            "Another rank ended before its part was done. What each rank kept at its last checkpoint is there: the "
            "same command with --resume goes on."
        ) from error


def _union(named: Sequence[Mapping[str, Sequence[str]]]) -> dict[str, list[str]]:
    """Return all parts and sites that any rank has, in one order."""
    union: dict[str, dict[str, None]] = {}
    for one in named:
        for part, names in one.items():
            union.setdefault(part, {}).update(dict.fromkeys(names))
    return {part: list(names) for part, names in union.items()}


def check_alike(ranks: Ranks, settings: Mapping[str, Any]) -> None:
    """Refuse ranks that were asked for different things; DataError on all of them."""
    for rank, other in enumerate(ranks.told(dict(settings))):
        differing = [name for name, value in settings.items() if other.get(name) != json.loads(json.dumps(value))]
        if differing:
            raise DataError(
                f"Rank {rank} sees another {differing[0]} than rank {ranks.rank}: {other.get(differing[0])!r:.80}, not "
                f"{settings[differing[0]]!r:.80}. All hosts need the same files and the same options."
            )
