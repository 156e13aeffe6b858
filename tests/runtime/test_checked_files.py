"""Files with checksums: exact content, or a refusal if they were changed after they were written."""

import json
import zlib

import mutations
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file as arrays_of
from safetensors.torch import load_file, save_file
from torch import nn

import normscope
from normscope.errors import DataError
from normscope.runtime.checked_files import read_checked, write_checked


@pytest.fixture
def file(tmp_path):
    torch.manual_seed(0)
    seen = normscope.capture(nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8)), [torch.randn(4, 8)])
    return normscope.save_capture(seen, tmp_path / "seen.safetensors")


@pytest.mark.parametrize("number", [100, pytest.param(10_000, marks=pytest.mark.faults)])
def test_mutated_captures_are_refused_or_unchanged(number):
    counts = mutations.mutated_captures(number, seed=7)
    assert counts.keys() <= mutations.FINE, counts
    assert sum(counts.values()) == number
    assert counts[mutations.REFUSED] > 0.9 * number


def content(file):
    with safe_open(file, framework="pt") as opened:
        return opened.metadata(), load_file(file)


def without_checksums(metadata):
    return metadata["normscope"].partition(', "crc32"')[0]


def exchanged(tensors, first, second):
    return {**tensors, first: tensors[second], second: tensors[first]}


CHANGES = {
    "one count more": lambda m, t: (m, {**t, "0.token_scales": t["0.token_scales"] + (t["0.token_scales"] > 0)}),
    "two sites' sums exchanged": lambda m, t: (m, exchanged(t, "0.channel_sums", "1.channel_sums")),
    "a tensor more": lambda m, t: (m, {**t, "9.moments": torch.zeros(3)}),
    "a tensor fewer": lambda m, t: (m, {name: tensor for name, tensor in t.items() if name != "1.moments"}),
    "another shape of the same bytes": lambda m, t: (m, {**t, "0.nonfinite_tokens": t["0.nonfinite_tokens"].view(1)}),
    "another dtype of the same bytes": lambda m, t: (
        m,
        {**t, "0.nonfinite_tokens": t["0.nonfinite_tokens"].view(torch.float64)},
    ),
    "another model": lambda m, t: ({**m, "normscope": m["normscope"].replace("Sequential", "sequential")}, t),
    "no checksums": lambda m, t: ({"normscope": without_checksums(m) + "}"}, t),
    "no table of checksums": lambda m, t: (
        {"normscope": without_checksums(m) + ', "crc32": 3}'},
        t,
    ),
    "another member of the header": lambda m, t: ({"normscope": m["normscope"][:-1] + ', "more": 1}'}, t),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_that_safetensors_accepts_are_refused(file, name):
    metadata, tensors = CHANGES[name](*content(file))
    save_file(tensors, file, metadata=metadata)
    with pytest.raises(DataError, match="is damaged: "):
        normscope.load_capture(file)


def test_equal_captures_are_equal_bytes(file):
    """safetensors writes several keys of metadata in an order that differs from call to call."""
    seen = normscope.load_capture(file)
    assert {normscope.save_capture(seen, file).read_bytes() for _ in range(8)} == {file.read_bytes()}


def test_other_libraries_read_arrays_and_checksums(tmp_path):
    """As docs/file-formats.md has it, by safetensors and numpy alone."""
    path = tmp_path / "x.safetensors"
    header = {"format": "normscope-test", "version": 1}
    write_checked(path, header, {"b": torch.tensor([[1.5, -0.0]]), "a": torch.tensor(3, dtype=torch.int32)})
    arrays = arrays_of(path)
    assert arrays["a"] == 3 and np.array_equal(arrays["b"], [[1.5, -0.0]])
    with safe_open(path, framework="np") as opened:
        document = json.loads(opened.metadata()["normscope"])
    assert document.pop("crc32") == {
        "": zlib.crc32(b'{"format": "normscope-test", "version": 1}'),
        "a": zlib.crc32(b"\3\0\0\0"),
        "b": zlib.crc32(b"\0\0\xc0\x3f\0\0\0\x80"),
    }
    assert document == header


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_tensors_and_headers_read_back_exactly(tmp_path, dtype, shape):
    header = {"format": "normscope-test", "version": 1, "text": "é\n", "number": 0.1}
    x = torch.ones(shape, dtype=dtype)
    write_checked(tmp_path / "x.safetensors", header, {"x": x})
    again, tensors = read_checked(tmp_path / "x.safetensors", "normscope-test", 1)
    assert again == header
    assert torch.equal(tensors["x"], x) and tensors["x"].dtype == dtype


@pytest.mark.parametrize(
    ("form", "version", "words"),
    [
        ("normscope-other", 1, "but no other"),
        ("normscope-test", 2, "test format version 1; this normscope reads version 2"),
    ],
)
def test_other_formats_are_refused(tmp_path, form, version, words):
    write_checked(tmp_path / "x.safetensors", {"format": "normscope-test", "version": 1}, {"x": torch.ones(2)})
    with pytest.raises(DataError, match=words):
        read_checked(tmp_path / "x.safetensors", form, version)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
@given(content=st.binary(max_size=400))
def test_all_bit_patterns_read_back(tmp_path_factory, dtype, content):
    """NaN payloads, infinities, negative zero and subnormal numbers among them."""
    path = tmp_path_factory.mktemp("bits") / "x.safetensors"
    whole = bytearray(content * 8)
    x = torch.frombuffer(whole, dtype=torch.uint8).view(dtype) if whole else torch.zeros(0, dtype=dtype)
    write_checked(path, {"format": "normscope-test", "version": 1}, {"x": x})
    _, tensors = read_checked(path, "normscope-test", 1)
    assert tensors["x"].dtype == dtype and tensors["x"].numpy().tobytes() == bytes(whole)
