"""float16, bfloat16, int8, FP8 and eps against arithmetic on the same tokens, in the dtype itself or in float64."""

import math

import pytest
import torch
from networks import OneNorm, PreNorm
from torch import nn

import normscope
from normscope.errors import UsageError
from normscope.tools.check.check import check
from normscope.tools.check.evidence import Evidence
from normscope.tools.check.precision import bfloat16, epsilon, float16, fp8, int8

D = 32


def tokens(scale=1.0, outlier=0.0, number=512, d=D, seed=0):
    """Normal tokens of several scales; the first has an outlier in channel 3."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, d, generator=generator) * (torch.rand(number, 1, generator=generator) + 0.5) * scale
    x[0, 3] = outlier or x[0, 3]
    return x


QUESTIONS = {
    "float16": float16,
    "bfloat16": bfloat16,
    "int8": int8,
    "fp8": fp8,
    "eps": epsilon,
}


def answer(question, x, norm=None, eps=None):
    network = OneNorm(norm or nn.RMSNorm(x.shape[1], eps=1e-6))
    return QUESTIONS[question](Evidence(normscope.capture(network, [x]), network, eps=eps))


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize(("largest", "gain"), [(4, 1), (90, 1), (250, 2**14), (300, 1), (60_000, 1), (70_000, 1)])
def test_float16_overflows_where_its_own_arithmetic_does(norm, gain, largest):
    x = tokens()
    x *= largest / x.abs().max()
    module = norm(D, eps=1e-6)
    nn.init.constant_(module.weight, float(gain))
    found = answer("float16", x, module)
    half = x.half()
    values = {"x": half, "x²": half**2, "Σx²": (half**2).sum(1), "output": module(x).half()}
    overflows = {name for name, value in values.items() if value.isinf().any()}
    [row] = found.sites
    assert set(row["overflows"]) <= overflows <= {*row["overflows"], *row["may_overflow"]}
    assert row["may_overflow"] in ([], ["output"])
    expected = "problem" if {"x", "output"} & overflows else "note" if overflows or row["may_overflow"] else "ok"
    assert found.verdict == expected
    of_tokens = x.double().square().sum(1)
    at_least, sums = float(of_tokens[x.abs().amax(1).argmax()]), float(of_tokens.max())
    assert row["max_x"] == pytest.approx(largest)
    assert at_least <= row["max_sum"] * (1 + 1e-6) <= sums * (1 + 1e-5) <= row["max_sum_bound"] * (1 + 1e-4)


class Written(nn.Module):
    """An RMSNorm as networks write it, in float32 or in the precision of its input."""

    def __init__(self, dtype):
        super().__init__()
        self.weight, self.eps, self.dtype = nn.Parameter(torch.ones(D)), 1e-6, dtype

    def forward(self, x):
        h = x.to(self.dtype)
        return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def test_squares_are_a_problem_for_modules_that_square_in_their_own_precision():
    x = tokens(outlier=300.0)
    for norm in (nn.RMSNorm(D, eps=1e-6), Written(torch.float32)):
        in_single = answer("float16", x, norm)
        assert in_single.verdict == "note" and "compute them in float32, as these norms do" in in_single.sentence
        assert "channel 3, token 0" in in_single.sentence and norm.half()(x.half())[0].abs().max() > 1
    own = answer("float16", x, Written(None))
    assert own.verdict == "problem" and "squares overflow at the network: compute them in float32" in own.sentence
    assert not Written(None).half()(x.half())[0].any()  # 1/√∞
    of_file = check(normscope.capture(OneNorm(Written(None)), [x]))["float16"]
    assert of_file.verdict == "note" and "outputs need γ and β, which a capture lacks" in of_file.sentence


def test_small_tokens_and_eps_underflow_in_float16():
    x = torch.cat([tokens(scale=1e-3, number=64), tokens(number=192)])
    found = answer("float16", x, nn.RMSNorm(D, eps=1e-12))
    [row] = found.sites
    share = float((x.square().mean(1) < torch.finfo(torch.float16).tiny).float().mean())
    assert row["subnormal"] == pytest.approx(share) == 0.25 and row["eps_as_stored"] == 0
    assert "25% of the tokens" in found.sentence and "it is 0 in float16 at 1 of 1 site" in found.sentence
    assert torch.tensor(1e-12).half() == 0 and found.verdict == "note"


def test_steps_of_bfloat16_are_those_of_its_numbers():
    x = tokens(outlier=25_966.0)
    found = answer("bfloat16", x)
    stored = torch.tensor(25_966.0).bfloat16()
    assert found.sites[0]["step"] == float(torch.nextafter(stored, stored * 2) - stored) == 128
    assert found.verdict == "note" and answer("bfloat16", tokens()).verdict == "ok"


def int8(x, axes):
    low, high = x.amin(axes, keepdim=True).clamp(max=0), x.amax(axes, keepdim=True).clamp(min=0)
    scale = (high - low) / 255
    zero = (-low / scale).round()
    return ((x / scale + zero).round().clamp(0, 255) - zero) * scale


def fp8(x, axes):
    scale = 448 / x.abs().amax(axes, keepdim=True)
    return (x * scale).to(torch.float8_e4m3fn).float() / scale


@pytest.mark.parametrize("outlier", [0.0, 40.0, 5_000.0])
@pytest.mark.parametrize(("name", "quantized"), [("int8", int8), ("fp8", fp8)])
def test_quantized_inputs_are_as_far_from_their_own(name, quantized, outlier):
    x = tokens(outlier=outlier, number=64)  # all of which are drawn
    found = answer(name, x)
    [row] = found.sites
    by_tensor = quantized(x, (0, 1)) - x
    assert row["tensor"] == pytest.approx(float(by_tensor.norm() / x.norm()), rel=0.03)
    for way, axes in (("tensor", (0, 1)), ("channel", 0), ("token", 1)):
        errors = (quantized(x, axes) - x).norm(dim=1) / x.norm(dim=1)
        assert row[f"{way}_median"] == pytest.approx(float(errors.quantile(0.5)), rel=1e-3)
    rest = x[:, torch.arange(D) != 3]
    if outlier:
        errors = (quantized(rest, (0, 1)) - rest).norm(dim=1) / rest.norm(dim=1)
        assert row["without_channels"] == pytest.approx(float(errors.quantile(0.5)), rel=1e-3)
        assert (row["channels"], row["tokens"]) == ([3], [0])
    assert (found.verdict == "problem") == (max(row["tensor"], row["tensor_median"]) > 0.05)


def test_a_sink_hides_the_loss_of_all_other_tokens():
    """One token has nearly all of Σx², so that all x together look well although the others become zeros."""
    found = answer("int8", tokens(outlier=5_000.0))
    [row] = found.sites
    assert row["tensor"] < 0.05 < 0.9 < row["tensor_median"] and found.verdict == "problem"
    assert "channel 3 of token 0 sets it" in found.sentence


FORMS = {
    "under the root": lambda x, eps: x * (x.square().mean(-1, keepdim=True) + eps).rsqrt(),
    "beside the root": lambda x, eps: x / (x.square().mean(-1, keepdim=True).sqrt() + eps),
    "bounds the length": lambda x, eps: x * D**0.5 / x.norm(dim=-1, keepdim=True).clamp_min(eps),
}


class WithEps(nn.Module):
    def __init__(self, form, eps):
        super().__init__()
        self.weight, self.eps, self.form = nn.Parameter(torch.ones(D)), eps, form

    def forward(self, x):
        return self.weight * FORMS[self.form](x, self.eps)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale", [0.01, 1.0])
def test_another_eps_changes_outputs_as_much_as_by_arithmetic(form, scale):
    x = tokens(scale=scale)
    found = answer("eps", x, WithEps(form, 1e-5), eps=1e-3)
    [row] = found.sites
    y = FORMS[form](x.double(), 1e-5)
    for eps in (1e-3, 1e-6, 1e-12):
        true = float((FORMS[form](x.double(), eps) - y).norm() / y.norm())
        assert row[f"{eps:g}"] == pytest.approx(true, rel=0.1, abs=1e-9)
    assert row["1e-05"] == 0
    other = FORMS[form](x.double(), 1e-3)
    worst = float(((other - y).norm(dim=1) / y.norm(dim=1).clamp_min(1e-300)).max())
    assert row["worst_token"] == pytest.approx(worst, rel=0.25) and row["worst_token"] >= row["0.001"]  # of a bin of σ
    expected = "ok" if row["worst_token"] < 2**-24 else "problem" if row["0.001"] >= 0.01 else "note"
    assert found.verdict == expected and "0.001 in place of 1e-05 changes outputs by" in found.sentence


def test_eps_is_harmless_below_the_rounding_of_the_network():
    norm, x = nn.LayerNorm(D, eps=1e-5), tokens()
    assert answer("eps", x, norm).verdict == "note"
    half = answer("eps", x.bfloat16(), norm.bfloat16())
    assert half.verdict == "ok" and "harmless: below the rounding of float16, bfloat16" in half.sentence


@pytest.mark.parametrize("make", [list, iter, "loader"])
def test_any_batches_are_read_once(make):
    x = [tokens(number=16, d=8, seed=seed) for seed in range(3)]
    loader = torch.utils.data.DataLoader(torch.cat(x), batch_size=16)
    report = check(PreNorm(), loader if make == "loader" else make(x))
    assert [row["site"] for row in report["float16"].sites] == ["norms.0", "norms.1", "norms.2"]
    assert report["float16"].sites[0]["max_x"] == float(torch.cat(x).abs().max())


def test_grouped_norms_functions_and_running_statistics_are_named_where_they_are_left_out():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.group, self.batch = nn.GroupNorm(2, 8), nn.BatchNorm1d(8)

        def forward(self, x):
            return nn.functional.layer_norm(self.batch(self.group(x)).mT, (8,))

    report = check(Mixed().eval(), [torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(0))])
    assert "left out: 3 sites for outputs" in report["float16"].sentence
    assert report["float16"].sites[0]["channel"] is None
    assert "left out: 1 site without σ of a token" in report["eps"].sentence
    assert [row["channel_median"] is None for row in report["int8"].sites] == [True, True, False]


def test_a_network_of_pointwise_functions_has_no_norm_to_check():
    network, x = PreNorm(), [tokens(number=16, d=8)]
    sites = normscope.capture(network, x).sites
    with normscope.swap(network, "dyt", normscope.capture(network, x), layers=[0]):
        some = check(network, x)
    assert "left out: 1 point-wise function" in some["float16"].sentence and len(some["int8"].sites) == len(sites) - 1
    with normscope.swap(network, "dyt", normscope.capture(network, x)):
        [only] = check(network, x).answers
    assert only.verdict == "omitted" and "3 point-wise functions" in only.sentence


def test_tokens_of_zeros_are_checked():
    report = check(OneNorm(nn.LayerNorm(8)), [torch.zeros(4, 8)])
    numbers = [value for answer in report.answers for row in answer.sites for value in row.values()]
    assert all(math.isfinite(value) for value in numbers if isinstance(value, float))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_tokens_that_are_not_finite_are_a_problem(value):
    x = tokens()
    x[3, 2] = value
    found = answer("float16", x, nn.LayerNorm(D))
    assert found.verdict == "problem"
    assert found.sentence.startswith("NaN or infinity in tokens of norm, which are left out of all numbers; ")


@pytest.mark.parametrize("eps", [-1.0, math.nan, math.inf])
def test_an_eps_is_a_number_from_zero(eps):
    with pytest.raises(UsageError, match=f"eps has to be a number of at least 0, not {eps}"):
        normscope.check(nn.LayerNorm(D), [tokens()], eps=eps)
