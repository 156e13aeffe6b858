"""What the kernels become on GPUs that are not here: nothing spilled, full rows in loads of 128 bits, few instructions.

Triton compiles ahead of time, without a driver; benchmarks/machine_code.py does so for many more.
"""

import functools
import importlib
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is made for Linux alone")

from normscope.swaps.kernels.launch import BACKWARD as BACKWARD_TILING

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
FORWARD, BACKWARD, SLOTS = range(3)
AT_ONCE = 16  # bytes
LARGE = (32768, 4096)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TARGETS = [(80, torch.float16), (90, torch.bfloat16), (90, torch.float32), (100, torch.bfloat16), (100, torch.float32)]


class Compiled:
    """Compiles every launch once."""

    def __init__(self) -> None:
        self.benchmark = importlib.import_module("machine_code")
        self.disassembly = importlib.import_module("disassembly")

    @functools.cache  # noqa: B019 - it lives as long as the module's tests
    def __call__(self, place, curve, dtype=torch.bfloat16, target=90, shape=LARGE, behind=0, **more):
        x = torch.empty(shape, dtype=dtype, device="meta")
        launch = self.benchmark.launches(x, curve, behind, **more)[place]
        return x, launch, self.disassembly.code_of_launch(launch, target)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.syspath_prepend(BENCHMARKS)
        yield Compiled()


def nothing_is_in_local_memory(code):
    assert code.local == 0
    assert not code.counted(r"(LDL|STL)(\..*)?")


def nothing_is_atomic(code):
    assert not code.counted(r"(RED|REDG|ATOM|ATOMG|ATOMS)(\..*)?")


def full_rows_take_128_bits(x, launch, code):
    """Each thread's share of a tile is loaded and stored by exactly as many instructions as it has 16 bytes."""
    given = launch.arguments
    share = (
        given["block_others"] * given["block_channels"] // (32 * launch.options["num_warps"]) * given.get("steps", 1)
    )
    at_once, rest = divmod(share * x.itemsize, AT_ONCE)
    assert at_once and not rest
    backward = "programs" in given
    assert bool(code.loop) == backward
    # Outside of backward's loop there are the parameters, and the slots of what it has summed.
    loads, stores = (code.counted(rf"{name}\..*", code.loop or None) for name in ("LDG", "STG"))
    assert stores == {"STG.E.128": at_once}
    assert loads.pop("LDG.E.128") == at_once * (2 if backward else 1)
    parameters = 0 if backward else 4 * given["block_channels"]
    assert loads.total() <= parameters


# Derf has the most registers and parameters. Rows of the other shapes are multiples of 8 elements too.
CASES = [("erf", dtype, target, LARGE, 0, False) for target, dtype in TARGETS]
CASES += [
    ("isru", torch.bfloat16, 90, (32768, 1000), 0, False),
    ("isru", torch.bfloat16, 90, (64, 768, 14, 12), 2, False),
    ("isru", torch.bfloat16, 90, (64, 96, 56, 56), 2, False),
    ("erf", torch.bfloat16, 90, LARGE, 0, True),
]


@pytest.mark.parametrize(("curve", "dtype", "target", "shape", "behind", "each"), CASES, ids=str)
@pytest.mark.parametrize("place", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_one_source_serves_every_target_dtype_and_layout(compiled, place, curve, dtype, target, shape, behind, each):
    x, launch, code = compiled(place, curve, dtype, target, shape, behind, alpha_each=each)
    nothing_is_in_local_memory(code)
    nothing_is_atomic(code)
    full_rows_take_128_bits(x, launch, code)
    if place == BACKWARD and not each:  # all programs run at once on the registers of a multiprocessor
        assert code.registers * launch.options["num_warps"] * 32 * BACKWARD_TILING.per_multiprocessor <= 65536


# Numbers that are 1 are constants to Triton's compiler, which the interpreter does not show.
@pytest.mark.parametrize(
    ("shape", "behind"),
    [((1, 1), 0), ((5, 1), 0), ((1, 8), 0), ((1, 8, 4, 4), 2)],
    ids=str,
)
@pytest.mark.parametrize("place", [FORWARD, BACKWARD, SLOTS], ids=["forward", "backward", "slots"])
def test_the_smallest_tensors_compile_too(compiled, place, shape, behind):
    _, _, code = compiled(place, "isru", shape=shape, behind=behind)
    nothing_is_in_local_memory(code)


def test_the_beginning_of_a_tensor_decides_too(compiled):
    """Of one that begins between two loads each element is loaded by itself, whatever its strides are."""
    both = torch.empty(8 * 64 + 1, dtype=torch.bfloat16, device="meta")
    for begin, multiple in ((0, 8), (1, 1)):
        for launch in compiled.benchmark.launches(both[begin : begin + 512].view(8, 64), "isru")[: BACKWARD + 1]:
            assert launch.arguments["multiple"] == multiple


# Of so many numbers none is a multiple of what one load has; each has a tile of another form.
@pytest.mark.parametrize(("shape", "behind"), [((32767, 37), 0), ((63, 767, 7, 7), 2)], ids=["rows", "planes"])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_elements_that_are_loaded_one_by_one_spill_nothing(compiled, dtype, shape, behind):
    _, launch, code = compiled(FORWARD, "erf", dtype, 80, shape, behind, alpha_each=True)
    assert launch.arguments["multiple"] == 1
    assert code.counted(r"STG\..*") == {"STG.E.U16": 16}
    nothing_is_in_local_memory(code)


@pytest.mark.parametrize("curve", ["tanh", "isru", "erf"])
@pytest.mark.parametrize("place", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_few_instructions_an_element(compiled, place, curve):
    x, launch, code = compiled(place, curve)
    nothing_is_in_local_memory(code)
    full_rows_take_128_bits(x, launch, code)
    ceiling = list(compiled.benchmark.CEILINGS.values())[place][curve]
    executed = compiled.benchmark.executed(code, launch, x)
    assert executed <= ceiling
    # What an element cannot do without: to be loaded, widened, scaled, rounded and stored.
    assert executed > 3
    if place == BACKWARD:
        assert 3 < compiled.benchmark.loop(code, launch, x) < executed


@pytest.mark.parametrize(("shape", "stated"), [((131072, 1152), 376), (LARGE, 344)], ids=str)
def test_a_register_adds_up_few_enough_terms_for_float32(compiled, shape, stated):
    launch = compiled.benchmark.launches(torch.empty(shape, dtype=torch.bfloat16, device="meta"), "erf")[BACKWARD]
    terms = math.ceil(compiled.benchmark.rounds(launch)) * launch.arguments["steps"]
    assert terms * launch.arguments["block_others"] * launch.arguments["programs"] >= shape[0]
    across = launch.arguments["block_others"] * launch.arguments["block_channels"]
    # All of a tile in a tree at the end. docs/kernels.md says how many terms, and what that is of Σ|terms|.
    assert terms == stated
    assert (terms + math.log2(across)) * 2**-24 < 2.5e-5


def test_the_slots_are_summed_without_atomics(compiled):
    _, _, code = compiled(SLOTS, "erf", alpha_each=True)
    nothing_is_in_local_memory(code)
    nothing_is_atomic(code)
    assert code.counted(r"DADD")  # in float64
