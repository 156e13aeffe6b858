"""Verification passes the norms that are known, in every dtype, and fails tables that are wrong."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from networks import network_of, numbered_samples
from timm.layers import RmsNorm2d
from torch import nn

from normscope.errors import ModelError
from normscope.inputs.batch import Batch
from normscope.norms.formulas import layer_norm, rms_norm
from normscope.norms.kinds import group_norm
from normscope.norms.recognition import kind_of, register_norm
from normscope.norms.verification import check, excess
from normscope.pairs.capture import capture, captured
from normscope.pairs.recorder import CaptureOptions


def trained(module: nn.Module, seed: int = 0) -> nn.Module:
    """Give a norm weights and biases that are neither one nor zero."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return module.eval()


class Damped(nn.LayerNorm):
    """A LayerNorm whose eps matters: its inputs are small."""

    def forward(self, x):
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


NORM = nn.LayerNorm(8)
# Normalizes over axis 1 of a square input, so that no shape tells it from the last.
SWAPPED = network_of(
    lambda self, x: self.norm(x.mT).mT, "Swapped", norm=NORM, weight=NORM.weight, bias=NORM.bias, eps=NORM.eps
)
# An RMSNorm whose weight is an offset from one.
OFFSET = network_of(
    lambda self, x: rms_norm(x.float(), self.eps)[0] * (1 + self.weight),
    "UnitOffset",
    weight=nn.Parameter(torch.full((8,), 0.3)),
    eps=1e-6,
)
FROM_ONE = {"normalize": rms_norm, "affine": lambda norm, y: y * (1 + norm.weight)}


@pytest.mark.parametrize(
    ("module", "shape", "right", "wrong"),
    [
        (SWAPPED, (2, 8, 8), {"axes": 1}, {"axes": -1}),
        (Damped(8), (2, 5, 8), {}, {"normalize": lambda rows, eps: layer_norm(rows, 0.0)}),
        (OFFSET, (2, 5, 8), FROM_ONE, {"normalize": rms_norm}),
    ],
    ids=["wrong axis", "missing eps", "weight for 1 + weight"],
)
def test_verification_passes_the_right_table_and_fails_the_wrong_one(table, module, shape, right, wrong):
    batches = [torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02]
    model = nn.Sequential(module)
    register_norm(type(module), **right)
    assert [site.name for site in capture(model, batches, verify=True).sites] == ["0"]
    register_norm(type(module), **wrong)
    with pytest.raises(ModelError, match="Verification failed at 0"):
        capture(model, batches, verify=True)
    capture(model, batches)  # without verification the table is believed


@pytest.mark.parametrize("units", [-16.9, -15.1, 15.1, 16.9])
def test_sixteen_roundings_of_float32_are_allowed(table, units):
    """y of float64 with an error of so many units in the last place of 1 + |y|, in tokens of mean zero."""

    def forward(self, x):
        y = nn.functional.layer_norm(x.double(), (64,), eps=self.eps)
        return y + units * torch.finfo(torch.float32).eps * (1 + y.abs())

    inexact = network_of(forward, "Inexact", eps=1e-5)
    register_norm(type(inexact))
    half = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    batches, model = [torch.cat([half, -half], 1)], nn.Sequential(inexact)
    if abs(units) < 16:
        capture(model, batches, verify=True)
    else:
        with pytest.raises(ModelError, match=r"by 1\.06 times what rounding explains"):
            capture(model, batches, verify=True)


VARIANTS = [
    (nn.LayerNorm((3, 16)), (4, 7, 3, 16)),
    (nn.LayerNorm(16, bias=False, eps=1e-2), (4, 16)),
    (nn.RMSNorm((3, 16), eps=1e-3), (4, 3, 16)),
    (nn.RMSNorm(16, elementwise_affine=False), (4, 16)),  # whose eps is torch's own
]


@pytest.mark.parametrize(("module", "shape"), VARIANTS, ids=lambda value: str(value))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_variants_of_torchs_norms_are_verified(module, shape, dtype):
    module = trained(module).to(dtype)
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 1e-2).to(dtype)
    assert excess(kind_of(module), module, x, module(x)) <= 1
    module.float()


@pytest.mark.parametrize(("mean", "sigma"), [(0.0, 1e-4), (0.0, 1e4), (30.0, 1.0), (1e3, 0.1), (1e5, 1.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_verification_raises_no_false_alarm(mean, sigma, dtype):
    x = mean + sigma * torch.randn(16, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for module in (trained(nn.LayerNorm(256)), trained(nn.RMSNorm(256))):
        module.to(dtype)
        assert excess(kind_of(module), module, x.to(dtype), module(x.to(dtype))) <= 1


@torch.no_grad()
def test_a_weight_near_zero_leaves_float16_no_digits():
    module = trained(nn.LayerNorm(64))
    module.bias.data.zero_()
    module.weight.data *= 1e-5
    module.half()
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(1)).half()
    assert 0 < float(module(x).abs().median()) < torch.finfo(torch.float16).smallest_normal
    right = kind_of(module)
    wrong = replace(right, affine=lambda norm, y: y)
    assert excess(right, module, x, module(x)) <= 1 < excess(wrong, module, x, module(x))


@pytest.mark.parametrize(
    ("module", "x", "dtype", "wider"),
    [
        (nn.LayerNorm(16), 1e30, torch.float32, torch.float64),
        (nn.RMSNorm(16), 9e18, torch.float32, torch.float64),
        (trained(RmsNorm2d(16)), 300.0, torch.float16, torch.bfloat16),  # which computes in half precision
    ],
)
def test_an_input_that_overflows_in_the_module_is_named(module, x, dtype, wider):
    reach, x = x, torch.randn(2, 16, 16, 3, generator=torch.Generator().manual_seed(0))
    x[1] = reach * (1 - 2 * (torch.arange(16) % 2))[:, None]
    x = x if isinstance(module, RmsNorm2d) else x.mT.contiguous()
    with pytest.raises(
        ModelError, match=rf"failed at 0 .*\|x\| up to {reach:.3g}\..* or x overflows".replace("+", r"\+")
    ):
        capture(nn.Sequential(module).to(dtype), [x.to(dtype)], verify=True)
    capture(nn.Sequential(module).to(wider), [x.to(wider)], verify=True)


def test_padding_that_overflows_is_not_verified_as_it_is_not_summed():
    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
    x[1, 2] = 3e38 * (1 - 2 * (torch.arange(16) % 2))
    valid = torch.tensor([[True] * 3, [True, True, False]])
    seen = capture(nn.Sequential(nn.LayerNorm(16)), [Batch((x,), {}, numbered_samples(2), valid)], verify=True)
    assert seen.stats["0"].n_tokens == 5


def test_tokens_that_are_in_no_sum_are_not_verified():
    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
    x[0, 1] = 0.5
    model = nn.Sequential(nn.LayerNorm(16, eps=0.0))
    seen = capture(model, [x], verify=True)
    assert seen.stats["0"].n_tokens == 5 and int(seen.stats["0"].nonfinite_tokens) == 1


def test_verification_sees_a_y_that_is_no_straight_line_of_x(table):
    """What is summed is the line that ``normalize`` names, so that is what has to make the module's output."""
    bent = network_of(lambda self, x: x / (1 + x.abs()), "BentNorm")
    register_norm(type(bent), axes=-1, normalize=lambda rows, eps: (rows / (1 + rows.abs()), torch.ones(len(rows), 1)))
    with pytest.raises(ModelError, match="Its axes, eps or affine step"):
        capture(nn.Sequential(bent), [torch.randn(2, 3, 16)], verify=True)


@pytest.mark.parametrize("module", [nn.LayerNorm(16), nn.BatchNorm1d(16).eval()])
def test_an_observer_sees_the_summed_y_of_an_input_that_overflows(module):
    x, ys = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)) * 1e22, []
    seen = captured(nn.Sequential(module), [x], CaptureOptions(observe=lambda site, x, y: ys.append(y.clone())))
    sums = seen.stats["0"].moments.sum((0, 2))
    y = torch.cat(ys)
    assert y.dtype == torch.float32 and torch.isfinite(y).all() and float(sums[5]) > 100
    # y is rounded to float32, by 2⁻²⁴ at most.
    torch.testing.assert_close(y.double().square().sum(), sums[5], rtol=2.0**-23, atol=0)


@given(st.floats(1e-3, 1e3), st.floats(-100, 100), st.integers(0, 2**31), st.sampled_from([2, 16, 768]))
def test_rounding_in_float32_is_a_quarter_of_what_is_allowed(sigma, mean, seed, d):
    x = mean * sigma + sigma * torch.randn(32, d, generator=torch.Generator().manual_seed(seed))
    for module in (nn.LayerNorm(d, eps=0.01 * sigma**2), nn.RMSNorm(d, eps=0.01 * sigma**2)):
        assert excess(kind_of(module), module, x, module(x)) <= 0.25


def test_a_difference_of_four_millionths_is_no_rounding():
    x = torch.randn(32, 768, generator=torch.Generator().manual_seed(0))
    for module in (nn.LayerNorm(768), nn.RMSNorm(768)):
        kind = replace(kind_of(module), affine=lambda norm, y: (1 + 4e-6) * y)
        assert excess(kind, module, x, module(x)) > 1


def images(side, offset, layout):
    x = torch.randn(1, 8, side, side, generator=torch.Generator().manual_seed(0))
    return (0.1 * x + offset).to(memory_format=layout)


@torch.no_grad()
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("side", "offset"), [(8, 0.3), (256, 0.3)])
def test_the_sums_of_large_groups_are_verified_and_wrong_tables_are_not(layout, side, offset):
    """In channels_last torch adds up all positions one after the other, in float32."""
    module, x = trained(nn.GroupNorm(8, 8, eps=1e-3)), images(side, offset, layout)
    output, kind = module(x), kind_of(module)
    check(kind, "norm", module, x, output)

    def wrong(**changes):
        return replace(kind, **changes)

    tables = {
        "eps": wrong(eps=2e-3),
        "groups": group_norm("GroupNorm", groups=lambda norm: 2),
        "weight": wrong(affine=lambda norm, y: kind.affine(norm, y) * (1 + 1e-4)),
        "bias": wrong(affine=lambda norm, y: kind.affine(norm, y) + 1e-2),
        "no affine step": wrong(affine=lambda norm, y: y),
    }
    for table in tables.values():
        with pytest.raises(ModelError, match="Its axes, eps or affine step"):
            check(table, "norm", module, x, output)
    with pytest.raises(ModelError, match="Verification failed"):  # by more than sums of so many terms explain
        check(kind, "norm", module, x, output * 1.5)
