"""Weights of files: fitted strictly, in the dtypes that were asked for (--dtype keep), and no code of theirs is run."""

import hashlib
import io
import pickle
import re
import warnings

import mutations
import pytest
import timm
import torch
import transformers
from loads import RunsWhenUnpickled, assert_same_weights, load_folder
from networks import save_llama
from safetensors.torch import save_file
from torch import nn

import normscope
from normscope.errors import ModelError
from normscope.loading import load


def load_tiny(path, name="timm:test_vit"):
    return load(name, weights=str(path), device="cpu", limit=1)


@pytest.mark.parametrize(
    ("name", "wrapped"),
    [
        ("model.safetensors", dict),
        ("model.pth", dict),
        ("model.pth", lambda weights: {"state_dict_ema": weights, "epoch": 3}),
        ("ddp.pt", lambda weights: {f"module.{key}": value for key, value in weights.items()}),  # of a distributed run
    ],
)
def test_formats_of_files(tiny_vit, tmp_path, name, wrapped):
    path = tmp_path / name
    (save_file if path.suffix == ".safetensors" else torch.save)(wrapped(tiny_vit.state_dict()), path)
    model = load_tiny(path)
    assert_same_weights(model.module, tiny_vit)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    assert (model.provenance.kind, model.provenance.description) == ("file", f"file {name} (sha256 {digest})")


def test_original_format_goes_through_timms_conversion(tmp_path):
    """convnext's checkpoint_filter_fn maps Facebook's names, which timm no longer uses, to its own."""
    torch.manual_seed(1)
    source = timm.create_model("test_convnext")
    facebook = {}
    for key, value in source.state_dict().items():
        key = key.replace("stem.", "downsample_layers.0.").replace(".conv_dw.", ".dwconv.")
        key = key.replace("mlp.fc1.", "pwconv1.").replace("mlp.fc2.", "pwconv2.")
        for stage in range(4):
            key = key.replace(f"stages.{stage}.downsample.", f"downsample_layers.{stage}.")
            key = key.replace(f"stages.{stage}.blocks.", f"stages.{stage}.")
        facebook[key.replace("head.norm.", "norm.").replace("head.fc.", "head.")] = value
    assert facebook.keys() != source.state_dict().keys()
    torch.save({"model": facebook}, tmp_path / "facebook.pth")
    assert_same_weights(load_tiny(tmp_path / "facebook.pth", "timm:test_convnext").module, source)


@pytest.mark.parametrize(
    ("key", "spoil", "sentence"),
    [
        ("norm.weight", None, "norm.weight is missing."),
        ("head.scale", lambda _: torch.ones(3), "head.scale is not in the model."),
        ("head.bias", lambda _: torch.zeros(10), "head.bias is (10,) and should be (1000,)."),
        ("norm.weight", lambda weight: weight.to(torch.int8), "norm.weight is int8 and should be float32."),
    ],
)
def test_weights_that_do_not_fit(tiny_vit, tmp_path, key, spoil, sentence):
    weights = dict(tiny_vit.state_dict())
    before = weights.pop(key, None)
    if spoil is not None:
        weights[key] = spoil(before)
    save_file(weights, tmp_path / "spoiled.safetensors")
    with pytest.raises(ModelError, match=re.escape(f"does not fit timm:test_vit: {sentence}")):
        load_tiny(tmp_path / "spoiled.safetensors")


def test_half_precision_and_counts_of_batches_fit(tmp_path):
    source = timm.create_model("test_resnet")
    half = {key: value.half() if value.is_floating_point() else value for key, value in source.state_dict().items()}
    assert any(not value.is_floating_point() for value in half.values())
    save_file(half, tmp_path / "half.safetensors")
    assert_same_weights(load_tiny(tmp_path / "half.safetensors", "timm:test_resnet").module, source.half().float())


@pytest.mark.parametrize("suffix", ["pth", "bin", "safetensors"])
def test_malicious_pickle_is_not_executed(tmp_path, suffix):
    trace, path = tmp_path / "executed", tmp_path / f"evil.{suffix}"
    for save in (torch.save, lambda value, path: path.write_bytes(pickle.dumps(value, protocol=2))):
        save({"state_dict": RunsWhenUnpickled(trace)}, path)
        with pytest.raises(ModelError, match="evil"):
            load_tiny(path)
        assert not trace.exists()
    pickle.loads(path.read_bytes())  # noqa: S301 (the check can fail: unpickling does leave the trace)
    assert trace.exists()


def serialized(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "cannot be read: it is no torch checkpoint"),
        (b"hello world, this is no checkpoint", "cannot be read: it is no torch checkpoint, or a damaged one"),
        (serialized({"weight": torch.zeros(999)})[:900], "cannot be read: it is no torch checkpoint, or a damaged one"),
        *((serialized(value), "The weights file .*file.pth' ") for value in ([1, 2], {"epoch": 3}, {}, torch.zeros(3))),
        ("a folder", "are a folder. Name the checkpoint file in it"),
    ],
)
def test_refused_files(tmp_path, content, sentence):
    path = tmp_path / "file.pth"
    if content == "a folder":
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(ModelError, match=sentence):
        load_tiny(path)


MIXED = """
import torch
from torch import nn

class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 8, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(8)  # float32 on purpose
        self.register_buffer("table", torch.ones(8, dtype=torch.float64))

    def forward(self, x, scale):
        assert x.dtype == torch.bfloat16 and scale.dtype == torch.float32 and self.table.dtype == torch.float64
        return self.norm(self.body(x).float() * scale)

def mixed():
    model = Mixed()
    return model, [(torch.randn(4, 6, dtype=torch.bfloat16), torch.full((4, 1), 1 / 3)) for _ in range(3)]

def doubles():
    return Mixed(), [(torch.randn(4, 6).double(), torch.ones(4, 1))]

def half():
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8)).bfloat16(), [torch.randn(4, 6) for _ in range(3)]
"""


@pytest.fixture
def factory(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(MIXED)
    return lambda function: f"py:{path}:{function}"


@pytest.mark.parametrize("options", [{}, {"dtype": "keep"}])
def test_a_users_network_of_mixed_dtypes_stays_mixed(factory, options):
    network = load(factory("mixed"), device="cpu", **options)
    dtypes = {name: tensor.dtype for name, tensor in network.module.state_dict().items()}
    assert dtypes["body.weight"] == torch.bfloat16 and dtypes["norm.weight"] == torch.float32
    assert "converted" not in network.about["weights"]
    seen = normscope.capture(network.module, network.inputs, verify=True, about=network.about)
    assert seen.about["dtype"] == "bfloat16 and float32"
    assert seen.stats["norm"].n_pairs == 3 * 4 * 8


def test_inputs_in_a_dtype_that_the_network_lacks_get_that_of_its_first_weights(factory):
    (batch,) = load(factory("doubles"), device="cpu").inputs
    assert [tensor.dtype for tensor in batch.args] == [torch.bfloat16, torch.float32]
    half = load(factory("half"), device="cpu")
    assert {batch.args[0].dtype for batch in half.inputs} == {torch.bfloat16}
    assert normscope.capture(half.module, half.inputs).about["dtype"] == "bfloat16"


def test_conversions_are_reported(factory, tmp_path):
    network = load(factory("half"), device="cpu", dtype="float32")
    assert network.about["weights"].endswith(", converted from bfloat16 to float32")
    assert {batch.args[0].dtype for batch in network.inputs} == {torch.float32}
    demo = load("demo_vit", device="cpu", dtype="bf16", limit=2)
    assert demo.about["weights"].endswith(", converted from float32 to bfloat16")
    for same in ({}, {"dtype": "float32"}, {"dtype": "keep"}):
        assert "converted" not in load("demo_vit", device="cpu", limit=2, **same).about["weights"]
    torch.save(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8)).state_dict(), tmp_path / "weights.pth")
    of_file = load(factory("half"), device="cpu", weights=tmp_path / "weights.pth")
    assert of_file.about["weights"].endswith(", converted from float32 to bfloat16")
    assert {tensor.dtype for tensor in of_file.module.parameters()} == {torch.bfloat16}


def test_keep_leaves_a_language_model_in_its_dtype(tmp_path):
    save_llama(tmp_path, layers=1)
    half = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path)
    kept, plain = (load_folder(tmp_path, limit=1, dtype=dtype) for dtype in ("keep", None))
    assert kept.module.dtype == torch.bfloat16 and plain.module.dtype == torch.float32
    assert "converted" not in kept.about["weights"]
    assert "converted from bfloat16 to float32" in plain.about["weights"]
    assert load_folder(tmp_path, weights="random", dtype="keep").module.dtype == torch.bfloat16


@pytest.mark.parametrize("number", [150, pytest.param(10_000, marks=pytest.mark.faults)])
@pytest.mark.parametrize("kind", ["weights", "swaps"])
def test_no_mutated_file_is_mistaken_for_another(kind, number):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of pickle protocols that there are not
        counts = getattr(mutations, f"mutated_{kind}")(number, seed=7)
    assert counts.keys() <= mutations.FINE, counts
    assert sum(counts.values()) == number
    assert counts[mutations.REFUSED] > 0.8 * number


def test_code_that_runs_is_counted(monkeypatch):
    """A reader that unpickles everything is what it is there for."""
    careful = timm.models.load_state_dict

    def trusting(path, weights_only):
        if path.endswith(".safetensors"):
            return careful(path)
        state = torch.load(path, weights_only=False)
        return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}

    monkeypatch.setattr(timm.models, "load_state_dict", trusting)
    counts = mutations.mutated_weights(80, seed=7)
    assert counts["SystemExit: code was run"] > 0
