"""Networks of transformers that see: inputs by their own processors, and every norm of theirs."""

import json
import re
import shutil

import pytest
import torch
import transformers
from loads import load_folder, result_of
from PIL import Image
from transformers import AutoImageProcessor

import normscope
from normscope.errors import ModelError

BARE = {"mae": "ViTMAEModel", "sam": "SamVisionModel", "clip_vision": "CLIPVisionModel"}
CLASSES = {"vit": 7, "swin": 6}
# What of an image a norm at the network's front sees: patches of 8 pixels, and a class token; Swin's are of 4.
FIRST = {"swin": 64, "sam": 16}


def output_of(model):
    (batch,) = model.inputs
    return model.outputs.read(result_of(model.module, batch), batch)


def theirs_of(folder, module, images):
    """Run transformers' own network on what its own processor makes of all images at once."""
    processor = AutoImageProcessor.from_pretrained(folder)
    pixels = processor(images=[Image.open(path).convert("RGB") for path in images], return_tensors="pt").pixel_values
    whole = type(module).from_pretrained(folder, config=module.config).eval()
    with torch.no_grad():
        return whole(pixels)[0]


@pytest.mark.parametrize("kind", ["vit", "swin", "sam", "clip_vision"])
def test_outputs_are_those_of_transformers_and_every_norm_is_captured(saved, images, kind):
    model = load_folder(saved(kind), data=images)
    expected = theirs_of(saved(kind), model.module, sorted(images.iterdir()))
    torch.testing.assert_close(output_of(model), expected, rtol=1e-5, atol=1e-5)  # batches of other sizes: float32 sums
    assert (model.outputs.kind, model.family) == ("classes" if kind in CLASSES else "tensor", "vision")
    if kind in CLASSES:
        assert expected.shape == (3, CLASSES[kind])
    padded = " (padded to squares, and what pads them counts)" if kind == "sam" else ""
    assert model.about["data"] == f"{images}: 3 images{padded}"
    named = json.loads((saved(kind) / "config.json").read_text())["architectures"]
    assert type(model.module).__name__ == BARE.get(kind, named[0])
    seen = normscope.capture(model)
    norms = [name for name, part in model.module.named_modules() if "Norm" in type(part).__name__]
    assert len(seen.sites) == len(norms) and not seen.skipped
    assert seen.stats[seen.sites[0].name].n_pairs == 3 * FIRST.get(kind, 17) * seen.sites[0].d


def test_patches_that_pad_an_image_are_in_no_sum(saved, images):
    """SigLIP 2's processor keeps an image's shape, and pads its patches to one number: they are taken off again."""
    folder = saved("siglip2_vision")
    model = load_folder(folder, data=images)
    processor = AutoImageProcessor.from_pretrained(folder)
    given = processor(
        images=[Image.open(path).convert("RGB") for path in sorted(images.iterdir())], return_tensors="pt"
    )
    patches = given.pixel_attention_mask.sum(1).tolist()
    assert len(set(patches)) > 1 and min(patches) < 20
    taken, whole = [], type(model.module).from_pretrained(folder).eval()
    end = "encoder.layers.1.layer_norm1"  # behind vision_model. in an old transformers
    [norm] = (name for name, _ in whole.named_modules() if name.endswith(end))
    whole.get_submodule(norm).register_forward_pre_hook(lambda module, args: taken.append(args[0]))
    with torch.no_grad():
        expected = whole(**given)[0]
    for batch in model.inputs:
        output = result_of(model.module, batch)[0]
        for row, sample in zip(output, batch.samples, strict=True):
            theirs = expected[sample.index, : patches[sample.index]]
            torch.testing.assert_close(row, theirs, rtol=1e-4, atol=1e-5)  # float32, masked there
    seen = normscope.capture(model, verify=True).stats
    assert seen[norm.replace(end, "head.layernorm")].n_pairs == 3 * 16 and seen[norm].n_pairs == sum(patches) * 16
    x = taken[0][given.pixel_attention_mask.bool()].double()
    sums = seen[norm].moments.sum((0, 2))[[1, 3]]
    torch.testing.assert_close(sums, torch.stack([x.sum(), (x * x).sum()]), rtol=1e-4, atol=1e-3)


def test_a_masked_autoencoder_sees_every_patch_in_order(saved, images, caplog):
    model = load_folder(saved("mae"), data=images)
    assert "its mask is left out (mask_ratio 0.75), and every patch is seen." in caplog.text
    (batch,) = model.inputs
    embedded, mask, _ = model.module.embeddings(**batch.kwargs)
    assert embedded.shape == (3, 17, 16) and not mask.any()
    patches = model.module.embeddings.patch_embeddings(batch.kwargs["pixel_values"])
    torch.testing.assert_close(embedded[:, 1:], patches + model.module.embeddings.position_embeddings[:, 1:])
    assert torch.equal(output_of(model), output_of(model))
    half = load_folder(saved("mae"), data=images, dtype="bfloat16")
    assert not half.module.embeddings(**next(iter(half.inputs)).kwargs)[1].any()


def test_images_of_different_sizes_come_in_batches_of_their_own(saved, images, tmp_path):
    """A processor that keeps an image's shape: nothing is padded, and every sample is there."""
    folder = tmp_path / "of_any_size"
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    transformers.Dinov2Model(transformers.Dinov2Config(**shape)).save_pretrained(folder)
    transformers.BitImageProcessor(size={"shortest_edge": 32}, do_center_crop=False).save_pretrained(folder)
    model = load_folder(folder, data=images)
    assert [len(batch.samples) for batch in model.inputs] == [1, 1, 1]
    seen = normscope.capture(model, verify=True)
    tokens = sum(1 + 4 * (size // 8) for size in (42, 32, 53))  # of the longer side: 64·32/48, 32, 60·32/36
    assert seen.n_samples == 3 and seen.stats["layernorm"].n_pairs == tokens * 16


@pytest.mark.parametrize(("kind", "site"), [("vit", "layernorm_before"), ("sam", "neck")])
def test_positions_of_drawn_tokens_are_those_of_patches(saved, kind, site):
    model, taken = load_folder(saved(kind), limit=3), {}
    name = next(name for name, part in model.module.named_modules() if site in name and "Norm" in type(part).__name__)
    norm = model.module.get_submodule(name)
    seen = normscope.capture(model, layers=name)
    hook = norm.register_forward_pre_hook(lambda module, args: taken.setdefault(name, args[0].clone()))
    output_of(model)
    hook.remove()
    x = taken[name]
    tokens = x.movedim(1, -1).flatten(1, -2) if site == "neck" else x.flatten(1, -2)  # row by row of patches
    drawn = seen.stats[name].tokens
    for sample, position, values in zip(drawn.sample.tolist(), drawn.position.tolist(), drawn.x, strict=True):
        torch.testing.assert_close(values, tokens[sample, position], rtol=1e-6, atol=1e-6)
    assert set(drawn.position.tolist()) <= set(range(tokens.shape[1])) and len(set(drawn.position.tolist())) > 8


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "contains no preprocessor_config.json and no processor_config.json, so that no image can be made ready"),
        ("{", "The file preprocessor_config.json of "),
        ('{"image_processor_type": "OfTomorrow"}', "cannot be loaded"),
        ('{"auto_map": {"AutoImageProcessor": "evil.Processor"}}', "asks for code that comes with its weights"),
    ],
)
def test_processor_that_is_missing_or_wrong(saved, tmp_path, content, sentence):
    folder = shutil.copytree(saved("vit"), tmp_path / "spoiled")
    (folder / "preprocessor_config.json").unlink()
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w').close()\n")
    if content is not None:
        (folder / "preprocessor_config.json").write_text(content)
    with pytest.raises(ModelError, match=re.escape(sentence)):
        load_folder(folder)
    assert not (tmp_path / "executed").exists()


def test_the_family_is_in_the_capture_and_drift_compares_classes(saved, tmp_path):
    model = load_folder(saved("vit"), limit=2)
    assert model.about["data"] == "2 crops of grace_hopper.jpg, china.jpg (seed 0)"
    seen = normscope.capture(model, layers=1)
    path = normscope.save_capture(seen, tmp_path / "seen.safetensors")
    assert normscope.load_capture(path).about["family"] == "vision" == seen.about["family"]
    modules = normscope.replacements(model, "dyt", seen, layers=1)
    report = normscope.drift(model, replacements=modules, one_at_a_time=False, cumulative=False)
    assert report.all.top1 is not None and report.all.inputs == 2
