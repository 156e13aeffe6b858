"""The lines of documents, of which any can be read at any time: where each begins is kept, and not what it says."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from importlib.resources.abc import Traversable
from itertools import groupby
from pathlib import Path
from typing import BinaryIO, cast

from normscope.errors import DataError

_BYTE_ORDER_MARK = "\ufeff"
_NOT_OPENED = 0  # in place of a line's number, which are counted from 1


class Lines:
    """The lines that are not blank; 24 bytes are kept of each. A file that cannot be opened counts as one.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "a.txt")
    ...     _ = path.write_text("one\\n\\ntwo\\n")
    ...     lines = Lines([("a.txt", path)])
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
        for index, own in groupby(lines, self.document_index):
            contents += self._of_document(index, list(own))
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
