"""Time and memory of a capture beside bare forward passes: ``python benchmarks/capture.py``.

Each way runs in a process of its own, in turn with the bare forward pass.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from common import (
    NO_GPU,
    Measurement,
    finish,
    gpu,
    in_own_process,
    names,
    of_each,
    options,
    peak_megabytes,
    ratios,
    seconds_of,
)
from torch import Tensor, nn

import normscope
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.loaded_model import LoadedModel
from normscope.models.registry import find
from normscope.pairs import recorder
from normscope.pairs.sums import loops, reference

MODELS = ("vit_b16", "wav2vec2_large", "dit_xl")
ON_A_GPU = {"vit_b16": (8, 64), "dit_xl": (8,)}  # samples per pass; otherwise 1
NORMSCOPE, HOOKS_TIMED, NAIVE = "normscope", "normscope, hooks timed", "naive hooks"
PLAIN = "normscope, sums in plain torch"
WAYS = {"cpu": (NORMSCOPE, NAIVE), "cuda": (NORMSCOPE, HOOKS_TIMED, PLAIN)}
ABOUT = """
Cost of observing all norms of a network during its forward pass. Weights are random; the time does not depend on them.
normscope sums all pairs, including folds, statistics and samples. Its number of pairs equals the number of elements in
the norms' inputs, which this benchmark checks. Naive hooks store x and y before the affine step. In plain torch: the
same sums, without a compiled loop. In the hooks: time within the hooks, divided by the time of the rest of the same
pass. On a GPU, events around each hook measure it in separate passes. Pass: time of a pass with hooks, divided by that
of a bare one; it varies by some percent between runs. Kept: growth of the process's peak memory per further batch; on a
GPU, of the memory of tensors. First capture: its extra duration compared with the next one in the same process, on a
machine without compiled code (which it compiles first) and on one with it. Waiting OpenMP threads sleep
(OMP_WAIT_POLICY=PASSIVE).
"""


def main() -> None:
    parser = options(__doc__, repeats=3, device=True)
    parser.add_argument("--models", type=names, default=list(MODELS), help=f"({','.join(MODELS)})")
    parser.add_argument("--plain", action="store_true", help="also measure sums in plain torch, as on a GPU")
    parser.add_argument("--threads", type=names, default=[str(torch.get_num_threads())], help="(all cores)")
    parser.add_argument("--batches", type=int, default=64, help="of one sample, for the peak memory (%(default)s)")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    if on_gpu and not gpu():
        parser.error(NO_GPU)
    threads = [os.cpu_count() or 1] if on_gpu else [int(number) for number in args.threads]
    measurements, failed = [], []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["NUMBA_CACHE_DIR"] = os.environ["TRITON_CACHE_DIR"] = cache
        for case in ("first capture on a machine", "first capture of a process"):
            extra = in_own_process(first_capture, args.device, threads=threads[0])
            measurements.append(Measurement(case, NORMSCOPE, "longer than the next", "s", [extra]))
        for number in threads:
            subjects = {
                f"{model}, {samples} at once, {dtype}" if on_gpu else f"{model}, {number} thread{'s' * (number > 1)}": (
                    (model, samples, args.device, dtype)
                )
                for model in args.models
                for samples in (ON_A_GPU.get(model, (1,)) if on_gpu else (None,))
                for dtype in (("float32", "bfloat16") if on_gpu else (None,))
            }
            ways = [*WAYS[args.device], *([PLAIN] if args.plain and not on_gpu else [])]
            cases = {
                f"{case}, {way}": (case, way, subject, args.repeats)
                for case, subject in subjects.items()
                for way in ways
            }
            rows, sentences = of_each(measured, cases, threads=number)
            measurements += rows
            failed += sentences
        if not on_gpu:
            cases = {"peak memory": (args.models[0], args.batches)}
            rows, sentences = of_each(peaks_of_many, cases, threads=threads[-1])
            measurements, failed = measurements + rows, failed + sentences
    libraries = ["numba", "triton", "timm", "torchaudio", "diffusers"]
    finish("capture", ABOUT, measurements, args, threads=threads, libraries=libraries, failed=failed)


class Clock:
    """Times of the latest pass and of the hooks within it, by the GPU's events there."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"
        self.spans: list[tuple[Any, Any]] = []  # of hooks, and of the pass at the end

    def timed(self, function: Callable[..., Any], *, whole: bool = False) -> Callable[..., Any]:
        """Return the function, timed as a hook or as a whole pass."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if whole:
                self.spans.clear()
                self._synchronize()
            begin = self._now()
            try:
                return function(*args, **kwargs)
            finally:
                self.spans.append((begin, self._now()))

        return timed

    def read(self) -> tuple[float, float]:
        """Return the seconds of the pass, and of the hooks in it."""
        self._synchronize()
        *within, whole = (
            begin.elapsed_time(end) / 1e3 if self.on_gpu else end - begin for begin, end in self.spans
        )  # fmt: skip
        return whole, sum(within)

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


def measured(case: str, way: str, subject: tuple[Any, ...], repeats: int) -> Iterator[Measurement | str]:
    """Time bare and recorded passes in turn, after one of each; runs in a process of its own."""
    network, batch = network_and_batch(*subject)
    module, clock, device = network.module.eval(), Clock(subject[2]), subject[2]
    bare: list[float] = []
    recorded: list[tuple[float, float]] = []
    memory: list[float] = []

    def note() -> None:
        recorded.append(clock.read())
        memory.append(torch.cuda.memory_allocated() / 1e6 if device == "cuda" else peak_megabytes())

    def a_bare_pass() -> None:
        clock.timed(lambda: forward(*batch.args, **batch.kwargs), whole=True)()
        bare.append(clock.read()[0])

    forward = module.forward
    with torch.no_grad():
        sites = [site.name for site in normscope.find_norms(module, batch.first_sample()).sites]
        if way == NAIVE:
            record = naive(module, batch, sites, clock)
            for number in range(repeats + 1):
                if number:
                    a_bare_pass()
                clock.timed(record, whole=True)()
                note()
        else:

            def batches() -> Iterator[Batch]:
                for number in range(repeats + 1):
                    if number:
                        a_bare_pass()
                    yield batch
                    note()

            hooks_timed = device == "cpu" or way == HOOKS_TIMED
            timing = mock.patch.object(recorder.Recorder, "_record", clock.timed(recorder.Recorder._record))
            by_reference = mock.patch.object(loops, "loop_of", lambda _: reference.add)
            with (
                mock.patch.object(module, "forward", clock.timed(forward, whole=True)),
                timing if hooks_timed else contextlib.nullcontext(),
                by_reference if way == PLAIN else contextlib.nullcontext(),
            ):
                seen = normscope.capture(module, batches())
            pairs, expected = sum(stats.n_pairs for stats in seen.stats.values()), elements(module, batch, sites)
            if pairs != expected * (repeats + 1):
                yield f"{case}: {pairs:,} pairs were counted in {repeats + 1} passes of {expected:,} elements."
            yield Measurement(case, way, "pairs in a pass", "million", [expected / 1e6])
    whole, in_hooks = zip(*recorded[1:], strict=True)  # the first one warmed up
    yield Measurement(case, way, "pass", "s", whole, shown=False)
    yield Measurement(case, way, "bare pass", "s", bare)
    if any(in_hooks):
        share = [100 * inside / (total - inside) for total, inside in recorded[1:]]
        yield Measurement(case, way, "in the hooks", "s", in_hooks, shown=False)
        yield Measurement(case, way, "in the hooks, of the rest", "%", share)
    yield Measurement(case, way, "pass, of a bare one", "×", ratios(whole, bare))
    yield Measurement(case, way, "kept", "MB a batch", [after - before for before, after in pairwise(memory)])
    yield Measurement(case, way, "peak after each pass", "MB", memory, shown=False)


def elements(module: nn.Module, batch: Batch, sites: list[str]) -> int:
    """Count the elements that the norms take in one pass."""
    counts: list[int] = []
    with contextlib.ExitStack() as hooks:
        for name in sites:
            hook = module.get_submodule(name).register_forward_pre_hook(lambda _, args: counts.append(args[0].numel()))
            hooks.callback(hook.remove)
        module(*batch.args, **batch.kwargs)
    return sum(counts)


def naive(module: nn.Module, batch: Batch, sites: list[str], clock: Clock) -> Callable[[], None]:
    """Return a pass with forward hooks that keep every x and y, as one writes them without a library."""
    pairs: list[tuple[Tensor, Tensor]] = []

    def keep(norm: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        (x,) = args
        if isinstance(norm, nn.GroupNorm):
            pairs.append((x, F.group_norm(x, norm.num_groups, eps=norm.eps)))
        else:
            pairs.append((x, F.layer_norm(x, norm.normalized_shape, eps=norm.eps)))

    def record() -> None:
        handles = [module.get_submodule(name).register_forward_hook(clock.timed(keep)) for name in sites]
        module(*batch.args, **batch.kwargs)
        for handle in handles:
            handle.remove()

    return record


def network_and_batch(
    model: str, number: int | None = None, device: str = "cpu", dtype: str | None = None
) -> tuple[LoadedModel, Batch]:
    """Load a network with random weights, and ``number`` samples: images, latents, or the longest utterance.

    None is eight images or one noisy latent. Where there are fewer samples, some are taken again.
    """
    family = find(model).family
    number = number or {"vision": 8}.get(family, 1)
    limit = None if family == "speech" else number
    network = normscope.load(model, weights="random", limit=limit, batch_size=number, device=device, dtype=dtype)
    batches = islice(network.inputs, limit and 1)
    largest = max(batches, key=lambda batch: sum(tensor.numel() for tensor in batch.args))
    if len(largest.samples) < number:
        again = largest.take([index % len(largest.samples) for index in range(number)])
        largest = replace(again, samples=tuple(Sample(f"sample {index}", index, index) for index in range(number)))
    return network, largest.first(number)


def peaks_of_many(model: str, number: int) -> Iterator[Measurement]:
    """Measure the peak memory after each of many captured batches of one sample; runs in a process of its own."""
    network, batch = network_and_batch(model)
    peaks: list[float] = []

    def batches() -> Iterator[Batch]:
        for index in range(number):
            yield replace(batch.first(1), samples=(Sample(f"sample {index}", index, index),))
            peaks.append(peak_megabytes())

    normscope.capture(network.module, batches())
    case = f"{model}, {number} batches of one sample"
    yield Measurement(case, NORMSCOPE, "peak memory, of that after one", "×", [peaks[-1] / peaks[0]])
    yield Measurement(case, NORMSCOPE, "peak", "MB", peaks, shown=False)


def first_capture(device: str) -> float:
    """Return the duration of the first capture of this process beyond that of the second: seconds."""
    model = nn.Sequential(nn.Linear(768, 768), nn.LayerNorm(768)).to(device)
    x = torch.randn(1, 197, 768).to(device)
    first, second = (seconds_of(lambda: normscope.capture(model, [x])) for _ in range(2))
    return first - second


if __name__ == "__main__":
    main()
