"""Norms on queries and keys: told by the names that the libraries give them, tokens are heads × positions."""

import torch
from transformers import Qwen3Config, Qwen3Model

import normscope
from normscope.pairs.norms.placement import _QUERY_OR_KEY

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
    assert [name for name in NAMES if not _QUERY_OR_KEY.search(name)] == []
    assert [name for name in OTHERS if _QUERY_OR_KEY.search(name)] == []


def test_tokens_of_a_qk_norm_are_heads_times_positions():
    config = Qwen3Config(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
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
