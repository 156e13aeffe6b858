"""Links of README, docs, cards, notebook and generated pages lead to files and headings; URLs are well-formed."""

import json
import re
import unicodedata
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted(path for suffix in ("md", "ipynb", "html") for path in DOCS.rglob(f"*.{suffix}")),
    *sorted(ROOT.glob("normscope/models/embedded/*.md")),
]
HOOKS = (ROOT / "scripts" / "docs_hooks.py").read_text(encoding="utf-8")
ON_THE_SITE = re.findall(r'"([\w/.*-]+\.\w+)"', HOOKS)  # the files outside of docs/ that it adds
URL = re.compile(r"https://[\w-]+(\.[\w-]+)+(/[\w.~%+/-]*)?(\?[\w=&%-]+)?(#[\w.-]+)?")
FENCE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)


def text_of(page):
    """Return the Markdown of a page without blocks of code, or its HTML without scripts."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    if page.suffix == ".html":
        return re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.DOTALL)
    return FENCE.sub("", text)


def links_in(text):
    """List targets of Markdown's links and images, and of HTML's attributes that refer to something."""
    of_markdown = re.findall(r"\]\(([^)\s]*)\)", re.sub(r"`[^`\n]*`", "", text))
    of_html = re.findall(r'<[^>]*\s(?:href|src)="([^"]*)"', text)
    return of_markdown + of_html + [f"#{name}" for name in re.findall(r'<[^>]*\s(?:for|aria-controls)="([^"]*)"', text)]


def anchors_of(page):
    """Return a page's ids and the slugs of headings. A heading has one only where GitHub and the site agree on it."""
    text = text_of(page)
    anchors = set(re.findall(r'\sid="([^"]*)"', text)) | set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        words = re.sub(r"[`*]|\[|\]\([^)]*\)", "", title).strip().lower()
        github = re.sub(r"[^\w -]", "", words).replace(" ", "-")
        ascii_words = unicodedata.normalize("NFKD", words).encode("ascii", "ignore").decode()
        if github == re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_words).strip()):
            anchors.add(github)
    return anchors


def why_dead(page, link):
    """Say why a link leads nowhere; None if it leads somewhere."""
    if ":" in link.partition("/")[0]:
        return None if URL.fullmatch(link) else "no well-formed https address"
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists():
        return "no such file"
    place = target.relative_to(ROOT).as_posix()
    on_the_site = target.is_relative_to(DOCS) or any(fnmatch(place, pattern) for pattern in ON_THE_SITE)
    if page.is_relative_to(DOCS) and not on_the_site:
        return "not on the site: OUTSIDE in scripts/docs_hooks.py lacks it"
    state = target.suffix == ".html" and "=" in anchor  # of a report, which tests/test_gallery.py checks
    return None if not anchor or state or anchor in anchors_of(target) else "no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page):
    dead = {link: why for link in links_in(text_of(page)) if (why := why_dead(page, link))}
    assert dead == {}


@pytest.mark.parametrize(
    ("link", "why"),
    [
        ("scale.md#one-host", None),
        ("../CHANGELOG.md", None),
        ("https://arxiv.org/abs/2503.10622", None),
        ("scale.md#two-hosts", "no such heading"),
        ("#one-host", "no such heading"),
        ("scales.md", "no such file"),
        ("../pyproject.toml", "not on the site"),
        ("http://arxiv.org", "no well-formed"),
        ("https://arxiv", "no well-formed"),
    ],
)
def test_a_dead_link_is_found(link, why):
    reason = why_dead(DOCS / "swaps.md", link)
    assert why in reason if why else reason is None
