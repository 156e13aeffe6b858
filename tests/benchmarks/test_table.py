"""What was measured becomes tables and a page: all of it from the files alone."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"


RECORD = {
    "benchmark": "fit",
    "about": "What was measured.",
    "command": "python benchmarks/fit.py --repeats 3",
    "date": "2031-01-02T03:04:05+00:00",
    "commit": "0123abc",
    "machine": {"cpu": "A CPU", "cores": 3, "memory_gb": 4.5, "os": "An OS"},
    "threads": [2],
    "versions": {"python": "3.14", "torch": "9.9"},
    "left_out": ["a peer"],
}


def page_of(records, folder):
    for number, record in enumerate(records):
        (folder / f"{number}.json").write_text(json.dumps(record), encoding="utf-8")
    command = [sys.executable, FOLDER / "table.py", "--results", folder, "--page", folder / "page.md"]
    subprocess.run(command, check=True)
    return (folder / "page.md").read_text(encoding="utf-8")


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
    record = RECORD | {"measurements": [taken, share]}
    gpu = {"gpu": "A GPU", "driver_version": "1.2", "cuda": "9"}
    on_a_gpu = {"benchmark": "gpu_kernels", "machine": record["machine"] | gpu, "failed": ["It is off."], "threads": []}
    _, first, second = page_of([record, record | on_a_gpu], tmp_path).split("\n## ")
    assert second.startswith("How fast the kernels are on a GPU\n") and "What failed:\n\n- It is off.\n" in second
    assert second.endswith("A GPU, driver 1.2, CUDA 9, in A CPU, 3 cores, 4.5 GB, An OS · python 3.14, torch 9.9\n")
    assert first.splitlines() == [
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


def test_the_pages_say_what_the_results_do(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    table = importlib.import_module("table")
    records = table.records(table.RESULTS)
    assert table.PAGE.read_text(encoding="utf-8") == table.page(records)
    of_a_gpu = any(record["benchmark"] in table.OF_A_GPU for record in records)
    kernels = table.PAGE.with_name("kernels.md").read_text(encoding="utf-8")
    assert ("**Measured on a GPU: nothing.**" in kernels) != of_a_gpu


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
