"""Texts to run a language model on: a page of our own, or the lines of the user's own files."""

from __future__ import annotations

import csv
import inspect
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from torch import nn

from normscope.errors import DataError, ModelError, count
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.loaded_model import Inputs, LoadOptions
from normscope.models.inputs.dataset import InputDataset, Item, find_files, listing_digest, name_in, reason
from normscope.models.weights.repository import Repository, refuse_code

LONGEST = 512  # tokens of one text, at most
_PAGE = files("normscope.models") / "embedded" / "page.txt"
_SUFFIXES = frozenset({".txt", ".text", ".md", ".rst"})
_TABLES = (".tsv", ".csv")
_COLUMNS = ("sentence1", "sentence2", "score")
_TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "tokenizer.json")


class Tokenization:
    """Conversion of texts to batches of a model of transformers; without a tokenizer, UTF-8 bytes are the tokens.

    Attributes:
        longest: maximum number of tokens.
        pad_id: token id of padding.
        multiple: divisor of the number of positions.
        remarks: for the description.
        words: from token ids to their texts.
    """

    def __init__(self, module: Any, config: Any, tokenizer: Any) -> None:
        self._tokenizer, self._encodes_and_decodes = tokenizer, config.is_encoder_decoder
        self.words = partial(words_of, tokenizer)
        try:
            self._vocabulary: int | None = len(module.get_input_embeddings().weight)
        except NotImplementedError:  # CANINE hashes, and has no table of embeddings
            self._vocabulary = None
        self.longest = min(LONGEST, _positions(module, config), getattr(tokenizer, "model_max_length", LONGEST))
        pad_id: Any = getattr(tokenizer, "pad_token_id", None)
        has_embedding = pad_id is not None and (self._vocabulary is None or pad_id < self._vocabulary)
        self.pad_id = pad_id if has_embedding else 0
        window = getattr(config, "attention_window", 1)
        self.multiple = max(window) if isinstance(window, list) else window
        parameters = inspect.signature(module.forward).parameters
        anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        self._options = {"use_cache": False} if anything or "use_cache" in parameters else {}
        self.remarks = ["UTF-8 bytes as tokens, without its tokenizer"] if tokenizer is None else []
        if self._encodes_and_decodes:
            self.remarks.append("the decoder reads the same text")

    def tokens(self, text: str) -> tuple[list[int], bool]:
        """Return the first token ids of a text, and True if there are more."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            tokens = list(text.encode())
        elif tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]:
            tokens = tokenizer(text, verbose=False)["input_ids"]
        else:
            raise DataError("the tokenizer leaves nothing of it")
        if cut := len(tokens) > self.longest:
            longest = {"truncation": True, "max_length": self.longest}
            tokens = tokenizer(text, **longest)["input_ids"] if tokenizer else tokens[: self.longest]
        check_tokens(tokens, self._vocabulary)
        return tokens, cut

    def padded(self, rows: Sequence[Sequence[int]]) -> Batch:
        """Put the token ids of texts into one batch without samples, padded on the right to the longest of them."""
        longest = max(len(tokens) for tokens in rows)
        longest += -longest % self.multiple
        ids = torch.full((len(rows), longest), self.pad_id)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
        kwargs = {"input_ids": ids, "attention_mask": mask, **self._options}
        if self._encodes_and_decodes:
            kwargs |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
        return Batch(kwargs=kwargs, valid=mask.bool())


class _Tokenized(InputDataset):
    """Inputs of one or more texts each."""

    reads_files = True

    def __init__(self, tokenization: Tokenization, total: int, options: LoadOptions, **described: Any) -> None:
        self._tokenization = tokenization
        described |= {"remarks": tokenization.remarks, "cut_to": count(tokenization.longest, "token")}
        super().__init__(total, options, words=tokenization.words, **described)

    def load(self, number: int) -> tuple[list[list[int]], int]:
        """Return the token ids of each text of an input, and how many were cut."""
        tokenized = [self._tokenization.tokens(text) for text in self.texts(number)]
        return [tokens for tokens, _ in tokenized], sum(cut for _, cut in tokenized)

    def batches(self, items: Sequence[Item]) -> list[Batch]:
        """Pad the texts to one length."""
        rows = [tokens for item in items for tokens in item.content]
        samples = tuple(sample for item in items for sample in self.samples(item.number))
        return [replace(self._tokenization.padded(rows), samples=samples)]

    @abstractmethod
    def texts(self, number: int) -> Sequence[str]:
        """Read the texts of an input."""


class Texts(_Tokenized):
    """The lines at ``options.data``, or of the embedded page, that are not blank, a text each.

    A source is a line of a file, or a file of a folder. Each line takes 24 bytes of memory.
    """

    noun = "text"

    def __init__(self, tokenization: Tokenization, options: LoadOptions) -> None:
        """Find the beginning of each text; DataError if there is none."""
        if options.data is None:
            name, n_other, self._data, self._source_is_line = "normscope's page", 0, "page", True
            self._documents: list[tuple[str, Traversable]] = [("page.txt", _PAGE)]
        else:
            root = Path(options.data)
            paths, n_other = find_files(root, "text file", _SUFFIXES)
            self._data, self._source_is_line = listing_digest(root, paths), not root.is_dir()
            name, self._documents = str(root), [(name_in(root, path), path) for path in paths]
        lines = ((i, *line) for i, (_, document) in enumerate(self._documents) for line in _lines_of(document))
        # Document, offset in bytes and number of each line.
        self._lines = np.fromiter(lines, np.dtype((np.int64, 3)))
        total, n_files = len(self._lines), count(len(self._documents), "file")
        if not total:
            raise DataError(f"{name} contains no text: {n_files} without a line that is not blank.")
        super().__init__(tokenization, total, options, name=name, of=count(total, "text"), n_other=n_other)

    def texts(self, number: int) -> Sequence[str]:
        document, offset, line = self._lines[number].tolist()
        with cast(BinaryIO, self._documents[document][1].open("rb")) as file:
            file.seek(offset)
            text = _decoded(file.readline(), line)
        if text is None:
            raise DataError("not UTF-8")
        return [text]

    def samples(self, number: int) -> list[Sample]:
        document, _, line = self._lines[number].tolist()
        name = self._documents[document][0]
        if self._source_is_line:
            return [Sample(f"{name} line {line}", number, number, self._data)]
        return [Sample(name, document, number, self._data)]

    def name_of(self, number: int, error: Exception) -> str:
        document, _, line = self._lines[number].tolist()
        name = self._documents[document][0]
        return name if isinstance(error, OSError) else f"{name} line {line}"


def _lines_of(document: Traversable) -> Iterator[tuple[int, int]]:
    """Yield the offset and the number of each line that is not blank, or not UTF-8."""
    offset = 0
    try:
        with document.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                text = _decoded(raw, number)
                if text is None or text.strip():
                    yield offset, number
                offset += len(raw)
    except OSError:
        yield 0, 0  # counts as one text; reading it reports the reason


def _decoded(raw: bytes, number: int) -> str | None:
    try:
        text = raw.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        return None
    return text.removeprefix("\ufeff") if number == 1 else text  # a byte order mark


def lines_of_page(number: int) -> list[str]:
    """Return the first ``number`` lines of the embedded page, repeated as needed.

    >>> len(lines_of_page(13)), lines_of_page(1)[0][:13]
    (13, 'The ferry lef')
    """
    lines = _PAGE.read_text(encoding="utf-8").splitlines()
    return [lines[index % len(lines)] for index in range(number)]


def load_tokenizer(library: Any, name: str, repository: Repository) -> Any:
    """Return the tokenizer beside a model; ModelError if there is none, or it asks for code of its own."""
    paths = [repository.file(filename) for filename in _TOKENIZER_FILES]
    if paths[-1] is None:
        raise ModelError(f"{repository.name!r} contains no tokenizer.json, so that no text can be read for {name}.")
    refuse_code(name, "tokenizer_config.json", repository.json("tokenizer_config.json"))
    return repository.read_by(library.AutoTokenizer, f"The tokenizer of {name} cannot be loaded")


def words_of(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Decode each token id by itself; bytes where ``tokenizer`` is None."""
    if tokenizer is None:
        return [chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}" for byte in ids]
    return [str(tokenizer.decode([token])) for token in ids]


def _positions(module: nn.Module, config: Any) -> int:
    """Return the maximum number of tokens of a text."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
    limits = [limit] if limit > 0 else []
    for name, child in module.named_modules():
        if name.endswith("position_embeddings") and getattr(child, "padding_idx", None) is not None:
            limits.append(len(child.weight) - child.padding_idx - 1)  # RoBERTa counts positions from there
    return min(limits, default=LONGEST)


def check_tokens(tokens: Sequence[int], vocabulary: int | None, subject: str = "it") -> None:
    """Refuse tokens that the model has no embedding for, which a GPU would answer with an assertion."""
    if vocabulary is not None and max(tokens) >= vocabulary:
        raise DataError(f"the tokenizer makes token {max(tokens)} of {subject}, and the model knows {vocabulary}")


class SentencePairs(_Tokenized):
    """Pairs of sentences with scores: two samples each, of one source, with the pair's score as their label."""

    noun = "pair"

    def __init__(self, path: Path, tokenization: Tokenization, options: LoadOptions) -> None:
        """Read the pairs of a file, see :func:`read_pairs`; ``options`` count pairs."""
        self._path, self._pairs, self._data = path, read_pairs(path), listing_digest(path, [path])
        of = f"{count(len(self._pairs), 'pair')} of sentences"
        super().__init__(tokenization, len(self._pairs), options, name=str(path), of=of)
        self.batch_size = max(1, options.batch_size // 2)  # both sentences of a pair are in one batch

    def texts(self, number: int) -> Sequence[str]:
        return self._pairs[number][:2]

    def samples(self, number: int) -> list[Sample]:
        score = self._pairs[number][2]
        return [Sample(f"pair {number + 1}", number, 2 * number + side, self._data, score) for side in range(2)]

    def name_of(self, number: int, error: Exception) -> str:
        return f"{self._path.name} pair {number + 1}"


def pairs_or_texts(tokenization: Tokenization, options: LoadOptions) -> Inputs:
    """Return pairs of sentences if ``options.data`` is a .tsv or .csv file, and texts otherwise."""
    path = Path(options.data or "")
    if path.suffix.lower() in _TABLES and path.is_file():
        return SentencePairs(path, tokenization, options)
    return Texts(tokenization, options)


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
        raise DataError(f"{str(path)!r} contains no pair of sentences.")
    return pairs


def _pair(line: str, row: Sequence[str], columns: Sequence[str]) -> tuple[str, str, float]:
    try:
        by_name = dict(zip(columns, row, strict=True))
        first, second, score = (by_name[name].strip() for name in _COLUMNS)
        value = float(score)
        if not (first and second and math.isfinite(value)):
            raise ValueError
    except ValueError:
        raise DataError(
            f"{line} is no pair of sentences; a line is {', '.join(_COLUMNS)}, the last of them a number. To read "
            "lines as texts, name a .txt file."
        ) from None
    return first, second, value
