import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import normscope
from normscope.errors import DataError, DeviceError, ModelError, UsageError
from normscope.loading import load
from normscope.models.registry import find, loader_of


def test_listing_models_imports_nothing_heavy():
    code = (
        "import sys, normscope.models.registry as registry; registry.list_models(); registry.embedded_models();"
        "print({'torch', 'timm', 'numpy', 'PIL', 'huggingface_hub'} & set(sys.modules))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "set()"


REFUSED_NAMES = {
    "demo_vti": "There is no model 'demo_vti'. Did you mean 'demo_vit'",
    "vit_b_16": "There is no model 'vit_b_16'. Did you mean 'vit_b16'",
    "vit_tiny_patch16_224": "Did you mean 'timm:vit_tiny_patch16_224'?",
    "timm:vit_tiny_patch16_225": "Did you mean 'timm:vit_tiny_patch16_224'",
    "tim:resnet18": "Did you mean 'timm:resnet18'",
    "timm:": "There is no model 'timm:'",
    "": "There is no model ''; `normscope models` lists the names. A model of the hub goes by its library: ",
    "timm:qqqq": "There is no model 'timm:qqqq'. timm.list_models() names the architectures of timm.",
    "timm:test_vit.r160": "Did you mean 'timm:test_vit.r160_in1k'",
    "google/vit-base-patch16-224": "goes by its library: transformers:google/vit-base-patch16-224, diffusers:",
    "bert-base-uncased": "lists the names. A model of the hub goes by its library: transformers:bert-base-uncased",
    "/": "'/' is a folder. Name the library of its model, transformers:/",
    Path("/"): "'/' is a folder",
}
REFUSED = [
    *((name, {}, ModelError, sentence) for name, sentence in REFUSED_NAMES.items()),
    (torch.nn.LayerNorm(4), {}, UsageError, "takes the name of a model, not a LayerNorm. Pass a module of yours"),
    ("py:no_such.py:make", {"weights": "pretrained"}, DataError, "There is no"),
    ("demo_vit", {"weights": "/no/such.safetensors"}, DataError, "There is no"),
    *(
        ("demo_vit", options, error, sentence)
        for options, error, sentence in (
            ({"limit": 0}, UsageError, "limit is 0; it has to be between 1 and 9223372036854775807."),
            ({"batch_size": -1}, UsageError, "batch_size is -1; it has to be between 1 and"),
            ({"dtype": "float64"}, UsageError, "There is no dtype 'float64'."),
            ({"device": "tpu"}, UsageError, "There is no device 'tpu'."),
            ({"device": "cuda:99"}, DeviceError, "The device 'cuda:99' is not available: "),
            ({"data": ""}, UsageError, "data is an empty path."),
            ({"weights": ""}, UsageError, "weights is an empty path."),
            ({"limit": 2**63}, UsageError, "limit is 9223372036854775808; it has to be between 1 and 922337203685477"),
            ({"batch_size": 2**63}, UsageError, "batch_size is 9223372036854775808; it has to be between 1"),
            ({"seed": 2**63}, UsageError, "seed is 9223372036854775808; it has to be between -9223372036854775808 and"),
            ({"seed": -(2**63) - 1}, UsageError, "seed is -9223372036854775809; it has to be between"),
            ({"workers": -1}, UsageError, "workers is -1; it has to be between 0 and"),
            ({"device_map": "balanced"}, UsageError, "There is no device map 'balanced'. There are: auto."),
            ({"device_map": "auto"}, UsageError, "leave --device cpu or --device-map auto out."),
            ({"data": "/no/such/folder"}, DataError, "There is no file or folder '/no/such/folder'"),
        )
    ),
]


@pytest.mark.parametrize(("name", "options", "error", "sentence"), REFUSED)
def test_refusals(name, options, error, sentence):
    with pytest.raises(error, match=re.escape(sentence)):
        load(name, **({"weights": "random", "device": "cpu"} | options))


def test_a_missing_file_is_missing_data(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        normscope.load_timeline(tmp_path / "no_such.jsonl")
    with pytest.raises(DataError, match="There is no capture file"):
        normscope.fit(tmp_path / "no_such.safetensors")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_and_inputs_share_the_dtype(dtype):
    model = load("timm:test_vit", weights="random", dtype=str(dtype).removeprefix("torch."), device="cpu", limit=1)
    assert {parameter.dtype for parameter in model.module.parameters()} == {dtype}
    assert {batch.args[0].dtype for batch in model.inputs} == {dtype}
    assert not model.module.training


def test_about_describes_model_weights_and_data():
    model = load("timm:test_vit", weights="random", seed=7, limit=3, device="cpu")
    assert model.about == {
        "model": "timm:test_vit",
        "weights": "random weights, seed 7",
        "data": "3 crops of grace_hopper.jpg, china.jpg, flower.jpg (seed 7)",
    }


def test_a_library_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchaudio", None)
    for module in ("speech", "embedded.demo_wav2vec2"):
        monkeypatch.delitem(sys.modules, f"normscope.models.{module}", raising=False)
    with pytest.raises(ModelError, match=r"^demo_wav2vec2 cannot be loaded: .*torchaudio.*pip install 'torch=="):
        loader_of(find("demo_wav2vec2"))


COMMANDS = {
    "named": ("stats", "demo_vit", "demo_wav2vec2"),
    "another": ("layers", "gpt2", "--weights", "random", "--json"),  # transformers imports torchaudio
    "a folder": ("layers", "transformers:wav2vec2", "--weights", "random"),
    "no name": ("layers",),
}
ONE_AFTER_THE_OTHER = """
import contextlib, io, json, sys, traceback
if sys.argv[2] == "True":
    sys.modules["torchaudio"] = None
from normscope.cli import app
ended = []
for arguments in json.loads(sys.argv[1]).values():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            app(arguments)
        except SystemExit as done:
            ended.append([done.code or 0, out.getvalue(), err.getvalue()])
try:
    from transformers import BertModel
    user = ""
except Exception as error:
    user = "".join(traceback.format_exception(error))
print(json.dumps([*ended, user]))
"""
REFUSES = 'raise RuntimeError("PyTorch and TorchAudio were compiled with different CUDA versions.\\nReinstall both")'


@pytest.mark.slow
@pytest.mark.parametrize("missing", [False, True])
def test_commands_without_torchaudio(missing, tmp_path):
    """Commands one after the other in one process, where torchaudio is missing, or raises when it is imported."""
    for name in ("torchaudio", "wav2vec2"):
        (tmp_path / name).mkdir()
    (tmp_path / "torchaudio" / "__init__.py").write_text("" if missing else REFUSES)
    config = '{"model_type": "wav2vec2", "architectures": ["Wav2Vec2Model"]}'
    (tmp_path / "wav2vec2" / "config.json").write_text(config)
    path = os.pathsep.join([str(tmp_path), str(Path(normscope.__file__).parents[1])])
    process = subprocess.run(
        [sys.executable, "-c", ONE_AFTER_THE_OTHER, json.dumps(COMMANDS), str(missing)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert process.returncode == 0, process.stderr
    *ended, user = json.loads(process.stdout)
    named, another, folder, default = (subprocess.CompletedProcess("", *each) for each in ended)
    speech = "demo_wav2vec2 cannot be loaded: "
    assert (named.returncode, named.stdout, named.stderr.count("\n")) == (3, "", 2)  # before demo_vit is run
    assert f"\nError: {speech}" in named.stderr
    assert named.stderr.endswith(
        "with the torch that it belongs to: pip install 'torch==2.11.*' 'torchaudio==2.11.*'.\n"
    )
    if missing:
        assert (another.returncode, user) == (0, ""), another.stderr
    else:
        assert (another.returncode, another.stderr.count("\n")) == (3, 2)
        assert "\nError: gpt2 cannot be loaded: " in another.stderr and "TorchAudio" in another.stderr
        # As without normscope: the error of torchaudio itself, and no module that normscope hid.
        assert "RuntimeError: PyTorch and TorchAudio were compiled" in user and "halted" not in user
    assert folder.returncode == 3
    assert "\nError: transformers:wav2vec2 " in folder.stderr and "torchaudio" in folder.stderr
    assert default.returncode == 0, default.stderr
    loadable = ["demo_vit", "demo_dit"] if missing else ["demo_vit"]  # diffusers imports torchaudio
    assert f"no model named: taking what is embedded, {', '.join(loadable)}\n" in default.stderr
    assert default.stderr.count(f"left out: {speech}") == 1
    assert all(f"{name}\n" in default.stdout for name in loadable) and "wav2vec2" not in default.stdout
