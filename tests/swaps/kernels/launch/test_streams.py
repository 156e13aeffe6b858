"""Streams, graphs and the order of programs: there is none of it in the interpreter."""

import pytest
import torch
from torch import Tensor
from truth import BY_NUMPY, DEVICE, EVERY, agree, numbers, on_a_gpu, parameters, truth

from normscope.runtime import launches
from normscope.swaps.kernels import launch
from normscope.swaps.kernels.eager import Parameters

pytestmark = on_a_gpu
ALL = "alpha shift weight bias"
HALF = torch.bfloat16
LONG = 200_000_000  # clocks: a tenth of a second
SHAPES = {  # x, the channels' sizes, axes behind them
    "rows": lambda seed: (numbers((3001, 768), HALF, seed), (768,), 0),
    "odd rows": lambda seed: (numbers((1999, 37), seed=seed), (37,), 0),
    "images": lambda seed: (numbers((16, 24, 14, 14), HALF, seed), (24,), 2),
    # The strides of what it is cut out of are no layout's: it is copied first.
    "cut out": lambda seed: (numbers((4, 6, 8, 12, 5), HALF, seed)[:, 1:, 1:, :, 1:], (12,), 1),
}
each_curve = pytest.mark.parametrize("curve", BY_NUMPY)
each_shape = pytest.mark.parametrize("name", SHAPES)


def given(name: str, curve: str, seed: int = 0) -> tuple[Tensor, Tensor, Parameters, int]:
    x, shape, behind = SHAPES[name](seed)
    dy, _, _ = SHAPES[name](seed + 1)
    return x, dy, parameters(curve, shape, x.dtype, ALL), behind


def all_of(x: Tensor, dy: Tensor, own: Parameters, curve: str, behind: int) -> list[Tensor]:
    """Compute everything: the first time by Triton's own launches, and then by a plan of them."""
    return [launch.forward(x, own, curve, behind), *launch.backward(dy, x, own, curve, behind, EVERY)]


def same_bits(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )


@each_curve
@each_shape
def test_the_bits_of_tritons_own_launches_every_time_and_beside_other_work(name, curve, monkeypatch):
    x, dy, own, behind = given(name, curve)
    with monkeypatch.context() as patch:
        patch.setattr(launches, "_watched", lambda: True)
        first = all_of(x, dy, own, curve, behind)
    assert all(same_bits(first, all_of(x, dy, own, curve, behind)) for _ in range(20))
    assert name == "cut out" or any(launches._plans.values())
    beside = torch.cuda.Stream()
    other = torch.randn(2048, 2048, device=DEVICE)
    beside.wait_stream(torch.cuda.current_stream())
    for _ in range(10):
        with torch.cuda.stream(beside):
            for _ in range(5):
                other = (other @ other).tanh()
        assert same_bits(first, all_of(x, dy, own, curve, behind))
    torch.cuda.synchronize()


@each_shape
def test_another_stream_than_the_default_one(name):
    """What it is given there comes late: whoever did not wait for it would see NaN."""
    x, dy, own, behind = given(name, "tanh")
    expected = all_of(x, dy, own, "tanh", behind)
    late_x, late_dy, _, _ = given(name, "tanh")  # of the same strides, which a clone has not
    late_x.fill_(torch.nan)
    late_dy.fill_(torch.nan)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        late_x.copy_(x)
        late_dy.copy_(dy)
        made = all_of(late_x, late_dy, own, "tanh", behind)
    stream.synchronize()
    assert same_bits(expected, made)


@each_shape
def test_nothing_waits_for_the_gpu(name):
    """Neither pass reads anything back: both return while what was given before still runs."""
    x, dy, own, behind = given(name, "erf")
    all_of(x, dy, own, "erf", behind)
    torch.cuda.synchronize()
    torch.cuda._sleep(10 * LONG)
    before = torch.cuda.Event()
    before.record()
    all_of(x, dy, own, "erf", behind)
    assert not before.query()
    torch.cuda.synchronize()


@each_curve
@each_shape
def test_replayed_from_a_graph_with_other_numbers(name, curve):
    x, dy, own, behind = given(name, curve)
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        for _ in range(2):
            all_of(x, dy, own, curve, behind)
    torch.cuda.current_stream().wait_stream(warm)
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(forward):
        y = launch.forward(x, own, curve, behind)
    with torch.cuda.graph(backward):
        gradients = launch.backward(dy, x, own, curve, behind, EVERY)
    for seed in (10, 20):
        new_x, new_dy, _, _ = given(name, curve, seed)
        x.copy_(new_x)
        dy.copy_(new_dy)
        y.fill_(torch.nan)
        for made in gradients:
            made.fill_(torch.nan)
        forward.replay()
        backward.replay()
        torch.cuda.synchronize()
        assert same_bits([y, *gradients], all_of(new_x, new_dy, own, curve, behind))
        held = truth(curve, new_x, own, behind, new_dy, additions=64)
        for quantity, made in {"y": y, **gradients._asdict()}.items():
            agree(made, held[quantity], curve, x.dtype, quantity)
