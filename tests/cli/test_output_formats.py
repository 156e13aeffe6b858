"""Results in files: CSV with the rows of the JSON document, chosen columns."""

import csv
import io
import json
import math

import pytest
import torch
from command_line import document, invoke
from hypothesis import example, given, settings
from hypothesis import strategies as st
from networks import network_of
from torch import nn

import normscope
from normscope.cli.output import as_csv

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\r"), min_size=1)


def rows_of(text):
    return list(csv.DictReader(io.StringIO(text, newline="")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    x = torch.randn(40, 8, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 1, 40)[:, None]
    network = network_of(lambda self, x: (self.a(x), self.b(x)), a=nn.LayerNorm(8), b=nn.RMSNorm(8))
    seen = normscope.capture(network, [x])
    normscope.save_capture(seen, folder / "seen.safetensors")
    return folder


def test_csv_has_the_rows_of_the_json_document(folder):
    done = invoke("fit seen.safetensors --json -o same.csv", cwd=folder)
    fits = json.loads(done.stdout)["fits"]
    assert len(fits) == 4 and "wrote same.csv" in done.stderr
    text = (folder / "same.csv").read_text()
    rows = rows_of(text)
    for row, fit in zip(rows, fits, strict=True):
        low, high = fit["intervals"]["alpha"]
        numbers = (fit["alpha"], low, high)
        assert tuple(float(row[name]) for name in ("alpha", "alpha_low", "alpha_high")) == numbers
        assert (row["site"], row["sites"], row["converged"]) == (fit["site"], ";".join(fit["sites"]), "true")
    assert rows[0].keys() >= fits[0].keys() - {"intervals"}
    assert "\r" not in text and text.endswith("\n")


def test_results_go_to_a_file_instead_of_the_terminal(folder):
    for command in ("models -q", "layers demo_vit"):
        assert invoke(f"{command} -o rows.csv", cwd=folder).stdout == "rows.csv\n"
        assert len(rows_of((folder / "rows.csv").read_text())) > 1
    models = document("models")["models"]
    invoke("models -o models.json", cwd=folder)
    assert json.loads((folder / "models.json").read_text())["models"] == models


@pytest.mark.parametrize(
    ("command", "columns", "headings"),
    [
        ("fit seen.safetensors", "held-out-r2,curve", ["held-out R²", "curve"]),
        ("stats seen.safetensors", "site,Kurtosis", ["site", "kurtosis"]),
        ("layers demo_vit", "placement", ["placement"]),
    ],
)
def test_columns_are_chosen_by_their_headings(folder, command, columns, headings):
    done = invoke(f"{command} --columns '{columns}' -q", cwd=folder, COLUMNS="60")
    line = next(line for line in done.stdout.splitlines() if line.split()[0] == headings[0].split()[0])
    assert line.split() == " ".join(headings).split()
    assert "Left out" not in done.stdout


def test_chosen_columns_of_a_markdown_file(folder):
    invoke("fit seen.safetensors --columns 'site,alpha,R²' -o chosen.md", cwd=folder)
    rows = [line.split("|")[1:-1] for line in (folder / "chosen.md").read_text().splitlines() if line.startswith("| ")]
    assert [heading.strip() for heading in rows[0]] == ["site", "α", "R²"]


def test_all_columns_are_shown_where_no_table_has_the_chosen_one(folder):
    done = invoke("fit seen.safetensors --columns bend", cwd=folder)
    assert "There is no column 'bend'. There are: site, curve" in done.stderr
    assert "held-out R²" in done.stdout


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
@given(st.lists(st.tuples(NAMES, st.floats(allow_nan=False)), min_size=1))
def test_names_and_numbers_of_csv_read_back_exactly(rows):
    text = as_csv([{"site": site, "alpha": alpha} for site, alpha in rows])
    back = [(row["site"], float(row["alpha"])) for row in rows_of(text)]
    assert back == rows
    assert [math.copysign(1, alpha) for _, alpha in back] == [math.copysign(1, alpha) for _, alpha in rows]
