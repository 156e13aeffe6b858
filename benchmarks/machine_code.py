"""Machine code of the kernels of swaps and captures, without a GPU: ``python benchmarks/machine_code.py``."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import triton
from common import Measurement, finish, names, options
from disassembly import Code, Instruction, code_of_launch
from torch import Tensor

from normscope.pairs.norms.formulas import Lines, layer_norm
from normscope.pairs.sums.binning import cuda
from normscope.pairs.sums.stats import PairStats
from normscope.pairs.sums.tokens import Run, Tokens
from normscope.runtime.launches import KernelCall, Scratch, complete
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
ABOUT = """
Machine code of the kernels of DyT, DyISRU and Derf. No GPU is needed and no time is measured. Triton {triton} compiles
each launch ahead of time with its own ptxas ({ptxas}), specialized as at a launch, and cuobjdump disassembles the
result. The same versions give the same numbers on every machine. Instructions executed, per element of x: those of all
threads that are launched over (rows, channels), along the path of a thread that takes part in every store. Code outside
of the loop counts once, the loop's body as often as the program repeats it on {multiprocessors} multiprocessors.
Instructions that a predicate switches off or a branch skips are counted; NOPs and the branch to itself at the end are
not. Backward is the pass over x and dy. It excludes the sum of its slots, whose work does not grow with the rows. Loop:
the loop's body alone. At most: the ceiling of bfloat16 on sm_90. α, and the shift of Derf, are single numbers; some
rows have one α per channel. Weight and bias have one value per channel; all have x's dtype. MUFU: the unit for
exponentials, roots and tanh. No kernel here uses local memory, so no register spills. float32 uses the accurate
functions, the other dtypes those of half precision.
"""

TOKENS, CHANNELS, SAMPLES = 64 * 197, 768, 64  # of a hook of ViT-B/16
PAIRS, HOOKS = TOKENS * CHANNELS, 25
CAPTURE_CEILINGS = {"describe": 25, "add_pairs": 130}  # instructions a pair on sm_90 in bfloat16
SECTOR = 32
WARPS_A_CLOCK, CLOCK = 4 * MULTIPROCESSORS, 1.755e9  # instructions of a warp, and clocks a second, of an H100
OPERATIONS, RATE = 2 * 17.6e9 * SAMPLES, 0.6 * 989e12  # of a forward pass, and of these a second in bfloat16
LEFT_OUT = r"(RED|ATOM)\w*\.E\.ADD\.F64.*"
ABOUT_CAPTURE = """
Machine code of the kernels of a capture of {samples} images of ViT-B/16: {tokens:,} tokens of {channels} channels,
{pairs:,} pairs per hook. No GPU is needed and no time is measured. Triton {triton} compiles each launch ahead of time
with its own ptxas ({ptxas}), specialized as at a launch, and cuobjdump disassembles the result. Instructions executed,
per pair: those of all threads that are launched, with every iteration of a loop. Code that runs only if a tile contains
a zero or a number beyond the grid of bins is excluded. At most: the ceiling of bfloat16 on sm_90. Atomic operations: on
sectors of 32 bytes, for the sums of pairs, the density and the channels. sm_80 cannot add four words at once, so eight
lanes add one each. Of the forward pass: a prediction from counts, not a measurement. It divides the time of describe
and add_pairs by the time of the pass. The former assumes one instruction per clock for each scheduler of
{multiprocessors} multiprocessors at {clock} GHz, the latter 17.6 billion multiply-adds per image at 60 % of 989
Tflop/s. It ignores atomic operations, latency and the host. No kernel that works on every pair uses local memory.
"""


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--targets", type=names, default=["80", "90", "100"], help="compute capabilities (80,90,100)")
    parser.add_argument("--dtypes", type=names, default=list(DTYPES), help=f"of x ({','.join(DTYPES)})")
    args = parser.parse_args()
    targets, of_capture = [int(target) for target in args.targets], []
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {"TRITON_CACHE_DIR": folder}):
        rows = list(measured(targets, args.dtypes))
        for dtype in args.dtypes:
            for target in targets if dtype != "float16" else ():
                of_capture += captured(dtype, target)
    compilers = {"triton": triton.__version__, "ptxas": assemblers(), "multiprocessors": MULTIPROCESSORS}
    finish("machine_code", ABOUT.format(**compilers), rows, args, libraries=("triton",))
    sizes = {"samples": SAMPLES, "tokens": TOKENS, "channels": CHANNELS, "pairs": PAIRS, "clock": CLOCK / 1e9}
    about = ABOUT_CAPTURE.format(**sizes, **compilers)
    finish("machine_code_capture", about, of_capture, args, libraries=("triton",))


def measured(targets: list[int], dtypes: list[str]) -> Iterator[Measurement]:
    """Compile and measure the kernels of all curves, dtypes and shapes."""
    settings = [(dtype, shape, False) for dtype in dtypes for shape in SHAPES[: None if dtype == "bfloat16" else 1]]
    settings += [("bfloat16", SHAPES[0], True)] if "bfloat16" in dtypes else []
    for dtype, shape, each in settings:
        x = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for number, (name, ceilings) in enumerate(CEILINGS.items()):
            case = f"{name}, {dtype}, {shape}{', α a channel' if each else ''}"
            for curve, way in WAYS.items():
                for target in targets:
                    yield from of_launch(case, way, launches(x, curve, alpha_each=each)[number], x, target)
                if (dtype, shape, each) == ("bfloat16", SHAPES[0], False) and 90 in targets:
                    yield Measurement(case, way, "sm_90 at most", "per element", [float(ceilings[curve])])


def of_launch(case: str, way: str, launch: KernelCall, x: Tensor, target: int) -> Iterator[Measurement]:
    """Compile a launch over x for a target, and count its instructions and registers."""
    code, name = code_of_launch(launch, target), f"sm_{target}"
    if code.local:
        raise ValueError(f"{launch.kernel.__name__} has {code.local} bytes a thread in local memory on {name}")
    yield Measurement(case, way, name, "per element", [executed(code, launch, x)])
    yield Measurement(case, way, f"{name} registers", "a thread", [float(code.registers)])
    mufu = executed(code, launch, x, r"MUFU\..*")
    yield Measurement(case, way, f"{name} MUFU", "per element", [mufu], shown=target == 100)
    if code.loop:
        yield Measurement(case, way, f"{name} loop", "per element", [loop(code, launch, x)], shown=target == 90)


def launches(x: Tensor, curve: str, behind: int = 0, alpha_each: bool = False) -> list[KernelCall]:
    """Return a layer's launches for x, which may be on ``meta``: forward, backward, and the sum of backward's slots.

    ``behind`` axes of x come after that of the channels; ``alpha_each`` is for one α per channel. A ValueError is
    raised if x's strides are those of no layout.
    """
    axis = x.ndim - 1 - behind
    channels, single = x.new_empty(x.shape[axis]), x.new_empty(1)
    own = Parameters(channels if alpha_each else single, single if curve == "erf" else None, channels, channels)
    layout, layout_backward = (layout_of([x] * tensors, axis, axis + 1) for tensors in (2, 3))
    if layout is None or layout_backward is None:
        raise ValueError(f"A tensor of strides {x.stride()} has no layout: a layer copies it before it launches.")
    with mock.patch.object(launches_of_kernels, "multiprocessors", return_value=MULTIPROCESSORS):
        gradients = Gradients(x, *vars(own).values())
        backward = backward_launches(x, x, own, gradients, layout_backward, curve)
    return [forward_launch(x, x, own, layout, curve), *backward]


def executed(code: Code, launch: KernelCall, x: Tensor, pattern: str = ".*") -> float:
    """Return the instructions that all threads of a launch execute, per element of x."""
    return code.executed(rounds(launch), pattern) * threads(launch) / x.numel()


def loop(code: Code, launch: KernelCall, x: Tensor) -> float:
    """Return the number of these within the loop."""
    return len(code.loop) * rounds(launch) * threads(launch) / x.numel()


def threads(launch: KernelCall) -> int:
    return launch.grid[0] * launch.options["num_warps"] * LANES


def rounds(launch: KernelCall) -> float:
    """Return the mean number of iterations of a program's loop."""
    given: dict[str, Any] = launch.arguments
    if "programs" not in given:
        return 1
    others = given["others"] * (1 if given["channels_in_columns"] else given["multiple"])
    return triton.cdiv(others, given["steps"] * given["block_others"]) * given["outers"] / given["programs"]


def assemblers() -> str:
    """Return the versions of Triton's ptxas."""
    nvidia = triton.knobs.nvidia
    return f"{nvidia.ptxas.version}, for sm_100 {nvidia.ptxas_blackwell.version}"


def captured(dtype: str, target: int) -> Iterator[Measurement]:
    """Compile the kernels of a hook for a target, and say what their code says."""
    own, all_instructions = f"sm_{target}", 0.0
    for call, code in codes(getattr(torch, dtype), target):
        name = call.kernel.__name__
        if code.local and name == "draw":  # which few programs of a launch do anything in
            yield Measurement(dtype, name, f"{own} local memory", "bytes a thread", [float(code.local)])
        elif code.local:
            raise ValueError(f"{name} has {code.local} bytes a thread in local memory on {own}")
        yield Measurement(dtype, name, f"{own} registers", "a thread", [float(code.registers)])
        if name == "draw":  # whose work depends on what is drawn
            continue
        instructions = executed_per_pair(call, code)
        all_instructions += instructions
        yield Measurement(dtype, name, own, "per pair", [instructions])
        if name in CAPTURE_CEILINGS and (dtype, target) == ("bfloat16", 90):
            yield Measurement(dtype, name, "sm_90 at most", "per pair", [float(CAPTURE_CEILINGS[name])])
        if name == "add_pairs":
            yield Measurement(dtype, name, f"{own} atomic operations", "million", [sectors(call, code) / 1e6])
    if target == 90:
        share = all_instructions * PAIRS / LANES / WARPS_A_CLOCK / CLOCK / (OPERATIONS / HOOKS / RATE)
        yield Measurement(dtype, "all of a hook", "sm_90 of the forward pass", "%", [100 * share])


def codes(dtype: torch.dtype, target: int) -> Iterator[tuple[KernelCall, Code]]:
    """Compile the kernels of a hook."""
    stats = PairStats.empty(CHANNELS, device=torch.device("meta"))
    rows = torch.empty(TOKENS, CHANNELS, dtype=dtype, device="meta")
    each = TOKENS // SAMPLES
    runs = [Run(number * each, (number + 1) * each, number % 8, number, 0, number) for number in range(SAMPLES)]
    tokens = Tokens(rows, Lines(layer_norm, 1e-6), runs, CHANNELS)
    memory = {"rows": rows, "valid": rows, "scratch": torch.empty(8, device="meta"), **cuda._kept(stats)}
    memory |= {"runs": torch.empty(5, len(runs), dtype=torch.int64, device="meta")}
    scratch = Scratch(rows.device)
    with mock.patch.object(cuda, "_major", return_value=target // 10):  # of a device that is not here
        calls = [complete(call, memory, scratch) for call in cuda._launches(stats, tokens, scratch)]
    for call in calls:
        yield call, code_of_launch(call, target)


def executed_per_pair(call: KernelCall, code: Code) -> float:
    """Return the instructions that all threads of a launch execute, per pair."""
    tiles = triton.cdiv(CHANNELS, call.arguments["tile"])
    rounds = {
        "describe": (tiles, tiles, SAMPLES.bit_length() - 1),  # twice over x, and once for the run of each token
        "add_pairs": (call.arguments.get("steps", 0),),
        "flush": (),
    }[call.kernel.__name__]
    loops = loops_of(code)
    if len(loops) != len(rounds):
        raise ValueError(f"{call.kernel.__name__} has {len(loops)} loops, not {len(rounds)}")
    skipped = skipped_by_most(code, loops)
    total = 0.0
    for address in (instruction.address for instruction in code.instructions):
        if address not in skipped:
            pairs = zip(loops, rounds, strict=True)
            total += next((times for (first, last), times in pairs if first <= address <= last), 1)
    threads = math.prod(call.grid) * call.options.get("num_warps", 4) * LANES
    return total * threads / PAIRS


def branches(code: Code) -> list[Instruction]:
    return [instruction for instruction in code.instructions if instruction.operation.split(".")[0] == "BRA"]


def backward(code: Code) -> list[tuple[int, int]]:
    """Return the target and the address of each branch backwards."""
    return sorted((branch.target, branch.address) for branch in branches(code) if branch.target < branch.address)


def loops_of(code: Code) -> list[tuple[int, int]]:
    """Return the first and last address of each loop; code behind a loop that jumps into its middle is none."""
    back = backward(code)
    return [(to, at) for to, at in back if not any(first < to <= last < at for first, last in back)]


def skipped_by_most(code: Code, loops: Sequence[tuple[int, int]]) -> range:
    """Return the addresses that most tiles skip: the shortest range with all of a loop's additions in float64."""
    exact = [
        instruction.address for instruction in code.instructions if instruction.operation in code.counted(LEFT_OUT)
    ]
    within = [address for address in exact if any(first <= address <= last for first, last in loops)]
    if not within:
        # Behind the loop, into which it goes back: as ptxas lays out what it takes to be rare.
        return next(
            (range(last + 16, at + 16) for _, last in loops for to, at in backward(code) if to <= last < at), range(0)
        )
    around = [
        range(branch.address + 16, branch.target)
        for branch in branches(code)
        if branch.address < min(within) <= max(within) < branch.target
        and any(first <= branch.address <= last for first, last in loops)
    ]
    return min(around, key=len)


def sectors(call: KernelCall, code: Code) -> float:
    """Return the number of atomic operations on sectors in a launch of add_pairs."""
    layouts = {  # of the eight words of a pair, which are one sector, and how many instructions add them
        "sizePerThread = [1, 4], threadsPerWarp = [16, 2]": 1 if code.counted(r"REDG?\.E\.ADD\.F32x4.*") else 4,
        "sizePerThread = [1, 1], threadsPerWarp = [4, 8]": 1,
    }
    matching = [of_a_pair for layout, of_a_pair in layouts.items() if layout in code.asm["ttgir"]]
    if len(matching) != 1:
        raise ValueError(f"{call.kernel.__name__} adds a pair in {len(matching)} layouts that are known of, not in one")
    [of_a_pair] = matching
    programs = call.grid[0] * call.grid[1]
    of_channels = programs * call.arguments["tile"] * (2 * 8 + 2 * 4) / SECTOR
    return PAIRS * (of_a_pair + 1) + of_channels


if __name__ == "__main__":
    main()
