"""Cause every fault that a run should survive, and write the outcomes into docs/reliability.md.

    python benchmarks/faults.py

Needs Linux, and the right to mount a small tmpfs as a full disk.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mutations import FINE, REFUSED, mutated_captures, mutated_swaps, mutated_weights
from runs import ROOT, SUMS, CaptureRun, children_of, differences, write_images

from normscope.pairs.captures import Capture
from normscope.pairs.storage import load_capture

PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- faults: written by benchmarks/faults.py -->", "<!-- end of faults -->"
EVERY_SECOND = ("--checkpoint-every", "1")


@dataclass
class Outcome:
    """Counts of a fault and of its outcomes; ``wrong`` describes everything but right counts and clear errors.

    ``kept`` counts the tries with a checkpoint to resume from; None if checkpoints do not matter.
    """

    fault: str
    tries: int = 0
    kept: int | None = None
    right: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)

    def note(self, wrong: list[str], tries: int = 1) -> None:
        """Count tries whose capture has these differences."""
        self.tries += tries
        self.right += 0 if wrong else tries
        self.wrong += wrong


class Faults:
    """Runs with faults over ``images`` images, of which every hundredth cannot be read, and a run without faults."""

    def __init__(self, folder: Path, images: int, seed: int = 0) -> None:
        self.folder, self.images, self.random = folder, images, random.Random(seed)  # noqa: S311 - moments to kill at
        self.data = write_images(folder / "images", images, corrupt_every=100)
        self.number = 0
        whole = self.run()
        if whole.finish():
            raise RuntimeError(whole.said())
        self.whole = load_capture(whole.output)

    def run(self, *more: str, ranks: int = 1, folder: Path | None = None, launcher: tuple[str, ...] = ()) -> CaptureRun:
        """Return a capture of the images into a new file, with a checkpoint every second."""
        self.number += 1
        given = ("--data", str(self.data), *EVERY_SECOND, *more)
        output = (folder or self.folder) / f"{self.number}.safetensors"
        return CaptureRun("demo_vit", output, given, ranks, launcher, log=self.folder / f"{self.number}.log")

    def begun(self, **given: Any) -> tuple[CaptureRun, subprocess.Popen[bytes]]:
        """Start a capture, and wait until each of its ranks has kept something."""
        run = self.run(**given)
        process = run.start()
        run.until_kept(process, run.ranks)
        return run, process

    def corrupt_inputs(self) -> Outcome:
        """Truncate one input in a hundred: the others count, and these are named."""
        outcome = Outcome("1 % of inputs unreadable")
        expected, left_out = self.images - self.images // 100, f"{self.images // 100} unreadable"
        wrong = [] if self.whole.n_samples == expected else [f"{self.whole.n_samples} samples, not {expected}"]
        outcome.note(wrong + ([] if left_out in self.whole.about["data"] else [self.whole.about["data"]]))
        return outcome

    def kills(self, number: int, longest: float, every: str = "1") -> Outcome:
        """Kill -9 a number of times at random moments; then let the run end."""
        outcome = Outcome(f"kill -9, checkpoint every {every} s", kept=0)
        while outcome.tries < number:
            run, kills = self.run("--checkpoint-every", every), 0
            while outcome.tries + kills < number and run.killed_after(self.random.uniform(0.5, longest), "--resume"):
                kills += 1
                outcome.kept += run.kept
            outcome.note(self.ended(run), kills)
        return outcome

    def lost_ranks(self, ranks: int, then: int) -> Outcome:
        """Kill one of several ranks after each has kept something; resume with another number of ranks."""
        outcome = Outcome(f"1 of {ranks} ranks lost, resumed with {then}")
        run, process = self.begun(ranks=ranks)
        kill_rank(process, ranks - 1)
        outcome.kept = int(run.kept)
        if not process.wait(120):
            outcome.wrong.append("torchrun did not notice")
        run.ranks = then
        outcome.note(self.ended(run))
        return outcome

    def restarted_ranks(self, ranks: int) -> Outcome:
        """Kill one of several ranks; torchrun restarts all of them, and they resume by themselves."""
        outcome = Outcome(f"1 of {ranks} ranks lost, restarted by torchrun")
        run, process = self.begun(ranks=ranks, launcher=("--max-restarts=1",))
        kill_rank(process, 0)
        outcome.kept = int(run.kept)
        status = process.wait(120)
        outcome.note([run.said()] if status else differences(self.whole, load_capture(run.output)))
        return outcome

    def interrupted(self, number: signal.Signals) -> Outcome:
        """Send Ctrl-C, or the signal that ends a job: the batch is finished and kept, and the run resumes."""
        run, process = self.begun()
        process.send_signal(number)
        status, said = process.wait(60), run.said()
        outcome = Outcome(number.name, kept=int(run.kept))
        clear = status == 130 and "--resume goes on" in said and "Traceback" not in said
        outcome.note(([] if clear else [f"{status}: {said}"]) + self.ended(run))
        return outcome

    def truncated_checkpoint(self) -> Outcome:
        """Truncate a checkpoint, which is refused with a sentence; without it the run starts anew."""
        run, process = self.begun()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        outcome = Outcome("truncated checkpoint", kept=int(run.kept))
        (path,) = run.checkpoints.glob("*.safetensors")
        os.truncate(path, path.stat().st_size // 2)
        clear = run.finish("--resume") == 4 and is_clear(run.said())
        outcome.refused += clear
        path.unlink()
        outcome.note(self.ended(run) + ([] if clear else [run.said()]))
        return outcome

    def full_disk(self, room: int) -> Outcome:
        """Fill the disk during a run, which fails with a sentence, and resumes once there is room."""
        outcome = Outcome("full disk")
        disk = self.folder / "disk"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", str(disk)], check=True)
        try:
            run, process = self.begun(folder=disk)
            filler, space = disk / "filler", os.statvfs(disk)
            filler.write_bytes(bytes(max(0, space.f_bavail * space.f_frsize - 4096)))
            status, said = process.wait(120), run.said()
            outcome.kept = int(run.kept)
            clear = status == 2 and is_clear(said) and "No space left" in said and not run.output.exists()
            outcome.refused += clear
            filler.unlink()
            outcome.note(self.ended(run) + ([] if clear else [f"{status}: {said}"]))
        finally:
            subprocess.run(["umount", str(disk)], check=True)
        return outcome

    def ended(self, run: CaptureRun) -> list[str]:
        """Resume a run to its end, and return the differences of its capture from the one without faults."""
        if run.finish("--resume"):
            return [run.said()]
        left = [f"{run.checkpoints} is left"] if run.checkpoints.exists() else []
        return left + differences(self.whole, load_capture(run.output))

    def nonfinite(self) -> Outcome:
        """Capture NaN and infinities: their tokens are counted apart, and other sums do not change."""
        outcome = Outcome("NaN and inf in 2 % of tokens")
        captures: dict[str, Capture] = {}
        for name in ("spoilt", "clean"):
            factory = self.folder / f"{name}.py"
            factory.write_text(NETWORK.format(clean=name == "clean"), encoding="utf-8")
            run = CaptureRun(f"py:{factory}:make", self.folder / f"{name}.safetensors")
            if run.finish():
                outcome.note([run.said()])
                return outcome
            captures[name] = load_capture(run.output)
        spoilt, clean = (captures[name].stats["0"] for name in ("spoilt", "clean"))
        wrong = [] if int(spoilt.nonfinite_tokens) == 20 else [f"{int(spoilt.nonfinite_tokens)} tokens, not 20"]
        each, other = spoilt.moments.sum(0), clean.moments.sum(0)  # in the clean one other samples are in a fold
        close = (each - other).abs() <= SUMS * each.abs().amax(dim=-1, keepdim=True).clamp(min=1)
        outcome.note(wrong + ([] if bool(close.all()) and each[0].equal(other[0]) else ["other sums"]))
        return outcome


# A thousand tokens, of which 20 hold a NaN or an infinity; or none at all, in the same batches.
NETWORK = """
import torch
from torch import nn

def make():
    x = torch.randn(50, 20, 16, generator=torch.Generator().manual_seed(0))
    for number, value in enumerate((float("nan"), float("inf"), -float("inf"), float("nan")) * 5):
        x[number, number, number % 16] = value
    tokens = [one for one in x.flatten(0, 1) if not {clean} or one.isfinite().all()]
    return nn.Sequential(nn.LayerNorm(16)), [one[None] for one in tokens]
"""


def mutated(what: str, mutate: Callable[[int, int], dict[str, int]], number: int) -> Outcome:
    """Mutate files, and count the outcomes of reading them."""
    counts = mutate(number, 0)
    wrong = [f"{count} × {name}" for name, count in counts.items() if name not in FINE]
    refused = counts.get(REFUSED, 0)
    fine = sum(count for name, count in counts.items() if name in FINE) - refused
    return Outcome(f"mutated {what}", sum(counts.values()), None, fine, refused, wrong)


def kill_rank(process: subprocess.Popen[bytes], rank: int) -> None:
    """Kill one of the processes that torchrun started."""
    (pid,) = (pid for pid, given in children_of(process.pid).items() if given.get("RANK") == str(rank))
    os.kill(pid, signal.SIGKILL)


def is_clear(said: str) -> bool:
    return "Error: " in said and "Traceback" not in said


def every_fault(folder: Path, images: int, kills: int, mutations: int) -> Iterable[Outcome]:
    """Cause one fault after the other."""
    faults = Faults(folder, images)
    yield faults.corrupt_inputs()
    yield faults.nonfinite()
    yield faults.kills(kills, longest=10.0)
    yield faults.kills(max(1, kills // 4), longest=8.0, every="0")
    yield faults.interrupted(signal.SIGINT)
    yield faults.interrupted(signal.SIGTERM)
    yield faults.lost_ranks(2, then=2)
    yield faults.lost_ranks(2, then=1)
    yield faults.lost_ranks(3, then=2)
    yield faults.restarted_ranks(2)
    yield faults.truncated_checkpoint()
    yield faults.full_disk(room=80_000_000)
    yield mutated("captures", mutated_captures, mutations)
    yield mutated("weights", mutated_weights, mutations)
    yield mutated("swaps", mutated_swaps, mutations)


def table(outcomes: Iterable[Outcome]) -> str:
    """Return the outcomes as a table."""
    headings = (
        "fault",
        "times",
        "with a checkpoint",
        "correct counts",
        "clear errors",
        "other outcomes",
    )
    lines = [headings, (":--", *["--:"] * (len(headings) - 1))]
    for each in outcomes:
        numbers = (each.tries, "" if each.kept is None else each.kept, each.right, each.refused or "", len(each.wrong))
        lines.append((each.fault, *(f"{number:,}" if isinstance(number, int) else number for number in numbers)))
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=4000, help="in every run (%(default)s)")
    parser.add_argument("--kills", type=int, default=20, help="at random moments (%(default)s)")
    parser.add_argument("--mutations", type=int, default=10_000, help="of each kind of file (%(default)s)")
    args = parser.parse_args()
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        for each in every_fault(Path(folder), args.images, args.kills, args.mutations):
            print(each, flush=True)
            outcomes.append(each)
    page = PAGE.read_text(encoding="utf-8")
    written = re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{table(outcomes)}{END}", page, flags=re.DOTALL)
    PAGE.write_text(written, encoding="utf-8")
    if any(each.wrong for each in outcomes):
        sys.exit("\n".join(f"{each.fault}: {wrong}" for each in outcomes for wrong in each.wrong))


if __name__ == "__main__":
    main()
