"""Every table also as CSV: the rows of the JSON document, in flat columns."""

import csv
import io
import json
import math

import pytest
from command_line import document, invoke
from hypothesis import example, given, settings
from hypothesis import strategies as st

from normscope.cli.output import as_csv

FIT = "fit demo_vit --layers 0,16 --limit 9"


def rows_of(text):
    return list(csv.DictReader(io.StringIO(text, newline="")))


def cell(value):
    """What RFC 4180 leaves of a value of the JSON document."""
    if value is None:
        return ""
    if isinstance(value, list):
        return ";".join(map(str, value))
    return json.dumps(value) if isinstance(value, bool | float) else str(value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("records")


def columns_of(found):
    """What a fit of the JSON document is as a row: bounds of intervals, and lists as text."""
    row = {name: value for name, value in found.items() if name not in ("sites", "intervals")}
    bounds = {
        f"{name}_{end}": at
        for name, ends in found["intervals"].items()
        for end, at in zip(("low", "high"), ends, strict=True)
    }
    place = list(found).index("sites")
    items = list(row.items())
    return dict([*items[:place], ("sites", ";".join(found["sites"])), *items[place:]]) | bounds


def as_read(fits):
    rows = [columns_of(found) for found in fits]
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: cell(row.get(name)) for name in names} for row in rows]


def test_csv_holds_what_the_json_document_of_the_same_run_does(folder):
    done = invoke(f"{FIT} --json -o same.csv", cwd=folder)
    expected = json.loads(done.stdout)["fits"]
    assert len(expected) == 4 and "wrote same.csv" in done.stderr
    text = (folder / "same.csv").read_text()
    assert rows_of(text) == as_read(expected)
    assert [float(row["alpha"]) for row in rows_of(text)] == [found["alpha"] for found in expected]
    assert "\r" not in text and text.endswith("\n")


def test_a_file_takes_the_place_of_the_table(folder):
    for command in ("models", "models -q", "fit demo_vit --limit 2 --layers 1", "layers demo_vit"):
        assert invoke(f"{command} -o rows.csv", cwd=folder).stdout == "rows.csv\n"
        assert len(rows_of((folder / "rows.csv").read_text())) > 1
    models = document("models")["models"]
    invoke("models -o models.json", cwd=folder)
    assert json.loads((folder / "models.json").read_text())["models"] == models


@pytest.mark.parametrize(
    ("command", "columns", "headings"),
    [
        ("fit demo_vit", "site,alpha,R²", ["site", "α", "R²"]),
        ("fit demo_vit", "held-out-r2,curve", ["held-out R²", "curve"]),
        ("stats demo_vit", "site,Kurtosis", ["site", "kurtosis"]),
        ("layers demo_vit", "placement", ["placement"]),
    ],
)
def test_columns_are_chosen_by_their_headings(folder, command, columns, headings):
    few = "" if command.startswith("layers") else "--limit 4 --layers 2"
    done = invoke(f"{command} {few} --columns '{columns}' -q", cwd=folder, COLUMNS="60")
    line = next(line for line in done.stdout.splitlines() if line.split()[0] == headings[0].split()[0])
    assert line.split() == " ".join(headings).split()
    assert "Left out" not in done.stdout
    invoke(f"{command} {few} --columns '{columns}' -o chosen.md", cwd=folder)
    heads = [line.split("|")[1:-1] for line in (folder / "chosen.md").read_text().splitlines() if line.startswith("| ")]
    assert headings in [[heading.strip() for heading in line] for line in heads]


def test_a_column_that_no_table_has_after_all_is_refused(folder):
    refused = invoke("fit demo_vit --limit 2 --layers 1 --columns bend", status=2, cwd=folder)
    assert "There is no column 'bend'. There are: site, curve" in refused.stderr


def test_nested_values_become_columns():
    rows = [
        {"site": "norm", "intervals": None, "shape": []},
        {"site": "a", "intervals": {"alpha": [0.5, 0.7], "A": None}, "shape": (3, 4), "of": {"x": {"y": 1}}, "n": 1},
        {"site": "b", "intervals": {"alpha": (1, 2)}, "shape": [True], "n": 0.5},
    ]
    assert as_csv(rows) == (
        "site,shape,alpha_low,alpha_high,A_low,A_high,of_x_y,n\nnorm,,,,,,,\na,3;4,0.5,0.7,,,1,1\nb,true,1,2,,,,0.5\n"
    )


@settings(max_examples=30)
@example([(name, -0.0) for name in ("=1+1", "-", "@x", "+", 'a"b,c', "two\nlines", "lone\rreturn")])
@given(st.lists(st.tuples(st.text(st.characters(codec="utf-8"), min_size=1), st.floats(allow_nan=False)), min_size=1))
def test_every_name_and_number_reads_back_as_it_was(rows):
    text = as_csv([{"site": site, "alpha": alpha} for site, alpha in rows])
    back = [(row["site"], float(row["alpha"])) for row in rows_of(text)]
    assert back == rows
    assert [math.copysign(1, alpha) for _, alpha in back] == [math.copysign(1, alpha) for _, alpha in rows]


def test_no_rows_are_an_empty_file():
    assert as_csv([]) == ""
