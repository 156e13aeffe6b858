"""Modules of unknown classes, recognized by what they do: formulas in float64, gains, α; and what is none of them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from networks import network_of, numbered_samples, report_of
from torch import nn

import normscope
from normscope.errors import ModelError

D = 24
HEADS = 4


def learned(*shape, seed=0):
    return nn.Parameter(torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5)


def tokens(*shape, seed=0):
    """Tokens of different scales and means."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.rand(*shape[:-1], 1, generator=generator) * 3
    return x + torch.randn(*shape[:-1], 1, generator=generator)


def mean(x):
    return x.mean(-1, keepdim=True)


def power(x):
    return x.square().mean(-1, keepdim=True)


def about(x):
    return x - mean(x)


def heads(x):
    return x.unflatten(-1, (HEADS, -1))


W, B, G, LOG = learned(D), learned(D, seed=1), learned(1, seed=2), nn.Parameter(torch.linspace(-1, 1, D))
CENTRE = nn.Parameter(torch.linspace(-0.3, 0.5, D))

# Forward, parts of the module; y in float64, and the factor of y that each channel has.
FORMULAS = {
    "the Annotated Transformer's": (
        lambda self, x: self.a_2 * about(x) / (x.std(-1, keepdim=True) + self.eps) + self.b_2,
        {"a_2": W, "b_2": B, "eps": 1e-2},
        lambda x: about(x) / (x.std(-1, keepdim=True) + 1e-2),
        W,
    ),
    "unbiased, eps under the root": (
        lambda self, x: about(x) / (x.var(-1, keepdim=True) + 1e-3).sqrt() * self.w,
        {"w": W},
        lambda x: about(x) / (x.var(-1, keepdim=True) + 1e-3).sqrt(),
        W,
    ),
    "icefall's learned eps": (
        lambda self, x: x * (power(x) + self.eps.exp()) ** -0.5,
        {"eps": nn.Parameter(torch.tensor(0.25).log())},
        lambda x: x / (power(x) + 0.25).sqrt(),
        torch.ones(D),
    ),
    "Zipformer's learned bias": (
        lambda self, x: x * power(x - self.bias) ** -0.5 * self.log_scale.exp(),
        {"log_scale": nn.Parameter(torch.tensor(0.5)), "bias": CENTRE},
        lambda x: x / power(x - CENTRE.detach().double()).sqrt(),
        torch.full((D,), 0.5).exp(),
    ),
    "clamped mean square": (
        lambda self, x: x * power(x).clamp_min(self.least).rsqrt() * self.w,
        {"least": 1e-2, "w": W},
        lambda x: x / power(x).clamp_min(1e-2).sqrt(),
        W,
    ),
    "√d as a buffer": (
        lambda self, x: F.normalize(x, dim=-1) * self.scale * self.g,
        {"scale": torch.tensor(D**0.5), "g": W},
        lambda x: x / power(x).sqrt(),
        W,
    ),
    "bias made first": (
        lambda self, x: F.layer_norm(x, (D,)) * self.w + self.b,
        {"b": B, "w": W},
        lambda x: about(x) / (power(about(x)) + 1e-5).sqrt(),
        W,
    ),
    "gain by its logarithm": (
        lambda self, x: self.log.exp() * x * (power(x) + 1e-6).rsqrt(),
        {"log": LOG},
        lambda x: x / (power(x) + 1e-6).sqrt(),
        LOG.exp(),
    ),
    "unit offset, clamped root mean square": (
        lambda self, x: (1 + self.delta) * (x / (x.norm(dim=-1, keepdim=True) * D**-0.5).clamp(min=self.eps)) + self.b,
        {"b": B, "delta": LOG, "eps": 1e-2},
        lambda x: x / power(x).sqrt().clamp_min(1e-2),
        1 + LOG,
    ),
    "one norm per head": (
        lambda self, x: F.group_norm(x.flatten(0, 1), HEADS, self.weight).view_as(x),
        {"weight": W},
        lambda x: (about(heads(x)) / (power(about(heads(x))) + 1e-5).sqrt()).flatten(-2),
        W,
    ),
    "RetNet's heads": (
        lambda self, x: F.rms_norm(heads(x), (D // HEADS,), eps=1e-6).flatten(-2) * self.g,
        {"g": W},
        lambda x: (heads(x) / (power(heads(x)) + 1e-6).sqrt()).flatten(-2),
        W,
    ),
    "mean absolute deviation": (
        lambda self, x: about(x) / (about(x).abs().mean(-1, keepdim=True) + 1e-6) * self.w,
        {"w": W},
        lambda x: about(x) / (about(x).abs().mean(-1, keepdim=True) + 1e-6),
        W,
    ),
    "no parameters": (
        lambda self, x: about(x) / (x.std(-1, keepdim=True) + 1e-6),
        {},
        lambda x: about(x) / (x.std(-1, keepdim=True) + 1e-6),
        torch.ones(D),
    ),
}


def made(forward, parts, name="Rescale"):
    """A module whose name says nothing, with parts as parameters, buffers and attributes."""
    module = network_of(forward, name)
    for key, part in copy.deepcopy(parts).items():  # several tests share the tensors, and simplify writes into them
        if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
            module.register_buffer(key, part)
        else:
            setattr(module, key, part)
    return module


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_are_identified_under_any_name(name):
    forward, parts, formula, gain = FORMULAS[name]
    module, x = made(forward, parts), tokens(3, 7, D)
    x[0, 0] *= 1e-4  # below some eps
    model = nn.Sequential(nn.Identity(), module)
    seen = normscope.capture(model, [x], verify=True)
    (site,) = seen.sites
    assert (site.name, site.kind, site.channels, site.channel_axis) == ("1", "Rescale", D, -1) and not seen.skipped
    y = formula(x.double())
    assert site.centred == torch.allclose(formula(x.double() + 1), y)
    sums = seen.stats["1"].moments.sum((0, 2))
    expected = torch.stack([y.sum(), (x * y).sum(), y.square().sum()])
    torch.testing.assert_close(sums[[2, 4, 5]], expected.detach(), rtol=1e-6, atol=1e-5)
    kind = report_of(model, x).kinds["1"]
    torch.testing.assert_close(kind.gamma(module, D), gain.detach(), rtol=1e-5, atol=0)
    assert site.bound >= float(y.abs().max())


def small(d, sigma, seed, dtype=torch.float32):
    """A weight near one, and a bias of which some elements are as good as zero."""
    generator = torch.Generator().manual_seed(seed)
    parts = torch.rand(d, generator=generator) + 0.5, torch.randn(d, generator=generator) * sigma
    return tuple(nn.Parameter(part.to(dtype)) for part in parts)


SMALL = {
    "layer norm": lambda self, x: about(x) / (power(about(x)) + 1e-5).sqrt() * self.weight + self.bias,
    "the Annotated Transformer's": lambda self, x: (
        self.weight * about(x) / (x.std(-1, keepdim=True) + 1e-6) + self.bias
    ),
    "a call of a function": lambda self, x: F.layer_norm(x, (64,)) * self.weight + self.bias,
    "Derf": lambda self, x: torch.erf(0.7 * self.a * x + self.s) * self.weight + self.bias,
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_biases_are_read_from_the_module(name, dtype):
    layers = []
    for seed, sigma in enumerate((0.02, 0.001, 0.0)):
        weight, bias = small(64, sigma, seed, dtype)
        parts = {"weight": weight, "bias": bias}
        if name == "Derf":
            parts |= {"s": small(64, sigma, seed + 9, dtype)[1], "a": nn.Parameter(torch.ones(1, dtype=dtype))}
        layers.append(made(SMALL[name], parts))
    report = report_of(nn.Sequential(*layers), tokens(1, 8, 64).to(dtype))
    assert [site.name for site in report.sites] == ["0", "1", "2"] and not report.skipped
    for (site, kind), layer in zip(report.kinds.items(), layers, strict=True):
        with torch.no_grad():
            layer.weight += 0.25
            layer.bias += 0.25
        for part, own in zip(kind.gain_and_offset(layer, 64), (layer.weight, layer.bias), strict=True):
            torch.testing.assert_close(part, own.detach().float(), rtol=0, atol=1e-7, msg=site)


def test_a_tiny_eps_is_identified():
    model = nn.Sequential(made(lambda self, x: F.normalize(x, dim=-1) * self.w, {"w": W}))
    (site,) = report_of(model, tokens(3, 7, D)).sites
    assert (site.form, site.eps) == ("root_mean_square", 1e-12)


def reversible(self, x, back=False):
    """RevIN, which normalizes at its first call, and takes that back at its second."""
    if back:
        return x * self.sigma + self.mu
    self.mu, self.sigma = mean(x), (power(about(x)) + 1e-5).sqrt()
    return about(x) / self.sigma


def flagged(self, x, weighted=True):
    return F.normalize(x, dim=-1) * D**0.5 * (self.w if weighted else 1)


@pytest.mark.parametrize(
    ("module", "flag"), [(made(reversible, {}, "RevNorm"), "back"), (made(flagged, {"w": W}), "weighted")]
)
def test_a_module_that_differs_in_a_later_call_is_skipped(module, flag):
    norm = nn.LayerNorm(D)
    model = network_of(
        lambda self, x: self.part(self.norm(self.part(x)), **{flag: flag == "back"}), part=module, norm=norm
    )
    seen = normscope.capture(model, [tokens(3, 7, D)])
    assert [(site.name, site.calls) for site in seen.sites if site.name.startswith("norm")] == [("norm", 1)]
    assert [(norm.name, norm.reason) for norm in seen.skipped if norm.name == "part"] == [
        ("part", "it does something else in another of its calls")
    ]


def test_modules_of_one_class_may_have_different_eps():
    layers = [
        made(lambda self, x: x / (power(x) + self.e).sqrt() * self.w, {"e": e, "w": W}) for e in (1e-5, 1e-3, 1e-5)
    ]
    report = report_of(nn.Sequential(*layers), tokens(3, 7, D))
    assert [site.eps for site in report.sites] == [1e-5, 1e-3, 1e-5]


IMAGE = (2, 8, 6, 5)
OVER = (2, 3)


def spread(x, axes):
    return (x - x.mean(axes, keepdim=True)) / (x.var(axes, keepdim=True, unbiased=False) + 1e-5).sqrt()


IMAGES = {
    "instance": (lambda self, x: spread(x, (2, 3)) * self.w, (8, 1, 1), 1, (1, 6, 5)),
    "one group": (lambda self, x: spread(x, (1, 2, 3)) * self.w, (8, 1, 1), 1, (8, 6, 5)),
    "groups": (lambda self, x: F.group_norm(x, 4) * self.w, (8, 1, 1), 1, (2, 6, 5)),
    "channels": (lambda self, x: spread(x, (1,)) * self.w, (8, 1, 1), 1, (8,)),
    "all": (lambda self, x: spread(x, (1, 2, 3)) * self.w, (8, 6, 5), (-3, -2, -1), (8, 6, 5)),
    "heads, channels last": (lambda self, x: F.layer_norm(x, (5,)) * self.w, (6, 5), (-2, -1), (5,)),
}


@pytest.mark.parametrize("name", IMAGES)
def test_axes_are_those_that_share_a_statistic(name):
    forward, size, axis, shape = IMAGES[name]
    x = torch.randn(IMAGE, generator=torch.Generator().manual_seed(0)) * 2 + torch.arange(8.0).view(8, 1, 1)
    seen = normscope.capture(nn.Sequential(made(forward, {"w": learned(*size)})), [x], verify=True)
    (site,) = seen.sites
    assert (site.channel_axis, site.normalized_shape, seen.skipped) == (axis, shape, [])
    assert seen.stats["0"].n_pairs == x.numel()


ALPHA, S, EACH = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor([-0.4])), learned(D, seed=3)

# Forward, parts; curve, α, s and weight.
POINTWISE = {
    "x-transformers' DynamicTanh": (
        lambda self, x: (x * self.pre_tanh_scale).tanh() * self.gamma + self.beta,
        {"pre_tanh_scale": ALPHA, "gamma": W, "beta": B},
        ("tanh", 0.7, 0.0, W),
    ),
    "x-transformers' Derf": (
        lambda self, x: torch.erf(x * self.alpha + self.s) * self.gamma + self.beta,
        {"alpha": ALPHA, "s": S, "gamma": W, "beta": B},
        ("derf", 0.7, -0.4, W),
    ),
    "unit offset": (
        lambda self, x: torch.tanh(self.alpha * x) * (1 + self.weight) + self.bias,
        {"alpha": ALPHA, "weight": LOG, "bias": B},
        ("tanh", 0.7, 0.0, 1 + LOG),
    ),
    "no weight": (lambda self, x: torch.tanh(self.alpha * x), {"alpha": ALPHA}, ("tanh", 0.7, 0.0, torch.ones(1))),
    "one α per channel": (
        lambda self, x: torch.tanh(self.t * x) * self.v,
        {"v": W, "t": EACH},
        ("tanh", EACH, 0.0, W),
    ),
    "α by its logarithm": (
        lambda self, x: torch.atan(self.log * 0 + self.log.exp() * x) * self.v,
        {"log": ALPHA, "v": W},
        ("arctan", ALPHA.detach().exp(), 0.0, W * torch.pi / 2),
    ),
    "negative α": (
        lambda self, x: torch.tanh(self.a * x) * self.v + self.w,
        {"a": S, "v": W, "w": B},
        ("tanh", -0.4, 0.0, W),
    ),
    "α that no parameter is": (
        lambda self, x: x / (self.c + x * x).sqrt() * self.v,
        {"c": nn.Parameter(torch.tensor(4.0)), "v": W},
        ("isru", 0.5, 0.0, W),
    ),
    "nested": (
        lambda self, x: self.inner(x).tanh() * self.parts["gamma"],
        {"inner": network_of(lambda self, x: self.a * x, a=ALPHA), "parts": nn.ParameterDict({"gamma": W})},
        ("tanh", 0.7, 0.0, W),
    ),
    "kinks, and a channel of constant output": (
        lambda self, x: (self.a * x).clamp(-1, 1) * self.v + self.w,
        {"a": ALPHA, "v": nn.Parameter(torch.arange(D) * 0.1), "w": B},
        ("hardtanh", 0.7, 0.0, torch.arange(D) * 0.1),
    ),
    "at the first step": (
        lambda self, x: torch.erf(self.a * x + self.b) * self.c + self.d,
        {
            "a": nn.Parameter(torch.ones(1)),
            "b": nn.Parameter(torch.zeros(1)),
            "c": nn.Parameter(torch.ones(D)),
            "d": nn.Parameter(torch.zeros(D)),
        },
        ("derf", 1.0, 0.0, torch.ones(D)),
    ),
}


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise_functions_are_identified_under_any_name(name):
    forward, parts, (curve, alpha, shift, weight) = POINTWISE[name]
    seen = normscope.capture(nn.Sequential(made(forward, parts)), [tokens(3, 7, D)], verify=True)
    (site,) = seen.sites
    function = site.pointwise
    assert (site.name, function.curve, site.bound, seen.skipped) == ("0", curve, 1.0, [])
    for measured, truth in ((function.alpha, alpha), (function.shift, shift), (function.weight, weight)):
        truth = torch.as_tensor(truth, dtype=torch.float32).detach().reshape(-1)
        torch.testing.assert_close(torch.tensor(measured).expand_as(truth), truth, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [{"alpha": torch.tensor([0.5])}, {"alpha": 0.5}])
def test_a_pointwise_name_suffices_without_parameters(kind):
    module = made(lambda self, x: torch.tanh(self.alpha * x), kind, "FixedDyT")
    assert normscope.capture(nn.Sequential(module), [tokens(3, 7, D)]).sites[0].pointwise.alpha == (0.5,)


def excited(self, x):
    return x * torch.sigmoid(x.mean(1, keepdim=True) * self.w + self.b)


NEITHER = {
    "PReLU": nn.PReLU(7),
    "ReLU": made(lambda self, x: (self.a * x).relu() * self.w, {"a": G, "w": W}),
    "residual": made(lambda self, x: x + torch.tanh(self.a * x) * self.w, {"a": G, "w": W}),
    "GELU": made(lambda self, x: F.gelu(self.a * x) * self.w, {"a": G, "w": W}),
    "Snake": made(lambda self, x: x + torch.sin(self.a * x) ** 2 / self.a, {"a": W}),
    "Swish": made(lambda self, x: x * torch.sigmoid(self.b * x), {"b": G}),
    "LeCun's tanh": made(lambda self, x: self.a * torch.tanh(self.b * x), {"a": G, "b": ALPHA}),
    "PACT": made(lambda self, x: torch.minimum(x.relu(), self.a), {"a": G}),
    "gate": made(lambda self, x: torch.tanh(self.g) * x, {"g": W}),
    "sigmoid gate": made(lambda self, x: torch.sigmoid(self.w * x + self.b), {"w": W, "b": B}),
    "squeeze and excitation": made(excited, {"w": W, "b": B}),
    "layer scale": made(lambda self, x: x * self.g, {"g": W}),
    "positions": made(lambda self, x: x + self.p, {"p": learned(7, D)}),
    "tempered softmax": made(lambda self, x: (self.t * x).softmax(-1), {"t": G}),
    "the largest": made(lambda self, x: F.one_hot(x.argmax(-1), D).float(), {"w": G}),
    "difference from the mean": made(lambda self, x: about(x), {}),
    "another shape": made(lambda self, x: F.normalize(x, dim=-1) @ self.w, {"w": learned(D, 3)}),
}


@pytest.mark.parametrize("name", NEITHER)
def test_activations_gates_and_scales_are_neither_sites_nor_skipped(name):
    with pytest.raises(ModelError, match="has no normalization of activations"):
        report_of(nn.Sequential(nn.Identity(), NEITHER[name]), tokens(3, 7, D))


SKIPPED = {
    "part of the channels": (lambda self, x: x / power(x[..., :6]).sqrt() * self.w, "no form that is known"),
    "largest element": (lambda self, x: x / x.abs().amax(-1, keepdim=True) * self.w, "no form that is known"),
    "the whole batch": (lambda self, x: (x - x.mean()) / x.std() * self.w, "no form that is known"),
    "a clamp": (lambda self, x: (self.w * x / (power(x) + 1e-6).sqrt()).clamp(-0.2, 0.2), "no form that is known"),
    "FRN and TLU": (lambda self, x: torch.maximum(x / (power(x) + 1e-6).sqrt(), self.w), "no form that is known"),
    "two steps": (lambda self, x: (x.tanh() + (3 * x).tanh()) * self.w, "no known curve f"),
}


@pytest.mark.parametrize("name", SKIPPED)
def test_other_modules_are_skipped_with_the_reason(name):
    forward, reason = SKIPPED[name]
    (skipped,) = report_of(nn.Sequential(made(forward, {"w": W}), nn.LayerNorm(D)), tokens(1, 7, D)).skipped
    assert (skipped.name, skipped.kind) == ("0", "Rescale") and reason in skipped.reason


def test_a_norm_that_returns_a_tuple_is_skipped():
    def fused(self, x):
        return x * (power(x) + 1e-6).rsqrt() * self.w, x

    model = network_of(lambda self, x: self.norm(self.part(x)[0]), part=made(fused, {"w": W}), norm=nn.LayerNorm(D))
    (skipped,) = report_of(model, tokens(3, 7, D)).skipped
    assert (skipped.name, skipped.reason) == ("part", "it does not take and return one tensor")


def test_running_statistics_are_identified_under_any_name():
    def forward(self, x):
        y = (x - self.running_mean[:, None]) / (self.running_var[:, None] + 1e-5).sqrt()
        return y * self.weight[:, None] + self.bias[:, None]

    parts = {"running_mean": B.detach().clone(), "running_var": W.detach().clone(), "weight": W, "bias": B}
    seen = normscope.capture(nn.Sequential(made(forward, parts), nn.GroupNorm(2, D)), [tokens(3, D, 7)], verify=True)
    assert [site.name for site in seen.sites] == ["0", "1"] and not seen.skipped


def test_a_swap_keeps_weight_and_bias():
    formulas = [FORMULAS[name] for name in ("bias made first", "gain by its logarithm", "one norm per head")]
    model = nn.Sequential(*(made(forward, parts) for forward, parts, *_ in formulas))
    normscope.swap(model, "tanh", report_of(model, tokens(5, 7, D)).sites, init="paper")  # where A = 1
    for module, (_, parts, _, gain) in zip(model, formulas, strict=True):
        torch.testing.assert_close(module.weight.detach(), gain.detach(), rtol=1e-5, atol=0)
        assert module.bias is parts.get("b") is None or torch.allclose(module.bias, parts["b"], atol=1e-6)


def test_simplify_leaves_other_forms():
    forward, parts, *_ = FORMULAS["the Annotated Transformer's"]
    torch.manual_seed(0)
    stream = network_of(
        lambda self, x: self.head(self.norm(self.embed(x) + self.more(x))),
        **{"embed": nn.Linear(D, D), "more": nn.Linear(D, D), "norm": made(forward, parts), "head": nn.Linear(D, 3)},
    )
    x = tokens(5, 7, D)
    before = stream(x)
    normscope.simplify(stream, [x])
    assert type(stream.norm).__name__ == "Rescale"
    torch.testing.assert_close(stream(x), before, rtol=1e-4, atol=1e-5)


def test_padding_is_counted_by_position_of_each_head():
    forward, parts, formula, _ = FORMULAS["one norm per head"]
    x, lengths = tokens(2, 5, D), torch.tensor([5, 2])
    valid = torch.arange(5) < lengths[:, None]
    batch = normscope.Batch((x,), {}, numbered_samples(2), valid)
    seen = normscope.capture(nn.Sequential(made(forward, parts)), [batch])
    stats = seen.stats["0"]
    assert (stats.n_tokens, stats.n_pairs) == (7 * HEADS, 7 * D)
    expected = formula(x.double())[valid].square().sum()
    torch.testing.assert_close(stats.moments[:, 5].sum(), expected, rtol=1e-6, atol=0)
