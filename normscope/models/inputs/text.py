"""Texts to run a language model on: a page of our own, or the lines of the user's own files."""

from __future__ import annotations

import csv
import inspect
import math
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor, nn

from normscope.errors import DataError, ModelError, count
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.chunks import Chunk
from normscope.inputs.loaded_model import Inputs, LoadOptions
from normscope.inputs.previews import Words
from normscope.models.inputs.numbered_inputs import NumberedInputs, find_files, listing_digest, name_in, reason
from normscope.models.weights.repository import Repository, refuse_code

LONGEST = 512  # tokens of one text, at most
_PAGE = files("normscope.models") / "embedded" / "page.txt"


@dataclass(frozen=True)
class Reading:
    """Conversion of texts to a model's batches.

    Attributes:
        tokenize: from a text to its token ids, and True if it was cut; its exceptions make the text unreadable.
        keywords: from token ids and attention mask, int64 ``(samples, positions)``, to keyword arguments.
        longest: maximum number of tokens.
        pad_id: token id of padding.
        multiple: divisor of the number of positions.
        remarks: for the description.
        words: from token ids to their texts; None if unknown.
    """

    tokenize: Callable[[str], tuple[list[int], bool]]
    keywords: Callable[[Tensor, Tensor], dict[str, Any]]
    longest: int = LONGEST
    pad_id: int = 0
    multiple: int = 1
    remarks: tuple[str, ...] = ()
    words: Words | None = None


class _Tokenized(NumberedInputs):
    """Inputs of one or more texts each, tokenized chunk by chunk."""

    def __init__(self, reading: Reading, total: int, options: LoadOptions, **described: Any) -> None:
        self._reading, self.words = reading, reading.words
        cut_to = count(reading.longest, "token")
        super().__init__(total, options, remarks=reading.remarks, cut_to=cut_to, **described)

    def read(self, numbers: Sequence[int]) -> Chunk:
        """Tokenize the texts of some inputs, and pad what can be read of them to one length."""
        samples, rows, unreadable, n_cut = [], [], {}, 0
        for number, texts in zip(numbers, self._texts(numbers), strict=True):
            try:
                if isinstance(texts, Exception):
                    raise texts
                tokenized = [self._reading.tokenize(text) for text in texts]
            except Exception as error:  # of the file system, of decoding, of any tokenizer
                unreadable[number] = f"{self._name_of(number, error)}: {reason(error)}"
                continue
            n_cut += sum(cut for _, cut in tokenized)
            rows += [tokens for tokens, _ in tokenized]
            samples += self._samples(number)
        batches = [replace(padded(rows, self._reading), samples=tuple(samples))] if rows else []
        return Chunk(numbers, batches, unreadable, n_cut)

    def known_samples(self) -> Iterator[Sample]:
        return (sample for number in self.order for sample in self._samples(number))

    @abstractmethod
    def _texts(self, numbers: Sequence[int]) -> Sequence[Sequence[str] | Exception]:
        """Return the texts of each input, or why they cannot be read."""

    @abstractmethod
    def _samples(self, number: int) -> list[Sample]:
        """Return a sample for each text of an input."""

    @abstractmethod
    def _name_of(self, number: int, error: Exception) -> str:
        """Name an input that raised an error."""


class Texts(_Tokenized):
    """The lines of some documents that are not blank, a text each; 24 bytes are kept of each."""

    def __init__(
        self,
        name: str,
        documents: Sequence[tuple[str, Traversable]],
        reading: Reading,
        options: LoadOptions,
        *,
        data: str,
        source_is_line: bool,
        besides: Sequence[str] = (),
    ) -> None:
        """Find the beginning of each text; DataError if there is none.

        ``documents`` are names and UTF-8 files; ``data`` identifies them, see :class:`normscope.inputs.batch.Sample`.
        Each document is a source, or each of its lines if ``source_is_line``.
        """
        self._documents, self._data, self._source_is_line = documents, data, source_is_line
        self._where = array("q"), array("q"), array("q")  # document, offset in bytes, number of the line
        for index, (_, document) in enumerate(documents):
            for entry in _lines_of(document):
                for kept, value in zip(self._where, (index, *entry), strict=True):
                    kept.append(value)
        total = len(self._where[0])
        if not total:
            raise DataError(f"{name} holds no text: {count(len(documents), 'file')} without a line that is not blank.")
        super().__init__(reading, total, options, at=name, noun="text", of=count(total, "text"), besides=besides)

    def _texts(self, numbers: Sequence[int]) -> Sequence[Sequence[str] | Exception]:
        texts: list[Sequence[str] | Exception] = []
        for index, group in groupby(numbers, self._where[0].__getitem__):
            lines = list(group)
            try:
                with cast(BinaryIO, self._documents[index][1].open("rb")) as file:
                    texts += [self._line(file, line) for line in lines]
            except OSError as error:
                texts += [error] * len(lines)
        return texts

    def _line(self, file: BinaryIO, line: int) -> Sequence[str] | Exception:
        _, offsets, numbers = self._where
        file.seek(offsets[line])
        text = _decoded(file.readline(), numbers[line])
        return DataError("not UTF-8") if text is None else [text]

    def _samples(self, number: int) -> list[Sample]:
        index = self._where[0][number]
        if self._source_is_line:
            return [Sample(self._place(number), number, number, self._data)]
        return [Sample(self._documents[index][0], index, number, self._data)]

    def _place(self, number: int) -> str:
        document, _, line = (column[number] for column in self._where)
        return f"{self._documents[document][0]} line {line}"

    def _name_of(self, number: int, error: Exception) -> str:
        return self._documents[self._where[0][number]][0] if isinstance(error, OSError) else self._place(number)


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


def text_inputs(reading: Reading, options: LoadOptions) -> Texts:
    """Return texts at ``options.data`` or of the embedded page; a source is a line of a file, or a file of a folder."""
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
        besides=[f"{count(left_out, 'other file')} left out"] if left_out else [],
    )


def lines_of_page(number: int) -> list[str]:
    """Return the first ``number`` lines of the embedded page, repeated as needed.

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

_FILES = ("tokenizer_config.json", "special_tokens_map.json", "tokenizer.json")


def load_tokenizer(library: Any, name: str, repository: Repository) -> Any:
    """Return the tokenizer beside a model; ModelError if there is none, or it asks for code of its own."""
    paths = [repository.file(filename) for filename in _FILES]
    if paths[-1] is None:
        raise ModelError(f"{repository.name!r} holds no tokenizer.json, so that no text can be read for {name}.")
    refuse_code(name, "tokenizer_config.json", repository.json("tokenizer_config.json"))
    try:
        return library.AutoTokenizer.from_pretrained(repository.name, trust_remote_code=False, **repository.where())
    except Exception as error:  # of tokenizers, of transformers
        raise repository.failure(f"The tokenizer of {name} cannot be loaded", error) from error


def reading_of(module: Any, config: Any, tokenizer: Any) -> Reading:
    """Return the tokenization of a model of transformers; UTF-8 bytes are its tokens where ``tokenizer`` is None."""
    vocabulary = _vocabulary(module)
    longest = min(LONGEST, _positions(module, config), getattr(tokenizer, "model_max_length", LONGEST))
    pad_id = getattr(tokenizer, "pad_token_id", None)
    remarks = ["UTF-8 bytes as tokens, for want of its tokenizer"] if tokenizer is None else []
    if config.is_encoder_decoder:
        remarks.append("the decoder reads the same text")
    window = getattr(config, "attention_window", 1)
    return Reading(
        partial(_tokenize, tokenizer, longest, vocabulary),
        _keywords(module, config),
        longest=longest,
        pad_id=pad_id if pad_id is not None and (vocabulary is None or pad_id < vocabulary) else 0,
        multiple=max(window) if isinstance(window, list) else window,
        remarks=tuple(remarks),
        words=partial(words_of, tokenizer),
    )


def words_of(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Decode each token id by itself; bytes where ``tokenizer`` is None."""
    if tokenizer is None:
        return [chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}" for byte in ids]
    return [str(tokenizer.decode([token])) for token in ids]


def _vocabulary(module: Any) -> int | None:
    """Return the number of tokens that the model has embeddings for; None without a table of them: CANINE hashes."""
    try:
        return len(module.get_input_embeddings().weight)
    except NotImplementedError:
        return None


def _positions(module: nn.Module, config: Any) -> int:
    """Return the maximum number of tokens of a text."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
    limits = [limit] if limit > 0 else []
    for name, part in module.named_modules():
        if name.endswith("position_embeddings") and getattr(part, "padding_idx", None) is not None:
            limits.append(len(part.weight) - part.padding_idx - 1)  # RoBERTa counts positions from there
    return min(limits, default=LONGEST)


def _tokenize(tokenizer: Any, longest: int, vocabulary: int | None, text: str) -> tuple[list[int], bool]:
    """Return the first ``longest`` token ids of a text, and True if there are more."""
    if tokenizer is None:
        tokens = list(text.encode())
    elif tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]:
        tokens = tokenizer(text, verbose=False)["input_ids"]
    else:
        raise DataError("the tokenizer leaves nothing of it")
    if cut := len(tokens) > longest:
        tokens = tokenizer(text, truncation=True, max_length=longest)["input_ids"] if tokenizer else tokens[:longest]
    check_tokens(tokens, vocabulary)
    return tokens, cut


def check_tokens(tokens: Sequence[int], vocabulary: int | None, what: str = "it") -> None:
    """Refuse tokens that the model has no embedding for, which a GPU would answer with an assertion."""
    if vocabulary is not None and max(tokens) >= vocabulary:
        raise DataError(f"the tokenizer makes token {max(tokens)} of {what}, and the model knows {vocabulary}")


def _keywords(module: nn.Module, config: Any) -> Callable[[Tensor, Tensor], dict[str, Any]]:
    parameters = inspect.signature(module.forward).parameters
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    no_cache = {"use_cache": False} if anything or "use_cache" in parameters else {}

    def keywords(ids: Tensor, mask: Tensor) -> dict[str, Any]:
        given = {"input_ids": ids, "attention_mask": mask, **no_cache}
        if config.is_encoder_decoder:
            given |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
        return given

    return keywords


_COLUMNS = ("sentence1", "sentence2", "score")
_TABLES = (".tsv", ".csv")


class SentencePairs(_Tokenized):
    """Pairs of sentences with scores: two samples each, of one source, with the pair's score as their label."""

    def __init__(self, path: Path, reading: Reading, options: LoadOptions) -> None:
        """Read the pairs of a file, see :func:`read_pairs`; ``options`` count pairs."""
        self._path, self._pairs, self._data = path, read_pairs(path), listing_digest(path, [path])
        of = f"{count(len(self._pairs), 'pair')} of sentences"
        super().__init__(reading, len(self._pairs), options, at=str(path), noun="pair", of=of)

    @property
    def n_samples(self) -> int:
        return 2 * len(self.order)

    def _texts(self, numbers: Sequence[int]) -> Sequence[Sequence[str] | Exception]:
        return [self._pairs[number][:2] for number in numbers]

    def _samples(self, number: int) -> list[Sample]:
        score = self._pairs[number][2]
        return [Sample(f"pair {number + 1}", number, 2 * number + side, self._data, score) for side in range(2)]

    def _name_of(self, number: int, error: Exception) -> str:
        return f"{self._path.name} pair {number + 1}"

    def _at_once(self) -> int:
        return max(1, self.batch_size // 2)  # both sentences of a pair are in one batch


def pairs_or_texts(reading: Reading, options: LoadOptions) -> Inputs:
    """Return pairs of sentences if ``options.data`` is a .tsv or .csv file, and texts otherwise."""
    path = Path(options.data or "")
    if path.suffix.lower() in _TABLES and path.is_file():
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
