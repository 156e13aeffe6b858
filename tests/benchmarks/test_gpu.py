"""What the benchmarks of a GPU find and say, as far as a CPU can show it: they are rehearsed, tiny."""

import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is made for Linux alone")
FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


def run(*command, **environment):
    path = os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])
    everything = os.environ | {"PYTHONPATH": path, **environment}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=everything)


def samples(found):
    return {(one.case, one.way, one.quantity): list(one.samples) for one in found}


@pytest.mark.slow
def test_a_strangers_command_is_rehearsed_and_leaves_one_file_to_send_back(tmp_path):
    pytest.importorskip("timm", reason="timm is not installed, which demo_vit takes.")
    done = run(FOLDER / "gpu.py", "--rehearse", "--results", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == lines[-2] == benchmark_of_a_gpu().REHEARSAL and lines[-1] == str(
        tmp_path / "gpu-rehearsal.tar.gz"
    )
    with tarfile.open(tmp_path / "gpu-rehearsal.tar.gz") as archive:
        found = {name: json.load(archive.extractfile(name)) for name in archive.getnames()}
    surroundings = found.pop("environment.json")
    assert surroundings["wrong"] == [] and surroundings["rehearsal"] == lines[0]
    assert "gpu" not in surroundings["machine"]
    assert f"torch=={importlib.metadata.version('torch')}" in surroundings["packages"]
    assert {name.partition("-")[0] for name in found} == {"gpu_checks", "gpu_kernels", "gpu_captures", "gpu_networks"}
    assert all(record["failed"] == [] and record["measurements"] for record in found.values())
    [passed] = [one["samples"] for one in found_in(found, "gpu_checks") if one["quantity"] == "passed"]
    assert passed[0] >= 5


def benchmark_of_a_gpu():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        return importlib.import_module("gpu")


def found_in(found, question):
    return next(record["measurements"] for name, record in found.items() if name.startswith(question))


def test_time_that_is_over_is_said_and_what_there_is_is_packed(benchmark, monkeypatch, tmp_path, capsys):
    command = benchmark("gpu")
    (tmp_path / "gpu_kernels-old.json").write_text("{}", encoding="utf-8")
    os.utime(tmp_path / "gpu_kernels-old.json", (0, 0))
    monkeypatch.setattr(
        sys, "argv", ["gpu.py", "gpu_kernels", "--rehearse", "--minutes", "0", "--results", str(tmp_path)]
    )
    with pytest.raises(SystemExit, match="gpu_kernels: not begun, as the 0 minutes were over"):
        command.main()
    with tarfile.open(tmp_path / "gpu-rehearsal.tar.gz") as archive:
        assert archive.getnames() == ["environment.json"]  # and nothing of an earlier day
        assert json.load(archive.extractfile("environment.json"))["wrong"]
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--rehearse"])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert "a rehearsal on the CPU is no result" in capsys.readouterr().err


def test_without_a_gpu_there_is_a_sentence_and_a_rehearsal_is_no_result(benchmark, monkeypatch, capsys):
    command, common = benchmark("gpu"), benchmark("common")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def refusal(called, *given):
        monkeypatch.setattr(sys, "argv", ["gpu.py", *given])
        with pytest.raises(SystemExit, match="2"):
            called()
        return capsys.readouterr().err.partition("error: ")[2]

    def parsed():
        return common.parsed_for_gpu(common.gpu_options("", repeats=1))

    assert refusal(parsed) == refusal(command.main) == f"{common.NO_GPU}\n"
    assert refusal(parsed, "--device", "cpu").startswith("a rehearsal on the CPU is no result; name another folder")
    assert refusal(command.main, "gpu_speed").startswith("there is no question gpu_speed; there are gpu_checks, ")


CASES = """
import os, signal
from common import Measurement, of_each

def measured(kind):
    if kind == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    yield Measurement("a case", kind, "time", "s", [1.0])
    if kind == "says":
        yield "a kernel is off."
    if kind == "raises":
        raise ValueError("the first line\\nthe second")

if __name__ == "__main__":
    found, sentences = of_each(measured, {kind: (kind,) for kind in ("dies", "says", "raises", "is right")})
    print([one.way for one in found], sentences, sep="\\n")
"""


def test_a_case_that_breaks_takes_no_other_with_it(tmp_path):
    (tmp_path / "cases.py").write_text(CASES, encoding="utf-8")
    *_, ways, sentences = run(tmp_path / "cases.py").stdout.splitlines()
    assert ways == "['says', 'is right']"
    assert sentences.startswith("['dies: BrokenProcessPool: ")
    assert sentences.endswith("', 'a kernel is off.', 'raises: ValueError: the first line']")


def test_the_copys_rate_is_of_the_bytes_that_have_to_be_moved(benchmark):
    kernels = benchmark("gpu_kernels")
    place = "bfloat16, 8 × 16"
    taken = {kernels.COPY: [60.0], ("Derf", "normscope", "forward"): [80.0], ("Derf", "normscope", "backward"): [100.0]}
    made = samples(kernels.compared(taken, place))
    assert made[f"Derf forward, {place}", "normscope", "of the copy's rate"] == [75.0]  # two tensors, as the copy
    assert made[f"Derf backward, {place}", "normscope", "of the copy's rate"] == [90.0]  # three
    taken["LayerNorm", "eager", "forward"] = [40.0]
    made = samples(kernels.compared(taken, place))
    assert made[f"Derf forward, {place}", "normscope", "of F.layer_norm"] == [2.0]


REPORT = """<testsuite>
<testcase classname="tests.a" name="one"/><testcase classname="tests.a" name="two"><failure message="off"/></testcase>
<testcase classname="tests.a" name="three"><skipped/></testcase><testcase classname="tests.b" name="four"/>
</testsuite>"""


def test_checks_are_counted_and_the_largest_errors_kept(benchmark, tmp_path):
    checks = benchmark("gpu_checks")
    made = samples(checks.counted(ElementTree.fromstring(REPORT).findall("testcase")))  # noqa: S314 - our own
    assert [made["tests.a", "", how] for how in ("passed", "failed", "skipped")] == [[1.0], [1.0], [1.0]]
    assert made["tests.b", "", "passed"] == [1.0]
    (tmp_path / "1.json").write_text('{"tanh, torch.float16, y": 0.25, "erf, torch.float16, y": 0.5}', encoding="utf-8")
    (tmp_path / "2.json").write_text('{"tanh, torch.float16, y": 0.75}', encoding="utf-8")
    made = {case: taken for (case, *_), taken in samples(checks.largest_errors(tmp_path)).items()}
    assert made["tanh, float16, y"] == made["every result of every kernel"] == [0.75]
    assert list(checks.largest_errors(tmp_path / "none")) == []


class Kernel:
    """The functions as numpy has them, a little off where |u| is a number."""

    def __init__(self, exact, off, where):
        self.exact, self.off, self.where = exact, off, where

    def run(self, u, of, curve, precise, device):
        with np.errstate(all="ignore"):
            y = np.where(np.isnan(u), u, self.exact(np.clip(u, -1e30, 1e30), of, curve))
        return (y * (1 + self.off * (np.abs(u) == self.where))).astype(np.float32)


def test_functions_are_held_to_what_is_guaranteed(benchmark, monkeypatch):
    on_a_gpu, accuracy = benchmark("gpu_accuracy"), benchmark("accuracy")
    monkeypatch.setattr(accuracy, "half_floats", lambda: np.float32([0.5, -1, 2, 1e20]))
    monkeypatch.setattr(accuracy, "drawn_floats", lambda: np.float32([1e-30]))

    def sentences(off, where):
        monkeypatch.setitem(sys.modules, "accuracy_kernel", Kernel(accuracy.exact, off, where))
        return [one for one in on_a_gpu.measured("cuda") if isinstance(one, str)]

    assert sentences(0, 0) == []
    # A thousandth is more than the hardware's tanh may be off by, a hundred-thousandth only more than those without it.
    assert len(sentences(1e-3, 1)) == 10 and len(sentences(1e-5, 1)) == 7
    assert sentences(1e-5, 1)[0] == "f of tanh, float32: off by 9.97e-06, and 1.47e-07 is guaranteed."
    at_the_ends = sentences(1e-3, np.inf)
    assert len(at_the_ends) == 7 and all("at NaN, ∞ and −∞." in sentence for sentence in at_the_ends)
    assert on_a_gpu.guaranteed()["f of tanh", "half precision"] == pytest.approx(2**-11, rel=1e-3)
