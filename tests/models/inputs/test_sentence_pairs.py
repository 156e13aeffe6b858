"""Pairs of sentences: file formats, both sentences in one batch, and refusals."""

import csv

import pytest
import torch
from loads import Bytes, samples_of

from normscope.errors import DataError
from normscope.inputs.held_out import learned_and_held_out
from normscope.models.inputs.text import SentencePairs, pairs_or_texts, read_pairs

TOKENIZATION = Bytes(6, errors={"b!": ValueError("no shouting")})


@pytest.fixture
def written(tmp_path):
    def write(name, text, encoding="utf-8"):
        (tmp_path / name).write_text(text, encoding=encoding)
        return tmp_path / name

    return write


def test_file_formats(written, tmp_path):
    plain = written("a.tsv", 'He said "no".\tNo, he said.\t4.25\n\n"Odd\tEven"\t-1\n')
    assert read_pairs(plain) == [('He said "no".', "No, he said.", 4.25), ('"Odd', 'Even"', -1.0)]
    headed = written("b.tsv", "Score\tsplit\tsentence2\tsentence1\n3\ttest\tb\ta\n", "utf-8-sig")
    assert read_pairs(headed) == [("a", "b", 3.0)]
    rows = [("One, two", 'a "b"\nc', 0.5), ("three", "four", 5.0)]
    with (tmp_path / "c.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    assert read_pairs(tmp_path / "c.csv") == rows


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("a.tsv", "a\tb\t1\nc\td\n", r"Line 2 of '.*a\.tsv' is no pair of sentences; a line is sentence1, sentence2"),
        ("a.tsv", "a\tb\tgood\n", "Line 1 of .* the last of them a number. To read lines as texts, name a .txt file"),
        ("a.tsv", "a\tb\tnan\n", "Line 1 of"),
        ("a.tsv", "a\t \t3\n", "Line 1 of"),
        ("a.csv", "sentence1,sentence2,score\na,b,3\na,b,3,4\n", "Line 3 of"),
        ("a.csv", "sentence1,sentence2,score\n\n", "contains no pair of sentences"),
        ("a.tsv", "", "contains no pair of sentences"),
        ("a.tsv", "Käse\tbrie\t1\n", r"a\.tsv' cannot be read as pairs of sentences: not UTF-8"),
    ],
)
def test_refusals(written, name, text, error):
    with pytest.raises(DataError, match=error):
        read_pairs(written(name, text, "latin-1"))


def test_both_sentences_are_in_one_batch_and_one_part(written, options):
    path = written("a.tsv", "".join(f"{letter}\t{letter * 8}\t{n}\n" for n, letter in enumerate("abcdef")))
    inputs = SentencePairs(path, TOKENIZATION, options(batch_size=5, limit=5))
    batches = list(inputs)
    assert [len(batch.samples) for batch in batches] == [4, 4, 2] and inputs.n_samples == 10
    assert [sample.label for batch in batches for sample in batch.samples] == [n for n in range(5) for _ in range(2)]
    assert batches[0].kwargs["input_ids"][:2].tolist() == [[97, 0, 0, 0, 0, 0], [97] * 6]
    assert "the first 5 of 6 pairs of sentences (5 cut to 6 tokens)" in inputs.description
    assert list(inputs.known_samples()) == samples_of(batches)
    _, held_out = learned_and_held_out(inputs)
    first, second = [sample.index for sample in samples_of(held_out)]
    assert first % 2 == 0 and second == first + 1  # a pair is held out whole
    assert len(next(iter(SentencePairs(path, TOKENIZATION, options(batch_size=1)))).samples) == 2


def test_a_pair_with_an_unreadable_sentence_is_omitted(written, options):
    inputs = SentencePairs(written("a.tsv", "a\tb!\t1\nc\td\t2\n"), TOKENIZATION, options())
    (batch,) = inputs
    assert [sample.source for sample in batch.samples] == ["pair 2", "pair 2"]
    assert inputs.unreadable == ["a.tsv pair 1: no shouting"]
    assert torch.equal(batch.valid, torch.ones(2, 1, dtype=torch.bool))


def test_other_files_contain_texts(written, options):
    texts = pairs_or_texts(TOKENIZATION, options(data=str(written("a.txt", "a\tb\t1\nc\n"))))
    assert not isinstance(texts, SentencePairs) and texts.n_samples == 2
    assert isinstance(pairs_or_texts(TOKENIZATION, options(data=str(written("b.CSV", "a,b,1\n")))), SentencePairs)
