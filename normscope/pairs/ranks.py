"""Ranks that divide a capture among them, and the checkpoints that each of them keeps.

Nothing is pickled: JSON and arrays travel as bytes. Every rank has the result.
A checkpoint is one file per rank: its sums, and the inputs that are in them. It appears whole or not at all, so every
input counts once, whenever the run ended. As many ranks resume: each reads its own file, and the inputs that are in no
file are divided anew.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from normscope.errors import DataError, RankLostError, StoppedError, UsageError, count
from normscope.inputs.chunks import LeftOut
from normscope.norms.sites import NormSite, SkippedNorm
from normscope.norms.trace import NormReport
from normscope.pairs.captures import shared_input
from normscope.pairs.recorder import Progress, Recorder
from normscope.pairs.storage import pack, unpack
from normscope.runtime.checked_files import read_checked, refusing_damage, write_checked
from normscope.runtime.files import check_writable
from normscope.runtime.processes import Place
from normscope.runtime.records import converted

logger = logging.getLogger(__name__)

Group = Literal["world"] | dist.ProcessGroup | DeviceMesh | None

FORMAT = "normscope-checkpoint"
FORMAT_VERSION = 6
_AGAIN = "remove it to capture its inputs again"
_PARTIAL = (".*.safetensors", ".tmp*")  # of files.whole_file, and of safetensors
# Ranks wait for the slowest, whose share of recordings may be the longest; a rank that ends is noticed at once.
_PATIENCE = timedelta(days=7)
_joins = itertools.count()  # of this process: a command joins once for each model, as all ranks do


@dataclass(frozen=True)
class Ranks:
    """The processes that divide a capture among them.

    Attributes:
        rank: number of this one.
        size: number of all.
        device: where tensors that are sent to the others lie.
        group: the processes, of the caller's own process group; None for all that torchrun started.
        own_batches: each rank brings its own batches; otherwise all have the same and divide them.
    """

    rank: int = 0
    size: int = 1
    device: torch.device | str = "cpu"
    group: dist.ProcessGroup | None = None
    own_batches: bool = False

    @classmethod
    def of_group(cls, group: Group) -> Ranks:
        """Return the ranks of a group that the caller made, see :func:`normscope.capture`; or UsageError."""
        if not (dist.is_available() and dist.is_initialized()) or group is None:
            if group not in (None, "world"):
                raise UsageError("group is given, but torch.distributed is not initialized in this process.")
            return ALONE
        if isinstance(group, DeviceMesh):
            if group.ndim > 1:
                axes = group.mesh_dim_names or ("dp", "tp")
                raise UsageError(
                    f"group is a DeviceMesh of the axes {', '.join(axes)}. Pass the axis along which batches differ, "
                    f"such as mesh[{axes[0]!r}]: ranks along another have the same data, which counts once."
                )
            group = group.get_group()
        group = None if group == "world" else group
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise UsageError("This process is not in the group whose captures are to be summed.")
        on_cuda = dist.get_backend(group) == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
        return cls(rank, size, device, group, own_batches=True)

    def told(self, message: Any) -> list[Any]:
        """Return every rank's message, any JSON value, in the order of ranks."""
        if self.size == 1:
            return [message]
        return [json.loads(text) for text in self.each(json.dumps(message).encode())]

    def each(self, data: bytes) -> Iterator[bytes]:
        """Yield every rank's bytes, in the order of ranks, one rank at a time."""
        if self.size == 1:
            yield data
            return
        for rank in range(self.size):
            sent = _tensor_of(data if rank == self.rank else b"").to(self.device)
            size = torch.tensor(len(sent), device=self.device)
            with _lost_ranks():
                dist.broadcast(size, group=self.group, group_src=rank)
                sent = sent if rank == self.rank else sent.new_empty(int(size))
                if size:
                    dist.broadcast(sent, group=self.group, group_src=rank)
            yield sent.cpu().numpy().tobytes()

    def norms(self, report: NormReport | None) -> NormReport:
        """Return the norms of the network: of another rank where this one has no batch (None); or DataError."""
        if report is not None and self.size == 1:
            return report
        message = report and {
            **{name: list(map(asdict, getattr(report, name))) for name in ("sites", "skipped")},
            "shapes": report.shapes,
        }
        found = next(filter(None, self.told(message)), None)
        if found is None:
            raise DataError("There is no batch to run the model on.")
        sites = [converted(NormSite, site, "norm site") for site in found["sites"]]
        shapes = {name: torch.Size(shape) for name, shape in found["shapes"].items()}
        return report or NormReport(sites, [SkippedNorm(**norm) for norm in found["skipped"]], {}, shapes)


def _tensor_of(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def _flags_of(done: set[int]) -> Tensor:
    """Return a byte for each input up to the last captured one, 1 for the captured ones."""
    flags = torch.zeros(1 + max(done, default=-1), dtype=torch.uint8)
    flags[list(done)] = 1
    return flags


def _numbers_in(flags: Tensor) -> set[int]:
    return set(flags.nonzero().flatten().tolist())


ALONE = Ranks()


@contextlib.contextmanager
def joined(place: Place) -> Iterator[Ranks]:
    """Join the processes that torchrun started in the block; alone without torchrun."""
    if place.alone:
        yield ALONE
        return
    store, rank, size = next(rendezvous("env://", timeout=_PATIENCE))
    # The groups of the model before and of ranks before a restart left their addresses in the store.
    store = dist.PrefixStore(f"normscope, restart {place.restarts}, {next(_joins)}", store)  # type: ignore[attr-defined]
    with _lost_ranks():
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_PATIENCE)
    try:
        yield Ranks(rank, size)
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _lost_ranks() -> Iterator[None]:
    """Raise RankLostError for a collective that another rank does not join."""
    try:
        yield
    except RuntimeError as error:
        raise RankLostError(
            "Another rank ended, or did not make the same call within the timeout of the process group. Commands "
            "continue from their checkpoints with --resume; in a script, every rank of the group must call, and "
            "group=None is this rank alone."
        ) from error


def merge_progress(recorder: Recorder, ranks: Ranks) -> None:
    """Replace the progress of the recorder by that of all ranks, which observe the same sites.

    Raises:
        DataError: if two ranks with batches of their own had the same input.
    """
    if ranks.size == 1:
        return
    header, tensors = _pack_progress(recorder.progress)
    headers = ranks.told(header)
    files = ranks.each(safetensors.torch.save(tensors))
    parts = (_unpack_progress(*part) for part in zip(headers, map(safetensors.torch.load, files), strict=True))
    recorder.progress = functools.reduce(_merged_apart if ranks.own_batches else Progress.merge, parts)


def _merged_apart(first: Progress, second: Progress) -> Progress:
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


@dataclass(frozen=True)
class _Stored:
    """JSON that progress has besides its capture."""

    first: dict[str, int]
    unreadable: list[tuple[int, str]]
    cut: int


def _pack_progress(progress: Progress) -> tuple[dict[str, Any], dict[str, Tensor]]:
    header, tensors = pack(progress.capture)
    unreadable = list(progress.left_out.unreadable.items())
    header |= {"first": progress.first, "unreadable": unreadable, "cut": progress.left_out.cut}
    return header, tensors | {"done": _flags_of(progress.done)}


def _unpack_progress(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Progress:
    stored = converted(_Stored, header, "progress")
    done = _numbers_in(tensors["done"])
    return Progress(unpack(header, tensors), stored.first, done, LeftOut(dict(stored.unreadable), stored.cut))


def merge_left_out(left_out: LeftOut, ranks: Ranks) -> LeftOut:
    """Return the omissions of all ranks."""
    merged = LeftOut()
    for unreadable, cut in ranks.told([list(left_out.unreadable.items()), left_out.cut]):
        merged.add(LeftOut(dict(unreadable), cut))
    return merged


def check_alike(ranks: Ranks, settings: Mapping[str, Any]) -> None:
    """Refuse ranks that were asked for different things; DataError on all of them."""
    settings = json.loads(json.dumps(settings))
    for rank, theirs in enumerate(ranks.told(settings)):
        for name, value in settings.items():
            if theirs.get(name) != value:
                raise DataError(
                    f"Rank {rank} sees another {name} than rank {ranks.rank}: {theirs.get(name)!r:.80}, not "
                    f"{value!r:.80}. All hosts need the same files and the same options."
                )


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

    def begin(self, recorder: Recorder, ranks: Ranks, settings: Mapping[str, Any]) -> set[int]:
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
        flags = ranks.each(_flags_of(recorder.progress.done).numpy().tobytes())
        return set().union(*(_numbers_in(_tensor_of(data)) for data in flags))

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
            inputs = count(len(self._recorder.progress.done), "input")
            raise StoppedError(
                f"Stopped. What was captured so far, {inputs}{'' if self._ranks.size == 1 else ' of this rank'}, is "
                f"kept in {self.folder}; the same command with --resume goes on."
            )
        if time.monotonic() - self._last >= self.every:
            self.keep()

    def after_share(self) -> None:
        """Write before waiting for other ranks, which may take long or be lost."""
        if self._ranks.size > 1:
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
        header, tensors = _pack_progress(self._recorder.progress)
        kind = {"format": FORMAT, "version": FORMAT_VERSION, "settings": self._settings}
        write_checked(self._path, kind | header, tensors)

    def _read(self) -> Progress:
        header, tensors = read_checked(self._path, FORMAT, FORMAT_VERSION, _AGAIN)
        with refusing_damage(self._path, FORMAT, _AGAIN):
            for name, value in self._settings.items():
                if (stored := header["settings"].get(name)) != value:
                    raise UsageError(
                        f"{self._path} is of another capture: its {name} is {stored!r:.100}, not {value!r:.100}. Go on "
                        f"with the options that it was begun with, or remove {self.folder} to begin anew."
                    )
            return _unpack_progress(header, tensors)
