"""Tensors as large as those of networks and beyond 2³¹ elements: on a GPU alone, at most 26 GB at once.

A rehearsal runs tiny ones in the interpreter.
"""

import pytest
import torch
import truth
from torch import Tensor
from truth import BY_NUMPY, DEVICE, EVERY, GPU, check_forms, fill, for_a_gpu, hold_in_pieces, numbers, parameters

from normscope.swaps.kernels import launch
from normscope.swaps.kernels.eager import Gradients, Parameters

pytestmark = for_a_gpu
ALL = "alpha shift weight bias"
HALF = torch.bfloat16
DTYPES = (torch.float32, HALF, torch.float16)
SHAPES = ((25216, 768), (4096, 4096), (32768, 4096), (131072, 1152)) if GPU else ((24, 16),)
MANY = 70_000 if GPU else 30  # more than the 65,535 programs that a grid has on its second and third axis
ROWS = 1031 if GPU else 7


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Draw so many numbers where they are wanted: the CPU would take minutes."""
    return numbers(shape, dtype, seed, drawn_on=DEVICE)


def hold(curve: str, x: Tensor, own: Parameters, behind: int = 0, dy: Tensor | None = None) -> None:
    dy = drawn(tuple(x.shape), x.dtype, seed=1) if dy is None else dy
    y = launch.forward(x, own, curve, behind)
    made = launch.backward(dy, x, own, curve, behind, EVERY)
    check_forms(y, made, x, own)
    hold_in_pieces(curve, x, own, y, dy, made, behind)


@pytest.mark.parametrize("curve", BY_NUMPY)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "each"), [*((shape, "weight bias") for shape in SHAPES), (SHAPES[0], ALL)], ids=str)
def test_the_shapes_of_networks(shape, each, dtype, curve):
    hold(curve, drawn(shape, dtype), parameters(curve, shape[1:], dtype, each))


MANIES = {  # x, the channels' sizes, axes behind them
    "rows": lambda dtype: (drawn((MANY, 40), dtype), (40,), 0),
    "rows of one element": lambda dtype: (drawn((MANY, 1), dtype), (1,), 0),
    "outers": lambda dtype: (drawn((MANY, 4, 24), dtype)[:, :2], (24,), 0),
    "outers of whole loads": lambda dtype: (drawn((MANY, 4, 64), dtype)[:, 1:3], (64,), 0),
    "images": lambda dtype: (drawn((MANY, 3, 2, 5), dtype), (3,), 2),
    "images of whole loads": lambda dtype: (drawn((MANY, 3, 4, 4), dtype), (3,), 2),
    "images, channels last": lambda dtype: (
        drawn((MANY, 3, 2, 5), dtype).contiguous(memory_format=torch.channels_last),
        (3,),
        2,
    ),
    "channels": lambda dtype: (drawn((3, MANY), dtype), (MANY,), 0),
    "channels, before pixels": lambda dtype: (drawn((2, MANY, 3), dtype), (MANY,), 1),
    "pixels": lambda dtype: (drawn((2, 3, MANY), dtype), (3,), 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("name", MANIES)
def test_more_than_a_grid_has_on_its_other_axes(name, dtype):
    x, shape, behind = MANIES[name](dtype)
    curve = list(BY_NUMPY)[list(MANIES).index(name) % 3]
    hold(curve, x, parameters(curve, shape, dtype, ALL), behind)


def test_an_element_that_is_wrong_is_found(monkeypatch):
    monkeypatch.setattr(truth, "FURTHEST", {})  # what is wrong on purpose is not to be reported
    x, own = drawn((ROWS, 24), HALF), parameters("tanh", (24,), HALF)
    y, made = launch.forward(x, own, "tanh", 0), launch.backward(x, x, own, "tanh", 0, EVERY)
    hold_in_pieces("tanh", x, own, y, x, made, 0)
    for wrong in (y, made.x, made.weight):
        before = wrong.view(-1)[-1].clone()
        wrong.view(-1)[-1] += 0.05 * (1 + before.abs())
        with pytest.raises(AssertionError, match="of what is allowed"):
            hold_in_pieces("tanh", x, own, y, x, made, 0)
        wrong.view(-1)[-1] = before


SENTINEL, BESIDE = 77.0, 4096
FULL = 2**31 if GPU else 2**12
FAR = {  # sizes, and those of the channels
    "just under, one channel": ((FULL - 5, 1), (1,)),
    "just under, of whole loads, channels alone": ((FULL - 8,), (1,)),
    "beyond, of whole loads, channels alone": ((FULL + 40,), (1,)),
    "beyond, channels alone": ((FULL + 37,), (1,)),
    "beyond, one channel": ((FULL + 40, 1), (1,)),
    "beyond, rows of five": ((FULL // 5 + 9, 5), (5,)),
    "beyond, rows of 64": ((FULL // 64 + 3, 64), (64,)),
}


def filled(elements: int) -> tuple[Tensor, Tensor]:
    """Return memory of sentinels, and what is to be filled of it: all but its beginning and its end."""
    around = torch.full((elements + 2 * BESIDE,), SENTINEL, dtype=HALF, device=DEVICE)
    return around, around[BESIDE:-BESIDE]


def repeating(shape: tuple[int, ...], seed: int) -> Tensor:
    """Draw as much as is not drawn again at any power of two."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    some = torch.randn((FULL >> 7) + 3, generator=generator, device=DEVICE).mul_(2).to(HALF)
    elements = torch.Size(shape).numel()
    whole = torch.full((elements,), torch.nan, dtype=HALF, device=DEVICE)
    for piece in whole.split(len(some)):
        piece.copy_(some[: len(piece)])
    return whole.view(shape)


@pytest.fixture(autouse=True)
def room():
    """Let each test have the memory that those before it had."""
    if GPU:
        torch.cuda.empty_cache()


@pytest.mark.parametrize("name", FAR)
def test_every_element_and_nothing_beside(name):
    shape, channels = FAR[name]
    curve = list(BY_NUMPY)[list(FAR).index(name) % 3]
    own = parameters(curve, channels, HALF)
    x, dy = repeating(shape, 0), repeating(shape, 1)
    (around_y, y), (around_dx, dx) = filled(x.numel()), filled(x.numel())
    y, dx = y.view(shape), dx.view(shape)
    made = Gradients(dx, *(None if part is None else torch.full_like(part, torch.nan) for part in vars(own).values()))
    fill(curve, x, own, 0, dy, y, made)
    hold_in_pieces(curve, x, own, y, dy, made, 0)
    for around in (around_y, around_dx):
        assert (around[:BESIDE] == SENTINEL).all() and (around[-BESIDE:] == SENTINEL).all()
