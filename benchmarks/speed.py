"""How fast full-size networks are with other things in their norms' places: ``python benchmarks/speed.py``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from common import Measurement, finish, in_own_process, names, options

import normscope
from normscope.models.registry import embedded_models, find
from normscope.swaps.reports import FASTER, NATIVE, SLOWER, Timing

ABOUT = """
Networks of full size with random weights, which trained ones do not change the speed of: one of their norms alone, on
random values of the commonest shape, and the whole network, forward, on its first sample. Timed by normscope.bench, in
turns, eager and compiled by torch.compile; on {threads} threads in float32. Of native: the median over that of the
native norm in the same run and way. Below 1 is faster by the median, above 1 slower; normscope.bench says so only where
the minimum and all of p20 to p80 say the same.
"""


def main() -> None:
    parser = options(__doc__, repeats=1)
    siblings = [find(name).sibling for name in embedded_models()]
    parser.add_argument("--models", type=names, default=siblings, help=f"({','.join(siblings)})")
    parser.add_argument("--seconds", type=float, default=120.0, help="for each model (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of torch (%(default)s)")
    args = parser.parse_args()
    measurements = [
        one
        for name in args.models
        for one in in_own_process(measured, name, args.seconds, args.threads, threads=args.threads)
    ]
    libraries = ["timm", "torchaudio", "diffusers", "triton"]
    finish("speed", ABOUT.format(threads=args.threads), measurements, args, threads=[args.threads], libraries=libraries)


def measured(name: str, seconds: float, threads: int) -> list[Measurement]:
    """Time one network."""
    import torch

    torch.set_num_threads(threads)
    network = normscope.load(name, weights="random", limit=1, device="cpu")
    batch = next(iter(network.inputs)).first_sample()
    report = normscope.bench(network.module, batch, budget=seconds, outputs=network.outputs, about=network.about)
    return list(of_rows(name, report.rows))


def of_rows(name: str, rows: Sequence[Timing]) -> Iterator[Measurement]:
    """Turn timings into measurements; what did not run is left out."""
    scopes = {"norm": "the norm alone", "model": "the whole network"}
    for row in rows:
        if not row.samples:
            continue
        shape = "×".join(map(str, row.shape))
        case = f"{name}, {scopes[row.scope]} ({shape}), {row.passes}"
        way = f"{row.variant}, {row.way}"
        yield Measurement(case, way, "time", "ms", [1000 * one for one in row.samples])
        if row.ratio is not None:
            yield Measurement(case, way, "of native", "×", [row.ratio])
            for said in (FASTER, SLOWER):
                yield Measurement(case, way, said, "", [float(row.verdict == said)], shown=False)
        elif row.variant == NATIVE:
            yield Measurement(case, way, "of native", "×", [1.0])


if __name__ == "__main__":
    main()
