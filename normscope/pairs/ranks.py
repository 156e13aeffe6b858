"""Progress of a capture, exchanged among the processes of torchrun and kept in checkpoints.

Nothing is pickled: texts travel as bytes in tensors. Every rank has the result.
A checkpoint is one file a rank: its sums, and which inputs are in them. It appears whole or not at all, so that every
input counts once, whenever the run ended. Another number of ranks may go on: rank 0 takes what all left, and the inputs
that are left are divided anew.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from normscope.errors import DataError, RankLostError, StoppedError, UsageError, count
from normscope.inputs.chunks import LeftOut
from normscope.pairs.recorder import Recorder, Seen
from normscope.pairs.storage import DAMAGES, grids, other_grid, packed_seen, unpacked_seen
from normscope.runtime.files import check_writable
from normscope.runtime.processes import Place
from normscope.runtime.sealed_files import read_checked, write_checked

logger = logging.getLogger(__name__)

FORMAT = "normscope-checkpoint"
FORMAT_VERSIONS = (1, 2, 3, 4)  # that are read; the last one is written
_PARTIAL = re.compile(r"\.\d+\.safetensors\.\w{8}\.safetensors|\.tmp\w{6}")  # of files.whole_file, and of safetensors
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


@dataclass
class Checkpoints:
    """Where and when a capture saves its state.

    Attributes:
        folder: of the ranks' files, which all ranks reach.
        every: seconds between two of them.
        resume: whether to go on from what is there.
        stopping: says whether to stop: asked between two chunks.
    """

    folder: Path
    every: float
    resume: bool = False
    stopping: Callable[[], bool] = lambda: False
    _settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    _begun: float = field(default=0.0, repr=False)
    _last: float = field(default=0.0, repr=False)

    def check(self) -> None:
        """Refuse to start over where another run left checkpoints, or where none could be written; UsageError."""
        if self.exist and not self.resume:
            raise UsageError(
                f"{self.folder} holds what an unfinished run has captured. --resume goes on from it; remove the folder "
                "to begin anew."
            )
        check_writable(self.folder / "0.safetensors")

    def begin(self, recorder: Recorder, ranks: Ranks, settings: Mapping[str, Any]) -> bytes:
        """Give the progress of earlier runs to the recorder of rank 0; return their inputs to all, one byte each.

        Raises:
            UsageError: if that is of another capture, or cannot be rewritten.
            DataError: if it is damaged.
        """
        self._settings, self._begun = settings, time.monotonic()
        self._last = self._begun
        if self.resume and ranks.rank == 0 and (files := self._files()):
            for seen in _disjoint({path: self._read(path, recorder) for path in files}):
                recorder.seen = recorder.seen.merge(seen)
            if files != [self._path(ranks)]:  # before another rank takes the place of one of them
                self._write(recorder, ranks)
                for path in files:
                    if path != self._path(ranks):
                        path.unlink(missing_ok=True)
        if ranks.rank == 0:  # before another rank begins to write
            self._remove_partial()
        of_sites = [stats for part in recorder.seen.stats.values() for stats in part.values()]
        kept = [stats.sources.assignment for stats in of_sites] or [recorder.assignment]
        recorder.assignment = ranks.told(kept[0])[0]
        return ranks.from_first(recorder.seen.done.flags)

    @property
    def exist(self) -> bool:
        """True if there is a checkpoint to resume from."""
        return bool(self._files())

    def after_chunk(self, recorder: Recorder, ranks: Ranks) -> None:
        """Write if it is time to; stop if asked to.

        Raises:
            StoppedError: if it was asked for, once all is written.
            UsageError: if it was asked for, and cannot be written.
        """
        stopping = self.stopping()
        if not stopping and time.monotonic() - self._last < self.every:
            return
        self._keep(recorder, ranks, must=stopping)
        if stopping:
            inputs = count(len(recorder.seen.done), "input") + ("" if ranks.size == 1 else " of this rank")
            raise StoppedError(
                f"Stopped. What was captured so far, {inputs}, is kept in {self.folder}; the same command with "
                "--resume goes on."
            )

    def after_share(self, recorder: Recorder, ranks: Ranks) -> None:
        """Write before waiting for other ranks, which may take long or be lost; not after a short run."""
        if ranks.size > 1 and time.monotonic() - self._begun >= self.every:
            self._keep(recorder, ranks)

    @contextlib.contextmanager
    def kept_if_lost(self, recorder: Recorder, ranks: Ranks) -> Iterator[None]:
        """Write what this rank has if another one is lost before all have merged."""
        try:
            yield
        except RankLostError:
            self._keep(recorder, ranks)
            raise

    def remove(self) -> None:
        """Remove what is no longer needed, once the capture is written; leave what cannot be removed."""
        with contextlib.suppress(OSError):
            for path in self._files():
                path.unlink(missing_ok=True)
            self._remove_partial()
            self.folder.rmdir()  # which fails if another's file is in it

    def _files(self) -> list[Path]:
        try:
            return sorted(
                path for path in self.folder.iterdir() if path.suffix == ".safetensors" and path.stem.isdigit()
            )
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise UsageError(f"Cannot read {self.folder}: {error.strerror or error}.") from error

    def _remove_partial(self) -> None:
        """Remove the partial files of runs that were killed while writing: each is as large as a checkpoint."""
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                if _PARTIAL.fullmatch(path.name):
                    path.unlink(missing_ok=True)

    def _path(self, ranks: Ranks) -> Path:
        return self.folder / f"{ranks.rank}.safetensors"

    def _keep(self, recorder: Recorder, ranks: Ranks, *, must: bool = False) -> None:
        """Write; where that fails, a full disk perhaps, the run goes on unless it must be written."""
        try:
            self._write(recorder, ranks)
        except UsageError as error:
            if must:
                raise
            logger.warning("%s The run goes on; what was kept before stays as it was.", error)
        self._last = time.monotonic()

    def _write(self, recorder: Recorder, ranks: Ranks) -> None:
        seen, tensors = packed_seen(recorder)
        header = {"format": FORMAT, "version": FORMAT_VERSIONS[-1], "settings": dict(self._settings), "grids": grids()}
        write_checked(self._path(ranks), header | seen, tensors)

    def _read(self, path: Path, recorder: Recorder) -> Seen:
        header, tensors = read_checked(path, FORMAT, FORMAT_VERSIONS, "remove it to capture its inputs again")
        try:
            kept_apart = any(part["name"] for part in header["parts"])
            # A file of before there was such a choice does not name it.
            before = {"diagonal": False, "by_part": kept_apart, "keep_inputs": 0}
            stored = {**before, **header["settings"]}
            if differing := [name for name, value in self._settings.items() if stored.get(name) != value]:
                name = differing[0]
                raise UsageError(
                    f"{path} is of another capture: its {name} is {stored.get(name)!r:.100}, not "
                    f"{self._settings[name]!r:.100}. Go on with the options that it was begun with, or remove "
                    f"{self.folder} to begin anew."
                )
            if (grid := other_grid(header["grids"])) is not None:
                raise ValueError(f"it was summed on another grid: {grid}")
            return unpacked_seen(header, tensors, recorder)
        except DAMAGES as error:
            raise DataError(
                f"The checkpoint {path} is damaged: {type(error).__name__}: {error}. Remove it to capture its inputs "
                "again."
            ) from error


def _disjoint(stored: Mapping[Path, Seen]) -> list[Seen]:
    """Leave out files whose inputs another one has: that one took theirs in, and was lost before it removed them.

    Raises:
        DataError: if two have some inputs in common, and each some that the other has not.
    """
    kept: dict[Path, set[int]] = {}
    for path, seen in sorted(stored.items(), key=lambda entry: len(entry[1].done), reverse=True):
        numbers = set(seen.done.numbers)
        overlaps = {other: common for other, done in kept.items() if (common := numbers & done)}
        if not overlaps:
            kept[path] = numbers
        elif any(common != numbers for common in overlaps.values()):
            raise DataError(
                f"{path} and {next(iter(overlaps))} hold some of the same inputs, so that they are not of one run. "
                "Remove one of them to capture its inputs again."
            )
    return [stored[path] for path in kept]
