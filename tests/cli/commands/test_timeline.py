"""``normscope timeline``: a table, figures, and rows of every step."""

import csv
import json
import re

import numpy as np
import pytest
import torch
from command_line import document, invoke, words
from timelines import run_of, written
from torch import nn

import normscope


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("timeline")
    written(folder / "run.jsonl", norms=2, functions=1)
    return folder


def parsed(path):
    header, *lines = map(json.loads, path.read_text().splitlines())
    return [site["name"] for site in header["sites"]], lines


def test_the_table_has_the_first_and_the_last_step_and_fits_into_80_columns(folder):
    output = invoke("timeline run.jsonl", cwd=folder, COLUMNS="80").stdout
    lines = output.splitlines()
    assert lines[0] == "a_net · random init · noise & <more>"
    assert max(map(len, lines)) <= 80
    names, (first, *_, last) = parsed(folder / "run.jsonl")
    row = next(line for line in lines if line.startswith(names[1]))
    ends = [f"{record['numbers']['r2/tanh'][1]:.3f}" for record in (first, last)]
    assert row.split()[:5] == [names[1], "tanh", ends[0], "→", ends[1]]
    row = next(line for line in lines if line.startswith(names[2]))
    assert f"{first['numbers']['module_alpha'][2]:.3g} → {last['numbers']['module_alpha'][2]:.3g}" in row
    assert "step 0 → step 400, of 4 steps" in words(output)
    assert lines[-2:] == ["outputs/run-timeline.png", "outputs/run-scurves.png"]
    assert all((folder / path).read_bytes()[:4] == b"\x89PNG" for path in lines[-2:])


def test_json_has_the_first_and_the_last_step(folder):
    printed = document("timeline run.jsonl --layers '*.1.norm,*.2.norm' -o run.svg", cwd=folder)
    assert printed["figures"] == ["run.svg", "run-scurves.svg"] and printed["steps"] == [0, 50, 100, 400]
    names, (first, *_, last) = parsed(folder / "run.jsonl")
    expected = [(record, place) for record in (first, last) for place in (1, 2)]
    for row, (record, place) in zip(printed["sites"], expected, strict=True):
        assert (row["step"], row["site"]) == (record["step"], names[place])
        assert all(row[name] == values[place] for name, values in record["numbers"].items())


def test_csv_has_every_step_and_site(folder):
    names, lines = parsed(folder / "run.jsonl")
    invoke("timeline run.jsonl -o rows.csv", cwd=folder)
    with (folder / "rows.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(int(row["step"]), row["site"]) for row in rows] == [
        (line["step"], name) for line in lines for name in names
    ]
    for metric in ("alpha/isru", "spread", "module_alpha"):
        values = [value for line in lines for value in line["numbers"][metric]]
        assert [float(row[metric]) if row[metric] else None for row in rows] == values
    assert [float(row["loss"]) for row in rows] == [line["loss"] for line in lines for _ in names]


def test_captures_of_a_probe_add_ceilings_and_intervals(tmp_path):
    network = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8))
    x = torch.randn(32, 6, 8) * torch.linspace(0.2, 4, 6)[:, None]
    probe = normscope.Probe(network, x, every=1, path=tmp_path / "run.jsonl", keep=tmp_path / "kept", curves="tanh")
    probe.step()
    network[0].weight.data.mul_(2)
    probe.step()
    first, last = (normscope.fit(tmp_path / "kept" / f"step-{step:08d}.safetensors", "tanh") for step in (1, 2))
    done = invoke("timeline run.jsonl --columns site,ceiling,R² -o found.json --json", cwd=tmp_path)
    printed = json.loads(done.stdout)
    assert printed["fits"] == [fit.as_dict() for fit in last]
    # Six digits in the file; the probe solves without folds, to the solver's tolerance.
    np.testing.assert_allclose([row["r2/tanh"] for row in printed["sites"]], [first[0].r2, last[0].r2], atol=1e-5)
    output = words(invoke("timeline run.jsonl", cwd=tmp_path).stdout)
    assert f"{first[0].r2_ceiling:.3f} → {last[0].r2_ceiling:.3f}" in output
    assert "step 2, from its capture" in output and "±" in output


def test_half_a_line_is_ignored_and_one_step_has_no_arrow(tmp_path):
    header, (first, second) = run_of((7, 9), norms=2)
    (tmp_path / "run.jsonl").write_text(header.line() + first.line() + second.line()[:-9])
    output = invoke("timeline run.jsonl", cwd=tmp_path).stdout
    assert "step 7, of 1 step" in words(output) and "→" not in output


@pytest.mark.parametrize(
    ("text", "options", "status", "sentence"),
    [
        ("step,loss\n1,2\n", "", 4, "run.jsonl is no timeline of normscope: line 1:"),
        ("", "", 4, "run.jsonl is no timeline of normscope: it contains no record."),
        (run_of()[0].line(), "", 4, "run.jsonl is no timeline of normscope: it contains no record."),
        ("whole", "--layers blocks.3.nrom", 2, "There is no norm site 'blocks.3.nrom'. Did you mean 'blocks.3.norm'"),
        ("whole", "--layers 9-9", 2, "There are no layers 9-9"),
        ("whole", "-o x.gif", 2, "x.gif ends in .gif, but a figure's file ends in one of"),
        ("whole", "--columns alhpa", 2, "There is no column 'alhpa'. Did you mean 'alpha'?"),
    ],
)
def test_mistakes_are_refused_and_nothing_is_written(tmp_path, text, options, status, sentence):
    if text == "whole":
        written(tmp_path / "run.jsonl")
    else:
        (tmp_path / "run.jsonl").write_text(text)
    done = invoke(f"timeline run.jsonl {options}", status=status, cwd=tmp_path)
    assert sentence in words(re.sub("[│╭╮╰╯─]", " ", done.stderr)), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run.jsonl"]


def test_a_report_shows_a_timeline(tmp_path):
    written(tmp_path / "run.jsonl", (0, 50), norms=2)
    seen = normscope.capture(nn.Sequential(nn.LayerNorm(8)), [torch.randn(40, 8)])
    normscope.save_capture(seen, tmp_path / "seen.safetensors")
    invoke("report seen.safetensors --func tanh --timeline run.jsonl -o page.html", cwd=tmp_path)
    page = (tmp_path / "page.html").read_text()
    training = json.loads(re.search('<script type="application/json" id="data">(.*?)</script>', page)[1])["training"]
    assert [figure["label"] for figure in training["figures"]] == ["By step and depth", "S-curves by step"]
    images = [figure[style] for figure in training["figures"] for style in ("light", "dark")]
    assert all(image.startswith("data:image/png;base64,iVBOR") for image in images)
    [table] = training["tables"]
    names = [[f"blocks.{n}.norm", curve] for n in range(2) for curve in ("tanh", "isru")]
    assert [row[:2] for row in table["rows"]] == names and table["name"] == "norms"
