"""Captures by real processes, alone or under torchrun, that can be killed; differences between two captures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from normscope.pairs.captures import Capture
from normscope.pairs.sums.stats import PairStats

ROOT = Path(__file__).parents[1]
# Sums of another grouping of the same float64 numbers; of a bin's largest sum.
SUMS = 1e-12


def write_images(folder: Path, number: int, *, corrupt_every: int = 0, seed: int = 0) -> Path:
    """Write images of 8×8 noise, ``0/00000.png`` …, and truncate each ``corrupt_every``-th."""
    generator = np.random.default_rng(seed)
    for index in range(number):
        path = folder / str(index // 1000) / f"{index:05d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (8, 8), dtype=np.uint8)).save(path)
        if corrupt_every and index % corrupt_every == corrupt_every - 1:
            path.write_bytes(path.read_bytes()[:40])
    return folder


@dataclass
class CaptureRun:
    """A ``normscope capture`` of a model into ``output``, which can be started again and again.

    More than one rank, or options for torchrun (``launcher``), run it under torchrun. ``log`` receives its output.
    """

    model: str
    output: Path
    options: Sequence[str] = ()
    ranks: int = 1
    launcher: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=lambda: {"OMP_NUM_THREADS": "1"})
    log: Path = field(default=Path(), kw_only=True)

    def __post_init__(self) -> None:
        self.log = self.output.with_suffix(".log") if self.log == Path() else self.log

    @property
    def checkpoints(self) -> Path:
        """Folder of its checkpoints."""
        return self.output.with_name(f"{self.output.name}.checkpoint")

    @property
    def kept(self) -> bool:
        """True if there is a checkpoint."""
        return self.checkpoints.is_dir() and any(path.stem.isdigit() for path in self.checkpoints.glob("*.safetensors"))

    def start(self, *more: str) -> subprocess.Popen[bytes]:
        """Start it, in a session of its own."""
        command = [sys.executable, "-m", "normscope"]
        if self.ranks > 1 or self.launcher:
            several = [f"--nproc-per-node={self.ranks}", "--master-port=0", *self.launcher]
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *several, "-m", "normscope"]
        command += ["capture", self.model, "-o", str(self.output), *self.options, *more]
        environment = {**os.environ, **self.environment}
        with self.log.open("w", encoding="utf-8") as log:  # a pipe that nobody reads fills up
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def said(self) -> str:
        """Return what the latest process printed so far."""
        return self.log.read_text(encoding="utf-8")

    def finish(self, *more: str, seconds: float = 300) -> int:
        """Run it to its end, and return its exit status."""
        return self.start(*more).wait(seconds)

    def killed_after(self, seconds: float, *more: str) -> bool:
        """Start it, and kill all its processes then; return False where it was done before."""
        process = self.start(*more)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return True
        return False

    def until_kept(self, process: subprocess.Popen[bytes], files: int = 1, seconds: float = 120) -> None:
        """Wait until ``files`` ranks have written a checkpoint."""
        end = time.monotonic() + seconds
        while len(list(self.checkpoints.glob("[0-9]*.safetensors"))) < files:
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"there was no checkpoint of {files} ranks: {self.said()}")
            time.sleep(0.02)


def children_of(pid: int) -> dict[int, dict[str, str]]:
    """Return the environment of every child of a process, by its number; of Linux."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    environments = {}
    for child in map(int, children):
        raw = Path(f"/proc/{child}/environ").read_bytes().decode("utf-8", "replace").split("\0")
        environments[child] = dict(entry.split("=", 1) for entry in raw if "=" in entry)
    return environments


def differences(first: Capture, second: Capture) -> list[str]:
    """Return the differences of two captures of the same inputs: counts to the bit, sums to 1e-12."""
    apart = [] if first.n_samples == second.n_samples else [f"{first.n_samples} and {second.n_samples} samples"]
    if dict(first.about) != dict(second.about):
        apart.append(f"{dict(first.about)} and {dict(second.about)}")
    if list(first.stats) != list(second.stats) or list(first.parts) != list(second.parts):
        return [*apart, "other norm sites, or other parts"]
    for name, stats in first.stats.items():
        apart += [f"{name}: {what}" for what in _differences(stats, second.stats[name])]
    for name, part in first.parts.items():
        apart += [f"{name}: {what}" for what in differences(part, second.parts[name])]
    return apart


_EXACT = ["density", "token_offsets", "token_scales", "nonfinite_tokens", "channel_extremes"]
_EXACT += [f"{sample}.{name}" for sample in ("tokens", "largest", "pairs") for name in ("key", "x", "y")]


def _differences(first: PairStats, second: PairStats) -> list[str]:
    same = {name: torch.equal(attrgetter(name)(first), attrgetter(name)(second)) for name in _EXACT}
    same["pairs per bin"] = torch.equal(first.moments[:, 0], second.moments[:, 0])
    same["sources"] = first.sources == second.sources
    for name, sums in first.sums.items():
        # A bin's sums of both signs cancel: the loss is relative to the sum of its absolute values, |Σx| ≤ √(nΣx²).
        scale = sums.abs().amax(dim=-1, keepdim=True).clamp(min=1)
        same[name] = bool(((sums - second.sums[name]).abs() <= SUMS * scale).all())
    return [name for name, equal in same.items() if not equal]
