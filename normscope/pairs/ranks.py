"""Ranks that divide a capture or other work. JSON and bytes travel between them, and nothing is pickled."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from operator import methodcaller
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from normscope.errors import DataError, RankLostError, UsageError
from normscope.inputs.chunks import LeftOut
from normscope.norms.sites import NormSite, SkippedNorm
from normscope.norms.trace import NormReport
from normscope.runtime.processes import Process
from normscope.runtime.records import converted

Group = Literal["world"] | dist.ProcessGroup | DeviceMesh | None

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

    def gather(self, message: Any) -> list[Any]:
        """Return every rank's message, any JSON value, in the order of ranks."""
        if self.size == 1:
            return [message]
        return [json.loads(text) for text in self.gather_bytes(json.dumps(message).encode())]

    def gather_bytes(self, data: bytes) -> Iterator[bytes]:
        """Yield every rank's bytes, in the order of ranks, one rank at a time."""
        if self.size == 1:
            yield data
            return
        for rank in range(self.size):
            sent = bytes_as_tensor(data if rank == self.rank else b"").to(self.device)
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
        norms = next(filter(None, self.gather(message)), None)
        if norms is None:
            raise DataError("There is no batch to run the model on.")
        sites = [converted(NormSite, site, "norm site") for site in norms["sites"]]
        shapes = {name: torch.Size(shape) for name, shape in norms["shapes"].items()}
        return report or NormReport(sites, [SkippedNorm(**norm) for norm in norms["skipped"]], {}, shapes)


def bytes_as_tensor(data: bytes) -> Tensor:
    """Return bytes as a tensor, uint8 ``(bytes,)``."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


ALONE = Ranks()


@contextlib.contextmanager
def process_group(process: Process) -> Iterator[Ranks]:
    """Join the processes that torchrun started in the block; alone without torchrun."""
    if process.alone:
        yield ALONE
        return
    store, rank, size = next(rendezvous("env://", timeout=_PATIENCE))
    # The groups of the model before and of ranks before a restart left their addresses in the store.
    store = dist.PrefixStore(f"normscope, restart {process.restarts}, {next(_joins)}", store)  # type: ignore[attr-defined]
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


def merge_left_out(left_out: LeftOut, ranks: Ranks) -> LeftOut:
    """Return the omissions of all ranks."""
    merged = LeftOut()
    for unreadable, cut in ranks.gather([list(left_out.unreadable.items()), left_out.cut]):
        merged.add(LeftOut(dict(unreadable), cut))
    return merged


def check_alike(ranks: Ranks, settings: Mapping[str, Any]) -> None:
    """Refuse ranks that were asked for different things; DataError on all of them."""
    settings = json.loads(json.dumps(settings, default=methodcaller("item")))  # numbers of NumPy and torch
    for rank, theirs in enumerate(ranks.gather(settings)):
        for name, value in settings.items():
            if theirs.get(name) != value:
                raise DataError(
                    f"Rank {rank} sees another {name} than rank {ranks.rank}: {theirs.get(name)!r:.80}, not "
                    f"{value!r:.80}. All hosts need the same files and the same options."
                )
