"""Exact rewrites, against the libraries' own outputs in float64."""

import copy
import itertools
import json
import re

import diffusers
import pytest
import timm
import torch
import transformers
from networks import PostNorm, PreNorm, State, loaded_from, network_of
from torch import nn

import normscope
from normscope.errors import DataError, ModelError, UsageError
from normscope.inputs.batch import Batch, Sample
from normscope.models.weights.repository import copy_of
from normscope.swaps.standalone import RMSNorm
from normscope.swaps.store.record import EXACT, FOLDED, read_record
from normscope.swaps.store.store import restored, save_swapped

TWO = (Sample("a", 0, 0), Sample("b", 1, 1))
WITH_MINILM = pytest.mark.skipif(
    not copy_of("sentence-transformers/all-MiniLM-L6-v2").is_dir(),
    reason="python scripts/fetch_pretrained.py minilm has not been run",
)
GAIN, BOTH = "γ", "γ and β"
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 40}


def randomized(network):
    """A network in float64 and eval mode, none of whose weights is as it was initialized."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, part in network.named_parameters():
            if part.ndim == 1:
                ones = name.endswith(("weight", "gamma"))
                part.copy_(0.3 * torch.randn(part.shape, generator=generator) + ones)
    return network.double().eval()


def values(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def batch_of(*args, **kwargs):
    return Batch(args, kwargs, TWO)


def output_of(network, batch):
    with torch.no_grad():
        result = copy.deepcopy(network).eval()(*batch.args, **batch.kwargs)
    result = list(result.values()) if isinstance(result, dict) else result
    return result[0] if isinstance(result, (list, tuple)) else result


def checked(network, batch):
    """Simplify a network in float64; its output stays."""
    before = output_of(network, batch)
    report = normscope.simplify(network, [batch])
    assert (output_of(network, batch) - before).norm() <= 1e-12 * before.norm()
    for norm in report.norms:
        is_exact = isinstance(network.get_submodule(norm.site), RMSNorm) if norm.change is not None else False
        assert norm.exact == is_exact and bool(norm.blocked) != norm.exact and bool(norm.unfolded) != bool(norm.folded)
        assert norm.change is None or norm.change <= 1e-12
    assert report.float64 <= 1e-12 and report.in_dtype <= 1e-12 and report.dtype == "float64" and report.samples == 2
    return report


def vit(**options):
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 5}
    return timm.models.VisionTransformer(**sizes, **options), batch_of(values(2, 3, 16, 16))


def words(network):
    return network, batch_of(input_ids=torch.arange(20).reshape(2, 10) * 7 % 40)


def gpt2():
    config = transformers.GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=16, bos_token_id=0)
    config.eos_token_id = 0
    return words(transformers.GPT2LMHeadModel(config))


def gptj():
    config = transformers.GPTJConfig(vocab_size=40, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=16)
    return words(transformers.GPTJForCausalLM(config))


def bert():
    return words(transformers.BertModel(transformers.BertConfig(**SIZES)))


def albert():
    return words(transformers.AlbertModel(transformers.AlbertConfig(**SIZES, embedding_size=16)))


def mbart():
    sizes = {f"{part}_{size}": 1 for part in ("encoder", "decoder") for size in ("layers", "attention_heads")}
    sizes |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "d_model": 32, "max_position_embeddings": 16}
    network = transformers.MBartForConditionalGeneration(transformers.MBartConfig(vocab_size=40, **sizes))
    tokens = torch.arange(20).reshape(2, 10) * 7 % 40
    return network, batch_of(input_ids=tokens, decoder_input_ids=tokens.flip(1))


def llama():
    return words(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)))


def vision(name, **options):
    """A vision transformer whose position table is interpolated, in float32, for images of another size."""
    config = getattr(transformers, f"{name}Config")(**SIZES, image_size=24, patch_size=8)
    batch = batch_of(pixel_values=values(2, 3, 32, 32).float(), **options)
    return getattr(transformers, f"{name}Model")(config), batch


def experts(name, **options):
    config = getattr(transformers, f"{name}Config")(**SIZES, **options, num_key_value_heads=2)
    return words(getattr(transformers, f"{name}ForCausalLM")(config))


def dit():
    network = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=2, num_layers=1, sample_size=8, num_embeds_ada_norm=5
    )
    return network, batch_of(values(2, 2, 8, 8), timestep=torch.tensor([3, 40]), class_labels=torch.tensor([1, 4]))


def wav2vec2(*, pre_norm):
    network = pytest.importorskip("torchaudio", exc_type=Exception).models.wav2vec2_model(
        "layer_norm" if pre_norm else "group_norm",
        [(16, 10, 5), (16, 3, 2)],
        extractor_conv_bias=pre_norm,
        encoder_embed_dim=32,
        encoder_projection_dropout=0.0,
        encoder_pos_conv_kernel=16,
        encoder_pos_conv_groups=4,
        encoder_num_layers=2,
        encoder_num_heads=4,
        encoder_attention_dropout=0.0,
        encoder_ff_interm_features=48,
        encoder_ff_interm_dropout=0.0,
        encoder_dropout=0.1,
        encoder_layer_norm_first=pre_norm,
        encoder_layer_drop=0.0,
        aux_num_out=7,
    )
    return network, batch_of(values(2, 1000))


def encoder():
    """A linear layer and torch's own encoder, whose attention has one weight for queries, keys and values."""
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True, norm_first=True)
    layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(32), enable_nested_tensor=False)
    return nn.Sequential(nn.Linear(6, 32), layers, nn.Linear(32, 3)), batch_of(values(2, 5, 6))


def convnext():
    network = timm.create_model("convnext_atto", num_classes=5, depths=(1, 1, 1, 1), dims=(8, 16, 24, 32))
    return network, batch_of(values(2, 3, 64, 64))


# The placement, a network, the numbers of norms, of exact ones and of folded ones.
PLACEMENTS = [
    ("pre", lambda: vit(), 5, 5, 5),
    ("layer scale", lambda: vit(init_values=0.1), 5, 5, 5),
    ("qk", lambda: vit(qk_norm=True), 9, 5, 5),
    ("parallel", lambda: vit(block_fn=timm.models.vision_transformer.ParallelScalingBlock), 3, 3, 3),
    ("sandwich", lambda: vit(block_fn=timm.models.vision_transformer.ResPostBlock), 5, 4, 1),
    ("pre and packed", encoder, 5, 5, 5),
    ("parallel and Conv1D", gptj, 3, 3, 3),
    ("post", bert, 5, 1, 0),
    ("encoder and decoder", mbart, 9, 9, 6),
    ("shared", albert, 3, 1, 1),
    ("RMSNorm", llama, 5, 0, 5),
    ("adaLN", dit, 3, 1, 0),
    ("convolutions", lambda: wav2vec2(pre_norm=True), 8, 7, 6),
    ("post and a GroupNorm", lambda: wav2vec2(pre_norm=False), 7, 0, 2),
    ("depthwise", convnext, 9, 1, 8),
]


@pytest.mark.parametrize(
    ("placement", "make", "norms", "exact", "folded"), PLACEMENTS, ids=[row[0] for row in PLACEMENTS]
)
def test_the_output_of_libraries_stays_in_float64(placement, make, norms, exact, folded):
    torch.manual_seed(0)
    network, batch = make()
    report = checked(randomized(network), batch)
    assert (len(report.norms), len(report.exact), len(report.folded)) == (norms, exact, folded), placement


# The same of networks that cast to float32 inside, or to whose experts some tokens go; they are in float32.
CASTS = [
    ("DINOv2", lambda: vision("Dinov2"), 5, 5, 4),
    ("norms in float32", lambda: (PreNormInFloat32(), batch_of(values(2, 5, 4).float())), 2, 2, 2),
    ("Mixtral", lambda: experts("Mixtral", num_local_experts=4), 5, 0, 3),
]
SLOW_CASTS = [
    ("CLIP", lambda: vision("CLIPVision", interpolate_pos_encoding=True), 6, 1, 4),  # it returns its stream
    ("SigLIP", lambda: vision("SiglipVision", interpolate_pos_encoding=True), 6, 5, 5),
    ("Qwen3-MoE", lambda: experts("Qwen3Moe", num_experts=8, moe_intermediate_size=24, head_dim=8), 9, 0, 3),
]
CASTS += [pytest.param(*row, marks=pytest.mark.slow) for row in SLOW_CASTS]


@pytest.mark.parametrize(("kind", "make", "norms", "exact", "folded"), CASTS)
def test_casts_to_float32_change_rounding_alone(kind, make, norms, exact, folded):
    torch.manual_seed(0)
    network, batch = make()
    before = output_of(randomized(network).float(), batch)
    report = normscope.simplify(network, [batch])
    assert (len(report.norms), len(report.exact), len(report.folded)) == (norms, exact, folded), kind
    assert report.float64 < 1e-14 and (output_of(network, batch) - before).norm() <= 2e-6 * before.norm()
    routed = [norm.unfolded for norm in report.norms if "experts" in norm.unfolded]
    reason = "the module model.layers.{}.mlp.experts, which branches on its data (item), reads its output"
    assert routed == ([reason.format(number) for number in range(2)] if kind in ("Mixtral", "Qwen3-MoE") else [])


@pytest.mark.parametrize(
    ("name", "norms", "exact", "folded"),
    [
        ("demo_vit", 17, 17, 17),
        pytest.param("demo_dit", 17, 1, 0, marks=pytest.mark.slow),
        pytest.param("demo_wav2vec2", 26, 24, 18, marks=pytest.mark.slow),  # one is called as a function
        pytest.param("minilm", 13, 1, 0, marks=[pytest.mark.slow, WITH_MINILM]),
    ],
)
def test_trained_networks_change_by_rounding_alone(name, norms, exact, folded):
    network = normscope.load(name, limit=2, device="cpu")
    batch = network.inputs.first_sample()
    expected = output_of(network.module, batch)
    report = normscope.simplify(network)
    assert (len(report.norms), len(report.exact), len(report.folded)) == (norms, exact, folded)
    error = float((output_of(network.module, batch) - expected).norm() / expected.norm())
    assert report.float64 < 1e-14 < 1e-9 < error < 2e-6 and 1e-9 < report.in_dtype < 2e-6
    assert (report.dtype, report.about["model"]) == ("float32", name)


def test_rewritten_norms_have_the_parameters_that_could_not_be_folded():
    """Those of GPT-2's last norm, before a head without a bias, are (1, β/γ); the others' went into their layers."""
    network, batch = gpt2()
    randomized(network)
    gain, offset = (part.detach().clone() for part in network.transformer.ln_f.parameters())
    assert network.lm_head.weight is network.transformer.wte.weight
    embeddings, head = (network.transformer.wte.weight.detach().clone() for _ in range(2))
    report = checked(network, batch)
    assert (len(report.norms), len(report.exact), len(report.folded)) == (5, 5, 5)
    torch.testing.assert_close(network.transformer.ln_f.weight, torch.ones(32).double())
    torch.testing.assert_close(network.transformer.ln_f.bias, offset / gain)
    assert network.transformer.h[0].ln_1.weight is None and network.transformer.h[0].ln_1.bias is None
    torch.testing.assert_close(network.transformer.wte.weight, embeddings - embeddings.mean(1, keepdim=True))
    torch.testing.assert_close(network.lm_head.weight, head * gain)
    assert report.untied == ("lm_head",) and not network.config.tie_word_embeddings
    assert report.dropout == 7


def one_norm(forward, **parts):
    """A network with ``first``, ``norm`` and ``head``, unless ``parts`` replaces them."""
    parts = {"first": nn.Linear(4, 8), "norm": nn.LayerNorm(8), "head": nn.Linear(8, 3), **parts}
    torch.manual_seed(0)
    return randomized(network_of(forward, **parts))


@pytest.mark.parametrize(("offset", "folded"), [(0.0, GAIN), (0.5, "")])
def test_a_norm_before_a_layer_without_bias_keeps_its_offset(offset, folded):
    """It keeps β/γ, unless γ is 0 where β is not."""
    network = one_norm(lambda self, x: self.head(self.norm(self.first(x))), head=nn.Linear(8, 3, bias=False))
    network.norm.weight.data[2], network.norm.bias.data[2] = 0, offset
    expected = network.norm.bias / network.norm.weight if folded else network.norm.bias.clone()
    [norm] = checked(network, batch_of(values(2, 5, 4))).norms
    assert norm.exact and norm.folded == folded and ("β/γ is infinite" in norm.unfolded) != bool(folded)
    torch.testing.assert_close(network.norm.bias, expected.nan_to_num())


@pytest.mark.parametrize(("padding", "folded"), [(1, GAIN), (0, BOTH)])
def test_no_offset_is_folded_into_a_padding_convolution(padding, folded):
    convolution = nn.Conv1d(8, 3, 3, padding=padding)
    network = one_norm(lambda self, x: self.head(self.norm(self.first(x)).mT), head=convolution)
    [norm] = checked(network, batch_of(values(2, 5, 4))).norms
    assert norm.exact and norm.folded == folded


def with_table():
    """A linear layer and a table of positions, which no state dict has, read by a norm."""
    parts = {"layer": nn.Linear(4, 8), "norm": nn.LayerNorm(8), "head": nn.Linear(8, 3)}
    network = network_of(lambda self, x: self.head(self.norm(self.layer(x) + self.table)), **parts)
    network.register_buffer("table", torch.linspace(-2, 3, 40).reshape(5, 8).square(), persistent=False)
    network.head.register_buffer("table", torch.zeros(1), persistent=False)  # of that name, and not centred
    return network


def test_a_constant_table_is_centred_and_saved(tmp_path):
    network = randomized(with_table())
    [norm] = checked(network, batch_of(values(2, 5, 4))).norms
    assert norm.exact and norm.folded == BOTH
    assert "table" in network.state_dict() and float(network.table.mean(1).abs().max()) < 1e-14
    assert_loads(network, with_table, batch_of(values(2, 5, 4)), save_swapped(network, tmp_path / "exact"))


def assert_loads(network, make, batch, folder):
    """A fresh network gets the folder's outputs to the bit, with normscope and by pointwise.py."""
    expected = output_of(network, batch)
    torch.manual_seed(5)
    fresh = make().double().eval()
    restored(fresh, folder)
    assert torch.equal(output_of(fresh, batch), expected)
    assert torch.equal(output_of(loaded_from(folder).swapped(make()), batch), expected)


@pytest.mark.parametrize(
    ("make", "func", "description"),
    [
        (gpt2, EXACT, "exact rmsnorm in place of 5 norms, of not named"),
        (llama, FOLDED, "folded weights, of not named"),
        (mbart, EXACT, "exact rmsnorm in place of 9 norms, of not named"),  # three embeddings share one weight
    ],
)
def test_a_head_of_its_own_is_saved(make, func, description, tmp_path):
    network, batch = make()
    report = normscope.simplify(randomized(network), [batch])
    assert report.untied == ("lm_head",)
    folder = save_swapped(network, tmp_path / "exact", func=func)
    assert_loads(network, lambda: make()[0], batch, folder)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    assert read_record(folder).description.startswith(description)
    if func == EXACT:
        return
    # A network of its library's own classes, which its library loads.
    again = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assert type(again) is transformers.LlamaForCausalLM
    assert torch.equal(output_of(again, batch), output_of(network, batch))
    assert 'LlamaForCausalLM.from_pretrained("FOLDER")' in read_record(folder).example
    with pytest.raises(ModelError, match="Nothing was swapped"):
        save_swapped(network, tmp_path / "swapped")


def test_a_tied_head_of_a_swap_is_restored_tied(tmp_path):
    (tied, batch), (again, _) = gpt2(), gpt2()
    normscope.swap(tied, "rmsnorm", normscope.find_norms(tied, batch).sites)
    restored(again, save_swapped(tied, tmp_path / "tied"))
    assert again.lm_head.weight is again.get_input_embeddings().weight


def scaled_twice(self, x):
    return self.head(self.norm(self.first(x) * self.gamma)) * self.gamma.mean()


def read_before_the_scale(self, x):
    return self.head(self.norm((h := self.first(x)) * self.gamma)) + self.other(h)[..., :3]


OTHER = {"other": nn.LayerNorm(8)}
GAMMA = {"gamma": nn.Parameter(torch.ones(8))}
F = nn.functional
# A network, its parts, and the reasons why its norm becomes no RMSNorm and why nothing is folded.
TRAPS = [
    (lambda self, x: self.head(self.norm(self.first(x) * x[0, 0, 0])), {}, "", ""),
    (lambda self, x: self.head(self.norm(self.first(x) * self.gamma)), GAMMA, "", ""),
    (lambda self, x: self.head(self.norm(self.first(x)).flip(1)[:, 1:].mean(1)), {}, "", ""),
    (lambda self, x: self.head(self.norm(self.first(x.mT).mT)), {"first": nn.ConvTranspose1d(4, 8, 3)}, "", ""),
    (lambda self, x: self.head(self.norm(h := self.first(x))) + F.layer_norm(h, (8,))[..., :3], {}, "", ""),
    (lambda self, x: self.head(self.norm(h := self.first(x))) + self.other(h)[..., :3], OTHER, "", ""),
    (lambda self, x: self.head(self.norm(self.first(x))) + self.head(self.norm(self.first(-x))), {}, "", ""),
    (
        lambda self, x: self.head(self.norm(h := self.first(x))) + self.other(h)[..., :3],
        {"other": nn.RMSNorm(8)},
        "the norm other reads its stream",
        "",
    ),
    (
        lambda self, x: self.head(self.norm(h := self.first(x))) + F.layer_norm(h, (5, 8))[..., :3],
        {},
        "native_layer_norm of the network reads its stream",
        "",
    ),
    (scaled_twice, GAMMA, "mul of the network multiplies channels by different factors", ""),
    (read_before_the_scale, {**GAMMA, **OTHER}, "mul of the network multiplies channels by different factors", ""),
    (
        lambda self, x: self.head(self.norm(torch.cat([h := self.first(x), h], -1))),
        {"norm": nn.LayerNorm(16), "head": nn.Linear(16, 3)},
        "cat of the network does not keep the mean over channels",
        "",
    ),
    (
        lambda self, x: self.head(self.norm(self.first(x))),
        {"norm": nn.LayerNorm((5, 8))},
        "it normalizes over several axes",
        "it has no weight per channel",
    ),
    (
        lambda self, x: self.head(self.norm(self.first(x))),
        {"norm": timm.layers.LayerNormAct(8)},
        "it is no LayerNorm or RMSNorm with γ·y + β",
        "it is no LayerNorm or RMSNorm with γ·y + β",
    ),
    (
        lambda self, x: self.head(self.norm(self.first(x)).mT),
        {"head": nn.ConvTranspose1d(8, 8, 3)},
        "",
        "convolution in head reads its output",
    ),
    (
        lambda self, x: self.head(F.pad(self.norm(self.first(x)), (0, 0, 1, 0))),
        {},
        "",
        "constant_pad_nd of the network",
    ),
    (lambda self, x: self.head(self.norm(self.first(x).tanh())), {}, "tanh of the network writes to its stream", ""),
    (lambda self, x: self.head(self.norm(self.first(x) + 1)), {}, "add of the network does not keep the mean", ""),
    (lambda self, x: self.head(self.norm(self.first(x) + x[..., :1])), {}, "add of the network does not keep", ""),
    (lambda self, x: self.head(self.norm(self.first(x) * x.tile(2))), {}, "mul of the network multiplies", ""),
    (lambda self, x: self.head(self.norm(self.first(x)).relu()), {}, "", "relu of the network reads its output"),
    (lambda self, x: self.head(self.norm(self.first(x))) + self.head(x.tile(2)), {}, "", "is not for that alone"),
    (lambda self, x: (self.head(self.norm(h := self.first(x))), h), {}, "the network returns its stream", ""),
    (lambda self, x: (self.head(y := self.norm(self.first(x))), y), {}, "", "the network returns its output"),
    (lambda self, x: self.head(self.norm(h := self.first(x))) + h[..., :3], {}, "slice of the network reads its", ""),
    (lambda self, x: self.head(self.norm(self.norm(self.first(x)))), {}, "the norm norm writes", "the norm norm reads"),
    (
        lambda self, x: self.head((h := self.first(x)) + self.norm(h)),
        {},
        "addmm in head reads its stream",
        "add of the network reads its output",
    ),
]


@pytest.mark.parametrize(("forward", "parts", "blocked", "unfolded"), TRAPS)
def test_a_norm_is_blocked_with_its_reason(forward, parts, blocked, unfolded):
    network = one_norm(forward, **copy.deepcopy(parts))
    before = type(network.norm)
    norm = next(norm for norm in checked(network, batch_of(values(2, 5, 4))).norms if norm.site == "norm")
    assert blocked in norm.blocked and bool(blocked) == bool(norm.blocked)
    assert unfolded in norm.unfolded and bool(unfolded) == bool(norm.unfolded)
    assert (type(network.norm) is before) == bool(blocked)


def test_norms_that_are_not_called_or_no_modules_are_never_exact():
    def forward(self, x):
        return nn.functional.layer_norm(self.head(self.norm(h := self.first(x))), (3,)) + self.other(h.size(0) * x)

    network = one_norm(forward, other=nn.Linear(4, 3), idle=nn.LayerNorm(8))
    report = checked(network, batch_of(values(2, 5, 4)))
    assert [norm.site for norm in report.exact] == ["norm"]
    others = [norm for norm in report.norms if norm.site != "norm"]
    assert {norm.site for norm in others} >= {"idle"} and all(norm.blocked and norm.change is None for norm in others)


def test_a_stream_that_another_reader_needs_stays_for_all_its_norms():
    """The head of PreNorm reads the stream without a norm, and its input and relu write to it."""
    report = checked(PreNorm().double(), batch_of(values(2, 5, 8)))
    assert not report.exact and len(report.folded) == 3
    assert report.norms[0].blocked == "input of the network writes to its stream"
    assert all(norm.blocked == "relu of the network writes to its stream" for norm in report.norms[1:])
    report = checked(PostNorm().double(), batch_of(values(2, 5, 6)))
    assert [(norm.exact, norm.folded) for norm in report.norms] == [(False, ""), (False, BOTH)]


def test_a_norm_whose_output_changes_stays_and_the_change_is_reported():
    """What a traced pass of one sample does not show, the proof on two samples does."""

    def forward(self, x):
        h = self.first(x)
        return self.head(self.norm(h + len(x) - 1)) + self.more(self.other(self.second(x)))

    parts = {"second": nn.Linear(4, 8), "other": nn.LayerNorm(8), "more": nn.Linear(8, 3)}
    network = one_norm(lambda self, x: forward(self, x) if len(x) > 1 else forward_alone(self, x), **parts)
    state = network.first.weight.clone()
    norm, other = checked(network, batch_of(values(2, 5, 4))).norms
    assert norm.blocked.startswith("the output of norm changed by ") and norm.blocked.endswith(" in float64")
    assert not norm.exact and other.exact and torch.equal(network.first.weight, state)


def forward_alone(self, x):
    return self.head(self.norm(self.first(x))) + self.more(self.other(self.second(x)))


class SinglePrecision(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x.float(), (8,), self.weight.float(), self.bias.float(), self.eps).to(x)


class PreNormInFloat32(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.layer = nn.Linear(4, 8), SinglePrecision(8), nn.Linear(8, 8)
        self.last, self.head = SinglePrecision(8), nn.Linear(8, 3)

    def forward(self, x):
        h = self.first(x)
        return self.head(self.last(h + self.layer(self.norm(h))))


def test_a_norm_that_computes_in_float32_within_float64_stays():
    def forward(self, x):
        return self.head(self.norm(h := self.first(x))) + self.other(h)[..., :3]

    network = one_norm(forward, norm=SinglePrecision(8), other=nn.LayerNorm(8))
    norm, other = checked(network, batch_of(values(2, 5, 4))).norms
    assert type(network.norm) is SinglePrecision and type(network.other) is nn.LayerNorm
    for reason in (norm.blocked, norm.unfolded, other.blocked):  # whose input would be centred for both
        number = re.fullmatch(r"the output of norm changed by (.*) in float64", reason)[1]
        assert 1e-9 < float(number) < 1e-6


def test_the_norm_before_one_that_changes_stays():
    """The layer behind the first norm reads something else, too, with more than one sample."""

    def forward(self, x):
        z = self.between(self.norm(self.first(x)))
        return self.last((z + self.between(x.tile(2)) if len(x) > 1 else z).tanh())

    network = one_norm(forward, between=nn.Linear(8, 8), last=nn.LayerNorm(8), head=None)
    norm, last = checked(network, batch_of(values(2, 5, 4))).norms
    assert norm.blocked == norm.unfolded and norm.blocked.startswith("the output of last changed by")
    assert (last.blocked, last.unfolded) == (
        "tanh of the network writes to its stream",
        "the network returns its output",
    )


def test_a_network_with_random_outputs_is_refused():
    calls = itertools.count(1)

    def forward(self, x):
        return self.norm(self.first(x).tanh() + next(calls) * x.tile(2))

    with pytest.raises(ModelError, match="Nothing can be proved: the output of norm changed by"):
        normscope.simplify(one_norm(forward), [batch_of(values(2, 5, 4))])


def test_a_tied_head_stays_tied_if_unchanged():
    parts = {"first": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)}
    network = one_norm(lambda self, x: self.norm(self.head(self.first(x)).tanh()), **parts)
    network.head.weight = network.first.weight
    report = checked(network, batch_of(torch.tensor([[1, 2], [3, 4]])))
    assert not report.exact and report.untied == () and network.head.weight is network.first.weight


def test_a_network_whose_output_changes_is_refused_and_unchanged():
    """Only the second sample brings a reader of the stream that is no norm."""
    network = one_norm(lambda self, x: self.head(self.norm(h := self.first(x))) + (h[..., :3] if len(x) > 1 else 0))
    state = State(network)
    with pytest.raises(ModelError, match=r"differs by .* in float64, more than 1e-09.* stays as it was"):
        normscope.simplify(network, [batch_of(values(2, 5, 4))])
    state.assert_same(network)


def test_dropout_is_reported_and_half_precision_is_rounded():
    network = one_norm(lambda self, x: self.head(self.norm(self.drop(self.first(x)))), drop=nn.Dropout(0.1))
    network.train().bfloat16()
    report = normscope.simplify(network, [batch_of(values(2, 5, 4).bfloat16())])
    assert report.dropout == 1 and network.norm.training
    assert (len(report.exact), report.dtype) == (1, "bfloat16")
    assert report.float64 < 1e-14 and 1e-4 < report.in_dtype < 3e-2
    assert str(report) == f"SimplifyReport: 1 of 1 norm exact, output changed by {report.in_dtype:.0e} in bfloat16"


def test_a_module_needs_batches():
    with pytest.raises(UsageError, match="brings no batches"):
        normscope.simplify(PreNorm())
    with pytest.raises(DataError, match="There is no batch"):
        normscope.simplify(PreNorm(), [])
