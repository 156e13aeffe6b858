"""One forward pass finds the sites in the order of their calls, their placements, and the norms that it must skip."""

import pytest
import timm
import torch
import torch.nn.functional as F
from networks import ChannelsFirst, network_of, report_of
from torch import nn
from transformers import Qwen3Config, Qwen3Model

import normscope
from normscope.errors import UsageError
from normscope.norms.trace import QUERY_OR_KEY, find_norms


def test_sites_come_in_the_order_of_their_first_calls_with_their_counts():
    twice = network_of(
        lambda self, x: self.called_first(self.defined_first(self.called_first(x))),
        defined_first=nn.LayerNorm(6),
        called_first=nn.LayerNorm(6, elementwise_affine=False, eps=1e-3),
        never=nn.LayerNorm(6),
    )
    report = report_of(twice, torch.randn(1, 5, 6))
    shown = [(s.index, s.name, s.calls, s.affine, s.eps, s.tokens_per_sample) for s in report.sites]
    assert shown == [(0, "called_first", 2, False, 1e-3, 10), (1, "defined_first", 1, True, 1e-5, 5)]
    assert [(norm.name, norm.reason) for norm in report.skipped] == [("never", "not called")]


def test_a_loaded_model_is_traced_with_its_first_sample_unless_a_batch_is_passed():
    network = normscope.load("demo_vit", limit=6, batch_size=6, device="cpu")
    for report, samples in ((find_norms(network), 1), (find_norms(network, next(iter(network.inputs)).first(4)), 4)):
        assert {shape[0] for shape in report.shapes.values()} == {samples}
        assert {site.tokens_per_sample for site in report.sites} == {samples * report.shapes["norm"][1]}
    with pytest.raises(UsageError, match="brings no batches"):
        find_norms(network.module)


def test_one_value_per_channel_does_not_stop_a_norm_over_the_batch():
    model = nn.Sequential(nn.BatchNorm1d(6, track_running_stats=False), nn.LayerNorm(6))
    seen = normscope.capture(model, [torch.randn(4, 6), torch.randn(5, 6)])  # traced with one sample: torch wants two
    assert [(site.name, seen.stats[site.name].n_tokens) for site in seen.sites] == [("1", 9)]
    assert [norm.name for norm in seen.skipped] == ["0"]
    assert report_of(model, torch.randn(1, 6)).shapes["1"] == (1, 6)


def test_norms_without_a_token_are_reported():
    mixed = network_of(
        lambda self, x: self.inner(self.local(self.norm(x).transpose(1, 2))),
        norm=nn.LayerNorm(6),
        local=nn.LocalResponseNorm(2),
        inner=network_of(lambda self, x: F.layer_norm(x, x.shape[-1:])),
    )
    report = report_of(mixed, torch.randn(1, 4, 6))
    assert [site.name for site in report.sites] == ["norm", "inner:layer_norm.0"]
    assert [(norm.name, norm.kind) for norm in report.skipped] == [("local", "LocalResponseNorm")]


def test_a_module_that_only_holds_a_norm_is_none():
    parts = {"linear": nn.Linear(6, 6), "norm": nn.LayerNorm(6)}
    holds_norm = network_of(lambda self, x: self.norm(self.linear(x)), "HoldsNorm", **parts)
    report = report_of(nn.Sequential(holds_norm), torch.randn(1, 6))
    assert [site.name for site in report.sites] == ["0.norm"]
    assert not report.skipped
    weight_normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), nn.LayerNorm(6))
    assert not report_of(weight_normed, torch.randn(1, 6)).skipped


NAMES = [
    *("blocks.0.attn.q_norm", "blocks.0.attn.k_norm"),  # timm
    *("transformer_blocks.0.attn.norm_q", "transformer_blocks.0.attn.norm_added_k"),  # diffusers
    *("blocks.0.attn1.q_rms_norm_t", "attn.q_img_norm", "attn.norm_ip_k", "attn.k_norm_und_for_gen"),
    *("layers.0.self_attn.q_layernorm", "layers.0.self_attn.query_layernorm"),  # transformers
    *("layers.0.self_attn.k_layer_norm", "layers.0.self_attn.qk_norm", "layers.0.self_attn.q_layernorm.norms.3"),
    *("h.0.attention.ln_k", "q_norm", "blocks.0.txt_attn_k_norm", "blocks.0.attn.key_norm"),
]
OTHERS = [
    *("blocks.0.norm1", "layers.0.input_layernorm", "norm", "visual.merger.ln_q"),
    *("layers.0.self_attn.q_a_layernorm", "layers.0.self_attn.kv_a_layernorm", "attn.pre_norm_q"),
    *("layers.0.block_norm", "layers.0.self_attn.q_input_norm", "norm_head", "layers.0.mask_norm"),
]


def test_the_names_of_norms_on_queries_and_keys():
    assert [name for name in NAMES if not QUERY_OR_KEY.search(name)] == []
    assert [name for name in OTHERS if QUERY_OR_KEY.search(name)] == []


def test_tokens_of_a_qk_norm_are_heads_times_positions():
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = Qwen3Config(vocab_size=40, hidden_size=32, intermediate_size=16, num_hidden_layers=2, **heads)
    torch.manual_seed(0)
    model = Qwen3Model(config).eval()
    ids = torch.randint(40, (3, 7))
    mask = torch.ones(3, 7, dtype=torch.int64)
    mask[1, 5:] = 0
    seen = normscope.capture(model, [{"input_ids": ids, "attention_mask": mask}], verify=True)
    placements = {site.name: site.placement for site in seen.sites}
    assert {placement for name, placement in placements.items() if name.endswith(("q_norm", "k_norm"))} == {"qk"}
    assert [name for name, placement in placements.items() if placement == "final"] == ["norm"]
    for name, heads in (("layers.0.self_attn.q_norm", 4), ("layers.1.self_attn.k_norm", 2)):
        assert seen.stats[name].n_tokens == heads * (7 + 5 + 7)
        assert next(site for site in seen.sites if site.name == name).d == 8
    assert not seen.skipped


def test_additions_in_place_change_nothing():
    def forward(self, x):
        x = x * 2
        x += self.branch(x)
        return self.last(x)

    report = report_of(network_of(forward, branch=ChannelsFirst(5), last=nn.LayerNorm(6)), torch.randn(1, 5, 6))
    assert [(s.name, s.placement) for s in report.sites] == [("branch", "pre-norm"), ("last", "final")]


def test_sums_under_vmap_are_of_no_residual_stream():
    def forward(self, x):
        shifts = torch.vmap(lambda position: position + 1)(torch.arange(6.0))  # as masks are made
        return self.last(x + self.norm(x) * shifts)

    report = report_of(network_of(forward, norm=nn.LayerNorm(6), last=nn.LayerNorm(6)), torch.randn(1, 5, 6))
    assert [(s.name, s.placement) for s in report.sites] == [("norm", "pre-norm"), ("last", "final")]


def placements(model, *inputs):
    return [(site.name, site.placement) for site in report_of(model, *inputs).sites]


def test_placements_in_networks_of_timm():
    named = placements(timm.create_model("test_vit"), torch.randn(1, 3, 160, 160))
    assert (named[0], named[-1]) == (("blocks.0.norm1", "pre-norm"), ("norm", "final"))
    assert {placement for _, placement in named[:-1]} == {"pre-norm"}
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 12, "depth": 1, "num_heads": 2}
    model = timm.models.VisionTransformer(**sizes, qk_norm=True, num_classes=2)
    by_name = dict(placements(model, torch.randn(1, 3, 8, 8)))
    assert by_name["blocks.0.attn.q_norm"] == by_name["blocks.0.attn.k_norm"] == "qk"
    assert by_name["blocks.0.norm1"] == "pre-norm"
    named = placements(timm.create_model("test_convnext"), torch.randn(1, 3, 160, 160))
    assert {placement for name, placement in named if ".blocks." in name} == {None}  # beside the residual stream
    assert named[-1] == ("head.norm", "final")


def block(forward):
    return network_of(forward, mlp=nn.Linear(6, 6), norm1=nn.LayerNorm(6), norm2=nn.LayerNorm(6))


@pytest.mark.parametrize(
    ("forward", "first", "second"),
    [
        (lambda self, x: self.norm2(self.mlp(self.norm1(self.mlp(x)))) + x, None, "post-norm"),
        (lambda self, x: x + self.norm2(self.mlp(self.norm1(x))), "pre-norm", "post-norm"),
        (lambda self, x: x + self.mlp(self.norm1(x)) + self.mlp(self.norm2(x)), "pre-norm", "pre-norm"),
        (lambda self, x: x - self.mlp(self.norm2(self.mlp(self.norm1(x)))), "pre-norm", None),
    ],
    ids=["res-post", "sandwich", "parallel", "difference"],
)
def test_other_kinds_of_blocks(forward, first, second):
    model = nn.Sequential(block(forward), block(forward), nn.LayerNorm(6))
    by_name = dict(placements(model, torch.randn(1, 4, 6)))
    assert (by_name["0.norm1"], by_name["1.norm2"], by_name["2"]) == (first, second, "final")


def test_wav2vec_placement_is_that_of_its_encoder_layers():
    models = pytest.importorskip("torchaudio.models", exc_type=Exception)
    for first, expected in ((True, "pre-norm"), (False, "post-norm")):
        # Convolutions, their bias, then width, dropout, position kernel and groups, layers, heads, and the rest.
        encoder = (16, 0.0, 3, 2, 3, 2, 0.0, 32, 0.0, 0.0, first, 0.0, None)
        model = models.wav2vec2_model("layer_norm", [(8, 10, 5), (8, 3, 2)], True, *encoder)
        named = placements(model, torch.randn(1, 800))
        assert {placement for name, placement in named if "transformer.layers" in name} == {expected}
