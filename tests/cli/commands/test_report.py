"""``normscope report``: the HTML file and its data."""

import json
import re
from pathlib import Path

import pytest
import torch
from command_line import document, invoke, words
from torch import nn

import normscope
from normscope.tools.bench.reports import BenchReport, Timing


def data_of(file, part="data"):
    return json.loads(re.search(rf'id="{part}">(.*?)</script>', file.read_text(encoding="utf-8"), re.DOTALL)[1])


@pytest.fixture
def file(here):
    x = torch.randn(20, 7, 16, generator=torch.Generator().manual_seed(0))
    about = {"model": "planted", "weights": "none", "data": "noise"}
    seen = normscope.capture(nn.Sequential(nn.LayerNorm(16), nn.RMSNorm(16)), [x], about=about)
    return normscope.save_capture(seen, here / "seen.safetensors")


def test_a_capture_becomes_one_page(file, here):
    done = invoke(f"report {file} --func 'tanh,mine=x/(1+abs(x))' --layers 1-1")
    page = here / "outputs" / "seen-report.html"
    assert done.stdout.strip() == f"outputs/seen-report.html ({page.stat().st_size / 1e6:.1f} MB)"
    [capture] = data_of(page)["captures"]
    assert [site["name"] for site in capture["sites"]] == ["1"] and capture["curves"] == ["tanh", "mine"]
    assert "mean" not in data_of(page, "drawn-0-0")["diagonal"]  # which that capture did not sum
    answers = {answer["question"]: answer for answer in capture["check"]}
    assert answers["γ"]["verdict"] == "omitted" and [row["site"] for row in answers["point-wise"]["sites"]] == ["1"]


def test_a_model_is_captured_with_its_diagonal(here):
    printed = document("report demo_vit --layers 1 --limit 4 --func tanh -o page.html")
    assert printed["page"] == "page.html" and printed["bytes"] == (here / "page.html").stat().st_size
    [capture] = data_of(here / "page.html")["captures"]
    assert [site["name"] for site in capture["sites"]] == printed["captures"][0]["sites"]
    assert "mean" in data_of(here / "page.html", "drawn-0-0")["diagonal"] and len(capture["inputs"]) == 2
    answers = {answer["question"]: answer for answer in capture["check"]}
    assert [row["folds_into"] for row in answers["γ"]["sites"]] == [["blocks.4.attn.qkv.weight"]]
    assert [row["head_dim"] for row in answers["attention logits"]["sites"]] == [16]


def test_several_captures_share_a_page_with_swap_results(file, here):
    swap = here / "swap.json"
    timing = Timing("native", "eager", "norm", "forward", "float32", (1,), 1)
    swap.write_text(json.dumps({"speed": [BenchReport({}, "cpu", (timing,)).as_dict()]}), encoding="utf-8")
    invoke(f"report {file} {file} --layers 0-0 --func tanh --swap-bench {swap}")
    shown = data_of(here / "outputs" / "report.html")
    assert len(shown["captures"]) == 2 and shown["swaps"]["speed"][0]["device"] == "cpu"


@pytest.mark.slow
def test_a_report_shows_the_inputs_that_a_capture_kept(here):
    capture = "capture demo_dit --layers 1 --limit 2 -o seen.safetensors --keep-inputs 2"
    done = invoke(f"{capture} --json")
    kept = [f"trajectory {i} · timestep {timestep}" for timestep in (980, 660, 320, 0) for i in (0, 1)]
    assert json.loads(done.stdout)["inputs"] == kept
    assert "the thumbnail of trajectory 0 · timestep 980" in words(done.stderr) and "4 more" in words(done.stderr)
    for asked, expected in (
        ("", ["trajectory 0", "trajectory 1"] * 4),
        ("--keep-inputs 1", ["trajectory 0"] * 4),
        ("--keep-inputs 0", []),
    ):
        assert ("the thumbnail of trajectory 0" in words(invoke(f"report seen.safetensors {asked}").stderr)) is bool(
            expected
        )
        shown = data_of(here / "outputs" / "seen-report.html")["captures"][0]["inputs"]
        assert [entry["name"] for entry in shown] == expected


@pytest.mark.usefixtures("here")
def test_inputs_without_a_preview_are_reported():
    done = invoke(f"capture py:{Path(__file__).parents[1] / 'factories.py'}:small -o seen.safetensors --keep-inputs 2")
    assert "--keep-inputs kept none: no input is a picture, a recording or a text" in words(done.stderr)
