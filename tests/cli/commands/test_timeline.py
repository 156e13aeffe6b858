"""``normscope timeline`` as a user meets it: a table, figures, rows of every step, and what is refused."""

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
    written(folder / "run.jsonl", norms=4, functions=2)
    return folder


def lines_of(path):
    header, *lines = map(json.loads, path.read_text().splitlines())
    return [site["name"] for site in header["sites"]], lines


def test_the_table_has_the_first_and_the_last_step_and_fits_into_80_columns(folder):
    out = invoke("timeline run.jsonl", cwd=folder, COLUMNS="80").stdout
    assert out.splitlines()[0] == "a_net · random init · noise & <more>"
    assert max(map(len, out.splitlines())) <= 80
    names, (first, *_, last) = lines_of(folder / "run.jsonl")
    row = next(line for line in out.splitlines() if line.startswith(names[2]))
    ends = [f"{each['numbers']['r2/tanh'][2]:.3f}" for each in (first, last)]
    assert row.split()[:5] == [names[2], "tanh", ends[0], "→", ends[1]]
    row = next(line for line in out.splitlines() if line.startswith(names[5]))
    assert f"{first['numbers']['module_alpha'][5]:.3g} → {last['numbers']['module_alpha'][5]:.3g}" in row
    assert "step 0 → step 400, of 4 steps" in words(out)
    assert out.splitlines()[-2:] == ["outputs/run-timeline.png", "outputs/run-scurves.png"]
    assert all((folder / path).read_bytes()[:4] == b"\x89PNG" for path in out.splitlines()[-2:])


def test_json_has_the_first_and_the_last_step(folder):
    found = document("timeline run.jsonl --layers '*.3.norm,*.4.norm' -o run.pdf", cwd=folder)
    assert found["figures"] == ["run.pdf", "run-scurves.pdf"] and found["steps"] == [0, 50, 100, 400]
    names, (first, *_, last) = lines_of(folder / "run.jsonl")
    assert [(row["step"], row["site"]) for row in found["sites"]] == [
        (step, name) for step in (0, 400) for name in names[3:5]
    ]
    for row, (line, place) in zip(found["sites"], [(first, 3), (first, 4), (last, 3), (last, 4)], strict=True):
        assert {name: row[name] for name in line["numbers"]} == {
            name: values[place] for name, values in line["numbers"].items()
        }


def test_files_of_rows_have_every_step_and_site(folder):
    names, lines = lines_of(folder / "run.jsonl")
    expected = [(line["step"], name) for line in lines for name in names]
    invoke("timeline run.jsonl -o rows.csv", cwd=folder)
    with (folder / "rows.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(int(row["step"]), row["site"]) for row in rows] == expected
    for metric in ("alpha/isru", "spread", "module_alpha"):
        values = [value for line in lines for value in line["numbers"][metric]]
        assert [float(row[metric]) if row[metric] else None for row in rows] == values
    assert [float(row["loss"]) for row in rows] == [line["loss"] for line in lines for _ in names]


def test_kept_captures_add_ceilings_and_the_intervals_of_the_last_step(tmp_path):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8))
    x = torch.randn(32, 6, 8) * torch.linspace(0.2, 4, 6)[:, None]
    probe = normscope.Probe(network, x, every=1, path=tmp_path / "run.jsonl", keep=tmp_path / "kept", curves="tanh")
    optimizer = torch.optim.SGD(network.parameters(), 0.5)
    for _ in range(2):
        loss = (network(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        probe.step(loss=loss.item())
    first, last = (normscope.fit(tmp_path / "kept" / f"step-{step:08d}.safetensors", "tanh") for step in (1, 2))
    found = document("timeline run.jsonl", cwd=tmp_path)
    assert found["fits"] == [fit.as_dict() for fit in last]
    # Six digits in the file; the probe solves without folds, to the solver's tolerance.
    np.testing.assert_allclose([row["r2/tanh"] for row in found["sites"]], [first[0].r2, last[0].r2], atol=1e-5)
    out = words(invoke("timeline run.jsonl", cwd=tmp_path).stdout)
    assert f"{first[0].r2_ceiling:.3f} → {last[0].r2_ceiling:.3f}" in out
    assert "step 2, from its capture" in out and "±" in out


def test_half_a_line_is_ignored_and_a_lone_record_has_no_arrow(tmp_path):
    header, (first, second) = run_of((7, 9), norms=2)
    (tmp_path / "run.jsonl").write_text(header.line() + first.line() + second.line()[:-9])
    out = invoke("timeline run.jsonl", cwd=tmp_path).stdout
    assert "step 7, of 1 step" in words(out) and "→" not in out


@pytest.mark.parametrize(
    ("text", "options", "status", "sentence"),
    [
        (None, "", 4, "Cannot read run.jsonl: No such file or directory."),
        ("step,loss\n1,2\n", "", 4, "run.jsonl is no timeline of normscope: line 1:"),
        ("", "", 4, "run.jsonl is no timeline of normscope: it contains no record."),
        (run_of()[0].line(), "", 4, "run.jsonl is no timeline of normscope: it contains no record."),
        ("whole", "--layers blocks.3.nrom", 2, "There is no norm site 'blocks.3.nrom'. Did you mean 'blocks.3.norm'"),
        ("whole", "--layers 9-9", 2, "There are no layers 9-9"),
        ("whole", "-o x.gif", 2, "x.gif ends in .gif, but a figure's file ends in one of"),
        ("whole", "--columns alhpa", 2, "There is no column 'alhpa'. Did you mean 'alpha'?"),
    ],
)
def test_mistakes_are_named_and_nothing_is_written(tmp_path, text, options, status, sentence):
    if text == "whole":
        written(tmp_path / "run.jsonl")
    elif text is not None:
        (tmp_path / "run.jsonl").write_text(text)
    done = invoke(f"timeline run.jsonl {options}", status=status, cwd=tmp_path)
    assert sentence in words(re.sub("[│╭╮╰╯─]", " ", done.stderr)), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == (["run.jsonl"] if text is not None else [])


def test_a_report_shows_it_as_a_tab(tmp_path):
    written(tmp_path / "run.jsonl")
    invoke("report demo_vit --limit 2 --layers norm --timeline run.jsonl -o page.html", cwd=tmp_path)
    page = (tmp_path / "page.html").read_text()
    data = json.loads(re.search('<script type="application/json" id="data">(.*?)</script>', page)[1])
    assert [each["label"] for each in data["training"]["figures"]] == ["By step and depth", "S-curves by step"]
    assert all(
        each[style].startswith("data:image/png;base64,iVBOR")
        for each in data["training"]["figures"]
        for style in ("light", "dark")
    )
    [table] = data["training"]["tables"]
    assert [row[:2] for row in table["rows"]] == [
        [f"blocks.{n}.norm", curve] for n in range(6) for curve in ("tanh", "isru")
    ]
    done = invoke("report demo_vit --timeline missing.jsonl", status=4, cwd=tmp_path)
    assert "Cannot read missing.jsonl" in done.stderr
