"""Axes of about and of more than 2³¹ elements, all of them: on a GPU alone. At most 26 GB are held at once."""

import pytest
import torch
from torch import Tensor
from truth import DEVICE, GPU, fill, for_a_gpu, hold_in_pieces, parameters

from normscope.swaps.kernels.eager import Gradients

pytestmark = for_a_gpu
HALF = torch.bfloat16
SENTINEL, BESIDE = 77.0, 4096
FULL = 2**31 if GPU else 2**12
CURVES = ("tanh", "isru", "erf")
SHAPES = {  # sizes, and those of the channels
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


def drawn(shape: tuple[int, ...], seed: int) -> Tensor:
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


@pytest.mark.parametrize("name", SHAPES)
def test_every_element_and_nothing_beside(name):
    shape, channels = SHAPES[name]
    curve = CURVES[list(SHAPES).index(name) % 3]
    own = parameters(curve, channels, HALF)
    x, dy = drawn(shape, 0), drawn(shape, 1)
    (around_y, y), (around_dx, dx) = filled(x.numel()), filled(x.numel())
    y, dx = y.view(shape), dx.view(shape)
    made = Gradients(dx, *(None if part is None else torch.full_like(part, torch.nan) for part in vars(own).values()))
    fill(curve, x, own, 0, dy, y, made)
    hold_in_pieces(curve, x, own, y, dy, made, 0)
    for around in (around_y, around_dx):
        assert (around[:BESIDE] == SENTINEL).all() and (around[-BESIDE:] == SENTINEL).all()
