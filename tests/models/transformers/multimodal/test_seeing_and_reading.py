"""Networks of transformers that take images with texts: apart, as CLIP and SigLIP, or as one prompt."""

import shutil

import pytest
import torch
import transformers
from loads import load_folder, result_of
from PIL import Image

import normscope
from normscope.errors import DataError, ModelError

PROMPTS = {"a": "A short one.", "b": "A longer line, of more words.", "c": "Another!"}


def whole_of(folder, module):
    return type(module).from_pretrained(folder).eval()


def every_norm_of(model):
    seen = normscope.capture(model)
    norms = [name for name, part in model.module.named_modules() if type(part).__name__.endswith("Norm")]
    assert {site.name for site in seen.sites} == set(norms) and not seen.skipped
    return seen


def image(folder, name):
    return Image.open(next(folder.glob(f"{name}.[pj]*g"))).convert("RGB")


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_images_and_texts_separately(saved, pairs, kind):
    folder = saved(kind)
    model = load_folder(folder, data=pairs)
    assert model.about["data"] == f"{pairs}: 3 images (each with the text in NAME.txt)"
    processor = transformers.AutoProcessor.from_pretrained(folder)
    padding = {"padding": "max_length", "max_length": 48} if kind == "siglip" else {"padding": True}
    given = processor(
        images=[image(pairs, name) for name in PROMPTS], text=list(PROMPTS.values()), return_tensors="pt", **padding
    )
    with torch.no_grad():
        expected = whole_of(folder, model.module)(**given)
    outputs = {
        sample.source[0]: row
        for batch in model.inputs
        for sample, row in zip(batch.samples, model.outputs.read(result_of(model.module, batch), batch), strict=True)
    }
    theirs = torch.cat([expected.image_embeds, expected.text_embeds], -1)
    ours = torch.stack([outputs[name] for name in PROMPTS])
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)  # float32
    assert (model.family, model.outputs.kind) == ("vision", "tensor")
    seen = every_norm_of(model)
    written = int(given.attention_mask.sum())
    assert written == sum(len(text) + 1 for text in PROMPTS.values())
    patches = 17 if kind == "clip" else 16
    for site in seen.sites:
        tokens = written if site.name.startswith("text_model") else 3 * patches
        if site.name.endswith("head.layernorm" if kind == "siglip" else "vision_model.post_layernorm"):
            tokens = 3  # of the class token, or what an image is pooled to, alone
        assert seen.stats[site.name].n_pairs == tokens * site.d, site.name


def test_padding_of_a_text_beside_an_image_is_in_no_sum(saved, pairs):
    """The same sums one pair at a time; SigLIP's texts are padded in either."""
    together, alone = (normscope.capture(load_folder(saved("siglip"), data=pairs, batch_size=n)) for n in (8, 1))
    batch = next(iter(load_folder(saved("siglip"), data=pairs).inputs))
    assert len(batch.samples) == 3 and batch.padded and list(batch.valid_within) == ["text_model"]
    for name, stats in together.stats.items():
        ours, theirs = (sums.moments.sum((0, 2)) for sums in (stats, alone.stats[name]))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)  # float32 in batches of other sizes


@pytest.mark.parametrize("kind", ["llava", "qwen2_vl"])
def test_an_image_among_the_tokens_of_a_prompt(saved, pairs, kind):
    folder = saved(kind)
    model = load_folder(folder, data=pairs)
    processor = transformers.AutoProcessor.from_pretrained(folder)
    begin = "<image>\n{}" if kind == "llava" else "user: <|vision_start|><|image_pad|><|vision_end|>{}assistant: "
    whole, tokens, patches = whole_of(folder, model.module), 0, 0
    for batch, (name, text) in zip(model.inputs, PROMPTS.items(), strict=True):
        given = processor(images=image(pairs, name), text=begin.format(text), return_tensors="pt")
        assert torch.equal(given["input_ids"], batch.kwargs["input_ids"])
        with torch.no_grad():
            expected = whole(**given).logits
        output = model.outputs.read(result_of(model.module, batch), batch)
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)  # the same pass, in float32
        tokens += given["input_ids"].numel()
        patches += 17 if kind == "llava" else int(given["image_grid_thw"].prod())
    assert (model.family, model.outputs.kind) == ("language", "tokens")
    seen = every_norm_of(model)
    for site in seen.sites:
        if ".language_model." in site.name:
            assert seen.stats[site.name].n_pairs == tokens * site.d, site.name
        elif ".blocks." in site.name or ".encoder." in site.name:
            assert seen.stats[site.name].n_pairs == patches * site.d, site.name


def test_texts_alone_for_a_network_of_both(saved, tmp_path):
    lines = tmp_path / "lines.txt"
    lines.write_text("One line.\nAnd a longer one.\n")
    model = load_folder(saved("llava"), data=lines)
    assert model.family == "language" and model.about["data"].startswith(f"{lines}: 2 texts")
    seen = normscope.capture(model)
    assert {norm.reason for norm in seen.skipped} == {"not called"}
    tokens = len("One line.") + len("And a longer one.") + 2
    assert seen.stats["model.language_model.norm"].n_pairs == tokens * 16


def test_long_texts_are_cut(saved, pairs):
    (pairs / "b.txt").write_text("word " * 300)
    for kind, limit in (("clip", 48), ("qwen2_vl", 512)):
        model = load_folder(saved(kind), data=pairs)
        lengths = [batch.kwargs["input_ids"].shape[1] for batch in model.inputs for _ in batch.samples]
        assert f"1 cut to {limit} tokens" in model.about["data"] and len(lengths) == 3
        assert limit <= max(lengths) < limit + 60


def test_an_image_without_a_text_is_unreadable(saved, pairs, images):
    (pairs / "c.txt").unlink()
    model = load_folder(saved("clip"), data=pairs)
    assert sum(len(batch.samples) for batch in model.inputs) == 2
    assert model.inputs.unreadable == ["c.jpg: there is no text in c.txt beside it"]
    (pairs / "texts").mkdir()
    (pairs / "texts" / "a.txt").write_text("A line.\n")
    with pytest.raises(DataError, match=r"contains no image, only 1 other file"):
        load_folder(saved("clip"), data=pairs / "texts")


@pytest.mark.parametrize(
    ("kind", "missing", "sentence"),
    [
        ("clip", "tokenizer.json", "contains no tokenizer.json, so that no text can be read for"),
        ("clip", "processor_config.json", "so that no image with a text can be made ready for"),
    ],
)
def test_missing_files(saved, tmp_path, kind, missing, sentence):
    folder = shutil.copytree(saved(kind), tmp_path / kind)
    (folder / missing).unlink()
    with pytest.raises(ModelError, match=sentence):
        load_folder(folder)


def test_a_template_of_a_folder_cannot_reach_out(saved, tmp_path):
    """transformers renders it in jinja's sandbox: what would run code is an error, and the folder's own fault."""
    folder = shutil.copytree(saved("qwen2_vl"), tmp_path / "evil")
    reach = "{{ messages.__class__.__base__.__subclasses__() }}<|image_pad|>"
    (folder / "chat_template.jinja").write_text(reach)
    with pytest.raises(ModelError, match=r"makes no inputs for it: .*unsafe"):
        load_folder(folder)


def test_a_preview_has_the_image_and_the_words(saved, pairs):
    model = load_folder(saved("clip"), data=pairs)
    batch = next(iter(model.inputs))
    size = batch.kwargs["pixel_values"].shape[2:]
    for place, (name, text) in enumerate(PROMPTS.items()):
        shown = model.inputs.preview(batch, place) if len(batch.samples) == 3 else None
        shown = shown or next(model.inputs.preview(one, 0) for one in model.inputs if one.samples[0].source[0] == name)
        assert shown.kind == "thumbnail and text" and "".join(shown.words).startswith(text)
        rescaled = transformers.AutoProcessor.from_pretrained(saved("clip")).image_processor(
            images=image(pairs, name), return_tensors="pt", do_normalize=False
        )["pixel_values"][0]
        assert (shown.size, shown.note) == (tuple(size), "")
        torch.testing.assert_close(shown.pixels.permute(2, 0, 1) / 255, rescaled, rtol=0, atol=0.51 / 255)
