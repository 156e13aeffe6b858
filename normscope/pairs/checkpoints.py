"""Checkpoints of a capture: one file per rank, with its sums and the inputs that are in them.

A file appears whole or not at all, so every input counts once, whenever the run ended. As many ranks resume: each reads
its own file, and the inputs that are in no file are divided anew.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normscope.errors import StoppedError, UsageError, count
from normscope.inputs.chunks import InputSet
from normscope.pairs.progress import CaptureProgress, pack_progress, unpack_progress
from normscope.pairs.ranks import Ranks
from normscope.pairs.recorder import Recorder
from normscope.runtime.checked_files import read_checked, refusing_damage, write_checked
from normscope.runtime.files import check_writable

logger = logging.getLogger(__name__)

FORMAT = "normscope-checkpoint"
FORMAT_VERSION = 6
_AGAIN = "remove it to capture its inputs again"
_PARTIAL = (".*.safetensors", ".tmp*")  # of files.whole_file, and of safetensors


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

    def begin(self, recorder: Recorder, ranks: Ranks, settings: Mapping[str, Any]) -> InputSet:
        """Continue this rank's progress of an earlier run, and return the inputs that are in any rank's.

        Raises:
            UsageError: if that is of another capture, or of another number of ranks.
            DataError: if it is damaged.
        """
        self._recorder, self._ranks = recorder, ranks
        self._settings = {**settings, "number of ranks": ranks.size}
        self._path = self.folder / f"{ranks.rank}.safetensors"
        self._last = time.monotonic()
        if ranks.rank == 0:  # before another rank begins to write
            self._remove_partial()
        if self.resume and self._path.exists():
            recorder.progress = self._read()
            capture = recorder.progress.capture
            for summed in (capture, *capture.parts.values()):
                summed.sites = recorder.sites  # a file has those with sums alone
        elif self.resume and (n_ranks := 1 + max((int(file.stem) for file in self._files()), default=0)) > ranks.size:
            raise UsageError(
                f"{self.folder} is of another capture: its number of ranks is at least {n_ranks}, not {ranks.size}. Go "
                f"on with as many, or remove it to begin anew."
            )
        processed = InputSet()
        for flags in ranks.gather_bytes(recorder.progress.processed.flags):
            processed.update(InputSet(flags))
        return processed

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
            inputs = count(len(self._recorder.progress.processed), "input")
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
        header, tensors = pack_progress(self._recorder.progress)
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
