import re

import pytest
import torch
import transformers
from loads import assert_same_weights, load_folder, result_of
from safetensors.torch import save_file

import normscope
from normscope.errors import ModelError
from normscope.loading import load
from normscope.models.transformers import _BUILT_IN
from normscope.pairs.capture import capture


def class_of(folder):
    return getattr(transformers, transformers.AutoConfig.from_pretrained(folder).architectures[0])


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("gpt2", "float32"), ("qwen3", "float32"), ("bert", "float32"), ("llama", "bfloat16"), ("t5", "bfloat16")],
)
def test_outputs_are_those_of_transformers(folders, tokenizer, texts, lines, kind, dtype):
    model = load_folder(folders / kind, data=lines, dtype=dtype)
    assert ("(the decoder reads the same text)" in model.about["data"]) == (kind == "t5")
    theirs = class_of(folders / kind).from_pretrained(folders / kind, dtype=getattr(torch, dtype)).eval()
    assert type(model.module) is type(theirs)
    assert_same_weights(model.module, theirs)
    for (_, ours), (_, other) in zip(model.module.named_buffers(), theirs.named_buffers(), strict=True):
        assert ours.dtype == other.dtype  # rotary frequencies stay in float32: in bfloat16 they are off by radians
    limit = 30 if kind == "gpt2" else 512
    inputs = tokenizer(texts, padding=True, truncation=True, max_length=limit, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    if kind == "t5":
        inputs |= {"decoder_input_ids": inputs.input_ids, "decoder_attention_mask": inputs.attention_mask}
    batch = next(iter(model.inputs))
    assert torch.equal(batch.kwargs["input_ids"], inputs["input_ids"])
    assert torch.equal(batch.valid, inputs["attention_mask"].bool())
    with torch.no_grad():
        expected = theirs(**inputs).logits
    result = result_of(model.module, batch)
    assert model.outputs.kind == "tokens" and torch.equal(model.outputs.read(result, batch), expected)


def test_an_encoder_saved_alone(tokenizer, lines, tmp_path):
    config = {"vocab_size": 300, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "num_layers": 2}
    theirs = transformers.T5EncoderModel(transformers.T5Config(**config)).eval()
    theirs.save_pretrained(tmp_path / "encoder")
    tokenizer.save_pretrained(tmp_path / "encoder")
    model = load_folder(tmp_path / "encoder", data=lines)
    assert type(model.module) is type(theirs)
    for batch in model.inputs:
        assert torch.equal(result_of(model.module, batch)[0], result_of(theirs, batch)[0])


@pytest.mark.parametrize(
    ("kind", "batch_size", "longest"),
    [
        ("canine", 1, 45),  # has no table of embeddings, and takes every token: it hashes the numbers of characters
        ("ibert", 4, 20),  # no nn.Embedding; RoBERTa's 22 rows of positions less the padding's and the one before it
    ],
)
def test_tables_of_embeddings_of_other_kinds(folders, lines, kind, batch_size, longest):
    model = load_folder(folders / kind, data=lines, batch_size=batch_size)
    theirs = class_of(folders / kind).from_pretrained(folders / kind).eval()
    assert max(batch.kwargs["input_ids"].shape[1] for batch in model.inputs) == longest
    for batch in model.inputs:
        assert torch.equal(result_of(model.module, batch)[0], result_of(theirs, batch)[0])


def test_provenance_and_description(folders, lines):
    model = load_folder(folders / "gpt2", data=lines, limit=3)
    list(model.inputs)
    assert model.about["weights"].startswith("folder gpt2 (sha256 ") and model.provenance.kind == "file"
    assert model.about["data"] == f"{lines}: the first 3 of 4 texts (1 cut to 30 tokens)"
    assert model.about["family"] == "language"


@pytest.mark.parametrize("kind", ["qwen3", "t5", "longformer"])
def test_padding_is_excluded_from_every_sum(folders, texts, lines, kind):
    together = load_folder(folders / kind, data=lines, batch_size=4)
    alone = load_folder(folders / kind, data=lines, batch_size=1)
    with_padding, without = (capture(model.module, model.inputs) for model in (together, alone))
    total = sum(len(text.encode()) + 1 for text in texts)
    for site in without.sites:
        padded, expected = with_padding.stats[site.name], without.stats[site.name]
        heads = {"q_norm": 2}.get(site.name.rpartition(".")[2], 1)
        assert padded.n_pairs == expected.n_pairs == total * heads * site.d
        ours, theirs = (stats.moments.sum((0, 2)) for stats in (padded, expected))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * total)


def test_head_that_reads_no_language_is_left_out(folders, lines, caplog):
    model = load_folder(folders / "roberta", data=lines)
    assert type(model.module).__name__ == "RobertaModel"
    assert "RobertaModel has no place for classifier.dense.bias" in caplog.text
    batch = next(iter(model.inputs))
    result = result_of(model.module, batch)
    assert result.last_hidden_state.shape == (4, 20, 16)  # two of 22 positions are no token's
    assert model.outputs.kind == "tensor" and torch.equal(model.outputs.read(result, batch), result.last_hidden_state)
    file = folders / "roberta" / "model.safetensors"
    assert_same_weights(load_folder(folders / "roberta", weights=file).module, model.module)


def test_random_weights_are_those_of_transformers_under_the_seed(folders):
    torch.manual_seed(5)
    expected = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(folders / "llama"))
    torch.manual_seed(99)
    before = torch.get_rng_state()
    model = load_folder(folders / "llama", weights="random", seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    assert_same_weights(model.module, expected)
    assert model.provenance.description == "random weights, seed 5"
    half = load_folder(folders / "llama", weights="random", seed=5, dtype="bfloat16")
    assert {parameter.dtype for parameter in half.module.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("kind", "base", "suffix"), [("gpt2", True, "safetensors"), ("gpt2", False, "bin"), ("t5", False, "safetensors")]
)
def test_weights_of_a_file(folders, tmp_path, kind, base, suffix):
    source = class_of(folders / kind).from_pretrained(folders / kind)  # whose head is tied to the embedding
    weights = (source.base_model if base else source).state_dict()
    path = tmp_path / f"weights.{suffix}"
    if suffix == "bin":
        torch.save(weights, path)
    else:
        save_file({key: value.clone() for key, value in weights.items()}, path)
    model = load_folder(folders / kind, weights=path)
    assert_same_weights(model.module, source)
    assert model.provenance.kind == "file"
    assert model.provenance.description.startswith(f"file weights.{suffix} (sha256 ")


@pytest.mark.parametrize(
    ("key", "value", "misfit"),
    [
        ("model.norm.weight", None, "model.norm.weight is missing."),
        (new := "model.layers.2.mlp.up_proj.weight", torch.ones(32, 16), f"{new} is not in the model."),
        ("model.norm.weight", torch.ones(8), "model.norm.weight is (8,) and should be (16,)."),
        ("model.norm.weight", torch.ones(16, dtype=torch.int8), "model.norm.weight is int8 and should be float32."),
    ],
)
def test_weights_that_do_not_fit(folders, tmp_path, key, value, misfit):
    weights = transformers.LlamaForCausalLM.from_pretrained(folders / "llama").state_dict() | {key: value}
    path = tmp_path / "spoiled.safetensors"
    save_file({name: tensor for name, tensor in weights.items() if tensor is not None}, path)
    sentence = re.escape(f"does not fit transformers:{folders / 'llama'}: {misfit}")
    with pytest.raises(ModelError, match=f"{sentence}$"):
        load_folder(folders / "llama", weights=path)


def test_sharded_weights(folders, copy):
    folder = copy("llama")
    (folder / "model.safetensors").unlink()
    source = transformers.LlamaForCausalLM.from_pretrained(folders / "llama")
    source.save_pretrained(folder, max_shard_size="20KB")
    parts = sorted(folder.glob("model-*.safetensors"))
    assert len(parts) > 1
    assert_same_weights(load_folder(folder).module, source)
    parts[0].unlink()
    with pytest.raises(ModelError, match=f"lacks weights that its model.safetensors.index.json names: {parts[0].name}"):
        load_folder(folder)


def test_llama_7b_is_the_published_one():
    model_type, facts = _BUILT_IN["huggyllama/llama-7b"]
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(transformers.AutoConfig.for_model(model_type, **facts))
    # The published files hold 13,476,839,424 bytes: two a weight, and a float32 frequency for each half head, 32 times.
    assert 2 * sum(p.numel() for p in module.parameters()) + 32 * 64 * 4 == 13_476_839_424


@pytest.mark.gpu
def test_random_weights_for_a_gpu_are_drawn_on_it(folders):
    network = load(f"transformers:{folders / 'llama'}", weights="random", seed=5, device="cuda")
    assert network.provenance.description == "random weights, seed 5 of a GPU"
    assert {parameter.device.type for parameter in network.module.parameters()} == {"cuda"}


def test_a_swapped_folder_has_the_tokenizer(folders, lines, texts, tokenizer, tmp_path):
    network = load_folder(folders / "bert", data=lines)
    norm = "bert.embeddings.LayerNorm"
    normscope.swap(network, "dyt", normscope.capture(network, layers=norm))
    normscope.save_swapped(network.module, tmp_path / "swap", network.about)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "swap")
    assert loaded(texts)["input_ids"] == tokenizer(texts)["input_ids"]
