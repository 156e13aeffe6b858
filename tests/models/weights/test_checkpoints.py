import hashlib
import os
import pickle

import pytest
import timm
import torch
from safetensors.torch import save_file

from normscope.errors import ModelError
from normscope.loading import load


def load_tiny(path):
    return load("timm:test_vit", weights=str(path), device="cpu", limit=1)


def assert_same_weights(module, other):
    for (name, ours), (other_name, theirs) in zip(module.state_dict().items(), other.state_dict().items(), strict=True):
        assert name == other_name
        assert torch.equal(ours, theirs)


def test_safetensors_file(tiny_vit, tiny_vit_file):
    model = load_tiny(tiny_vit_file)
    assert_same_weights(model.module, tiny_vit)
    digest = hashlib.sha256(tiny_vit_file.read_bytes()).hexdigest()[:12]
    assert model.provenance.kind == "file"
    assert model.provenance.description == f"file model.safetensors (sha256 {digest})"


@pytest.mark.parametrize("nest", [None, "state_dict", "model", "state_dict_ema"])
def test_torch_file(tiny_vit, tmp_path, nest):
    weights = tiny_vit.state_dict()
    torch.save(weights if nest is None else {nest: weights, "epoch": 3}, tmp_path / "checkpoint.pth")
    assert_same_weights(load_tiny(tmp_path / "checkpoint.pth").module, tiny_vit)


def test_checkpoint_of_a_distributed_run(tiny_vit, tmp_path):
    torch.save({f"module.{key}": value for key, value in tiny_vit.state_dict().items()}, tmp_path / "ddp.pt")
    assert_same_weights(load_tiny(tmp_path / "ddp.pt").module, tiny_vit)


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
    model = load("timm:test_convnext", weights=str(tmp_path / "facebook.pth"), device="cpu", limit=1)
    assert_same_weights(model.module, source)


def without_one_key(weights):
    del weights["norm.weight"]


def with_a_key_too_many(weights):
    weights["head.scale"] = torch.ones(3)


def with_another_shape(weights):
    weights["head.bias"] = torch.zeros(10)


def with_integers(weights):
    weights["norm.weight"] = weights["norm.weight"].to(torch.int8)


def with_booleans(weights):
    weights["norm.bias"] = weights["norm.bias"] > 0


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (without_one_key, "does not fit timm:test_vit: norm.weight is missing."),
        (with_a_key_too_many, "does not fit timm:test_vit: head.scale is not in the model."),
        (with_another_shape, "does not fit timm:test_vit: head.bias is (10,) and should be (1000,)."),
        (with_integers, "does not fit timm:test_vit: norm.weight is int8 and should be float32."),
        (with_booleans, "does not fit timm:test_vit: norm.bias is bool and should be float32."),
    ],
)
def test_weights_that_do_not_fit(tiny_vit, tmp_path, spoil, sentence):
    weights = dict(tiny_vit.state_dict())
    spoil(weights)
    save_file(weights, tmp_path / "spoiled.safetensors")
    with pytest.raises(ModelError) as caught:
        load_tiny(tmp_path / "spoiled.safetensors")
    assert sentence in str(caught.value)


def test_weights_of_another_architecture(tmp_path):
    save_file(timm.create_model("test_resnet").state_dict(), tmp_path / "resnet.safetensors")
    with pytest.raises(ModelError, match=r"does not fit timm:test_vit: .*, and \d+ more\."):
        load_tiny(tmp_path / "resnet.safetensors")


def test_half_precision_and_counts_of_batches_fit(tmp_path):
    source = timm.create_model("test_resnet")
    half = {key: value.half() if value.is_floating_point() else value for key, value in source.state_dict().items()}
    assert any(not value.is_floating_point() for value in half.values())
    save_file(half, tmp_path / "half.safetensors")
    loaded = load("timm:test_resnet", weights=str(tmp_path / "half.safetensors"), device="cpu", limit=1)
    assert_same_weights(loaded.module, source.half().float())


class RunsWhenUnpickled:
    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.system, (f"touch '{self.trace}'",)


@pytest.mark.parametrize("suffix", ["pth", "bin", "safetensors"])
def test_malicious_pickle_is_not_executed(tmp_path, suffix):
    trace, path = tmp_path / "executed", tmp_path / f"evil.{suffix}"
    for save in (torch.save, lambda value, path: path.write_bytes(pickle.dumps(value, protocol=2))):
        save({"state_dict": RunsWhenUnpickled(trace)}, path)
        with pytest.raises(ModelError) as caught:
            load_tiny(path)
        assert "evil" in str(caught.value)
        assert not trace.exists()
    pickle.loads(path.read_bytes())  # noqa: S301 (the check can fail: unpickling does leave the trace)
    assert trace.exists()


def test_truncated_files(tiny_vit, tiny_vit_file, tmp_path):
    torch.save(tiny_vit.state_dict(), tmp_path / "whole.pth")
    for path in (tiny_vit_file, tmp_path / "whole.pth"):
        half = tmp_path / f"half{path.suffix}"
        half.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(ModelError, match=r"cannot be read: it is no .*, or a damaged one"):
            load_tiny(half)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is empty."),
        (b"hello world, this is no checkpoint", "cannot be read: it is no torch checkpoint, or a damaged one"),
    ],
)
def test_files_that_are_no_checkpoint(tmp_path, content, sentence):
    (tmp_path / "file.pth").write_bytes(content)
    with pytest.raises(ModelError, match=sentence):
        load_tiny(tmp_path / "file.pth")


@pytest.mark.parametrize("value", [[1, 2], {"epoch": 3}, {}, torch.zeros(3)])
def test_checkpoints_without_a_state_dict(tmp_path, value):
    torch.save(value, tmp_path / "other.pth")
    with pytest.raises(ModelError, match=r"The weights file .*other.pth' "):
        load_tiny(tmp_path / "other.pth")


def test_folder_and_missing_file(tmp_path):
    with pytest.raises(ModelError, match=r"are a folder. Name the checkpoint file in it"):
        load_tiny(tmp_path)
    with pytest.raises(ModelError, match=r"There is no weights file 'pretraned'. --weights takes pretrained, random"):
        load_tiny("pretraned")
