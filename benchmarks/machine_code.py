"""What the kernels are as machine code, for GPUs that need not be here: ``python benchmarks/machine_code.py``."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import triton
from common import Measurement, finish, names, options
from disassembly import Code, code_of_launch
from torch import Tensor

from normscope.runtime.launches import KernelCall
from normscope.swaps.kernels import launch as launches_of_kernels
from normscope.swaps.kernels.eager import Gradients, Parameters, layout_of
from normscope.swaps.kernels.launch import LANES, backward_launches, forward_launch

WAYS = {"tanh": "DyT", "isru": "DyISRU", "erf": "Derf"}
DTYPES = ("bfloat16", "float16", "float32")
SHAPES = ((32768, 4096), (25216, 768), (131072, 1152), (32768, 1000), (32768, 1001))
CEILINGS = {
    "forward": {"tanh": 11, "isru": 12, "erf": 16},
    "backward": {"tanh": 30, "isru": 20, "erf": 38},
}  # on sm_90 in bfloat16
MULTIPROCESSORS = 132  # of an H100 or H200; how many programs go backward depends on it
LOADS, STORES = r"LDG\..*", r"STG\..*"
ABOUT = """
What the kernels of DyT, DyISRU and Derf are as machine code. No GPU is needed and no time was measured: Triton {triton}
compiles each launch ahead of time with its own ptxas ({ptxas}), specialized as at a launch, and cuobjdump reads the
result back; the same versions give the same numbers on every machine. Instructions executed, per element: those of all
threads that are launched over (rows, channels), counted along the way of a thread that takes part in every store (the
code outside of the loop once, its body as often as the program goes round, on {multiprocessors} multiprocessors),
divided by the elements of x; what a predicate switches off or a branch skips is counted, the NOPs and the branch to
itself behind the end are not. Backward is the pass over x and dy; the sum of its slots, whose work does not grow with
the rows, is not in it. Loop: its body alone. At most: the ceiling of bfloat16 on sm_90. α and the shift, which Derf
alone has, are one number, or α one a channel where it says so; weight and bias are one a channel; all are of x's dtype.
f and f′ apart: with tanh by an instruction of its own backward, where otherwise it is made of the exponential of f′:
three instructions of the unit for exponentials, roots and tanh (MUFU) an element, and two. Nothing here has anything in
local memory, so nothing spills. float32 has the accurate functions, and the others those of half precision.
"""


def main() -> None:
    parser = options(__doc__, repeats=1)
    parser.add_argument("--targets", type=names, default=["80", "90", "100"], help="compute capabilities (80,90,100)")
    parser.add_argument("--dtypes", type=names, default=list(DTYPES), help=f"of x ({','.join(DTYPES)})")
    args = parser.parse_args()
    taken: dict[tuple[str, str, str, str], list[float]] = {}
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {"TRITON_CACHE_DIR": folder}):
            for key, number in measured([int(target) for target in args.targets], args.dtypes):
                taken.setdefault(key, []).append(number)
    about = ABOUT.format(triton=triton.__version__, ptxas=assemblers(), multiprocessors=MULTIPROCESSORS)
    measurements = [Measurement(*key, samples, shown=key[2] in SHOWN) for key, samples in taken.items()]
    finish("machine_code", about, measurements, args, threads=(), libraries=("triton",))


SHOWN = [
    *(f"sm_{target}" for target in (80, 90, 100)),
    *("sm_90 at most", "sm_90 loop"),
    *(f"sm_{target} registers" for target in (80, 90, 100)),
    "sm_100 MUFU",
]


def measured(targets: list[int], dtypes: list[str]) -> Iterator[tuple[tuple[str, str, str, str], float]]:
    """Compile everything, and yield each number behind its case, way, quantity and unit."""
    for dtype in dtypes:
        for shape in SHAPES if dtype == "bfloat16" else SHAPES[:1]:
            for each in (False, True) if (dtype, shape) == ("bfloat16", SHAPES[0]) else (False,):
                x = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
                for place, name in enumerate(CEILINGS):
                    case = f"{name}, {dtype}, {shape}{', α a channel' if each else ''}"
                    for curve, way in WAYS.items():
                        for target in targets:
                            launch = launches(x, curve, alpha_each=each)[place]
                            for (quantity, unit), number in numbers(launch, x, target).items():
                                yield (case, way, quantity, unit), number
                        if place and (curve, shape, each, dtype != "float32") == ("tanh", SHAPES[0], False, True):
                            apart = replace(launches_of_kernels.BACKWARD, shares=False)
                            with mock.patch.object(launches_of_kernels, "BACKWARD", apart):
                                launch = launches(x, curve)[place]
                            for target in targets:
                                for (quantity, unit), number in numbers(launch, x, target).items():
                                    yield (case, f"{way}, f and f′ apart", quantity, unit), number
                        if (dtype, shape, each) == ("bfloat16", SHAPES[0], False) and 90 in targets:
                            yield (case, way, "sm_90 at most", "per element"), float(CEILINGS[name][curve])


def numbers(launch: KernelCall, x: Tensor, target: int) -> dict[tuple[str, str], float]:
    """Compile a launch over x for a target, and return by quantity and unit what its code says."""
    code, own = code_of_launch(launch, target), f"sm_{target}"
    if code.local:
        raise ValueError(f"{launch.kernel.__name__} has {code.local} bytes a thread in local memory on {own}")
    found = {
        (own, "per element"): executed(code, launch, x),
        (f"{own} registers", "a thread"): code.registers,
        (f"{own} MUFU", "per element"): executed(code, launch, x, r"MUFU\..*"),
    }
    if code.loop:
        found[f"{own} loop", "per element"] = loop(code, launch, x)
    for name, pattern in (("loads", LOADS), ("stores", STORES)):
        widths = code.counted(pattern)
        wide = code.counted(pattern + r"\.128").total()
        found[f"{own} {name} of 128 bits", "a thread"] = wide
        found[f"{own} narrower {name}", "a thread"] = widths.total() - wide
    return {key: float(number) for key, number in found.items()}


def launches(x: Tensor, curve: str, behind: int = 0, alpha_each: bool = False) -> list[KernelCall]:
    """Return the kernels that a layer would launch for x: forward, backward, and the sum of backward's slots.

    Args:
        x: of any shape; it may be on ``meta``.
        curve: ``tanh``, ``isru`` or ``erf``.
        behind: how many axes of x come after that of the channels.
        alpha_each: whether α is one number a channel.

    Raises:
        ValueError: if x's strides are those of no layout.
    """
    axis = x.ndim - 1 - behind
    channels, one = x.new_empty(x.shape[axis]), x.new_empty(1)
    own = Parameters(channels if alpha_each else one, one if curve == "erf" else None, channels, channels)
    layout, layout_backward = (layout_of([x] * tensors, axis, axis + 1) for tensors in (2, 3))
    if layout is None or layout_backward is None:
        raise ValueError(f"A tensor of strides {x.stride()} has no layout: a layer copies it before it launches.")
    with mock.patch.object(launches_of_kernels, "multiprocessors", return_value=MULTIPROCESSORS):
        gradients = Gradients(x, *vars(own).values())
        backward = backward_launches(x, x, own, gradients, layout_backward, curve)
    return [forward_launch(x, x, own, layout, curve), *backward]


def executed(code: Code, launch: KernelCall, x: Tensor, pattern: str = ".*") -> float:
    """Return how many instructions all threads of a launch execute, for each element of x."""
    return code.executed(rounds(launch), pattern) * threads(launch) / x.numel()


def loop(code: Code, launch: KernelCall, x: Tensor) -> float:
    """Return how many of these are within the loop."""
    return len(code.loop) * rounds(launch) * threads(launch) / x.numel()


def threads(launch: KernelCall) -> int:
    return launch.grid[0] * launch.options["num_warps"] * LANES


def rounds(launch: KernelCall) -> float:
    """Return how often a program goes round its loop, on the average of all."""
    given: dict[str, Any] = launch.arguments
    if "programs" not in given:
        return 1
    others = given["others"] * (1 if given["channels_in_columns"] else given["multiple"])
    return triton.cdiv(others, given["steps"] * given["block_others"]) * given["outers"] / given["programs"]


def assemblers() -> str:
    """Say which versions of ptxas Triton has, and for what."""
    nvidia = triton.knobs.nvidia
    return f"{nvidia.ptxas.version}, for sm_100 {nvidia.ptxas_blackwell.version}"


if __name__ == "__main__":
    main()
