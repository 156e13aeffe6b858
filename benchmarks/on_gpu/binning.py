"""The kernels that capture pairs, on the GPU: held against the CPU's loop, in captures end to end, and timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from common import Measurement
from on_gpu import suite, timers
from on_gpu.contenders import described
from on_gpu.parts import Found, Part, Setting
from torch.nn import functional as F

from normscope.pairs.norms.formulas import FORMS, layer_norm
from normscope.pairs.sums.binning import cuda
from normscope.pairs.sums.stats import PairStats
from normscope.pairs.sums.tokens import Lines, Run, Tokens
from normscope.swaps.bench.timing import cache_of, sets_beyond_cache

LOOP, LARGE, CAPTURE = (f"tests/pairs/sums/binning/test_cuda_{name}.py" for name in ("loop", "large", "capture"))
CHECKS = {  # of what, on a GPU and in a rehearsal, and the seconds it may take
    "binning of few": (LOOP, "GPU", "interpreted and padding", 360),
    "binning of many": (LARGE, "", "positions or beyond", 360),
    "binning in captures": (CAPTURE, "", "same_x or backend", 300),
}
LAYERS = {"a layer of ViT-B of 8 images": (8, 197), "a layer of ViT-B of 64 images": (64, 197)}
CHANNELS = 768

Described = tuple[Tokens, cuda._Described]


def parts(setting: Setting) -> list[Part]:
    """Return the parts that check the kernels, and the one that times them."""
    checks = [Part(name, checked, (name,), seconds=own[-1]) for name, own in CHECKS.items()]
    return [*checks, Part("binning times", timed, seconds=150)]


def checked(setting: Setting, name: str) -> Found:
    file, on_gpu, rehearsed, _ = CHECKS[name]
    return suite.tested(setting, [file], rehearsed if setting.rehearsal else on_gpu, name)


def timed(setting: Setting) -> Found:
    """Time the three kernels for one layer, and F.layer_norm of the same x."""
    found = Found()
    with timers.one_stream(setting):
        for case, (images, tokens) in LAYERS.items():
            for dtype in (torch.float32, torch.bfloat16):
                shape = (2, 3, 16) if setting.rehearsal else (images, tokens, CHANNELS)
                _layer(setting, case, shape, dtype, found)
    return found


def _layer(setting: Setting, case: str, shape: tuple[int, int, int], dtype: torch.dtype, found: Found) -> None:
    images, each, channels = shape
    stats = PairStats.empty(channels, device=torch.device(setting.device))
    sets = [_described(stats, tokens) for tokens in _tokens(setting, images, each, channels, dtype)]
    x = sets[0][0].rows
    ways: dict[str, Callable[[Described], object]] = {
        "three kernels": lambda own: cuda.add(stats, own[0]),
        "describe": lambda own: cuda._describe(stats, own[0], own[0].rows),
        "add_pairs": lambda own: cuda._add_pairs(stats, own[0], own[0].rows, own[1]),
        "draw": lambda own: cuda._draw(stats, own[0], own[0].rows, own[1]),
        "F.layer_norm": lambda own: F.layer_norm(own[0].rows, (channels,), eps=1e-6),
    }
    case = f"{case}, {str(dtype).removeprefix('torch.')}"
    for way, run in ways.items():
        shown = way in ("three kernels", "F.layer_norm")
        try:
            times = timers.timed(setting, run, sets)
        except Exception as error:
            found.failures.append(f"{case}, {way}, while it was timed: {described(error)}")
            continue
        for timer, taken in times.items():
            quantity = f"a call, {timer}"
            found.measurements.append(Measurement(case, way, quantity, "µs", taken, shown and timer == timers.GRAPH))
        if way == "three kernels":
            rates = [x.nbytes / one / 1e3 for one in times[timers.GRAPH]]
            found.measurements.append(Measurement(case, way, "x read once", "GB/s", rates))


def _described(stats: PairStats, tokens: Tokens) -> Described:
    return tokens, cuda._describe(stats, tokens, tokens.rows)


def _tokens(setting: Setting, images: int, each: int, channels: int, dtype: torch.dtype) -> Iterator[Tokens]:
    """Yield random tokens: one set, or on CUDA as many as are larger together than four times the L2 cache."""
    generator = torch.Generator(setting.device).manual_seed(0)
    runs = [Run(image * each, (image + 1) * each, image % 8, 977 * image, 0, image) for image in range(images)]
    nbytes, number = images * each * channels * dtype.itemsize, 1
    if not setting.rehearsal:
        number = sets_beyond_cache(nbytes, cache_of(torch.device(setting.device)))
    for _ in range(number):
        x = torch.randn(images * each, channels, generator=generator, device=setting.device).to(dtype)
        yield Tokens(x, Lines(FORMS[layer_norm], 1e-6), runs, channels)
