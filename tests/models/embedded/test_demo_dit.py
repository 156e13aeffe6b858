"""The embedded DiT draws the digits that it is asked for, as demo_vit reads them."""

import numpy as np
import pytest
import torch

from normscope.loading import load
from normscope.models.inputs.trajectories import LatentSpace, Trajectories
from normscope.models.weights.checkpoints import read_embedded

SAMPLES_A_CLASS = 20  # as on its card
READ_OTHERWISE = 0.0101  # two of the 200 digits may lie so near the edge that rounding decides


@pytest.fixture(scope="module")
def demo():
    return load("demo_dit", device="cpu")


@pytest.fixture(scope="module")
def facts():
    return read_embedded("demo_dit.safetensors")[1]


@pytest.fixture
def recognised(facts, options):
    """Walk our own trajectories to their end, as on the card, and return the share of digits that demo_vit reads."""
    reader = load("demo_vit", device="cpu").module
    _, pixels_to_input, _ = read_embedded("demo_vit_digits.safetensors")

    def share(model, asked):
        at_once = options(batch_size=len(asked), seed=facts["seed"])
        space = LatentSpace(channels=1, size=8, classes=10)
        ours = Trajectories(space, model.inputs.scheduler, at_once, guidance=1.0, trajectories=len(asked))
        ours.module, ours.labels = model.module, asked
        ours.noise = torch.randn(len(asked), 1, 8, 8, generator=torch.Generator().manual_seed(facts["seed"]))
        ((_, clean),) = ours.ends()
        pixels = (clean - facts["pixels"]["offset"]) / facts["pixels"]["scale"]
        with torch.no_grad():
            read = reader(pixels * pixels_to_input["scale"] + pixels_to_input["offset"]).argmax(dim=1)
        return (read == asked).double().mean().item()

    return share


@pytest.mark.slow
def test_trained_weights_draw_digits_and_random_weights_do_not(recognised, demo, facts):
    asked = torch.arange(10).repeat_interleave(SAMPLES_A_CLASS)
    assert recognised(demo, asked) == pytest.approx(facts["recognised"], abs=READ_OTHERWISE)
    assert facts["recognised"] > 0.95
    untrained = load("demo_dit", device="cpu", weights="random")
    assert untrained.about["weights"] == "random weights, seed 0"
    assert recognised(untrained, torch.arange(10).repeat(3)) < 0.4


def test_default_inputs(demo):
    assert demo.provenance.kind == "embedded"
    assert demo.about["weights"].startswith("embedded demo_dit (trained on scikit-learn's digits, sha256 ")
    assert demo.about["data"] == "64 DDIM trajectories of 50 steps (seed 0, no guidance), timesteps 980, 660, 320, 0"
    assert sorted(demo.inputs.labels.bincount().tolist()) == [6] * 6 + [7] * 4
    assert demo.inputs.n_samples == 256


def test_guidance_and_latents(tmp_path):
    guided = load("demo_dit", device="cpu", guidance=2.0, limit=3, timesteps="980,")
    assert guided.inputs.n_samples == 6
    assert guided.about["data"] == "3 DDIM trajectories of 50 steps (seed 0, guidance 2), timestep 980"
    np.save(tmp_path / "paper.npy", np.full((3, 1, 8, 8), -1.0))
    paper = load("demo_dit", device="cpu", data=tmp_path / "paper.npy", timesteps=2)
    assert [batch.kwargs["hidden_states"].shape for batch in paper.inputs] == [(3, 1, 8, 8)] * 2
    assert all((batch.kwargs["class_labels"] == 10).all() for batch in paper.inputs)
