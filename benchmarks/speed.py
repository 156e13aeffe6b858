"""Speed of networks and norms with point-wise functions in place of the norms: ``python benchmarks/speed.py``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import torch
from common import NO_GPU, Measurement, finish, gpu, names, of_each, options
from torch import nn

import normscope
from normscope.models.registry import find
from normscope.swaps.bench.bench import PASSES_TIMED, TOKENS, of_tokens, published
from normscope.swaps.reports import NATIVE, NOT_RUN, SOURCE, Case, Timing

NORMS = {"cpu": ("1576x768",), "cuda": ("25216x768", "4096x4096", "32768x4096", "131072x1152")}  # of docs/kernels.md
MODELS = {"vit_b16": 64, "wav2vec2_large": 8, "dit_xl": 32}  # and samples on a GPU, where LLaMA 7B is timed too
PASSES_OF_THE_TABLE = 25  # a quarter of the paper's
COMPILED = (NATIVE, "dyt")  # whole networks, of which each is a compilation
SCOPES = {"norm": "the norm alone", "model": "the whole network"}
ABOUT = """
Time of full-size networks with random weights, measured by normscope.bench, with other modules in place of their norms;
and of one LayerNorm of tokens × channels on random values, forward and backward. The ways take turns: plain torch
(eager), torch.compile, normscope's kernels (fused), RMSNorm, the identity, and for a norm a copy of its input. On a
CPU, fused is a loop compiled by numba, forward only. Whole networks run forward, on a CPU on their first sample. Of
native: the median divided by that of the native norm in the same run and way. Below 1 is faster by the median, above 1
slower. normscope.bench reports a difference only if the minimum and all of p20 to p80 agree. GB/s of norms count x and
y for forward, and x, y, dy and dx for forward + backward. For LLaMA 7B, the table includes DyT's published numbers:
milliseconds per pass of all its norms, and of the network, here and in {source}.
"""


def main() -> None:
    parser = options(__doc__, device=True)
    parser.add_argument("--norms", type=names, help=f"tokens × channels ({','.join(NORMS['cpu'])})")
    parser.add_argument("--models", type=names, help=f"({','.join(MODELS)})")
    parser.add_argument("--dtypes", type=names, help="(float32, of a norm also bfloat16; on a GPU bfloat16)")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each model and norm (%(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="(%(default)s)")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    args = parser.parse_args()
    if args.device == "cuda" and not gpu():
        parser.error(NO_GPU)
    models = [*MODELS, *(["llama_7b"] if args.device == "cuda" else [])] if args.models is None else args.models
    subjects = [*(NORMS[args.device] if args.norms is None else args.norms), *models]
    given = (args.dtypes, args.device, args.seconds, args.eager, args.threads)
    measurements, failed = of_each(measured, {name: (name, *given) for name in subjects}, threads=args.threads)
    libraries = ["timm", "torchaudio", "diffusers", "transformers", "numba", "triton", "liger_kernel"]
    about = ABOUT.format(source=SOURCE)
    finish("speed", about, measurements, args, threads=[args.threads], libraries=libraries, failed=failed)


def measured(
    name: str, dtypes: Sequence[str] | None, device: str, seconds: float, eager: bool, threads: int
) -> Iterator[Measurement | str]:
    """Time one norm or network, and repeat the published table with LLaMA 7B."""
    torch.set_num_threads(threads)
    outputs, is_norm = None, name[0].isdigit()
    if is_norm:
        x = torch.randn(*map(int, name.split("x")), device=device)
        module, batch = nn.Sequential(nn.LayerNorm(x.shape[-1], device=device)), normscope.Batch((x,))
        dtypes = dtypes or ["float32", "bfloat16"]
    else:
        dtypes = dtypes or ["bfloat16" if device == "cuda" else "float32"]
        number = MODELS.get(name, 1) if device == "cuda" else 1
        network = normscope.load(
            name, weights="random", limit=number, batch_size=number, device=device, dtype=dtypes[0], workers=0
        )
        module, outputs = network.module, network.outputs
        language = find(name).family == "language"
        batch = of_tokens(module, TOKENS) if language else next(iter(network.inputs)).first(number)

    def chosen(case: Case) -> bool:
        if is_norm:
            return case.scope == "norm" and not (eager and "compile" in case.way)
        compiled = case.way == "compile" and (case.scope == "norm" or case.variant in COMPILED)
        return case.passes == "forward" and (case.way in ("eager", "fused") or (compiled and not eager))

    report = normscope.bench(
        module, batch, dtypes=dtypes, full=is_norm or device == "cuda", budget=seconds, outputs=outputs, only=chosen
    )
    yield from of_rows(name, report.rows)
    for row in report.rows:
        if row.verdict == NOT_RUN and "left as they are" not in row.note:
            yield f"{name}: {row.variant}, {row.way}, {row.passes} did not run: {row.note}"
    if name == "llama_7b" and device == "cuda":
        torch._dynamo.reset()
        table = published(module, n_passes=PASSES_OF_THE_TABLE, outputs=outputs)
        for case, rows, passes in (("here", table.rows, table.n_passes), (SOURCE, table.published, PASSES_TIMED)):
            for row in rows:
                for quantity, total in (("its norms", row.layer), ("the network", row.model)):
                    way = f"{row.variant}, {row.norms}"
                    yield Measurement(f"{name}, {case}, {row.passes}", way, quantity, "ms", [1000 * total / passes])


def of_rows(name: str, rows: Sequence[Timing]) -> Iterator[Measurement]:
    """Convert timings to measurements."""
    for row in rows:
        if not row.samples:
            continue
        case = f"{name}, {SCOPES[row.scope]} ({'×'.join(map(str, row.shape))}), {row.dtype}, {row.passes}"
        way = f"{row.variant}, {row.way}"
        yield Measurement(case, way, "time", "ms", [1000 * sample for sample in row.samples])
        if row.gb_per_s is not None:
            yield Measurement(case, way, "traffic", "GB/s", [row.gb_per_s])
        if row.ratio is not None or row.variant == NATIVE:
            yield Measurement(case, way, "of native", "×", [row.ratio or 1.0])


if __name__ == "__main__":
    main()
