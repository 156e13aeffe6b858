"""Captures that are stopped, interrupted and killed by signals, and resumed."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from command_line import invoke
from runs import CaptureRun, differences, write_images

import normscope
from normscope.cli.running import stopping_between_chunks
from normscope.errors import UsageError

IMAGES = 300
OPTIONS = ("--batch-size", "2", "--layers", "2", "--checkpoint-every", "0")
STOPPED = "is kept in {}; the same command with --resume goes on."
# A network that takes minutes for every batch but the first.
SLOW = """
import time, torch
from torch import nn

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        if x.sum() != 0:
            print("working", flush=True)
            time.sleep(300)
        return self.norm(x)

def make():
    return Slow(), [torch.zeros(1, 3, 4), torch.ones(1, 3, 4)]
"""


@pytest.fixture
def one_thread():
    """As many as the processes have: in another order float32's sums are others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def stopped_by(run, number, *more):
    """Send a signal once there is another checkpoint; return exit status and output."""
    path = run.checkpoints / "0.safetensors"
    before = path.stat().st_mtime_ns if path.exists() else 0
    process = run.start(*more)
    while not path.exists() or path.stat().st_mtime_ns == before:
        assert process.poll() is None, run.said()
        time.sleep(0.01)
    process.send_signal(number)
    return process.wait(60), run.said()


@pytest.mark.slow
def test_each_run_resumes_the_one_before_and_every_image_counts_once(tmp_path, one_thread):
    data = write_images(tmp_path / "images", IMAGES, corrupt_every=100)
    options = ("--data", str(data), *OPTIONS)
    run = CaptureRun("demo_vit", tmp_path / "seen.safetensors", options)
    for more, number in (((), signal.SIGINT), (("--resume",), signal.SIGTERM)):
        status, output = stopped_by(run, number, *more)
        assert status == 130 and output.count("Finishing the batch; once more to stop at once.") == 1
        assert STOPPED.format(run.checkpoints) in output and "Traceback" not in output and "Error" not in output
        assert (f"going on from {run.checkpoints}" in output) == bool(more)
        assert run.kept and not run.output.exists()
    assert stopped_by(run, signal.SIGKILL, "--resume")[0] == -signal.SIGKILL
    assert run.kept and not run.output.exists()

    kept = {path: path.read_bytes() for path in run.checkpoints.iterdir()}
    command = f"capture demo_vit -o {run.output} {' '.join(options)}"
    refused = invoke(command, status=2).stderr
    unfinished = "holds what an unfinished run has captured. --resume goes on from it"
    assert f"Error: {run.checkpoints} {unfinished}" in refused
    other = invoke(f"{command} --resume --seed 3", status=2).stderr
    assert "is of another capture: its seed is 0, not 3." in other
    assert {path: path.read_bytes() for path in run.checkpoints.iterdir()} == kept

    resumed = invoke(f"{command} --resume --checkpoint-every 300")
    assert resumed.stderr.count("unreadable, left out: 0/") == 3
    assert not run.checkpoints.exists()
    network = normscope.load("demo_vit", data=str(data), batch_size=2)
    whole = normscope.capture(network.module, network.inputs, about=network.about, layers="2")
    assert whole.n_samples == IMAGES - 3
    assert differences(normscope.load_capture(run.output), whole) == []


@pytest.mark.slow
def test_a_second_signal_stops_at_once_and_keeps_the_checkpoint(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    run = CaptureRun(f"py:{tmp_path / 'slow.py'}:make", tmp_path / "seen.safetensors", ("--checkpoint-every", "0"))
    process = run.start()
    for line in ("working", "Finishing the batch"):
        while line not in run.said():
            assert process.poll() is None, run.said()
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130  # the batch takes 300 s
    assert "Interrupted; no file was left half written." in run.said() and "Traceback" not in run.said()
    assert [path.name for path in run.checkpoints.iterdir()] == ["0.safetensors"] and not run.output.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_second_interrupts(number):
    warnings, before = [], signal.getsignal(number)
    with stopping_between_chunks(warnings.append) as stopping:
        assert not stopping() and warnings == []
        os.kill(os.getpid(), number)
        assert stopping() and warnings == ["Finishing the batch; once more to stop at once."]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert len(warnings) == 1
    assert signal.getsignal(number) is before


def test_torchrun_may_repeat_the_signal_of_the_terminal(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    warnings = []
    with stopping_between_chunks(warnings.append) as stopping:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
        assert stopping() and warnings == ["Finishing the batch."]


def test_a_closed_stderr_does_not_interrupt_the_batch():
    """Ctrl-C also ends the tee of ``normscope capture … 2>&1 | tee log``."""

    def warn(sentence):
        raise BrokenPipeError

    with stopping_between_chunks(warn) as stopping:
        os.kill(os.getpid(), signal.SIGINT)
        assert stopping()


CAPTURED = "capture demo_vit --limit 3 --layers 1 -o seen.safetensors"


def test_resuming_without_a_checkpoint_starts_from_the_beginning(tmp_path):
    done = invoke(f"{CAPTURED} --resume", cwd=tmp_path)
    assert "nothing to resume; starting from the beginning" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["seen.safetensors"]
    assert normscope.load_capture(tmp_path / "seen.safetensors").n_samples == 3


def test_a_capture_that_cannot_be_written_leaves_the_checkpoint(tmp_path, monkeypatch):
    file, kept = tmp_path / "seen.safetensors", tmp_path / "seen.safetensors.checkpoint"

    def full(*_):
        raise UsageError("Cannot write it: No space left on device.")

    with monkeypatch.context() as patch:
        patch.setattr(normscope, "save_capture", full)
        assert "No space left" in invoke(f"{CAPTURED} --checkpoint-every 0", status=2, cwd=tmp_path).stderr
    assert kept.is_dir() and not file.exists()
    assert f"going on from {kept.name}" in invoke(f"{CAPTURED} --resume", cwd=tmp_path).stderr
    assert normscope.load_capture(file).n_samples == 3 and not kept.exists()


def test_closed_streams():
    """Daemons close both: results need stdout, messages do not need stderr."""
    models = [sys.executable, "-m", "normscope", "models"]
    closed = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *models], capture_output=True, text=True)
    assert closed.returncode == UsageError.exit_status
    assert closed.stderr == "Error: Standard output is closed; give it a file or a pipe.\n"
    quiet = subprocess.run(["sh", "-c", '"$@" 2>&-', "sh", *models], capture_output=True, text=True)
    assert quiet.returncode == 0 and "demo_vit" in quiet.stdout
