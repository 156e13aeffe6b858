"""Networks with inputs to learn from and inputs to judge by; texts are docstrings of Python's standard library."""

from __future__ import annotations

import importlib
import inspect
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

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


def inputs_of(model: str, texts: int, limit: int | None) -> tuple[LoadedModel, list[tuple[list[Batch], list[Batch]]]]:
    """Load a network with pairs of inputs to learn from and inputs held out.

    Networks of text learn from docstrings, and docstrings of other modules are held out. Embedded networks have both.
    The few inputs of the others are divided by source: photograph or recording. Each is held out in one of the rounds.
    """
    if model not in OF_TEXT and ":" not in model:
        network = normscope.load(model, batch_size=BATCH_SIZE, limit=limit, device="cpu")
        if network.calibration is not None:
            return network, [(list(network.calibration), list(network.inputs))]
        return network, rounds(list(network.inputs))
    parts = []
    with tempfile.TemporaryDirectory() as folder:
        for number, modules in ((texts, LEARNED), (HELD_OUT, JUDGED)):
            path = Path(folder) / f"{number}.txt"
            lines = sorted(docstrings(modules)[: limit or number], key=len)  # a batch then has little padding
            path.write_text("\n".join(lines), encoding="utf-8")
            network = normscope.load(model, data=path, batch_size=BATCH_SIZE, device="cpu")
            parts.append(list(network.inputs))
    return network, [(parts[0], parts[1])]


def rounds(batches: Sequence[Batch]) -> list[tuple[list[Batch], list[Batch]]]:
    """Divide batches by source in at most four ways, in which each source is held out once."""
    sources = list(dict.fromkeys(sample.source for batch in batches for sample in batch.samples))
    number = min(ROUNDS, len(sources))
    held_out = [set(sources[first::number]) for first in range(number)]
    return [(chosen(batches, set(sources) - part), chosen(batches, part)) for part in held_out]


def chosen(batches: Sequence[Batch], sources: set[str]) -> list[Batch]:
    """Return the samples of some sources."""
    rows = [[i for i, sample in enumerate(batch.samples) if sample.source in sources] for batch in batches]
    return [batch.take(numbers) for batch, numbers in zip(batches, rows, strict=True) if numbers]


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
