"""docs/kernels.md says how often plain torch moves the bytes that the kernels move; this counts them."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from normscope.fits.curves.known import CURVES
from normscope.swaps.kernels import eager
from normscope.swaps.kernels.eager import Parameters

PAGE = (Path(__file__).parents[3] / "docs" / "kernels.md").read_text(encoding="utf-8")
TOKENS, CHANNELS = 64, 48
MOVES_NOTHING = {"view", "reshape", "_unsafe_view", "expand", "detach", "alias", "unsqueeze", "transpose", "t"}


class Moved(TorchDispatchMode):
    """Count the bytes of every large tensor that an operation reads or writes."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ not in MOVES_NOTHING:
            for tensor in (*args, result):
                if isinstance(tensor, torch.Tensor) and tensor.numel() >= TOKENS * CHANNELS:
                    self.bytes += tensor.nbytes
        return result


def times_the_least(curve, dtype):
    """Bytes of the forward and of the backward pass, over 2·M·N·b and 3·M·N·b."""
    x, dy = torch.randn(2, TOKENS, CHANNELS, dtype=dtype)
    x.requires_grad_()
    shift = nn.Parameter(torch.zeros(1)) if CURVES[curve].shifted else None
    alpha, weight, bias = (nn.Parameter(torch.ones(size)) for size in (1, CHANNELS, CHANNELS))
    with Moved() as forward:
        y = eager.pointwise(x, CURVES[curve].function, Parameters(alpha, shift, weight, bias), behind=0)
    with Moved() as backward:
        y.backward(dy)
    return forward.bytes / (2 * x.nbytes), backward.bytes / (3 * x.nbytes)


@pytest.mark.parametrize(("name", "curve"), [("DyT", "tanh"), ("DyISRU", "isru"), ("Derf", "derf")])
def test_plain_torch_moves_as_many_bytes_as_the_page_says(name, curve):
    (row,) = re.findall(rf"^\| {name} \|(.*)\|$", PAGE, re.MULTILINE)
    counted = [times for dtype in (torch.bfloat16, torch.float32) for times in times_the_least(curve, dtype)]
    assert [cell.strip() for cell in row.split("|")] == [f"{times:.1f}×" for times in counted]
