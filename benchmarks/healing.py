"""How much of a swap's drift is healed, and how long that takes: ``python benchmarks/healing.py``."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from calibration import HELD_OUT, inputs_of
from common import Measurement, finish, in_own_process, names, options

import normscope
from normscope.swaps.distances import output_errors
from normscope.swaps.heal import targets, training
from normscope.swaps.heal.heal import TRAINS

MODELS = "demo_vit,demo_wav2vec2,demo_dit,minilm,torchfcpe"
CURVES = "dyt"
MINUTES = {"demo_wav2vec2": 10.0, "minilm": 6.0}
OTHERS_MINUTES = 4.0
TEXTS = 1200
ABOUT = """
All norms of a network were swapped, with start values fitted to its own inputs to learn from, weighted by γ², and the
swapped network was healed by normscope.heal on the same inputs: calibrated, then trained, in so many steps, or as many
as fit into so many minutes. Drift: median error at the output against the original (KL divergence of logits, relative
L2 of all else), over held-out inputs that neither has seen; on the way, at a few checks: by the CPU seconds until
there, calibration and the original's own passes included, measuring left out. Closed: the share of the start's drift
that is gone. minilm is all-MiniLM-L6-v2, a pretrained network, on {texts} docstrings of Python's standard library,
judged by {held_out} of other modules; torchfcpe is FCPE, a pretrained network that hears pitch and that nothing was
tuned on, on the synthetic words that demo_wav2vec2 learns from and is judged by. Each repeat draws its batches by
another seed. Everything ran on one thread. With --ablations also: weight and α trained as they are, not by slope and
log α; the loss of the output alone, not of what the sites give.
"""


def the_output_alone(own: Any, batch: Any, target: Any) -> torch.Tensor:
    """The loss without what the sites give."""
    output = own._outputs.read(targets.run(own._swapped, batch), batch)
    return targets.pooled_loss(output, target.output, batch.valid)


class _Nothing:
    """A class that no module is of."""


# Healings with one step done otherwise.
ABLATIONS: dict[str, Callable[[], Any]] = {
    "weight and α as they are": lambda: patch.object(training, "PointwiseFunction", _Nothing),
    "the output alone": lambda: patch.object(targets.TrainingTargets, "_loss", the_output_alone),
}


def main() -> None:
    parser = options(__doc__, repeats=1)
    said = "of some of them, the rows are added to the file (%(default)s)"
    parser.add_argument("--models", type=names, default=names(MODELS), help=said)
    parser.add_argument("--curves", type=names, default=names(CURVES), help="(%(default)s)")
    parser.add_argument("--trains", type=names, default=names("all"), help=f"of {', '.join(TRAINS)} (%(default)s)")
    parser.add_argument("--ablations", action="store_true", help="heal also with one step done simply")
    parser.add_argument("--limit", type=int, help="inputs of each, to learn from and held out (all)")
    parser.add_argument("--steps", type=int, help="of a healing, in place of minutes")
    parser.add_argument("--minutes", type=float, help="of a healing (4; demo_wav2vec2 10, minilm 6)")
    args = parser.parse_args()
    measurements = []
    for model in args.models:
        minutes = None if args.steps else args.minutes or MINUTES.get(model, OTHERS_MINUTES)
        length = {"steps": args.steps, "minutes": minutes}
        ways = {train: (train, "") for train in args.trains}
        ways |= {f"{TRAINS[-1]}, {name}": (TRAINS[-1], name) for name in ABLATIONS if args.ablations}
        given = (model, args.curves, ways, length, args.repeats, args.limit)
        measurements += in_own_process(measured, *given, threads=1)
    about = ABOUT.format(texts=TEXTS, held_out=HELD_OUT)
    libraries = ["timm", "diffusers", "transformers"]
    added = args.models != names(MODELS)
    finish("healing", about, measurements, args, threads=[1], libraries=libraries, added=added)


def measured(
    model: str,
    curves: Sequence[str],
    ways: Mapping[str, tuple[str, str]],
    length: dict[str, Any],
    repeats: int,
    limit: int | None,
) -> list[Measurement]:
    """Heal one network after each swap, once for each seed."""
    torch.set_num_threads(1)
    network, learned, held_out = inputs_of(model, limit, TEXTS)
    seen = normscope.capture(network.module, learned, by_gamma=True)
    samples: dict[tuple[str, str, str], list[float]] = {}
    for curve in curves:
        for way, (train, ablation) in ways.items():
            for seed in range(repeats):
                swapped = copy.deepcopy(network.module)
                normscope.swap(swapped, curve, seen)
                with ABLATIONS.get(ablation, contextlib.nullcontext)():
                    for quantity, unit, value in healed(network, swapped, learned, held_out, train, length, seed):
                        samples.setdefault((f"{curve}, {way}", quantity, unit), []).append(value)
    case = f"{model}, {length['steps']} steps" if length["steps"] else f"{model}, {length['minutes']:g} minutes"
    return [Measurement(case, way, quantity, unit, own) for (way, quantity, unit), own in samples.items()]


def healed(
    network: normscope.LoadedModel,
    swapped: torch.nn.Module,
    learned: Any,
    held_out: Any,
    train: str,
    length: dict[str, Any],
    seed: int,
) -> Iterator[tuple[str, str, float]]:
    """Heal one network, and yield what came of it: quantity, unit and value."""
    measuring, course = 0.0, []

    def checked(check: Any) -> None:
        nonlocal measuring
        began = time.process_time()
        drift = float(output_errors(network.module, swapped, held_out, network.outputs).median())
        course.append((began - start - measuring, drift))
        measuring += time.process_time() - began

    start = time.process_time()
    outputs = network.outputs
    report = normscope.heal(
        network.module, swapped, learned, held_out, outputs=outputs, train=train, seed=seed, checked=checked, **length
    )
    yield "CPU", "s", time.process_time() - start - measuring
    yield "training", "steps", float(report.steps)
    for stage, quantiles in report.drifts.items():
        yield f"drift, {stage}", report.measure, quantiles["median"]
    yield "drift, 90 % of inputs below", report.measure, report.after["p90"]
    yield "closed", "%", 100 * report.closed
    for number in (len(course) // 4, len(course) // 2, 3 * len(course) // 4):
        if 0 < number < len(course):
            yield f"CPU until check {number} of {len(course)}", "s", course[number - 1][0]
            yield f"drift, check {number} of {len(course)}", report.measure, course[number - 1][1]


if __name__ == "__main__":
    main()
