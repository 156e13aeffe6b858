"""Texts to run a language model on: a page of our own, or the lines of the user's own files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normscope.batches import Batch, Sample
from normscope.errors import DataError, count
from normscope.models.base import LoadOptions
from normscope.models.inputs import find_files, listing_digest, name_in, reason
from normscope.models.lines import Lines
from normscope.models.numbered import ReadInputs
from normscope.shares import Chunk, LeftOut

LONGEST = 512  # tokens of one text, at most


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
            data: what tells this data set from others, see :class:`normscope.batches.Sample`.
            source_is_line: whether each line is a source of its own, or each document.
            remarks: what the description says besides.

        Raises:
            DataError: if there is no text.
        """
        self._name, self._reading, self._remarks = name, reading, remarks
        self._data, self._source_is_line = data, source_is_line
        self._lines = Lines(documents)
        if not len(self._lines):
            raise DataError(f"{name} holds no text: {count(len(documents), 'file')} without a line that is not blank.")
        super().__init__(len(self._lines), options)

    @property
    def description(self) -> str:
        """Say how many texts were read, how many were cut or could not be read, and what was not looked at."""
        remarks = list(self._reading.remarks)
        if self.left_out.cut:
            remarks.append(f"{self.left_out.cut:,} cut to {count(self._reading.longest, 'token')}")
        if self.left_out.unreadable:
            remarks.append(f"{len(self.left_out.unreadable):,} unreadable")
        remarks += self._remarks
        texts = self._taken_of(count(len(self._lines), "text"))
        return f"{self._name}: {texts}" + (f" ({', '.join(remarks)})" if remarks else "")

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

    def _none_readable(self, left_out: LeftOut) -> DataError:
        return DataError(
            f"None of the {count(len(self.order), 'text')} tried at {self._name!r} can be read. The first is "
            f"{left_out.lines[0]}."
        )


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


_SUFFIXES = frozenset({".txt", ".text", ".md", ".rst"})
