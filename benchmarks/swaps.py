"""How far outputs move when all norms of a network are swapped: ``python benchmarks/swaps.py``."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch
from common import Measurement, finish, names, options

import normscope
from normscope.fits.curves.expressions import curves_named
from normscope.inputs.batch import Batch
from normscope.inputs.held_out import divided
from normscope.inputs.loaded_model import LoadedModel
from normscope.models.registry import embedded_models
from normscope.pairs.captures import Capture
from normscope.swaps.replace import replacements
from normscope.swaps.start import fitted

CURVES = ("dyt", "dyisru", "derf")
INITS = ("fit", "fit per channel", "theory", "paper")
OTHERS = ("free", "best", "identity", "rmsnorm")
ABOUT = """
How far the output of a network moves, at each of its held-out inputs, when all of its norms are swapped: relative L2,
‖swapped − original‖ / ‖original‖; 1 is as far as zero is. The demo networks are embedded toys; minilm is
all-MiniLM-L6-v2, a pretrained one, on the package's page of texts. What is fitted is fitted to calibration inputs,
which are others (of minilm nine of the twelve texts), with s; by γ², per channel by pairs alike. Samples are inputs:
the number before the parentheses is the median over them, those within are the smallest and the largest. Of paper's:
the median over that of the same function with A = 1, α = 0.5, s = 0, γ and β kept. free is E[y|x] itself, as far as
the pairs tell it, with one shape for all channels of a site.
"""


def main() -> None:
    parser = options(__doc__, repeats=1)
    parser.add_argument(
        "--models", type=names, default=[*embedded_models(), "minilm"], help="models (the embedded ones, minilm)"
    )
    parser.add_argument("--limit", type=int, help="inputs of each (all)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    measurements = [one for name in args.models for one in measured(name, args.limit)]
    finish(
        "swaps", ABOUT, measurements, args, threads=[1], libraries=["timm", "torchaudio", "diffusers", "transformers"]
    )


def measured(name: str, limit: int | None) -> Iterator[Measurement]:
    """Swap each function in from each start."""
    network = normscope.load(name, limit=limit, device="cpu")
    learned, held_out = divided(network.inputs, network.calibration)
    seen = normscope.capture(network, learned, by_gamma=True, per_channel=True)
    inputs = list(held_out)
    for func in CURVES:
        moved = {init: moves(network, seen, func, init, inputs) for init in INITS}
        paper = statistics.median(moved["paper"])
        for init, samples in moved.items():
            yield Measurement(name, f"{func}, {init}", "relative L2", "at the output", samples)
            share = 100 * statistics.median(samples) / paper
            yield Measurement(name, f"{func}, {init}", "of paper's", "%", [share])
    for func in OTHERS:
        samples = moves(network, seen, func, "fit", inputs)
        yield Measurement(name, func, "relative L2", "at the output", samples)


def moves(network: LoadedModel, seen: Capture, func: str, init: str, inputs: list[Batch]) -> list[float]:
    """Return the relative L2 at the output for each input."""
    fits = seen
    if init == "fit per channel":
        (curve,) = curves_named(func)
        fits, init = fitted(seen, curve, per="channel"), "fit"
    modules = replacements(network.module, func, fits, init=init)
    found = []
    for batch in inputs:
        for number in range(len(batch.samples)):
            alone = normscope.drift(
                network.module,
                [batch.take([number])],
                modules,
                outputs=network.outputs,
                one_at_a_time=False,
                cumulative=False,
            )
            found.append(alone.all.relative_l2.p50)
    return found


if __name__ == "__main__":
    main()
