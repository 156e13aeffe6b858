"""Checkpoints with quantized weights: captured and verified as they are, and refused where weights would change."""

import re
import shutil

import pytest
import torch
import transformers
from loads import change_json, load_folder
from safetensors.torch import load_file, save_file

import normscope
from normscope.errors import MemoryEndedError, ModelError, UsageError
from normscope.models.weights import devices

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
FORMATS = {
    "torchao": ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "IntxWeightOnlyConfig"],
    "bitsandbytes": ["load_in_8bit", "load_in_4bit"],
}


@pytest.fixture(scope="module")
def plain(tokenizer, tmp_path_factory):
    """Save a tiny Llama in bfloat16, the size of whose layers every format divides."""
    folder = tmp_path_factory.mktemp("plain")
    torch.manual_seed(5)
    network = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=300, **SIZES))
    for name, tensor in network.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(tensor, 0.5, 1.5)
    network.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def quantized(plain, tokenizer, tmp_path):
    """Return what quantizes the tiny Llama by a library, which a test skips if it is missing, and saves it."""

    def save(library, how):
        quantization = pytest.importorskip("torchao.quantization" if library == "torchao" else library)
        if library == "bitsandbytes":
            config = transformers.BitsAndBytesConfig(**{how: True})
        else:
            group = {"weight_dtype": torch.int4, "granularity": quantization.PerGroup(32)} if "Intx" in how else {}
            config = transformers.TorchAoConfig(getattr(quantization, how)(**group))
        network = transformers.LlamaForCausalLM.from_pretrained(
            plain, quantization_config=config, dtype=torch.bfloat16, device_map={"": "cpu"}
        )
        network.save_pretrained(tmp_path / how)
        tokenizer.save_pretrained(tmp_path / how)
        return tmp_path / how, network

    return save


@pytest.mark.slow
@pytest.mark.parametrize(("library", "how"), [(library, how) for library, hows in FORMATS.items() for how in hows])
def test_inputs_of_norms_are_those_of_transformers(quantized, lines, library, how):
    folder, network = quantized(library, how)
    loaded = load_folder(folder, data=lines, batch_size=1)
    assert f"quantized by {library}" in loaded.about["weights"]
    seen = normscope.capture(loaded, verify=True)
    inputs = []
    handle = network.model.norm.register_forward_pre_hook(lambda norm, args: inputs.append(args[0].double()))
    with torch.no_grad():
        for batch in loaded.inputs:
            network(**batch.kwargs)
    handle.remove()
    stats, x = seen.stats["model.norm"], torch.cat([part.flatten() for part in inputs])
    assert stats.n_pairs == x.numel()
    # 1e-12: sums of float64 in another order.
    torch.testing.assert_close(stats.channel_sums[1].sum(), x.square().sum(), rtol=1e-12, atol=0)
    refusals = {
        "is quantized by .* and cannot be converted": lambda: load_folder(folder, data=lines, dtype="float32"),
        "Saving a swapped network is not possible: this LlamaForCausalLM is quantized": lambda: normscope.save_swapped(
            loaded.module, folder.parent / "swap"
        ),
        "Simplification is not possible: this LlamaForCausalLM is quantized": lambda: normscope.simplify(loaded),
    }
    for sentence, call in refusals.items():
        with pytest.raises((UsageError, ModelError), match=sentence):
            call()


def packed(plain, method, tmp_path):
    """Save the tiny Llama as GPTQ and AWQ lay out their files; values do not matter to what is tested."""
    folder = shutil.copytree(plain, tmp_path / method)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        rows, columns = tensors.pop(name).shape
        stem = name.removesuffix("weight")
        tensors[f"{stem}qweight"] = torch.zeros(columns // 8, rows, dtype=torch.int32)
        tensors[f"{stem}qzeros"] = torch.zeros(columns // 32, rows // 8, dtype=torch.int32)
        tensors[f"{stem}scales"] = torch.ones(columns // 32, rows, dtype=torch.float16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    change_json(folder / "config.json", quantization_config={"quant_method": method, "bits": 4, "group_size": 32})
    return folder


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("gptq", "does not load .*(optimum|gptqmodel|GPU)"),
        ("awq", "does not load .*(gptqmodel|accelerate)"),
        ("quip", "do not fit LlamaForCausalLM: .*up_proj.weight is missing"),  # which transformers does not know
    ],
)
def test_formats_that_do_not_load(plain, tmp_path, lines, method, reason):
    folder = packed(plain, method, tmp_path)
    with pytest.raises(ModelError, match=rf"quantized by {method} 4-bit, {reason}"):
        load_folder(folder, data=lines)


def test_random_weights_of_a_quantized_configuration_are_plain(plain, tmp_path, lines):
    folder = packed(plain, "gptq", tmp_path)
    network = load_folder(folder, data=lines, weights="random")
    assert {tensor.dtype for tensor in network.module.parameters()} == {torch.float32}
    whole = load_folder(folder, data=lines, weights=plain / "model.safetensors")
    assert whole.about["weights"].startswith("file model.safetensors")


def test_large_weights_keep_their_dtype_and_are_reported(plain, lines, monkeypatch, caplog):
    for name in ("pretrained", "random", str(plain / "model.safetensors")):
        loaded = {"data": lines, "weights": name}
        assert load_folder(plain, **loaded).module.dtype == torch.float32 and not caplog.messages
        with monkeypatch.context() as patch:
            for module in (devices, normscope.models.transformers):
                patch.setattr(module, "LARGE", 1000)
            assert load_folder(plain, **loaded).module.dtype == torch.bfloat16
            assert load_folder(plain, **loaded, dtype="float32").module.dtype == torch.float32
        kept, asked = caplog.messages
        assert re.search(r"its 0\.000121 billion parameters take 0\.00024\d GB in their stored dtype\.$", kept)
        assert asked.endswith("take 0.000483 GB in float32.")
        caplog.clear()


def test_weights_without_room_are_refused_before_they_are_read(plain, lines, monkeypatch):
    free = type("Memory", (), {"available": 300_000})
    monkeypatch.setattr(devices.psutil, "virtual_memory", lambda: free)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", None)
    sentence = r"take 0.000483 GB in float32, and cpu has 0.0003 GB free\. Take --dtype bfloat16"
    for name in ("pretrained", "random", str(plain / "model.safetensors")):
        with pytest.raises(MemoryEndedError, match=sentence):
            load_folder(plain, data=lines, weights=name)
