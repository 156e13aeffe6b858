"""Speed of networks and norms with point-wise functions in place of the norms: ``python benchmarks/speed.py``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import torch
from common import NO_GPU, Measurement, finish, gpu, names, of_each, options
from torch import nn

import normscope
from normscope.tools.bench.reports import NATIVE, NOT_RUN, Timing

NORMS = {"cpu": ("1576x768",), "cuda": ("25216x768", "4096x4096", "32768x4096", "131072x1152")}  # of docs/kernels.md
MODELS = {"vit_b16": 64, "wav2vec2_large": 8, "dit_xl": 32}  # and samples on a GPU
SCOPES = {"norm": "the norm alone", "model": "the whole network"}
ABOUT = """
Time of full-size networks with random weights, measured by normscope.bench, with other modules in place of their norms;
and of one LayerNorm of tokens × channels on random values, forward and backward. Candidates take turns: plain torch
(eager), torch.compile, normscope's kernels (fused), RMSNorm and the identity. On a CPU, fused is a loop compiled by
numba, forward only. Whole networks run forward, on a CPU on their first sample. Of native: the median divided by that
of the native norm in the same run and way, eager for fused. Below 1 is faster by the median, above 1 slower.
normscope.bench reports a difference only if the interquartile ranges do not overlap.
"""


def main() -> None:
    parser = options(__doc__, device=True)
    parser.add_argument("--norms", type=names, help=f"tokens × channels ({','.join(NORMS['cpu'])})")
    parser.add_argument("--models", type=names, help=f"({','.join(MODELS)})")
    parser.add_argument("--dtypes", type=names, help="(float32, of a norm also bfloat16; on a GPU bfloat16)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="(%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one round, and compile nothing")
    args = parser.parse_args()
    if args.device == "cuda" and not gpu():
        parser.error(NO_GPU)
    subjects = [*(NORMS[args.device] if args.norms is None else args.norms), *(args.models or MODELS)]
    given = (args.device, args.quick, args.threads)
    cases = {}
    for name in subjects:
        by_default = (
            ["bfloat16"] if args.device == "cuda" else ["float32", *(["bfloat16"] if name[0].isdigit() else [])]
        )
        cases |= {f"{name}, {dtype}": (name, dtype, *given) for dtype in args.dtypes or by_default}
    measurements, failed = of_each(measured, cases, threads=args.threads)
    libraries = ["timm", "torchaudio", "diffusers", "transformers", "numba", "triton"]
    finish("speed", ABOUT, measurements, args, threads=[args.threads], libraries=libraries, failed=failed)


def measured(name: str, dtype: str, device: str, quick: bool, threads: int) -> Iterator[Measurement | str]:
    """Time one norm or network in one dtype."""
    torch.set_num_threads(threads)
    outputs, is_norm = None, name[0].isdigit()
    if is_norm:
        x = torch.randn(*map(int, name.split("x")), device=device, dtype=getattr(torch, dtype))
        module, batch = nn.Sequential(nn.LayerNorm(x.shape[-1], device=device, dtype=x.dtype)), normscope.Batch((x,))
    else:
        number = MODELS.get(name, 1) if device == "cuda" else 1
        network = normscope.load(
            name, weights="random", limit=number, batch_size=number, device=device, dtype=dtype, workers=0
        )
        module, outputs, batch = network.module, network.outputs, next(iter(network.inputs)).first(number)
    report = normscope.bench(module, batch, quick=quick, full=device == "cuda" and not is_norm, outputs=outputs)
    rows = [row for row in report.rows if row.scope == "norm" or not is_norm]
    yield from of_rows(name, rows)
    for row in rows:
        if row.verdict == NOT_RUN and "left as they are" not in row.note:
            yield f"{name}: {row.variant}, {row.way}, {row.passes} did not run: {row.note}"


def of_rows(name: str, rows: Sequence[Timing]) -> Iterator[Measurement]:
    """Convert timings to measurements."""
    for row in rows:
        if not row.samples:
            continue
        case = f"{name}, {SCOPES[row.scope]} ({'×'.join(map(str, row.shape))}), {row.dtype}, {row.passes}"
        way = f"{row.variant}, {row.way}"
        yield Measurement(case, way, "time", "ms", [1000 * sample for sample in row.samples])
        if row.ratio is not None or row.variant == NATIVE:
            yield Measurement(case, way, "of native", "×", [row.ratio or 1.0])


if __name__ == "__main__":
    main()
