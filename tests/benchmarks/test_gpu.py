"""The command that runs parts on a GPU: what one finds is kept, whatever becomes of the others, and it can go on.

Real processes and made-up parts, in a rehearsal. What the parts of the command themselves do is rehearsed with
``-m faults``.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"
COMMAND = """
import importlib.abc, importlib.util, sys, types

OWN = {"on_gpu.parts", "on_gpu.record", "on_gpu.machine", "on_gpu.printed"}


class Without(importlib.abc.MetaPathFinder, importlib.abc.Loader):  # the parts themselves, which import for seconds
    def find_spec(self, name, path, target=None):
        if name == "torch" or (name.startswith("on_gpu.") and name not in OWN):
            return importlib.util.spec_from_loader(name, self)

    def exec_module(self, module):
        pass


if __name__ == "__main__":
    sys.meta_path.insert(0, Without())
    import gpu, made_up
    gpu.all_parts = made_up.parts
    sys.exit(gpu.main())
"""
MADE_UP = """
import os, signal, subprocess, sys, time
from pathlib import Path
from common import Measurement
from on_gpu.parts import Found, Part

HERE = Path(__file__).parent


def noted(name):
    with open(HERE / "ran", "a") as ran:
        ran.write(name + " ")


def good(setting, number):
    noted("good")
    assert setting.rehearsal and os.environ["TRITON_INTERPRET"] == "1"
    return Found([Measurement("a case", "a way", "time", "ms", [number])], left_out=["a peer: not installed."])


def wrong(setting):
    noted("wrong")
    return Found(failures=["a kernel is off."])


def raising(setting):
    noted("raising")
    raise ValueError("the first line\\nthe second")


def killed(setting):
    noted("killed")
    os.kill(os.getpid(), signal.SIGKILL)


def forking(setting):
    noted("forking")
    if os.fork() == 0:
        time.sleep(100)
    os._exit(7)


def endless(setting):
    noted("endless")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    (HERE / "pids").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(100)


def unkept(setting):
    noted("unkept")
    return Found([Measurement("a case", "a way", "time", "ms", [object()])])


def parts(setting):
    return [Part(name, function, args, seconds) for name, function, args, seconds in PARTS]


"""


def command(folder, parts):
    """Write the command with made-up parts, and return how to run it."""
    (folder / "made_up.py").write_text(f"{MADE_UP}PARTS = [{parts}]\n", encoding="utf-8")
    (folder / "run.py").write_text(COMMAND, encoding="utf-8")
    return [sys.executable, str(folder / "run.py"), "--rehearse", "--results", str(folder)]


def run(words, *arguments):
    environment = os.environ | {"PYTHONPATH": str(FOLDER)}
    return subprocess.run([*words, *arguments], capture_output=True, text=True, env=environment, check=False)


def begun(folder, words):
    """Start the command as a terminal does, and wait until its endless part runs."""
    environment = os.environ | {"PYTHONPATH": str(FOLDER)}
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    until = time.monotonic() + 60
    while not (folder / "pids").exists() or not (folder / "pids").read_text():
        assert time.monotonic() < until and process.poll() is None, process.communicate()
        time.sleep(0.02)
    return process


def ended(folder):
    """Wait until the endless part and its child are gone."""
    until = time.monotonic() + 20
    for pid in (folder / "pids").read_text().split():
        while runs(pid):
            assert time.monotonic() < until
            time.sleep(0.05)
    return True


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"  # whom nobody waits for
    except OSError:
        return False


def found(folder):
    record = json.loads((folder / "gpu-rehearsal.json").read_text(encoding="utf-8"))
    return {part["part"]: part for part in record["parts"]}


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes as Linux shows them")
def test_what_becomes_of_a_part_is_kept_and_the_next_run_goes_on(tmp_path):
    words = command(
        tmp_path,
        "('good', good, (2.5,), 60), ('raising', raising, (), 60), ('killed', killed, (), 60),"
        "('forking', forking, (), 60), ('endless', endless, (), 1), ('unkept', unkept, (), 60),"
        "('long', good, (1.0,), 400)",
    )
    first = run(words, "--seconds", "300")
    assert first.returncode == 3, first.stderr
    assert "1 of 7 parts are left. The same command goes on with them." in first.stdout
    assert ended(tmp_path)
    parts = found(tmp_path)
    assert list(parts) == ["good", "raising", "killed", "forking", "endless", "unkept"]
    assert [one["samples"] for one in parts["good"]["measurements"]] == [[2.5]]
    assert parts["good"]["left_out"] == ["a peer: not installed."] and parts["good"]["failures"] == []
    assert [parts[name]["failures"] for name in ("raising", "killed", "forking", "endless")] == [
        ["raising: ValueError: the first line"],
        ["killed: its process ended with status -9, and said nothing."],
        ["forking: its process ended with status 7, and said nothing."],
        ["endless: it took more than 1 seconds and was ended."],
    ]
    assert parts["unkept"]["failures"] == ["unkept: TypeError: Object of type object is not JSON serializable"]
    for line in ("good: right", "    a peer: not installed.", "raising: 1 WRONG", "Left: long."):
        assert line in first.stdout

    second = run(words, "--seconds", "1000")
    assert second.returncode == 1
    assert (tmp_path / "ran").read_text().split() == [*parts, "good"]
    assert list(found(tmp_path)) == [*parts, "long"]


def test_parts_are_chosen_by_name_and_run_again_when_asked(tmp_path):
    words = command(tmp_path, "('one of a', good, (1.0,), 60), ('one of b', wrong, (), 60), ('two', wrong, (), 60)")
    none = run(words, "--only", "three")
    assert none.returncode == 1 and not (tmp_path / "ran").exists()
    assert none.stderr == "No part's name begins with 'three'; the parts are one of a, one of b, two.\n"
    assert run(words, "--only", "one of a").returncode == 0
    assert run(words, "--only", "one").returncode == 1  # wrong
    assert (tmp_path / "ran").read_text() == "good wrong "
    assert run(words, "--only", "one of a", "--again").returncode == 0
    assert (tmp_path / "ran").read_text() == "good wrong good "
    assert list(found(tmp_path)) == ["one of b", "one of a"]  # what was not asked for stays
    assert run(words, "--again").returncode == 1
    assert (tmp_path / "ran").read_text() == "good wrong good good wrong wrong "


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes as Linux shows them")
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_keeps_what_is_done_and_ends_what_runs(tmp_path):
    process = begun(tmp_path, command(tmp_path, "('quick', good, (1.0,), 60), ('slow', endless, (), 90)"))
    os.killpg(process.pid, signal.SIGINT)
    printed, said = process.communicate(timeout=30)
    assert process.returncode == 130
    sentence = "Stopped: 1 of 2 parts are done and kept. The same command goes on with the others."
    assert printed.endswith(f"\n{sentence}\n") and "Traceback" not in said
    assert ended(tmp_path) and list(found(tmp_path)) == ["quick"]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes as Linux shows them")
def test_a_part_ends_with_the_command(tmp_path):
    process = begun(tmp_path, command(tmp_path, "('slow', endless, (), 90)"))
    process.kill()
    process.communicate()
    assert ended(tmp_path)


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


def test_without_a_gpu_there_is_a_sentence(benchmarks, monkeypatch):
    machine = benchmarks("on_gpu.machine")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"^There is no NVIDIA GPU here\. Run this where there is one; "):
        machine.with_gpu(rehearsal=False)
    assert machine.with_gpu(rehearsal=True)["gpu"] == "none: a rehearsal on the CPU"


def test_a_rehearsal_is_no_result(tmp_path):
    [*words, _, _] = command(tmp_path, "('good', good, (1.0,), 60)")
    refused = run(words)
    assert refused.returncode == 1
    assert refused.stderr == "A rehearsal is no result: name another folder with --results.\n"


def test_every_part_has_its_place_a_name_and_room_in_a_command(benchmarks):
    gpu, parts = benchmarks("gpu"), benchmarks("on_gpu.parts")
    for rehearsal in (True, False):
        own = gpu.all_parts(parts.Setting(rehearsal))
        assert len({part.name for part in own}) == len(own)
        assert own[0].name.startswith("kernels") and not any("," in part.name for part in own)
        assert max(part.seconds for part in own) <= gpu.MOST - 30  # for the command's own start


OWN = ["captures wav2vec2_large", "captures first", "networks eager dit_xl", "networks compiled llama_7b forward"]


@pytest.mark.faults
@pytest.mark.parametrize("part", OWN)
def test_parts_of_whole_networks_run_in_a_rehearsal(tmp_path, part):
    words = [sys.executable, FOLDER / "gpu.py", "--rehearse", "--results", tmp_path, "--only", part, "--seconds", "900"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = found(tmp_path)
    assert parts and all(one["measurements"] and not one["failures"] for one in parts.values())
    ways = {one["way"].partition(":")[0] for own in parts.values() for one in own["measurements"]}
    fused = {"networks eager dit_xl": "derf, fused", "networks compiled llama_7b forward": "dyt, compile + fused"}
    assert fused.get(part) in {*ways, None}


class MadeUpEvent:
    """An event of the host's clock."""

    def __init__(self, enable_timing):
        assert enable_timing
        self.at = None

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, later):
        return 1000 * (later.at - self.at)


@pytest.mark.faults
def test_the_gpus_clock_adds_up_what_lies_between_events(benchmarks, monkeypatch):
    parts, captures, loading = (benchmarks(f"on_gpu.{name}") for name in ("parts", "captures", "loading"))
    monkeypatch.setattr(captures.torch.cuda, "Event", MadeUpEvent)
    monkeypatch.setattr(captures.torch.cuda, "synchronize", lambda: None)
    network, found = loading.load("wav2vec2_large", 1, "float32", parts.Setting(rehearsal=True)), parts.Found()
    with captures.torch.no_grad():
        captures.measure(network, "a case", parts.Setting(), found)
    taken = {one.quantity: one.samples for one in found.measurements}
    assert found.failures == []
    names = ("in the hooks", "in the hooks, by the host", "in the hooks, of the rest", "beside the hooks")
    assert all(len(taken[name]) == 20 for name in (*names, "bare pass", "captured pass longer by"))
    for inside, on_host, share, rest in zip(*(taken[name] for name in names), strict=True):
        assert 0 < on_host <= inside  # the events lie around what the host's clock sees
        assert share == pytest.approx(100 * inside / rest)
