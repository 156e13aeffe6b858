"""Checkpoints of a capture, one file a rank: the sums so far, and which inputs are in them.

Both stand in one file that appears whole or not at all, so that every input counts once, whenever the run ended.
Another number of ranks may go on: rank 0 takes what all left, and the inputs that are left are divided anew.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from normscope.errors import DataError, RankLostError, StoppedError, UsageError, count
from normscope.inputs.chunks import Done, LeftOut
from normscope.pairs.ranks import Ranks
from normscope.pairs.recorder import Recorder, Seen
from normscope.pairs.storage import DAMAGES, grids, other_grid, packed_seen, unpacked_seen
from normscope.runtime.files import check_writable
from normscope.runtime.sealed_files import read_checked, write_checked

logger = logging.getLogger(__name__)

FORMAT = "normscope-checkpoint"
FORMAT_VERSIONS = (1, 2, 3, 4)  # that are read; the last one is written
_PARTIAL = re.compile(r"\.\d+\.safetensors\.\w{8}\.safetensors|\.tmp\w{6}")  # of files.whole_file, and of safetensors


@dataclass
class Work:
    """Progress of one rank.

    Attributes:
        recorder: with the sums.
        done: the inputs that are in the sums, or that could not be read.
        left_out: what reading left out of them.
    """

    recorder: Recorder
    done: Done = field(default_factory=Done)
    left_out: LeftOut = field(default_factory=LeftOut)


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

    def begin(self, work: Work, ranks: Ranks, settings: Mapping[str, Any]) -> bytes:
        """Return which inputs earlier runs have done, one byte each, and give rank 0 their sums.

        Raises:
            UsageError: if that is of another capture, or cannot be rewritten.
            DataError: if it is damaged.
        """
        self._settings, self._begun = settings, time.monotonic()
        self._last = self._begun
        if self.resume and ranks.rank == 0 and (files := self._files()):
            for stored in _disjoint([self._read(path, work.recorder) for path in files]):
                work.recorder.seen = work.recorder.seen.merge(stored.seen)
                work.done.add(stored.done.numbers)
                work.left_out.add(stored.left_out)
            if files != [self._path(ranks)]:  # before another rank takes the place of one of them
                self._write(work, ranks)
                for path in files:
                    if path != self._path(ranks):
                        path.unlink(missing_ok=True)
        if ranks.rank == 0:  # before another rank begins to write
            self._remove_partial()
        of_sites = [stats for part in work.recorder.seen.stats.values() for stats in part.values()]
        kept = [stats.sources.assignment for stats in of_sites] or [work.recorder.assignment]
        work.recorder.assignment = ranks.told(kept[0])[0]
        return ranks.from_first(work.done.flags)

    @property
    def exist(self) -> bool:
        """True if there is a checkpoint to resume from."""
        return bool(self._files())

    def after_chunk(self, work: Work, ranks: Ranks) -> None:
        """Write if it is time to; stop if asked to.

        Raises:
            StoppedError: if it was asked for, once all is written.
            UsageError: if it was asked for, and cannot be written.
        """
        stopping = self.stopping()
        if not stopping and time.monotonic() - self._last < self.every:
            return
        self._keep(work, ranks, must=stopping)
        if stopping:
            mine = "" if ranks.size == 1 else " of this rank"
            raise StoppedError(
                f"Stopped. What was captured so far, {count(len(work.done), 'input')}{mine}, is kept in {self.folder}; "
                "the same command with --resume goes on."
            )

    def after_share(self, work: Work, ranks: Ranks) -> None:
        """Write before waiting for other ranks, which may take long or be lost; not after a short run."""
        if ranks.size > 1 and time.monotonic() - self._begun >= self.every:
            self._keep(work, ranks)

    @contextlib.contextmanager
    def kept_if_lost(self, work: Work, ranks: Ranks) -> Iterator[None]:
        """Write what this rank has if another one is lost before all have merged."""
        try:
            yield
        except RankLostError:
            self._keep(work, ranks)
            raise

    def remove(self) -> None:
        """Remove what is no longer needed, once the capture is written."""
        try:
            for path in self._files():
                path.unlink(missing_ok=True)
            self._remove_partial()
        except OSError as error:
            logger.warning("Cannot remove %s, which is no longer needed: %s.", self.folder, error.strerror or error)
        with contextlib.suppress(OSError):  # of another's file in it
            self.folder.rmdir()

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

    def _keep(self, work: Work, ranks: Ranks, *, must: bool = False) -> None:
        """Write; where that fails, a full disk perhaps, the run goes on unless it must be written."""
        try:
            self._write(work, ranks)
        except UsageError as error:
            if must:
                raise
            logger.warning("%s The run goes on; what was kept before stays as it was.", error)
        self._last = time.monotonic()

    def _write(self, work: Work, ranks: Ranks) -> None:
        seen, tensors = packed_seen(work.recorder)
        header: dict[str, Any] = {
            "format": FORMAT,
            "version": FORMAT_VERSIONS[-1],
            "settings": dict(self._settings),
            "grids": grids(),
            **seen,
            "unreadable": [[number, line] for number, line in work.left_out.unreadable.items()],
            "cut": work.left_out.cut,
        }
        tensors |= {"done": torch.frombuffer(bytearray(work.done.flags or b"\0"), dtype=torch.uint8)}
        write_checked(self._path(ranks), header, tensors)

    def _read(self, path: Path, recorder: Recorder) -> _Stored:
        header, tensors = read_checked(path, FORMAT, FORMAT_VERSIONS, "remove it to capture its inputs again")
        try:
            kept_apart = any(part["name"] for part in header["parts"])
            # A file of before there was such a choice does not name it.
            before = {"diagonal": False, "by_part": kept_apart, "keep_inputs": 0}
            self._check_settings(path, {**before, **header["settings"]})
            if (grid := other_grid(header["grids"])) is not None:
                raise ValueError(f"it was summed on another grid: {grid}")
            left_out = LeftOut({int(number): str(line) for number, line in header["unreadable"]}, int(header["cut"]))
            done = Done(tensors["done"].numpy().tobytes())
            return _Stored(path, done, unpacked_seen(header, tensors, recorder), left_out)
        except DAMAGES as error:
            raise DataError(
                f"The checkpoint {path} is damaged: {type(error).__name__}: {error}. Remove it to capture its inputs "
                "again."
            ) from error

    def _check_settings(self, path: Path, stored: Mapping[str, Any]) -> None:
        for name, value in self._settings.items():
            if stored.get(name) != value:
                raise UsageError(
                    f"{path} is of another capture: its {name} is {stored.get(name)!r:.100}, not {value!r:.100}. Go on "
                    f"with the options that it was begun with, or remove {self.folder} to begin anew."
                )


@dataclass(frozen=True)
class _Stored:
    """Contents of one file."""

    path: Path
    done: Done
    seen: Seen
    left_out: LeftOut


def _disjoint(stored: list[_Stored]) -> list[_Stored]:
    """Leave out files whose inputs another one has: that one took theirs in, and was lost before it removed them.

    Raises:
        DataError: if two have some inputs in common, and each some that the other has not.
    """
    kept: list[_Stored] = []
    for one in sorted(stored, key=lambda one: len(one.done), reverse=True):
        numbers = set(one.done.numbers)
        shared = [(other, numbers.intersection(other.done.numbers)) for other in kept]
        overlaps = [(other, common) for other, common in shared if common]
        if not overlaps:
            kept.append(one)
        elif any(common != numbers for _, common in overlaps):
            raise DataError(
                f"{one.path} and {overlaps[0][0].path} hold some of the same inputs, so that they are not of one run. "
                "Remove one of them to capture its inputs again."
            )
    return kept
