"""Forward and every gradient, of each curve in each dtype, with parameters of every shape and dtype."""

import pytest
import torch
from truth import BY_NUMPY, hold, numbers, parameters

from normscope.swaps.kernels import launch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALL = "alpha shift weight bias"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("curve", BY_NUMPY)
class TestEachCurveInEachDtype:
    @pytest.mark.parametrize("without", ["", "shift", "bias", "shift bias"])
    @pytest.mark.parametrize("each", ["weight bias", ALL, "alpha weight bias", "shift weight", "alpha", "bias", ""])
    def test_whatever_is_one_number_a_channel_and_whatever_there_is_not(self, curve, dtype, each, without):
        hold(curve, numbers((5, 24), dtype), parameters(curve, (24,), dtype, each, without))

    def test_parameters_of_another_dtype(self, curve, dtype):
        for other in DTYPES:
            hold(curve, numbers((6, 19), dtype), parameters(curve, (19,), other, ALL))

    @pytest.mark.parametrize("behind", [0, 1, 2])
    def test_channels_on_an_axis_of_one_or_two(self, curve, dtype, behind):
        hold(curve, numbers((3, 4, 6, 5, 2)[: 3 + behind], dtype), parameters(curve, (6,), dtype, ALL), behind)
        hold(curve, numbers((3, 4, 6, 5, 2)[: 3 + behind], dtype), parameters(curve, (4, 6), dtype, ALL), behind)

    def test_rows_of_several_tiles_and_tiles_of_several_programs(self, curve, dtype):
        hold(curve, numbers((150, 300), dtype), parameters(curve, (300,), dtype, ALL))
        hold(curve, numbers((3, 4100), dtype), parameters(curve, (4100,), dtype))

    def test_small_tiles(self, curve, dtype, monkeypatch):
        monkeypatch.setattr(launch, "LANES", 1)
        hold(curve, numbers((37, 21), dtype), parameters(curve, (21,), dtype))
        hold(curve, numbers((2, 5, 3, 11), dtype), parameters(curve, (5,), dtype, ALL), behind=2)


def test_parameters_with_strides():
    own = parameters("erf", (48,), each=ALL)
    hold("erf", numbers((9, 24)), own.each(lambda part: part[::2]))
    square = parameters("tanh", (6, 4), each=ALL).each(torch.t)
    hold("tanh", numbers((5, 4, 6)), square)
    one = own.each(lambda part: part[:1].expand(24))
    hold("isru", numbers((9, 24)), one)
