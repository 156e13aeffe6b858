"""Shards in, one capture out: what the processes of torchrun exchange through torch.distributed.

Nothing is pickled: texts travel as bytes in tensors. Every rank has the result.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from normscope.errors import DataError, RankLostError
from normscope.inputs.chunks import LeftOut
from normscope.pairs.recorder import Recorder, Seen
from normscope.pairs.storage import packed_seen, unpacked_seen
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

    def each(self, data: bytes) -> Iterator[bytes]:
        """Yield every rank's bytes, in the order of ranks, those of one rank at a time."""
        for rank, size in enumerate(self.told(len(data))):
            mine = np.frombuffer(data, np.uint8) if rank == self.rank else np.zeros(size, np.uint8)
            sent = torch.from_numpy(mine.copy()).to(self.device)
            _together(dist.broadcast, sent, src=rank)
            yield sent.cpu().numpy().tobytes()


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
    header, tensors = packed_seen(recorder)
    headers = ranks.told(header)
    files = ranks.each(safetensors.torch.save(tensors))
    seen = Seen()
    for of_rank, file in zip(headers, files, strict=True):
        seen = seen.merge(unpacked_seen(of_rank, safetensors.torch.load(file), recorder))
    recorder.seen = seen


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


def check_alike(ranks: Ranks, settings: Mapping[str, Any]) -> None:
    """Refuse ranks that were asked for different things; DataError on all of them."""
    for rank, other in enumerate(ranks.told(dict(settings))):
        differing = [name for name, value in settings.items() if other.get(name) != json.loads(json.dumps(value))]
        if differing:
            raise DataError(
                f"Rank {rank} sees another {differing[0]} than rank {ranks.rank}: {other.get(differing[0])!r:.80}, not "
                f"{settings[differing[0]]!r:.80}. All hosts need the same files and the same options."
            )
