"""The table of arXiv 2503.10622 for LLaMA 7B, measured on this GPU: ``python benchmarks/llama.py``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from common import NO_GPU, Measurement, finish, gpu, of_each, options
from torch import nn
from torch.utils.benchmark import Timer
from transformers import AutoModelForCausalLM, LlamaConfig

import normscope
from normscope.inputs.batch import Batch
from normscope.inputs.loaded_model import Outputs
from normscope.norms.trace import find_norms
from normscope.runtime.network import restoring
from normscope.swaps.replace import module_at
from normscope.tools.bench import bench
from normscope.tools.bench.bench import Variant
from normscope.tools.bench.reports import NATIVE, PASSES, Way

ABOUT = """
Time of the norms of LLaMA 7B (RMSNorm and DyT), and of the whole network, over {passes} passes of one sequence of
{tokens:,} random tokens in bfloat16, with random weights, as in the table of arXiv 2503.10622 (docs/papers.md). The
norms' time is that of one norm of each class and shape, times their number. In eager and compile, the norms are in
plain torch, and compile compiles each by itself; fused are normscope's kernels. The rest of the network is eager.
"""
TOKENS, N_PASSES = 4096, 100
NEEDED_GB = {"forward": 16, "forward + backward": 70}  # weights, gradients and activations
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def main() -> None:
    parser = options(__doc__, device=True)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="(%(default)s)")
    parser.add_argument("--passes", type=int, default=N_PASSES, help="(%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a tiny network, with the norms eager, on any device")
    args = parser.parse_args()
    if not args.tiny and not gpu():
        parser.error(NO_GPU)
    given = (args.tokens, args.passes, args.tiny, args.device)
    measurements, failed = of_each(measured, {"llama_7b": given})
    about = ABOUT.format(passes=args.passes, tokens=args.tokens)
    finish("llama", about, measurements, args, libraries=["transformers", "triton"], failed=failed)


def measured(tokens: int, n_passes: int, tiny: bool, device: str) -> Iterator[Measurement | str]:
    """Time the norms and the network, for each way and number of passes."""
    if tiny:
        model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=128, **TINY)).to(device, torch.bfloat16)
    else:
        model = normscope.load("llama_7b", weights="random", device=device, dtype="bfloat16").module
    where, vocabulary = next(model.parameters()), model.get_input_embeddings().num_embeddings
    ids = torch.randint(vocabulary, (1, tokens), generator=torch.Generator().manual_seed(0)).to(where.device)
    batch = Batch((), {"input_ids": ids, "use_cache": False})
    with restoring(model, timed=True), bench.compilations():
        yield from timed(model, batch, n_passes, ways=("eager",) if tiny else ("eager", "compile", "fused"))


def timed(model: nn.Module, batch: Batch, n_passes: int, ways: Sequence[Way]) -> Iterator[Measurement]:
    """Time the norms and the network with RMSNorm and with DyT."""
    report, where = find_norms(model, batch), next(model.parameters())
    shapes = {site.name: tuple(report.shapes[site.name]) for site in report.sites}
    candidates = [
        variant for variant in bench.variants(model, report.sites, ["dyt"]) if variant.name in (NATIVE, "dyt")
    ]
    for way, passes in itertools.product(ways, PASSES):
        if where.is_cuda and torch.cuda.get_device_properties(where.device).total_memory < NEEDED_GB[passes] * 1e9:
            continue
        for variant in candidates:
            if way == "fused" and variant.name == NATIVE:
                continue
            layer = 0.0
            for norm in bench.distinct(report):
                cases = bench.norm_cases(model, [variant], norm, [way], passes)
                layer += sum(seconds(case, way, n_passes) * norm.sites for case in cases)
            placed = variant
            if way == "compile":  # each norm by itself, as in the paper
                modules = variant.modules or {name: module_at(model, name) for name in shapes}
                placed = Variant(
                    variant.name, {name: torch.compile(part, dynamic=False) for name, part in modules.items()}
                )
            [case] = bench.network_cases(model, batch, Outputs(), [placed], shapes, ["eager"], passes)
            for quantity, total in (("its norms", layer), ("the network", seconds(case, way, n_passes))):
                yield Measurement(f"LLaMA 7B, {passes}", f"{variant.name}, {way}", quantity, "s", [total])


def seconds(case: bench.Case, way: Way, number: int) -> float:
    """Time ``number`` passes together, after a warm-up."""
    plain = bench.choice.plain_torch() if way != "fused" else nullcontext()
    with plain, case.prepared() as run:
        return float(Timer("run()", globals={"run": run}).timeit(number).mean) * number


if __name__ == "__main__":
    main()
