"""Layers as matrices between rows, against what torch's own modules give."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from normscope.swaps.calibrate import linear_layers
from normscope.swaps.calibrate.linear_layers import MOST_FEATURES, LinearLayer

ROUNDING = {"rtol": 1e-4, "atol": 1e-5}  # float32 sums of up to a hundred products, in another order

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d}


def rows_given(layer, x, valid=None):
    h = layer.inputs(x, valid)
    by_group = layer.matrix.unflatten(0, (h.shape[1] if h.ndim == 3 else 1, -1))
    given = torch.einsum("ngf,gcf->ngc", h.reshape(len(h), *by_group.shape[::2]), by_group).flatten(1)
    return given if layer.offset is None else given + layer.offset


@settings(max_examples=40, deadline=None)
@given(
    axes=st.sampled_from([1, 2]),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    dilation=st.integers(1, 2),
    padding=st.integers(0, 2),
    mode=st.sampled_from(["zeros", "replicate", "circular", "reflect"]),
    bias=st.booleans(),
    groups=st.sampled_from([1, 2, 6]),
)
def test_a_convolution_is_a_matrix_between_rows(axes, kernel, stride, dilation, padding, mode, bias, groups):
    """Its features are what it gives with weights of which one is 1, and all others 0."""
    torch.manual_seed(0)
    options = {"stride": stride, "dilation": dilation, "padding": padding, "padding_mode": mode, "bias": bias}
    module = CONVOLUTIONS[axes](6, 12, kernel, groups=groups, **options).requires_grad_(False)
    layer, x = LinearLayer.of(module), torch.randn(2, 6, *[8] * axes)
    torch.testing.assert_close(rows_given(layer, x), layer.outputs(x, module(x)), **ROUNDING)
    assert layer.reason == "" and layer.outputs(x, module(x)).shape[1] == 12
    features = layer.inputs(x).reshape(-1, groups, layer.matrix.shape[1])
    if module.bias is not None:
        module.bias.zero_()
    for feature in range(layer.matrix.shape[1]):
        module.weight.flatten(1).copy_(torch.eye(layer.matrix.shape[1])[feature].expand(12, -1))
        given = layer.outputs(x, module(x)).unflatten(1, (groups, -1))
        torch.testing.assert_close(given, features[:, :, feature, None].expand_as(given), rtol=0, atol=0)


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_padding_by_name(padding):
    torch.manual_seed(0)
    module = nn.Conv1d(3, 5, 4, padding=padding).requires_grad_(False)
    layer, x = LinearLayer.of(module), torch.randn(2, 3, 9)
    torch.testing.assert_close(rows_given(layer, x), layer.outputs(x, module(x)), **ROUNDING)


def test_only_valid_frames_are_rows():
    torch.manual_seed(0)
    module = nn.Conv1d(3, 5, 3, padding=1).requires_grad_(False)
    x, valid = torch.randn(2, 3, 6), torch.tensor([[True] * 6, [True] * 2 + [False] * 4])
    layer = LinearLayer.of(module)
    assert layer.inputs(x, valid).shape == (8, 9)
    torch.testing.assert_close(rows_given(layer, x, valid), module(x).mT[valid], **ROUNDING)


@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_is_the_matrix_of_its_queries_keys_and_values(batch_first):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, batch_first=batch_first).requires_grad_(False)
    module.in_proj_bias.normal_()
    layer, x = LinearLayer.of(module), torch.randn(2, 5, 8)
    wanted = nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias)
    of_samples = wanted if batch_first else wanted.transpose(0, 1)
    torch.testing.assert_close(layer.outputs(x, None), of_samples.reshape(-1, 24), **ROUNDING)
    torch.testing.assert_close(rows_given(layer, x), layer.outputs(x, None), **ROUNDING)


def test_a_flat_layer_of_transformers_is_one_whose_weight_is_turned():
    flat = pytest.importorskip("transformers.pytorch_utils").Conv1D(3, 5)
    layer, x = LinearLayer.of(flat), torch.randn(2, 5)
    torch.testing.assert_close(rows_given(layer, x), flat(x), **ROUNDING)


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 3), lambda: nn.Conv1d(2, 3, 2), lambda: nn.Conv2d(4, 3, 1)])
def test_what_is_put_is_what_it_computes_with(make):
    module = make().requires_grad_(False)
    layer = LinearLayer.of(module)
    before = layer.matrix.clone()
    matrix, offset = torch.randn(before.shape), torch.randn(3)
    layer.put(matrix, offset, torch.tensor([True, False, True]))
    assert torch.equal(layer.matrix[[0, 2]], matrix[[0, 2]]) and torch.equal(layer.matrix[1], before[1])
    assert torch.equal(module.bias[[0, 2]], offset[[0, 2]]) and module.bias[1] != offset[1]


@pytest.mark.parametrize("room", [1, 3 * 4 * 3 * 6, 10**9])
def test_pieces_are_the_whole(monkeypatch, room):
    monkeypatch.setattr(linear_layers, "MOST_NUMBERS", room)
    valid = torch.arange(6) < torch.tensor([6, 2, 5, 1, 6])[:, None]
    for module in (nn.Conv1d(4, 4, 3, padding=1, groups=4), nn.Linear(6, 2)):
        layer, x = LinearLayer.of(module), torch.randn(5, 4, 6)
        pieces = list(layer.inputs_in_pieces(x, valid))
        assert torch.equal(torch.cat(pieces), layer.inputs(x, valid))
        assert len(pieces) == (1 if room > 10**6 or isinstance(module, nn.Linear) else 5 if room == 1 else 2)


def test_what_is_too_wide_says_so():
    reasons = {
        nn.Conv1d(8, 8, 3, groups=8): "",
        nn.Conv1d(1024, 1024, 128, groups=16): f"it is a convolution over 8192 numbers, more than {MOST_FEATURES}",
        nn.Conv2d(512, 8, 3): f"it is a convolution over 4608 numbers, more than {MOST_FEATURES}",
        nn.Conv3d(2, 2, 2): "it is a convolution over three axes",
        nn.Conv3d(2, 2, 1): "",
        nn.MultiheadAttention(
            8, 2, kdim=4
        ): "its queries, keys and values have weights of their own, which torch uses without calling a module",
    }
    assert {module: LinearLayer.of(module).reason for module in reasons} == reasons
    assert LinearLayer.of(nn.GELU()) is None
