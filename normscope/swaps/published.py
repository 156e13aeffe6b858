"""The published table of DyT's speed, repeated: LLaMA 7B, one sequence of 4096 tokens, bfloat16, 100 passes.

arXiv 2503.10622, the table of inference and training latency, on an H100.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from normscope.batches import Batch, Sample
from normscope.errors import DeviceError
from normscope.outputs import Outputs
from normscope.pairs.trace import find_norms
from normscope.speeds import NATIVE, PASSES, Latency, Norms, Passes, PublishedReport
from normscope.state import left_as_found
from normscope.swaps.bench import compilations, in_words, without_kernels
from normscope.swaps.bench_model import ModelBench
from normscope.swaps.bench_norm import Norm, norm_bench
from normscope.swaps.replace import module_at
from normscope.swaps.variants import Variant, computed, has_kernel, variants

TOKENS, PASSES_TIMED = 4096, 100
_GB = 1e9
# 6.74 billion weights of two bytes; their gradients, and without recomputation what the backward pass of 4096 tokens
# needs besides.
_FORWARD_BYTES, _BACKWARD_BYTES = 16 * _GB, 70 * _GB
_NORMS: tuple[Norms, ...] = ("eager", "compile", "fused")


def why_not(device: torch.device, passes: Passes = "forward") -> str | None:
    """Say in a sentence why the table cannot be repeated on a device; None where it can.

    >>> why_not(torch.device("cpu"))
    'The published table is not repeated on the cpu: LLaMA 7B takes 13.5 GB of weights and 100 passes over 4096 tokens, which are hours without CUDA.'
    """  # noqa: E501 - one sentence
    if device.type != "cuda":
        return (
            f"The published table is not repeated on the {device.type}: LLaMA 7B takes 13.5 GB of weights and "
            f"{PASSES_TIMED} passes over {TOKENS} tokens, which are hours without CUDA."
        )
    there, needed = torch.cuda.get_device_properties(device).total_memory, _FORWARD_BYTES
    if passes != "forward":
        needed = _BACKWARD_BYTES
    if there < needed:
        return (
            f"The published table's passes {passes} are not run: they need {needed / _GB:.0f} GB for 13.5 GB of weights"
            f" and what else a pass over {TOKENS} tokens keeps, and the device has {there / _GB:.0f} GB."
        )
    return None


def published(
    model: nn.Module,
    curves: Sequence[str] = ("dyt",),
    *,
    tokens: int = TOKENS,
    n_passes: int = PASSES_TIMED,
    on_cpu: bool = False,
    outputs: Outputs | None = None,
    progress: Callable[[str], object] = lambda step: None,
) -> PublishedReport:
    """Repeat the published table with a network: the time of its norms, and its own, over so many passes.

    The norms' time is that of each class and shape alone, times how many there are.

    Args:
        model: ``llama_7b`` in bfloat16, with any weights; it is left as found. Another causal language model of
            transformers is timed just so, and is another table.
        curves: what takes the norms' places.
        tokens: of one sequence, drawn at random.
        n_passes: of each number.
        on_cpu: run it without CUDA too, with as many passes as are asked for.
        outputs: how to read what the network returns.
        progress: is told what is being timed.

    Raises:
        DeviceError: where :func:`why_not` says why, unless ``on_cpu``.
    """
    where = next(model.parameters())
    reason = why_not(where.device)
    if reason and not (on_cpu and where.device.type == "cpu"):
        raise DeviceError(reason)
    batch = of_tokens(model, tokens)
    notes = _differences(where, tokens, n_passes)
    rows: list[Latency] = []
    with left_as_found(model, timed=True), compilations():
        found = find_norms(model, batch)
        made = [one for one in variants(model, found.sites, curves) if one.name in (NATIVE, *curves)]
        whole = ModelBench(model, batch, outputs or Outputs(), made, len(found.sites), True)
        shapes = [(site.name, site.kind, tuple(found.shapes[site.name])) for site in found.sites]
        with_kernels = [one for one in made if any(map(has_kernel, one.modules.values()))]
        if not with_kernels:
            notes += without_kernels(where.device)
        for way, passes, one in itertools.product(_NORMS, PASSES, made):
            if way == "fused" and one not in with_kernels:
                continue
            too_little = why_not(where.device, passes) if where.is_cuda else None
            if too_little:
                notes.append(too_little)
                continue
            progress(f"{one.name}, {way} norms, {n_passes} passes {passes}")
            placed = _compiled(model, one, [name for name, *_ in shapes]) if way == "compile" else one
            with computed(way):
                layer = _norms_seconds(model, one, way, passes, shapes, n_passes)
                rows.append(Latency(one.name, way, passes, layer, whole.seconds(placed, passes, n_passes)))
    return PublishedReport(in_words(where.device), tuple(rows), tokens, n_passes, tuple(dict.fromkeys(notes)))


def of_tokens(model: nn.Module, number: int) -> Batch:
    """Return one sequence of so many random tokens for a causal language model of transformers, on its device."""
    numbers = torch.Generator().manual_seed(0)
    vocabulary = int(model.get_input_embeddings().num_embeddings)  # type: ignore[operator]
    ids = torch.randint(vocabulary, (1, number), generator=numbers).to(next(model.parameters()).device)
    return Batch((), {"input_ids": ids, "use_cache": False}, (Sample("random tokens", 0, 0),))


def _differences(where: torch.Tensor, tokens: int, n_passes: int) -> list[str]:
    ours = {"tokens": tokens, "passes": n_passes, "dtype": str(where.dtype).removeprefix("torch.")}
    theirs = {"tokens": TOKENS, "passes": PASSES_TIMED, "dtype": "bfloat16"}
    return [f"Ours has {name} {ours[name]}, the paper {theirs[name]}." for name in ours if ours[name] != theirs[name]]


def _compiled(model: nn.Module, one: Variant, names: Sequence[str]) -> Variant:
    """The same, each norm compiled by itself: what the paper compiles."""
    own: Mapping[str, nn.Module] = one.modules or {name: module_at(model, name) for name in names}
    modules: dict[str, nn.Module] = {}
    for name, module in own.items():
        called = torch.compile(module, dynamic=False)
        assert isinstance(called, nn.Module)  # noqa: S101 - of a module, torch makes a module
        modules[name] = called
    return Variant(one.name, modules, one.note)


def _norms_seconds(
    model: nn.Module,
    one: Variant,
    norms: Norms,
    passes: Passes,
    shapes: Sequence[tuple[str, str, tuple[int, ...]]],
    n_passes: int,
) -> float:
    """How long all norms take by themselves: one of each class and shape, times their number."""
    alike: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, kind, shape in shapes:
        alike.setdefault((kind, shape), []).append(name)
    total = 0.0
    for (kind, shape), names in alike.items():
        norm = Norm(names[0], kind, shape, len(names))
        bench = norm_bench(model, [one], norm, next(model.parameters()).detach())
        total += bench.seconds(one.name, norms, passes, n_passes) * len(names)
    return total
