"""Networks with inputs to learn from and inputs to judge by; texts are docstrings of Python's standard library."""

from __future__ import annotations

import importlib
import inspect
import random
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import soundfile
import torch
from torch import Tensor

import normscope
from normscope.inputs.batch import Batch
from normscope.inputs.loaded_model import LoadedModel

BATCH_SIZE, HELD_OUT, ROUNDS = 16, 96, 4
OF_TEXT = ("minilm", "smollm2_135m")
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


def inputs_of(
    model: str, texts: int, limit: int | None, clips: int = 0
) -> tuple[LoadedModel, list[tuple[list[Batch], list[Batch]]]]:
    """Load a network with pairs of inputs to learn from and inputs held out.

    Networks of text learn from docstrings, and docstrings of other modules are held out. Embedded networks have both.
    The few inputs of the others are divided by source: photograph or recording. Each is held out in one of the rounds.
    A speech network also learns from ``clips`` of each voice that speaks none of the recordings.
    """
    if model not in OF_TEXT and ":" not in model:
        network = normscope.load(model, batch_size=BATCH_SIZE, limit=limit, device="cpu")
        if network.calibration is not None:
            return network, [(list(network.calibration), list(network.inputs))]
        divisions = rounds(list(network.inputs))
        if clips:
            more = clips_of_words(model, {sample.source for sample in network.inputs.known_samples()}, clips)
            divisions = [([*learned, *more], held_out) for learned, held_out in divisions]
        return network, divisions
    parts = []
    with tempfile.TemporaryDirectory() as folder:
        for number, modules in ((texts, LEARNED), (HELD_OUT, JUDGED)):
            path = Path(folder) / f"{number}.txt"
            lines = sorted(
                docstrings(modules)[: min(number, limit or number)], key=len
            )  # a batch then has little padding
            path.write_text("\n".join(lines), encoding="utf-8")
            network = normscope.load(model, data=path, batch_size=BATCH_SIZE, device="cpu")
            parts.append(list(network.inputs))
    return network, [(parts[0], parts[1])]


def rounds(batches: Sequence[Batch]) -> list[tuple[list[Batch], list[Batch]]]:
    """Divide batches by source in at most four ways, in which each source is held out once.

    Crops of few photographs to learn from become sources of their own, or one photograph alone would decide on λ.
    """
    sources = list(dict.fromkeys(sample.source for batch in batches for sample in batch.samples))
    number = min(ROUNDS, len(sources))
    held_out = [set(sources[first::number]) for first in range(number)]
    divisions = [(chosen(batches, set(sources) - part), chosen(batches, part)) for part in held_out]
    return [(apart(learned) if len(sources) <= ROUNDS else learned, part) for learned, part in divisions]


def apart(batches: Sequence[Batch]) -> list[Batch]:
    """Return batches in which each sample is a source of its own."""
    samples = [[replace(sample, source=f"{sample.source}, {sample.index}") for sample in b.samples] for b in batches]
    return [replace(batch, samples=tuple(of_batch)) for batch, of_batch in zip(batches, samples, strict=True)]


def chosen(batches: Sequence[Batch], sources: set[str]) -> list[Batch]:
    """Return the samples of some sources."""
    rows = [[i for i, sample in enumerate(batch.samples) if sample.source in sources] for batch in batches]
    return [batch.take(numbers) for batch, numbers in zip(batches, rows, strict=True) if numbers]


def clips_of_words(model: str, recordings: set[str], each: int) -> list[Batch]:
    """Return clips of a few words of demo_wav2vec2's training, as many for each voice that made none of the recordings.

    A clip lasts about as long as a recording. Words, and the order of the clips, are drawn at random.
    """
    voices: dict[str, list[Tensor]] = defaultdict(list)
    others = {name.rpartition("_")[2] for name in recordings}
    for batch in normscope.load("demo_wav2vec2", device="cpu").calibration:
        if batch.samples[0].source not in others:
            voices[batch.samples[0].source].append(batch.args[0][0])
    generator = random.Random(0)  # noqa: S311 - no secret
    with tempfile.TemporaryDirectory() as folder:
        for name, words in voices.items():
            for number in range(each):
                (path := Path(folder) / name / f"{number}.wav").parent.mkdir(exist_ok=True)
                drawn = generator.sample(words, min(len(words), generator.randint(4, 7)))
                soundfile.write(path, torch.cat(drawn).numpy(), 16_000, subtype="FLOAT")
        clips = list(normscope.load(model, data=folder, device="cpu").inputs)
    generator.shuffle(clips)
    return clips


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
