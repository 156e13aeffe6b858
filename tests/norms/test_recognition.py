"""Norms of unknown classes: identified by what reproduces their output, or skipped with the reason; and no norms."""

import pytest
import timm
import torch
import torch.nn.functional as F
from networks import network_of
from timm.layers import LayerScale, ScaledStdConv2d, StdConv2d
from timm.models import efficientformer, efficientformer_v2
from torch import nn

import normscope
from normscope.errors import ModelError, UsageError
from normscope.inputs.batch import as_batches
from normscope.norms.recognition import is_norm, register_norm, rms_norm
from normscope.norms.trace import find_norms
from normscope.pairs.capture import capture

D = 16


def report_of(model, x):
    return find_norms(model.eval(), next(as_batches([x])))


def noise(*shape):
    return 0.5 + 2 * torch.randn(shape, generator=torch.Generator().manual_seed(0))


def called(name, module_type):
    return type(name, (module_type,), {})


class T5ish(nn.Module):
    """T5's norm, under another name."""

    def __init__(self, d=D):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.linspace(0.5, 2, d)), 1e-6

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon))


class Centred(nn.Module):
    """A LayerNorm whose weight and bias have names that only its author knows."""

    def __init__(self):
        super().__init__()
        self.a_2, self.b_2 = nn.Parameter(torch.linspace(0.5, 2, D)), nn.Parameter(torch.linspace(-1, 1, D))

    def forward(self, x):
        return F.layer_norm(x, (D,)) * self.a_2 + self.b_2


class Unweighted(nn.Module):
    """No weight to tell it by: it is its name that says what it is."""

    def forward(self, x):
        x = x - x.mean(1, keepdim=True)
        return x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6)


@pytest.mark.parametrize("norm_type", [T5ish, Centred, called("MyRMS", T5ish), called("LN", Centred)])
def test_a_norm_under_any_name_is_a_site_whose_output_is_its_modules_own(norm_type):
    norm, x = norm_type(), noise(2, 5, D)
    model = nn.Sequential(nn.Linear(D, D), norm, nn.Linear(D, D)).eval()
    seen = normscope.capture(model, [x], verify=True)
    (site,) = seen.sites
    assert (site.name, site.kind, site.d, site.affine) == ("1", norm_type.__name__, D, True)
    rows = model[0](x).detach().double().reshape(-1, D)
    centred = isinstance(norm, Centred)
    assert site.centred == centred
    y = F.layer_norm(rows, (D,), eps=1e-5) if centred else F.rms_norm(rows, (D,), eps=1e-6)
    # The sums are of float64; the rows come of a float32 layer that may add up in another order: 1e-6.
    torch.testing.assert_close(seen.stats["1"].moments[:, 5].sum(), y.square().sum(), rtol=1e-6, atol=0)
    gamma = find_norms(model, next(as_batches([x]))).kinds["1"].gamma(norm, D)
    assert torch.equal(gamma, next(norm.parameters()).detach())


@pytest.mark.parametrize("name", ["LN", "LN2d", "AdaLN", "MyRMS", "Rms2d", "rms_scale"])
def test_a_name_that_says_rms_or_ln_is_enough_without_weights(name):
    report = report_of(nn.Sequential(called(name, Unweighted)()), noise(2, D, 5, 3))
    assert [(site.name, site.channel_axis, site.eps) for site in report.sites] == [("0", 1, 1e-6)]


def test_letters_within_another_word_say_nothing():
    for name in ("Channels", "Downsample", "Linear", "Alnum", "RMSprop", "XLNet", "Alarms", "Kiln"):
        assert not is_norm(called(name, nn.Module)()), name


@pytest.mark.parametrize("scale", [1.0, 1e-5, 0.0])
@pytest.mark.parametrize("right_behind", [False, True])
def test_what_only_weighs_is_neither_a_site_nor_skipped(scale, right_behind):
    def looked_up(self, x):
        return x + self.table(torch.zeros(x.shape[:2], dtype=torch.long))

    weight, bias = nn.Parameter(torch.linspace(0.5, 2, D)), nn.Parameter(torch.zeros(D))
    shifted = network_of(lambda self, x: x + self.bias, bias=nn.Parameter(torch.linspace(-100, 100, D)))
    # As blind to the scale of large inputs as a norm.
    squashed = network_of(lambda self, x: x.tanh() * self.weight + self.bias, weight=weight, bias=bias)
    lookups = [network_of(looked_up, table=nn.Embedding(rows, D)) for rows in (1, 9)]
    weighing = [LayerScale(D, scale), nn.PReLU(5), shifted, squashed, *lookups, LayerScale(D, scale, True)]
    x = noise(2, 5, D)
    for module in weighing:
        parts = [T5ish(), module] if right_behind else [module, T5ish()]
        report = report_of(nn.Sequential(*parts), x.clone())
        assert [site.name for site in report.sites] == ["0" if right_behind else "1"], module
        assert not report.skipped, (module, report.skipped)


def test_a_module_that_weighs_a_sparse_tensor_is_passed_over():
    to_sparse = network_of(lambda self, x: x.to_sparse())
    sparse = network_of(lambda self, x: torch.sparse.mm(x, self.weight), weight=nn.Parameter(torch.ones(D, 1)))
    report = report_of(nn.Sequential(nn.LayerNorm(D), to_sparse, sparse), noise(3, D))
    assert [site.name for site in report.sites] == ["0"] and not report.skipped


def test_a_norm_of_ones_own_within_one_of_a_norms_name_counts_once():
    class Held(nn.Module):
        def __init__(self, weight=None):
            super().__init__()
            self.inner = T5ish()
            if weight is not None:
                nn.init.constant_(self.inner.weight, weight)

        def forward(self, x):
            return self.inner(x)

    whole = report_of(nn.Sequential(called("OuterNorm", Held)(1.0)), noise(2, 5, D))
    assert [site.name for site in whole.sites] == ["0"] and not whole.skipped
    held = report_of(nn.Sequential(called("OuterNorm", Held)()), noise(2, 5, D))  # whose weight it does not hold
    assert [site.name for site in held.sites] == ["0.inner"] and not held.skipped


def test_what_happens_in_a_module_that_only_weighs_is_seen_and_in_a_norm_is_not():
    weight = nn.Parameter(torch.linspace(0.5, 2, D))
    weighed = network_of(lambda self, x: x + self.weight * F.layer_norm(x, (D,)), weight=weight)
    report = report_of(nn.Sequential(weighed, Centred()), noise(2, 5, D))
    assert [site.name for site in report.sites] == ["0:layer_norm.0", "1"] and not report.skipped


def test_a_convolution_that_normalizes_its_weight_is_no_norm():
    class NormedConv2d(nn.Conv2d):
        def forward(self, x):
            return F.conv2d(x, self.weight / self.weight.norm(), self.bias)

    convolutions = [StdConv2d(3, D, 3), ScaledStdConv2d(D, D, 1), NormedConv2d(D, D, 1)]
    report = report_of(nn.Sequential(*convolutions, nn.GroupNorm(4, D)), noise(2, 3, 8, 8))
    assert [site.name for site in report.sites] == ["3"] and not report.skipped


@pytest.mark.parametrize(
    ("wrapper", "norms"),
    [
        (efficientformer_v2.ConvMlpWithNorm(3), ["0.fc1.bn", "0.fc2.bn"]),  # two layers down
        (efficientformer.ConvMlpWithNorm(3, norm_layer=nn.Identity), []),
    ],
)
def test_a_wrapper_with_a_norm_is_none(wrapper, norms):
    report = report_of(nn.Sequential(wrapper, nn.GroupNorm(1, 3)), noise(2, 3, 8, 8))
    assert [site.name for site in report.sites] == [*norms, "1"] and not report.skipped


class OfWeights(nn.Module):
    """Normalizes what begins as a weight, and has an input written into it or looked up in it."""

    def __init__(self, way):
        super().__init__()
        self.way, self.table, self.norm = way, nn.Parameter(noise(5, D)), nn.LayerNorm(D)

    def forward(self, x):
        match self.way:
            case "written":
                tokens = self.table.clone()
                tokens[1:] = x[0, 1:]
            case "looked up":
                tokens = self.table[x[0, :, 0].argsort(), :]
            case "joined":
                tokens = torch.cat([self.table, x[0]])
            case "alone":
                tokens = torch.cat([self.table, self.table.float() * 2])
        return self.norm(F.layer_norm(tokens, (D,)) + x.mean())


@pytest.mark.parametrize("way", ["written", "looked up", "joined", "alone"])
def test_a_function_on_weights_is_none_of_activations_until_an_input_is_in_them(way):
    report = report_of(nn.Sequential(OfWeights(way)), noise(2, 5, D))
    of_function = [] if way == "alone" else ["0:layer_norm.0"]
    assert [site.name for site in report.sites] == [*of_function, "0.norm"] and not report.skipped


def test_a_network_without_normalization_of_activations_says_so():
    mlp = nn.Sequential(nn.Linear(D, D), nn.PReLU(), LayerScale(D), nn.Linear(D, 2))
    with pytest.raises(ModelError, match=r"This Sequential has no normalization of activations, .* to replace\.$"):
        report_of(mlp, noise(2, D))
    with pytest.raises(ModelError, match=r"has no normalization of activations.*its weights instead, in 29 modules\.$"):
        report_of(timm.create_model("nf_resnet26", pretrained=False), noise(1, 3, 64, 64))


NETWORKS = {
    "vit_tiny_patch16_224": (25, "LayerNorm"),
    "convnext_atto": (17, "LayerNorm"),
    "resnet18": (20, "BatchNorm"),
    "resnetv2_50x1_bit": (49, "GroupNormAct"),
    "efficientformerv2_s0": (75, "BatchNorm"),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_networks_sites_are_the_norms_that_it_holds(name):
    model = timm.create_model(name, pretrained=False)
    size = 64 if "res" in name or "convnext" in name else 224
    report = report_of(model, noise(1, 3, size, size))
    known = (nn.LayerNorm, nn.GroupNorm, nn.BatchNorm2d)
    assert {site.name for site in report.sites} == {n for n, m in model.named_modules() if isinstance(m, known)}
    assert (len(report.sites), not report.skipped) == (NETWORKS[name][0], True)


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


def report_with_norm(module, x, *, dtype=torch.float32):
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
    report = report_with_norm(module, zero_mean(2, 5, 16), dtype=dtype)
    site = report.sites[0]
    assert (site.name, site.kind, site.eps, site.centred) == ("0", "OwnNorm", 1e-6, form == "layer")
    gamma = report.kinds["0"].gamma(module, 16)
    torch.testing.assert_close(gamma, offset + module.weight.detach().float())


@pytest.mark.parametrize("eps", [1e-2, 64e-5, 1e-5, 2e-5, 1e-7, 1e-10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_eps_that_is_not_kept_is_found(eps, dtype):
    assert report_with_norm(OwnNorm("rms", eps, kept=False), 100 * zero_mean(2, 5, 16), dtype=dtype).sites[0].eps == eps


def test_an_eps_that_the_module_does_not_use_is_not_believed():
    other_eps = OwnNorm("rms", 1e-5)
    other_eps.norm_eps = 1e-6
    assert report_with_norm(other_eps, 100 * zero_mean(2, 5, 16)).sites[0].eps == 1e-5


def test_norms_that_show_no_form_or_several_are_skipped():
    hidden = OwnNorm("layer")
    nn.init.zeros_(hidden.weight)
    x = zero_mean(2, 5, 16)
    large = x.clone()
    large[0, 0] *= 1e30 / x[0, 0].abs().max()
    for module, rows, reason in (
        (hidden, x, "more than one form"),
        (OwnNorm("rms"), large, "largest |x| is 1e+30: it may overflow"),
    ):
        (skipped,) = report_with_norm(module, rows).skipped
        assert skipped.name == "0" and reason in skipped.reason


def test_normalizing_by_length_is_known_in_its_three_spellings():
    g, gamma = nn.Parameter(torch.tensor([3.5])), nn.Parameter(torch.linspace(0.5, 2, 8).view(8, 1, 1))
    unit = network_of(lambda self, x: F.normalize(x, dim=1), "UnitNorm")
    scale = network_of(lambda self, x: self.g * F.normalize(x, dim=-1), "ScaleNorm", g=g)
    rms = network_of(lambda self, x: F.normalize(x, dim=1) * 8**0.5 * self.gamma, "ChannelRmsNorm", gamma=gamma)
    x = torch.randn(2, 8, 5, 16, generator=torch.Generator().manual_seed(0))
    for module, axis, affine in ((unit, 1, False), (scale, -1, True), (rms, 1, True)):
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
    assert report_with_norm(module, x).sites[0].name == "0"
    (seen,) = module.inputs
    assert torch.equal(seen, x) and not list(module.buffers())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not module._forward_hooks and not module._forward_pre_hooks


def test_what_cannot_be_tried_says_why():
    def one_input(self, x):
        if not torch.equal(x, expected):
            raise ValueError("this is another input")
        return x * 2

    parts = {
        "one": network_of(one_input, "OneInputNorm"),
        "gated": network_of(lambda self, x, gate: x / x.norm(dim=-1, keepdim=True) * gate, "GatedNorm"),
        "head": network_of(lambda self, x: x / x.abs().amax(-1, keepdim=True), "HeadNorm"),
        "last": nn.LayerNorm(16),
    }
    model = network_of(lambda self, x: self.last(self.head(self.gated(self.one(x), x))), **parts)
    expected = zero_mean(2, 5, 16)
    reasons = {norm.name: norm.reason for norm in find_norms(model, next(as_batches([expected]))).skipped}
    assert "could not be tried on other inputs (ValueError)" in reasons["one"]
    assert "second tensor" in reasons["gated"]
    assert "no form that is known" in reasons["head"]


def test_what_a_norm_subtracts_inside_is_no_branch():
    def normalized(self, x):
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight

    def forward(self, x):
        x = x * 2
        return self.mlp(self.one(x)) * self.mlp(self.two(x))

    one, two = (network_of(normalized, "HandNorm", weight=nn.Parameter(torch.ones(16)), eps=1e-6) for _ in range(2))
    parallel = network_of(forward, one=one, two=two, mlp=nn.Linear(16, 16))
    report = find_norms(parallel, next(as_batches([zero_mean(2, 5, 16)])))
    assert [site.placement for site in report.sites] == [None, None]


def test_groups_and_statistics_of_other_sizes_are_no_fit():
    class ChannelsLast(nn.GroupNorm):
        def forward(self, x):
            return super().forward(x.movedim(-1, 1)).movedim(1, -1)

    statistics = {"running_mean": torch.zeros(3), "running_var": None, "eps": 1e-5}
    odd = network_of(lambda self, x: x.cumsum(-1), "OddNorm", **statistics)
    report = report_with_norm(nn.Sequential(ChannelsLast(4, 16), odd), zero_mean(3, 7, 16))
    assert [site.name for site in report.sites] == ["0.0:group_norm.0", "1"]  # the call, of no other form
    assert [norm.name for norm in report.skipped] == ["0.1"]


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
    expected = [("0", "ChannelsFirst", 1), ("1:layer_norm.0", "layer_norm", -1)]
    assert [(site.name, site.kind, site.channel_axis) for site in report.sites] == expected and not report.skipped


def test_one_call_extends_the_table(table):
    def unit_norm(rows, eps):
        rstd = 1 / rows.abs().sum(dim=-1, keepdim=True)
        return rows * rstd, rstd

    model = nn.Sequential(network_of(lambda self, x: x / x.abs().sum(dim=1, keepdim=True), "MyNorm"))
    with pytest.raises(ModelError, match=r"Skipped: 0 \(MyNorm\)"):
        capture(model, [torch.randn(2, 8, 4)])
    register_norm(type(model[0]), axes=1, normalize=unit_norm, centred=False)
    seen = capture(model, [torch.randn(2, 8, 4)], verify=True)
    assert (seen.sites[0].kind, seen.sites[0].normalized_shape) == ("MyNorm", (8,))
    with pytest.raises(UsageError, match="axes=\\(\\) names none"):
        register_norm(type(model[0]), axes=())
