"""Every table also as CSV and Parquet: the rows of the JSON document, in flat columns."""

import csv
import io
import json
import math
import sys
from importlib.metadata import version

import pyarrow as pa
import pytest
from command_line import document, invoke
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from normscope.cli.output import as_csv, write_parquet

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


@pytest.fixture(scope="module")
def fits(folder):
    """The fits of one run, as the JSON document on stdout and as Parquet beside it."""
    done = invoke(f"{FIT} --json -o fits.PARQUET", cwd=folder)
    return json.loads(done.stdout)["fits"]


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
    assert f"| {' | '.join(headings)} |" in (folder / "chosen.md").read_text()


def test_a_column_that_no_table_has_after_all_is_refused(folder):
    refused = invoke("fit demo_vit --limit 2 --layers 1 --columns bend", status=2, cwd=folder)
    assert "There is no column 'bend'. There are: site, curve" in refused.stderr


def test_parquet_holds_the_same_in_typed_columns(folder, fits):
    table = parquet.read_table(folder / "fits.PARQUET")
    rows = [columns_of(found) for found in fits]
    names = list(dict.fromkeys(name for row in rows for name in row))
    assert table.column_names == names
    assert table.to_pylist() == [{name: row.get(name) for name in names} for row in rows]
    types = {name: str(table.schema.field(name).type) for name in ("site", "alpha", "shift", "n_pairs", "straight")}
    assert types == {"site": "string", "alpha": "double", "shift": "double", "n_pairs": "int64", "straight": "bool"}
    assert table.schema.metadata[b"normscope"].decode() == version("normscope")


def test_without_pyarrow_nothing_is_run_and_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    done = invoke("fit demo_vit -o none.parquet", status=2, cwd=tmp_path)
    assert done.stdout == "" and "pip install 'pyarrow>=17'" in done.stderr
    assert "Error: Cannot write none.parquet: Parquet needs pyarrow, which cannot be imported" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_nested_values_become_columns(tmp_path):
    rows = [
        {"site": "norm", "intervals": None, "shape": []},
        {"site": "a", "intervals": {"alpha": [0.5, 0.7], "A": None}, "shape": (3, 4), "of": {"x": {"y": 1}}, "n": 1},
        {"site": "b", "intervals": {"alpha": (1, 2)}, "shape": [True], "n": 0.5},
    ]
    assert as_csv(rows) == (
        "site,shape,alpha_low,alpha_high,A_low,A_high,of_x_y,n\nnorm,,,,,,,\na,3;4,0.5,0.7,,,1,1\nb,true,1,2,,,,0.5\n"
    )
    write_parquet(rows, tmp_path / "rows.parquet")
    table = parquet.read_table(tmp_path / "rows.parquet")
    assert table["alpha_low"].to_pylist() == [None, 0.5, 1.0]
    kinds = {field.name: field.type for field in table.schema}
    assert kinds["shape"] == pa.string()
    assert (kinds["n"], kinds["of_x_y"], kinds["A_low"]) == (pa.float64(), pa.int64(), pa.null())


@settings(max_examples=30)
@example([(name, -0.0) for name in ("=1+1", "-", "@x", "+", 'a"b,c', "two\nlines", "lone\rreturn")])
@given(st.lists(st.tuples(st.text(st.characters(codec="utf-8"), min_size=1), st.floats(allow_nan=False)), min_size=1))
def test_every_name_and_number_reads_back_as_it_was(rows):
    text = as_csv([{"site": site, "alpha": alpha} for site, alpha in rows])
    back = [(row["site"], float(row["alpha"])) for row in rows_of(text)]
    assert back == rows
    assert [math.copysign(1, alpha) for _, alpha in back] == [math.copysign(1, alpha) for _, alpha in rows]


def test_no_rows_are_an_empty_file(tmp_path):
    assert as_csv([]) == ""
    write_parquet([], tmp_path / "none.parquet")
    assert parquet.read_table(tmp_path / "none.parquet").num_rows == 0
