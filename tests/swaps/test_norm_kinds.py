"""Every kind of norm: what takes its place computes gain · f(αx) + offset over the same channels, and activates."""

import math

import pytest
import torch
import torch.nn.functional as F
from timm.layers import BatchNormAct2d, GroupNormAct, LayerNorm2d, LayerNormAct
from torch import nn
from torchaudio.models.wav2vec2.components import LayerNorm as TransposedLayerNorm
from transformers.models.bit.modeling_bit import BitConfig, BitGroupNormActivation
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

import normscope
from normscope.swaps.pointwise import PointwiseFunction, RMSNorm
from normscope.swaps.replace import swap

WIDTH = 16


def trained(module):
    """Give a norm weights, biases and running statistics as training leaves them."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, part in [*module.named_parameters(), *module.named_buffers()]:
            if part.is_floating_point():
                part.copy_(("bias" not in name) + 0.3 * torch.randn(part.shape, generator=generator))
            if "running_var" in name:
                part.abs_()
    return module.eval()


def seen_by(model, *shape):
    return normscope.capture(model, [2 * torch.randn(shape, generator=torch.Generator().manual_seed(1))])


class Normalized(nn.Module):
    """RMSNorm as written with F.normalize."""

    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return F.normalize(x, dim=-1) * math.sqrt(WIDTH) * self.g


class UnitNorm(nn.Module):
    """y/√d and no weight."""

    def forward(self, x):
        return F.normalize(x, dim=-1)


class OwnGroupNorm(nn.GroupNorm):
    """A subclass in no table, with a forward of its own."""

    def forward(self, hidden_states):
        return super().forward(hidden_states) * 1.0


class OwnLayerNorm2d(nn.Module):
    """One in no table that takes pictures alone."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH)), 1e-6

    def forward(self, x):
        _, channels, _, _ = x.shape  # four axes and no others
        return F.layer_norm(x.permute(0, 2, 3, 1), (channels,), self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


def affine(gain, offset=None, ndim=None, then=None):
    """gain · tanh(x/2) + offset, along the last axis, or axis 1 of ``ndim``."""

    def expected(x):
        shape = [-1] + [1] * (0 if ndim is None else ndim - 2)
        y = torch.tanh(x.double() / 2) * gain.double().view(shape)
        y = y if offset is None else y + offset.double().view(shape)
        return (y if then is None else then(y)).float()

    return expected


def of(module, ndim=None, then=None, unit=0):
    return affine(unit + module.weight, getattr(module, "bias", None), ndim, then)


PICTURE = (2, WIDTH, 5, 3)
ONES = torch.ones(WIDTH)
NORMS = {
    "LayerNorm": (lambda: nn.LayerNorm(WIDTH), (2, 5, WIDTH), of),
    "LayerNorm without bias": (lambda: nn.LayerNorm(WIDTH, bias=False), (2, 5, WIDTH), of),
    "LayerNorm of DiT": (lambda: nn.LayerNorm(WIDTH, elementwise_affine=False), (2, 5, WIDTH), lambda m: affine(ONES)),
    "RMSNorm": (lambda: nn.RMSNorm(WIDTH), (2, 5, WIDTH), of),
    "GemmaRMSNorm": (lambda: GemmaRMSNorm(WIDTH), (2, 5, WIDTH), lambda m: of(m, unit=1)),
    "LlamaRMSNorm": (lambda: LlamaRMSNorm(WIDTH), (2, 5, WIDTH), of),
    "T5LayerNorm": (lambda: T5LayerNorm(WIDTH), (2, 5, WIDTH), of),
    "F.normalize": (Normalized, (2, 5, WIDTH), lambda m: affine(m.g)),
    "UnitNorm": (UnitNorm, (2, 5, WIDTH), lambda m: affine(ONES / math.sqrt(WIDTH))),
    "TransposedLayerNorm": (lambda: TransposedLayerNorm(WIDTH), (2, WIDTH, 7), lambda m: of(m, 3)),
    "LayerNorm2d": (lambda: LayerNorm2d(WIDTH), PICTURE, lambda m: of(m, 4)),
    "OwnLayerNorm2d": (OwnLayerNorm2d, PICTURE, lambda m: of(m, 4)),
    "LayerNormAct": (lambda: LayerNormAct(WIDTH), (2, 5, WIDTH), lambda m: of(m, then=torch.relu)),
    "GroupNorm": (lambda: nn.GroupNorm(4, WIDTH), PICTURE, lambda m: of(m, 4)),
    "OwnGroupNorm": (lambda: OwnGroupNorm(4, WIDTH), PICTURE, lambda m: of(m, 4)),
    "GroupNormAct": (lambda: GroupNormAct(WIDTH, 4), PICTURE, lambda m: of(m, 4, torch.relu)),
    "BitGroupNormActivation": (
        *(lambda: BitGroupNormActivation(BitConfig(num_groups=4), WIDTH), PICTURE, lambda m: of(m, 4, torch.relu)),
    ),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(WIDTH, affine=True), (2, WIDTH, 7), lambda m: of(m, 3)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(WIDTH), (9, WIDTH), of),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(WIDTH), PICTURE, lambda m: of(m, 4)),
    "BatchNormAct2d": (lambda: BatchNormAct2d(WIDTH), PICTURE, lambda m: of(m, 4, torch.relu)),
}


@pytest.mark.parametrize("name", NORMS)
def test_every_kind_of_norm_in_its_place(name):
    make, shape, truth = NORMS[name]
    norm = trained(make())
    model = nn.Sequential(nn.Identity(), norm)
    seen = seen_by(model, *shape)
    x = torch.randn(shape)
    with swap(model, "tanh", seen, init="paper"):
        assert isinstance(model[1], PointwiseFunction)
        output = model(x)
    # Float32's rounding of four operations, of numbers around one.
    torch.testing.assert_close(output, truth(norm)(x), rtol=1e-6, atol=1e-6)
    assert output.is_contiguous()


def test_an_input_without_an_axis_of_samples():
    model = nn.Sequential(nn.Identity(), trained(nn.InstanceNorm1d(WIDTH, affine=True)))
    x = torch.randn(WIDTH, 7)
    with swap(model, "tanh", seen_by(model, 2, WIDTH, 7), init="paper"):
        torch.testing.assert_close(model(x), of(model[1])(x.T).T, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["RMSNorm", "LlamaRMSNorm", "T5LayerNorm", "GemmaRMSNorm", "F.normalize", "UnitNorm"])
def test_rmsnorm_in_the_place_of_one_is_the_same(name):
    make, shape, _ = NORMS[name]
    norm = trained(make())
    model, x = nn.Sequential(norm), torch.randn(shape)
    expected = norm(x)
    with swap(model, "rmsnorm", seen_by(model, *shape)):
        assert isinstance(model[0], RMSNorm)
        torch.testing.assert_close(model(x), expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(model[0](hidden_states=x), model[0](x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 5, WIDTH), PICTURE])
def test_rmsnorm_is_a_layer_norm_of_tokens_without_a_mean(shape, dtype):
    """With the mean taken away before, nothing is lost: LayerNorm and RMSNorm are one (arXiv 1910.07467)."""
    axis = 1 if shape == PICTURE else -1
    norm = trained(LayerNorm2d(WIDTH) if axis == 1 else nn.LayerNorm(WIDTH)).to(dtype)
    model = nn.Sequential(norm)
    x = torch.randn(shape)
    x = (x - x.mean(axis, keepdim=True)).to(dtype)
    expected = norm(x)
    with swap(model, "rmsnorm", normscope.capture(model, [x])):
        output = model(x)
        assert output.dtype == dtype
        # The mean that bfloat16's rounding leaves is a unit in its last place.
        unit = 1e-6 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(output, expected, rtol=2 * unit, atol=2 * unit)
