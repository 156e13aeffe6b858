"""The benchmarks run, and what they write holds its raw samples; their numbers are no business of a test."""

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
PAGE, KERNELS, README = "docs/benchmarks.md", "docs/kernels.md", "README.md"


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
    samples = measured("fit", results, "--pairs", "40000", "--sites", "2", "--without", "lmfit")
    for curve in ("tanh", "isru"):
        assert samples[curve, "scipy curve_fit", "curve_fit takes"] == [1.0]
        for way, sites in (("search of 2 sites", 2), (".fit of 2 sites", 2), (".fit of one site", 1)):
            way = f"normscope{'' if way.startswith('.') else ', '}{way}"
            assert len(samples[curve, way, "a site"]) == 1
            for quantity in ("α off by", "RMSE off by"):
                off = samples[curve, way, quantity]
                assert len(off) == sites and max(off) < 1e-3
        assert max(samples[curve, "normscope.fit of 2 sites", "RMSE as told off by"]) < 1e-4
    own, peer = (samples["isru", way, "a site"] for way in ("normscope.fit of one site", "scipy curve_fit"))
    assert samples["isru", "normscope.fit of one site", "curve_fit takes"] == [pytest.approx(peer[0] / own[0])]
    assert len(samples["isru", "normscope.fit of 2 sites", "C off by"]) == 2
    assert ("tanh", "normscope.fit of 2 sites", "C off by") not in samples
    assert not any(way == "lmfit" for _, way, _ in samples)


def test_channels(results):
    sizes = ("--sites", "2", "--channels", "96", "--tokens", "400", "--threads", "1")
    samples = measured("channels", results, *sizes)
    case = "2 sites, 1 thread"
    for way in ("normscope.fit", "scipy curve_fit"):
        (whole,) = samples[case, way, "all"]
        assert samples[case, way, "a site and curve"] == [pytest.approx(1000 * whole / 4)]
    for curve in ("tanh", "isru"):
        off = samples[f"{curve}, 16 channels", "normscope.fit", "RMSE off by"]
        assert len(off) == 16 and max(off) < 1e-3


def test_intervals(results):
    sizes = ("--sources", "16", "--truth", "2000", "--repeats", "10")
    samples = measured("intervals", results, *sizes)
    for curve in ("tanh", "isru"):
        case = f"{curve}, spread 0.7, 16 sources"
        for way in ("normscope", "scipy curve_fit"):
            assert samples[case, way, "α tried"] == [10.0]
            (hits,) = samples[case, way, "α held"]
            assert samples[case, way, "α"] == [pytest.approx(10 * hits)]
        assert samples[case, "normscope", "α held"][0] > samples[case, "scipy curve_fit", "α held"][0]
        assert 0 < samples[case, "normscope", "R² true"][0] < 1
        assert (case, "scipy curve_fit", "R²") not in samples


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


def pages_of(records, root):
    """Return what table.py makes of records in a copy of the project's pages."""
    results = root / "results"
    shutil.rmtree(results, ignore_errors=True)
    for folder in (root / "docs", results):
        folder.mkdir(exist_ok=True)
    for name in (KERNELS, README):
        shutil.copy(FOLDER.parent / name, root / name)
    for number, record in enumerate(records):
        (results / f"{number}.json").write_text(json.dumps(record), encoding="utf-8")
    run("table", "--results", results, "--root", root)
    return {name: (root / name).read_text(encoding="utf-8") for name in (PAGE, KERNELS, README)}


def test_the_page_is_written_from_the_files_alone(tmp_path):
    taken = {
        "case": "a case",
        "way": "a way",
        "quantity": "time",
        "unit": "s",
        "samples": [2.0, 1.0, 4.0],
        "shown": True,
    }
    share = {"case": "a case", "way": "a way", "quantity": "share", "unit": "%", "samples": [95.0], "error": 1.09}
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
        "measurements": [taken, share],
    }
    pages = pages_of([record], tmp_path)
    assert "**Measured on a GPU: nothing.**" in pages[KERNELS]
    _, _, section = pages[PAGE].partition("\n## ")
    assert section.splitlines() == [
        "What a fit costs",
        "",
        "What was measured.",
        "",
        "|  |  | time, s | share, % |",
        "| :-- | :-- | --: | --: |",
        "| a case | a way | 2 (1–4) | 95 ± 1.1 |",
        "",
        "`python benchmarks/fit.py --repeats 3` · 2031-01-02 · commit 0123abc · threads: 2 · left out: a peer",
        "",
        "A CPU, 3 cores, 4.5 GB, An OS · python 3.14, torch 9.9",
    ]


def of_a_gpu(**changes):
    def taken(**more):
        return {
            "case": "a case",
            "way": "a way",
            "quantity": "time",
            "unit": "ms",
            "samples": [2.0],
            "shown": True,
        } | more

    parts = [
        {
            "part": "kernels dyt",
            "measurements": [taken(), taken(way="hidden", shown=False)],
            "failures": ["It is off."],
        },
        {"part": "networks vit_b16 eager", "measurements": [taken(case="a whole ViT")], "failures": []},
    ]
    machine = {
        "cpu": "A CPU",
        "cores": 3,
        "memory_gb": 4.5,
        "os": "An OS",
        "gpu": "A GPU",
        "driver": "1.2",
        "cuda": "9",
    }
    return {
        "benchmark": "gpu",
        "about": "What ran.",
        "command": "python benchmarks/gpu.py",
        "date": "2031-01-02T03:04:05+00:00",
        "commit": None,
        "machine": machine,
        "threads": [],
        "versions": {"torch": "9.9"},
        "left_out": [],
        "parts": parts,
    } | changes


def test_what_a_gpu_did_is_written_into_all_pages_and_a_rehearsal_into_none(tmp_path):
    rehearsed = of_a_gpu(command="python benchmarks/gpu.py --rehearse", about="Nothing ran.", date="2032-01-01")
    before = pages_of([rehearsed], tmp_path)
    assert "## On a GPU" not in before[PAGE]
    nothing = "**Measured on a GPU: nothing"
    assert nothing in before[KERNELS] and "\n- Nothing has been measured on a GPU yet: " in before[README]

    pages = pages_of([rehearsed, of_a_gpu()], tmp_path)
    machine = [
        "",
        "`python benchmarks/gpu.py` · 2031-01-02",
        "",
        "A GPU, driver 1.2, CUDA 9, in A CPU, 3 cores, 4.5 GB, An OS · torch 9.9",
    ]
    head = ["|  |  | time, ms |", "| :-- | :-- | --: |"]
    own = [*head, "| a case | a way | 2 |", "", "What was wrong:", "", "- It is off."]
    beside = "What was measured of the kernels themselves is [beside it](kernels.md)."
    _, _, section = pages[PAGE].partition("\n## ")
    of_networks = ["What ran.", "", beside, "", *head, "| a whole ViT | a way | 2 |"]
    assert section.splitlines() == ["On a GPU", "", *of_networks, *machine]
    block = "\n".join([*own, *machine])
    assert block in pages[KERNELS] and "a whole ViT" not in pages[KERNELS] and nothing not in pages[KERNELS]
    assert "measured on A GPU (2031-01-02):" in pages[README] and "Nothing has been" not in pages[README]
    for name in (KERNELS, README):  # around the block all is as it was
        (begun, mark, _), (_, _, ended) = before[name].partition("<!-- python"), before[name].partition("<!-- to here")
        assert pages[name].startswith(begun + mark) and pages[name].endswith(ended) and begun and ended


def test_the_pages_say_of_gpus_what_the_results_do(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    table = importlib.import_module("table")
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(table.RESULTS.glob("*.json"))]
    written = table.written(FOLDER.parent, list(filter(table.real, records)))
    assert list(written) == [PAGE, KERNELS, README]
    for name, text in written.items():
        assert (FOLDER.parent / name).read_text(encoding="utf-8") == text, name


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


def test_healing(results):
    samples = measured("healing", results, "--models", "demo_vit", "--curves", "dyt", "--steps", "6", "--limit", "64")
    before, after, closed = (samples["demo_vit", "dyt", name][0] for name in ("drift before", "after all", "closed"))
    assert closed == pytest.approx(100 * (1 - after / before)) and after <= before


def test_swaps(results):
    samples = measured("swaps", results, "--models", "demo_vit", "--limit", "2")
    for func in ("dyt", "dyisru", "derf"):
        moved = {init: samples["demo_vit", f"{func}, {init}", "relative L2"] for init in ("fit", "paper")}
        assert all(len(own) == 2 for own in moved.values())
        (share,) = samples["demo_vit", f"{func}, fit", "of paper's"]
        assert share == pytest.approx(100 * sum(moved["fit"]) / sum(moved["paper"]))  # of two, the median is the mean
    assert samples["demo_vit", "rmsnorm", "relative L2"] < samples["demo_vit", "identity", "relative L2"]


def test_speed(results):
    samples = measured("speed", results, "--models", "demo_vit", "--seconds", "0", "--threads", "1")
    case = "demo_vit, the whole network (1×1×8×8), forward"
    assert samples[case, "native, eager", "time"][0] > 0
    assert samples[case, "native, eager", "of native"] == [1.0]
    assert samples[case, "dyt, eager", "of native"][0] > 0


def test_accuracy(results):
    samples = measured("accuracy", results)
    for of, way in (("f", "float32"), ("f", "half precision"), ("f′", "float32 and half precision")):
        (in_a_sum,) = samples[f"{of} of tanh", way, "in a sum"]
        (rounded,) = samples[f"{of} of tanh", way, "rounded"]
        assert 0 < in_a_sum < rounded < 1e-5


def test_machine_code(results):
    samples = measured("machine_code", results, "--targets", "90", "--dtypes", "float32")
    case = "backward, float32, (32768, 4096)"
    executed, loop = (samples[case, "DyISRU", name][0] for name in ("sm_90", "sm_90 loop"))
    assert 0 < loop < executed
    assert samples[case, "DyISRU", "sm_90 loads of 128 bits"] == [8.0]


@pytest.mark.faults
def test_scale(results):
    samples = measured("scale", results, "--images", "160")
    case = "160 images"
    assert samples[case, "1 process, 1 thread each", "speed-up"] == [1.0]
    assert samples[case, "3 processes, 1 thread each", "command"][0] > 0
    assert 0.9 < samples[case, "1 process, 1 thread each", "of that after a tenth"][0] < 1.1
