"""Norms of unknown classes: recognized by their output, skipped with a reason, or no norms at all."""

import pytest
import timm
import torch
import torch.nn.functional as F
from networks import ChannelsFirst, network_of, report_of
from timm.layers import LayerScale, ScaledStdConv2d, StdConv2d
from timm.models import efficientformer, efficientformer_v2
from torch import nn

import normscope
from normscope.errors import ModelError, UsageError
from normscope.norms.formulas import rms_norm
from normscope.norms.recognition import is_norm, register_norm

D = 16


def noise(*shape):
    return 0.5 + 2 * torch.randn(shape, generator=torch.Generator().manual_seed(0))


def zero_mean(*shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return x - x.mean(-1, keepdim=True)


class OwnNorm(nn.Module):
    """A norm as users write one: a form over the last axis, an eps as an attribute or not, and a weight."""

    def __init__(self, form="rms", eps=1e-6, offset=0.0, keeps_eps=True):
        super().__init__()
        self.form, self.offset, self.hidden_constant = form, offset, eps
        self.weight = nn.Parameter(torch.linspace(0.2, 1.7, D) - offset)
        if keeps_eps:
            self.norm_eps = eps

    def forward(self, x):
        xf = x.float()
        if self.form != "rms":
            xf = xf - xf.mean(-1, keepdim=True)
        y = xf * torch.rsqrt(xf.square().mean(-1, keepdim=True) + self.hidden_constant)
        return (y * (self.offset + self.weight.float())).to(x.dtype)


def unweighted(self, x):
    """A norm over channels without a weight, which only its name identifies."""
    x = x - x.mean(1, keepdim=True)
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6)


@pytest.mark.parametrize("name", ["LN", "LN2d", "AdaLN", "MyRMS", "Rms2d", "rms_scale"])
def test_rms_or_ln_in_a_name_suffices_without_weights(name):
    report = report_of(nn.Sequential(network_of(unweighted, name)), noise(2, D, 5, 3))
    assert [(site.name, site.kind, site.channel_axis, site.eps) for site in report.sites] == [("0", name, 1, 1e-6)]


def test_letters_within_another_word_are_no_name_of_a_norm():
    for name in ("Channels", "Downsample", "Linear", "Alnum", "RMSprop", "XLNet", "Alarms", "Kiln"):
        assert not is_norm(network_of(unweighted, name)), name


@pytest.mark.parametrize("norm_first", [False, True])
def test_modules_that_only_weigh_are_neither_sites_nor_skipped(norm_first):
    def looked_up(self, x):
        return x + self.table(torch.zeros(x.shape[:2], dtype=torch.long))

    weight, bias = nn.Parameter(torch.linspace(0.5, 2, D)), nn.Parameter(torch.zeros(D))
    shifted = network_of(lambda self, x: x + self.bias, bias=nn.Parameter(torch.linspace(-100, 100, D)))
    # As blind to the scale of large inputs as a norm.
    squashed = network_of(lambda self, x: x.tanh() * self.weight + self.bias, weight=weight, bias=bias)
    scales = [LayerScale(D, 1.0), LayerScale(D, 1e-5), LayerScale(D, 0.0), LayerScale(D, 0.0, True)]
    for module in (*scales, shifted, squashed, network_of(looked_up, table=nn.Embedding(9, D))):
        parts = [OwnNorm(), module] if norm_first else [module, OwnNorm()]
        report = report_of(nn.Sequential(*parts), noise(2, 5, D))
        assert [site.name for site in report.sites] == ["0" if norm_first else "1"], module
        assert not report.skipped, (module, report.skipped)


def test_sparse_tensors_are_passed_over():
    to_sparse = network_of(lambda self, x: x.to_sparse())
    sparse = network_of(lambda self, x: torch.sparse.mm(x, self.weight), weight=nn.Parameter(torch.ones(D, 1)))
    report = report_of(nn.Sequential(nn.LayerNorm(D), to_sparse, sparse), noise(3, D))
    assert [site.name for site in report.sites] == ["0"] and not report.skipped


@pytest.mark.parametrize(("weight", "site"), [(1.0, "0"), (None, "0.inner")])
def test_a_norm_within_a_module_of_a_norms_name_counts_once(weight, site):
    inner = type("T5ish", (OwnNorm,), {})()
    if weight is not None:
        nn.init.constant_(inner.weight, weight)
    outer = network_of(lambda self, x: self.inner(x), "OuterNorm", inner=inner)
    report = report_of(nn.Sequential(outer), noise(2, 5, D))
    assert [site.name for site in report.sites] == [site] and not report.skipped


def test_functions_within_modules_that_only_weigh_are_sites():
    weight = nn.Parameter(torch.linspace(0.5, 2, D))
    weighed = network_of(lambda self, x: x + self.weight * F.layer_norm(x, (D,)), weight=weight)
    report = report_of(nn.Sequential(weighed, OwnNorm("layer")), noise(2, 5, D))
    assert [site.name for site in report.sites] == ["0:layer_norm.0", "1"] and not report.skipped


class NormedConv2d(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, self.weight / self.weight.norm(), self.bias)


@pytest.mark.parametrize(
    ("module", "norms"),
    [
        (nn.Sequential(StdConv2d(3, 4, 3), ScaledStdConv2d(4, 4, 1), NormedConv2d(4, 3, 1)), []),
        (efficientformer_v2.ConvMlpWithNorm(3), ["0.fc1.bn", "0.fc2.bn"]),  # two layers down
        (efficientformer.ConvMlpWithNorm(3, norm_layer=nn.Identity), []),
        (nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 3, 1)), []),
    ],
    ids=["convolutions", "MLP with norms", "MLP without", "weight norm"],
)
def test_modules_with_norms_or_normalized_weights_are_no_norms(module, norms):
    report = report_of(nn.Sequential(module.eval(), nn.GroupNorm(1, 3)), noise(2, 3, 8, 8))
    assert [site.name for site in report.sites] == [*norms, "1"] and not report.skipped


TABLE = nn.Parameter(noise(5, D))


@pytest.mark.parametrize("way", ["written", "looked up", "joined", "alone"])
def test_functions_on_weights_are_sites_only_if_an_input_is_in_them(way):
    def forward(self, x):
        tokens = {
            "written": lambda: self.table.clone().index_copy(0, torch.arange(1, 5), x[0, 1:]),
            "looked up": lambda: self.table[x[0, :, 0].argsort(), :],
            "joined": lambda: torch.cat([self.table, x[0]]),
            "alone": lambda: torch.cat([self.table, self.table.float() * 2]),
        }[way]()
        return self.norm(F.layer_norm(tokens, (D,)) + x.mean())

    report = report_of(network_of(forward, table=TABLE, norm=nn.LayerNorm(D)), noise(2, 5, D))
    functions = [] if way == "alone" else ["(model):layer_norm.0"]
    assert [site.name for site in report.sites] == [*functions, "norm"] and not report.skipped


def test_networks_without_normalization_of_activations_are_refused():
    mlp = nn.Sequential(nn.Linear(D, D), nn.PReLU(), LayerScale(D), nn.Linear(D, 2))
    with pytest.raises(ModelError, match=r"This Sequential has no normalization of activations, .* to replace\.$"):
        report_of(mlp, noise(2, D))
    network = timm.create_model("test_nfnet")
    convolutions = sum(isinstance(module, ScaledStdConv2d) for module in network.modules())
    with pytest.raises(ModelError, match=rf"its weights instead, in {convolutions} modules\.$"):
        report_of(network, noise(1, 3, 64, 64))


@pytest.mark.parametrize("name", ["test_vit", "test_convnext", "test_resnet", "test_efficientnet_gn"])
def test_the_sites_of_timms_networks_are_their_norms(name):
    model = timm.create_model(name).eval()
    report = report_of(model, noise(1, 3, 160, 160))
    norms = (nn.LayerNorm, nn.GroupNorm, nn.BatchNorm2d)
    assert {site.name for site in report.sites} == {n for n, m in model.named_modules() if isinstance(m, norms)}
    assert len(report.sites) > 8 and not report.skipped


def with_layer_norm(module, x, dtype=torch.float32):
    """Find the norms of a module before a LayerNorm, in another dtype."""
    return report_of(nn.Sequential(module, nn.LayerNorm(D)).to(dtype), x.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("form", "offset"), [("rms", 0.0), ("rms", 1.0), ("layer", 0.0), ("layer", 1.0)])
def test_norms_are_recognized_on_inputs_of_mean_zero(form, offset, dtype):
    module = OwnNorm(form, offset=offset)
    report = with_layer_norm(module, zero_mean(2, 5, D), dtype)
    site = report.sites[0]
    assert (site.name, site.kind, site.eps, site.centred) == ("0", "OwnNorm", 1e-6, form == "layer")
    torch.testing.assert_close(report.kinds["0"].gamma(module, D), offset + module.weight.detach().float())


@pytest.mark.parametrize("eps", [1e-2, 64e-5, 1e-7, 1e-10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_eps_that_is_no_attribute_is_measured(eps, dtype):
    assert with_layer_norm(OwnNorm(eps=eps, keeps_eps=False), 100 * zero_mean(2, 5, D), dtype).sites[0].eps == eps


def test_an_eps_that_is_not_used_is_ignored():
    module = OwnNorm(eps=1e-5)
    module.norm_eps = 1e-6
    assert with_layer_norm(module, 100 * zero_mean(2, 5, D)).sites[0].eps == 1e-5


def test_norms_of_no_form_or_several_are_skipped():
    hidden, large = OwnNorm("layer"), zero_mean(2, 5, D)
    nn.init.zeros_(hidden.weight)
    large[0, 0] *= 1e30 / large[0, 0].abs().max()
    for module, x, reason in (
        (hidden, zero_mean(2, 5, D), "more than one form"),
        (OwnNorm(), large, "largest |x| is 1e+30: it may overflow"),
    ):
        (skipped,) = with_layer_norm(module, x).skipped
        assert skipped.name == "0" and reason in skipped.reason


def test_three_spellings_of_normalizing_by_length():
    g, gamma = nn.Parameter(torch.tensor([3.5])), nn.Parameter(torch.linspace(0.5, 2, 8).view(8, 1, 1))
    unit = network_of(lambda self, x: F.normalize(x, dim=1), "UnitNorm")
    scale = network_of(lambda self, x: self.g * F.normalize(x, dim=-1), "ScaleNorm", g=g)
    rms = network_of(lambda self, x: F.normalize(x, dim=1) * 8**0.5 * self.gamma, "ChannelRmsNorm", gamma=gamma)
    x = noise(2, 8, 5, D)
    model = network_of(lambda self, x: [part(x) for part in self.parts], parts=nn.ModuleList([unit, scale, rms]))
    seen = normscope.capture(model, [x], verify=True)
    for site, axis, affine in zip(seen.sites, (1, -1, 1), (False, True, True), strict=True):
        assert (site.channel_axis, site.affine, site.centred, site.bounded) == (axis, affine, False, True)
        y = rms_norm(x.movedim(axis, -1).reshape(-1, site.d), 0.0)[0].double()
        torch.testing.assert_close(seen.stats[site.name].moments[:, 5].sum(), y.square().sum(), rtol=1e-6, atol=0)


def test_trials_leave_the_module_as_it_was():
    class CountingNorm(OwnNorm):
        def __init__(self):
            super().__init__()
            self.inputs = []

        def forward(self, x):
            self.inputs.append(x.detach().clone())
            self.register_buffer("seen", self.inputs[-1])
            return super().forward(x)

    module, x = CountingNorm(), zero_mean(2, 5, D)
    state = torch.random.get_rng_state()
    assert with_layer_norm(module, x).sites[0].name == "0"
    (seen,) = module.inputs
    assert torch.equal(seen, x) and not list(module.buffers())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not module._forward_hooks and not module._forward_pre_hooks


def test_modules_that_cannot_be_tried_are_skipped_with_the_reason():
    def one_input(self, x):
        if not torch.equal(x, expected):
            raise ValueError("this is another input")
        return x * 2

    parts = {
        "one": network_of(one_input, "OneInputNorm"),
        "gated": network_of(lambda self, x, gate: x / x.norm(dim=-1, keepdim=True) * gate, "GatedNorm"),
        "head": network_of(lambda self, x: x / x.abs().amax(-1, keepdim=True), "HeadNorm"),
        "last": nn.LayerNorm(D),
    }
    model = network_of(lambda self, x: self.last(self.head(self.gated(self.one(x), x))), **parts)
    expected = zero_mean(2, 5, D)
    reasons = {norm.name: norm.reason for norm in report_of(model, expected).skipped}
    assert "could not be tried on other inputs (ValueError)" in reasons["one"]
    assert "second tensor" in reasons["gated"]
    assert "no form that is known" in reasons["head"]


def test_a_norms_own_subtraction_is_no_branch():
    def forward(self, x):
        x = x * 2
        return self.mlp(self.one(x)) * self.mlp(self.two(x))

    model = network_of(forward, one=OwnNorm("layer"), two=OwnNorm("layer"), mlp=nn.Linear(D, D))
    assert [site.placement for site in report_of(model, zero_mean(2, 5, D)).sites] == [None, None]


class Activated(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x).relu()


class ChannelsLast(nn.GroupNorm):
    def forward(self, x):
        return super().forward(x.movedim(-1, 1)).movedim(1, -1)


def test_subclasses_with_a_forward_of_their_own_are_recognized_by_their_output():
    statistics = {"running_mean": torch.zeros(3), "running_var": None, "eps": 1e-5}
    odd = network_of(lambda self, x: x.cumsum(-1), "OddNorm", **statistics)
    model = nn.Sequential(ChannelsFirst(D), Activated(9), network_of(lambda self, x: x.mT), ChannelsLast(4, D), odd)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    report = report_of(model.eval(), noise(2, D, 9))
    functions = [("1:layer_norm.0", "layer_norm", -1), ("3:group_norm.0", "group_norm", 1)]
    assert [(site.name, site.kind, site.channel_axis) for site in report.sites] == [
        ("0", "ChannelsFirst", 1),
        *functions,
    ]
    assert [norm.name for norm in report.skipped] == ["4"]


def test_register_norm_extends_the_table(table):
    def unit_norm(rows, eps):
        rstd = 1 / rows.abs().sum(dim=-1, keepdim=True)
        return rows * rstd, rstd

    model, x = nn.Sequential(network_of(lambda self, x: x / x.abs().sum(dim=1, keepdim=True), "MyNorm")), noise(2, 8, 4)
    with pytest.raises(ModelError, match=r"Skipped: 0 \(MyNorm\)"):
        normscope.capture(model, [x])
    register_norm(type(model[0]), axes=1, normalize=unit_norm, centred=False)
    seen = normscope.capture(model, [x], verify=True)
    assert (seen.sites[0].kind, seen.sites[0].normalized_shape) == ("MyNorm", (8,))
    with pytest.raises(UsageError, match="axes=\\(\\) names none"):
        register_norm(type(model[0]), axes=())
