"""How long DyT, DyISRU and Derf take on the CPU beside F.layer_norm: ``python benchmarks/pointwise.py``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from common import Measurement, finish, in_own_process, names, options, ratios

TOKENS, CHANNELS = 1576, 768  # ViT-B/16, 8 images
CALLS = 5  # of a sample
NATIVE = "F.layer_norm"
ABOUT = """
How long point-wise functions take on the CPU without gradients, forward, on {tokens} × {channels} normally distributed
values (8 images in ViT-B/16): by the compiled loop, which is the default, and by plain torch
(NORMSCOPE_KERNELS=eager), with weight and bias one a channel, as F.layer_norm has them too. A sample is the mean of
{calls} calls; the ways take turns. Of F.layer_norm: each sample over F.layer_norm's of the same round.
"""


def main() -> None:
    parser = options(__doc__, repeats=25)
    parser.add_argument("--dtypes", type=names, default=["float32", "bfloat16"], help="(float32,bfloat16)")
    parser.add_argument("--threads", type=names, default=["1", "2"], help="of torch, in turn (1,2)")
    args = parser.parse_args()
    measurements = [
        one
        for threads in map(int, args.threads)
        for dtype in args.dtypes
        for one in in_own_process(measured, dtype, threads, args.repeats, threads=threads)
    ]
    about = ABOUT.format(tokens=TOKENS, channels=CHANNELS, calls=CALLS)
    finish("pointwise", about, measurements, args, threads=[int(one) for one in args.threads], libraries=["numba"])


def measured(dtype: str, threads: int, repeats: int) -> list[Measurement]:
    """Time everything in one dtype on so many threads."""
    import torch
    import torch.nn.functional as F

    from normscope.swaps.bench.timing import in_turns, repeated
    from normscope.swaps.kernels.choice import plain_torch
    from normscope.swaps.pointwise import Derf, DyISRU, DyT

    torch.set_num_threads(threads)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, CHANNELS, generator=draw).to(getattr(torch, dtype))
    weight, bias = torch.rand(2, CHANNELS, generator=draw).to(x.dtype)

    def by_plain_torch(module: torch.nn.Module) -> object:
        with plain_torch():
            return module(x)

    ways: dict[str, Callable[[], object]] = {NATIVE: lambda: F.layer_norm(x, (CHANNELS,), weight, bias)}
    ways["copy"] = x.clone
    for make in (DyT, DyISRU, Derf):
        module = make(CHANNELS)
        module.weight.data, module.bias.data = weight.float(), bias.float()
        module.to(x.dtype)
        ways[f"{make.__name__}, loop"] = functools.partial(module, x)
        ways[f"{make.__name__}, plain torch"] = functools.partial(by_plain_torch, module)

    def sample(run: Callable[[], object]) -> list[float]:
        return [repeated(run, CALLS) / CALLS]

    with torch.inference_mode():
        for run in ways.values():
            run()  # compiles
        samplers = {way: functools.partial(sample, run) for way, run in ways.items()}
        seconds = in_turns(samplers, at_least=repeats, at_most=repeats)
    case = f"{dtype}, {threads} thread{'s' * (threads > 1)}"
    return list(of_ways(case, seconds))


def of_ways(case: str, seconds: dict[str, list[float]]) -> Iterator[Measurement]:
    """Set each way beside the norm."""
    for way, taken in seconds.items():
        yield Measurement(case, way, "time", "µs", [1e6 * one for one in taken])
        yield Measurement(case, way, "of F.layer_norm", "×", ratios(taken, seconds[NATIVE]))


if __name__ == "__main__":
    main()
