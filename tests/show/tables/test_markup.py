"""Tables for papers and pages, read back by a small reader of LaTeX."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from normscope.cli import app
from normscope.show.tables.markup import as_latex, as_markdown, latex
from normscope.show.tables.table import names, several, table_of, words

COMMANDS = {
    r"\textbackslash": "\\", r"\textasciitilde": "~", r"\textasciicircum": "^", r"\ldots": "…", r"\alpha": "α",
    r"\beta": "β", r"\gamma": "γ", r"\mu": "μ", r"\rho": "ρ", r"\sigma": "σ", r"\Sigma": "Σ", r"\partial": "∂",
    r"\surd": "√", r"\|": "‖", r"\infty": "∞", r"\cdot": "·", r"\times": "×", r"\pm": "±", r"\leq": "≤",
    r"\geq": "≥", r"\approx": "≈", r"\pi": "π", r"\^": "^", **{f"\\{letter}": letter for letter in "&%$#_{}"},
}  # fmt: skip
ENSURED = re.compile(r"\\ensuremath\{((?:[^{}]|\{[^{}]*\})*)\}")
TOKEN = re.compile(r"\\(?:[A-Za-z]+|.)|.", re.DOTALL)


def read(text):
    """What LaTeX sets, and fails as LaTeX does: on unbalanced braces, on specials, on Greek outside of math."""
    text = ENSURED.sub(r"$\1$", text)
    read, math, depth, parts = [], False, 0, TOKEN.findall(text)
    for part in parts:
        if part == "$":
            math = not math
        elif part in "{}":
            depth += 1 if part == "{" else -1
            assert depth >= 0
        elif part.startswith("\\"):
            assert part in COMMANDS, part
            assert math or part[1:] in "&%$#_{}^" or part.startswith((r"\text", r"\ldots"))
            read.append(COMMANDS[part])
        elif math and part in "^_":
            read.append(part)
        else:
            assert part not in "&%#_~^", text
            assert math or part not in "<>|"
            assert part.isascii(), part
            if not (math and part == " "):
                read.append(part)
    assert not math and not depth
    return "".join(read)


@given(st.text(st.sampled_from([*map(chr, range(32, 127)), *"αμ√‖±–|"]), min_size=1, max_size=20))
def test_every_name_is_set_as_it_stands(name):
    shown = re.sub(r"\s", "", name).replace("–", "--")
    [row] = as_latex([("", table_of([name], [words("", str)]))]).splitlines()[2:-2]
    assert row.endswith(r"\\") and not re.match(r"\s*[*\[]", row)
    for written in (latex(name), row[:-2]):
        assert re.sub(r"\s", "", read(written)) == shown


@pytest.mark.parametrize(
    ("shown", "written"),
    [
        ("0.891 ± 0.014", r"0.891 \ensuremath{\pm} 0.014"),
        ("-0.0001", "$-$0.0001"),
        ("1e-06", "1e-06"),
        ("45.9%", r"45.9\%"),
        ("2≈", r"2\ensuremath{\approx}"),
        ("|μ|/σ", r"\ensuremath{|}\ensuremath{\mu}\ensuremath{|}/\ensuremath{\sigma}"),
        ("u³ in 10⁻²", r"u\ensuremath{^{3}} in 10\ensuremath{^{-}}\ensuremath{^{2}}"),
    ],
)
def test_numbers_keep_their_digits(shown, written):
    assert written in as_latex([("", table_of([shown], [words("", str)]))]).splitlines()[2]


def table():
    columns = [names("site", lambda row: row[0]), *several(["A", "R²"], lambda row: row[1:])]
    rows = [("[0].norm_1", "1.0", "0.891 ± 0.014"), ("*", "", "")]
    remark = {"*": "*: nothing | to fit"}
    return table_of(rows, columns, caption=["R²: of 5 % & more"], remark=lambda row: remark.get(row[0]))


def stripped(text):
    return [re.sub(" +", " ", line).strip() for line in text.splitlines()]


def test_a_table_for_booktabs():
    assert stripped(as_latex([("a_b · 5 %", table())])) == [
        "% a_b · 5 %",
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r"site & A & R\ensuremath{^{2}} \\",
        r"\midrule",
        r"{[}0{]}.norm\_1 & 1.0 & 0.891 \ensuremath{\pm} 0.014 \\",
        r"{*} & -- & -- \\",
        r"\bottomrule",
        r"\end{tabular}",
        "% R²: of 5 % & more",
        "% *: nothing | to fit",
    ]


def test_a_table_for_a_page():
    written = stripped(as_markdown([("a_b", table())]))
    assert [re.sub("-+", "-", line) for line in written] == [
        r"a\_b",
        "",
        "| site | A | R² |",
        "|:-|-:|-:|",
        r"| \[0\].norm\_1 | 1.0 | 0.891 ± 0.014 |",
        r"| \* | – | – |",
        "",
        "R²: of 5 % & more",
        r"\*: nothing \| to fit",
    ]


@pytest.mark.parametrize(
    "command",
    [
        ("fit", "--func", "tanh,isru,linear", "--layers", "2"),
        ("stats", "--layers", "2"),
    ],
    ids=" ".join,
)
def test_what_commands_write_can_be_set_by_any_latex(command, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    name, *options = command
    for suffix in ("tex", "md"):
        done = CliRunner().invoke(
            app, [name, "demo_vit", "--limit", "4", *options, "-o", str(tmp_path / f"t.{suffix}")]
        )
        assert done.exit_code == 0, done.output
    text = (tmp_path / "t.tex").read_text()
    assert re.findall(r"\d+\.\d+ ± [\d.]+", (tmp_path / "t.md").read_text()) == [
        f"{value} ± {half}" for value, half in re.findall(r"(\d+\.\d+) \\ensuremath\{\\pm\} ([\d.]+)", text)
    ]
    assert text.startswith("% demo_vit · embedded demo_vit")
    tables = re.findall(r"\\begin\{tabular\}\{([lr]+)\}\n(.*?)\\end\{tabular\}", text, re.DOTALL)
    assert tables
    for body in tables:
        sides, lines = body[0], [line for line in body[1].splitlines() if not re.fullmatch(r"\\\w+rule", line)]
        assert len(lines) > 2 and body[1].isascii()
        for line in lines:
            assert line.endswith(r" \\")
            cells = re.split(r"(?<!\\)&", line.removesuffix(r" \\"))
            assert len(cells) == len(sides)
            for cell in cells:
                read(cell)
    assert "|:---" in (tmp_path / "t.md").read_text()
