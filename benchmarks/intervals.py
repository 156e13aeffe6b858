"""Coverage of intervals of 95 % where pairs depend on one another: ``python benchmarks/intervals.py``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import numpy as np
import torch
from common import Measurement, finish, names, options
from fit import CURVES, REFERENCE
from numpy.typing import NDArray
from torch import Tensor, nn

import normscope

QUANTITIES = {"amplitude": "A", "alpha": "α", "slope": "slope at the origin", "r2": "R²"}
SPREADS = (0.2, 0.7)
SOURCES = ("16", "64", "256")
TOKENS, CHANNELS = 8, 32
LOUD = 8.0
WITHIN = 0.3
AT_ONCE = 50
NORMAL = 1.959964  # standard errors to either side make 95 %
NONE = (math.nan, math.nan)
ABOUT = """
Coverage of normscope's 95 % intervals, from a jackknife over 8 folds of independent sources. The peer is
scipy.optimize.curve_fit on the same pairs, which it assumes to be independent. Its intervals are A and α ± 1.96
standard errors, and those of the slope that follow from its covariance. Each of {sets} data sets is a LayerNorm of
{channels} channels, one of them {loud:g} times larger, over sources of {tokens} tokens. Tokens are normal with
lognormal scales: log σ has a spread of {within} between tokens, and the spread in the table between sources. The truth
is normscope's fit to {truth:,} such sources. Coverage is in percent of the data sets. Its binomial standard error is
computed with two hits and two misses added (Agresti and Coull 1998). A fit without an interval counts as a miss.
"""

Interval = tuple[float, float]


Truth = dict[str, dict[str, float]]  # of each curve, by quantity


def main() -> None:
    parser = options(__doc__, repeats=400)
    parser.add_argument("--sources", type=names, default=list(SOURCES), help=f"of a data set ({','.join(SOURCES)})")
    parser.add_argument("--truth", type=int, default=40_000, help="sources from which the truth comes (%(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    measurements = []
    for spread in SPREADS:
        generator = np.random.default_rng(0)
        truth = true_values(generator, spread, args.truth)
        for sources in (int(number) for number in args.sources):
            hits = simulated(generator, spread, sources, args.repeats, truth)
            for (curve, way, quantity), number in hits.items():
                case, true = f"{curve}, spread {spread}, {sources} sources", truth[curve][quantity]
                measurements += coverage(case, way, QUANTITIES[quantity], number, args.repeats, true)
    about = ABOUT.format(
        sets=args.repeats, channels=CHANNELS, tokens=TOKENS, loud=LOUD, within=WITHIN, truth=args.truth
    )
    finish("intervals", about, measurements, args, threads=[1], libraries=["scipy"])


class Sites(nn.Module):
    """A LayerNorm for each of several data sets, so that normscope captures and fits them at once."""

    def __init__(self, sets: int) -> None:
        """Make the norms, without weights."""
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(CHANNELS, elementwise_affine=False) for _ in range(sets)])

    def forward(self, x: Tensor) -> list[Tensor]:
        """Normalize ``(sources, tokens, sets, channels)``."""
        return [norm(x[:, :, number]) for number, norm in enumerate(self.norms)]


def drawn(generator: np.random.Generator, spread: float, sources: int, sets: int) -> Tensor:
    """Draw the inputs of the norms: float32 ``(sources, tokens, sets, channels)``."""
    of_source = np.exp(spread * generator.standard_normal((sources, 1, sets, 1)))
    of_token = np.exp(WITHIN * generator.standard_normal((sources, TOKENS, sets, 1)))
    x = of_source * of_token * generator.standard_normal((sources, TOKENS, sets, CHANNELS))
    x[..., 0] *= LOUD
    return torch.from_numpy(x).float()


def true_values(generator: np.random.Generator, spread: float, sources: int) -> Truth:
    """Fit both curves to many sources, drawn a thousand at a time."""
    batches = (drawn(generator, spread, min(1000, sources - begin), 1) for begin in range(0, sources, 1000))
    fits = normscope.fit(normscope.capture(Sites(1), batches), tuple(CURVES), shift=False)
    return {
        each.curve: {"amplitude": each.amplitude, "alpha": each.alpha, "slope": each.slope, "r2": each.r2}
        for each in fits
    }


def simulated(
    generator: np.random.Generator,
    spread: float,
    sources: int,
    sets: int,
    truth: Truth,
) -> Counter[tuple[str, str, str]]:
    """Draw data sets; count for each curve, way and quantity how many intervals contain the truth."""
    hits: Counter[tuple[str, str, str]] = Counter()

    def count(curve: str, way: str, intervals: Mapping[str, Interval]) -> None:
        for quantity, true in truth[curve].items():
            if way != REFERENCE or quantity != "r2":
                low, high = intervals.get(quantity, NONE)
                hits[curve, way, quantity] += low <= true <= high

    for begin in range(0, sets, AT_ONCE):
        x = drawn(generator, spread, sources, min(AT_ONCE, sets - begin))
        model = Sites(x.shape[2])
        for fit in normscope.fit(normscope.capture(model, [x]), tuple(CURVES), shift=False):
            count(fit.curve, "normscope", fit.intervals)
        for flat_x, flat_y in zip(x.unbind(2), model(x), strict=True):
            pairs = [values.double().flatten().numpy() for values in (flat_x, flat_y)]
            for curve, true in truth.items():
                start = (true["amplitude"], true["alpha"])
                count(curve, REFERENCE, as_if_independent(curve, *pairs, start))
    return hits


def as_if_independent(
    curve: str, x: NDArray[np.float64], y: NDArray[np.float64], start: tuple[float, float]
) -> dict[str, Interval]:
    """Return curve_fit's intervals; slope A·α to first order, as f′(0) is 1 for either curve."""
    from scipy.optimize import curve_fit

    (a, alpha), covariance = curve_fit(lambda x, a, alpha: a * CURVES[curve](alpha * x), x, y, p0=start)
    gradients = {"amplitude": (a, [1, 0]), "alpha": (alpha, [0, 1]), "slope": (a * alpha, [alpha, a])}
    widths = {name: NORMAL * math.sqrt(np.array(by) @ covariance @ by) for name, (_, by) in gradients.items()}
    return {name: (value - widths[name], value + widths[name]) for name, (value, _) in gradients.items()}


def coverage(case: str, way: str, name: str, hits: int, tried: int, truth: float) -> list[Measurement]:
    """Return the share of one quantity's intervals that contain the truth, with its counts."""
    share, shrunk = hits / tried, (hits + 2) / (tried + 4)
    error = math.sqrt(shrunk * (1 - shrunk) / (tried + 4))
    return [
        Measurement(case, way, name, "%", [100 * share], error=100 * error),
        Measurement(case, way, f"{name} held", "data sets", [float(hits)], shown=False),
        Measurement(case, way, f"{name} tried", "data sets", [float(tried)], shown=False),
        Measurement(case, way, f"{name} true", "1", [truth], shown=False),
    ]


if __name__ == "__main__":
    main()
