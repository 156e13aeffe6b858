"""Map-style datasets of inputs: selection, order, reading by PyTorch's DataLoader, and collating."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import warnings
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from normscope.errors import DataError, UsageError, count
from normscope.inputs.batch import Batch, Sample, joined, tensors_at
from normscope.inputs.chunks import Chunk, Inputs, LeftOut, RankSampler
from normscope.inputs.loaded_model import LoadOptions
from normscope.inputs.previews import Normalized, Words
from normscope.runtime.files import CHECKPOINT

MOST_BY_DEFAULT = 8  # processes that read for one GPU

# A tensor without an axis of samples, or a batch of one sample; a pair also contains 1 if it was truncated, else 0.
Content = Tensor | Batch | tuple[Tensor | Batch, int]


@dataclass(frozen=True)
class Item:
    """One input as a dataset reads it."""

    number: int
    content: Any = None  # what InputDataset.batches collates; None if unreadable
    cut: int = 0  # number of its truncated samples
    unreadable: str = ""  # its name and the reason; empty if it could be read


class InputDataset(Inputs, Dataset[Item]):
    """Map-style dataset of inputs by number, and the DataLoader that reads and collates them.

    Attributes:
        order: numbers of the selected inputs, in order.
        batch_size: number of inputs that are read together.
    """

    reads_files = False  # in other processes, ahead of the network
    noun = "input"  # in errors
    read_as = ""  # in errors: a clause on how an input is read

    def __init__(
        self,
        total: int,
        options: LoadOptions,
        *,
        one_by_one: bool = False,
        name: str = "",
        of: str = "",
        remarks: Sequence[str] = (),
        cut_to: str = "",
        n_other: int = 0,
        normalized_by: Normalized | None = None,
        words: Words | None = None,
    ) -> None:
        """Select among ``total`` inputs by the ``limit``, ``shuffle`` and ``seed`` of ``options``.

        With ``one_by_one`` each input is a chunk, for any batch size. Descriptions contain the name of the data, the
        number and kind ``of`` all inputs, remarks, the length that inputs are cut to, and the number of other files.
        """
        self.order = drawn(total, options)
        self.left_out = LeftOut()
        self.batch_size = 1 if one_by_one else options.batch_size
        self.normalized_by, self.words = normalized_by, words
        self._total, self._options, self._name, self._of = total, options, name, of
        self._remarks, self._cut_to, self._n_other = remarks, cut_to, n_other

    @property
    def n_samples(self) -> int:
        return len(self.order) and len(self.order) * len(self.samples(self.order[0]))

    def known_samples(self) -> Iterator[Sample]:
        """Yield the samples of all selected inputs, readable or not."""
        return chain.from_iterable(map(self.samples, self.order))

    @property
    def description(self) -> str:
        """Describe the selected inputs, with remarks and the numbers of truncated and unreadable ones."""
        unreadable, cut = len(self.left_out.unreadable), self.left_out.cut
        remarks = [
            *self._remarks,
            f"{cut:,} cut to {self._cut_to}" if cut else "",
            f"{unreadable:,} unreadable" if unreadable else "",
            f"{count(self._n_other, 'other file')} left out" if self._n_other else "",
        ]
        name, in_parentheses = f"{self._name}: " if self._name else "", ", ".join(filter(None, remarks))
        return name + self._selected_of(self._of) + (f" ({in_parentheses})" if in_parentheses else "")

    def _selected_of(self, total: str) -> str:
        """Describe the selection among all inputs; ``total`` is their number and kind in words."""
        number, seed = len(self.order), self._options.seed
        if number == self._total:
            return f"{total}, shuffled with seed {seed}" if self._options.shuffle else total
        if self._options.shuffle:
            return f"{number:,} of {total}, drawn with seed {seed}"
        return f"the first {number:,} of {total}"

    def __iter__(self) -> Iterator[Batch]:
        yield from super().__iter__()
        if len(self.left_out.unreadable) == len(self.order):
            raise self._none_readable(self.left_out)

    def chunks(self, sampler: RankSampler) -> Iterator[Chunk]:
        self.left_out = left_out = LeftOut()
        for chunk in self._loaded(sampler.groups(self.order, self.batch_size)):
            left_out.add(chunk)
            yield chunk

    def first_sample(self) -> Batch:
        left_out = LeftOut()
        for number in self.order:
            chunk = self.placed(self.collate([self[number]]))
            for batch in chunk.batches:
                return batch.first_sample()
            left_out.add(chunk)
        raise self._none_readable(left_out)

    def __getitem__(self, number: int) -> Item:
        try:
            content = self.load(number)
        except Exception as error:  # the libraries raise nearly anything on a damaged file
            return Item(number, unreadable=f"{self.name_of(number, error)}: {reason(error)}")
        return Item(number, *content) if isinstance(content, tuple) else Item(number, content)

    @abstractmethod
    def samples(self, number: int) -> list[Sample]:
        """Return the samples of an input, without reading it."""

    @abstractmethod
    def load(self, number: int) -> Any:
        """Read an input, on the CPU, the same in any process; in a tuple with the number of its truncated samples."""

    def name_of(self, number: int, error: Exception) -> str:
        """Name an input that raised an error."""
        return self.samples(number)[0].source

    def batches(self, items: Sequence[Item]) -> list[Batch]:
        """Collate inputs that could be read: by default tensors of one shape, or batches of one sample each."""
        contents, samples = [item.content for item in items], [self.samples(item.number)[0] for item in items]
        if isinstance(contents[0], Tensor):
            return [Batch((torch.stack(contents),), samples=tuple(samples))]
        return alike_together(
            [replace(batch, samples=(sample,)) for batch, sample in zip(contents, samples, strict=True)]
        )

    def collate(self, items: Sequence[Item]) -> Chunk:
        readable = [item for item in items if not item.unreadable]
        unreadable = {item.number: item.unreadable for item in items if item.unreadable}
        batches = self.batches(readable) if readable else []
        return Chunk([item.number for item in items], batches, unreadable, sum(item.cut for item in items))

    def placed(self, chunk: Chunk) -> Chunk:
        """Move a chunk to the model's device, in its dtype."""
        return replace(chunk, batches=[batch.to(self._options.device, self._options.dtype) for batch in chunk.batches])

    def _loaded(self, groups: Iterator[list[int]]) -> Iterator[Chunk]:
        """Yield the chunk of each list of numbers; each worker, a forked process, reads two chunks ahead.

        DataError if a worker ends early.
        """
        n_chunks = -(-len(self.order) // self.batch_size)
        n_workers = number_of_workers(self._options, n_chunks) if self.reads_files else 0
        with warnings.catch_warnings():
            # More workers than cores, as the user asked for.
            warnings.filterwarnings("ignore", "This DataLoader will create")
            loader = DataLoader(
                self,
                batch_sampler=groups,
                num_workers=n_workers,
                collate_fn=self.collate,
                pin_memory=n_workers > 0 and self._options.device.type == "cuda",
                worker_init_fn=_ignore_signals,
                multiprocessing_context="fork" if n_workers else None,
                generator=torch.Generator(),  # a seed is drawn, and not from the caller's random numbers
            )
            chunks = iter(loader)
        try:
            yield from map(self.placed, chunks)
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker"):
                raise
            raise DataError(
                f"A process that reads inputs has ended before its work: {str(error).rstrip('.')}. Memory, or shared "
                "memory (/dev/shm), may have run out: take fewer workers, or smaller batches."
            ) from error

    def _none_readable(self, left_out: LeftOut) -> DataError:
        tried = f"{count(len(self.order), self.noun)} tried at {self._name!r} can be read{self.read_as}"
        return DataError(f"None of the {tried}. The first is {left_out.lines[0]}.")


class InMemory(InputDataset):
    """Samples that are kept in memory."""

    def __init__(
        self, contents: Sequence[Content], samples: Sequence[Sample], of: str, options: LoadOptions, **described: Any
    ) -> None:
        """Keep all samples of a data set; ``described`` are keyword arguments of :class:`InputDataset`."""
        super().__init__(len(samples), options, of=of, **described)
        self._contents, self._samples = contents, samples

    def samples(self, number: int) -> list[Sample]:
        return [self._samples[number]]

    def load(self, number: int) -> Content:
        return self._contents[number]


class Files(InputDataset):
    """The file at ``options.data``, or those of a folder in sorted order, each a source of its own.

    Attributes:
        root: file or folder.
        paths: all files of the data set.
        classes: class number of each sub-folder of the root, if known.
    """

    reads_files = True
    noun = "file"

    def __init__(
        self,
        kind: str,
        suffixes: frozenset[str],
        read: Callable[[Path], Content],
        options: LoadOptions,
        *,
        beside: str = "",
        **described: Any,
    ) -> None:
        """Find the files of a ``kind``, a noun, by their suffixes, without opening them; DataError if there is none.

        ``read`` makes a file unreadable by any exception. It may read a file of the same name with the suffix
        ``beside`` too. ``described`` are keyword arguments of :class:`InputDataset`.
        """
        self.root, self._read = Path(str(options.data)), read
        self.read_as = f" as {'an' if kind[0] in 'aeiou' else 'a'} {kind}"
        self.classes: Mapping[str, int] = {}
        self.paths, n_other = find_files(self.root, kind, suffixes)
        companions = [path.with_suffix(beside) for path in self.paths] if beside and self.root.is_dir() else []
        companions = [path for path in companions if path.is_file()]
        n_other -= len(set(companions))
        self._data = listing_digest(self.root, self.paths + companions)
        n_files = len(self.paths)
        super().__init__(n_files, options, name=str(self.root), of=count(n_files, kind), n_other=n_other, **described)

    def samples(self, number: int) -> list[Sample]:
        name = name_in(self.root, self.paths[number])
        return [Sample(name, number, number, self._data, self.classes.get(name.partition("/")[0]))]

    def load(self, number: int) -> Content:
        return self._read(self.paths[number])


def number_of_workers(options: LoadOptions, chunks: int) -> int:
    """Return the number of processes that read, at most one per chunk; 0 for the one that runs the network.

    By default 0 on the CPU, whose cores compute already; otherwise the number of cores per process that torchrun has
    started on this machine, at most 8. UsageError if workers are requested where the system cannot fork.
    """
    can_fork = "fork" in multiprocessing.get_all_start_methods()
    if options.workers and not can_fork:
        raise UsageError(f"workers is {options.workers}, and this system cannot fork processes. Leave workers out.")
    if options.workers is not None:
        return min(options.workers, chunks)
    if options.device.type != "cuda" or not can_fork:
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores_per_rank = cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(MOST_BY_DEFAULT, max(cores_per_rank, 1), chunks)


def _ignore_signals(worker: int) -> None:
    """Let the main process end its workers: terminals and batch systems signal all processes at once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def drawn(total: int, options: LoadOptions) -> Sequence[int]:
    """Return the numbers of the selected inputs among ``total``, in order: the first ``options.limit``.

    With ``options.shuffle`` the order is that of torch.randperm under ``options.seed``.

    >>> options = LoadOptions("random", None, 3, 8, 0, torch.device("cpu"), torch.float32)
    >>> drawn(5, options), list(drawn(5, replace(options, shuffle=True)))
    (range(0, 3), [4, 0, 1])
    """
    if not options.shuffle:
        return range(total)[: options.limit]
    order = torch.randperm(total, generator=torch.Generator().manual_seed(options.seed))
    return array("q", order[: options.limit].tolist())


def alike_together(samples: Sequence[Batch]) -> list[Batch]:
    """Join batches of one sample and one shape, so that none is padded.

    >>> samples = [Batch((torch.zeros(1, 3, 4, width),), samples=(Sample("a", 0, 0),)) for width in (6, 8, 6)]
    >>> [len(batch.samples) for batch in alike_together(samples)]
    [2, 1]
    """
    groups: dict[Any, list[Batch]] = {}
    for sample in samples:
        shapes = tuple((path, tensor.shape) for path, tensor in tensors_at([sample.args, sample.kwargs]))
        groups.setdefault(shapes, []).append(sample)
    return [batch for group in groups.values() for batch in joined(group)]


def text_beside(path: Path) -> str | None:
    """Return the content of the text file of the same name as one line, or None; DataError if it is no UTF-8."""
    beside = path.with_suffix(".txt")
    if not beside.is_file():
        return None
    try:
        return " ".join(beside.read_text(encoding="utf-8-sig").split())
    except UnicodeDecodeError as error:
        raise DataError(f"{beside.name} is not UTF-8") from error


def listing_digest(root: Path, paths: Iterable[Path]) -> str:
    """Identify a data set by its files' names and sizes, in any folder and for any part of it."""
    digest = hashlib.blake2b(digest_size=8)
    for path in paths:
        size = path.stat().st_size if path.exists() else None  # of a link to nothing
        digest.update(f"{name_in(root, path)}\0{size}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def find_files(root: Path, noun: str, suffixes: frozenset[str]) -> tuple[list[Path], int]:
    """Return the files at ``root`` with these suffixes, or the one that it is, and the number of other files.

    Broken links count, and turn out unreadable. Hidden files, and an unfinished capture's, do not: they come and go.

    Raises:
        DataError: if ``root`` is missing, or a folder without a single such file.
    """
    if root.is_file():
        return [root], 0
    if not root.is_dir():
        raise DataError(f"There is no file or folder {str(root)!r} to read {noun}s from.")

    def temporary(path: Path) -> bool:
        return any(name.startswith(".") or name.endswith(CHECKPOINT) for name in path.relative_to(root).parts)

    files = sorted((path for path in root.rglob("*") if not path.is_dir() and not temporary(path)), key=Path.as_posix)
    matching = [path for path in files if path.suffix.lower() in suffixes]
    n_other = len(files) - len(matching)
    if not matching:
        only = f", only {count(n_other, 'other file')}" if n_other else ""
        raise DataError(f"The folder {str(root)!r} contains no {noun}{only}.")
    return matching, n_other


def name_in(root: Path, path: Path) -> str:
    """Name a file within the folder or file that the user named."""
    return path.relative_to(root if root.is_dir() else root.parent).as_posix()


def reason(error: Exception) -> str:
    """Return the library's own words for why a file cannot be read."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
