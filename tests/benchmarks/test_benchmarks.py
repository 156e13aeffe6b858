"""Every benchmark and script can be imported and parses its options, and those of a GPU are rehearsed on the CPU."""

import importlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
TRITON_ALONE = {"accuracy_kernel"}  # its functions are kernels, compiled on import
MEASURED = ("checks", "speed", "llama", "probe")
SCRIPTS = ("make_speech", "train_demo_dit", "train_demo_vit", "train_demo_wav2vec2")


@pytest.mark.parametrize(
    "name", [*sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in TRITON_ALONE), *SCRIPTS]
)
def test_the_benchmark_parses_its_options(name, monkeypatch, capsys):
    monkeypatch.syspath_prepend(FOLDER.with_name("scripts") if name in SCRIPTS else FOLDER)
    if name in ("make_speech", "train_demo_wav2vec2"):
        pytest.importorskip("torchaudio", reason="torchaudio does not work beside newer versions of torch")
    module = importlib.import_module(name)
    if hasattr(module, "main"):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
        with pytest.raises(SystemExit, match="0"):
            module.main()
        assert "usage:" in capsys.readouterr().out


def test_the_page_is_written_from_the_committed_results(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    table = importlib.import_module("table")
    page = table.PAGE.read_text(encoding="utf-8")
    assert table.page_of(table.RESULTS) == page, "run python benchmarks/table.py"
    assert all(f"({path.stem}.svg" in page.replace("benchmarks/", "") for path in table.PAGE.with_suffix("").iterdir())


@pytest.mark.slow
def test_the_benchmarks_of_a_gpu_are_rehearsed_and_leave_one_file_to_send_back(tmp_path):
    """Apart from capture.py, which is measured on CPUs too and would compile everything anew."""
    pytest.importorskip("triton", reason="Triton is made for Linux alone")
    path = os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, FOLDER / "gpu.py", "--rehearse", "--results", tmp_path, *MEASURED]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(tmp_path / "gpu-rehearsal.tar.gz") as archive:
        records = {name: json.load(archive.extractfile(name)) for name in archive.getnames()}
    assert records.pop("environment.json")["failed"] == []
    assert {name.partition("-")[0] for name in records} == {"gpu", *MEASURED[1:]}
    assert all(record["failed"] == [] and record["measurements"] for record in records.values())
