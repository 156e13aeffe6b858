"""Inputs of every family: tensors that are kept, and files that are opened batch by batch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from normscope.batches import Batch, Sample
from normscope.errors import DataError, count
from normscope.models.base import LoadOptions


@dataclass
class TensorInputs:
    """Samples that are small and few enough to be kept.

    Attributes:
        tensors: one for each sample, without an axis for samples; of one shape, unless batches hold one sample.
        samples: one for each tensor.
        unreadable: empty; nothing can go wrong any more.
    """

    tensors: Sequence[Tensor]
    samples: list[Sample]
    description: str
    options: LoadOptions
    unreadable: list[str] = field(default_factory=list)

    @property
    def n_samples(self) -> int:
        """How many samples there are."""
        return len(self.samples)

    def __iter__(self) -> Iterator[Batch]:
        return batches(zip(self.samples, self.tensors, strict=True), self.options)


class LazyInputs:
    """Inputs that are read when something is first asked of them, and not when the model is loaded.

    Attributes:
        unreadable: empty; they lie in this package.
    """

    def __init__(self, read: Callable[[], TensorInputs]) -> None:
        self._read = cache(read)
        self.unreadable: list[str] = []

    @property
    def description(self) -> str:
        """Say what was read."""
        return self._read().description

    @property
    def n_samples(self) -> int:
        """How many samples there are."""
        return self._read().n_samples

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._read())


@dataclass(frozen=True)
class FileKind:
    """What files a model takes.

    Attributes:
        noun: what messages call one of them: ``image``.
        suffixes: of file names, lower case with the dot; how a folder's other files are told apart.
        read: from a path to the sample's tensor; whatever it raises makes the file unreadable.
    """

    noun: str
    suffixes: frozenset[str]
    read: Callable[[Path], Tensor]


class Files:
    """One file, or those of a folder in sorted order; opened batch by batch, each a source of its own.

    Attributes:
        paths: the files to read.
        unreadable: ``name: reason`` for each that the latest iteration could not open.
    """

    def __init__(self, root: Path, kind: FileKind, options: LoadOptions) -> None:
        """Find the files at ``root`` without opening them.

        Raises:
            DataError: if ``root`` is missing, or a folder without a single file of that kind.
        """
        found, self._left_out = find_files(root, kind.noun, kind.suffixes)
        self.root, self.kind = root, kind
        self.paths = found[: options.limit]
        self.unreadable: list[str] = []
        self._found = len(found)
        self._data = listing_digest(root, found)
        self._options = options

    @property
    def description(self) -> str:
        """Say how many files were read, could not be read, and were not looked at."""
        files = count(len(self.paths), self.kind.noun)
        if len(self.paths) < self._found:
            files = f"the first {len(self.paths)} of {count(self._found, self.kind.noun)}"
        remarks = []
        if self.unreadable:
            remarks.append(f"{len(self.unreadable)} unreadable")
        if self._left_out:
            remarks.append(f"{count(self._left_out, 'other file')} left out")
        return f"{self.root}: {files}" + (f" ({', '.join(remarks)})" if remarks else "")

    @property
    def n_samples(self) -> int:
        """How many files there are to try."""
        return len(self.paths)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the files that can be read.

        Raises:
            DataError: at the end, if none of them could.
        """
        self.unreadable = []
        yield from batches(self._readable(), self._options)
        if len(self.unreadable) == len(self.paths):
            article = "an" if self.kind.noun[0] in "aeiou" else "a"
            raise DataError(
                f"None of the {count(len(self.paths), 'file')} tried at {str(self.root)!r} can be read as "
                f"{article} {self.kind.noun}. The first is {self.unreadable[0]}."
            )

    def _readable(self) -> Iterator[tuple[Sample, Tensor]]:
        for index, path in enumerate(self.paths):
            name = name_in(self.root, path)
            try:
                tensor = self.kind.read(path)
            except Exception as error:  # the libraries raise nearly anything on a damaged file
                self.unreadable.append(f"{name}: {reason(error)}")
                continue
            yield Sample(name, source_index=index, index=index, data=self._data), tensor


def batches(samples: Iterable[tuple[Sample, Tensor]], options: LoadOptions) -> Iterator[Batch]:
    """Stack tensors of one shape, at most ``options.batch_size`` to a batch, on the model's device, in its dtype."""
    remaining = iter(samples)
    while chunk := list(islice(remaining, options.batch_size)):
        own, tensors = zip(*chunk, strict=True)
        yield Batch((torch.stack(tensors),), samples=own).to(options.device, options.dtype)


def listing_digest(root: Path, paths: Iterable[Path]) -> str:
    """Tell a data set from others by its files' names and sizes, wherever it lies and whatever part is taken."""
    digest = hashlib.blake2b(digest_size=8)
    for path in paths:
        digest.update(f"{name_in(root, path)}\0{path.stat().st_size}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def find_files(root: Path, noun: str, suffixes: frozenset[str]) -> tuple[list[Path], int]:
    """Return the files at ``root`` whose names end so, and how many others there are; a single file in any case.

    Raises:
        DataError: if ``root`` is missing, or a folder without a single such file.
    """
    if root.is_file():
        return [root], 0
    if not root.is_dir():
        raise DataError(f"There is no file or folder {str(root)!r} to read {noun}s from.")
    files = sorted((path for path in root.rglob("*") if path.is_file()), key=Path.as_posix)
    found = [path for path in files if path.suffix.lower() in suffixes]
    if not found:
        raise DataError(f"The folder {str(root)!r} holds no {noun}, only {count(len(files), 'other file')}.")
    return found, len(files) - len(found)


def name_in(root: Path, path: Path) -> str:
    """Name a file within the folder or file that the user named."""
    return path.relative_to(root if root.is_dir() else root.parent).as_posix()


def reason(error: Exception) -> str:
    """Say in a few words why a file cannot be read."""
    match error:
        case OSError(strerror=str(reason)):
            return reason
        case _:
            return str(error) or type(error).__name__
