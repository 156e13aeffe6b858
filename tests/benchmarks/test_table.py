"""What was measured becomes tables, and the pages that show them: all of it from the files alone."""

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"
PAGE, KERNELS, MODELS, README = "docs/benchmarks.md", "docs/kernels.md", "docs/models.md", "README.md"


def pages_of(records, root):
    """Return what table.py makes of records in a copy of the project's pages."""
    results = root / "results"
    shutil.rmtree(results, ignore_errors=True)
    for folder in (root / "docs", results):
        folder.mkdir(exist_ok=True)
    for name in (KERNELS, MODELS, README):
        shutil.copy(FOLDER.parent / name, root / name)
    for number, record in enumerate(records):
        (results / f"{number}.json").write_text(json.dumps(record), encoding="utf-8")
    subprocess.run([sys.executable, FOLDER / "table.py", "--results", results, "--root", root], check=True)
    return {name: (root / name).read_text(encoding="utf-8") for name in (PAGE, KERNELS, MODELS, README)}


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


def test_architectures_are_counted_and_those_refused_listed_by_the_reason(tmp_path):
    def row(library, name, outcome, reason="", **more):
        empty = {"norms": {}, "worst": None, "exit_status": None}
        return {"library": library, "name": name, "outcome": outcome, "reason": reason, **empty, **more}

    rows = [
        row("timm", "a_net", "works", norms={"LayerNorm": 1200, "BatchNorm": 34}, worst=0.25),
        row("timm", "b_net", "no norm", "This BNet has no normalization of activations, so that nothing is there."),
        row("transformers", "CModel", "refused", "At a.b.0 (input (2, 3)) CModel ends at 12 of 4,190. Do that."),
        row("transformers", "DModel", "refused", "At c.d (input (5, 7)) DModel ends at 1 of 7. Do this."),
        row("transformers", "EModel", "time", "not done after 120 s", exit_status=0),
    ]
    record = of_a_gpu() | {"benchmark": "architectures", "about": "What ran.", "rows": rows, "parts": []}
    del record["machine"]["gpu"]
    before, _, rest = pages_of([record], tmp_path)[MODELS].partition("<!-- python benchmarks/table.py writes")
    block, _, after = rest.partition("<!-- to here -->")
    assert block.splitlines()[1:-4] == [
        "What ran.",
        "",
        "|  | timm | transformers |",
        "| :-- | --: | --: |",
        "| every norm reproduced | 1 | 0 |",
        "| no norm of activations, and that is said | 1 | 0 |",
        "| refused in a sentence | 0 | 2 |",
        "| took too long | 0 | 1 |",
        "",
        "1,234 norms were reproduced, to within 0.25 of what rounding explains.",
        "",
        "No norm of activations, and that is said: `b_net`.",
        "",
        "Refused in a sentence:",
        "",
        "- At … … ends at … of …. `CModel`, `DModel`",
        "",
        "Took too long:",
        "",
        "- not done after 120 s `EModel` (alone, by the command line: done)",
    ]
    page = (FOLDER.parent / MODELS).read_text(encoding="utf-8")
    assert before and after and page.startswith(before) and page.endswith(after)


def test_the_pages_say_what_the_results_do(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    table = importlib.import_module("table")
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(table.RESULTS.glob("*.json"))]
    written = table.written(FOLDER.parent, list(filter(table.real, records)))
    assert list(written) == [PAGE, KERNELS, MODELS, README]
    for name, text in written.items():
        assert (FOLDER.parent / name).read_text(encoding="utf-8") == text, name


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
