"""How much of a swap's drift goes without training, and how long that takes: ``python benchmarks/calibration.py``."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import inspect
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pitch_network
import torch
from common import Measurement, finish, in_own_process, names, options

import normscope
from normscope.inputs.held_out import divided
from normscope.swaps.calibrate import closed_form, refitting
from normscope.swaps.calibrate.calibrate import NEIGHBOURS, REFITS
from normscope.swaps.distances import output_errors

MODELS = "demo_vit,demo_wav2vec2,demo_dit,minilm,torchfcpe"
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
of Python's standard library, and is judged by {held_out} of other modules; torchfcpe is FCPE, a pretrained network that
hears pitch and that nothing was tuned on, on the synthetic words that demo_wav2vec2 learns from and is judged by. CPU
seconds are of the calibration alone, both networks' passes included. Everything ran on one thread. With --ablations
also, each by itself: every module fitted on what it takes in the original and not in the network calibrated so far; λ
fixed at 0.1 of the mean square of a feature; one θ for all channels. With --keep, beside the rows of an earlier run: so
many norms were left as they are, chosen by normscope.keep on 48 of the inputs to learn from, all others swapped, and
these calibrated; closed is of the drift with all of them swapped.
"""


def main() -> None:
    parser = options(__doc__, repeats=1)
    parser.add_argument("--models", type=names, default=names(MODELS), help="(%(default)s)")
    parser.add_argument("--curves", type=names, default=names(CURVES), help="(%(default)s)")
    parser.add_argument("--limit", type=int, help="inputs of each, to learn from and held out (all)")
    parser.add_argument("--texts", type=int, default=TEXTS, help="docstrings that minilm learns from (%(default)s)")
    parser.add_argument("--ablations", action="store_true", help="calibrate also with one step left out or done simply")
    parser.add_argument("--keep", type=int, help="leave so many norms; adds these rows alone to the file")
    args = parser.parse_args()
    asked = (args.curves, args.limit, args.texts, args.ablations, args.keep)
    measurements = [one for model in args.models for one in in_own_process(measured, model, *asked, threads=1)]
    about, libraries = ABOUT.format(texts=args.texts, held_out=HELD_OUT), ["timm", "diffusers", "transformers"]
    finish("calibration", about, measurements, args, threads=[1], libraries=libraries, added=bool(args.keep))


@dataclasses.dataclass(frozen=True)
class Subject:
    """A network by its name, what it learns from and is judged by, and the capture that its functions begin with."""

    name: str
    network: normscope.LoadedModel
    learned: list[Any]
    held_out: list[Any]
    seen: normscope.Capture

    def errors(self, swapped: torch.nn.Module) -> torch.Tensor:
        """Relative L2 of each held-out input's output, ``(samples,)``."""
        outputs = dataclasses.replace(self.network.outputs, kind="tensor")  # of logits, too
        return output_errors(self.network.module, swapped, self.held_out, outputs)


def measured(
    model: str, curves: Sequence[str], limit: int | None, texts: int, ablations: bool, keep: int | None
) -> list[Measurement]:
    torch.set_num_threads(1)
    network, learned, held_out = inputs_of(model, limit, texts)
    subject = Subject(model, network, learned, held_out, normscope.capture(network.module, learned, by_gamma=True))
    if keep:
        return [one for curve in curves for one in with_norms_kept(subject, curve, keep)]
    ways = ("fit", *REFITS, *(ABLATIONS if ablations else ()))
    return [one for curve in curves for one in of_curve(subject, curve, ways)]


def with_norms_kept(subject: Subject, curve: str, number: int) -> Iterator[Measurement]:
    """Leave the norms that are worth most, swap one curve in for the others, and calibrate it."""
    modules = normscope.replacements(subject.network, curve, subject.seen)
    began = time.process_time()
    choice = normscope.keep(subject.network, subject.learned, modules, number=number)
    chosen = time.process_time() - began
    swapped = copy.deepcopy(subject.network.module)
    normscope.swap(swapped, curve, subject.seen)
    start = float(subject.errors(swapped).median())
    suffix, ways = f", {number} norms kept", ("fit", NEIGHBOURS)
    yield from of_curve(subject, curve, ways, choice.swapped, suffix, start)
    yield Measurement(subject.name, f"{curve}, {NEIGHBOURS}{suffix}", "CPU of the choice", "s", [chosen])


def of_curve(
    subject: Subject,
    curve: str,
    ways: Sequence[str],
    sites: Sequence[str] | str = "all",
    suffix: str = "",
    start: float | None = None,
) -> Iterator[Measurement]:
    """Swap one curve in, and calibrate it in each way."""
    network = subject.network
    for way in ways:
        swapped = copy.deepcopy(network.module)
        normscope.swap(swapped, curve, subject.seen, sites=sites)
        case = f"{curve}, {way}{suffix}"
        if way != "fit":
            began = time.process_time()
            with ABLATIONS.get(way, contextlib.nullcontext)():
                refit = way if way in REFITS else NEIGHBOURS
                normscope.calibrate(network.module, swapped, subject.learned, outputs=network.outputs, refit=refit)
            yield Measurement(subject.name, case, "CPU", "s", [time.process_time() - began])
        errors = subject.errors(swapped)
        yield Measurement(subject.name, case, "relative L2", "at the output", errors.tolist())
        median = float(errors.median())
        start = median if start is None else start
        yield Measurement(subject.name, case, "closed", "%", [100 * (1 - median / start)])


@contextlib.contextmanager
def on_the_originals_inputs() -> Iterator[None]:
    """Let every module be fitted on what the original gives it, as if nothing before it were swapped."""
    paused_at, passes, passed = refitting.paused_at, refitting.waiting_passes, refitting.Refitting._passed
    originals: list[Any] = []

    def waiting(network: Any, paths: Sequence[str], *, behind: bool, kept: Sequence[str] = ()) -> Any:
        if behind:
            originals.append(network)
        return paused_at(originals[-1], paths if behind else (), behind=behind, kept=kept)

    def whatever_it_takes(*given: Any) -> Any:
        return dataclasses.replace(passed(*given), input=None)

    with (
        patch.object(refitting, "paused_at", waiting),
        patch.object(refitting, "waiting_passes", lambda network, batches: passes(originals[-1], batches)),
        patch.object(refitting.Refitting, "_passed", whatever_it_takes),
    ):
        yield


def one_slope(sums: Any) -> Any:
    """One θ for all channels of a post-norm: their mean."""
    of_channels = closed_form.slopes(sums)
    return of_channels.mean().expand(len(of_channels))


# Calibrations of neighbours with one step done otherwise.
ABLATIONS: dict[str, Callable[[], Any]] = {
    "on the original's inputs": on_the_originals_inputs,
    "λ = 0.1": lambda: patch.object(closed_form, "PENALTIES", (0.1,)),
    "one θ": lambda: patch.object(refitting, "slopes", one_slope),
}


def inputs_of(model: str, limit: int | None, texts: int = TEXTS) -> tuple[normscope.LoadedModel, list[Any], list[Any]]:
    """Load a network, and its inputs to learn from and to judge by."""
    if model == pitch_network.NAME:
        return pitch_network.inputs_of(limit)
    if model != "minilm":
        network = normscope.load(model, batch_size=BATCH_SIZE, limit=limit, device="cpu")
        learned, held_out = divided(network.inputs, network.calibration)
        return network, list(learned), list(held_out)
    return reading(model, texts, limit)


def reading(model: str, texts: int, limit: int | None = None) -> tuple[normscope.LoadedModel, list[Any], list[Any]]:
    """Load a network of texts, and docstrings to learn from and to judge by."""
    parts = []
    with tempfile.TemporaryDirectory() as folder:
        for modules, number in ((LEARNED, texts), (JUDGED, HELD_OUT)):
            path = Path(folder) / f"{number}.txt"
            lines = sorted(docstrings(modules.split())[: limit or number], key=len)  # a batch then has little padding
            path.write_text("\n".join(lines), encoding="utf-8")
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
