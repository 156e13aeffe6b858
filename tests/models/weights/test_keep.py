"""--dtype keep: networks in the dtypes that they were made in, and what is said where they were not."""

import json

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import normscope
from normscope.cli import app
from normscope.errors import UsageError
from normscope.inputs.batch import Batch

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
def own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(MIXED)
    return lambda function: f"py:{path}:{function}"


@pytest.mark.parametrize("asked", [{}, {"dtype": "keep"}])
def test_a_mixed_network_of_ones_own_stays_mixed(own, asked):
    network = normscope.load(own("mixed"), device="cpu", **asked)
    dtypes = {name: tensor.dtype for name, tensor in network.module.state_dict().items()}
    assert dtypes["body.weight"] == torch.bfloat16 and dtypes["norm.weight"] == torch.float32
    assert "converted" not in network.about["weights"]
    seen = normscope.capture(network.module, network.inputs, verify=True, about=network.about)
    assert seen.about["dtype"] == "bfloat16 and float32"
    assert seen.stats["norm"].n_pairs == 3 * 4 * 8


def test_inputs_in_a_dtype_that_the_network_lacks_get_that_of_its_first_weights(own):
    network = normscope.load(own("doubles"), device="cpu")
    (batch,) = network.inputs
    assert [tensor.dtype for tensor in batch.args] == [torch.bfloat16, torch.float32]
    half = normscope.load(own("half"), device="cpu")
    assert {batch.args[0].dtype for batch in half.inputs} == {torch.bfloat16}
    assert normscope.capture(half.module, half.inputs).about["dtype"] == "bfloat16"


def test_what_was_converted_is_said(own):
    network = normscope.load(own("half"), device="cpu", dtype="float32")
    assert network.about["weights"].endswith(", converted from bfloat16 to float32")
    assert {batch.args[0].dtype for batch in network.inputs} == {torch.float32}
    demo = normscope.load("demo_vit", device="cpu", dtype="bf16", limit=2)
    assert demo.about["weights"].endswith(", converted from float32 to bfloat16")
    for same in ({}, {"dtype": "float32"}, {"dtype": "keep"}):
        assert "converted" not in normscope.load("demo_vit", device="cpu", limit=2, **same).about["weights"]


def test_a_file_of_another_dtype_is_said_to_be_converted(own, tmp_path):
    weights = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8)).state_dict()
    torch.save(weights, tmp_path / "weights.pth")
    network = normscope.load(own("half"), device="cpu", weights=tmp_path / "weights.pth")
    assert network.about["weights"].endswith(", converted from float32 to bfloat16")
    assert {tensor.dtype for tensor in network.module.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["demo_vit", "demo_wav2vec2", "demo_dit"])
def test_models_of_libraries_are_kept_too(name):
    kept, plain = (normscope.load(name, device="cpu", limit=1, dtype=dtype) for dtype in ("keep", None))
    batches = [next(iter(network.inputs)) for network in (kept, plain)]
    assert {tensor.dtype for tensor in plain.module.parameters()} == {torch.float32}
    for mine, other in zip(*(network.module.state_dict().values() for network in (kept, plain)), strict=True):
        assert mine.dtype == other.dtype and torch.equal(mine, other)
    assert [len(batch.samples) for batch in batches] == [len(batches[0].samples)] * 2


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
def test_a_language_model_is_kept_as_it_was_saved(saved, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    transformers.LlamaForCausalLM(config).to(saved).save_pretrained(tmp_path)
    bare = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "[PAD]": 1, "a": 2}, "[UNK]"))
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=bare, **special).save_pretrained(tmp_path)
    kept, plain = (
        normscope.load(f"transformers:{tmp_path}", device="cpu", limit=1, dtype=dtype) for dtype in ("keep", None)
    )
    assert {tensor.dtype for tensor in kept.module.parameters()} == {saved}
    assert "converted" not in kept.about["weights"]
    assert {tensor.dtype for tensor in plain.module.parameters()} == {torch.float32}
    assert ("converted from bfloat16 to float32" in plain.about["weights"]) == (saved == torch.bfloat16)
    assert (
        normscope.load(f"transformers:{tmp_path}", weights="random", device="cpu", dtype="keep").module.dtype == saved
    )


def test_dtypes_that_are_none(own):
    with pytest.raises(UsageError, match=r"There is no dtype 'kept'\. Did you mean 'keep'"):
        normscope.load(own("half"), device="cpu", dtype="kept")


def test_a_batch_keeps_the_dtypes_that_it_is_told_to():
    batch = Batch((torch.ones(2), torch.ones(2).double(), torch.ones(2).int()))
    cpu = torch.device("cpu")
    converted = batch.to(cpu, torch.bfloat16, kept=[torch.float32])
    assert [tensor.dtype for tensor in converted.args] == [torch.float32, torch.bfloat16, torch.int32]
    assert [tensor.dtype for tensor in batch.to(cpu, None).args] == [torch.float32, torch.float64, torch.int32]


@pytest.mark.parametrize(
    ("options", "dtype", "said"),
    [
        ([], "bfloat16", False),
        (["--dtype", "keep"], "bfloat16", False),
        (["--dtype", "float32"], "float32", True),
    ],
)
def test_the_commands_keep_and_say(own, tmp_path, options, dtype, said):
    command = ["capture", own("half"), "-o", str(tmp_path / "seen.safetensors"), "--device", "cpu", "--json", *options]
    document = json.loads(CliRunner().invoke(app, command).stdout)
    assert document["dtype"] == dtype
    assert ("converted from bfloat16 to float32" in document["weights"]) == said
