import runpy
from importlib.resources import files
from pathlib import Path

import pytest
import timm.models
import torch
from loads import result_of, samples_of
from PIL import Image
from safetensors.torch import save_file

import normscope
from normscope.loading import load
from normscope.models.embedded.demo_vit import network_of
from normscope.models.weights.checkpoints import read_embedded

CARD = (files("normscope.models") / "embedded" / "demo_vit.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def demo():
    return load("demo_vit", device="cpu")


@pytest.fixture(scope="module")
def digits():
    return read_embedded("demo_vit_digits.safetensors")[0]


def predictions(model):
    return torch.cat([result_of(model.module, batch).argmax(dim=1) for batch in model.inputs])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_timms_network_to_the_bit(dtype):
    config = read_embedded("demo_vit.safetensors")[1]["config"]
    torch.manual_seed(0)
    timms = timm.models.VisionTransformer(**config).to(dtype).eval()
    ours = network_of(config).to(dtype).eval()
    assert list(ours.state_dict()) == list(timms.state_dict())
    ours.load_state_dict(timms.state_dict())
    images = torch.randn(5, 1, 8, 8, dtype=dtype)
    assert torch.equal(ours(images), timms(images))


def test_accuracy_on_shipped_digits_matches_the_card(demo, digits):
    assert "All 64 shipped digits are read correctly." in CARD
    assert torch.equal(predictions(demo), digits["labels"])


def test_accuracy_on_held_out_digits_matches_the_card(demo):
    train = runpy.run_path(str(Path(normscope.__file__).parents[1] / "scripts" / "train_demo_vit.py"))
    images, labels = train["load_pixels_and_labels"]()
    *_, held_out = train["split"](len(images), seed=0)
    with torch.no_grad():
        read = demo.module(train["to_input"](images[held_out])).argmax(dim=1)
    right = int((read == labels[held_out]).sum())
    assert f"**Held-out accuracy: {right}/{len(held_out)} (" in CARD


def test_default_inputs_and_a_limit(demo):
    assert demo.provenance.kind == "embedded"
    assert demo.about["weights"].startswith("embedded demo_vit (trained on scikit-learn's digits, sha256 ")
    assert demo.about["data"] == "64 held-out digits"
    seen = samples_of(demo.inputs)
    assert [sample.source_index for sample in seen] == [sample.index for sample in seen] == list(range(64))
    few = load("demo_vit", limit=5, device="cpu")
    assert len(samples_of(few.inputs)) == 5
    assert few.about["data"] == "the first 5 of 64 held-out digits"


def test_pictures_of_digits_are_read_as_digits(tmp_path, digits, demo):
    for number, pixels in enumerate(digits["images"][:20]):
        grey = Image.fromarray((pixels.float() * 255 / 16).round().to(torch.uint8).numpy())
        grey.resize((64, 64), Image.Resampling.NEAREST).convert("RGB").save(tmp_path / f"{number:02}.png")
    from_pictures = load("demo_vit", data=tmp_path, device="cpu")
    seen = torch.cat([batch.args[0] for batch in from_pictures.inputs])
    expected = torch.cat([batch.args[0] for batch in demo.inputs])[:20]
    torch.testing.assert_close(seen, expected, atol=16 / 255, rtol=0)  # the rounding to 8 bits
    assert torch.equal(predictions(from_pictures), predictions(demo)[:20])


def test_other_weights(tmp_path, demo):
    untrained = load("demo_vit", weights="random", device="cpu")
    assert untrained.provenance.kind == "random"
    assert not torch.equal(predictions(untrained), predictions(demo))
    save_file(demo.module.state_dict(), tmp_path / "same.safetensors")
    same = load("demo_vit", weights=str(tmp_path / "same.safetensors"), device="cpu")
    assert torch.equal(predictions(same), predictions(demo))
