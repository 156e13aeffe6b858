"""The kernels that capture pairs, on the GPU: held against the CPU's loop, in captures end to end, and timed."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from common import Measurement
from on_gpu import suite
from on_gpu.parts import Found, Part, Setting
from torch.nn import functional as F

from normscope.pairs.binning import cuda
from normscope.pairs.formulas import FORMS, layer_norm
from normscope.pairs.stats import PairStats
from normscope.pairs.tokens import Lines, Run, Tokens

LOOP, LARGE, CAPTURE = (f"tests/pairs/test_cuda_{name}.py" for name in ("loop", "large", "capture"))
CHECKS = {  # of what, on a GPU and in a rehearsal, and the seconds it may take
    "binning": (LOOP, "GPU", "interpreted and padding", 360),
    "binning of many": (LARGE, "", "positions or beyond", 360),
    "captures": (CAPTURE, "", "same_x or backend", 300),
}
LAYERS = {"a layer of ViT-B of 8 images": (8, 197), "a layer of ViT-B of 64 images": (64, 197)}
CHANNELS = 768
SAMPLES = 50
CALLS = 20  # of a CUDA graph


def parts(setting: Setting) -> list[Part]:
    """Return the parts that check the kernels, and the one that times them."""
    checks = [Part(name, checked, (name,), seconds=own[-1]) for name, own in CHECKS.items()]
    return [*checks, Part("binning times", timed, seconds=150)]


def checked(setting: Setting, name: str) -> Found:
    file, on_gpu, rehearsed, _ = CHECKS[name]
    return suite.tested(setting, [file], rehearsed if setting.rehearsal else on_gpu, name)


def timed(setting: Setting) -> Found:
    """Time the three kernels for one layer, and F.layer_norm of the same x."""
    found = [
        one
        for case, (images, tokens) in LAYERS.items()
        for dtype in (torch.float32, torch.bfloat16)
        for one in _layer(setting, case, (2, 3, 16) if setting.rehearsal else (images, tokens, CHANNELS), dtype)
    ]
    return Found(found)


def _layer(setting: Setting, case: str, shape: tuple[int, int, int], dtype: torch.dtype) -> list[Measurement]:
    images, each, channels = shape
    generator = torch.Generator(setting.device).manual_seed(0)
    x = torch.randn(images * each, channels, generator=generator, device=setting.device).to(dtype)
    runs = [Run(image * each, (image + 1) * each, image % 8, 977 * image, 0, image) for image in range(images)]
    tokens = Tokens(x, Lines(FORMS[layer_norm], 1e-6), runs, channels)
    stats = PairStats.empty(channels, device=x.device)
    described = cuda._describe(stats, tokens, x)
    ways: dict[str, Callable[[], object]] = {
        "three kernels": lambda: cuda.add(stats, tokens),
        "describe": lambda: cuda._describe(stats, tokens, x),
        "add_pairs": lambda: cuda._add_pairs(stats, tokens, x, described),
        "draw": lambda: cuda._draw(stats, tokens, x, described),
        "F.layer_norm": lambda: F.layer_norm(x, (channels,), eps=1e-6),
    }
    case = f"{case}, {str(dtype).removeprefix('torch.')}"
    found = []
    for way, run in ways.items():
        called = by_do_bench(setting, run)
        replayed = by_graph(setting, run)
        shown = way in ("three kernels", "F.layer_norm")
        found += [
            Measurement(case, way, "a call, do_bench", "µs", [1e6 * one for one in called], shown=False),
            Measurement(case, way, "replayed", "µs", [1e6 * one for one in replayed], shown=shown),
        ]
        if way == "three kernels":
            rates = [x.nbytes / one / 1e9 for one in replayed]
            found.append(Measurement(case, way, "x read once", "GB/s", rates, shown=True))
    return found


def by_do_bench(setting: Setting, run: Callable[[], object]) -> list[float]:
    """Return the seconds of calls, each from a cleared cache; in them are the gaps where the GPU waits for Python."""
    if setting.rehearsal:
        return _by_clock(run)
    from triton.testing import do_bench

    return [milliseconds / 1e3 for milliseconds in do_bench(run, return_mode="all")][:SAMPLES]


def by_graph(setting: Setting, run: Callable[[], object]) -> list[float]:
    """Return the seconds a call of replays of one CUDA graph: of what the GPU does alone, x in its cache where it fits.

    It is recorded on the stream on which it ran before: what a call keeps for the next is there, and is not copied.
    """
    if setting.rehearsal:
        return _by_clock(run)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(aside):
        for _ in range(3):
            run()
        aside.synchronize()
        with torch.cuda.graph(graph, stream=aside):
            for _ in range(CALLS):
                run()
        graph.replay()
        samples = []
        for _ in range(SAMPLES):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end) / 1e3 / CALLS)
    return samples


def _by_clock(run: Callable[[], object]) -> list[float]:
    begun = time.perf_counter()
    run()
    return [time.perf_counter() - begun]
