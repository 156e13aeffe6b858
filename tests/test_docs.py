"""The docs agree with the tables that they show; the options that they name exist, and their Python runs."""

import importlib
import re
from pathlib import Path

import pytest
import typer

import normscope
from normscope.cli import app
from normscope.curves.known import CURVES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
OF_TORCHRUN = {"--max-restarts"}
PAGE = (DOCS / "curves.md").read_text(encoding="utf-8")


def row(curve):
    def yes(value):
        return "yes" if value else "no"

    names = ", ".join(f"`{name}`" for name in (curve.name, *curve.aliases))
    properties = (curve.bounded, curve.zero_centred, curve.centre_sensitive, curve.monotone)
    slope = f"{curve.slope_at_origin:.3g}"
    cells = (names, curve.formula.replace("|", r"\|"), *map(yes, properties), slope, curve.source)
    return f"| {' | '.join(cells)} |"


def test_the_page_lists_every_curve_as_it_is():
    rows = [line for line in PAGE.splitlines() if line.startswith("| `") and "`--func`" not in line]
    assert rows == [row(curve) for curve in CURVES.values()]


def descendants(kind):
    return {each for below in kind.__subclasses__() for each in (below, *descendants(below))}


def test_the_reference_names_everything_public():
    page = (DOCS / "reference.md").read_text(encoding="utf-8")
    named = re.findall(r"^### `normscope\.(\w+|(?:figures|errors)\.\w+)`$", page, re.MULTILINE)
    figures = [f"figures.{name}" for name in normscope.figures.__all__]
    public = {normscope.errors.NormscopeError, *descendants(normscope.errors.NormscopeError)}
    errors = [f"errors.{error.__name__}" for error in public if error.__module__ == "normscope.errors"]
    assert sorted(named) == sorted([*set(normscope.__all__) - {"figures", "errors"}, *figures, *errors])


def test_the_reference_is_that_of_todays_docstrings(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    page = (DOCS / "reference.md").read_text(encoding="utf-8")
    assert page == importlib.import_module("make_reference").reference(), "run scripts/make_reference.py"


def test_the_citation_is_of_this_version():
    version = normscope.__version__
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version = {{{version}}}" in (DOCS / "citing.md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("few_inputs")
def test_the_python_of_the_page_runs():
    [block] = python_of("curves")
    names = {}
    exec(re.sub(r"^  ", "", block, flags=re.MULTILINE), names)  # noqa: S102 - our own page
    assert {found.curve for found in names["fits"]} == {"tanh", "swish"}


@pytest.mark.slow
@pytest.mark.usefixtures("few_inputs")
@pytest.mark.parametrize("page", ["check", "figures", "index", "probe", "related", "report", "scale-of-tokens"])
def test_the_python_of_other_pages_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks, names = python_of(page), {}
    assert blocks
    for block in blocks:
        exec(block, names)  # noqa: S102 - our own page


def python_of(page):
    return re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_option_that_is_named_exists(page):
    commands = typer.main.get_command(app).commands
    options = {
        name: {option for param in command.params for option in (*param.opts, *param.secondary_opts)} | {"--help"}
        for name, command in commands.items()
    }
    any_command = {"--install-completion", "--version"}.union(*options.values())
    unknown = set()
    for line in lines_of_code(page.read_text(encoding="utf-8")):
        command = re.search(r"\bnormscope ([a-z-]+)", line)
        if command or line.startswith("--"):
            known = options.get(command[1], any_command) if command else any_command
            words = line[command.start() :] if command else line
            unknown |= {word for word in re.findall(r"(?<!\S)--[a-z][a-z-]*", words) if word not in known}
    assert unknown <= OF_TORCHRUN


def lines_of_code(markdown):
    block = re.compile(r"```(?:bash|console)\n(.*?)```", re.DOTALL)
    lines = "\n".join(block.findall(markdown)).replace("\\\n", " ")
    return [*re.split(r"\n|&&", lines), *re.findall(r"`([^`]+)`", block.sub("", markdown))]
