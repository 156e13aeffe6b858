"""docs/gallery holds the pages that scripts/make_gallery.py writes, of today's format, and the docs lead to them."""

import importlib
import json
import re
from pathlib import Path
from urllib.parse import parse_qs

import pytest
import torch
from torch import nn

import normscope
from normscope.models.weights.repository import copy_of
from normscope.page.document import FORMAT

ROOT = Path(__file__).parents[1]
GALLERY = ROOT / "docs" / "gallery"
REPORT = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
WEIGHTS = {
    **dict.fromkeys(("demo_vit", "demo_dit", "demo_wav2vec2"), "embedded"),
    "minilm": "sentence-transformers/all-MiniLM-L6-v2",
}


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("make_gallery")


def document_in(text):
    assert text.endswith("</html>\n")
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])


def document(model):
    return document_in((GALLERY / f"{model}.html").read_text(encoding="utf-8"))


def names_in(page):
    """Return the keys of a page, of its first capture and of the first site in it."""
    capture = page["captures"][0]
    return set(page), set(capture), set(capture["sites"][0])


@pytest.fixture(scope="module")
def page_of_today():
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return document_in(normscope.report(normscope.capture(nn.LayerNorm(8), [x])).html)


def test_its_pages_are_those_of_the_script(script):
    assert {path.stem for path in GALLERY.iterdir()} == {*script.MODELS} == {*WEIGHTS}


@pytest.mark.parametrize("model", WEIGHTS)
def test_each_page_is_of_its_model_and_of_todays_format(script, page_of_today, model):
    page = document(model)
    [capture] = page["captures"]
    assert (page["format"], *names_in(page)) == (FORMAT, *names_in(page_of_today)), "run scripts/make_gallery.py again"
    assert page["title"] == capture["about"]["model"] == model
    assert capture["about"]["weights"].startswith(WEIGHTS[model]) and capture["random"] is False
    assert capture["curves"] == script.CURVES.split(",") and all(site["fits"] for site in capture["sites"])


def test_the_docs_lead_to_every_page_and_to_sites_that_are_on_it():
    links = re.findall(r"\]\(gallery/(\w+)\.html(?:#([^)]*))?\)", REPORT)
    assert {model for model, _ in links} == {*WEIGHTS}
    for model, address in links:
        sites = {site["name"] for site in document(model)["captures"][0]["sites"]}
        assert sites.issuperset(parse_qs(address).get("site", [])), address


def test_the_readme_shows_the_picture_and_leads_to_the_gallery():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "](outputs/gallery/report.png)](docs/report.md#a-gallery)" in readme
    assert "\n## A gallery\n" in REPORT and "](../outputs/gallery/report.png)" in REPORT


def test_the_picture_is_of_a_site_that_is_on_its_page(script):
    [site] = parse_qs(script.PART.removeprefix("#"))["site"]
    model = script.PICTURED.removesuffix(".html")
    assert site in {one["name"] for one in document(model)["captures"][0]["sites"]}


PICTURES = ROOT / "outputs" / "gallery"
RECORDED = json.loads((PICTURES / "words.json").read_text(encoding="utf-8"))


def test_every_picture_has_a_command_and_its_words(script):
    commands = {picture: command for command, files in script.FIGURES.items() for picture in files.values()}
    assert {path.name for path in PICTURES.glob("*.png")} == {*commands, script.PICTURE.name}
    recorded = {picture: of_picture["command"] for picture, of_picture in RECORDED.items()}
    assert recorded == {picture: line for picture, line in commands.items() if script.NOT_RECORDED not in line}


DECIMAL = re.compile(r"\d+\.\d+")


def alike(ours, theirs):
    """True if two texts are equal, but for a unit of the last digit of numbers with a decimal point."""
    units = [10.0 ** -len(number.partition(".")[2]) for number in DECIMAL.findall(ours)]
    pairs = zip(DECIMAL.findall(ours), DECIMAL.findall(theirs), units, strict=False)
    near = all(abs(float(one) - float(other)) < 1.5 * unit for one, other, unit in pairs)
    return near and DECIMAL.split(ours) == DECIMAL.split(theirs)


@pytest.mark.parametrize(
    ("theirs", "same"), [("3.attn, R² 0.967", True), ("3.attn, R² 0.968", False), ("4.attn, R² 0.966", False)]
)
def test_numbers_are_compared_to_the_printed_digit(theirs, same):
    assert alike("3.attn, R² 0.966", theirs) is same


FETCHED = {
    "minilm": WEIGHTS["minilm"],
    "smart_turn": "pipecat-ai/smart-turn-v3",
    "without.safetensors": "HuggingFaceTB/SmolLM2-135M-Instruct",
}
# `swap-bench demo_dit` also times a network of 3 GB.
RERUN = sorted({of["command"] for of in RECORDED.values() if not of["command"].startswith("swap-bench")})


@pytest.mark.slow
@pytest.mark.parametrize("command", RERUN)
def test_no_picture_is_stale(script, command, tmp_path):
    if any(name in command and not copy_of(repository).is_dir() for name, repository in FETCHED.items()):
        pytest.skip("scripts/fetch_pretrained.py has not been run")
    drawn = script.words_drawn(command, tmp_path)
    for picture, words in drawn.items():
        recorded = RECORDED[picture]["words"]
        stale = [pair for pair in zip(recorded, words, strict=False) if not alike(*pair)]
        assert not stale and len(recorded) == len(words), f"{picture}: run scripts/make_gallery.py {picture} again"
