"""Intervals where kinds of sources alternate, in order and shuffled: ``python benchmarks/folds.py``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator

import numpy as np
import torch
from common import Measurement, finish, options
from numpy.typing import NDArray
from torch import Tensor, nn

import normscope
from normscope.inputs.splits import learned_and_held_out, permutation

SETS, SOURCES = 20, 64
TOKENS, CHANNELS = 8, 32
LOUD, SPREAD, WITHIN = 8.0, 0.2, 0.3
PERIODS = (1, 2)
RATIO, TRUTH = 3.0, 2000
DATA = "benchmark"
ORDERS = ("in order", "shuffled")
ASSIGNMENTS = ("permuted blocks", "modulo eight")
ABOUT = """
Intervals of 95 % for α of tanh, over {sets} disjoint sets of {sources} consecutive sources, drawn {repeats} times. A
set is a LayerNorm of {channels} channels, one of them {loud:g} times larger, over sources of {tokens} tokens: normal,
with lognormal scales, of spread {spread} in log σ from source to source and {within} from token to token. Kinds of
sources alternate with the given period: the last kind of each is {ratio:g} times larger than the others. The sources
are taken in order, or shuffled over all sets. Permuted blocks: each eight consecutive sources are assigned to the
eight folds in an order of their own; modulo eight: by their number, as before. Width: of log α, over twice Student's t
times the standard deviation of log α between the sets; 1 is right. Held out: the share of the last kind in the part
that is held out, over its share in all sources; 1 is right. The truth is the fit to {truth:,} sources.
"""


def main() -> None:
    parser = options(__doc__, repeats=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    measurements = [one for period in PERIODS for order in ORDERS for one in measured(period, order, args)]
    about = ABOUT.format(
        sets=SETS, sources=SOURCES, repeats=args.repeats, channels=CHANNELS, loud=LOUD, tokens=TOKENS,
        spread=SPREAD, within=WITHIN, ratio=RATIO, truth=TRUTH,
    )  # fmt: skip
    finish("folds", about, measurements, args, threads=[1])


def measured(period: int, order: str, args: argparse.Namespace) -> Iterator[Measurement]:
    """Measure coverage and width of each assignment, and the held-out part, for one period and order."""
    generator = np.random.default_rng(period)
    case = f"{'one kind' if period == 1 else f'period {period}'}, {order}"
    truth = math.log(alpha_of(drawn(generator, np.arange(TRUTH) % period == period - 1), np.arange(TRUTH))[0])
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ASSIGNMENTS}
    shares = []
    for _ in range(args.repeats):
        is_last = np.arange(SETS * SOURCES) % period == period - 1
        if order == "shuffled":
            generator.shuffle(is_last)
        x = drawn(generator, is_last)
        shares.append(held_out_share(is_last) / is_last.mean())
        for begin in range(0, len(x), SOURCES):
            numbers = np.arange(begin, begin + SOURCES)
            for name, own in zip(ASSIGNMENTS, (numbers, as_if_modulo(numbers)), strict=True):
                found[name].append(tuple(math.log(value) for value in alpha_of(x[numbers], own)))
    for name, values in found.items():
        alpha, low, high = np.array(values).T
        widths = (high - low) / (2 * 2.364624 * alpha.std(ddof=1))
        covered = (low <= truth) & (truth <= high)
        share, shrunk = covered.mean(), (covered.sum() + 2) / (len(covered) + 4)
        error = math.sqrt(shrunk * (1 - shrunk) / (len(covered) + 4))
        yield Measurement(case, name, "coverage", "%", [100 * share], error=100 * error)
        yield Measurement(case, name, "width", "×", widths.tolist())
    yield Measurement(case, ASSIGNMENTS[0], "held out", "×", shares)


def drawn(generator: np.random.Generator, is_last: NDArray[np.bool_]) -> Tensor:
    """Draw the tokens of sources: float32 ``(sources, tokens, channels)``."""
    scale = np.where(is_last, RATIO, 1.0) * np.exp(SPREAD * generator.standard_normal(len(is_last)))
    within = np.exp(WITHIN * generator.standard_normal((len(is_last), TOKENS, 1)))
    x = scale[:, None, None] * within * generator.standard_normal((len(is_last), TOKENS, CHANNELS))
    x[..., 0] *= LOUD
    return torch.from_numpy(x).float()


def samples_of(numbers: NDArray[np.intp]) -> tuple[normscope.Sample, ...]:
    return tuple(normscope.Sample(f"source {number}", number, number, DATA) for number in numbers.tolist())


def alpha_of(x: Tensor, numbers: NDArray[np.intp]) -> tuple[float, float, float]:
    """Fit tanh to the sources of these numbers; return α and its interval."""
    batch = normscope.Batch((x,), samples=samples_of(numbers))
    norm = nn.Sequential(nn.LayerNorm(CHANNELS, elementwise_affine=False))
    [fit] = normscope.fit(normscope.capture(norm, [batch]), "tanh")
    return (fit.alpha, *fit.intervals["alpha"])


def as_if_modulo(numbers: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return numbers whose folds are those that the given ones had before, modulo eight."""
    order = {block: permutation(8, f"folds\0{DATA}\0{block}") for block in set((numbers // 8).tolist())}
    return np.array([8 * (number // 8) + order[number // 8].index(number % 8) for number in numbers.tolist()])


def held_out_share(is_last: NDArray[np.bool_]) -> float:
    """The share of the last kind in what is held out of sources in this order."""
    batch = normscope.Batch((torch.zeros(len(is_last), 1),), samples=samples_of(np.arange(len(is_last))))
    held_out = learned_and_held_out([batch])[1]
    return float(np.mean([is_last[sample.source_index] for one in held_out for sample in one.samples]))


if __name__ == "__main__":
    main()
