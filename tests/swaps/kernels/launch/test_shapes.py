"""Forward and every gradient of each curve, in each dtype and layout, with parameters of every shape and dtype."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from truth import BY_NUMPY, DEVICE, GPU, hold, made_by_kernels, numbers, parameters

from normscope.swaps.kernels import launch

ALL = "alpha shift weight bias"
HALF = torch.bfloat16
DTYPES = (torch.float32, HALF, torch.float16)


# What comes of it: x, the sizes of the axes of its channels, how many axes are behind them.
SHAPES = {
    "one row": (numbers((1, 12)), (12,), 0),
    "one axis": (numbers((12,), HALF), (12,), 0),
    "one channel": (numbers((7, 1)), (1,), 0),
    "one channel, behind": (numbers((2, 1, 9)), (1,), 1),
    "one number": (numbers((1, 1), HALF), (1,), 0),
    "no axis": (numbers(()), (1,), 0),
    "an odd number": (numbers((3, 37), HALF), (37,), 0),
    "a multiple of 8, not of 16": (numbers((2, 200), HALF), (200,), 0),
    "rows in strides": (numbers((5, 30))[:, 3:20], (17,), 0),
    "rows in strides of whole loads": (numbers((5, 32), HALF)[:, 8:24], (16,), 0),
    "not at a multiple of 16 bytes": (numbers((5, 33), HALF)[:, 1:], (32,), 0),
    "all at 2 bytes": (numbers((161,), HALF)[1:].view(5, 32), (32,), 0),
    "tokens left out": (numbers((3, 6, 8))[:, 1:], (8,), 0),
    "tokens left out of two axes": (numbers((3, 4, 5, 8), HALF)[:, 1:, 2:], (8,), 0),
    "every other channel": (numbers((5, 24))[..., ::2], (12,), 0),
    "every other row": (numbers((10, 8), HALF)[::2], (8,), 0),
    "transposed": (numbers((9, 7)).T, (9,), 0),
    "transposed in part": (numbers((3, 8, 5), HALF).mT, (8,), 0),
    "NCHW": (numbers((2, 6, 3, 5)), (6,), 2),
    "NCHW of whole loads": (numbers((2, 3, 4, 4), HALF), (3,), 2),
    "NCHW, one pixel": (numbers((3, 8, 1, 1)), (8,), 2),
    "channels last": (numbers((2, 6, 3, 5)).contiguous(memory_format=torch.channels_last), (6,), 2),
    "channels last, cut out": (
        numbers((2, 6, 4, 5)).contiguous(memory_format=torch.channels_last)[..., 1:3, 1:],
        (6,),
        2,
    ),
    "cut out of NCHW": (numbers((2, 6, 4, 5), HALF)[:, 1:4, 1:3, ::2], (3,), 2),
    "NCL": (numbers((2, 7, 11), HALF), (7,), 1),
    "expanded rows": (numbers((1, 16), HALF).expand(6, 16), (16,), 0),
    "expanded channels": (numbers((6, 1)).expand(6, 16), (16,), 0),
    "expanded from one number": (numbers((1,)).expand(2, 3, 4), (4,), 0),
    "expanded in the middle": (numbers((2, 1, 4, 3)).expand(2, 5, 4, 3), (4,), 1),
    "rows that overlap": (numbers((20,)).as_strided((5, 8), (3, 1)), (8,), 0),
    "two axes that are one": (numbers((3, 4, 6), HALF), (4, 6), 0),
    "two axes that are not one": (numbers((3, 6, 4)).mT, (4, 6), 0),
    "axes in no order of one": (numbers((2, 3, 2, 5, 4))[:, 1:, :, 1:].permute(2, 0, 3, 1, 4), (4,), 0),
    "axes in no order of one, behind": (numbers((2, 4, 3, 5), HALF)[:, :, 1:, 1:].permute(3, 1, 0, 2), (4,), 2),
}
CURVES = list(BY_NUMPY)


def small_tiles(patch: pytest.MonkeyPatch) -> None:
    """Let a few elements fill several tiles, and a program take several of them."""
    for name, value in {"FORWARD_TILE": 16, "BACKWARD_TILE": 8, "COLUMNS": 8, "PROGRAMS": 2}.items():
        patch.setattr(launch, name, value)


@pytest.mark.parametrize("name", SHAPES)
def test_y_and_every_gradient(name):
    x, shape, behind = SHAPES[name]
    curve = CURVES[list(SHAPES).index(name) % 3]
    hold(curve, x, parameters(curve, shape, x.dtype, ALL), behind)


@pytest.mark.parametrize("name", ["rows in strides", "NCHW", "transposed", "axes in no order of one"])
def test_a_gradient_of_other_strides_than_the_input(name):
    x, shape, behind = SHAPES[name]
    own = parameters("tanh", shape, each="alpha weight")
    for dy in (x.new_tensor(0.7).expand(x.shape), numbers(x.shape[::-1], seed=4).permute(*range(x.ndim)[::-1])):
        hold("tanh", x, own, behind, dy)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (2, 0, 5), (0,)], ids=str)
def test_nothing_has_gradients_of_zero(shape):
    hold("isru", torch.ones(shape, device=DEVICE), parameters("isru", shape[-1:], HALF, "weight" if shape[-1] else ""))


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_rows_of_several_tiles(dtype):
    for width in (256, 267):
        hold("tanh", numbers((3, width), dtype), parameters("tanh", (width,), dtype, each="weight"))


@st.composite
def inputs(draw):
    """Draw a tensor that is permuted, cut out and expanded at random, with the axes of its channels."""
    sizes = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    x = numbers((*sizes,), draw(st.sampled_from([torch.float32, HALF])), seed=draw(st.integers(0, 9)))
    for axis, size in enumerate(sizes):
        begin = draw(st.integers(0, size - 1))
        x = x[(slice(None),) * axis + (slice(begin, None, draw(st.integers(1, 2))),)]
    x = x.permute(draw(st.permutations(range(x.ndim))))
    widened = [draw(st.integers(1, 5)) if size == 1 else size for size in x.shape]
    x = x.expand(widened)
    behind = draw(st.integers(0, x.ndim - 1))
    end = x.ndim - behind
    return x, tuple(x.shape[draw(st.integers(max(0, end - 2), end - 1)) : end]), behind


# On a GPU each is another six kernels to compile, and looking for the least that fails would take too long.
FEWER = {"max_examples": 8, "phases": [Phase.generate], "derandomize": True} if GPU else {"max_examples": 20}


@settings(**FEWER, deadline=None)
@given(inputs(), st.sampled_from(CURVES), st.sampled_from([ALL, "weight bias", "alpha", ""]), st.booleans())
def test_any_strides_at_all(drawn, curve, each, expanded):
    x, shape, behind = drawn
    dy = x.new_ones(()).expand(x.shape) if expanded else None
    with pytest.MonkeyPatch.context() as patch:
        small_tiles(patch)
        hold(curve, x, parameters(curve, shape, x.dtype, each), behind, dy)


# The channels, the parameters with one number per channel, and those that are absent.
KINDS = [
    (24, ALL, ""), (24, "weight bias", "shift"), (24, "shift bias", ""), (24, "alpha weight", "bias"),
    (24, "alpha", "shift"), (24, "", "shift bias"), (136, ALL, ""),
]  # fmt: skip
# Every curve meets every kind and every pair of dtypes, of x and the parameters, but not all at once.
DTYPE_PAIRS = [(dtype, dtype) for dtype in DTYPES] + [
    (DTYPES[i], DTYPES[j]) for i, j in ((0, 1), (1, 0), (2, 1), (1, 2))
]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("case", range(len(KINDS)))
def test_every_kind_of_parameter_in_every_pair_of_dtypes(curve, case):
    channels, *kind = KINDS[case]
    for dtype, of_parameters in DTYPE_PAIRS[(case + CURVES.index(curve)) % 3 :: 3]:
        hold(curve, numbers((13, channels), dtype), parameters(curve, (channels,), of_parameters, *kind))


@each_dtype
def test_so_many_tiles_that_programs_take_several(dtype, monkeypatch):
    small_tiles(monkeypatch)
    hold("tanh", numbers((70, 12), dtype), parameters("tanh", (12,), dtype))
    hold("tanh", numbers((2, 4, 26), dtype), parameters("tanh", (4,), dtype, ALL), behind=1)


def test_parameters_with_strides():
    own = parameters("erf", (48,), each=ALL)
    hold("erf", numbers((9, 24)), own.each(lambda part: part[::2]))
    hold("isru", numbers((9, 24)), own.each(lambda part: part[:1].expand(24)))
    hold("tanh", numbers((5, 4, 6)), parameters("tanh", (6, 4), each=ALL).each(torch.Tensor.t))


@pytest.mark.parametrize("shape", [(40, 24), (2, 24, 12)], ids=str)
def test_the_same_bits_whatever_was_in_memory(shape, monkeypatch, fill_memory):
    small_tiles(monkeypatch)
    x, dy = numbers(shape, HALF), numbers(shape, HALF, seed=3)
    own = parameters("erf", shape[1:2], HALF, "alpha bias")

    def results() -> list[torch.Tensor]:
        made = made_by_kernels("erf", x, own, len(shape) - 2, dy).values()
        return [tensor.contiguous().view(torch.uint8) for tensor in made]

    first = results()
    for value in (1.5, -torch.inf):
        fill_memory(value)
        assert all(map(torch.equal, first, results()))


def test_inputs_stay_as_they_are():
    x, dy, own = numbers((9, 20)), numbers((9, 20), seed=3), parameters("tanh", (20,), each=ALL)
    before = [tensor.clone() for tensor in (x, dy, *vars(own).values())]
    hold("tanh", x, own, dy=dy)
    assert all(map(torch.equal, (x, dy, *vars(own).values()), before))
