"""Reading ahead of the network: torch's DataLoader over chunks of inputs, in other processes where asked for."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from normscope.errors import DataError, UsageError
from normscope.models.base import LoadOptions
from normscope.shares import Chunk

MOST_BY_DEFAULT = 8  # processes that read for one GPU


def number_of_workers(options: LoadOptions, chunks: int) -> int:
    """Return how many processes read, 0 for the one that runs the network; never more than there are chunks.

    Unless told: none where the network runs on the CPU, whose cores compute already; otherwise as many as there are
    cores for each of the processes that torchrun has started on this machine, 8 at most.

    Raises:
        UsageError: if there is to be one, and this system cannot fork.
    """
    can_fork = "fork" in multiprocessing.get_all_start_methods()
    if options.workers and not can_fork:
        raise UsageError(f"workers is {options.workers}, and this system cannot fork processes. Leave workers out.")
    if options.workers is not None:
        return min(options.workers, chunks)
    if options.device.type != "cuda" or not can_fork:
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    mine = cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(MOST_BY_DEFAULT, max(mine, 1), chunks)


def read_ahead(
    read: Callable[[Sequence[int]], Chunk], plan: Iterator[list[int]], workers: int, device: torch.device
) -> Iterator[Chunk]:
    """Yield what ``read`` makes of each entry of a plan, in its order, whatever the number of workers.

    Args:
        read: from the numbers of some inputs to their chunk, on the CPU; runs in forked processes.
        plan: the numbers of each chunk.
        workers: how many processes read, each two chunks ahead; 0 reads in this one, when a chunk is asked for.
        device: that the chunks go to next; for CUDA they come in pinned memory.

    Raises:
        DataError: if a worker ends before its work does.
    """
    with _signals_as_they_were(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores, as was asked for
        loader = DataLoader(
            _Chunks(read),
            batch_size=None,
            sampler=plan,
            num_workers=workers,
            collate_fn=_as_it_is,
            pin_memory=device.type == "cuda",
            worker_init_fn=_ignore_signals,
            multiprocessing_context="fork" if workers else None,
            generator=torch.Generator(),  # a seed is drawn, and not from the caller's random numbers
        )
        chunks = iter(loader)
    while True:
        try:
            made = next(chunks, None)
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker"):
                raise
            raise DataError(
                f"A process that reads inputs has ended before its work: {str(error).rstrip('.')}. Memory, or shared "
                "memory (/dev/shm), may have run out: take fewer workers, or smaller batches."
            ) from error
        if made is None:
            return
        yield made.chunk


@dataclass(frozen=True)
class _Made:
    """A chunk that the DataLoader can pin."""

    chunk: Chunk

    def pin_memory(self) -> _Made:
        return _Made(replace(self.chunk, batches=[batch.pin_memory() for batch in self.chunk.batches]))


class _Chunks(Dataset[_Made]):
    def __init__(self, read: Callable[[Sequence[int]], Chunk]) -> None:
        self._read = read

    def __getitem__(self, numbers: Sequence[int]) -> _Made:
        return _Made(self._read(numbers))


def _as_it_is(made: Any) -> Any:
    return made


def _ignore_signals(worker: int) -> None:
    """Leave it to the main process to end: a terminal and a batch system signal all processes at once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@contextmanager
def _signals_as_they_were() -> Iterator[None]:
    """Undo torch's handler for dead children, which raises wherever the program is; asking for a chunk sees it too."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGCHLD"):
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)
