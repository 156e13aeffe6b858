"""How much of a swap's drift goes without training, and how long that takes: ``python benchmarks/calibration.py``."""

from __future__ import annotations

import copy
import importlib
import inspect
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from common import Measurement, finish, in_own_process, names, options

import normscope
from normscope.inputs.splits import divided
from normscope.swaps.calibrate.calibrate import REFITS
from normscope.swaps.heal.lessons import output_errors

MODELS = "demo_vit,demo_wav2vec2,demo_dit,minilm"
CURVES = "dyt,dyisru"
BATCH_SIZE = 16
TEXTS, HELD_OUT = 320, 96
# Docstrings of the standard library, to learn from and, of other modules, to judge by.
LEARNED = """argparse ast asyncio.events asyncio.streams base64 bisect calendar cmd code codecs collections configparser
contextlib copy csv datetime decimal difflib dis email.message email.policy enum fractions ftplib functools gettext glob
gzip heapq html.parser http.client http.cookiejar imaplib inspect io ipaddress json.decoder logging logging.handlers
mailbox mimetypes multiprocessing.managers numbers optparse os pathlib pdb pickle pickletools platform plistlib poplib
pprint pstats pydoc"""
JUDGED = """queue random reprlib sched selectors shelve shlex shutil smtplib socket socketserver sqlite3 statistics
string subprocess tarfile tempfile textwrap threading timeit tokenize trace traceback types typing unittest.case
unittest.mock urllib.parse urllib.request uuid wave weakref webbrowser xml.dom.minidom xml.etree.ElementTree
xmlrpc.client
zipfile"""
ABOUT = """
All norms of a network were swapped, with start values fitted to its own inputs to learn from, weighted by γ², and the
swapped network was calibrated by normscope.calibrate on the same inputs: norms, functions alone; neighbours, the
linear layers beside them too. Drift: relative L2 at the output against the original, over held-out inputs that neither
has seen; samples are inputs: median, smallest and largest. Closed: the share of the median that is gone. The embedded
networks learn from all their inputs to learn from; minilm is all-MiniLM-L6-v2, a pretrained one, on {texts} docstrings
of Python's standard library, and is judged by {held_out} of other modules. CPU seconds are of the calibration alone,
both networks' passes included. Everything ran on one thread.
"""


def main() -> None:
    parser = options(__doc__, repeats=1)
    parser.add_argument("--models", type=names, default=names(MODELS), help="(%(default)s)")
    parser.add_argument("--curves", type=names, default=names(CURVES), help="(%(default)s)")
    parser.add_argument("--limit", type=int, help="inputs of each, to learn from and held out (all)")
    args = parser.parse_args()
    measurements = [
        one for model in args.models for one in in_own_process(measured, model, args.curves, args.limit, threads=1)
    ]
    about = ABOUT.format(texts=TEXTS, held_out=HELD_OUT)
    finish("calibration", about, measurements, args, threads=[1], libraries=["timm", "diffusers", "transformers"])


def measured(model: str, curves: Sequence[str], limit: int | None) -> list[Measurement]:
    torch.set_num_threads(1)
    network, learned, held_out = inputs_of(model, limit)
    seen = normscope.capture(network.module, learned, by_gamma=True)
    return [one for curve in curves for one in of_curve(model, network, curve, seen, learned, held_out)]


def of_curve(
    model: str, network: normscope.LoadedModel, curve: str, seen: normscope.Capture, learned: Any, held_out: Any
) -> Iterator[Measurement]:
    """Swap one curve in, and calibrate it in each way."""
    start = None
    for way in ("fit", *REFITS):
        swapped = copy.deepcopy(network.module)
        normscope.swap(swapped, curve, seen)
        if way != "fit":
            began = time.process_time()
            normscope.calibrate(network.module, swapped, learned, outputs=network.outputs, refit=way)
            yield Measurement(model, f"{curve}, {way}", "CPU", "s", [time.process_time() - began])
        errors = output_errors(network.module, swapped, held_out, network.outputs)
        yield Measurement(model, f"{curve}, {way}", "relative L2", "at the output", errors.tolist())
        median = float(errors.median())
        start = median if start is None else start
        yield Measurement(model, f"{curve}, {way}", "closed", "%", [100 * (1 - median / start)])


def inputs_of(model: str, limit: int | None) -> tuple[normscope.LoadedModel, list[Any], list[Any]]:
    """Load a network, and its inputs to learn from and to judge by."""
    if model != "minilm":
        network = normscope.load(model, batch_size=BATCH_SIZE, limit=limit, device="cpu")
        learned, held_out = divided(network.inputs, network.calibration)
        return network, list(learned), list(held_out)
    parts = []
    with tempfile.TemporaryDirectory() as folder:
        for modules, number in ((LEARNED, TEXTS), (JUDGED, HELD_OUT)):
            path = Path(folder) / f"{number}.txt"
            path.write_text("\n".join(docstrings(modules.split())[: limit or number]), encoding="utf-8")
            network = normscope.load(model, data=path, batch_size=BATCH_SIZE, device="cpu")
            parts.append(list(network.inputs))
    return network, *parts


def docstrings(modules: Sequence[str]) -> list[str]:
    """List what modules say of their functions, classes and methods, a line each, in an order that stays the same."""
    found: dict[str, None] = {}
    for name in modules:
        for _, one in sorted(vars(importlib.import_module(name)).items()):
            if getattr(one, "__module__", None) != name:
                continue
            members = [member for _, member in sorted(vars(one).items())] if inspect.isclass(one) else []
            for text in (getattr(each, "__doc__", None) for each in (one, *members)):
                if isinstance(text, str) and len(line := " ".join(text.split())) >= 60:
                    found[line[:800]] = None
    texts = list(found)
    random.Random(0).shuffle(texts)  # noqa: S311 - no secret
    return texts


if __name__ == "__main__":
    main()
