"""What a swap, calibration and healing make of pre-norm networks: ``python benchmarks/prenorm.py``."""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pitch_network
import torch
from calibration import BATCH_SIZE, HELD_OUT, reading
from common import Measurement, finish, in_own_process, names, options
from torch import Tensor

import normscope
from normscope.inputs.batch import Batch
from normscope.inputs.pool import by_length
from normscope.runtime.network import run
from normscope.swaps.heal import heal, training

MODELS = "llama-128,torchfcpe"
CURVE = "dyt"
TEXTS = 480
MINUTES = 6.0
ABOUT = """
DyT in place of all norms of pre-norm networks, by normscope's functions. llama-128 is a decoder of four blocks and
nine norms, trained by benchmarks/decoder.py for ten minutes of one core on docstrings of Python's standard library; of
the 8,192 entries of its vocabulary, 7,168 occur in no text. It learns from {texts} docstrings and is judged by
{held_out} of other modules, which its training did not contain. torchfcpe is FCPE, which hears pitch; it learns from
the synthetic words that demo_wav2vec2 learns from, and is judged by those of other voices. Nothing was tuned on
either; --models gpt2-128 is the decoder that was used in development, whose head shares the word embeddings. KL, in
nats: of the original's distribution to the swapped network's, a text's mean over its tokens (of FCPE: over frames, of
pitches normalized to a sum of 1). Samples of KL and relative L2 are inputs. Top-1: share of tokens or frames whose
largest output is the same. RMSNorm: in place of all norms but FCPE's one GroupNorm. Two kept: the norms that
normscope.keep chose on inputs to learn from. Healed: all norms swapped; calibrated and trained for {minutes:g} minutes
of CPU time, measuring included. Everything ran on one thread.
"""


def main() -> None:
    parser = options(__doc__, repeats=1)
    parser.add_argument("--folder", type=Path, default=Path("decoders"), help="of benchmarks/decoder.py (%(default)s)")
    parser.add_argument("--models", type=names, default=names(MODELS), help="(%(default)s)")
    parser.add_argument("--texts", type=int, default=TEXTS, help="docstrings that decoders learn from (%(default)s)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of healing (%(default)s)")
    args = parser.parse_args()
    given = (args.folder, args.texts, args.minutes)
    measurements = [one for model in args.models for one in in_own_process(measured, model, *given, threads=1)]
    about = ABOUT.format(texts=args.texts, held_out=HELD_OUT, minutes=args.minutes)
    finish("prenorm", about, measurements, args, threads=[1], libraries=["transformers"], added=True)


def measured(model: str, folder: Path, texts: int, minutes: float) -> list[Measurement]:
    torch.set_num_threads(1)
    if model == pitch_network.NAME:
        network, learned, held_out = pitch_network.inputs_of(None)
    else:
        network, learned, held_out = reading(f"transformers:{folder / model}", texts)
    seen = normscope.capture(network.module, learned, by_gamma=True)
    modules = normscope.replacements(network, CURVE, seen)
    found = [*judged(model, "original", network, network.module, held_out)]

    def swapped(curve: str = CURVE, sites: Any = "all") -> torch.nn.Module:
        copied = copy.deepcopy(network.module)
        normscope.swap(copied, curve, seen, sites=sites)
        return copied

    def calibrated(sites: Any = "all") -> torch.nn.Module:
        copied = swapped(sites=sites)
        normscope.calibrate(network.module, copied, learned, outputs=network.outputs)
        return copied

    def kept() -> torch.nn.Module:
        return calibrated(normscope.keep(network, learned, modules, number=2).swapped)

    def healed() -> torch.nn.Module:
        copied = swapped()
        with by_cpu_time():
            report = normscope.heal(network.module, copied, learned, held_out, outputs=network.outputs, minutes=minutes)
        found.append(Measurement(model, "healed", "training", "steps", [float(report.steps)]))
        return copied

    layer_norms = [path for path in modules if not isinstance(network.module.get_submodule(path), torch.nn.GroupNorm)]
    ways = {"RMSNorm": lambda: swapped("rmsnorm", layer_norms), "fitted": swapped, "calibrated": calibrated}
    for way, make in (ways | {"calibrated, two kept": kept, "healed": healed}).items():
        began = time.process_time()
        module = make()
        seconds = time.process_time() - began
        found += judged(model, way, network, module, held_out)
        found.append(Measurement(model, way, "CPU", "s", [seconds]))
        print(model, way, {one.quantity: one.samples[:1] for one in found if one.way == way}, flush=True)
    return found


@contextlib.contextmanager
def by_cpu_time() -> Iterator[None]:
    """Let minutes of a healing be minutes of CPU time, as other programs may use the machine too."""
    clock = SimpleNamespace(monotonic=time.process_time)
    with contextlib.ExitStack() as patches:
        for module in (heal, training):
            patches.enter_context(patch.object(module, "time", clock))
        yield


@torch.no_grad()
def judged(
    model: str, way: str, network: normscope.LoadedModel, module: torch.nn.Module, held_out: list[Batch]
) -> Iterator[Measurement]:
    """Compare a network with the original, input by input, with formulas of its own."""
    kl, relative, same, surprises = [], [], [], []
    for batch in (part for whole in held_out for part in by_length(whole, BATCH_SIZE)):
        given = [network.outputs.read(run(one, batch), batch) for one in (network.module, module)]
        valid = torch.ones(given[0].shape[:2], dtype=torch.bool) if batch.valid is None else batch.valid
        for row, kept in enumerate(valid):
            wanted, mine = (one[row][kept].double() for one in given)
            relative.append(float((mine - wanted).norm() / wanted.norm()))
            same += (mine.argmax(-1) == wanted.argmax(-1)).tolist()
            p, q = (log_probabilities(one, model) for one in (wanted, mine))
            kl.append(float((p.exp() * (p - q)).sum(-1).mean()))
            if model != pitch_network.NAME:
                ids: Tensor = batch.kwargs["input_ids"][row][kept]
                surprises += (-q[:-1].gather(1, ids[1:, None])).flatten().tolist()
    if surprises:
        yield Measurement(model, way, "perplexity", "", [math.exp(sum(surprises) / len(surprises))])
    yield Measurement(model, way, "KL", "nats", kl)
    yield Measurement(model, way, "top-1", "%", [100 * sum(same) / len(same)])
    yield Measurement(model, way, "relative L2", "at the output", relative)


def log_probabilities(output: Tensor, model: str) -> Tensor:
    """Return log-probabilities along the last axis: of logits, or of FCPE's pitches, which are shares already."""
    return (output.clamp_min(1e-9).log() if model == pitch_network.NAME else output).log_softmax(-1)


if __name__ == "__main__":
    main()
