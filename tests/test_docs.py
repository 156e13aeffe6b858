"""The docs agree with the tables that they show, and their Python runs."""

import math
import re
from pathlib import Path

import pytest

import normscope
from normscope.fits.curves.known import CURVES

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "curves.md").read_text(encoding="utf-8")


def row(curve):
    def yes(value):
        return "yes" if value else "no"

    names = ", ".join(f"`{name}`" for name in (curve.name, *curve.aliases))
    slope = "∞" if curve.slope_at_origin == math.inf else f"{curve.slope_at_origin:.3g}"
    properties = (curve.bounded, curve.zero_centred, curve.centre_sensitive, curve.monotone)
    cells = (names, curve.formula.replace("|", r"\|"), *map(yes, properties), slope, curve.source)
    return f"| {' | '.join(cells)} |"


def test_the_page_lists_every_curve_as_it_is():
    rows = [line for line in PAGE.splitlines() if line.startswith("| `") and "`--func`" not in line]
    assert rows == [row(curve) for curve in CURVES.values()]


def test_the_reference_names_everything_public():
    named = re.findall(r"^::: normscope\.(\w+)$", (DOCS / "reference.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(named) == sorted(set(dir(normscope)) & {*normscope.__all__})


def test_the_python_of_the_page_runs():
    [block] = python_of("curves")
    names = {}
    exec(re.sub(r"^  ", "", block, flags=re.MULTILINE), names)  # noqa: S102 - our own page
    assert {found.curve for found in names["fits"]} == {"tanh", "swish"}


@pytest.mark.slow
@pytest.mark.parametrize("page", ["figures", "index", "related", "report", "swaps"])
def test_the_python_of_other_pages_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks, names = python_of(page), {}
    assert blocks
    for block in blocks:
        exec(block, names)  # noqa: S102 - our own page


def python_of(page):
    return re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(encoding="utf-8"), re.DOTALL)
