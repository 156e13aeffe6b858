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
