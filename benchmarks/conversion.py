"""One pretrained network converted by the command line, step by step: ``python benchmarks/conversion.py``."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import Measurement, finish, in_own_process, options
from pretrained import JUDGED, LEARNED, docstrings
from torch import Tensor

import normscope
from normscope.swaps.distances import OutputErrors

MODEL = "minilm"
TEXTS = 1200
WITHOUT_TRAINING = "--limit 440 --shuffle"  # of all texts; three fourths are learned from
ABOUT = """
Conversion of all 13 LayerNorms of all-MiniLM-L6-v2, a pretrained network, by normscope's commands. Each command is a
process on one thread. CPU seconds cover the whole process, including imports and the choice of norms to keep. --data
contains {texts} docstrings of Python's standard library, one file per module. The commands learn from them, choose
norms by them and hold some of them out; commands without training use 440 of them. This benchmark measures drift on
{judged} docstrings of other modules, which no command reads. Drift: relative L2 between the last hidden states of the
converted and the original network (median, smallest and largest). Own text found: retrieval among the {pairs} of these
docstrings that have several sentences. It is the share of first sentences whose embedding is nearer to the rest of
their own docstring than to the rest of any other (cosine of means over tokens), with its standard error.
"""
_SENTENCES = re.compile(r"(?<=[.!?]) ")
_LEAST_OF_FIRST, _LEAST_OF_REST = 30, 60  # characters, below which a docstring says too little to be told apart


class Step(NamedTuple):
    """A folder that ``normscope COMMAND`` writes, and its name in the table."""

    way: str
    command: str

    @property
    def folder(self) -> str:
        """Name of the folder."""
        return re.sub(r"\W+", "-", self.way.lower())


def steps_of(minutes: Iterable[float]) -> list[Step]:
    """List the steps of the conversion, with a healing of each length."""
    swap = f"swap {MODEL} {WITHOUT_TRAINING} --func"
    return [
        Step("RMSNorm", f"{swap} rmsnorm"),
        Step("DyT, fitted", f"{swap} dyt"),
        Step("DyT, calibrated", f"{swap} dyt --init calibrated"),
        Step("DyT, calibrated, two norms kept", f"{swap} dyt --init calibrated --keep 2"),
        *(
            Step(f"DyT, healed in {length:g} minutes", f"heal {MODEL} --func dyt --minutes {length:g}")
            for length in minutes
        ),
    ]


def main() -> None:
    parser = options(__doc__, repeats=1)
    parser.add_argument("--texts", type=int, default=TEXTS, help="docstrings that the commands get (%(default)s)")
    parser.add_argument("--minutes", type=float, nargs="*", default=[30.0], help="of the healings (30)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        written_texts(work / "texts", args.texts)
        seconds = {}
        for step in steps_of(args.minutes):
            print(f"{step.way} …", flush=True)
            seconds[step.way] = run(f"{step.command} -o {step.folder}", work)
        judged, pairs, measurements = in_own_process(measured, work, steps_of(args.minutes), seconds, threads=1)
    about = ABOUT.format(texts=args.texts, judged=judged, pairs=pairs)
    finish("conversion", about, measurements, args, threads=[1], libraries=["transformers"], added=True)


def written_texts(folder: Path, number: int) -> None:
    """Write docstrings, a file a module: sources of their own, of which some can be held out."""
    folder.mkdir()
    left = set(docstrings(LEARNED)[:number])
    for module in LEARNED:
        lines = [text for text in docstrings([module]) if text in left]
        left -= set(lines)
        if lines:
            (folder / f"{module}.txt").write_text("\n".join(sorted(lines, key=len)) + "\n", encoding="utf-8")


def run(line: str, work: Path) -> float:
    """Run one command on one thread, and return its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "normscope", *line.split(), "--data", "texts", "--device", "cpu", "--quiet"]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
    subprocess.run(command, cwd=work, env=os.environ | threads, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measured(work: Path, steps: list[Step], seconds: dict[str, float]) -> tuple[int, int, list[Measurement]]:
    """Judge every folder by docstrings that none of the commands saw."""
    torch.set_num_threads(1)
    texts = docstrings(JUDGED)
    halves = [halves for text in texts if (halves := first_and_rest(text))]
    path = work / "judged.txt"
    path.write_text("\n".join(sorted(texts, key=len)), encoding="utf-8")
    inputs = list(normscope.load(MODEL, data=path, batch_size=16, device="cpu").inputs)
    network = normscope.load(MODEL, device="cpu")
    errors = OutputErrors(network.module, inputs, network.outputs)
    measurements = [found_own_text("original", network, halves, work)]
    for step in steps:
        swapped = normscope.load_swapped(work / step.folder, device="cpu")
        measurements.append(Measurement(MODEL, step.way, "CPU", "s", [seconds[step.way]]))
        moved = errors.of(swapped.module).tolist()
        measurements.append(Measurement(MODEL, step.way, "relative L2", "at the output", moved))
        measurements.append(found_own_text(step.way, swapped, halves, work))
    return len(texts), len(halves), measurements


def found_own_text(way: str, network: Any, halves: list[tuple[str, str]], work: Path) -> Measurement:
    """Return the share of docstrings whose first sentence is nearest to their own rest."""
    first, rest = (embeddings(network, [pair[half] for pair in halves], work) for half in (0, 1))
    right = (first @ rest.T).argmax(1) == torch.arange(len(halves))
    share = float(right.double().mean())
    error = 100 * (share * (1 - share) / len(halves)) ** 0.5
    return Measurement(MODEL, way, "own text found", "%", [100 * share], error=error)


def first_and_rest(text: str) -> tuple[str, str] | None:
    """Divide a docstring behind its first sentence; None where either part says too little."""
    first, *rest = _SENTENCES.split(text, maxsplit=1)
    return (first, rest[0]) if rest and len(first) >= _LEAST_OF_FIRST and len(rest[0]) >= _LEAST_OF_REST else None


@torch.no_grad()
def embeddings(network: Any, texts: list[str], work: Path) -> Tensor:
    """Mean of each text's hidden states, of length 1: ``(texts, width)``."""
    path = work / "embedded.txt"
    path.write_text("\n".join(texts), encoding="utf-8")
    results = []
    for batch in normscope.load(MODEL, data=path, batch_size=16, device="cpu").inputs:
        hidden = network.module(*batch.args, **batch.kwargs).last_hidden_state
        kept = batch.valid[..., None]
        results.append((hidden * kept).sum(1) / kept.sum(1))
    return torch.nn.functional.normalize(torch.cat(results), dim=1)


if __name__ == "__main__":
    main()
