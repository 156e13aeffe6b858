"""Texts to run a language model on: a page of our own, or the lines of the user's own files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normscope.batches import Batch, Sample
from normscope.errors import DataError, count
from normscope.models.base import LoadOptions
from normscope.models.inputs import find_files, listing_digest, name_in, reason

LONGEST = 512  # tokens of one text, at most

_BYTE_ORDER_MARK = "\ufeff"


@dataclass(frozen=True)
class Reading:
    """How a model reads texts.

    Attributes:
        tokenize: from a text to its token ids, and whether it had to be cut; whatever it raises makes the text
            unreadable.
        keywords: from token ids and attention mask, int64 ``(samples, positions)``, to what the model takes.
        longest: tokens of one text, at most.
        pad_id: the token id at positions that hold no token.
        multiple: the model pads to a multiple of so many positions itself, unless they are one.
        remarks: what the description says besides.
    """

    tokenize: Callable[[str], tuple[list[int], bool]]
    keywords: Callable[[Tensor, Tensor], dict[str, Any]]
    longest: int = LONGEST
    pad_id: int = 0
    multiple: int = 1
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Line:
    place: str
    source: str
    source_index: int
    content: str | Exception


class Texts:
    """The lines of some documents, a text each; blank ones are skipped. Read and tokenized batch by batch.

    Attributes:
        unreadable: ``document line N: reason`` for each that the latest iteration could not read.
    """

    def __init__(
        self,
        name: str,
        documents: Sequence[tuple[str, Traversable]],
        reading: Reading,
        options: LoadOptions,
        *,
        data: str,
        source_is_line: bool,
        remarks: tuple[str, ...] = (),
    ) -> None:
        """Count the texts, without keeping them.

        Args:
            name: what the description calls them together.
            documents: each with its name; UTF-8.
            reading: how texts become batches.
            options: limit, batch size, device and dtype.
            data: what tells this data set from others, see :class:`normscope.batches.Sample`.
            source_is_line: whether each line is a source of its own, or each document.
            remarks: what the description says besides.

        Raises:
            DataError: if there is no text.
        """
        self.unreadable: list[str] = []
        self._name, self._documents, self._reading, self._options = name, documents, reading, options
        self._data, self._source_is_line, self._remarks = data, source_is_line, remarks
        self._cut = 0
        self._found = sum(1 for _ in self._lines())
        if not self._found:
            raise DataError(f"{name} holds no text: {count(len(documents), 'file')} without a line that is not blank.")

    @property
    def description(self) -> str:
        """Say how many texts were read, how many were cut or could not be read, and what was not looked at."""
        texts = count(self.n_samples, "text")
        if self.n_samples < self._found:
            texts = f"the first {self.n_samples} of {count(self._found, 'text')}"
        remarks = list(self._reading.remarks)
        if self._cut:
            remarks.append(f"{self._cut} cut to {count(self._reading.longest, 'token')}")
        if self.unreadable:
            remarks.append(f"{len(self.unreadable)} unreadable")
        remarks += self._remarks
        return f"{self._name}: {texts}" + (f" ({', '.join(remarks)})" if remarks else "")

    @property
    def n_samples(self) -> int:
        """How many texts there are to try."""
        return min(self._found, self._options.limit or self._found)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the texts that can be read.

        Raises:
            DataError: at the end, if none of them could.
        """
        self.unreadable, self._cut = [], 0
        remaining = self._tokenized()
        while chunk := list(islice(remaining, self._options.batch_size)):
            samples, tokens = zip(*chunk, strict=True)
            batch = padded(tokens, self._reading)
            yield replace(batch, samples=samples).to(self._options.device, self._options.dtype)
        if len(self.unreadable) == self.n_samples:
            raise DataError(
                f"None of the {count(self.n_samples, 'text')} tried at {self._name!r} can be read. The first is "
                f"{self.unreadable[0]}."
            )

    def _tokenized(self) -> Iterator[tuple[Sample, list[int]]]:
        for index, line in enumerate(islice(self._lines(), self._options.limit)):
            try:
                if isinstance(line.content, Exception):
                    raise line.content
                tokens, cut = self._reading.tokenize(line.content)
            except Exception as error:  # of the file system, of decoding, of any tokenizer
                self.unreadable.append(f"{line.place}: {reason(error)}")
                continue
            self._cut += cut
            yield Sample(line.source, line.source_index, index, self._data), tokens

    def _lines(self) -> Iterator[_Line]:
        """Yield every line that is not blank; a file that cannot be opened counts as one."""
        seen = 0
        for file_index, (name, document) in enumerate(self._documents):
            try:
                for number, content in _contents(document):
                    place = f"{name} line {number}"
                    source = (place, seen) if self._source_is_line else (name, file_index)
                    seen += 1
                    yield _Line(place, *source, content)
            except OSError as error:
                yield _Line(name, name, seen if self._source_is_line else file_index, error)


def text_inputs(reading: Reading, options: LoadOptions) -> Texts:
    """Return the texts at ``options.data``, or the page of our own where it is None.

    Each line is a text. In one file each is a source of its own; in a folder each file is one.

    Raises:
        DataError: if there is no text to be found.
    """
    if options.data is None:
        page = files("normscope.models") / "embedded" / "page.txt"
        return Texts("normscope's page", [("page.txt", page)], reading, options, data="page", source_is_line=True)
    root = Path(options.data)
    found, left_out = find_files(root, "text file", _SUFFIXES)
    return Texts(
        str(root),
        [(name_in(root, path), path) for path in found],
        reading,
        options,
        data=listing_digest(root, found),
        source_is_line=not root.is_dir(),
        remarks=(f"{count(left_out, 'other file')} left out",) if left_out else (),
    )


def padded(tokens: Sequence[Sequence[int]], reading: Reading) -> Batch:
    """Put texts into one batch without samples, padded on the right to the longest of them.

    >>> reading = Reading(tokenize=lambda text: ([], False), keywords=lambda ids, mask: {"input_ids": ids})
    >>> batch = padded([[5, 6, 7], [8]], reading)
    >>> batch.kwargs["input_ids"].tolist(), batch.valid.tolist()
    ([[5, 6, 7], [8, 0, 0]], [[True, True, True], [True, False, False]])
    """
    longest = max(len(text) for text in tokens)
    longest += -longest % reading.multiple
    ids = torch.full((len(tokens), longest), reading.pad_id)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(tokens):
        ids[row, : len(text)] = torch.tensor(text)
        mask[row, : len(text)] = 1
    valid = mask.bool()
    return Batch(kwargs=reading.keywords(ids, mask), valid=valid)


def _contents(document: Traversable) -> Iterator[tuple[int, str | Exception]]:
    """Yield the lines that are not blank, or what is wrong with them, numbered from 1."""
    with document.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                text = raw.decode().rstrip("\r\n")
            except UnicodeDecodeError:
                yield number, DataError("not UTF-8")
                continue
            text = text.removeprefix(_BYTE_ORDER_MARK) if number == 1 else text
            if text.strip():
                yield number, text


_SUFFIXES = frozenset({".txt", ".text", ".md", ".rst"})
