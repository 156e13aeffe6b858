"""How long a fit takes, and how exact it is, beside scipy and lmfit on the raw pairs: ``python benchmarks/fit.py``."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from common import Measurement, finish, in_turn, options, peers_left, ratios
from numpy.typing import NDArray
from tails import heavy_tailed
from torch import nn

import normscope
from normscope.fits.curves import CURVES as FITTED
from normscope.fits.nodes import nodes_of
from normscope.fits.solve import least_squares

PEERS = ("scipy", "lmfit")
CURVES = {"tanh": np.tanh, "isru": lambda x: x / np.sqrt(1 + x * x)}
REFERENCE = "scipy curve_fit"
CHANNELS = 800
SAMPLED = 65_536
IN_A_ROW = 20
ABOUT = """
How long it takes to fit one curve to one norm site of {pairs:,} pairs. normscope.fit: all of it, R² and the
cross-validated ceiling among it, which is taken once a site, however many curves; least squares: A and α alone. A
network's sites are fitted one after the other, and so normscope's times are of {in_a_row} fits in a row, divided by as
many. The peers fit A and α to the raw pairs in float64, from the same start: scipy.optimize.curve_fit, lmfit, and
curve_fit on {drawn:,} pairs drawn uniformly. Beside it how far α lies from that of curve_fit on all pairs. The pairs
are those of a LayerNorm of {channels} channels over heavy-tailed tokens: lognormal σ, and two channels 30 and 20 times
larger. Reading the pairs is in none of the times: normscope did that as they passed.
"""


def main() -> None:
    parser = options(__doc__, repeats=7, peers=PEERS)
    parser.add_argument("--pairs", type=int, default=1_000_000, help="of the site (%(default)s)")
    args = parser.parse_args()
    peers = peers_left(parser, args, PEERS)

    rows = heavy_tailed(args.pairs // CHANNELS, CHANNELS)
    norm = nn.LayerNorm(CHANNELS, elementwise_affine=False)
    seen = normscope.capture(nn.Sequential(norm), [rows])
    x, y = (values.double().flatten().numpy() for values in (rows, norm(rows)))
    drawn = np.random.default_rng(0).choice(len(x), min(SAMPLED, len(x)), replace=False)
    ways = {"normscope.fit": (by_normscope, seen), "normscope, least squares": (by_least_squares, seen)}
    if "scipy" in peers:
        ways |= {REFERENCE: (by_scipy, x, y), f"{REFERENCE}, drawn": (by_scipy, x[drawn], y[drawn])}
    if "lmfit" in peers:
        ways["lmfit"] = (by_lmfit, x, y)
    measurements = [one for curve in CURVES for one in measured(curve, ways, args.repeats)]
    about = ABOUT.format(pairs=len(x), drawn=len(drawn), channels=CHANNELS, in_a_row=IN_A_ROW)
    finish("fit", about, measurements, args, threads=[torch.get_num_threads()], libraries=PEERS)


def measured(curve: str, ways: dict[str, tuple[Any, ...]], repeats: int) -> list[Measurement]:
    """Time every way on one curve, and compare what they found."""
    alphas: dict[str, float] = {}

    def run(name: str) -> None:
        way, *arguments = ways[name]
        for _ in range(in_a_row(name)):
            alphas[name] = way(curve, *arguments)

    runs = in_turn({name: functools.partial(run, name) for name in ways}, repeats)
    seconds = {name: [whole / in_a_row(name) for whole in own] for name, own in runs.items()}
    measurements = []
    for name, own in seconds.items():
        measurements.append(Measurement(curve, name, "a fit", "ms", [1000 * one for one in own]))
        if REFERENCE in ways:
            apart = abs(alphas[name] / alphas[REFERENCE] - 1)
            measurements.append(Measurement(curve, name, "curve_fit takes", "times", ratios(seconds[REFERENCE], own)))
            measurements.append(Measurement(curve, name, "α off by", "relative", [apart]))
        measurements.append(Measurement(curve, name, "α", "1", [alphas[name]], shown=False))
    return measurements


def in_a_row(name: str) -> int:
    return IN_A_ROW if name.startswith("normscope") else 1


def by_normscope(curve: str, seen: normscope.Capture) -> float:
    return normscope.fit(seen, curve)[0].alpha


def by_least_squares(curve: str, seen: normscope.Capture) -> float:
    (stats,) = seen.stats.values()
    return least_squares(nodes_of(stats.moments.sum(0)), FITTED[curve]).alpha


def by_scipy(curve: str, x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    from scipy.optimize import curve_fit

    (_, alpha), _ = curve_fit(lambda x, a, alpha: a * CURVES[curve](alpha * x), x, y, p0=start(x, y))
    return float(alpha)


def by_lmfit(curve: str, x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    from lmfit import Model

    a, alpha = start(x, y)
    model = Model(lambda x, a, alpha: a * CURVES[curve](alpha * x), independent_vars=["x"])
    return float(model.fit(y, x=x, a=a, alpha=alpha).params["alpha"].value)


def start(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float]:
    """Begin at half the largest |y|, with the slope of a line through all pairs."""
    amplitude = float(np.abs(y).max()) / 2
    return amplitude, float(x @ y / (x @ x)) / amplitude


if __name__ == "__main__":
    main()
