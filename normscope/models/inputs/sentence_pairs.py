"""Pairs of sentences with scores, which tell how well embeddings agree with people."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from normscope.errors import DataError, count
from normscope.inputs.batch import Sample
from normscope.inputs.loaded_model import Inputs, LoadOptions
from normscope.inputs.splits import Chunk
from normscope.models.inputs.file_inputs import listing_digest, reason
from normscope.models.inputs.numbered_inputs import ReadInputs
from normscope.models.inputs.text import Reading, padded, text_inputs

_COLUMNS = ("sentence1", "sentence2", "score")
_SUFFIXES = (".tsv", ".csv")


class SentencePairs(ReadInputs):
    """Pairs of sentences with scores: two samples each, of one source, that have the pair's score for a label."""

    def __init__(self, path: Path, reading: Reading, options: LoadOptions) -> None:
        """Read a file, see :func:`read_pairs`.

        Args:
            path: of the file.
            reading: how texts become batches.
            options: limit and order, of pairs; batch size, device and dtype.

        Raises:
            DataError: if it holds anything else.
        """
        self._path, self._reading, self._pairs = path, reading, read_pairs(path)
        self._data = listing_digest(path, [path])
        super().__init__(len(self._pairs), options)
        self._tried = f"{count(len(self.order), 'pair')} tried at {str(path)!r}"

    @property
    def description(self) -> str:
        """Say how many pairs were read, and how many sentences were cut or pairs could not be read."""
        cut = [f"{self.left_out.cut:,} cut to {count(self._reading.longest, 'token')}"] if self.left_out.cut else []
        pairs = f"{count(len(self._pairs), 'pair')} of sentences"
        return self._described(str(self._path), pairs, [*self._reading.remarks, *cut], [])

    @property
    def n_samples(self) -> int:
        """Number of sentences."""
        return 2 * len(self.order)

    def read(self, numbers: Sequence[int]) -> Chunk:
        """Tokenize some pairs, and pad their sentences to one length."""
        samples, texts, unreadable, n_cut = [], [], {}, 0
        for number in numbers:
            try:
                (first, first_cut), (second, second_cut) = map(self._reading.tokenize, self._pairs[number][:2])
            except Exception as error:  # of any tokenizer
                unreadable[number] = f"{self._path.name} pair {number + 1}: {reason(error)}"
                continue
            n_cut += first_cut + second_cut
            samples += [self._sample(number, side) for side in range(2)]
            texts += [first, second]
        batches = [replace(padded(texts, self._reading), samples=tuple(samples))] if texts else []
        return Chunk(numbers, batches, unreadable, n_cut)

    def known_samples(self) -> Iterator[Sample]:
        """Yield two samples for each pair that is taken, readable or not."""
        return (self._sample(number, side) for number in self.order for side in range(2))

    def _at_once(self) -> int:
        """Return how many pairs are read together: both sentences are in one batch, also where that holds one."""
        return max(1, self.batch_size // 2)

    def _sample(self, number: int, side: int) -> Sample:
        return Sample(f"pair {number + 1}", number, 2 * number + side, self._data, self._pairs[number][2])


def pairs_or_texts(reading: Reading, options: LoadOptions) -> Inputs:
    """Return pairs of sentences where ``options.data`` is a .tsv or .csv file, and texts otherwise.

    Raises:
        DataError: if such a file holds anything but pairs, or there is no text to be found.
    """
    path = Path(options.data or "")
    if path.suffix.lower() in _SUFFIXES and path.is_file():
        return SentencePairs(path, reading, options)
    return text_inputs(reading, options)


def read_pairs(path: Path) -> list[tuple[str, str, float]]:
    """Read pairs of sentences: rows of two sentences and the score of their likeness.

    The first row may name the columns ``sentence1``, ``sentence2`` and ``score``, in any order and among others. A
    ``.csv`` file has commas and quotation marks; in a ``.tsv`` file there are tabs, and quotation marks are text.

    Raises:
        DataError: if it cannot be read, a row is anything else, or there is none.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "pairs.csv")
    ...     _ = path.write_text('score,sentence1,sentence2\\n4.5,"A dog, asleep.",A dog sleeps.\\n')
    ...     read_pairs(path)
    [('A dog, asleep.', 'A dog sleeps.', 4.5)]
    """
    quoted = path.suffix.lower() == ".csv"
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file) if quoted else csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
            rows = [(reader.line_num, row) for row in reader if any(row)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = "not UTF-8" if isinstance(error, UnicodeDecodeError) else reason(error)
        raise DataError(f"{str(path)!r} cannot be read as pairs of sentences: {why}.") from error
    first = [name.strip().lower() for name in rows[0][1]] if rows else []
    headed = set(_COLUMNS) <= set(first)
    columns = first if headed else list(_COLUMNS)
    pairs = [_pair(f"Line {line} of {str(path)!r}", row, columns) for line, row in rows[headed:]]
    if not pairs:
        raise DataError(f"{str(path)!r} holds no pair of sentences.")
    return pairs


def _pair(place: str, row: Sequence[str], columns: Sequence[str]) -> tuple[str, str, float]:
    try:
        by_name = dict(zip(columns, row, strict=True))
        first, second, score = (by_name[name].strip() for name in _COLUMNS)
        value = float(score)
        if not (first and second and math.isfinite(value)):
            raise ValueError
    except ValueError:
        raise DataError(
            f"{place} is no pair of sentences; a line is {', '.join(_COLUMNS)}, the last of them a number. To read "
            "lines as texts, name a .txt file."
        ) from None
    return first, second, value
