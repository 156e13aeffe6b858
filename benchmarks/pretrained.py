"""Pretrained networks that convert norms, with inputs to learn from and inputs to judge by.

FCPE estimates pitch; nothing in normscope was tuned on it. The package torchfcpe (https://github.com/CNChTu/FCPE, MIT
License, Copyright (c) 2023 CN_ChiTu) contains its weights. Its network is written out here, and its weights, a
checkpoint of torch, are read without unpickling any code.
"""

from __future__ import annotations

import importlib
import inspect
import random
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from molecules import MOLECULES, Package
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import normscope
from normscope.inputs.batch import Batch
from normscope.inputs.loaded_model import LoadedModel

BATCH_SIZE, HELD_OUT = 16, 96
# Modules of the standard library whose docstrings networks learn from, and are judged by.
LEARNED = """argparse ast asyncio.events asyncio.streams base64 bisect calendar cmd code codecs collections configparser
contextlib copy csv datetime decimal difflib dis email.message email.policy enum fractions ftplib functools gettext glob
gzip heapq html.parser http.client http.cookiejar imaplib inspect io ipaddress json.decoder logging logging.handlers
mailbox mimetypes multiprocessing.managers numbers optparse os pathlib pdb pickle pickletools platform plistlib poplib
pprint pstats pydoc""".split()  # noqa: SIM905
JUDGED = """queue random reprlib sched selectors shelve shlex shutil smtplib socket socketserver sqlite3 statistics
string subprocess tarfile tempfile textwrap threading timeit tokenize trace traceback types typing unittest.case
unittest.mock urllib.parse urllib.request uuid wave weakref webbrowser xml.dom.minidom xml.etree.ElementTree
xmlrpc.client zipfile""".split()  # noqa: SIM905

FCPE = "torchfcpe"
PACKAGE = Package(
    "torchfcpe==0.0.4",
    "torchfcpe/assets/",
    ("fcpe_c_v001.pt",),
    "b9aeaeb673436eeda50ceafd632aa681aa63417e52eae4207503d180c9b10015",
)
Loaded = tuple[LoadedModel, list[Batch], list[Batch]]


def inputs_of(model: str, texts: int = 320, limit: int | None = None, held_out: int = HELD_OUT) -> Loaded:
    """Load a network with inputs to learn from and held-out inputs.

    Networks of text (minilm, and folders, ``transformers:FOLDER``) learn from docstrings, those of molecules from
    molecules.
    """
    if model == FCPE:
        network = normscope.load(
            f"py:{__file__}:pitch_network", weights=PACKAGE.fetched() / PACKAGE.files[0], limit=limit, device="cpu"
        )
        words = normscope.load("demo_wav2vec2", limit=limit, device="cpu").calibration
        return network, spectrograms(words), list(network.inputs)
    if model not in ("minilm", *MOLECULES) and ":" not in model:
        network = normscope.load(model, batch_size=BATCH_SIZE, limit=limit, device="cpu")
        return network, list(network.calibration), list(network.inputs)
    parts, texts_of = [], lambda number, judged: docstrings(JUDGED if judged else LEARNED)[:number]
    if model in MOLECULES:
        package, texts_of = MOLECULES[model]
        model = f"transformers:{package.converted()}"
    with tempfile.TemporaryDirectory() as folder:
        for number, judged in ((texts, False), (held_out, True)):
            path = Path(folder) / f"{number}.txt"
            lines = sorted(texts_of(limit or number, judged), key=len)  # a batch then has little padding
            path.write_text("\n".join(lines), encoding="utf-8")
            network = normscope.load(model, data=path, batch_size=BATCH_SIZE, device="cpu")
            parts.append(list(network.inputs))
    return network, *parts


def docstrings(modules: Sequence[str]) -> list[str]:
    """Return the docstrings of functions, classes and methods of modules, one line each, in a fixed random order."""
    lines: dict[str, None] = {}
    for name in modules:
        for _, member in sorted(vars(importlib.import_module(name)).items()):
            if getattr(member, "__module__", None) != name:
                continue
            methods = [method for _, method in sorted(vars(member).items())] if inspect.isclass(member) else []
            for text in (getattr(documented, "__doc__", None) for documented in (member, *methods)):
                if isinstance(text, str) and len(line := " ".join(text.split())) >= 60:
                    lines[line[:800]] = None
    texts = list(lines)
    random.Random(0).shuffle(texts)  # noqa: S311 - no secret
    return texts


SAMPLE_RATE, WINDOW, HOP, MELS = 16_000, 1024, 160, 128
WIDTH, LAYERS, PITCHES = 512, 6, 360
SOFTEST = 1e-5  # what quieter bands count as


class Transpose(nn.Module):
    """Exchange of time and channels."""

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
    """Wrap a module under its name in the checkpoint."""
    return nn.Sequential(OrderedDict({name: module}))


class Fcpe(nn.Module):
    """Probability of each pitch ``(samples, frames, PITCHES)`` in log-mel spectrograms ``(samples, frames, MELS)``."""

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
    """Return log-mel spectrograms ``(samples, frames, MELS)`` of waveforms within ±1 ``(samples, length)``."""
    from torchaudio.functional import melscale_fbanks  # which the other networks of a benchmark do without

    around = (WINDOW - HOP) // 2
    padded = nn.functional.pad(waveforms[:, None], (around, around), mode="reflect")[:, 0]
    spectra = torch.stft(padded, WINDOW, HOP, window=torch.hann_window(WINDOW), center=False, return_complex=True)
    size = (spectra.real.square() + spectra.imag.square() + 1e-9).sqrt()
    bands = melscale_fbanks(WINDOW // 2 + 1, 0.0, SAMPLE_RATE / 2, MELS, SAMPLE_RATE, norm="slaney", mel_scale="slaney")
    return (size.transpose(1, 2) @ bands).clamp(min=SOFTEST).log()


def pitch_network() -> tuple[nn.Module, list[Batch]]:
    """Return FCPE without its weights, and words of held-out voices, as ``py:`` takes them."""
    return Fcpe().eval(), spectrograms(normscope.load("demo_wav2vec2", device="cpu").inputs)


def spectrograms(words: Iterable[Batch]) -> list[Batch]:
    """Return FCPE's inputs of spoken words, one per batch: padding would enter its GroupNorm."""
    return [Batch((log_mel(word.args[0]),), samples=word.samples) for word in words]
