"""How long fits of every channel of a network take, beside scipy on some: ``python benchmarks/channels.py``."""

from __future__ import annotations

import functools

import torch
from common import Measurement, finish, in_own_process, in_turn, names, options, peers_left, ratios
from fit import CURVES, REFERENCE, Found, Raw, by_scipy, differences, raw_of
from tails import HeavyTailed

import normscope

PEERS = ("scipy",)
SAMPLED = 16
ABOUT = """
How long it takes to fit {curves} to every channel of a network of {sites} norm sites of {channels} channels, of
{tokens:,} tokens each: {fits:,} fits, in one call of normscope.fit(per="channel") from a capture that was taken per
channel. scipy.optimize.curve_fit fits the raw pairs in float64 of {sampled} channels of the first site alone, evenly
spread, with each curve; its times are scaled up to all of them. Off by: how far α, and the RMSE of A and α over the raw
pairs, in float64, lie from those of curve_fit on these channels; RMSE as told: the one that normscope gives without the
pairs. Sums per channel lie on a coarser grid than those per site, of quarter octaves. Sites are LayerNorms over
heavy-tailed tokens: lognormal σ, and two channels 30 and 20 times larger; each site's tokens are its own, and a tenth
larger than the last one's. Reading the pairs is in none of the times.
"""


def main() -> None:
    parser = options(__doc__, repeats=5, peers=PEERS)
    parser.add_argument("--threads", type=names, default=["1", "2"], help="of torch (1,2)")
    parser.add_argument("--sites", type=int, default=25, help="of the network (%(default)s)")
    parser.add_argument("--channels", type=int, default=768, help="of each site (%(default)s)")
    parser.add_argument("--tokens", type=int, default=1576, help="of each site, 197 of 8 pictures (%(default)s)")
    args = parser.parse_args()
    with_scipy = "scipy" in peers_left(parser, args, PEERS)
    threads = [int(number) for number in args.threads]
    sizes = (args.sites, args.channels, args.tokens)
    measurements = []
    for number in threads:
        timed, exactness = in_own_process(measured, *sizes, with_scipy, args.repeats, number, threads=number)
        measurements += timed
    about = ABOUT.format(
        curves=" and ".join(CURVES),
        sites=args.sites,
        channels=args.channels,
        tokens=args.tokens,
        fits=len(CURVES) * args.sites * args.channels,
        sampled=len(sampled(args.channels)),
    )
    finish("channels", about, [*measurements, *exactness], args, threads=threads, libraries=PEERS)


def sampled(channels: int) -> list[int]:
    """Spread some numbers of channels evenly over all."""
    some = min(SAMPLED, channels)
    return [number * channels // some for number in range(some)]


def measured(
    sites: int, channels: int, tokens: int, with_scipy: bool, repeats: int, threads: int
) -> tuple[list[Measurement], list[Measurement]]:
    """Time both ways in this process, and compare what they found at the sampled channels."""
    torch.set_num_threads(threads)
    network = HeavyTailed(sites, channels)
    seen = normscope.capture(network, [torch.zeros(tokens, 1)], per_channel=True)
    rows = network.rows(0, tokens)
    normed = network.norms[0](rows)
    some = {channel: raw_of(rows[:, channel], normed[:, channel]) for channel in sampled(channels)}
    ways = {"normscope.fit": functools.partial(normscope.fit, seen, tuple(CURVES), per="channel")}
    if with_scipy:
        ways[REFERENCE] = functools.partial(by_scipy_each, some)
    seconds = in_turn(ways, repeats)
    if with_scipy:
        share = len(some) / (sites * channels)
        seconds[REFERENCE] = [own / share for own in seconds[REFERENCE]]
    case = f"{sites} sites, {threads} thread{'s' if threads > 1 else ''}"
    timed = []
    for way, own in seconds.items():
        a_site = [1000 * one / sites / len(CURVES) for one in own]
        timed.append(Measurement(case, way, "all", "s", own))
        timed.append(Measurement(case, way, "a site and curve", "ms", a_site))
        if with_scipy:
            timed.append(Measurement(case, way, "curve_fit takes", "times", ratios(seconds[REFERENCE], own)))
    return timed, compared(seen, some) if with_scipy else []


def by_scipy_each(some: dict[int, Raw]) -> dict[tuple[str, int], Found]:
    return {(curve, channel): by_scipy(curve, pairs)[0] for curve in CURVES for channel, pairs in some.items()}


def compared(seen: normscope.Capture, some: dict[int, Raw]) -> list[Measurement]:
    """Hold normscope's fits of the sampled channels against curve_fit's."""
    first = seen.only(seen.sites[0].name)
    own = {(one.curve, one.channel): one for one in normscope.fit(first, tuple(CURVES), per="channel")}
    off: dict[tuple[str, str], list[float]] = {}
    for (curve, channel), reference in by_scipy_each(some).items():
        one, pairs = own[curve, channel], some[channel]
        apart = differences(curve, Found(one.amplitude, one.alpha, one.rmse), pairs, reference)
        for quantity, value in apart.items():
            off.setdefault((curve, quantity), []).append(value)
    return [
        Measurement(f"{curve}, {len(some)} channels", "normscope.fit", quantity, "relative", samples)
        for (curve, quantity), samples in off.items()
    ]


if __name__ == "__main__":
    main()
