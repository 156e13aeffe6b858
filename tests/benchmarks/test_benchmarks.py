"""The benchmarks run, and what they write holds its raw samples; their numbers are no business of a test."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def run(name, *arguments, check=True):
    command = [sys.executable, FOLDER / f"{name}.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=check)


def measured(name, results, *arguments):
    printed = run(name, "--repeats", "1", "--results", results, *arguments).stdout
    (path,) = results.glob(f"{name}-*.json")
    assert path.name in printed.replace("\n", "")
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["benchmark"] == name and record["machine"]["cores"] >= 1 and record["versions"]["torch"]
    samples = {}
    for one in record["measurements"]:
        samples[one["case"], one["way"], one["quantity"]] = one["samples"]
        assert all(isinstance(value, float) for value in one["samples"])
    return samples


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return tmp_path_factory.mktemp("results")


def test_capture(results):
    options = ("--models", "demo_vit", "--threads", "1", "--batches", "3", "--without", "nnsight,torchlens")
    samples = measured("capture", results, *options)
    seconds, inside, percent = (
        samples["demo_vit, 1 thread", "normscope", name]
        for name in ("pass", "in the hooks", "in the hooks, of the rest")
    )
    assert len(seconds) == 1
    for whole, within, share in zip(seconds, inside, percent, strict=True):
        assert 0 < within < whole
        assert share == pytest.approx(100 * within / (whole - within))
    assert len(samples["demo_vit, 3 batches of one sample", "normscope", "peak"]) == 3


def test_fit(results):
    samples = measured("fit", results, "--pairs", "40000", "--without", "lmfit")
    for curve in ("tanh", "isru"):
        assert samples[curve, "normscope.fit", "α off by"][0] < 1e-3
        assert samples[curve, "scipy curve_fit", "curve_fit takes"] == [1.0]
    assert not any(way == "lmfit" for _, way, _ in samples)


def test_figure(results):
    samples = measured("figure", results, "--pairs", "40000", "--scatter-up-to", "40000")
    own = samples["39,936 pairs", "normscope, all rows", "draw and write"]
    empty = samples["nothing", "empty, all rows", "draw and write"]
    found = samples["39,936 pairs", "normscope, all rows", "of an empty figure of the same axes"]
    assert found == [a / b for a, b in zip(own, empty, strict=True)]


def test_startup(results):
    heavy = "torch,timm,torchaudio,diffusers,transformers,matplotlib"
    samples = measured("startup", results, "--without", heavy)
    python, imported = (samples["", way, "from start to exit"][0] for way in ("python", "import normscope"))
    assert samples["", "import normscope", "of python alone"] == [pytest.approx(imported / python)]
    assert not any("torch" in way for _, way, _ in samples)


def test_the_page_is_written_from_the_files_alone(tmp_path):
    taken = {
        "case": "a case",
        "way": "a way",
        "quantity": "time",
        "unit": "s",
        "samples": [2.0, 1.0, 4.0],
        "shown": True,
    }
    record = {
        "benchmark": "fit",
        "about": "What was measured.",
        "command": "python benchmarks/fit.py --repeats 3",
        "date": "2031-01-02T03:04:05+00:00",
        "commit": "0123abc",
        "machine": {"cpu": "A CPU", "cores": 3, "memory_gb": 4.5, "os": "An OS"},
        "threads": [2],
        "versions": {"python": "3.14", "torch": "9.9"},
        "left_out": ["a peer"],
        "measurements": [taken],
    }
    (tmp_path / "fit-a-machine.json").write_text(json.dumps(record), encoding="utf-8")
    run("table", "--results", tmp_path, "--page", tmp_path / "page.md")
    _, _, section = (tmp_path / "page.md").read_text(encoding="utf-8").partition("\n## ")
    assert section.splitlines() == [
        "What a fit costs",
        "",
        "What was measured.",
        "",
        "|  |  | time, s |",
        "| :-- | :-- | --: |",
        "| a case | a way | 2 (1–4) |",
        "",
        "`python benchmarks/fit.py --repeats 3` · 2031-01-02 · commit 0123abc · threads: 2 · left out: a peer",
        "",
        "A CPU, 3 cores, 4.5 GB, An OS · python 3.14, torch 9.9",
    ]


def test_a_missing_peer_is_said_in_a_sentence(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    common = importlib.import_module("common")
    peers = ("numpy", "no_such_library")
    parser = common.options("", repeats=1, peers=peers)
    sentence = (
        "no_such_library is not installed. Run pip install -e '.[bench]', or leave it out: --without no_such_library"
    )
    with pytest.raises(SystemExit) as refusal:
        common.peers_left(parser, parser.parse_args([]), peers)
    assert refusal.value.code == sentence
    assert common.peers_left(parser, parser.parse_args(["--without", "no_such_library"]), peers) == ["numpy"]


def test_only_peers_can_be_left_out():
    done = run("fit", "--without", "lmfti", check=False)
    assert done.returncode == 2
    assert "there is no peer 'lmfti' to leave out; the peers are scipy, lmfit" in done.stderr


def test_rows_without_a_quantity_in_common_stand_apart(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    common = importlib.import_module("common")
    taken = [
        common.Measurement("a", "fast", "time", "s", [1.0, 3.0, 2.0]),
        common.Measurement("b", "", "memory", "MB", [1234.5]),
        common.Measurement("a", "slow", "time", "s", [10.0]),
        common.Measurement("a", "slow", "loss", "%", [0.25]),
        common.Measurement("a", "slow", "hidden", "s", [9.0], shown=False),
    ]
    assert common.tables_of({"measurements": [vars(one) for one in taken]}) == [
        (["", "", "time, s", "loss, %"], [["a", "fast", "2 (1–3)", ""], ["a", "slow", "10", "0.25"]]),
        (["", "", "memory, MB"], [["b", "", "1,234"]]),
    ]
