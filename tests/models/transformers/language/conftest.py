"""Folders of tiny networks as transformers saves them, each with a tokenizer, and texts to read."""

import shutil

import pytest
import torch
import transformers

TEXTS = ["One two three.", "A longer line, of more words than the first.", "Four!", "Ein Käfig, ¿y si no?"]
WORDLESS = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL = WORDLESS | {"vocab_size": 300}
CONFIGS = {
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 300, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 30}),
    "llama": ("LlamaForCausalLM", SMALL),
    "qwen3": ("Qwen3ForCausalLM", SMALL | {"num_key_value_heads": 1, "head_dim": 8}),
    "bert": ("BertForMaskedLM", SMALL),
    "t5": ("T5ForConditionalGeneration", {"vocab_size": 300, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2}),
    "roberta": ("RobertaForSequenceClassification", SMALL | {"max_position_embeddings": 22}),
    "ibert": ("IBertForMaskedLM", SMALL | {"max_position_embeddings": 22}),
    "longformer": ("LongformerModel", SMALL | {"attention_window": [8, 8], "max_position_embeddings": 600}),
    "canine": ("CanineModel", WORDLESS),
    "time_series": ("PatchTSTModel", {"num_input_channels": 1, "d_model": 16, "num_hidden_layers": 1, "ffn_dim": 16}),
    "video": ("VideoMAEModel", WORDLESS),
    "boxes": ("LayoutLMv3Model", SMALL | {"coordinate_size": 2, "shape_size": 4}),
}


@pytest.fixture(scope="session")
def folders(tokenizer, tmp_path_factory):
    """Save a tiny network of each kind, with weights that no seed of the tests makes, and its tokenizer."""
    root = tmp_path_factory.mktemp("transformers")
    torch.manual_seed(1234)
    for kind, (name, changes) in CONFIGS.items():
        network = getattr(transformers, name)
        config = network.config_class(**changes)
        network(config).save_pretrained(root / kind)
        tokenizer.save_pretrained(root / kind)
    return root


@pytest.fixture
def texts():
    return list(TEXTS)


@pytest.fixture
def lines(texts, tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(texts))
    return path


@pytest.fixture
def copy(folders, tmp_path):
    """Copy a tiny network's folder, to spoil it."""

    return lambda kind: shutil.copytree(folders / kind, tmp_path / f"{kind}-copy")
