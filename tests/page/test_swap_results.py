"""Records and files of swap-bench for the page, and refusals of others."""

import copy
import json
import re

import pytest
import torch
from torch import nn

import normscope
from normscope.errors import DataError
from normscope.page.swap_results import read_swap_results, swap_results
from normscope.tools.bench.reports import BenchReport, Timing


def test_a_file_is_read_as_its_document(swaps, tmp_path):
    file = tmp_path / "swap.json"
    file.write_text(json.dumps(swaps), encoding="utf-8")
    assert read_swap_results(file) == swap_results(swaps)
    shown = swap_results(swaps)
    assert shown["drift"][0]["quality"]["scores"]["swapped"] == {"value": 0.5, "interval": None}
    assert shown["speed"][0]["rows"][0]["note"] == "<b>" and shown["drift"][0]["about"]["weights"].startswith("random")


def test_records_become_documents():
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8))
    batches = [torch.randn(8, 8, generator=torch.Generator().manual_seed(0))]
    seen = normscope.capture(model, batches)
    moved = normscope.drift(model, batches, normscope.replacements(model, "dyt", seen), func="dyt", init="fit")
    timing = Timing("dyt", "eager", "norm", "forward", "float32", (1, 16), 1, samples=(1e-3,), median=1e-3)
    shown = swap_results([moved, BenchReport({"model": "net"}, "cpu", (timing,))])
    [drift], [speed] = shown["drift"], shown["speed"]
    assert drift["sites"] == ["1"] and drift["rows"][0]["relative_l2"]["p50"] == moved.all.relative_l2.p50
    assert speed["rows"][0]["median"] == 1e-3 and speed["rows"][0]["shape"] == [1, 16]
    assert swap_results(moved)["drift"] == shown["drift"] and swap_results(None) == {"drift": [], "speed": []}


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (["drift", 0, "func"], 3, "drift is malformed: Expected `str`, got `int` - at `$.func`"),
        (["drift", 0, "sites", 0], None, "drift is malformed: Expected `str`, got `null` - at `$.sites[0]`"),
        (["drift", 0, "rows", 1, "relative_l2", "p50"], "far", "`float`, got `str` - at `$.rows[1].relative_l2"),
        (["drift", 0, "rows", 1, "relative_l2"], None, "Expected `object`, got `null` - at `$.rows[1].relative_l2`"),
        (["drift", 0, "rows", 0], 7, "Expected `object`, got `int` - at `$.rows[0]`"),
        (["drift", 0, "quality", "scores", "swapped", "interval"], [1], "`array` of length 2, got 1"),
        (["drift", 0, "func"], ["dyt"], "drift is malformed: Expected `str`, got `array` - at `$.func`"),
        (["speed", 0, "rows", 0, "median"], float("nan"), "speed contains the number nan"),
        (["speed", 0, "device"], None, "speed is malformed: Expected `str`, got `null` - at `$.device`"),
    ],
)
def test_malformed_entries_are_named(swaps, path, value, words):
    document = copy.deepcopy(swaps)
    *way, last = path
    place = document
    for step in way:
        place = place[step]
    place[last] = value
    with pytest.raises(DataError, match=f"^In the document, the .*{re.escape(words)}"):
        swap_results(document)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "holds a JSON list"),
        ("{}", "no drift and no speed in"),
        ('{"drift": 3}', "no drift and no speed in"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path, text, words):
    file = tmp_path / "swap.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=words):
        read_swap_results(file)
    with pytest.raises(DataError, match=r"Cannot read .*missing\.json"):
        read_swap_results(tmp_path / "missing.json")
