"""What a capture's kernels are as machine code, without a GPU: ``python benchmarks/machine_code_capture.py``."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from unittest import mock

import torch
import triton
from common import Measurement, finish, names, options
from disassembly import Code, Instruction, code_of_launch
from machine_code import MULTIPROCESSORS, assemblers

from normscope.pairs.norms.formulas import FORMS, Lines, layer_norm
from normscope.pairs.sums.binning import cuda
from normscope.pairs.sums.stats import PairStats
from normscope.pairs.sums.tokens import Run, Tokens
from normscope.runtime.launches import KernelCall, Scratch, complete
from normscope.swaps.kernels.launch import LANES

TOKENS, CHANNELS, SAMPLES = 64 * 197, 768, 64  # of a hook of ViT-B/16
PAIRS, HOOKS = TOKENS * CHANNELS, 25
DTYPES = ("bfloat16", "float32")
CEILINGS = {"describe": 25, "add_pairs": 130}  # instructions a pair on sm_90 in bfloat16
SECTOR = 32
WARPS_A_CLOCK, CLOCK = 4 * MULTIPROCESSORS, 1.755e9  # instructions of a warp, and clocks a second, of an H100
OPERATIONS, RATE = 2 * 17.6e9 * SAMPLES, 0.6 * 989e12  # of a forward pass, and of these a second in bfloat16
LEFT_OUT = r"(RED|ATOM)\w*\.E\.ADD\.F64.*"
ABOUT = """
What the kernels of a capture are as machine code, for {samples} images of ViT-B/16: {tokens:,} tokens of {channels}
channels, {pairs:,} pairs a hook. No GPU is needed and no time was measured: Triton {triton} compiles each launch
ahead of time with its own ptxas ({ptxas}), specialized as at a launch, and cuobjdump reads the result back.
Instructions executed, per pair: those of all threads that are launched, the bodies of loops as often as they are gone
round, divided by the pairs. Left out is what a branch skips unless a tile holds a zero, or a number beyond the grid
of bins. At most: the ceiling of bfloat16 on sm_90. Atomic operations: on sectors of 32 bytes, of the sums of pairs,
the density and the channels; sm_80 has no addition of four words at once, and eight lanes add one each. Of the forward
pass: a prediction from counts, not measured. It sets the instructions of describe and add_pairs, at one a clock for
each scheduler of {multiprocessors} multiprocessors at {clock} GHz, beside the pass's 17.6 billion multiply-adds an
image at 60 % of 989 Tflop/s; atomic operations, latency and the host are not in it. Local memory, where any is named,
holds what registers have no room for; nothing that works on every pair has any.
"""


def main() -> None:
    parser = options(__doc__, repeats=1)
    parser.add_argument("--targets", type=names, default=["80", "90", "100"], help="compute capabilities (80,90,100)")
    parser.add_argument("--dtypes", type=names, default=list(DTYPES), help=f"of x ({','.join(DTYPES)})")
    args = parser.parse_args()
    measurements: list[Measurement] = []
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {"TRITON_CACHE_DIR": folder}):
        for dtype in args.dtypes:
            for target in map(int, args.targets):
                measurements += measured(dtype, target)
    about = ABOUT.format(
        samples=SAMPLES, tokens=TOKENS, channels=CHANNELS, pairs=PAIRS, triton=triton.__version__, ptxas=assemblers(),
        multiprocessors=MULTIPROCESSORS, clock=CLOCK / 1e9,
    )  # fmt: skip
    finish("machine_code_capture", about, measurements, args, threads=(), libraries=("triton",))


def measured(dtype: str, target: int) -> Iterator[Measurement]:
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
        instructions = executed(call, code)
        all_instructions += instructions
        yield Measurement(dtype, name, own, "per pair", [instructions])
        if name in CEILINGS and (dtype, target) == ("bfloat16", 90):
            yield Measurement(dtype, name, "sm_90 at most", "per pair", [float(CEILINGS[name])])
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
    tokens = Tokens(rows, Lines(FORMS[layer_norm], 1e-6), runs, CHANNELS)
    memory = {"rows": rows, "valid": rows, "scratch": torch.empty(8, device="meta"), **cuda._kept(stats)}
    memory |= {"runs": torch.empty(5, len(runs), dtype=torch.int64, device="meta")}
    scratch = Scratch(rows.device)
    with mock.patch.object(cuda, "_major", return_value=target // 10):  # of a device that is not here
        calls = [complete(call, memory, scratch) for call in cuda._launches(stats, tokens, scratch)]
    for call in calls:
        yield call, code_of_launch(call, target)


def executed(call: KernelCall, code: Code) -> float:
    """Return how many instructions all threads of a launch execute, for each pair."""
    tiles = triton.cdiv(CHANNELS, call.arguments["tile"])
    rounds = {
        "describe": (tiles, tiles, SAMPLES.bit_length() - 1),  # twice over x, and once for the run of each token
        "add_pairs": (call.arguments.get("steps", 0),),
        "flush": (),
    }[call.kernel.__name__]
    loops = loops_of(code)
    if len(loops) != len(rounds):
        raise ValueError(f"{call.kernel.__name__} has {len(loops)} loops, and {len(rounds)} are known of")
    skipped = skipped_by_most(code, loops)
    total = 0.0
    for one in code.instructions:
        if not skipped.start <= one.address < skipped.stop:
            within = [times for (first, last), times in zip(loops, rounds, strict=True) if first <= one.address <= last]
            total += within[0] if within else 1
    threads = math.prod(call.grid) * call.options.get("num_warps", 4) * LANES
    return total * threads / PAIRS


def branches(code: Code) -> list[Instruction]:
    return [one for one in code.instructions if one.operation.split(".")[0] == "BRA"]


def backward(code: Code) -> list[tuple[int, int]]:
    """Return where each branch backwards goes, and where it stands."""
    return sorted((one.target, one.address) for one in branches(code) if one.target < one.address)


def loops_of(code: Code) -> list[tuple[int, int]]:
    """Return where each loop begins and ends; what stands behind one and goes back into its middle is none."""
    back = backward(code)
    return [(to, at) for to, at in back if not any(first < to <= last < at for first, last in back)]


def skipped_by_most(code: Code, loops: Sequence[tuple[int, int]]) -> range:
    """Return the addresses of what most tiles skip: the shortest stretch with all of a loop's additions in float64."""
    exact = [one.address for one in code.instructions if one.operation in code.counted(LEFT_OUT)]
    within = [address for address in exact if any(first <= address <= last for first, last in loops)]
    if not within:
        # Behind the loop, into which it goes back: as ptxas lays out what it takes to be rare.
        return next(
            (range(last + 16, at + 16) for _, last in loops for to, at in backward(code) if to <= last < at), range(0)
        )
    around = [
        range(one.address + 16, one.target)
        for one in branches(code)
        if one.address < min(within) <= max(within) < one.target
        and any(first <= one.address <= last for first, last in loops)
    ]
    return min(around, key=len)


def sectors(call: KernelCall, code: Code) -> float:
    """Return how many atomic operations on sectors a launch of add_pairs takes."""
    layouts = {  # of the eight words of a pair, which are one sector, and how many instructions add them
        "sizePerThread = [1, 4], threadsPerWarp = [16, 2]": 1 if code.counted(r"REDG?\.E\.ADD\.F32x4.*") else 4,
        "sizePerThread = [1, 1], threadsPerWarp = [4, 8]": 1,
    }
    known = [of_a_pair for layout, of_a_pair in layouts.items() if layout in code.asm["ttgir"]]
    if len(known) != 1:
        raise ValueError(f"{call.kernel.__name__} adds a pair in {len(known)} layouts that are known of, not in one")
    [of_a_pair] = known
    programs = call.grid[0] * call.grid[1]
    of_channels = programs * call.arguments["tile"] * (2 * 8 + 2 * 4) / SECTOR
    return PAIRS * (of_a_pair + 1) + of_channels


if __name__ == "__main__":
    main()
