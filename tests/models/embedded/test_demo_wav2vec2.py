import re
from importlib.resources import files

import pytest
import soundfile
import torch
from loads import result_of, samples_of
from safetensors.torch import save_file

from normscope.loading import load
from normscope.models.weights.checkpoints import read_embedded


@pytest.fixture(scope="module")
def demo():
    return load("demo_wav2vec2", device="cpu")


@pytest.fixture(scope="module")
def facts():
    return read_embedded("demo_wav2vec2.safetensors")[1]


@pytest.fixture(scope="module")
def words():
    return read_embedded("demo_wav2vec2_words.safetensors")


def read_by(model, labels):
    """Return the greedy CTC reading of each utterance: the best label of each frame, without repeats and blanks."""
    readings = []
    for batch in model.inputs:
        logits, _ = result_of(model.module, batch)
        assert len(logits) == 1
        best = logits[0].argmax(dim=-1).unique_consecutive()
        readings.append("".join(labels[label] for label in best if label != 0))
    return readings


def test_word_accuracy_matches_the_card(demo, facts, words):
    card = (files("normscope.models") / "embedded" / "demo_wav2vec2.md").read_text()
    right, of, percent = map(int, re.search(r"(\d+)/(\d+)\s\((\d+) %\)\sof\sthe\sshipped\sclips", card).groups())
    transcripts = words[1]["words"]
    assert of == len(transcripts)
    assert sum(map(str.__eq__, read_by(demo, facts["labels"]), transcripts)) == right
    assert percent == round(100 * right / of)
    assert f"({100 * facts['held_out_accuracy']:.1f} %)" in card


def test_default_inputs_and_a_limit(demo, words):
    assert demo.provenance.kind == "embedded"
    assert demo.about["weights"].startswith("embedded demo_wav2vec2 (trained on synthetic words, sha256 ")
    assert demo.about["data"] == f"{demo.inputs.n_samples} held-out words of 12 synthetic voices"
    seen = samples_of(demo.inputs)
    assert [sample.source_index for sample in seen] == words[0]["speakers"].tolist()
    assert len({(sample.source, sample.source_index) for sample in seen}) == 12
    assert [sample.index for sample in seen] == list(range(len(words[1]["words"])))
    few = load("demo_wav2vec2", limit=5, device="cpu")
    assert few.about["data"] == f"the first 5 of {demo.about['data']}"
    for batch, expected in zip(few.inputs, list(demo.inputs)[:5], strict=True):
        assert torch.equal(batch.args[0], expected.args[0])


def test_recordings_of_words_are_read_as_the_embedded_ones(tmp_path, demo, facts, words):
    tensors, about_words, _ = words
    for number, waveform in enumerate(tensors["waveforms"].split(tensors["lengths"].tolist())[:5]):
        soundfile.write(tmp_path / f"{number:02}.wav", waveform.numpy(), about_words["sample_rate"])
    recorded, embedded = (
        read_by(load("demo_wav2vec2", device="cpu", **given), facts["labels"])
        for given in ({"data": tmp_path}, {"limit": 5})
    )
    assert recorded == embedded


def test_weights_from_a_file(tmp_path, demo, facts):
    untrained = load("demo_wav2vec2", weights="random", device="cpu", limit=3)
    assert untrained.provenance.kind == "random"
    save_file(demo.module.model.state_dict(), tmp_path / "same.safetensors")
    same = load("demo_wav2vec2", weights=tmp_path / "same.safetensors", device="cpu", limit=3)
    fresh, trained = (read_by(model, facts["labels"]) for model in (untrained, same))
    assert trained == read_by(load("demo_wav2vec2", device="cpu", limit=3), facts["labels"]) != fresh
