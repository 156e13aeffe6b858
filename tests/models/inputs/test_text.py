import hashlib

import pytest
import torch
from loads import Bytes, samples_of

from normscope.errors import DataError
from normscope.models.inputs.text import Texts

TOKENIZATION = Bytes(8, pad_id=7, errors={"nothing": DataError("the tokenizer leaves nothing of it")})


def texts_of(inputs):
    """Decode the tokens, and check that padding follows the mask."""
    texts = []
    for batch in inputs:
        ids, mask = batch.kwargs["input_ids"], batch.kwargs["attention_mask"].bool()
        assert (ids[~mask] == 7).all()
        assert torch.equal(batch.valid, mask)
        texts += [bytes(row[kept].tolist()).decode() for row, kept in zip(ids, mask, strict=True)]
    return texts


def test_the_default_page(options):
    inputs = Texts(TOKENIZATION, options(batch_size=5))
    samples = samples_of(inputs)
    assert inputs.n_samples == len(samples) == 12
    assert [sample.index for sample in samples] == [sample.source_index for sample in samples] == list(range(12))
    assert len({sample.source for sample in samples}) == 12
    assert {sample.data for sample in samples} == {"page"}
    assert inputs.description == "normscope's page: 12 texts (12 cut to 8 tokens)"


def test_lines_of_a_file(tmp_path, options):
    path = tmp_path / "lines.txt"
    path.write_bytes("\ufeffone\r\n\n  \t\n\u3000\n  two\nnothing\nlong enough\n".encode() + b"\xff\xfe\nlast")
    inputs = Texts(TOKENIZATION, options(data=str(path)))
    assert texts_of(inputs) == ["one", "  two", "long eno", "last"]
    nothing = "lines.txt line 6: the tokenizer leaves nothing of it"
    assert inputs.unreadable == [nothing, "lines.txt line 8: not UTF-8"]
    assert inputs.n_samples == 6
    samples = samples_of(inputs)
    assert [sample.source for sample in samples] == [f"lines.txt line {number}" for number in (1, 5, 7, 9)]
    assert [sample.index for sample in samples] == [sample.source_index for sample in samples] == [0, 1, 3, 5]
    for _ in range(2):  # counted anew each time
        list(inputs)
        assert inputs.description == f"{path}: 6 texts (1 cut to 8 tokens, 2 unreadable)"


def test_files_of_a_folder_are_sources(tmp_path, options):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("b1\nb2\n")
    (tmp_path / "sub" / "a.MD").write_text("\na1\n")
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "table.csv").write_text("no,text")
    inputs = Texts(TOKENIZATION, options(data=str(tmp_path), batch_size=2))
    assert texts_of(inputs) == ["b1", "b2", "a1"]
    samples = samples_of(inputs)
    seen = [(sample.source, sample.source_index, sample.index) for sample in samples]
    assert seen == [("b.txt", 0, 0), ("b.txt", 0, 1), ("sub/a.MD", 2, 2)]
    assert inputs.description == f"{tmp_path}: 3 texts (1 other file left out)"
    listing = b"".join(
        f"{name}\0{(tmp_path / name).stat().st_size}\0".encode() for name in ("b.txt", "empty.txt", "sub/a.MD")
    )
    assert {sample.data for sample in samples} == {hashlib.blake2b(listing, digest_size=8).hexdigest()}


def test_files_that_cannot_be_opened_are_omitted_and_named(tmp_path, options):
    (tmp_path / "a.txt").write_text("a1\n")
    (tmp_path / "b.txt").write_text("b1\n")
    (tmp_path / "c.txt").symlink_to("gone.txt")
    inputs = Texts(TOKENIZATION, options(data=str(tmp_path)))
    (tmp_path / "a.txt").unlink()
    assert texts_of(inputs) == ["b1"]
    assert inputs.unreadable == ["a.txt: No such file or directory", "c.txt: No such file or directory"]


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("lines.txt", b"\n \n", r"contains no text: 1 file without a line that is not blank\."),
        ("lines.txt", b"", "contains no text"),
        ("lines.txt", "ö".encode("utf-16"), r"can be read\. The first is lines\.txt line 1: not UTF-8\."),
        ("picture.png", b"", r"contains no text file, only 1 other file\."),
    ],
)
def test_refusals(tmp_path, options, name, content, error):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=error):
        list(Texts(TOKENIZATION, options(data=str(tmp_path if name == "picture.png" else tmp_path / name))))


def test_padding():
    batch = TOKENIZATION.padded([[1, 2, 3], [4]])
    assert batch.kwargs["input_ids"].tolist() == [[1, 2, 3], [4, 7, 7]]
    assert batch.kwargs["attention_mask"].tolist() == batch.valid.int().tolist() == [[1, 1, 1], [1, 0, 0]]
    assert bool(TOKENIZATION.padded([[1, 2], [3, 4]]).valid.all())
    multiple = Bytes(8, multiple=4).padded([[1, 2, 3], [4]])
    assert multiple.valid.sum(1).tolist() == [3, 1]
    assert multiple.kwargs["input_ids"].shape == (2, 4)


def test_texts_are_read_in_any_order_by_any_worker(tmp_path, options):
    numbers = torch.Generator().manual_seed(3)
    for name in "abc":
        drawn = torch.randint(0, 40, (40,), generator=numbers).tolist()
        words = [chr(97 + n) * (n % 8 + 1) if n < 26 else "" for n in drawn]
        (tmp_path / f"{name}.txt").write_text("\n".join(words) + "\n")
    (tmp_path / "b.txt").write_bytes(b"\xff\n" + (tmp_path / "b.txt").read_bytes())
    lines = [
        (name, number, line)
        for name in ("a.txt", "b.txt", "c.txt")
        for number, line in enumerate((tmp_path / name).read_bytes().split(b"\n"), start=1)
        if line.strip()
    ]
    order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(5)).tolist()[:50]
    for workers in (0, 2):
        inputs = Texts(TOKENIZATION, options(data=str(tmp_path), shuffle=True, seed=5, limit=50, workers=workers))
        readable = [i for i in order if lines[i][2] != b"\xff"]
        assert texts_of(inputs) == [lines[i][2].decode() for i in readable]
        seen = samples_of(inputs)
        assert [(sample.source, sample.index) for sample in seen] == [(lines[i][0], i) for i in readable]
        assert [sample.index for sample in inputs.known_samples()] == order
        assert f"50 of {len(lines)} texts, drawn with seed 5" in inputs.description
