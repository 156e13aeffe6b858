"""Texts to run a language model on: a page of our own, or the lines of the user's own files."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from normscope.errors import DataError, count
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.loaded_model import LoadOptions
from normscope.inputs.previews import Words
from normscope.inputs.splits import Chunk
from normscope.models.inputs.file_inputs import find_files, listing_digest, name_in, reason
from normscope.models.inputs.numbered_inputs import ReadInputs

_BYTE_ORDER_MARK = "\ufeff"
_NOT_OPENED = 0  # in place of a line's number, which are counted from 1


class TextLines:
    """The lines that are not blank; 24 bytes are kept of each. A file that cannot be opened counts as one.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "a.txt")
    ...     _ = path.write_text("one\\n\\ntwo\\n")
    ...     lines = TextLines([("a.txt", path)])
    ...     len(lines), lines.place(1), lines.read([1, 0])
    (2, 'a.txt line 3', ['two', 'one'])
    """

    def __init__(self, documents: Sequence[tuple[str, Traversable]]) -> None:
        """Go through all documents once, to see where their lines begin.

        Args:
            documents: each with its name; UTF-8.
        """
        self._documents = documents
        self._states = [_state(document) for _, document in documents]
        self._where = array("q"), array("q"), array("q")  # document, offset in bytes, number of the line
        for index, (_, document) in enumerate(documents):
            try:
                for offset, number in _found(document):
                    self._note(index, offset, number)
            except OSError:
                self._note(index, 0, _NOT_OPENED)

    def __len__(self) -> int:
        return len(self._where[0])

    def document_index(self, line: int) -> int:
        """Return in which of the documents a line is."""
        return self._where[0][line]

    def document(self, line: int) -> str:
        """Name the document of a line."""
        return self._documents[self.document_index(line)][0]

    def place(self, line: int) -> str:
        """Name the document of a line and the line's number in it."""
        number = self._where[2][line]
        return self.document(line) if number == _NOT_OPENED else f"{self.document(line)} line {number}"

    def read(self, lines: Sequence[int]) -> list[str | Exception]:
        """Return what some lines say, or why that cannot be had: one for each, in their order."""
        contents: list[str | Exception] = []
        for index, of_document in groupby(lines, self.document_index):
            contents += self._of_document(index, list(of_document))
        return contents

    def _of_document(self, index: int, lines: Sequence[int]) -> Sequence[str | Exception]:
        _, document = self._documents[index]
        try:
            with cast(BinaryIO, document.open("rb")) as file:
                if _state(document) != self._states[index]:
                    raise DataError("the file has changed since its lines were counted")
                return [self._line(file, line) for line in lines]
        except (OSError, DataError) as error:
            return [error] * len(lines)

    def _line(self, file: BinaryIO, line: int) -> str | Exception:
        _, offsets, numbers = self._where
        if numbers[line] == _NOT_OPENED:
            return DataError("it could not be opened when its lines were counted")
        file.seek(offsets[line])
        text = _decoded(file.readline(), numbers[line])
        return DataError("not UTF-8") if text is None else text

    def _note(self, index: int, offset: int, number: int) -> None:
        for kept, value in zip(self._where, (index, offset, number), strict=True):
            kept.append(value)


def _found(document: Traversable) -> Iterator[tuple[int, int]]:
    """Yield where each line that is not blank begins, and its number; of one that is not UTF-8 too."""
    offset = 0
    with document.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            text = _decoded(raw, number)
            if text is None or text.strip():
                yield offset, number
            offset += len(raw)


def _decoded(raw: bytes, number: int) -> str | None:
    """Return what a line says; None where it is not UTF-8."""
    try:
        text = raw.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        return None
    return text.removeprefix(_BYTE_ORDER_MARK) if number == 1 else text


def _state(document: Traversable) -> tuple[int, int] | None:
    """Return what changes when a file does; None where it is none of the user's, or is not there."""
    try:
        state = document.stat() if isinstance(document, Path) else None
    except OSError:
        return None
    return None if state is None else (state.st_size, state.st_mtime_ns)


LONGEST = 512  # tokens of one text, at most
_PAGE = files("normscope.models") / "embedded" / "page.txt"


@dataclass(frozen=True)
class Reading:
    """The way in which a model reads texts.

    Attributes:
        tokenize: from a text to its token ids, and whether it had to be cut; whatever it raises makes the text
            unreadable.
        keywords: from token ids and attention mask, int64 ``(samples, positions)``, to what the model takes.
        longest: tokens of one text, at most.
        pad_id: the token id at positions that hold no token.
        multiple: the model pads to a multiple of so many positions itself, unless they are one.
        remarks: what the description says besides.
        words: from token ids to what they stand for, each by itself; None where nothing tells.
    """

    tokenize: Callable[[str], tuple[list[int], bool]]
    keywords: Callable[[Tensor, Tensor], dict[str, Any]]
    longest: int = LONGEST
    pad_id: int = 0
    multiple: int = 1
    remarks: tuple[str, ...] = ()
    words: Words | None = None


class Texts(ReadInputs):
    """The lines of some documents, a text each; blank ones are skipped. Read and tokenized chunk by chunk."""

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
        """Note where each text begins, without keeping it.

        Args:
            name: what the description calls them together.
            documents: each with its name; UTF-8.
            reading: how texts become batches.
            options: limit, order, batch size, device and dtype.
            data: what tells this data set from others, see :class:`normscope.inputs.batch.Sample`.
            source_is_line: whether each line is a source of its own, or each document.
            remarks: what the description says besides.

        Raises:
            DataError: if there is no text.
        """
        self._name, self._reading, self._remarks = name, reading, remarks
        self._data, self._source_is_line, self.words = data, source_is_line, reading.words
        self._lines = TextLines(documents)
        if not len(self._lines):
            raise DataError(f"{name} holds no text: {count(len(documents), 'file')} without a line that is not blank.")
        super().__init__(len(self._lines), options)
        self._tried = f"{count(len(self.order), 'text')} tried at {name!r}"

    @property
    def description(self) -> str:
        """Say how many texts were read, how many were cut or could not be read, and what was not looked at."""
        cut = [f"{self.left_out.cut:,} cut to {count(self._reading.longest, 'token')}"] if self.left_out.cut else []
        texts = count(len(self._lines), "text")
        return self._described(self._name, texts, [*self._reading.remarks, *cut], self._remarks)

    def read(self, numbers: Sequence[int]) -> Chunk:
        """Tokenize some lines, and pad what can be read of them to one length."""
        samples, texts, unreadable, n_cut = [], [], {}, 0
        for number, content in zip(numbers, self._lines.read(numbers), strict=True):
            try:
                if isinstance(content, Exception):
                    raise content
                tokens, cut = self._reading.tokenize(content)
            except Exception as error:  # of the file system, of decoding, of any tokenizer
                place = self._lines.document(number) if isinstance(error, OSError) else self._lines.place(number)
                unreadable[number] = f"{place}: {reason(error)}"
                continue
            n_cut += cut
            samples.append(self._sample(number))
            texts.append(tokens)
        batches = [replace(padded(texts, self._reading), samples=tuple(samples))] if texts else []
        return Chunk(numbers, batches, unreadable, n_cut)

    def known_samples(self) -> Iterator[Sample]:
        """Yield a sample for each text that is taken, readable or not."""
        return map(self._sample, self.order)

    def _sample(self, number: int) -> Sample:
        if self._source_is_line:
            return Sample(self._lines.place(number), number, number, self._data)
        return Sample(self._lines.document(number), self._lines.document_index(number), number, self._data)


def text_inputs(reading: Reading, options: LoadOptions) -> Texts:
    """Return the texts at ``options.data``, or the page of our own where it is None.

    Each line is a text. In one file each is a source of its own; in a folder each file is one.

    Raises:
        DataError: if there is no text to be found.
    """
    if options.data is None:
        return Texts("normscope's page", [("page.txt", _PAGE)], reading, options, data="page", source_is_line=True)
    root = Path(options.data)
    paths, left_out = find_files(root, "text file", _SUFFIXES)
    return Texts(
        str(root),
        [(name_in(root, path), path) for path in paths],
        reading,
        options,
        data=listing_digest(root, paths),
        source_is_line=not root.is_dir(),
        remarks=(f"{count(left_out, 'other file')} left out",) if left_out else (),
    )


def lines_of_page(number: int) -> list[str]:
    """Return so many lines of the page of our own, from the first again where it has no more.

    >>> len(lines_of_page(13)), lines_of_page(1)[0][:13]
    (13, 'The ferry lef')
    """
    lines = _PAGE.read_text(encoding="utf-8").splitlines()
    return [lines[index % len(lines)] for index in range(number)]


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


_SUFFIXES = frozenset({".txt", ".text", ".md", ".rst"})
