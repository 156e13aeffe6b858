"""Point-wise functions in place of norms are sites: their parameters, pairs and fits, against hooks in float64."""

import math

import pytest
import timm
import torch
from diffusers.models.autoencoders.autoencoder_same import DynamicTanh as SameTanh
from networks import inputs_of, network_of, report_of, sums_of
from torch import nn

import normscope
from normscope.errors import ModelError
from normscope.fits.scale import token_slopes

D = 8


class DynamicTanh(nn.Module):
    """DyT's layer for vision, as published (arXiv 2503.10622): channels last or (N, C, H, W)."""

    def __init__(self, normalized_shape, channels_last, alpha_init_value=0.5):
        super().__init__()
        self.channels_last = channels_last
        self.alpha = nn.Parameter(torch.ones(1) * alpha_init_value)
        self.weight = nn.Parameter(torch.ones(normalized_shape))
        self.bias = nn.Parameter(torch.zeros(normalized_shape))

    def forward(self, x):
        x = torch.tanh(self.alpha * x)
        if self.channels_last:
            return x * self.weight + self.bias
        return x * self.weight[:, None, None] + self.bias[:, None, None]


class LlamaTanh(nn.Module):
    """DyT's layer for LLaMA: no bias."""

    def __init__(self, normalized_shape, alpha_init_value=0.5):
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1) * alpha_init_value)
        self.weight = nn.Parameter(torch.ones(normalized_shape))

    def forward(self, x):
        return self.weight * torch.tanh(self.alpha * x)


class DynamicErf(nn.Module):
    """Derf's layer (arXiv 2512.10938): a shift inside."""

    def __init__(self, normalized_shape, channels_last=True, alpha=0.5, shift=0.0):
        super().__init__()
        self.alpha, self.shift = nn.Parameter(torch.ones(1) * alpha), nn.Parameter(torch.ones(1) * shift)
        self.weight = nn.Parameter(torch.ones(normalized_shape))
        self.bias = nn.Parameter(torch.zeros(normalized_shape))

    def forward(self, x):
        return torch.erf(self.alpha * x + self.shift) * self.weight + self.bias


class Block(nn.Module):
    def __init__(self, norm1, norm2):
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = norm1, nn.Linear(D, D), norm2, nn.Linear(D, D)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x)).relu()


class ViT(nn.Module):
    """Patches (N, C, H, W) with a function over channels, then tokens."""

    def __init__(self, norm, *, first=None, last=None):
        super().__init__()
        self.stem = nn.Conv2d(3, D, 2, 2)
        self.stem_norm = first or DynamicTanh(D, False, 0.8)
        self.blocks = nn.Sequential(*(Block(norm(), norm()) for _ in range(2)))
        self.norm, self.head = last or norm(), nn.Linear(D, 5)

    def forward(self, x):
        x = self.stem_norm(self.stem(x)).flatten(2).mT
        return self.head(self.norm(self.blocks(x)).mean(1))


def trained(model: nn.Module) -> nn.Module:
    """Give every weight and bias numbers of its own, as training does."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and parameter.numel() > 1 and not name.endswith(("alpha", "shift")):
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def noise(*shape):
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(1)) + 0.3


NETWORKS = {
    "DyT": lambda: ViT(lambda: DynamicTanh(D, True, 0.7)),
    "Derf": lambda: ViT(lambda: DynamicErf(D, alpha=0.6, shift=0.2)),
    "diffusers": lambda: ViT(lambda: SameTanh(D, 4.0)),
    "swapped": lambda: ViT(lambda: normscope.PointwiseFunction("isru", D, alpha=0.9)),
    "mixed": lambda: ViT(lambda: nn.LayerNorm(D), last=DynamicTanh(D, True)),
}
FUNCTIONS = {"tanh": torch.tanh, "derf": torch.erf, "isru": lambda u: u / (1 + u * u).sqrt()}


@pytest.mark.parametrize("name", NETWORKS)
def test_pairs_are_those_of_independent_hooks(name):
    model = trained(NETWORKS[name]())
    batches = [noise(4, 3, 8, 8), noise(2, 3, 8, 8)]
    seen = normscope.capture(model, batches, verify=True, by_gamma=True)
    assert [site.name for site in seen.sites] == [
        *("stem_norm", "blocks.0.norm1", "blocks.0.norm2", "blocks.1.norm1", "blocks.1.norm2", "norm")
    ]
    assert [site.placement for site in seen.sites[1:]] == ["pre-norm"] * 5 or seen.sites[-1].placement == "final"
    functions = {site.name: 1 if site.channel_axis == 1 else -1 for site in seen.sites if site.pointwise}
    assert len(functions) == (2 if name == "mixed" else 6) and functions["stem_norm"] == 1 and not seen.skipped
    for path, inputs in inputs_of(model, functions, batches).items():
        x = torch.cat([x.double().movedim(functions[path], -1).flatten(0, -2) for x in inputs])
        site, stats, module = next(s for s in seen.sites if s.name == path), seen.stats[path], model.get_submodule(path)
        function = site.pointwise
        assert (site.kind, site.form, site.centred, site.eps) == (type(module).__name__, None, False, 0.0)
        assert (site.bounded, site.bound, site.affine, site.replaceable) == (True, 1.0, True, False)
        assert function.alpha == tuple(module.alpha.tolist())
        gain = module.gamma if isinstance(module, SameTanh) else module.weight
        assert function.weight == tuple(gain.tolist())
        y = FUNCTIONS[function.curve](function.alpha[0] * x + function.shift[0])
        # The network's own float32 layers may add up in another order in another pass.
        torch.testing.assert_close(stats.moments.sum((0, 2)), sums_of(x, y), rtol=1e-6, atol=1e-4)
        assert (stats.n_pairs, stats.n_tokens) == (x.numel(), len(x))
        weighted = (gain.detach().double().square() * y * y).sum()
        torch.testing.assert_close(stats.gamma_moments.sum((0, 2))[5], weighted, rtol=1e-6, atol=1e-4)
        torch.testing.assert_close(stats.channel_sums[0], x.sum(0), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("module", "curve", "shift"),
    [
        (DynamicErf(D, alpha=0.6, shift=0.25), "derf", 0.25),
        (normscope.PointwiseFunction("isru", D, alpha=1.4, shift=-0.3), "isru", -0.3),
    ],
)
def test_the_fit_is_the_modules_own_function(module, curve, shift):
    seen = normscope.capture(nn.Sequential(trained(module)), [noise(8, 50, D)])
    (fit,) = normscope.fit(seen, curve)
    assert fit.r2 == pytest.approx(1, abs=1e-7)
    assert fit.amplitude == pytest.approx(1, abs=1e-5)
    assert fit.alpha == pytest.approx(module.alpha.item(), rel=1e-5)
    assert fit.shift == pytest.approx(shift, abs=1e-5)


def test_a_function_with_alpha_per_channel_keeps_the_sums_of_each():
    alpha = torch.linspace(0.3, 1.5, D)
    channels_first = network_of(
        lambda self, x: torch.tanh(self.alpha * x) * self.weight,
        "DyTNorm",
        alpha=nn.Parameter(alpha.view(D, 1, 1).clone()),
        weight=nn.Parameter(torch.linspace(-1, 2, D).view(D, 1, 1)),
    )
    seen = normscope.capture(nn.Sequential(channels_first), [noise(32, D, 5, 6)], verify=True)
    (site,) = seen.sites
    assert (site.channel_axis, site.pointwise.alpha) == (1, tuple(alpha.tolist()))
    fits = normscope.fit(seen, "tanh", per="channel")
    torch.testing.assert_close(torch.tensor([fit.alpha for fit in fits]), alpha, rtol=1e-3, atol=0)


def test_a_capture_of_both_kinds_is_stored_and_merged(tmp_path):
    model = trained(NETWORKS["mixed"]())
    seen, more = (normscope.capture(model, [noise(n, 3, 8, 8)], about={"data": str(n)}) for n in (3, 4))
    stored = normscope.load_capture(normscope.save_capture(seen, tmp_path / "seen.capture"))
    assert stored.sites == seen.sites and stored.sites[0].pointwise.curve == "tanh"
    torch.testing.assert_close(
        stored.merge(more).stats["norm"].moments, seen.stats["norm"].moments + more.stats["norm"].moments
    )


def parameters(**values):
    return {name: nn.Parameter(torch.as_tensor(value)) for name, value in values.items()}


WEIGHT = torch.linspace(0.5, 2, D)


@pytest.mark.parametrize(
    ("name", "curve", "values", "reason"),
    [
        ("DynamicTanh", torch.tanh, {"alpha": [0.0], "weight": WEIGHT}, "α is zero"),
        ("DynamicTanh", torch.tanh, {"alpha": [0.5], "weight": 0 * WEIGHT}, "weights of zero"),
        ("DynamicSine", torch.sin, {"alpha": [0.5], "weight": WEIGHT}, None),
        ("DyT", torch.sin, {"alpha": [0.5], "weight": WEIGHT}, "no known curve f"),
        ("DynamicTanh", torch.tanh, {"alpha": [0.5], "weight": 1e-7 * WEIGHT, "bias": WEIGHT}, "more than one"),
    ],
)
def test_a_named_function_that_cannot_be_recognized_is_skipped_with_the_reason(name, curve, values, reason):
    def forward(self, x):
        return curve(self.alpha * x) * self.weight + getattr(self, "bias", 0)

    report = report_of(
        nn.Sequential(nn.LayerNorm(D), network_of(forward, name, **parameters(**values))), noise(2, 5, D)
    )
    assert [site.name for site in report.sites] == ["0"]
    assert [reason in norm.reason for norm in report.skipped] == ([] if reason is None else [True])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_functions_are_recognized_and_verified_in_other_precisions(dtype):
    model = trained(NETWORKS["DyT"]()).to(dtype)
    seen = normscope.capture(model, [noise(4, 3, 8, 8).to(dtype)], verify=True)
    assert [site.pointwise.curve for site in seen.sites] == ["tanh"] * 6


def test_a_swapped_norm_with_an_activation_is_verified_with_it():
    norm = timm.layers.LayerNormAct(D, act_layer=nn.ReLU)
    model, x = nn.Sequential(nn.Linear(D, D), norm), noise(16, 5, D)
    normscope.swap(model, "dyt", report_of(model, x).sites, init="paper")
    seen = normscope.capture(model, [x], verify=True)
    assert seen.sites[0].pointwise.curve == "tanh" and float(seen.stats["1"].moments.sum((0, 2))[2]) != 0


def test_verification_fails_for_another_function_than_at_first():
    class Changing(LlamaTanh):
        def forward(self, x):
            return super().forward(x) if len(x) == 1 else self.weight * torch.erf(self.alpha * x)

    with pytest.raises(ModelError, match=r"Verification failed at 0 \(Changing"):
        normscope.capture(nn.Sequential(Changing(D)), [noise(4, 5, D)], verify=True)


def test_theory_and_slopes_of_tokens_are_of_norms_alone():
    model, functions = trained(NETWORKS["mixed"]()), {"stem_norm", "norm"}
    seen = normscope.capture(model, [noise(8, 3, 8, 8)], layers=[*functions, "blocks.0.norm1"], diagonal=True)
    theory = normscope.fit(seen, "tanh", theory=True)
    assert {fit.site for fit in theory if fit.nothing} == functions
    assert all("point-wise function" in fit.nothing for fit in theory if fit.nothing)
    assert not functions & {row.site for row in token_slopes(seen)}
    reasons = {view.site: view.reason for view in normscope.gradient(seen, ()) if view.reason}
    assert reasons == dict.fromkeys(functions, "a point-wise function: its Jacobian is diagonal")


def test_statistics_of_tokens_stay_those_of_the_input():
    x = noise(300, D)
    x[0] = 1.5  # a token without spread counts too
    stats = normscope.capture(nn.Sequential(LlamaTanh(D)), [x]).stats["0"]
    assert stats.n_tokens == 300
    scales = normscope.pairs.sums.magnitudes.of_tokens(stats.token_scales)
    assert scales.quantile(0.5) == pytest.approx(float(x.std(1, correction=0).median()), rel=0.1)
    assert math.isclose(float(stats.tokens.rstd[0]), float(1 / stats.tokens.x[0].std(correction=0)), rel_tol=1e-5)
