from functools import partial

import pytest
import timm
import torch
from loads import parameters, result_of

from normscope.errors import ModelError
from normscope.loading import load
from normscope.models.inputs.images import crops_of_photographs


def test_random_weights_are_those_of_timm_under_the_seed():
    torch.manual_seed(5)
    expected = timm.create_model("test_vit")
    loaded = load("timm:test_vit", weights="random", seed=5, device="cpu", limit=1)
    other = load("timm:test_vit", weights="random", seed=6, device="cpu", limit=1)
    assert torch.equal(parameters(loaded.module), parameters(expected))
    assert not torch.equal(parameters(other.module), parameters(expected))


@pytest.mark.parametrize("name", ["demo_vit", "timm:test_vit"])
def test_loading_leaves_the_random_state_unchanged(name):
    torch.manual_seed(99)
    before = torch.get_rng_state()
    list(load(name, weights="random", seed=3, device="cpu", limit=2).inputs)
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_that_are_on_no_hub():
    with pytest.raises(ModelError, match=r"timm has no pretrained weights for timm:test_vit4\."):
        load("timm:test_vit4", device="cpu")
    with pytest.raises(ModelError, match=r"not on a model hub but at https://github.com/.*--weights FILE"):
        load("timm:gcvit_xxtiny", device="cpu")


def test_a_name_that_timm_has_changed_is_that_of_the_same_network():
    renamed = load("timm:vit_tiny_patch16_224_in21k", weights="random", device="cpu", limit=1).module
    assert renamed.pretrained_cfg["tag"] == "augreg_in21k"


@pytest.mark.slow
def test_vit_b16_at_full_size():
    model = load("vit_b16", weights="random", device="cpu", limit=2)
    assert result_of(model.module, next(iter(model.inputs))).shape == (2, 1000)
    assert sum(parameter.numel() for parameter in model.module.parameters()) == 86_567_656


@pytest.mark.parametrize("name", ["timm:test_vit", "timm:test_resnet"])
def test_classifiers_return_logits(name):
    model = load(name, weights="random", device="cpu", limit=2)
    (batch,) = model.inputs
    result = result_of(model.module, batch)
    assert model.outputs.kind == "classes"
    assert torch.equal(model.outputs.read(result, batch), result)
    assert result.shape == (2, model.module.num_classes)


@pytest.mark.parametrize(("name", "kind"), [("224.dino", "tensor"), ("clip_224.openai", "tensor")])
def test_networks_without_classes(monkeypatch, name, kind):
    monkeypatch.setattr(timm, "create_model", partial(timm.create_model, depth=1))
    assert load(f"timm:vit_base_patch16_{name}", weights="random", device="cpu", limit=1).outputs.kind == kind


def test_only_projections_are_as_wide_as_a_multiple_of_64():
    counts = {name: timm.get_pretrained_cfg(name).num_classes for name in timm.list_pretrained()}
    projections = {name for name, number in counts.items() if number and number % 64 == 0}
    assert len(projections) > 50
    assert all("clip" in name or "pe_core" in name for name in projections)
    of_clip = {name for name in counts if "clip" in name and not any(part in name for part in ("_ft_", "siglip"))}
    assert {name for name in of_clip if counts[name] % 64} <= {"none"}


def test_a_preview_is_the_input_of_the_network(options):
    model = load("timm:test_vit", weights="random", device="cpu", limit=2)
    (batch,) = model.inputs
    config = {**timm.data.resolve_model_data_config(model.module), "mean": (0.0,) * 3, "std": (1.0,) * 3}
    crops, *_ = crops_of_photographs("RGB", options(limit=2))
    for place, crop in enumerate(crops):
        seen = timm.data.create_transform(**config)(crop)
        shown = model.inputs.preview(batch, place)
        assert (shown.size, shown.note) == (tuple(seen.shape[1:]), "")
        torch.testing.assert_close(shown.pixels.permute(2, 0, 1) / 255, seen, rtol=0, atol=0.51 / 255)  # 8 bits again
