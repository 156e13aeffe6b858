"""What is read and written: offsets of 64 bits, nothing beside it, and the same bits every time."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from truth import DEVICE, EVERY, GPU, OF_INPUT, OF_PARAMETERS, agree, fill, hold, numbers, parameters, truth

from normscope.runtime.launches import KernelCall
from normscope.swaps.kernels import launch
from normscope.swaps.kernels import launch as fused
from normscope.swaps.kernels.eager import Gradients, layout_of
from normscope.swaps.kernels.launch import backward_launches, forward_launch

HALF = torch.bfloat16
ALL = "alpha shift weight bias"


def run_in_place(x: Tensor, y: Tensor, dy: Tensor, dx: Tensor, shape: tuple[int, ...], behind: int) -> None:
    """Fill y and dx where they are, and hold them and the other gradients to float64."""
    own = parameters("isru", shape, x.dtype, ALL)
    held = truth("isru", x, own, behind, dy)
    gradients = Gradients(dx, *(torch.empty_like(part) for part in vars(own).values()))
    fill("isru", x, own, behind, dy, y, gradients)
    for name, made in {"y": y, **gradients._asdict()}.items():
        agree(made, held[name], "isru", x.dtype, name)


FAR = {  # sizes, strides and axes behind the channels: beyond 2³¹ by one stride, or by a multiple of a smaller one
    "rows": ((3, 8), (2**31 + 8, 1), 0),
    "rows, by a multiple": ((6, 5), (2**29 + 7, 1), 0),
    "rows of whole loads, by a multiple": ((6, 8), (2**29 + 8, 1), 0),
    "channels": ((6, 4), (1, 2**31 + 1), 0),
    "channels, by a multiple": ((2, 6, 4), (4, 2**29 + 8, 1), 1),
    "what is outside": ((3, 2, 8), (2**31 + 8, 16, 1), 0),
    "what is outside, by a multiple": ((6, 2, 8), (2**29 + 8, 16, 1), 0),
    "images, by a multiple": ((6, 3, 8), (2**29 + 8, 16, 1), 1),
}


@pytest.mark.parametrize("case", FAR)
def test_offsets_of_more_than_31_bits(case):
    sizes, strides, behind = FAR[case]
    reach = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    assert reach > 2**31
    storage = memory(reach + 512)
    x, y, dy, dx = (
        torch.empty(0, dtype=HALF, device=DEVICE).set_(storage, 128 * at, sizes, strides) for at in range(4)
    )
    x.copy_(numbers(sizes, HALF))
    dy.copy_(numbers(sizes, HALF, seed=3))
    run_in_place(x, y, dy, dx, (sizes[-1 - behind],), behind)
    for filled in (x, y, dy, dx):
        filled.fill_(torch.nan)
    hold_nan(storage)


def memory(elements: int) -> torch.UntypedStorage:
    """Return memory for bfloat16: on a GPU it holds NaN, on the CPU nothing but the pages that are touched is there."""
    if not GPU:
        return torch.UntypedStorage(2 * elements)
    torch.cuda.empty_cache()
    return torch.full((elements,), torch.nan, dtype=HALF, device=DEVICE).untyped_storage()


def hold_nan(storage: torch.UntypedStorage) -> None:
    """Hold, on a GPU, that nothing was written beside what was to be filled."""
    if GPU:
        whole = torch.empty(0, dtype=HALF, device=DEVICE).set_(storage)
        assert all(piece.isnan().all() for piece in whole.split(2**28))


in_the_interpreter = pytest.mark.skipif(GPU, reason="on a GPU test_large.py runs the whole of it")


def run_the_last_two(whole: KernelCall, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the last two programs of hundreds of thousands."""
    from triton.runtime.interpreter import interpreter_builder

    [programs] = whole.grid
    grid, program = interpreter_builder.set_grid_dim, interpreter_builder.set_grid_idx
    monkeypatch.setattr(interpreter_builder, "set_grid_dim", lambda *_: grid(programs, 1, 1))
    monkeypatch.setattr(interpreter_builder, "set_grid_idx", lambda i, j, k: program(programs - 2 + i, j, k))
    replace(whole, grid=(2,)).run()


# Just under 2³¹, where a size and a tile come to more than 31 bits; and beyond.
@in_the_interpreter
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "shape", [(2**31 - 5, 1), (2**31 - 8,), (2**31 + 40,), (2**31 + 40, 1), (2**31 + 37,)], ids=str
)
def test_axes_of_about_31_bits(shape, backward, monkeypatch):
    storage = torch.UntypedStorage(6 * shape[0])
    x, dy, out = (torch.empty(0, dtype=HALF).set_(storage, at * shape[0], shape) for at in range(3))
    last = 20_000  # elements, more than two programs fill
    x[-last:], dy[-last:] = (numbers((last, *shape[1:]), HALF, seed) for seed in (0, 1))
    out[-last:] = 77.0
    own = parameters("isru", (1,), HALF)
    if backward:
        monkeypatch.setattr(launch, "multiprocessors", lambda _: 2**31)  # so that a program has one run
        gradients = Gradients(out, None, None, None, None)
        [whole] = backward_launches(dy, x, own, gradients, layout_of([dy, x, out], 0, 1), "isru")
    else:
        whole = forward_launch(x, out, own, layout_of([x, out], 0, 1), "isru")
    given, [programs] = whole.arguments, whole.grid
    of_a_program = given["block_others"] * given["block_channels"] * given.get("steps", 1)
    assert programs * of_a_program >= shape[0] > (programs - 1) * of_a_program
    run_the_last_two(whole, monkeypatch)
    seen = shape[0] - (programs - 2) * of_a_program
    assert seen < last and (out[-last:-seen] == 77.0).all()
    agree(out[-seen:], truth("isru", x[-seen:], own, 0, dy[-seen:])["x" if backward else "y"], "isru", HALF, "out")


PLACES = {  # out of (4, 6, 40), and how many axes are behind the channels
    "rows": ((slice(None), slice(1, 5), slice(3, 20)), 0),
    "rows of whole loads": ((slice(None), slice(1, 5), slice(8, 24)), 0),
    "every other channel": ((slice(None), slice(1, 5), slice(1, None, 2)), 0),
    "one channel": ((slice(None), slice(1, 5), slice(7, 8)), 0),
    "behind channels": ((slice(1, 3), slice(1, 5), slice(3, 20)), 1),
    "behind channels, whole loads": ((slice(1, 3), slice(1, 5), slice(8, 24)), 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_nothing_is_written_beside_what_is_to_be_filled(place, dtype):
    at, behind = PLACES[place]
    sentinel = 77.0
    around = {name: torch.full((4, 6, 40), sentinel, dtype=dtype, device=DEVICE) for name in ("y", "dx")}
    x, dy = (
        torch.full((4, 6, 40), torch.nan, dtype=dtype, device=DEVICE) for _ in range(2)
    )  # nor anything read beside it
    x[at], dy[at] = numbers(x[at].shape, dtype), numbers(x[at].shape, dtype, seed=3)
    run_in_place(x[at], around["y"][at], dy[at], around["dx"][at], (x[at].shape[-1 - behind],), behind)
    for made in around.values():
        made[at] = sentinel
        assert (made == sentinel).all()


def bits(made: Tensor) -> Tensor:
    return made.contiguous().view(torch.uint8)


@pytest.mark.parametrize("shape", [(40, 24), (2, 24, 12)], ids=str)
def test_the_same_bits_whatever_was_in_memory(shape, monkeypatch, fill_memory):
    monkeypatch.setattr(launch, "LANES", 4)  # so that several programs have sums to keep
    x, dy, own = (
        numbers(shape, HALF),
        numbers(shape, HALF, seed=3),
        parameters("erf", shape[1:2], HALF, "alpha bias"),
    )

    def once() -> list[Tensor]:
        behind = len(shape) - 2
        return [fused.forward(x, own, "erf", behind), *fused.backward(dy, x, own, "erf", behind, EVERY)]

    first = once()
    for value in (1.5, -torch.inf):
        fill_memory(value)
        for made, again in zip(first, once(), strict=True):
            assert torch.equal(bits(made), bits(again))


def test_no_more_than_is_asked_for():
    x, dy, own = numbers((9, 20), HALF), numbers((9, 20), HALF, seed=3), parameters("erf", (20,), HALF, ALL)
    both = fused.backward(dy, x, own, "erf", 0, EVERY)
    of_input = fused.backward(dy, x, own, "erf", 0, OF_INPUT)
    assert of_input[1:] == (None,) * 4
    of_parameters = fused.backward(dy, x, own, "erf", 0, OF_PARAMETERS)
    assert of_parameters.x is None
    held = truth("erf", x, own, 0, dy)
    for name, made in both._asdict().items():
        again = getattr(of_input if name == "x" else of_parameters, name)
        agree(again, held[name], "erf", HALF, name)
        assert GPU or torch.equal(made, again)  # a GPU's compiler may add in another order where it has less to do
    assert fused.backward(dy, x, own, "erf", 0, [False] * 5) == (None,) * 5


def test_inputs_stay_as_they_are():
    x, dy, own = numbers((9, 20)), numbers((9, 20), seed=3), parameters("tanh", (20,), each=ALL)
    before = [tensor.clone() for tensor in (x, dy, *vars(own).values())]
    hold("tanh", x, own, dy=dy)
    for tensor, copy in zip((x, dy, *vars(own).values()), before, strict=True):
        assert torch.equal(tensor, copy)
