"""How much of a swap's drift is healed, and how long that takes: ``python benchmarks/healing.py``."""

from __future__ import annotations

import copy

import torch
from common import Measurement, finish, in_own_process, names, options, seconds_of

import normscope
from normscope.inputs.splits import learned_and_held_out
from normscope.swaps.heal.heal import STEPS

MODELS = "demo_vit,demo_wav2vec2,demo_dit"
CURVES = "dyt,dyisru"
BATCH_SIZE = 16  # as `normscope heal` has it
ABOUT = """
All norms of a network were swapped, with start values fitted to its own inputs to learn from, weighted by γ², and the
swapped network was healed by normscope.heal in {steps} steps on the same inputs. Drift: median relative L2 at the
output against the original, over held-out inputs that neither the fits nor the healing have seen; after sites, blocks
and all: after each stage. Closed: the share of the start's drift that is gone. Each repeat draws its batches by another
seed. Everything ran on one thread.
"""


def main() -> None:
    parser = options(__doc__, repeats=1)
    parser.add_argument("--models", type=names, default=names(MODELS), help="(%(default)s)")
    parser.add_argument("--curves", type=names, default=names(CURVES), help="(%(default)s)")
    parser.add_argument("--limit", type=int, help="inputs of each, to learn from and held out (all)")
    parser.add_argument("--steps", type=int, default=STEPS, help="of a healing (%(default)s)")
    args = parser.parse_args()
    measurements = [
        one
        for model in args.models
        for curve in args.curves
        for one in in_own_process(measured, model, curve, args.steps, args.repeats, args.limit, threads=1)
    ]
    finish("healing", ABOUT.format(steps=args.steps), measurements, args, threads=[1])


def measured(model: str, curve: str, steps: int, repeats: int, limit: int | None) -> list[Measurement]:
    """Heal one network after one swap, once for each seed."""
    torch.set_num_threads(1)
    network = normscope.load(model, batch_size=BATCH_SIZE, limit=limit, device="cpu")
    learn, held_out = network.calibration, network.inputs
    if learn is None:
        learn, held_out = learned_and_held_out(network.inputs)
    seen = normscope.capture(network.module, learn, by_gamma=True)
    samples: dict[tuple[str, str], list[float]] = {}
    for seed in range(repeats):
        swapped = copy.deepcopy(network.module)
        normscope.swap(swapped, curve, seen)
        reports: list[normscope.HealReport] = []

        def once(swapped: torch.nn.Module = swapped, seed: int = seed, into: list = reports) -> None:
            into.append(
                normscope.heal(
                    network.module, swapped, learn, held_out, outputs=network.outputs, steps=steps, seed=seed
                )
            )

        seconds = seconds_of(once)
        (report,) = reports
        found = {("time", "s"): seconds, ("closed", "%"): 100 * report.closed}
        for stage, name in (("start", "drift before"), ("sites", "after sites"), ("blocks", "after blocks")):
            if stage in report.drifts:
                found[name, "relative L2"] = report.drifts[stage]["median"]
        found["after all", "relative L2"] = report.after["median"]
        found["after all, 90 % of inputs below", "relative L2"] = report.after["p90"]
        for place, value in found.items():
            samples.setdefault(place, []).append(float(value))
    return [Measurement(model, curve, quantity, unit, own) for (quantity, unit), own in samples.items()]


if __name__ == "__main__":
    main()
