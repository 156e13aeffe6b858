"""Norms that a network calls as functions: sites of their own, captured and verified as norm modules are."""

import contextlib
import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from networks import network_of, numbered_batches, numbered_samples, sums_of
from torch import nn

import normscope
from normscope.errors import DataError, ModelError, UsageError
from normscope.inputs.batch import Batch
from normscope.norms.sites import short_names
from normscope.pairs.storage import pack_sums

D, HEADS, WORDS = 24, 4, 30


def norm(x):
    return F.rms_norm(x, (x.size(-1),))


class Attention(nn.Module):
    """Causal attention with a norm of queries and keys, as nanochat has it."""

    def __init__(self):
        super().__init__()
        self.c_q, self.c_k, self.c_v, self.c_proj = (nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (HEADS, D // HEADS)) for layer in (self.c_q, self.c_k, self.c_v))
        q, k = norm(q), norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.c_fc, self.c_proj = Attention(), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x):
        x = x + self.attn(norm(x))
        return x + self.c_proj(self.c_fc(norm(x)).relu().square())


class Nanochat(nn.Module):
    """A language model without a norm module and without a weight of a norm."""

    def __init__(self, depth=2):
        super().__init__()
        torch.manual_seed(0)
        self.wte, self.lm_head = nn.Embedding(WORDS, D), nn.Linear(D, WORDS, bias=False)
        self.h = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, idx):
        x = norm(self.wte(idx))
        for block in self.h:
            x = block(x)
        return 15 * torch.tanh(self.lm_head(norm(x)) / 15)


class NanoGPT(nn.Module):
    """A language model whose blocks hold the weights of the norms that they call: with and without a bias."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.wte, self.mlp = nn.Embedding(WORDS, D), nn.Linear(D, D)
        self.ln_1, self.ln_2, self.bias = (nn.Parameter(0.5 + torch.rand(D)) for _ in range(3))

    def forward(self, idx):
        x = self.wte(idx)
        x = x + self.mlp(F.layer_norm(x, self.ln_1.shape, self.ln_1, None, 1e-4))
        return F.layer_norm(input=x, normalized_shape=[D], weight=self.ln_2, bias=self.bias)


TEXTS = numbered_batches(2, lambda generator, size: torch.randint(WORDS, (size, 7), generator=generator), size=3)


@contextlib.contextmanager
def recorded(*functions):
    """Record the input and the output of every call of norm functions, by replacing them in torch."""
    calls = []

    def recording(function):
        def call(input, *args, **kwargs):
            output = function(input, *args, **kwargs)
            calls.append((input.detach().double(), output.detach().double()))
            return output

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in functions:
            patch.setattr(F, name, recording(getattr(F, name)))
        yield calls


def test_every_norm_of_a_network_like_nanochat_is_a_site():
    seen = normscope.capture(Nanochat(), TEXTS, verify=True)
    block = [("", "pre-norm"), (".attn", "qk"), (".attn", "qk"), ("", "pre-norm")]
    names = [f"h.{i}{part}:rms_norm.{n}" for i in range(2) for (part, _), n in zip(block, (0, 0, 1, 1), strict=True)]
    expected = dict(zip(names, [placement for _, placement in block] * 2, strict=True))
    expected = {"(model):rms_norm.0": "post-norm", **expected, "(model):rms_norm.1": "final"}  # to which blocks add
    assert {site.name: site.placement for site in seen.sites} == expected and not seen.skipped
    assert {(site.kind, site.affine, site.centred, site.bounded, site.form) for site in seen.sites} == {
        ("rms_norm", False, False, True, "rms_norm")
    }
    assert {site.name: site.d for site in seen.sites if ".attn" in site.name} == {
        name: D // HEADS for name in names if ".attn" in name
    }
    assert seen.sites[0].eps == torch.finfo(torch.float32).eps  # torch's, where none is given


def test_weights_of_a_called_norm_are_no_part_of_y():
    seen = normscope.capture(NanoGPT(), TEXTS, verify=True, by_gamma=True)
    assert [(site.name, site.affine, site.eps) for site in seen.sites] == [
        ("(model):layer_norm.0", True, 1e-4),
        ("(model):layer_norm.1", True, 1e-5),
    ]
    model = NanoGPT()
    with recorded("layer_norm") as calls, torch.no_grad():
        for batch in TEXTS:
            model(*batch.args)
    for number, (site, weight, bias) in enumerate(
        zip(seen.sites, (model.ln_1, model.ln_2), (0, model.bias), strict=True)
    ):
        outputs = torch.cat([output for _, output in calls[number::2]])
        stats = seen.stats[site.name]
        y = (outputs - bias) / weight
        torch.testing.assert_close(stats.moments[:, 5].sum(), y.square().sum(), rtol=1e-5, atol=0)
        weighted = (weight * y).square().sum()
        torch.testing.assert_close(stats.gamma_moments[:, 5].sum(), weighted, rtol=1e-5, atol=0)


def with_statistics(module):
    module.running_mean.copy_(torch.linspace(-1, 1, 6))
    module.running_var.copy_(torch.linspace(0.5, 2, 6))
    return module


MEAN, VARIANCE, WEIGHT = torch.linspace(-1, 1, 6), torch.linspace(0.5, 2, 6), torch.linspace(0.2, 1, 6)
FUNCTIONS = {
    "layer_norm": (lambda x: F.layer_norm(x, (6, 4)), nn.LayerNorm((6, 4), elementwise_affine=False)),
    "torch.layer_norm": (
        lambda x: torch.layer_norm(eps=1e-3, normalized_shape=[4], input=x),
        nn.LayerNorm(4, 1e-3, False),
    ),
    "rms_norm": (lambda x: F.rms_norm(x, [4], eps=1e-3), nn.RMSNorm(4, 1e-3, False)),
    "torch.rms_norm": (lambda x: torch.rms_norm(x, [4]), nn.RMSNorm(4, elementwise_affine=False)),
    "group_norm": (lambda x: F.group_norm(x, 2, eps=1e-3), nn.GroupNorm(2, 6, 1e-3, False)),
    "torch.group_norm": (lambda x: torch.group_norm(x, 3), nn.GroupNorm(3, 6, affine=False)),
    "instance_norm": (lambda x: F.instance_norm(x, eps=1e-3), nn.InstanceNorm1d(6, 1e-3)),
    "instance_norm, running": (
        lambda x: F.instance_norm(x, MEAN, VARIANCE, use_input_stats=False),
        with_statistics(nn.InstanceNorm1d(6, track_running_stats=True)),
    ),
    "batch_norm": (lambda x: F.batch_norm(x, MEAN, VARIANCE), with_statistics(nn.BatchNorm1d(6, affine=False))),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_has_the_sums_of_the_module_that_computes_the_same(name, dtype):
    function, module = FUNCTIONS[name]
    batches = [torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(n)).to(dtype) for n in range(2)]
    called = normscope.capture(network_of(lambda self, x: function(x)), batches, verify=True, by_gamma=True)
    plain = normscope.capture(nn.Sequential(copy.deepcopy(module)), batches, verify=True, by_gamma=True)
    (ours,), (theirs,) = called.sites, plain.sites
    kind = name.removeprefix("torch.").partition(",")[0]
    assert (ours.name, ours.kind) == (f"(model):{kind}.0", kind)
    for attribute in ("normalized_shape", "channels", "eps", "tokens_per_sample", "grouped", "bounded", "centred"):
        assert getattr(ours, attribute) == getattr(theirs, attribute), attribute
    expected = pack_sums(plain.stats["0"])
    for key, tensor in pack_sums(called.stats[ours.name]).items():
        assert torch.equal(tensor, expected[key]), key


def test_functions_without_a_token_of_their_own_are_skipped():
    def forward(self, x):
        x = F.layer_norm(x, (4,), WEIGHT[:4])
        x = F.batch_norm(x, None, None, training=True)
        x = torch.native_layer_norm(x, [4], None, None, 1e-5)[0]
        x = torch.ops.aten.layer_norm(x, [4])
        x = F.local_response_norm(x, 2)
        return torch.vmap(lambda row: F.rms_norm(row, (4,)))(x)

    seen = normscope.capture(network_of(forward), [torch.randn(3, 6, 4)], verify=True)
    assert [site.name for site in seen.sites] == ["(model):layer_norm.0"]
    reasons = ("whole batch", "an operator behind", "an operator behind", "neighbouring channels", "torch.vmap")
    names = ("batch_norm.1", "native_layer_norm.2", "layer_norm.3", "local_response_norm.4", "rms_norm.5")
    for skipped, name, reason in zip(seen.skipped, names, reasons, strict=True):
        assert skipped.name == f"(model):{name}" and skipped.kind == name[:-2] and reason in skipped.reason


def test_calls_outside_of_modules_are_sites():
    own = network_of(lambda self, x: self.part(x), "OwnNorm", part=network_of(lambda self, x: norm(x)))
    model = nn.Sequential(own, nn.Linear(6, 6))
    batches = [torch.randn(3, 6)]
    seen = normscope.capture(model, batches, forward=lambda model, x: F.rms_norm(model(norm(x)), (6,)), verify=True)
    assert [site.name for site in seen.sites] == ["(forward):rms_norm.0", "0", "(forward):rms_norm.1"]
    assert not seen.skipped


class TwoTowers(nn.Module):
    """A network with norms in methods that are not its forward, as CLIP's encode_image."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.dense, self.ln = nn.Linear(6, 6), nn.LayerNorm(6)
        self.tower = network_of(lambda self, x: self.inner(norm(x)), inner=nn.Linear(6, 6))
        type(self.tower).encode = lambda self, x: F.layer_norm(self.inner(x), (6,))

    def encode_image(self, x):
        return self.normed(self.ln(self.dense(x)))

    def normed(self, x):
        return F.rms_norm(x, (6,))

    def forward(self, image, text):
        return self.encode_image(image) @ self.encode_image(text).mT


WAYS = {
    "a method": (lambda model, x: model.encode_image(x), ["ln", "(forward):rms_norm.0"]),
    "two methods": (
        lambda model, x: model.normed(model.encode_image(x)),
        ["ln", "(forward):rms_norm.0", "(forward):rms_norm.1"],
    ),
    "of a part": (lambda model, x: model.tower.encode(model.dense(x)), ["(forward):layer_norm.0"]),
    "a part and its method": (
        lambda model, x: model.tower.encode(model.tower(x)),
        ["tower:rms_norm.0", "(forward):layer_norm.0"],
    ),
    "the user's own": (
        lambda model, x: F.group_norm(model.dense(x).mT, 2) + norm(model.ln(x)).mT,
        ["(forward):group_norm.0", "ln", "(forward):rms_norm.1"],
    ),
    "forward itself": (lambda model, x: norm(model.tower.forward(x)), ["(forward):rms_norm.0", "(forward):rms_norm.1"]),
    "beside the network's": (
        lambda model, x: norm(model(x, x + 1)),
        ["ln", "(model):rms_norm.0", "(model):rms_norm.1", "(forward):rms_norm.0"],
    ),
    "a wrapped network": (
        lambda model, x: getattr(model, "module", model).encode_image(x),
        ["ln", "(forward):rms_norm.0"],
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_functions_are_sites_in_every_method(way):
    forward, names = WAYS[way]
    batches = [torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(n)) for n in range(2)]
    model = TwoTowers().eval()
    network = nn.DataParallel(model) if way == "a wrapped network" else model
    seen = normscope.capture(network, batches, forward=forward, verify=True)
    assert [site.name for site in seen.sites] == names
    assert {norm.reason for norm in seen.skipped} <= {"not called"}
    with recorded("layer_norm", "rms_norm", "group_norm") as calls, torch.no_grad():
        for batch in batches:
            forward(model, batch)
    moments = sum(stats.moments.sum((0, 2)) for stats in seen.stats.values())
    x, y = (torch.cat([tensor.flatten() for tensor in tensors]) for tensors in zip(*calls, strict=True))
    torch.testing.assert_close(moments, sums_of(x, y), rtol=1e-5, atol=1e-4)  # no norm has a weight


def test_weights_that_are_normalized_outside_of_modules_are_no_activations():
    model, batches = TwoTowers(), [nn.Parameter(torch.randn(3, 6))]
    seen = normscope.capture(model, batches, forward=lambda model, x: model.ln(x) @ norm(2 * model.dense.weight).mT)
    assert [site.name for site in seen.sites] == ["ln"]
    seen = normscope.capture(model, batches, forward=lambda model, x: norm(x))  # what a batch brings is an activation
    assert [site.name for site in seen.sites] == ["(forward):rms_norm.0"]


def test_a_norm_of_weights_counts_but_is_no_site():
    def standardized(self, x):
        weight = F.layer_norm(self.conv.weight, self.conv.weight.shape[1:])
        return F.group_norm(F.conv1d(x, weight), 2)

    model = network_of(standardized, conv=nn.Conv1d(6, 4, 1))
    seen = normscope.capture(model, [torch.randn(3, 6, 5), torch.randn(2, 6, 5)], verify=True)
    assert [(site.name, seen.stats[site.name].n_pairs) for site in seen.sites] == [("(model):group_norm.1", 5 * 4 * 5)]
    assert not seen.skipped


def test_two_calls_of_a_module_are_two_calls_of_its_sites():
    inner = network_of(lambda self, x: norm(x))
    model = network_of(lambda self, x: self.inner(self.inner(x) + 1), inner=inner)
    seen = normscope.capture(model, [torch.randn(3, 5, 6)], verify=True)
    (site,) = seen.sites
    assert (site.name, site.calls, site.tokens_per_sample) == ("inner:rms_norm.0", 2, 10)
    assert seen.stats[site.name].n_pairs == 2 * 3 * 5 * 6


def test_padding_is_in_no_sum():
    lengths = torch.tensor([7, 4, 2])
    valid = torch.arange(7) < lengths[:, None]
    ids = torch.randint(WORDS, (3, 7), generator=torch.Generator().manual_seed(0))
    samples = numbered_samples(3)
    model = Nanochat().double()
    together = normscope.capture(model, [Batch((ids,), {}, samples, valid=valid)], verify=True)
    alone = [Batch((ids[i : i + 1, :length],), {}, samples[i : i + 1]) for i, length in enumerate(lengths)]
    apart = normscope.capture(model, alone)
    for site in apart.sites:
        stats, expected = together.stats[site.name], apart.stats[site.name]
        assert stats.n_pairs == expected.n_pairs == 13 * D
        torch.testing.assert_close(stats.moments.sum((0, 2)), expected.moments.sum((0, 2)), rtol=1e-9, atol=1e-9)


def of_length(shortest, short, long):
    """A network with a part that calls norms as ``short`` or ``long`` does, by the number of positions."""
    part = network_of(lambda self, x: (short if x.shape[1] < shortest else long)(x))
    return nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), part)


CHANGES = {
    "more": (norm, lambda x: norm(norm(x)), "rms_norm, rms_norm, not rms_norm"),
    "fewer": (lambda x: norm(norm(x)), norm, "rms_norm, not rms_norm, rms_norm"),
    "none": (norm, torch.tanh, "none, not rms_norm"),
    "first": (torch.tanh, norm, "rms_norm, not none"),
    "another function": (norm, lambda x: F.layer_norm(x, (6,)), "layer_norm, not rms_norm"),
    "another order": (
        lambda x: F.layer_norm(norm(x), (6,)),
        lambda x: norm(F.layer_norm(x, (6,))),
        "layer_norm, rms_norm, not rms_norm, layer_norm",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_pass_with_other_calls_than_the_first_is_refused(change):
    short, long, words = CHANGES[change]
    model = of_length(5, short, long)
    with pytest.raises(ModelError, match=f"The forward of 2 called other norm functions .*: {words}\\."):
        normscope.capture(model, [torch.randn(2, 3, 6), torch.randn(2, 8, 6)])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_passes_outside_of_modules_are_compared_with_the_first():
    calls = iter([norm, torch.tanh])
    with pytest.raises(ModelError, match=r"The code outside of modules called other .*: none, not rms_norm\."):
        normscope.capture(TwoTowers(), [torch.randn(3, 6)], forward=lambda model, x: next(calls)(model.ln(x)))


def test_sequences_that_differ_between_calls_of_one_pass_are_all_expected():
    part = network_of(lambda self, x, twice=False: norm(norm(x)) if twice else norm(x))
    model = network_of(lambda self, x: self.part(self.part(x), twice=True), part=part)
    seen = normscope.capture(model, [torch.randn(2, 3, 6)] * 2)
    assert {site.name: site.calls for site in seen.sites} == {"part:rms_norm.0": 2, "part:rms_norm.1": 1}
    assert [seen.stats[site.name].n_pairs for site in seen.sites] == [2 * 2 * 36, 2 * 36]


def test_a_norm_over_positions_of_another_number_is_refused():
    model = network_of(lambda self, x: F.layer_norm(x, x.shape[1:]))
    with pytest.raises(DataError, match=r"layer_norm\.0 \(input \(2, 8, 6\)\) has 48 channels, but 18 with the first"):
        normscope.capture(model, [torch.randn(2, 3, 6), torch.randn(2, 8, 6)])


def test_a_norm_over_its_whole_input_takes_inputs_of_any_length():
    """As torchaudio normalizes waveforms, each by itself; tokens of a batch of two are no sample's own."""
    model = network_of(lambda self, x: F.layer_norm(x, x.shape))
    waves = [torch.randn(1, length, generator=torch.Generator().manual_seed(length)) * 3 + 1 for length in (50, 80, 64)]
    seen = normscope.capture(model, waves, verify=True)
    (site,) = seen.sites
    assert (site.normalized_shape, site.channels, site.grouped, site.tokens_per_sample) == ((1, 50), 1, True, 1)
    stats, rows = seen.stats[site.name], [wave.double() for wave in waves]
    assert (stats.n_pairs, stats.n_tokens, stats.fold_by) == (194, 3, "source")
    x, y = torch.cat(rows, 1), torch.cat([F.layer_norm(row, row.shape) for row in rows], 1)
    torch.testing.assert_close(stats.moments.sum((0, 2)), sums_of(x, y), rtol=1e-12, atol=1e-12)
    both = normscope.capture(model, [torch.randn(2, 50), torch.randn(2, 50)], verify=True).stats[site.name]
    assert (both.n_pairs, both.n_tokens, both.fold_by) == (200, 2, None)


def test_memory_that_ends_in_a_pass_leaves_its_halves_countable():
    def forward(self, x):
        if len(x) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return norm(x)

    model = network_of(lambda self, x: self.part(norm(x)), part=network_of(forward))
    seen = normscope.capture(model, numbered_batches(1, lambda g, n: torch.randn(n, 5, 6, generator=g)))
    assert {name: stats.n_pairs for name, stats in seen.stats.items()} == {
        "(model):rms_norm.0": 8 * 30,
        "part:rms_norm.0": 8 * 30,
    }


def test_a_formula_that_is_written_out_in_a_larger_forward_is_no_site():
    def forward(self, x):
        x = self.norm(x)
        return self.dense(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)) + x

    model = network_of(forward, norm=nn.LayerNorm(6), dense=nn.Linear(6, 6))
    seen = normscope.capture(model, [torch.randn(3, 6)])
    assert [site.name for site in seen.sites] == ["norm"] and not seen.skipped


def test_sites_of_functions_survive_files_merges_choices_and_fits(tmp_path):
    first, second = (normscope.capture(Nanochat(), [batch]) for batch in TEXTS)
    path = normscope.save_capture(first, tmp_path / "seen.safetensors")
    both = normscope.merge_captures([path, second])
    whole = normscope.capture(Nanochat(), TEXTS)
    assert both.sites == whole.sites
    for name, stats in whole.stats.items():
        torch.testing.assert_close(both.stats[name].moments, stats.moments, rtol=1e-12, atol=1e-12)
    chosen = whole.only("h.*.attn:rms_norm.1, (model):*")
    assert [site.index for site in chosen.sites] == [0, 3, 7, 9]
    assert [site.name for site in whole.only(2).sites] == [whole.sites[0].name, whole.sites[-1].name]
    assert {fit.site for fit in normscope.fit(whole, "tanh")} == set(whole.stats)


def test_short_names_of_functions_keep_their_numbers():
    names = ["(model):rms_norm.0", "h.3:rms_norm.0", "h.3.attn:rms_norm.0", "h.3.attn:rms_norm.1", "h.3.ln"]
    assert list(short_names(names).values()) == ["(model):rms.0", "3:rms.0", "3.attn:rms.0", "3.attn:rms.1", "3.ln"]
    assert list(short_names(["enc.a:layer_norm.0", "enc.b:group_norm.1"]).values()) == ["a:layer.0", "b:group.1"]


def mixed():
    """A residual block between a norm module and calls of norm functions."""

    def forward(self, x):
        x = norm(x)
        x = x + self.dense(self.norm(x)).relu()
        return self.head(norm(x))

    return network_of(forward, norm=nn.LayerNorm(8), dense=nn.Linear(8, 8), head=nn.Linear(8, 3))


def test_a_swap_replaces_the_norm_modules_and_leaves_the_calls():
    batches = numbered_batches(4, lambda g, n: torch.randn(n, 5, 8, generator=g))
    model = mixed()
    seen = normscope.capture(model, batches)
    assert len(seen.sites) == 3
    with pytest.warns(UserWarning, match=r"Not all norms are replaced: a swap leaves 2 calls of norm functions \("):
        modules = normscope.replacements(model, "dyt", seen)
    assert list(modules) == ["norm"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(normscope.replacements(model, "dyt", seen, layers="norm")) == ["norm"]
    last = network_of(lambda self, x: self.norm(norm(norm(x))), norm=nn.LayerNorm(8))
    seen_last = normscope.capture(last, batches)
    for layers in (1, "1", [2], "norm", "all", "0-2"):
        chosen = normscope.replacements(last, "dyt", seen_last, layers=layers, init="paper")
        assert list(chosen) == ["norm"], layers
    drift = normscope.drift(model, batches, modules)
    assert drift.sites == ["norm"]
    swapped = copy.deepcopy(model)
    normscope.swap(swapped, "dyt", seen, layers="all")
    report = normscope.calibrate(model, swapped, batches)
    assert {module.path for module in report.modules} <= {"norm", "dense", "head"}
    again = normscope.capture(swapped, batches, layers="(model):*", verify=True)
    assert list(again.stats) == ["(model):rms_norm.0", "(model):rms_norm.1"]


def test_swaps_of_calls_alone_and_to_norms_are_refused():
    model = mixed()
    seen = normscope.capture(model, [torch.randn(2, 5, 8)])
    with pytest.raises(UsageError, match=r"a swap leaves \d+ calls? of norm functions \(a module cannot "):
        normscope.replacements(model, "dyt", normscope.fit(seen.only([0, 2]), "dyt"))
    with pytest.raises(UsageError, match=r"There is no swap for layernorm: .* in place of point-wise functions"):
        normscope.replacements(model, "layernorm", seen)
