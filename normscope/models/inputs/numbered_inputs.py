"""Datasets of inputs: selection, order, reading by PyTorch's DataLoader, and collating."""

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
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from normscope.errors import DataError, UsageError, count
from normscope.inputs.batch import Batch, Sample, joined, tensors_at
from normscope.inputs.chunks import Chunk, Inputs, LeftOut, Share
from normscope.inputs.loaded_model import LoadOptions
from normscope.inputs.previews import Normalized, Words
from normscope.runtime.files import CHECKPOINT

MOST_BY_DEFAULT = 8  # processes that read for one GPU


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
    mine = cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(MOST_BY_DEFAULT, max(mine, 1), chunks)


def _ignore_signals(worker: int) -> None:
    """Let the main process end its workers: terminals and batch systems signal all processes at once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@dataclass(frozen=True)
class Item:
    """One input as a dataset reads it.

    Attributes:
        number: of the input.
        content: what :meth:`InputDataset.batches` makes batches of; None if unreadable.
        cut: number of its truncated samples.
        unreadable: its name and the reason; empty if it could be read.
    """

    number: int
    content: Any
    cut: int = 0
    unreadable: str = ""


class InputDataset(Inputs, Dataset[Item]):
    """Map-style dataset of inputs by number, and the DataLoader that reads and collates them.

    Attributes:
        order: numbers of the selected inputs, in order.
        in_memory: True if reading is no work for another process.
        by_network: True if the network itself makes its inputs, on its device and in its dtype, in :meth:`read`.
    """

    order: Sequence[int]
    in_memory = False
    by_network = False

    def __init__(
        self,
        total: int,
        options: LoadOptions,
        *,
        one_by_one: bool = False,
        at: str = "",
        noun: str = "input",
        of: str = "",
        remarks: Sequence[str] = (),
        cut_to: str = "",
        besides: Sequence[str] = (),
    ) -> None:
        """Select among ``total`` inputs by the ``limit``, ``shuffle`` and ``seed`` of ``options``.

        With ``one_by_one`` each input is a chunk, for any ``batch_size``. All others are for descriptions and errors:
        name of the data, word for an input, number and kind of all, length of truncated ones, and remarks.
        """
        self.order = drawn(total, options)
        self.left_out = LeftOut()
        self.batch_size = 1 if one_by_one else options.batch_size
        self._total, self._options, self._at, self._of, self._cut_to = total, options, at, of, cut_to
        self._remarks, self._besides, self._read_as = remarks, besides, ""
        self._tried = f"{count(len(self.order), noun)} tried at {at!r}"

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
        counted = [f"{cut:,} cut to {self._cut_to}" if cut else "", f"{unreadable:,} unreadable" if unreadable else ""]
        remarks = ", ".join(filter(None, [*self._remarks, *counted, *self._besides]))
        at = f"{self._at}: " if self._at else ""
        return at + self._taken_of(self._of) + (f" ({remarks})" if remarks else "")

    def __iter__(self) -> Iterator[Batch]:
        yield from super().__iter__()
        if len(self.left_out.unreadable) == len(self.order):
            raise self._none_readable(self.left_out)

    def chunks(self, share: Share) -> Iterator[Chunk]:
        self.left_out = left_out = LeftOut()
        for chunk in self._loaded(share.of(in_pieces(share.left(self.order), self._at_once()))):
            left_out.add(chunk)
            yield chunk

    def first_sample(self) -> Batch:
        left_out = LeftOut()
        for number in self.order:
            chunk = self._placed(self.read([number]))
            for batch in chunk.batches:
                return batch.first_sample()
            left_out.add(chunk)
        raise self._none_readable(left_out)

    def __getitem__(self, number: int) -> Item:
        try:
            content, cut = self.load(number)
        except Exception as error:  # the libraries raise nearly anything on a damaged file
            return Item(number, None, unreadable=f"{self.name(number, error)}: {reason(error)}")
        return Item(number, content, cut)

    @abstractmethod
    def samples(self, number: int) -> list[Sample]:
        """Return the samples of an input, without reading it."""

    def load(self, number: int) -> tuple[Any, int]:
        """Read an input, on the CPU, the same in any process; also return the number of its truncated samples."""
        raise NotImplementedError

    def name(self, number: int, error: Exception) -> str:
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

    def read(self, numbers: Sequence[int]) -> Chunk:
        return self.collate([self[number] for number in numbers])

    def _loaded(self, plan: Iterator[list[int]]) -> Iterator[Chunk]:
        """Yield the chunk of each list of numbers, on the model's device and in its dtype.

        Each worker, a forked process, reads two chunks ahead. DataError if one ends early.
        """
        if self.by_network:
            yield from map(self.read, plan)
            return
        workers = 0 if self.in_memory else number_of_workers(self._options, -(-len(self.order) // self._at_once()))
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "This DataLoader will create"
            )  # more workers than cores, as was asked for
            loader = DataLoader(
                self,
                batch_sampler=plan,
                num_workers=workers,
                collate_fn=self.collate,
                pin_memory=self._options.device.type == "cuda",
                worker_init_fn=_ignore_signals,
                multiprocessing_context="fork" if workers else None,
                generator=torch.Generator(),  # a seed is drawn, and not from the caller's random numbers
            )
            chunks = iter(loader)
        try:
            yield from map(self._placed, chunks)
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker"):
                raise
            raise DataError(
                f"A process that reads inputs has ended before its work: {str(error).rstrip('.')}. Memory, or shared "
                "memory (/dev/shm), may have run out: take fewer workers, or smaller batches."
            ) from error

    def _placed(self, chunk: Chunk) -> Chunk:
        if self.by_network:
            return chunk
        return replace(chunk, batches=[batch.to(self._options.device, self._options.dtype) for batch in chunk.batches])

    def _at_once(self) -> int:
        return self.batch_size  # inputs of a chunk

    def _none_readable(self, left_out: LeftOut) -> DataError:
        return DataError(f"None of the {self._tried} can be read{self._read_as}. The first is {left_out.lines[0]}.")

    def _taken_of(self, total: str) -> str:
        """Describe the selection among all inputs; ``total`` is their number and kind in words."""
        number, seed = len(self.order), self._options.seed
        if number == self._total:
            return f"{total}, shuffled with seed {seed}" if self._options.shuffle else total
        if self._options.shuffle:
            return f"{number:,} of {total}, drawn with seed {seed}"
        return f"the first {number:,} of {total}"


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


def in_pieces(numbers: Iterable[int], size: int) -> Iterator[list[int]]:
    """Cut numbers into lists of ``size``; the last has the rest.

    >>> list(in_pieces(range(5), 2))
    [[0, 1], [2, 3], [4]]
    """
    remaining = iter(numbers)
    while piece := list(islice(remaining, size)):
        yield piece


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


# What reading returns: a tensor without an axis for samples, or a batch of one sample; and 1 if it was truncated.
Content = tuple[Tensor | Batch, int]


class InMemory(InputDataset):
    """Samples that are kept in memory."""

    in_memory = True

    def __init__(
        self,
        contents: Sequence[Tensor | Content],
        samples: Sequence[Sample],
        total: str,
        options: LoadOptions,
        *,
        one_by_one: bool = False,
        cut_to: str = "",
    ) -> None:
        """Keep all samples of a data set; ``total`` is their number and kind in words."""
        super().__init__(len(samples), options, one_by_one=one_by_one, of=total, cut_to=cut_to)
        self._contents, self._samples = contents, samples

    def samples(self, number: int) -> list[Sample]:
        return [self._samples[number]]

    def load(self, number: int) -> Content:
        content = self._contents[number]
        return content if isinstance(content, tuple) else (content, 0)


class Files(InputDataset):
    """One file, or those of a folder in sorted order, each a source of its own.

    Attributes:
        paths: all files of the data set.
        classes: class number of each sub-folder of the root, if known.
    """

    def __init__(
        self,
        root: Path,
        read: Callable[[Path], Content],
        options: LoadOptions,
        *,
        noun: str,
        suffixes: frozenset[str],
        beside: str = "",
        remarks: Sequence[str] = (),
        **described: Any,
    ) -> None:
        """Find the files at ``root`` without opening them; DataError if there is none.

        Args:
            root: file or folder.
            read: its exceptions make a file unreadable.
            options: select files.
            noun: singular: ``image``.
            suffixes: of file names, lower case with the dot; other files of a folder are omitted.
            beside: suffix of an optional file of the same name that is read with it.
            remarks: for the description.
            **described: ``one_by_one`` and ``cut_to`` of :class:`InputDataset`.
        """
        self.root, self._read = root, read
        self.classes: Mapping[str, int] = {}
        self.paths, others = find_files(root, noun, suffixes)
        companions = [path.with_suffix(beside) for path in self.paths] if beside else []
        companions = [path for path in companions if path.is_file() and root.is_dir()]
        others -= len(set(companions))
        self._data = listing_digest(root, self.paths + companions)
        super().__init__(
            len(self.paths),
            options,
            at=str(root),
            noun="file",
            of=count(len(self.paths), noun),
            remarks=remarks,
            besides=[f"{count(others, 'other file')} left out"] if others else [],
            **described,
        )
        self._read_as = f" as {'an' if noun[0] in 'aeiou' else 'a'} {noun}"

    def samples(self, number: int) -> list[Sample]:
        name = name_in(self.root, self.paths[number])
        return [Sample(name, number, number, self._data, self.classes.get(name.partition("/")[0]))]

    def load(self, number: int) -> Content:
        return self._read(self.paths[number])


def files_or(
    default: Callable[[], tuple[Sequence[Tensor | Content], Sequence[Sample], str]],
    read: Callable[[Path], Content],
    options: LoadOptions,
    *,
    one_by_one: bool = False,
    cut_to: str = "",
    normalized_by: Normalized | None = None,
    words: Words | None = None,
    **files: Any,
) -> InputDataset:
    """Return the files at ``options.data``, with the keyword arguments of :class:`Files`, or the default inputs."""
    described: dict[str, Any] = {"one_by_one": one_by_one, "cut_to": cut_to}
    inputs: InputDataset
    if options.data is None:
        inputs = InMemory(*default(), options, **described)
    else:
        inputs = Files(Path(options.data), read, options, **described, **files)
    inputs.normalized_by, inputs.words = normalized_by, words
    return inputs


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

    def passing(path: Path) -> bool:
        return any(part.startswith(".") or part.endswith(CHECKPOINT) for part in path.relative_to(root).parts)

    files = sorted((path for path in root.rglob("*") if not path.is_dir() and not passing(path)), key=Path.as_posix)
    matching = [path for path in files if path.suffix.lower() in suffixes]
    others = len(files) - len(matching)
    if not matching:
        only = f", only {count(others, 'other file')}" if others else ""
        raise DataError(f"The folder {str(root)!r} holds no {noun}{only}.")
    return matching, others


def name_in(root: Path, path: Path) -> str:
    """Name a file within the folder or file that the user named."""
    return path.relative_to(root if root.is_dir() else root.parent).as_posix()


def reason(error: Exception) -> str:
    """Reason, in a few words, why a file cannot be read."""
    match error:
        case FileNotFoundError(filename=str() | Path() as name) if Path(name).is_symlink():
            return f"a link to {Path(name).readlink()}, which does not exist"
        case OSError(strerror=str(reason)):
            return reason
        case _:
            return str(error) or type(error).__name__
