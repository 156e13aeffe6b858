"""What the embedded models learn from, apart from the inputs that they are judged on."""

import io

import numpy as np
import pytest
import soundfile
import torch
from loads import result_of, samples_of
from sklearn.datasets import load_digits

from normscope.loading import load
from normscope.models.registry import embedded_models
from normscope.models.weights.checkpoints import read_embedded


@pytest.fixture(scope="module")
def demos(made_on_demand):
    return made_on_demand(lambda name: load(name, device="cpu", limit=2 if name == "demo_dit" else None))


def contents(inputs):
    """Return each sample's values as bytes."""
    return [
        tensor.numpy().tobytes()
        for batch in inputs
        for tensor in (batch.kwargs["hidden_states"] if batch.kwargs else batch.args[0])
    ]


def keys(inputs):
    return {(sample.data, sample.source) for sample in samples_of(inputs)}


@pytest.mark.parametrize("name", embedded_models())
def test_training_and_held_out_inputs_are_disjoint(demos, name):
    demo = demos[name]
    assert not keys(demo.inputs) & keys(demo.calibration)
    learned, held_out = contents(demo.calibration), contents(demo.inputs)
    assert len(learned) == len(set(learned)) == demo.calibration.n_samples > len(held_out)
    assert not set(learned) & set(held_out)


def test_calibration_digits_are_training_digits(demos):
    pixels = {(image * 0.75).astype("float32").tobytes() for image in load_digits().images}
    digits = contents(demos["demo_vit"].calibration)
    assert set(digits) <= pixels
    assert len(digits) == 1437
    held_out = set(contents(demos["demo_vit"].inputs))
    assert len(pixels - set(digits)) == 360
    assert held_out <= pixels - set(digits)


def test_training_and_held_out_voices_are_disjoint(demos):
    demo = demos["demo_wav2vec2"]
    learned, held_out = ({sample.source for sample in samples_of(inputs)} for inputs in (demo.calibration, demo.inputs))
    assert (len(learned), len(held_out)) == (85, 12) and not learned & held_out


def test_words_are_as_loud_as_they_were_spoken(demos):
    """Eight bits a sample are within half a step of the peak, 1/254 of it."""
    clips, facts, _ = read_embedded("demo_wav2vec2_calibration.safetensors")
    _, rate = soundfile.read(io.BytesIO(clips["flac"].numpy().tobytes()))
    assert rate == facts["sample_rate"] == 16_000
    batches = list(demos["demo_wav2vec2"].calibration)
    assert len(facts["words"]) == len(batches)
    for batch, length in zip(batches, clips["lengths"].tolist(), strict=True):
        (word,) = batch.args
        assert word.shape == (1, length)
        peak = word.abs().max() * 2**15
        assert peak <= 2**15
        assert peak.item() == pytest.approx(round(peak.item()), abs=0.01)  # of 16 bits, in float32
        steps = word * (127 * 2**15 / peak)
        torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-3)
    loudest, held_out = (
        torch.stack([batch.args[0].abs().max() for batch in inputs]).quantile(torch.tensor([0.25, 0.5, 0.75]))
        for inputs in (demos["demo_wav2vec2"].calibration, demos["demo_wav2vec2"].inputs)
    )
    torch.testing.assert_close(loudest, held_out, rtol=0.3, atol=0)  # other voices, by the same program


def test_most_words_are_read_correctly(demos):
    demo = demos["demo_wav2vec2"]
    labels = read_embedded("demo_wav2vec2.safetensors")[1]["labels"]
    words = read_embedded("demo_wav2vec2_calibration.safetensors")[1]["words"]
    some = list(zip(words, demo.calibration, strict=True))[::25]
    right = 0
    for word, batch in some:
        letters = result_of(demo.module, batch)[0][0].argmax(dim=-1).unique_consecutive()
        right += "".join(labels[letter] for letter in letters if letter) == word
    assert right >= 0.9 * len(some)  # 839 of all 850


def test_trajectories_start_from_the_next_seed_at_more_timesteps(demos):
    following = load("demo_dit", device="cpu", limit=2, seed=1, timesteps=10)
    calibration = demos["demo_dit"].calibration
    assert contents(calibration) == contents(following.inputs)
    assert calibration.description == following.inputs.description
    assert load("demo_dit", device="cpu", timesteps="980,0", limit=1).calibration.timesteps == [980, 0]


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("demo_vit", "1,437 digits of demo_vit's training"),
        ("demo_wav2vec2", "850 words of 85 synthetic voices of demo_wav2vec2's training"),
    ],
)
def test_descriptions_and_limits(demos, name, whole):
    assert demos[name].calibration.description == whole
    limited = load(name, device="cpu", limit=3, batch_size=2, dtype="bfloat16").calibration
    assert limited.description == f"the first 3 of {whole}"
    batches = list(limited)
    assert [sample.index for sample in samples_of(batches)] == [0, 1, 2] and limited.n_samples == 3
    assert max(len(batch.samples) for batch in batches) == (1 if name == "demo_wav2vec2" else 2)
    assert {batch.args[0].dtype for batch in batches} == {torch.bfloat16}


def test_trajectories_are_described_and_limited(demos):
    described = "2 DDIM trajectories of 50 steps (seed 1, no guidance), 10 timesteps from 980 to 0"
    assert demos["demo_dit"].calibration.description == described
    assert demos["demo_dit"].calibration.n_samples == 20


@pytest.mark.parametrize("name", embedded_models())
def test_user_data_have_no_calibration(name, pictures, tmp_path):
    torch.manual_seed(0)
    path = tmp_path / "latents.npy"
    np.save(path, torch.randn(2, 1, 8, 8).numpy())
    soundfile.write(tmp_path / "noise.wav", torch.randn(16_000).numpy() * 0.1, 16_000)
    data = {"demo_vit": pictures, "demo_wav2vec2": tmp_path / "noise.wav", "demo_dit": path}[name]
    assert load(name, device="cpu", data=data).calibration is None
