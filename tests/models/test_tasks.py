"""What loaded networks are for: by the folders of their images, by their heads, by what sentence-transformers wrote."""

import json
import re
import string

import numpy as np
import pytest
import timm
import torch
import transformers
from diffusers import DDIMScheduler
from loads import load_folder
from PIL import Image
from sklearn.metrics import accuracy_score

import normscope
from normscope.models.inputs.images import class_task
from normscope.models.inputs.trajectories import LatentSpace, NoisedLatents
from normscope.swaps.pointwise import DyT


def images(root, *names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8)).save(path)
    return root


def vision(root, name="demo_vit", **options):
    return normscope.load(name, data=root, device="cpu", **options)


def drift(network, replacements, inputs=None):
    return normscope.drift(network, inputs, replacements, one_at_a_time=False, cumulative=False)


def labels(network):
    return [sample.label for sample in network.inputs.known_samples()]


def test_accuracy_on_labelled_images(tmp_path):
    digits = normscope.load("demo_vit", device="cpu")
    for batch in digits.inputs:
        for image, sample in zip(batch.args[0], batch.samples, strict=True):
            pixels = (image[0] / 0.75 * (255 / 16)).round().byte().numpy()
            path = tmp_path / str(sample.label) / f"{sample.index:02}.png"
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(np.repeat(np.repeat(pixels, 4, 0), 4, 1)).save(path)
    network = vision(tmp_path, shuffle=True, limit=48)
    assert network.task.measure == "top-1" and len(labels(network)) == 48
    modules = {"norm": DyT(64, alpha=0.2)}
    report = drift(network, modules)
    with torch.no_grad(), normscope.Swap(network.module, modules):
        answers = torch.cat([network.module(batch.args[0]).argmax(1) for batch in network.inputs]).tolist()
    scores = report.quality.scores
    assert scores["original"].value == 1.0 and scores["swapped"].value == accuracy_score(labels(network), answers)


WORDNET = [f"n0{2000000 + n * 37}/a.png" for n in reversed(range(10))]


@pytest.mark.parametrize(
    ("name", "paths", "classes"),
    [
        ("demo_vit", ["7/a.png", "007/b.png", "0/further/c.png"], [0, 7, 7]),  # in the order of their paths
        ("timm:vit_tiny_patch16_224", ["n01443537/a.png", "n15075141/b.png", "n01440764/c.png"], [0, 1, 999]),
        ("demo_vit", WORDNET, list(range(10))),  # as many as there are classes
        ("demo_vit", WORDNET[1:], [None] * 9),
    ],
)
def test_numbers_count_classes_from_0_and_wordnet_ids_are_sorted(tmp_path, name, paths, classes):
    network = vision(images(tmp_path, *paths), name, weights="random")
    assert labels(network) == classes and (network.task.measure == "top-1") == (None not in classes)
    info = timm.data.ImageNetInfo("imagenet-1k")
    assert [info.index_to_label_name(n) for n in (0, 1, 999)] == ["n01440764", "n01443537", "n15075141"]


def test_names_of_user_classes(tmp_path):
    images(tmp_path, "cat/a.png", "ant/b.png")
    network = vision(tmp_path)
    assert class_task(network.inputs, 3, ["dog", "cat", "ant"]).measure == "top-1" and labels(network) == [2, 1]
    assert class_task(network.inputs, 3, ["dog", "cat", "bee"]).measure is None


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["a.png"], "not every image at '.*' lies in a sub-folder that would name its class"),
        (["1/a.png", "b.png"], "not every image at"),
        (["1/a.png", "10/b.png"], "unknown which of the 10 classes the sub-folders 1, 10 of"),
        (["cats/a.png", "dogs/b.png"], "the sub-folders cats, dogs of .* mean"),
        (["²/a.png"], "the sub-folders ² of"),
        (["n01440764/a.png"], "the sub-folders n01440764 of"),
    ],
)
def test_ambiguous_folders_give_no_labels(tmp_path, names, why):
    network = vision(images(tmp_path, *names))
    assert set(labels(network)) == {None}
    assert network.task.measure is None and re.search(why, network.task.unmeasured)


def test_tasks_of_default_inputs():
    assert "photograph" in normscope.load("timm:test_vit", weights="random", device="cpu", limit=1).task.unmeasured
    assert "true noise" in normscope.load("demo_dit", device="cpu", limit=1).task.unmeasured
    assert normscope.load("demo_wav2vec2", device="cpu", limit=1).task.measure == "words"


TINY = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
T5 = {"vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "num_layers": 2}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *string.ascii_lowercase, *(f"##{c}" for c in "abcdefghijk")]


@pytest.fixture
def folder(tmp_path):
    def make(name, masks=True, **changes):
        (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
        kind = getattr(transformers, name)
        torch.manual_seed(0)
        kind(kind.config_class(**(T5 if "T5" in name else TINY | changes))).save_pretrained(tmp_path / name)
        tokenizer = transformers.BertTokenizerFast(str(tmp_path / "vocab.txt"))
        if not masks:
            tokenizer.mask_token = None
        tokenizer.save_pretrained(tmp_path / name)
        return tmp_path / name

    return make


def test_tasks_follow_from_heads(folder):
    masked = load_folder(folder("BertForMaskedLM")).task
    assert (masked.measure, masked.mask_id, masked.unmasked) == ("pseudo-perplexity", 4, {0, 2, 3, 4})
    assert load_folder(folder("LlamaForCausalLM")).task.measure == "perplexity"
    assert "same text on both sides" in load_folder(folder("T5ForConditionalGeneration")).task.unmeasured
    assert "name a .tsv or .csv file" in load_folder(folder("BertModel")).task.unmeasured
    assert "no mask token" in load_folder(folder("DistilBertForMaskedLM", masks=False)).task.unmeasured


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("a b c\tc b a\t4.0\nabc\tbca b\t1.5\n\nb\ta c\t3\nhij k\tk\t0.5\n")
    return path


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        (None, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "first"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ],
)
def test_pairs_of_sentences_are_pooled_as_sentence_transformers_does(folder, pairs, pooling, expected):
    where = folder("BertModel")
    if pooling is not None:
        (where / "1_Pooling").mkdir()
        (where / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    network = load_folder(where, data=pairs)
    assert (network.task.measure, network.task.pooling) == ("spearman", expected)
    report = drift(network, {"embeddings.LayerNorm": DyT(16)})
    assert report.quality.n == 4 and report.all.inputs == 8


def test_poolings_that_are_not_made_here_are_named(folder, pairs):
    where = folder("BertModel")
    (where / "1_Pooling").mkdir()
    two = {"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True}
    (where / "1_Pooling" / "config.json").write_text(json.dumps(two))
    task = load_folder(where, data=pairs).task
    assert task.measure is None and "pooling_mode_max_tokens and pooling_mode_cls_token" in task.unmeasured
    (where / "2_Dense").mkdir()
    (where / "2_Dense" / "config.json").write_text("{}")
    assert "Dense layer" in load_folder(where, data=pairs).task.unmeasured


def test_denoising_error_of_user_latents(tmp_path):
    clean = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    np.save(tmp_path / "latents.npy", clean.numpy())
    network = normscope.load("demo_dit", data=tmp_path / "latents.npy", timesteps="900,100", device="cpu")
    modules = {"transformer_blocks.0.norm3": DyT(64, alpha=0.1)}
    report = drift(network, modules)
    errors = []
    for batch in network.inputs:
        with torch.no_grad():
            predicted = network.module(**batch.kwargs)[0].double()
        errors += ((predicted - clean) ** 2).flatten(1).mean(1).tolist()  # demo_dit predicts x₀
    quality = report.quality
    assert quality.scores["original"].value == pytest.approx(np.mean(errors), rel=1e-9)
    assert len(errors) == quality.n == 10
    assert (quality.name, quality.higher_is_better) == ("denoising error", False)
    others = [dict(batch.kwargs) for batch in network.inputs]
    report = drift(network, modules, others)
    assert report.quality is None and "not known what noise" in report.no_quality


@pytest.mark.parametrize("predicts", ["epsilon", "v_prediction"])
def test_the_added_noise_follows_from_the_latents(tmp_path, options, predicts):
    clean = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    np.save(tmp_path / "latents.npy", clean.numpy())
    scheduler = DDIMScheduler(prediction_type=predicts)
    latents = NoisedLatents(tmp_path / "latents.npy", LatentSpace(1, 8, 10), scheduler, options(timesteps="980,500"))
    for batch, timestep in zip(latents, (980, 500), strict=True):
        share = scheduler.alphas_cumprod[timestep].double()
        noise = (batch.kwargs["hidden_states"].double() - share.sqrt() * clean) / (1 - share).sqrt()
        expected = noise if predicts == "epsilon" else share.sqrt() * noise - (1 - share).sqrt() * clean
        # The noised latents are float32.
        torch.testing.assert_close(latents.truth(batch.samples).double(), expected, rtol=0, atol=1e-5)
