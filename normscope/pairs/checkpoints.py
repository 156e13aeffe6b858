"""A capture under way: its sums and the inputs that are in them; merged over ranks, and stored in checkpoints.

Each rank writes one file, which appears whole or not at all, so every input counts once, whenever the run ended. As
many ranks resume: each reads its own file, and the inputs that are in no file are divided anew.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from normscope.errors import DataError, StoppedError, UsageError, count
from normscope.inputs.chunks import InputSet, LeftOut
from normscope.pairs.captures import Capture, added, shared_input
from normscope.pairs.ranks import Ranks, bytes_as_tensor
from normscope.pairs.storage import pack, unpack
from normscope.runtime.checked_files import read_checked, refusing_damage, write_checked
from normscope.runtime.files import check_writable
from normscope.runtime.records import converted

logger = logging.getLogger(__name__)

FORMAT = "normscope-checkpoint"
FORMAT_VERSION = 6
_AGAIN = "remove it to capture its inputs again"
_PARTIAL = (".*.safetensors", ".tmp*")  # of files.whole_file, and of safetensors


@dataclass
class CaptureProgress:
    """A capture under way, and the inputs that are in it.

    Attributes:
        capture: its parts contain the sums so far, one part without a name among them; the whole is summed in the end.
        first: least number of an input of each part, by which parts are ordered.
        processed: inputs that are in the sums, or could not be read.
        left_out: inputs that reading omitted.
    """

    capture: Capture
    first: dict[str, int] = field(default_factory=dict)
    processed: InputSet = field(default_factory=InputSet)
    left_out: LeftOut = field(default_factory=LeftOut)

    def part(self, name: str, number: int) -> Capture:
        """Return a part of the data, to which an input of this number belongs."""
        self.first[name] = min(number, self.first.get(name, number))
        empty = replace(self.capture, skipped=[], stats={}, parts={}, inputs=())
        return self.capture.parts.setdefault(name, empty)

    def merge(self, other: CaptureProgress) -> CaptureProgress:
        """Return the progress of both, whose inputs differ."""
        least = {name: min(number, other.first.get(name, number)) for name, number in self.first.items()}
        merged = CaptureProgress(added(self.capture, other.capture), {**other.first, **least})
        for progress in (self, other):
            merged.processed.update(progress.processed)
            merged.left_out.add(progress.left_out)
        return merged


@dataclass(frozen=True)
class _Stored:
    """JSON that progress has besides its capture."""

    first: dict[str, int]
    unreadable: list[tuple[int, str]]
    cut: int


def pack_progress(progress: CaptureProgress) -> tuple[dict[str, Any], dict[str, Tensor]]:
    header, tensors = pack(progress.capture)
    unreadable = list(progress.left_out.unreadable.items())
    header |= {"first": progress.first, "unreadable": unreadable, "cut": progress.left_out.cut}
    return header, tensors | {"done": bytes_as_tensor(progress.processed.flags)}


def unpack_progress(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> CaptureProgress:
    stored = converted(_Stored, header, "progress")
    processed, left_out = InputSet(tensors["done"].numpy().tobytes()), LeftOut(dict(stored.unreadable), stored.cut)
    return CaptureProgress(unpack(header, tensors), stored.first, processed, left_out)


def merge_progress(progress: CaptureProgress, ranks: Ranks) -> CaptureProgress:
    """Return the progress of all ranks, which observe the same sites.

    Raises:
        DataError: if two ranks with batches of their own had the same input.
    """
    if ranks.size == 1:
        return progress
    header, tensors = pack_progress(progress)
    headers = ranks.gather(header)
    files = ranks.gather_bytes(safetensors.torch.save(tensors))
    parts = (unpack_progress(*part) for part in zip(headers, map(safetensors.torch.load, files), strict=True))
    return functools.reduce(_merged_apart if ranks.own_batches else CaptureProgress.merge, parts)


def _merged_apart(first: CaptureProgress, second: CaptureProgress) -> CaptureProgress:
    """Merge the progress of ranks with batches of their own."""
    for name, part in second.capture.parts.items():
        before = first.capture.parts.get(name)
        if before is not None and (common := shared_input(before, part)):
            raise DataError(
                f"Two ranks have captured {common}, which would be counted twice. Each rank passes its own batches; if "
                "ranks have the same on purpose, as in tensor parallelism, pass the ranks with different batches as "
                "group: mesh['dp'], or None if all have the same."
            )
    return first.merge(second)


@dataclass
class Checkpoints:
    """Files in which a capture saves its progress.

    Attributes:
        folder: of the ranks' files, which all ranks reach.
        every: seconds between two of them.
        resume: continue from the files in the folder.
        stopping: asked between two chunks; True to stop.
    """

    folder: Path
    every: float
    resume: bool = False
    stopping: Callable[[], bool] = lambda: False

    def check(self) -> None:
        """Refuse to start over where another run left checkpoints, or where none could be written; UsageError."""
        if self.exist and not self.resume:
            raise UsageError(
                f"{self.folder} holds what an unfinished run has captured. --resume goes on from it; remove the folder "
                "to begin anew."
            )
        check_writable(self.folder / "0.safetensors")

    def begin(self, progress: CaptureProgress, ranks: Ranks, settings: Mapping[str, Any]) -> CaptureProgress:
        """Return the progress to continue and to save: this rank's of an earlier run, or an empty one.

        Raises:
            UsageError: if that is of another capture, or of another number of ranks.
            DataError: if it is damaged.
        """
        self._progress, self._ranks = progress, ranks
        self._settings = {**settings, "number of ranks": ranks.size}
        self._path = self.folder / f"{ranks.rank}.safetensors"
        self._last = time.monotonic()
        if ranks.rank == 0:  # before another rank begins to write
            self._remove_partial()
        if self.resume and self._path.exists():
            self._progress = self._read()
            capture = self._progress.capture
            for summed in (capture, *capture.parts.values()):
                summed.sites = progress.capture.sites  # a file has those with sums alone
        elif self.resume and (n_ranks := 1 + max((int(file.stem) for file in self._files()), default=0)) > ranks.size:
            raise UsageError(
                f"{self.folder} is of another capture: its number of ranks is at least {n_ranks}, not {ranks.size}. Go "
                f"on with as many, or remove it to begin anew."
            )
        return self._progress

    @property
    def exist(self) -> bool:
        """True if there is a checkpoint to resume from."""
        return bool(self._files())

    def after_chunk(self) -> None:
        """Write if it is time to; stop if asked to.

        Raises:
            StoppedError: if it was asked for, once all is written.
            UsageError: if it was asked for, and cannot be written.
        """
        if self.stopping():
            self._write()
            inputs = count(len(self._progress.processed), "input")
            raise StoppedError(
                f"Stopped. What was captured so far, {inputs}{'' if self._ranks.size == 1 else ' of this rank'}, is "
                f"kept in {self.folder}; the same command with --resume goes on."
            )
        if time.monotonic() - self._last >= self.every:
            self.keep()

    def keep(self) -> None:
        """Write; where that fails, on a full disk perhaps, the run continues."""
        try:
            self._write()
        except UsageError as error:
            logger.warning("%s The run goes on; what was kept before stays as it was.", error)
        self._last = time.monotonic()

    def remove(self) -> None:
        """Remove the checkpoints once the capture is written; leave files that cannot be removed."""
        with contextlib.suppress(OSError):
            for path in self._files():
                path.unlink(missing_ok=True)
            self._remove_partial()
            self.folder.rmdir()  # which fails if another's file is in it

    def _files(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("*.safetensors") if path.stem.isdigit())

    def _remove_partial(self) -> None:
        """Remove the partial files of runs that were killed while writing: each is as large as a checkpoint."""
        with contextlib.suppress(OSError):
            for path in itertools.chain.from_iterable(map(self.folder.glob, _PARTIAL)):
                path.unlink(missing_ok=True)

    def _write(self) -> None:
        header, tensors = pack_progress(self._progress)
        kind = {"format": FORMAT, "version": FORMAT_VERSION, "settings": self._settings}
        write_checked(self._path, kind | header, tensors)

    def _read(self) -> CaptureProgress:
        header, tensors = read_checked(self._path, FORMAT, FORMAT_VERSION, _AGAIN)
        with refusing_damage(self._path, FORMAT, _AGAIN):
            for name, value in self._settings.items():
                if (stored := header["settings"].get(name)) != value:
                    raise UsageError(
                        f"{self._path} is of another capture: its {name} is {stored!r:.100}, not {value!r:.100}. Go on "
                        f"with the options that it was begun with, or remove {self.folder} to begin anew."
                    )
            return unpack_progress(header, tensors)
