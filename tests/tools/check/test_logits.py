"""Logits of attention against queries and keys that are multiplied by hand in float64."""

import math

import numpy as np
import pytest
import timm
import torch
import transformers
from networks import evidence_of
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

import normscope
from normscope.tools.check.evidence import Evidence
from normscope.tools.check.logits import logits

SMALL = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
IDS = [torch.randint(0, 50, (3, 12), generator=torch.Generator().manual_seed(n)) for n in range(2)]
IMAGES = [torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(n)) for n in range(2)]
TOKENS = [torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(n)) for n in range(2)]


def grown(network, factor=3.0):
    """Return a network whose logits are no rounding: matrices times a factor, vectors away from 1 and 0."""
    torch.manual_seed(1)
    with torch.no_grad():
        for part in network.parameters():
            part.mul_(factor) if part.ndim > 1 else part.add_(0.3 * torch.randn_like(part))
    return network.eval()


def llama_like(name, **options):
    config = getattr(transformers, f"{name}Config")(**SMALL, head_dim=8, **options)
    torch.manual_seed(0)
    return grown(getattr(transformers, f"{name}Model")(config))


def rotated(attention, args, kwargs):
    """Queries and keys of a Llama or a Qwen3, and its causal mask."""
    x = kwargs.get("hidden_states", args[0] if args else None).double()
    parts = []
    for name in "qk":
        part = getattr(attention, f"{name}_proj").double()(x).unflatten(-1, (-1, 8))
        norm = getattr(attention, f"{name}_norm", nn.Identity())
        parts.append((norm.double()(part) if attention.normed else part).transpose(1, 2))
    q, k = apply_rotary_pos_emb(*parts, *(part.double() for part in kwargs["position_embeddings"]))
    return q, k.repeat_interleave(2, 1), torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()


def of_vit(attention, args, kwargs):
    q, k, _ = attention.qkv.double()(args[0].double()).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    if attention.normed:
        q, k = attention.q_norm.double()(q), attention.k_norm.double()(k)
    return q, k, None


def of_torch(attention, args, kwargs):
    width = attention.embed_dim
    weight, bias = attention.in_proj_weight.double(), attention.in_proj_bias.double()
    parts = (args[0].double() @ weight[n : n + width].mT + bias[n : n + width] for n in (0, width))
    q, k = (part.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2) for part in parts)
    return q, k, None


def truth(network, batches, paths, by_hand, normed=True):
    """Largest logit, largest product of lengths and that of 95th percentiles of each attention."""
    calls = {path: [] for path in paths}

    def keep(calls):
        return lambda module, args, kwargs: calls.append((args, kwargs))

    hooks = [
        network.get_submodule(path).register_forward_pre_hook(keep(calls[path]), with_kwargs=True) for path in paths
    ]
    with torch.no_grad():
        for batch in batches:
            network(batch)
        for hook in hooks:
            hook.remove()
        for path in paths:
            rows, module = [], network.get_submodule(path)
            module.normed = normed
            for args, kwargs in calls[path]:
                q, k, mask = by_hand(module, args, kwargs)
                values = (q @ k.mT).numpy() / math.sqrt(q.shape[-1])
                values = values if mask is None else np.where(mask.numpy(), values, -np.inf)
                lengths = [np.linalg.norm(part.numpy(), axis=-1) for part in (q, k)]
                bound = np.max(lengths[0].max(-1) * lengths[1].max(-1)) / math.sqrt(q.shape[-1])
                usual = np.max(math.prod(np.quantile(part, 0.95, axis=-1) for part in lengths))
                rows.append((values.max(), bound, usual / math.sqrt(q.shape[-1])))
            module.float()
            yield tuple(map(max, zip(*rows, strict=True)))


def vit(**options):
    torch.manual_seed(0)
    return grown(timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2,
                                   num_heads=2, **options))  # fmt: skip


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 32, batch_first=True, norm_first=True)
    return grown(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


NETWORKS = {
    "shared keys": (lambda: llama_like("Llama"), IDS, "layers.{}.self_attn", "layers.{}.input_layernorm", rotated),
    "QK-norm": (lambda: llama_like("Qwen3"), IDS, "layers.{}.self_attn", "layers.{}.self_attn.q_norm", rotated),
    "ViT": (vit, IMAGES, "blocks.{}.attn", "blocks.{}.norm1", of_vit),
    "ViT with QK-norm": (lambda: vit(qk_norm=True), IMAGES, "blocks.{}.attn", "blocks.{}.attn.q_norm", of_vit),
    "MultiheadAttention": (encoder, TOKENS, "layers.{}.self_attn", "layers.{}.norm1", of_torch),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_logits_are_those_of_q_and_k(name):
    make, batches, path, site, by_hand = NETWORKS[name]
    network = make()
    answer = logits(evidence_of(network, batches))
    normed = "QK-norm" in name
    expected = list(truth(network, batches, [path.format(n) for n in range(2)], by_hand, normed))
    assert [row["site"] for row in answer.sites] == [site.format(n) for n in range(2)]
    for row, (largest, bound, estimate) in zip(answer.sites, expected, strict=True):
        for key, value in (("largest", largest), ("bound", bound), ("estimate", estimate)):
            assert row[key] == pytest.approx(value, rel=1e-4), key  # float32's rounding of a few layers
        assert row["largest"] <= row["bound"]
    worst = max(answer.sites, key=lambda row: row["largest"])
    assert answer.site == worst["site"] and f"is {worst['largest']:.3g}, behind" in answer.sentence
    assert ("QK-norm is at work" in answer.sentence) == normed
    assert ("there is neither QK-norm nor a soft cap" in answer.sentence) != normed


@pytest.mark.parametrize("name", ["QK-norm", "ViT with QK-norm"])
def test_without_qk_norm_the_bound_is_above_what_its_inputs_would_give(name):
    make, batches, path, _, by_hand = NETWORKS[name]
    network = make()
    seen = normscope.capture(network, batches)
    answers = [logits(evidence_of(network, batches)), logits(Evidence(seen))]
    expected = list(truth(network, batches, [path.format(n) for n in range(2)], by_hand, normed=False))
    for answer in answers:
        for row, (largest, bound, estimate) in zip(answer.sites, expected, strict=True):
            # Over all heads and samples; scales, and means beside them, are counted in eighths of an octave.
            assert largest <= bound <= row["bound_without"] <= 2 * bound
            assert row["estimate_without"] == pytest.approx(estimate, rel=0.35)
    assert answers[1].verdict == "note" and answers[1].sites[0]["bound"] is None
    assert "γ, which a capture does not contain" in answers[1].sentence


class Masked(nn.Module):
    """Attention behind a norm whose keys from the third on are masked: they are the largest."""

    def __init__(self, mask, called):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.attention = nn.LayerNorm(32), nn.MultiheadAttention(32, 4, batch_first=True)
        self.mask, self.called = mask, called  # called as a function, or as the module

    def forward(self, x):
        y = self.norm(x)
        mask = self.mask if self.mask.ndim == 2 else self.mask.repeat(len(x), 1, 1)  # of each head and sample
        if not self.called:
            return self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        of, y = self.attention, y.transpose(0, 1)
        weights = of.in_proj_weight, of.in_proj_bias, None, None, False, 0.0, of.out_proj.weight, of.out_proj.bias
        return nn.functional.multi_head_attention_forward(
            y, y, y, 32, 4, *weights, need_weights=False, attn_mask=mask, training=False
        )[0]


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("shape", [(9, 9), (4, 9, 9)])
@pytest.mark.parametrize("additive", [False, True])
def test_masked_pairs_are_not_the_largest(shape, additive, called):
    hidden = torch.arange(9).expand(shape) > 2  # True is masked here
    mask = torch.zeros(shape).masked_fill(hidden, -math.inf).where(hidden, 0.5) if additive else hidden
    network = grown(Masked(mask, called))
    [row] = logits(evidence_of(network, TOKENS)).sites
    values = []
    for x in TOKENS:
        with torch.no_grad():
            q, k, _ = of_torch(network.double().attention, [network.norm(x.double())], {})
        values.append(float((q @ k[:, :, :3].mT).max()) / math.sqrt(8) + 0.5 * additive)
    assert row["largest"] == pytest.approx(max(values), rel=1e-4) and row["largest"] < row["bound"]


def test_a_soft_cap_is_seen_at_work():
    network = llama_like("Gemma2", attn_logit_softcapping=2.0, attn_implementation="eager")
    for part in network.modules():
        if hasattr(part, "q_proj"):
            nn.init.normal_(part.q_proj.weight, std=3)
    answer = logits(evidence_of(network, IDS))
    assert "a soft cap of 2 is at work" in answer.sentence
    assert all(1 < row["largest"] <= 2 for row in answer.sites)


@pytest.mark.parametrize("factor, verdict", [(1.0, "ok"), (600.0, "note"), (3e6, "problem")])
def test_the_verdict_follows_from_the_largest_logit(factor, verdict):
    network = vit()
    with torch.no_grad():
        for block in network.blocks:
            block.attn.qkv.weight[:32] *= factor / 2
    answer = logits(evidence_of(network, IMAGES))
    assert answer.verdict == verdict
    assert {"ok": "less than 10%", "note": "may change", "problem": "float16 overflows"}[verdict] in answer.sentence


def test_what_is_missing_is_named():
    norm = nn.Sequential(nn.LayerNorm(8))
    x = [torch.randn(4, 8)]
    assert "called neither" in logits(evidence_of(norm, x)).sentence
    answer = logits(Evidence(normscope.capture(norm, x)))
    assert answer.verdict == "omitted" and "`normscope check MODEL` reads them" in answer.sentence
