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
def script(monkeypatch, tmp_path):
    """The script, which writes into a folder of its own."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    module = importlib.import_module("make_gallery")
    monkeypatch.setattr(module, "PICTURE", tmp_path / "report.png")
    return module


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
    assert capture["about"]["weights"].startswith(WEIGHTS[model]) and capture["made"] == ""
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


@pytest.mark.parametrize(
    ("browsers", "sentence"),
    [
        ((), "report.png was not made: it takes a Chromium, and none is installed (Debian: chromium)."),
        (("true",), "report.png was not made: there is no page minilm.html."),
    ],
)
def test_what_could_not_be_made_is_said_after_all_that_could(script, monkeypatch, tmp_path, browsers, sentence):
    asked = []
    monkeypatch.setattr(script, "written", lambda model: asked.append(model) or model != "minilm")
    monkeypatch.setattr(script, "PAGES", tmp_path)
    monkeypatch.setattr(script, "BROWSERS", browsers)
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == f"minilm.html was not written, as said above.\n{sentence}"
    assert asked == list(script.MODELS) and not script.PICTURE.exists()


def test_a_picture_is_taken_until_two_are_alike(script, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "PAGES", tmp_path)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "BROWSERS", ("true",))
    (tmp_path / script.PICTURED).touch()
    assert "painted nothing of minilm.html" in script.pictured()[0]
    different = map(str.encode, map(str, range(99)))
    monkeypatch.setattr(script, "painted_by", lambda browser, address: next(different))
    assert "no two in a row were alike" in script.pictured()[0] and not script.PICTURE.exists()
    taken = iter([b"half", b"whole", b"whole"])
    monkeypatch.setattr(script, "painted_by", lambda browser, address: next(taken))
    assert script.pictured() == [] and script.PICTURE.read_bytes() == b"whole"
