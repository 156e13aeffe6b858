"""Inputs of every family: tensors that are kept, and files that are opened batch by batch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normscope.errors import DataError, count
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.loaded_model import LoadOptions
from normscope.inputs.splits import Chunk
from normscope.models.inputs.numbered_inputs import ReadInputs
from normscope.runtime.files import CHECKPOINT


@dataclass(frozen=True)
class Prepared:
    """What a processor made of one input.

    Attributes:
        batch: it alone, without a name.
        cut: whether it was longer than the model takes.
    """

    batch: Batch
    cut: bool = False


def alike_together(samples: Sequence[tuple[Sample, Prepared]]) -> list[Batch]:
    """Put what is of one shape into one batch, so that nothing is padded for another's sake; sizes may differ.

    >>> made = [Prepared(Batch(kwargs={"pixel_values": torch.zeros(1, 3, 4, width)})) for width in (6, 8, 6)]
    >>> [len(batch.samples) for batch in alike_together([(Sample("a", 0, i), one) for i, one in enumerate(made)])]
    [2, 1]
    """
    groups: dict[Any, list[tuple[Sample, Batch]]] = {}
    for sample, prepared in samples:
        parts = [prepared.batch.kwargs, {"": prepared.batch.valid}, prepared.batch.valid_within]
        shapes = [(name, value.shape) for part in parts for name, value in part.items() if isinstance(value, Tensor)]
        groups.setdefault(tuple(shapes), []).append((sample, prepared.batch))
    return [_joined([one for _, one in group], tuple(sample for sample, _ in group)) for group in groups.values()]


def _joined(batches: Sequence[Batch], samples: tuple[Sample, ...]) -> Batch:
    def one(values: Sequence[Any]) -> Any:
        return torch.cat(list(values)) if isinstance(values[0], Tensor) else values[0]

    first = batches[0]
    return Batch(
        kwargs={name: one([batch.kwargs[name] for batch in batches]) for name in first.kwargs},
        samples=samples,
        valid=one([batch.valid for batch in batches]),
        valid_within={name: one([batch.valid_within[name] for batch in batches]) for name in first.valid_within},
    )


class TensorInputs(ReadInputs):
    """Samples that are small and few enough to be kept."""

    kept = True

    def __init__(
        self,
        tensors: Sequence[Tensor | Prepared],
        samples: Sequence[Sample],
        total: str,
        options: LoadOptions,
        *,
        one_by_one: bool = False,
        cut_to: str = "",
    ) -> None:
        """Keep all samples of a data set.

        Args:
            tensors: one for each sample, without an axis for samples; of one shape, unless batches hold one sample. Or
                what a processor made of each.
            samples: one for each tensor.
            total: how many of what there are.
            options: which of them are taken, in which order and batches, on which device and in which dtype.
            one_by_one: whether batches hold one sample, whatever ``options.batch_size`` says.
            cut_to: how much is left of one that is longer than the model takes.
        """
        super().__init__(len(samples), options, one_by_one=one_by_one)
        self._tensors, self._samples, self._all, self._cut_to = tensors, samples, total, cut_to

    @property
    def description(self) -> str:
        """Say which samples of how many are taken, and how many are cut."""
        cut = f" ({self.left_out.cut:,} cut to {self._cut_to})" if self.left_out.cut else ""
        return self._taken_of(self._all) + cut

    def read(self, numbers: Sequence[int]) -> Chunk:
        """Stack the tensors of some samples."""
        return _chunk(numbers, [(self._samples[i], self._tensors[i]) for i in numbers], {})

    def known_samples(self) -> Iterator[Sample]:
        """Yield the samples that are taken."""
        return (self._samples[number] for number in self.order)


class LazyInputs(TensorInputs):
    """Samples that are read when something is first asked of them, and not when the model is loaded."""

    def __init__(self, read: Callable[[], TensorInputs]) -> None:
        self._read = read

    def __getattr__(self, name: str) -> Any:
        """Become what is read; called for what is not set yet, which is all of it before."""
        if "_read" not in vars(self):
            raise AttributeError(f"{type(self).__name__} has no {name}.")
        vars(self).update({**vars(self._read()), **vars(self)})
        del self._read
        return getattr(self, name)


@dataclass(frozen=True)
class FileKind:
    """The files that a model takes.

    Attributes:
        noun: what messages call one of them: ``image``.
        suffixes: of file names, lower case with the dot; how a folder's other files are told apart.
        read: from a path to the sample's tensor, or to what a processor made of it; whatever it raises makes the file
            unreadable.
        cut_to: how much is left of one that is longer than the model takes.
        beside: suffix of a file of the same name that is read with it, where it is there.
        remarks: what the description says besides.
    """

    noun: str
    suffixes: frozenset[str]
    read: Callable[[Path], Tensor | Prepared]
    cut_to: str = ""
    beside: str = ""
    remarks: tuple[str, ...] = ()


class Files(ReadInputs):
    """One file, or those of a folder in sorted order; opened batch by batch, each a source of its own.

    Attributes:
        paths: all that there are.
        classes: the number of the class that each sub-folder of the root holds, where that is known.
    """

    def __init__(self, root: Path, kind: FileKind, options: LoadOptions, *, one_by_one: bool = False) -> None:
        """Find the files at ``root`` without opening them.

        Raises:
            DataError: if ``root`` is missing, or a folder without a single file of that kind.
        """
        self.root, self.kind = root, kind
        self.classes: Mapping[str, int] = {}
        self.paths, self._others = find_files(root, kind.noun, kind.suffixes)
        companions = [path.with_suffix(kind.beside) for path in self.paths] if kind.beside else []
        companions = [path for path in companions if path.is_file() and root.is_dir()]
        self._others -= len(set(companions))
        self._data = listing_digest(root, self.paths + companions)
        super().__init__(len(self.paths), options, one_by_one=one_by_one)
        self._tried = f"{count(len(self.order), 'file')} tried at {str(root)!r}"
        self._read_as = f" as {'an' if kind.noun[0] in 'aeiou' else 'a'} {kind.noun}"

    @property
    def description(self) -> str:
        """Say how many files were read, could not be read, and were not looked at."""
        others = [f"{count(self._others, 'other file')} left out"] if self._others else []
        cut = [f"{self.left_out.cut:,} cut to {self.kind.cut_to}"] if self.left_out.cut else []
        files = count(len(self.paths), self.kind.noun)
        return self._described(str(self.root), files, [*self.kind.remarks, *cut], others)

    def read(self, numbers: Sequence[int]) -> Chunk:
        """Open some files, and stack what can be read of them."""
        samples, unreadable = [], {}
        for number in numbers:
            try:
                samples.append((self._sample(number), self.kind.read(self.paths[number])))
            except Exception as error:  # the libraries raise nearly anything on a damaged file
                unreadable[number] = f"{name_in(self.root, self.paths[number])}: {reason(error)}"
        return _chunk(numbers, samples, unreadable)

    def known_samples(self) -> Iterator[Sample]:
        """Yield a sample for each file that is taken, readable or not."""
        return map(self._sample, self.order)

    def _sample(self, number: int) -> Sample:
        name = name_in(self.root, self.paths[number])
        return Sample(name, number, number, self._data, self.classes.get(name.partition("/")[0]))


def _chunk(numbers: Sequence[int], samples: Sequence[tuple[Sample, Any]], unreadable: dict[int, str]) -> Chunk:
    """Put samples into batches: tensors, which are of one shape, or what a processor made."""
    if not samples:
        return Chunk(numbers, [], unreadable)
    if isinstance(samples[0][1], Prepared):
        cut = sum(prepared.cut for _, prepared in samples)
        return Chunk(numbers, alike_together(samples), unreadable, cut)
    records, tensors = zip(*samples, strict=True)
    return Chunk(numbers, [Batch((torch.stack(tensors),), samples=records)], unreadable)


def text_beside(path: Path) -> str | None:
    """Return what stands in the text file of the same name, as one line; None where there is none.

    Raises:
        DataError: if it is no UTF-8.
    """
    beside = path.with_suffix(".txt")
    if not beside.is_file():
        return None
    try:
        return " ".join(beside.read_text(encoding="utf-8-sig").split())
    except UnicodeDecodeError as error:
        raise DataError(f"{beside.name} is not UTF-8") from error


def listing_digest(root: Path, paths: Iterable[Path]) -> str:
    """Tell a data set from others by its files' names and sizes, wherever it lies and whatever part is taken."""
    digest = hashlib.blake2b(digest_size=8)
    for path in paths:
        digest.update(f"{name_in(root, path)}\0{_size(path)}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:  # a link to nothing, or a file that has just gone: it is told when it is to be read
        return None


def find_files(root: Path, noun: str, suffixes: frozenset[str]) -> tuple[list[Path], int]:
    """Return the files at ``root`` whose names end so, and how many others there are; a single file in any case.

    Links to nothing are among them, to be told as unreadable; hidden ones are not, which editors lock files with.
    Hidden files, and what an unfinished capture keeps there, are no others: they come and go while it runs.

    Raises:
        DataError: if ``root`` is missing, or a folder without a single such file.
    """
    if root.is_file():
        return [root], 0
    if not root.is_dir():
        raise DataError(f"There is no file or folder {str(root)!r} to read {noun}s from.")
    files = sorted((path for path in root.rglob("*") if path.is_file() or _leads_nowhere(path)), key=Path.as_posix)
    matching = [path for path in files if path.suffix.lower() in suffixes]
    others = sum(path.suffix.lower() not in suffixes and not _passing(path.relative_to(root)) for path in files)
    if not matching:
        raise DataError(f"The folder {str(root)!r} holds no {noun}, only {count(others, 'other file')}.")
    return matching, others


def _leads_nowhere(path: Path) -> bool:
    return path.is_symlink() and not path.exists() and not path.name.startswith(".")


def _passing(path: Path) -> bool:
    return any(part.startswith(".") or part.endswith(CHECKPOINT) for part in path.parts)


def name_in(root: Path, path: Path) -> str:
    """Name a file within the folder or file that the user named."""
    return path.relative_to(root if root.is_dir() else root.parent).as_posix()


def reason(error: Exception) -> str:
    """Say in a few words why a file cannot be read."""
    match error:
        case FileNotFoundError(filename=str() | Path() as name) if Path(name).is_symlink():
            return f"a link to {Path(name).readlink()}, which does not exist"
        case OSError(strerror=str(reason)):
            return reason
        case _:
            return str(error) or type(error).__name__
