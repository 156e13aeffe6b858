"""Forward and every gradient, of each curve in each dtype, with parameters of every shape and dtype."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from truth import BY_NUMPY, hold, numbers, parameters

from normscope.swaps.kernels import launch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALL = "alpha shift weight bias"
KINDS = [
    (ALL, ""), ("weight bias", "shift"), ("shift bias", ""),
    ("alpha weight", "bias"), ("alpha", "shift"), ("", "shift bias"),
]  # fmt: skip

each_curve = pytest.mark.parametrize("curve", BY_NUMPY)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@each_curve
@pytest.mark.parametrize("kind", range(len(KINDS)), ids=lambda kind: " without ".join(KINDS[kind]))
def test_whatever_is_one_number_a_channel_and_whatever_there_is_not(curve, kind):
    """Every curve and every dtype meets every kind, and each other, if not all three at once."""
    dtype = DTYPES[(kind + list(BY_NUMPY).index(curve)) % len(DTYPES)]
    hold(curve, numbers((5, 24), dtype), parameters(curve, (24,), dtype, *KINDS[kind]))


@each_curve
@pytest.mark.parametrize("other", [(0, 1), (1, 0), (2, 1), (1, 2)], ids=lambda at: " ".join(str(DTYPES[i]) for i in at))
def test_parameters_of_another_dtype(curve, other):
    dtype, of_parameters = (DTYPES[i] for i in other)
    hold(curve, numbers((6, 19), dtype), parameters(curve, (19,), of_parameters, ALL))


@each_dtype
@pytest.mark.parametrize("behind", [0, 1, 2])
def test_channels_on_one_axis_or_on_two(dtype, behind):
    x = numbers((2, 3, 4, 5, 2)[: 3 + behind], dtype)
    hold("isru", x, parameters("isru", (4,), dtype), behind)
    hold("isru", x, parameters("isru", (3, 4), dtype, ALL), behind)


@each_curve
@each_dtype
def test_several_tiles_and_programs(curve, dtype):
    hold(curve, numbers((40, 136), dtype), parameters(curve, (136,), dtype, ALL))


@each_dtype
def test_so_many_tiles_that_programs_take_several(dtype, monkeypatch):
    monkeypatch.setattr(launch, "LANES", 2)
    monkeypatch.setattr(launch, "BACKWARD", replace(launch.BACKWARD, per_multiprocessor=1))
    hold("tanh", numbers((70, 12), dtype), parameters("tanh", (12,), dtype))
    hold("tanh", numbers((2, 4, 26), dtype), parameters("tanh", (4,), dtype, ALL), behind=1)


def test_parameters_with_strides():
    own = parameters("erf", (48,), each=ALL)
    hold("erf", numbers((9, 24)), own.each(lambda part: part[::2]))
    hold("isru", numbers((9, 24)), own.each(lambda part: part[:1].expand(24)))
    hold("tanh", numbers((5, 4, 6)), parameters("tanh", (6, 4), each=ALL).each(Tensor.t))
