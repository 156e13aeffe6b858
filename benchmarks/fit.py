"""Time and accuracy of a fit, beside scipy on the raw pairs: ``python benchmarks/fit.py``."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from common import Measurement, finish, in_turn, options, ratios
from numpy.typing import NDArray
from torch import Tensor, nn

import normscope

CURVES = {"tanh": np.tanh, "isru": lambda x: x / np.sqrt(1 + x * x)}
REFERENCE = "scipy curve_fit"
CHANNELS = 800
SAMPLED = 65_536
IN_A_ROW = 20
ABOUT = """
Time to fit one curve to one norm site of {pairs:,} pairs. normscope fits all sites of a network in one call, here
{sites} sites of that size, and its times are divided by the number of sites. normscope.fit includes goodness, tails,
intervals, and the ceiling, which fits every built-in curve without each fold. Several curves in one call share the
ceiling, and their time is divided by the number of curves too. Of one site: mean of {in_a_row} consecutive calls.
scipy.optimize.curve_fit fits A and α to the raw pairs of the first site in float64, or to {drawn:,} of them drawn
uniformly. Off by: distance from the result of curve_fit on all pairs, for α and for the RMSE of A and α over all raw
pairs in float64. It refers to the first site, or is the median and range over all sites. Sites are LayerNorms of
{channels} channels over heavy-tailed tokens: lognormal σ, and two channels 30 and 20 times larger. Each site has its
own tokens, a tenth larger than those of the previous site. Everything runs on one thread. No time includes reading the
pairs, which normscope sums during the capture.
"""


class Found(NamedTuple):
    """A fit of one site by one way."""

    amplitude: float
    alpha: float


class Way(NamedTuple):
    """A function that fits a curve, by its name, to some sites, called several times in a row."""

    fit: Callable[[str], list[Found]]
    sites: int = 1
    in_a_row: int = 1


class Raw(NamedTuple):
    """Pairs of one site in float64, and the start of scipy's fits: half the largest |y|, with the slope of a line."""

    x: NDArray[np.float64]
    y: NDArray[np.float64]
    start: tuple[float, float]

    def rmse(self, curve: str, fit: Found) -> float:
        """Return the root of the mean squared error of a fit."""
        return math.sqrt(np.square(self.y - fit.amplitude * CURVES[curve](fit.alpha * self.x)).mean())


def main() -> None:
    parser = options(__doc__, repeats=7)
    parser.add_argument("--pairs", type=int, default=1_000_000, help="of a site (%(default)s)")
    parser.add_argument("--sites", type=int, default=25, help="of the network (%(default)s)")
    args = parser.parse_args()

    torch.set_num_threads(1)  # as many as scipy's
    network, tokens = HeavyTailed(args.sites, CHANNELS), args.pairs // CHANNELS
    seen = normscope.capture(network, [torch.zeros(tokens, 1)])
    first = raw_pairs(network, 0, tokens)
    drawn = np.random.default_rng(0).choice(len(first.x), min(SAMPLED, len(first.x)), replace=False)
    single, sites = seen.only(seen.sites[0].name), len(seen.sites)
    ways = {
        f"normscope.fit of {sites} sites": Way(functools.partial(by_normscope, seen=seen), sites),
        "normscope.fit of one site": Way(functools.partial(by_normscope, seen=single), in_a_row=IN_A_ROW),
        REFERENCE: Way(functools.partial(by_scipy, pairs=first)),
        f"{REFERENCE}, drawn": Way(functools.partial(by_scipy, pairs=Raw(first.x[drawn], first.y[drawn], first.start))),
    }
    results: dict[tuple[str, str], list[Found]] = {}
    measurements = [each for curve in CURVES for each in timed(curve, ways, results, args.repeats)]
    measurements += together(seen, args.repeats)
    measurements += compared(network, tokens, results)
    about = ABOUT.format(pairs=len(first.x), sites=args.sites, drawn=len(drawn), channels=CHANNELS, in_a_row=IN_A_ROW)
    finish("fit", about, measurements, args, threads=[1], libraries=["scipy"])


def heavy_tailed(tokens: int, channels: int, seed: int = 0) -> Tensor:
    """Make tokens of lognormal σ, and two channels 30 and 20 times larger: float32 ``(tokens, channels)``."""
    channel = torch.exp(0.5 * torch.randn(channels, generator=torch.Generator().manual_seed(0)))
    channel[5] *= 30
    channel[77] *= -20
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp(0.7 * torch.randn(tokens, 1, generator=generator))
    return scale * channel * torch.randn(tokens, channels, generator=generator)


class HeavyTailed(nn.Module):
    """LayerNorms one after the other, over heavy-tailed tokens of their own, each a tenth larger than the last."""

    def __init__(self, sites: int, channels: int) -> None:
        """Make the norms, without weights."""
        super().__init__()
        self.channels = channels
        self.norms = nn.ModuleList([nn.LayerNorm(channels, elementwise_affine=False) for _ in range(sites)])

    def rows(self, site: int, tokens: int) -> Tensor:
        """Make the tokens of a site: float32 ``(tokens, channels)``."""
        return 1.1**site * heavy_tailed(tokens, self.channels, seed=site)

    def forward(self, tokens: Tensor) -> None:
        """Run every norm on one token per sample."""
        for site, norm in enumerate(self.norms):
            norm(self.rows(site, len(tokens)))


def raw_pairs(network: HeavyTailed, site: int, tokens: int) -> Raw:
    """Make the pairs of a site once more."""
    rows = network.rows(site, tokens)
    x, y = (values.double().flatten().numpy() for values in (rows, network.norms[site](rows)))
    amplitude = float(np.abs(y).max()) / 2
    return Raw(x, y, (amplitude, float(x @ y / (x @ x)) / amplitude))


def by_normscope(curve: str, seen: normscope.Capture) -> list[Found]:
    return [Found(each.amplitude, each.alpha) for each in normscope.fit(seen, curve, shift=False)]


def by_scipy(curve: str, pairs: Raw) -> list[Found]:
    from scipy.optimize import curve_fit

    parameters, _ = curve_fit(lambda x, a, alpha: a * CURVES[curve](alpha * x), pairs.x, pairs.y, p0=pairs.start)
    return [Found(*parameters.tolist())]


def timed(
    curve: str, ways: dict[str, Way], results: dict[tuple[str, str], list[Found]], repeats: int
) -> list[Measurement]:
    """Time every way on one curve, and record the fits."""

    def run(name: str) -> None:
        for _ in range(ways[name].in_a_row):
            results[curve, name] = ways[name].fit(curve)

    runs = in_turn({name: functools.partial(run, name) for name in ways}, repeats)
    seconds = {name: [whole / way.in_a_row / way.sites for whole in runs[name]] for name, way in ways.items()}
    measurements = []
    for name, own in seconds.items():
        measurements.append(Measurement(curve, name, "a site", "ms", [1000 * each for each in own]))
        measurements.append(Measurement(curve, name, "curve_fit takes", "times", ratios(seconds[REFERENCE], own)))
    return measurements


def together(seen: normscope.Capture, repeats: int) -> list[Measurement]:
    """Time calls for several curves, which share the ceiling of each site."""
    calls = {"the default, tanh and isru": "tanh,isru", "every built-in curve": "all"}
    runs = in_turn({case: functools.partial(normscope.fit, seen, asked) for case, asked in calls.items()}, repeats)
    measurements = []
    for case, asked in calls.items():
        fits = len(normscope.fit(seen, asked))
        of_each = [1000 * whole / fits for whole in runs[case]]
        way = f"normscope.fit of {len(seen.sites)} sites, {fits // len(seen.sites)} curves"
        measurements.append(Measurement(case, way, "a site and curve", "ms", of_each))
    return measurements


def compared(network: HeavyTailed, tokens: int, results: dict[tuple[str, str], list[Found]]) -> list[Measurement]:
    """Compare the fits with curve_fit on all raw pairs, site by site."""
    off: dict[tuple[str, str, str], list[float]] = {}
    for site in range(len(network.norms)):
        pairs = raw_pairs(network, site, tokens)
        references = {curve: by_scipy(curve, pairs)[0] for curve in CURVES}
        for (curve, name), own in results.items():
            if site < len(own):
                alpha = abs(own[site].alpha / references[curve].alpha - 1)
                rmse = abs(pairs.rmse(curve, own[site]) / pairs.rmse(curve, references[curve]) - 1)
                off.setdefault((curve, name, "α off by"), []).append(alpha)
                off.setdefault((curve, name, "RMSE off by"), []).append(rmse)
    return [Measurement(*place, "relative", samples) for place, samples in off.items()]


if __name__ == "__main__":
    main()
