"""The file: what it allows, what it holds, where it is written, and how a notebook shows it."""

import html
import json
import re
from base64 import b64encode
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import normscope
from normscope.errors import DataError, UsageError
from normscope.page.report import SCRIPTS, as_data, asset


def test_the_policy_allows_the_pages_own_scripts_and_nothing_else(pages):
    text = pages.one.read_text(encoding="utf-8")
    policy = html.unescape(re.search(r'Content-Security-Policy" content="(.*?)">', text)[1])
    said = dict(part.split(" ", 1) for part in policy.split("; "))
    assert said["default-src"] == "'none'" and said["img-src"] == "data: blob:"
    assert "unsafe" not in policy and "http" not in policy
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digests = [f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts]
    assert said["script-src"].split() == digests and len(digests) == len(SCRIPTS)
    [style] = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert said["style-src"] == f"'sha256-{b64encode(sha256(style.encode()).digest()).decode()}'"


def test_nothing_in_it_points_elsewhere(pages):
    text = pages.one.read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}  # the name of a namespace
    assert not re.search(r"<(link|iframe|object|embed|base|form)\b| (src|href)=\"", text)


@pytest.mark.parametrize("name", [f"{script}.js" for script in SCRIPTS])
def test_no_script_makes_markup_or_code_of_text(name):
    text = asset(name)
    assert text.startswith('"use strict";')
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|</script|fetch\(", text
    )


def test_hostile_names_cannot_leave_their_element(pages, documents, hostile):
    text = pages.one.read_text(encoding="utf-8")
    assert "<img" not in text and "\u202e" not in re.search("<title>.*?</title>", text)[0]
    assert hostile.name in [site["name"] for site in documents[0]["data"]["captures"][0]["sites"]]


@settings(max_examples=30)
@given(st.dictionaries(st.text(), st.text(st.characters())))
def test_any_text_comes_back(names):
    text = as_data(names)
    assert json.loads(text) == names
    assert text.isascii() and not re.search("[<>&]", text)


def test_the_file_is_the_page_and_its_size_is_reported(pages, tmp_path):
    page = pages.page
    file = page.save(tmp_path / "folder" / "page.html")
    assert file.read_text(encoding="ascii") == page.html
    assert re.fullmatch(r"Page .*: [\d.]+ MB", repr(page)) and "\u202e" not in repr(page)
    with pytest.raises(UsageError, match=r"name it FILE\.html, not .*page\.txt"):
        page.save(tmp_path / "page.txt")


def test_fits_are_made_where_none_are_given(other):
    text = normscope.report(other.only("first")).html
    [capture] = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])["captures"]
    assert capture["curves"] == ["tanh", "isru"]


REFUSALS = [
    (lambda seen, fits: normscope.report([]), UsageError, "no capture"),
    (lambda seen, fits: normscope.report([seen, seen], fits), UsageError, "2 captures and one list of fits"),
    (lambda seen, fits: normscope.report([seen, seen], [fits]), UsageError, "2 captures and 1 lists of fits"),
    (lambda seen, fits: normscope.report(seen, fits, drift=["dyt"]), UsageError, "not a str"),
    (
        lambda *_: normscope.report("demo_vit"),
        DataError,
        "no capture file 'demo_vit'; normscope.capture(normscope.load(",
    ),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSALS)
def test_refusals(seen, fits, call, error, words):
    with pytest.raises(error, match=re.escape(words)):
        call(seen, fits)


def test_a_report_takes_files_of_captures(seen, tmp_path):
    off = seen.only("off")
    file = normscope.save_capture(off, tmp_path / "seen.safetensors")
    assert normscope.report(file).title == normscope.report([str(file)]).title == normscope.report(off).title


def test_a_check_belongs_to_its_capture(seen, other, checked):
    seen, other = seen.only(1), other.only(1)
    record = normscope.check(other)
    [first, second] = documents_of(normscope.report([seen, other], check=[None, record]))
    assert first == [] and [answer["question"] for answer in second] == [answer.question for answer in record.answers]
    assert documents_of(normscope.report([seen, other], check=checked)) == [checked["answers"], []]
    for check, words in (([checked, checked], "There are 1 captures and 2 checks"), ({"reports": []}, "dict without")):
        with pytest.raises(UsageError, match=words):
            normscope.report(seen, check=check)


def documents_of(page):
    [text] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.html, re.DOTALL)
    return [capture["check"] for capture in json.loads(text)["captures"]]


VIEWS = {"one": ["overview", "site", "explorer", "check", "swap"], "two": ["overview", "site", "explorer", "compare"]}


@pytest.mark.parametrize("which", VIEWS)
def test_it_loads_and_shows_each_view_without_an_error_or_a_request(browser, pages, which):
    file = getattr(pages, which)
    page = browser.open(file)
    assert page.run("return document.documentElement.dataset.ready") is not None
    assert page.driver.title.endswith(" · normscope")
    assert page.texts("nav button") == [name.capitalize() for name in VIEWS[which]]
    for view in VIEWS[which]:
        page.click(f"#tab-{view}")
        assert page.texts("nav button[aria-current=page]") == [view.capitalize()]
    console, asked = page.logs()
    assert console == []
    assert [url for url in asked if not url.startswith((file.as_uri(), "data:", "blob:", "about:"))] == []


def test_hostile_names_stay_text(browser, pages, hostile):
    for address in ("", f"#view=site&site={hostile.long}", "#view=compare", "#view=swap"):
        page = browser.open(pages.two, address)
        assert page.run("return document.querySelectorAll('main img, main script, main b').length") == 0
        assert page.run("return document.documentElement.scrollWidth") <= 1280
    shown = "".join(browser.open(pages.one).texts("h1, .name, td"))
    assert "<img src=x" in shown and "\\u202egnp" in shown
    assert "\u202e" not in browser.run("return document.body.innerText")
    page = browser
    page.run(
        "go({view: 'site', site: open.capture.sites.findIndex((site) => site.name === arguments[0])})", hostile.name
    )
    assert "<img src=x" in page.texts("h2")[0]
    page.driver.refresh()  # the address holds it
    assert "<img src=x" in page.texts("h2")[0]


def test_the_policy_lets_nothing_else_run(browser, pages):
    page = browser.open(pages.one)
    page.run("""
        window.ran = 0;
        document.body.insertAdjacentHTML("beforeend", "<img src=x onerror='window.ran = 1'>");
        const script = document.createElement("script");
        script.textContent = "window.ran = 2";
        document.body.append(script);
        // A driver's own script may evaluate text; one of the page's may not.
        setTimeout(() => {
            try { new Function("window.ran = 3")(); } catch (error) { window.refused = error.name; }
        });""")
    page.driver.execute_async_script("setTimeout(arguments[0], 50)")
    assert page.run("return [window.ran, window.refused]") == [0, "EvalError"]


@pytest.mark.slow
def test_a_frame_works_as_the_file_does(browser, pages, tmp_path):
    """As a notebook contains it: no address to keep, and the same figures."""
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<!DOCTYPE html><meta charset='utf-8'>{pages.page._repr_html_()}", encoding="utf-8")
    page = browser.open(notebook)
    page.driver.switch_to.frame(0)
    page.run("go({view: 'site', site: 1})")
    assert page.texts("h2") == ["1 second"] and page.run("return document.querySelector('[data-line=tanh]') !== null")
    assert page.logs()[0] == []
    page.driver.switch_to.default_content()
