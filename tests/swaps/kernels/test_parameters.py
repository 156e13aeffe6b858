"""A layout addresses the elements that the tensors have, in their channels; tiles are powers of two that fit."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from normscope.swaps.kernels.eager import Layout, layout_of


@st.composite
def views(draw, shape: tuple[int, ...]) -> Tensor:
    """Draw a tensor of some shape: permuted in memory, cut out of a larger one, expanded."""
    order = draw(st.permutations(range(len(shape))))
    gaps = [draw(st.sampled_from([0, 0, 0, 1, 3])) for _ in shape]
    steps = [draw(st.sampled_from([1, 1, 1, 2])) for _ in shape]
    expanded = [draw(st.sampled_from([False, False, False, True])) for _ in shape]
    whole = [
        1 if wide else size * step + gap for size, gap, step, wide in zip(shape, gaps, steps, expanded, strict=True)
    ]
    tensor = torch.empty([whole[axis] for axis in order]).permute(tuple(np.argsort(order).tolist()))
    for axis, (size, gap, step) in enumerate(zip(shape, gaps, steps, strict=True)):
        if not expanded[axis]:
            tensor = tensor[(slice(None),) * axis + (slice(gap, gap + size * step, step),)]
    return tensor.expand(shape)


@st.composite
def several(draw) -> tuple[list[Tensor], int, int]:
    """Draw tensors of one shape, and which of their axes number channels."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=0, max_size=5)))
    tensors = draw(st.lists(views(shape), min_size=1, max_size=3))
    end = draw(st.integers(0, len(shape)))
    return tensors, draw(st.integers(max(0, end - 2), end)), end


def by_the_tensors(tensors: list[Tensor], begin: int, end: int) -> np.ndarray:
    """Return a row for each element, sorted: its channel, and where it is in each tensor's memory."""
    shape = tensors[0].shape
    before, channels = math.prod(shape[:begin]), math.prod(shape[begin:end])
    channel = torch.arange(channels).reshape(1, channels, 1).expand(before, channels, math.prod(shape[end:]))
    places = []
    for tensor in tensors:
        reach = sum((size - 1) * stride for size, stride in zip(shape, tensor.stride(), strict=True))
        places.append(torch.arange(reach + 1).as_strided(shape, tensor.stride()))
    return in_order([channel, *places])


def by_the_layout(layout: Layout) -> np.ndarray:
    """Return the same, as the kernels go through it."""
    sizes = (layout.outers, layout.others, layout.channels)
    outer, other, channel = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
    places = [outer * own.outer + other * own.other + channel * own.channel for own in layout.strides]
    return in_order([channel, *places])


def in_order(columns: list[Tensor]) -> np.ndarray:
    rows = np.stack([column.reshape(-1).numpy() for column in columns], axis=1)
    return rows[np.lexsort(rows.T[::-1])]


@settings(deadline=None)
@given(several())
def test_a_layout_addresses_the_elements_of_the_tensors_in_their_channels(drawn):
    tensors, begin, end = drawn
    layout = layout_of(tensors, begin, end)
    if layout is None:
        assert not all(tensor.is_contiguous() for tensor in tensors)
        assert layout_of([tensor.contiguous() for tensor in tensors], begin, end) is not None
    else:
        np.testing.assert_array_equal(by_the_layout(layout), by_the_tensors(tensors, begin, end))
        assert layout.channels > 1 or not layout.channels_in_columns


ELSEWHERE = torch.empty(2, 3, 4, 5, 8)


@pytest.mark.parametrize(
    ("tensor", "begin", "end", "sizes"),
    [
        (ELSEWHERE, 4, 5, (1, 120, 8)),
        (ELSEWHERE, 3, 5, (1, 24, 40)),
        (ELSEWHERE, 0, 1, (1, 480, 2)),
        (ELSEWHERE, 1, 2, (2, 160, 3)),
        (ELSEWHERE[..., 1:], 4, 5, (1, 120, 7)),
        (ELSEWHERE[..., 1:], 1, 2, None),
        (ELSEWHERE[:, 1:], 4, 5, (2, 40, 8)),
        (ELSEWHERE[:, 1:, 1:], 4, 5, None),
        (ELSEWHERE[0, 0, 0].T, 0, 1, (1, 5, 8)),
        (ELSEWHERE.movedim(4, 1), 1, 2, (1, 120, 8)),
        (ELSEWHERE.mT, 3, 5, None),
        (ELSEWHERE[:1, :1, :1, :1, :1], 4, 5, (1, 1, 1)),
        (ELSEWHERE[0, 0, 0, 0, 0], 0, 0, (1, 1, 1)),
        (ELSEWHERE[0, 0, 0, :, :1].expand(5, 8), 1, 2, (1, 5, 8)),
    ],
)
def test_strides_that_span_axes_make_one_of_them(tensor, begin, end, sizes):
    layout = layout_of([tensor], begin, end)
    assert (layout and (layout.outers, layout.others, layout.channels)) == sizes


@settings(deadline=None)  # importing Triton takes a while
@given(
    st.integers(1, 2**40) | st.integers(1, 3000), st.integers(1, 2**40) | st.integers(1, 3000),
    st.integers(5, 14), st.integers(0, 9),
)  # fmt: skip
def test_a_tile_is_as_many_elements_as_it_may_be_and_no_more(width, height, elements, smaller):
    launch = pytest.importorskip("normscope.swaps.kernels.launch", reason="Triton is made for Linux alone")
    elements, most = 2**elements, 2 ** max(1, elements - smaller)
    rows, columns = launch.tile(width, height, elements, most)
    width = max(width, 2)  # two bfloat16 are widened together
    as_powers_of_two = 2 ** (width - 1).bit_length() * 2 ** (height - 1).bit_length()
    assert rows.bit_count() == columns.bit_count() == 1
    assert rows * columns == min(elements, as_powers_of_two)
    assert rows < 2 * height and columns < 2 * width
