"""docs/curves.md says of every curve what the table of curves says, and its Python runs."""

import math
import re
from pathlib import Path

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
    [block] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names = {}
    exec(re.sub(r"^  ", "", block, flags=re.MULTILINE), names)  # noqa: S102 - our own page
    assert {found.curve for found in names["fits"]} == {"tanh", "swish"}
