"""Norms of classes that no table knows: taken for what reproduces their output, or skipped with why."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normscope
from normscope.errors import ModelError, UsageError
from normscope.inputs.batch import as_batches
from normscope.pairs.capture import capture
from normscope.pairs.norms.recognition import register_norm, rms_norm
from normscope.pairs.norms.trace import find_norms


class OwnNorm(nn.Module):
    """A norm as users write one: a form over the last axis, an eps that is kept or not, and a weight."""

    def __init__(self, form: str, eps: float = 1e-6, offset: float = 0.0, kept: bool = True) -> None:
        super().__init__()
        self.form, self.offset, self.hidden_constant = form, offset, eps
        self.weight = nn.Parameter(torch.linspace(0.2, 1.7, 16) - offset)
        if kept:
            self.norm_eps = eps

    def forward(self, x):
        xf = x.float()
        if self.form != "rms":
            xf = xf - xf.mean(-1, keepdim=True)
        y = xf * torch.rsqrt(xf.square().mean(-1, keepdim=True) + self.hidden_constant)
        return (y * (self.offset + self.weight.float())).to(x.dtype)


def report_of(module, x, *, dtype=torch.float32):
    model = nn.Sequential(module, nn.LayerNorm(x.shape[-1])).to(dtype)
    return find_norms(model, next(as_batches([x.to(dtype)])))


def zero_mean(*shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return x - x.mean(-1, keepdim=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["rms", "layer"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_an_input_of_mean_zero_does_not_confuse_the_trial(form, offset, dtype):
    module = OwnNorm(form, offset=offset)
    report = report_of(module, zero_mean(2, 5, 16), dtype=dtype)
    site = report.sites[0]
    assert (site.name, site.kind, site.eps, site.centred) == ("0", "OwnNorm", 1e-6, form == "layer")
    gamma = report.kinds["0"].gamma(module, 16)
    torch.testing.assert_close(gamma, offset + module.weight.detach().float())


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_eps_that_is_not_kept_is_found_among_the_usual_ones(eps, dtype):
    assert report_of(OwnNorm("rms", eps, kept=False), 100 * zero_mean(2, 5, 16), dtype=dtype).sites[0].eps == eps


def test_an_eps_that_is_not_the_one_that_is_kept_is_no_known_form():
    module = OwnNorm("rms", 1e-5)
    module.norm_eps = 1e-6
    (skipped,) = report_of(module, 100 * zero_mean(2, 5, 16)).skipped  # at σ = 100 the output shows neither
    assert skipped.name == "0" and "no form that is known" in skipped.reason


def test_weights_of_zero_that_hide_y_are_no_evidence():
    module = OwnNorm("layer")
    nn.init.zeros_(module.weight)
    (skipped,) = report_of(module, zero_mean(2, 5, 16)).skipped
    assert "more than one form" in skipped.reason


def test_normalizing_by_length_is_known_in_its_three_spellings():
    class Unit(nn.Module):
        def forward(self, x):
            return F.normalize(x, dim=1)

    class ScaleNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.g = nn.Parameter(torch.tensor([3.5]))

        def forward(self, x):
            return self.g * F.normalize(x, dim=-1)

    class ChannelRms(nn.Module):
        def __init__(self):
            super().__init__()
            self.gamma = nn.Parameter(torch.linspace(0.5, 2, 8).view(8, 1, 1))

        def forward(self, x):
            return F.normalize(x, dim=1) * 8**0.5 * self.gamma

    x = torch.randn(2, 8, 5, 16, generator=torch.Generator().manual_seed(0))
    Unit.__name__ = "UnitNorm"
    ChannelRms.__name__ = "ChannelRmsNorm"
    for module, axis, affine in ((Unit(), 1, False), (ScaleNorm(), -1, True), (ChannelRms(), 1, True)):
        model = nn.Sequential(module, nn.LayerNorm(16))
        seen = normscope.capture(model, [x], verify=True)
        site = seen.sites[0]
        assert (site.channel_axis, site.affine, site.centred, site.bounded) == (axis, affine, False, True)
        y = rms_norm(x.movedim(axis, -1).reshape(-1, site.d), 0.0)[0].double()
        torch.testing.assert_close(seen.stats["0"].moments[:, 5].sum(), y.square().sum(), rtol=1e-6, atol=0)


def test_a_trial_leaves_no_trace_in_the_module():
    class CountingNorm(OwnNorm):
        def __init__(self):
            super().__init__("rms")
            self.inputs = []

        def forward(self, x):
            self.inputs.append(x.detach().clone())
            self.register_buffer("seen", self.inputs[-1])
            return super().forward(x)

    module, x = CountingNorm(), zero_mean(2, 5, 16)
    state = torch.random.get_rng_state()
    assert report_of(module, x).sites[0].name == "0"
    (seen,) = module.inputs
    assert torch.equal(seen, x) and not list(module.buffers())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not module._forward_hooks and not module._forward_pre_hooks


@pytest.mark.parametrize(("dtype", "reach"), [(torch.float32, 1e30), (torch.bfloat16, 1e25)])
def test_an_input_that_is_too_large_for_the_module_shows_no_form_and_is_said_so(dtype, reach):
    x = zero_mean(2, 5, 16)
    x[0, 0] *= reach / x[0, 0].abs().max()
    (skipped,) = report_of(OwnNorm("rms"), x, dtype=dtype).skipped
    assert "the largest |x| is" in skipped.reason and "square passes what float32 holds" in skipped.reason


def test_what_cannot_be_tried_says_why():
    class OneInputNorm(nn.Module):
        def forward(self, x):
            if not torch.equal(x, expected):
                raise ValueError("this is another input")
            return x * 2

    class GatedNorm(nn.Module):
        def forward(self, x, gate):
            return F.rms_norm(x, (16,)) * gate

    class HeadNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(5, 16))

        def forward(self, x):
            return F.rms_norm(x, (16,)) * self.weight

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.gated, self.head, self.last = OneInputNorm(), GatedNorm(), HeadNorm(), nn.LayerNorm(16)

        def forward(self, x):
            return self.last(self.head(self.gated(self.one(x), x)))

    expected = zero_mean(2, 5, 16)
    reasons = {norm.name: norm.reason for norm in find_norms(Model(), next(as_batches([expected]))).skipped}
    assert "could not be tried on other inputs (ValueError)" in reasons["one"]
    assert "second tensor" in reasons["gated"]
    assert "80 elements" in reasons["head"]


def test_what_a_norm_subtracts_inside_is_no_branch():
    class HandNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(16)), 1e-6

        def forward(self, x):
            x = x - x.mean(-1, keepdim=True)
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight

    class Parallel(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.mlp = HandNorm(), HandNorm(), nn.Linear(16, 16)

        def forward(self, x):
            x = x * 2
            return self.mlp(self.one(x)) * self.mlp(self.two(x))

    report = find_norms(Parallel(), next(as_batches([zero_mean(2, 5, 16)])))
    assert [site.placement for site in report.sites] == [None, None]


def test_groups_and_statistics_of_other_sizes_are_no_fit():
    class ChannelsLast(nn.GroupNorm):
        def forward(self, x):
            return super().forward(x.movedim(-1, 1)).movedim(1, -1)

    class OddNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.running_mean, self.running_var, self.eps = torch.zeros(3), None, 1e-5

        def forward(self, x):
            return x.cumsum(-1)

    report = report_of(nn.Sequential(ChannelsLast(4, 16), OddNorm()), zero_mean(3, 7, 16))
    assert [(norm.name, "another known form" in norm.reason) for norm in report.skipped] == [
        ("0.0", True),
        ("0.1", False),
    ]


def test_a_subclass_with_its_own_forward_is_taken_for_what_it_does():
    class ChannelsFirst(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x.transpose(-2, -1)).transpose(-2, -1)

    class Activated(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x).relu()

    torch.manual_seed(0)
    model = nn.Sequential(ChannelsFirst(16), Activated(9)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    report = find_norms(model, next(as_batches([torch.randn(2, 16, 9)])))
    assert [(site.name, site.kind, site.channel_axis) for site in report.sites] == [("0", "ChannelsFirst", 1)]
    assert [(norm.name, norm.kind) for norm in report.skipped] == [("1", "Activated")]
    assert "register_norm" in report.skipped[0].reason


def test_one_call_extends_the_table(table):
    class MyNorm(nn.Module):
        def forward(self, x):
            return x / x.abs().sum(dim=1, keepdim=True)

    def unit_norm(rows, eps):
        rstd = 1 / rows.abs().sum(dim=-1, keepdim=True)
        return rows * rstd, rstd

    model = nn.Sequential(MyNorm())
    with pytest.raises(ModelError, match=r"Skipped: 0 \(MyNorm\)"):
        capture(model, [torch.randn(2, 8, 4)])
    register_norm(MyNorm, axes=1, normalize=unit_norm, centred=False)
    seen = capture(model, [torch.randn(2, 8, 4)], verify=True)
    assert (seen.sites[0].kind, seen.sites[0].normalized_shape) == ("MyNorm", (8,))
    with pytest.raises(UsageError, match="axes=\\(\\) names none"):
        register_norm(MyNorm, axes=())
