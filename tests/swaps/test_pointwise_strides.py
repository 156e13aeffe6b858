"""A function that took a norm's place returns tensors that lie in memory as the norm's did."""

import copy
import itertools

import pytest
import torch
from networks import loaded_from
from torch import nn

import normscope
from normscope.swaps.calibrate.calibrate import swap
from normscope.swaps.store.store import restored

WIDTH = 6
VECTORS, PICTURES = (3, 5, WIDTH), (3, WIDTH, 4, 5)


class Elementwise(nn.RMSNorm):
    """An RMSNorm as transformers write it, whose output has its input's strides."""

    def __init__(self):
        super().__init__(WIDTH, eps=1e-6)

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


class Functional(nn.Module):
    """A LayerNorm as nanoGPT writes it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, input):
        return nn.functional.layer_norm(input, self.weight.shape, self.weight, None, 1e-5)


NORMS = {
    "LayerNorm": (lambda: nn.LayerNorm(WIDTH), VECTORS),
    "LayerNorm of pictures": (lambda: nn.LayerNorm(WIDTH), (3, 4, 5, WIDTH)),
    "LayerNorm of two axes": (lambda: nn.LayerNorm((5, WIDTH)), (3, 4, 5, WIDTH)),
    "LayerNorm without weights": (lambda: nn.LayerNorm(WIDTH, elementwise_affine=False), VECTORS),
    "RMSNorm": (lambda: nn.RMSNorm(WIDTH), VECTORS),
    "Elementwise": (Elementwise, VECTORS),
    "Functional": (Functional, VECTORS),
    "GroupNorm": (lambda: nn.GroupNorm(2, WIDTH), PICTURES),
    "GroupNorm of vectors": (lambda: nn.GroupNorm(2, WIDTH), (3, WIDTH, 5)),
    "GroupNorm of volumes": (lambda: nn.GroupNorm(2, WIDTH), (3, WIDTH, 2, 4, 5)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(WIDTH), (3, WIDTH, 5)),
    "BatchNorm1d of vectors": (lambda: nn.BatchNorm1d(WIDTH), (3, WIDTH)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(WIDTH), PICTURES),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(WIDTH), (3, WIDTH, 2, 4, 5)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(WIDTH, affine=True), PICTURES),
}


def layouts(shape):
    """Inputs of one shape: each order of up to four axes in memory, with and without gaps, and expanded."""
    axes = range(len(shape))
    orders = itertools.permutations(axes) if len(shape) < 5 else [axes, axes[::-1], (0, 2, 3, 4, 1), (0, 1, 3, 2, 4)]
    for order in orders:
        back = torch.tensor(order).argsort().tolist()
        yield torch.randn([shape[axis] for axis in order]).permute(back)
        yield torch.randn([2 * shape[axis] for axis in order]).permute(back)[tuple(map(slice, shape))]
    yield torch.randn(1, *shape[1:]).expand(shape)


def strides(module, shape):
    return [module(x).stride() for x in layouts(shape)]


@pytest.mark.parametrize("name", NORMS)
def test_outputs_have_the_strides_of_the_norm(name):
    make, shape = NORMS[name]
    model = nn.Sequential(nn.Identity(), make()).eval()
    expected = strides(model, shape)
    with swap(model, "tanh", normscope.capture(model, [torch.randn(shape)]), init="paper"):
        assert strides(model, shape) == expected  # in plain torch, as gradients are wanted
        with torch.no_grad():
            assert strides(model, shape) == expected  # by the compiled loop
            assert all(torch.equal(model(x), model(x.contiguous())) for x in layouts(shape))


@pytest.mark.slow  # torch.compile
@pytest.mark.parametrize("name", ["LayerNorm", "Elementwise", "GroupNorm"])
def test_compiled_restored_and_standalone_outputs_have_them_too(name, tmp_path):
    make, shape = NORMS[name]
    model = nn.Sequential(nn.Identity(), make()).eval()
    fresh, expected = copy.deepcopy(model), strides(model, shape)
    swap(model, "tanh", normscope.capture(model, [torch.randn(shape)]), init="paper")
    compiled = torch.compile(model, backend="aot_eager", dynamic=False)
    torch._dynamo.reset()
    inputs = list(layouts(shape))[::5]
    assert [compiled(x).stride() for x in inputs] == [fresh(x).stride() for x in inputs]
    normscope.save_swapped(model, tmp_path / "swap")
    assert strides(loaded_from(tmp_path / "swap").swapped(copy.deepcopy(fresh)), shape) == expected
    restored(fresh, tmp_path / "swap")
    assert strides(fresh, shape) == expected
