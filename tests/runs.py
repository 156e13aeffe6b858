"""Captures by real processes that can be stopped; differences between two captures."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
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
    """A ``normscope capture`` of a model into ``output``, which can be started again and again."""

    model: str
    output: Path
    options: Sequence[str] = ()

    @property
    def checkpoints(self) -> Path:
        """Folder of its checkpoints."""
        return self.output.with_name(f"{self.output.name}.checkpoint")

    @property
    def kept(self) -> bool:
        """True if there is a checkpoint."""
        return self.checkpoints.is_dir() and any(path.stem.isdigit() for path in self.checkpoints.glob("*.safetensors"))

    @property
    def log(self) -> Path:
        """File of its output."""
        return self.output.with_suffix(".log")

    def start(self, *more: str) -> subprocess.Popen[bytes]:
        """Start it on one thread, in a session of its own."""
        command = [sys.executable, "-m", "normscope", "capture", self.model, "-o", self.output, *self.options, *more]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with self.log.open("w", encoding="utf-8") as log:  # a pipe that nobody reads fills up
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def said(self) -> str:
        """Return what the latest process printed so far."""
        return self.log.read_text(encoding="utf-8")


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
