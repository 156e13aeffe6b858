"""How fast whole networks are on a GPU with their norms and without: ``python benchmarks/gpu_networks.py``."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from capture import network_and_batch
from common import Measurement, finish, gpu_options, names, of_each, parsed_for_gpu
from speed import of_rows

import normscope
from normscope.inputs.loaded_model import LoadedModel
from normscope.models.registry import find
from normscope.swaps.bench.bench import PASSES_TIMED, TOKENS, of_tokens, published
from normscope.swaps.reports import NATIVE, NOT_RUN, SOURCE, Case

NUMBERS = {"vit_b16": 64, "wav2vec2_large": 8, "dit_xl": 32, "llama_7b": TOKENS}  # samples, or tokens of one sequence
PASSES_OF_THE_TABLE = 25  # a quarter of the paper's
COMPILED = (NATIVE, "dyt")  # each is a compilation of the whole network
ABOUT = """
Whole networks of full size with random weights in {dtype}, with other things in their norms' places, by
normscope.bench: eager and with normscope's kernels (fused) in turns, forward and forward + backward; compiled by
torch.compile, forward, with the native norms and with DyT. Of native: the median over that of the same network with its
own norms, computed likewise. Below 1 is faster by the median, above 1 slower. Of LLaMA 7B also DyT's published table:
milliseconds a pass of all its norms, and of the network, here and in {source}.
"""


def main() -> None:
    parser = gpu_options(__doc__, repeats=1)
    parser.add_argument("--models", type=names, default=list(NUMBERS), help=f"({','.join(NUMBERS)})")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and inputs (%(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of eager passes, for each model (%(default)s)")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    args = parsed_for_gpu(parser)
    given = (args.dtype, args.device, args.seconds, args.eager)
    measurements, failed = of_each(measured, {model: (model, *given) for model in args.models})
    about = ABOUT.format(dtype=args.dtype, source=SOURCE)
    libraries = ("triton", "timm", "torchaudio", "diffusers", "transformers", "liger_kernel")
    finish("gpu_networks", about, measurements, args, threads=(), libraries=libraries, failed=failed)


def measured(model: str, dtype: str, device: str, seconds: float, eager: bool) -> Iterator[Measurement | str]:
    """Time one network, and repeat the published table where it is that network's."""
    if find(model).family == "language":
        network = normscope.load(model, weights="random", limit=1, device=device, dtype=dtype, workers=0)
        batch = of_tokens(network.module, NUMBERS[model])
    else:
        network, batch = network_and_batch(model, NUMBERS.get(model), device, dtype)

    def wanted(case: Case) -> bool:
        compiled = case.way not in ("eager", "fused")
        right = not compiled or (not eager and case.passes == "forward" and case.variant in COMPILED)
        return case.scope == "model" and right

    report = normscope.bench(
        network.module, batch, dtypes=[dtype], full=True, budget=seconds, outputs=network.outputs, only=wanted
    )
    yield from of_rows(model, report.rows)
    for row in report.rows:
        if (
            row.verdict == NOT_RUN and "left as they are" not in row.note
        ):  # what cannot take a norm's place is no failure
            yield f"{model}: {row.variant}, {row.way}, {row.passes} did not run: {row.note}"
    yield from report.left_out
    if model == "llama_7b":
        torch._dynamo.reset()
        yield from published_table(network)


def published_table(network: LoadedModel) -> Iterator[Measurement | str]:
    """Repeat the published table, and set the paper's numbers beside ours."""
    report = published(network.module, n_passes=PASSES_OF_THE_TABLE, outputs=network.outputs)
    tables = {"llama_7b, here": (report.rows, report.n_passes), f"llama_7b, {SOURCE}": (report.published, PASSES_TIMED)}
    for case, (rows, n_passes) in tables.items():
        for row in rows:
            for quantity, taken in (("its norms", row.layer), ("the network", row.model)):
                way = f"{row.variant}, {row.norms}"
                yield Measurement(f"{case}, {row.passes}", way, quantity, "ms a pass", [1000 * taken / n_passes])


if __name__ == "__main__":
    main()
