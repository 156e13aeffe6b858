"""Inputs that have numbers: which of them are taken, in which order and chunks, and reading ahead."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from normscope.errors import DataError, UsageError
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.loaded_model import LoadOptions
from normscope.inputs.previews import Normalized, Preview, Words, preview_of
from normscope.inputs.splits import ALL, Chunk, LeftOut, Share

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
            chunk = next(chunks, None)
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker"):
                raise
            raise DataError(
                f"A process that reads inputs has ended before its work: {str(error).rstrip('.')}. Memory, or shared "
                "memory (/dev/shm), may have run out: take fewer workers, or smaller batches."
            ) from error
        if chunk is None:
            return
        yield chunk


class _Chunks(Dataset[Chunk]):
    def __init__(self, read: Callable[[Sequence[int]], Chunk]) -> None:
        self._read = read

    def __getitem__(self, numbers: Sequence[int]) -> Chunk:
        return self._read(numbers)


def _as_it_is(chunk: Any) -> Any:
    return chunk


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


class NumberedInputs(ABC):
    """Inputs of which any can be had at any time by its number; see :class:`normscope.inputs.splits.DivisibleInputs`.

    Attributes:
        order: the numbers of those that are taken, in the order in which they are.
        left_out: what the latest iteration could not read, or has cut.
        normalized_by: mean and standard deviation of each channel that pixels from 0 to 1 were normalized by; None
            where there are no pixels, or nothing tells.
        words: from token ids to what they stand for; None where there is no text, or nothing tells.
    """

    order: Sequence[int]
    left_out: LeftOut
    normalized_by: Normalized | None = None
    words: Words | None = None

    def __init__(self, total: int, options: LoadOptions, *, one_by_one: bool = False) -> None:
        """Choose among ``total`` inputs.

        Args:
            total: how many the data set holds.
            options: ``limit``, ``shuffle``, ``seed`` and those that say how to batch are read.
            one_by_one: whether each is a chunk of its own, whatever ``batch_size`` is set to.
        """
        self.order = drawn(total, options)
        self.left_out = LeftOut()
        self._total, self._options, self._one_by_one = total, options, one_by_one
        self._batch_size = options.batch_size
        self._tried, self._read_as = "inputs", ""  # in the sentence that none of them can be

    @property
    def batch_size(self) -> int:
        """Number of inputs read together, at most; setting it has no effect where that is always one."""
        return 1 if self._one_by_one else self._batch_size

    @batch_size.setter
    def batch_size(self, number: int) -> None:
        self._batch_size = number

    @property
    def n_inputs(self) -> int:
        """Number of inputs taken."""
        return len(self.order)

    @property
    def n_samples(self) -> int:
        """Number of samples to try."""
        return len(self.order)

    @property
    def unreadable(self) -> list[str]:
        """``name: reason`` of each input that the latest iteration could not read, in order of their numbers."""
        return self.left_out.lines

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of all inputs.

        Raises:
            DataError: at the end, if not one input could be read.
        """
        for chunk in self.chunks(ALL):
            yield from chunk.batches
        if len(self.left_out.unreadable) == len(self.order):
            raise self._none_readable(self.left_out)

    def chunks(self, share: Share) -> Iterator[Chunk]:
        """Yield the chunks of one process's share, and note in ``left_out`` what of them could not be read."""
        self.left_out = left_out = LeftOut()
        for chunk in self._made(share.of(in_pieces(share.left(self.order), self._at_once()))):
            left_out.add(chunk)
            yield chunk

    def first_sample(self) -> Batch:
        """Return the first sample that can be read, whoever's share it is in.

        Raises:
            DataError: if there is none.
        """
        left_out = LeftOut()
        for number in self.order:
            chunk = self._alone(number)
            for batch in chunk.batches:
                return batch.first_sample()
            left_out.add(chunk)
        raise self._none_readable(left_out)

    def preview(self, batch: Batch, place: int) -> Preview | None:
        """Return what can be looked at of a sample of one of these batches; None where there is nothing."""
        return preview_of(batch, place, self.normalized_by, self.words)

    @abstractmethod
    def _made(self, plan: Iterator[list[int]]) -> Iterator[Chunk]:
        """Yield the chunk of each list of numbers, on the model's device and in its dtype."""

    def _alone(self, number: int) -> Chunk:
        return next(self._made(iter([[number]])))

    def _at_once(self) -> int:
        """Return how many inputs a chunk has."""
        return self.batch_size

    def _none_readable(self, left_out: LeftOut) -> DataError:
        return DataError(f"None of the {self._tried} can be read{self._read_as}. The first is {left_out.lines[0]}.")

    def _taken_of(self, total: str) -> str:
        """Say which of all inputs are taken, ``total`` saying how many of what there are."""
        number, seed = len(self.order), self._options.seed
        if number == self._total:
            return f"{total}, shuffled with seed {seed}" if self._options.shuffle else total
        if self._options.shuffle:
            return f"{number:,} of {total}, drawn with seed {seed}"
        return f"the first {number:,} of {total}"


class ReadInputs(NumberedInputs):
    """Numbered inputs that are read, without the network: ahead of it, in processes of their own where asked for.

    Attributes:
        kept: whether they lie in memory, so that reading them is no work for another process.
    """

    kept = False

    @abstractmethod
    def read(self, numbers: Sequence[int]) -> Chunk:
        """Return a chunk on the CPU, the same in any process and after any other one; its batches are a list."""

    @abstractmethod
    def known_samples(self) -> Iterator[Sample]:
        """Yield all samples that are taken, in order, without reading: also of inputs that turn out unreadable."""

    def _described(self, name: str, total: str, before: Sequence[str], after: Sequence[str]) -> str:
        """Say which inputs are taken, and between other remarks how many could not be read."""
        unreadable = len(self.left_out.unreadable)
        remarks = [*before, *([f"{unreadable:,} unreadable"] if unreadable else []), *after]
        return f"{name}: {self._taken_of(total)}" + (f" ({', '.join(remarks)})" if remarks else "")

    def _made(self, plan: Iterator[list[int]]) -> Iterator[Chunk]:
        chunks = -(-len(self.order) // self.batch_size)
        workers = 0 if self.kept else number_of_workers(self._options, chunks)
        for chunk in read_ahead(self.read, plan, workers, self._options.device):
            yield self._placed(chunk)

    def _alone(self, number: int) -> Chunk:
        return self._placed(self.read([number]))

    def _placed(self, chunk: Chunk) -> Chunk:
        return replace(chunk, batches=[batch.to(self._options.device, self._options.dtype) for batch in chunk.batches])


def drawn(total: int, options: LoadOptions) -> Sequence[int]:
    """Return which of ``total`` inputs are taken, in which order.

    Args:
        total: how many there are.
        options: with ``shuffle`` the order is that of torch.randperm under ``seed``; the first ``limit`` are taken.

    >>> options = LoadOptions("random", None, 3, 8, 0, torch.device("cpu"), torch.float32)
    >>> drawn(5, options), list(drawn(5, replace(options, shuffle=True)))
    (range(0, 3), [4, 0, 1])
    """
    if not options.shuffle:
        return range(total)[: options.limit]
    order = torch.randperm(total, generator=torch.Generator().manual_seed(options.seed))
    return array("q", order[: options.limit].tolist())


def in_pieces(numbers: Iterable[int], size: int) -> Iterator[list[int]]:
    """Cut numbers into lists of ``size``; the last has the rest.

    >>> list(in_pieces(range(5), 2))
    [[0, 1], [2, 3], [4]]
    """
    remaining = iter(numbers)
    while piece := list(islice(remaining, size)):
        yield piece
