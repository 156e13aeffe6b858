"""Latents of users, in files that numpy and safetensors write."""

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler
from loads import samples_of
from safetensors.torch import save_file

from normscope.errors import DataError, UsageError
from normscope.inputs.chunks import ALL, RankSampler
from normscope.models.inputs.trajectories import LatentSpace, NoisedLatents

SPACE = LatentSpace(channels=4, size=8, classes=5)
LATENTS = torch.randn(6, 4, 8, 8, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def read(options):
    def make(path, **changes):
        return NoisedLatents(path, SPACE, DDIMScheduler(clip_sample=False), options(data=str(path), **changes))

    return make


@pytest.fixture
def array(tmp_path):
    np.save(tmp_path / "latents.npy", LATENTS.numpy())
    return tmp_path / "latents.npy"


@pytest.fixture
def labelled(tmp_path):
    tensors = {"latents": LATENTS.double(), "class_labels": torch.tensor([4, 3, 2, 1, 0, 5], dtype=torch.int32)}
    save_file(tensors, tmp_path / "latents.safetensors")
    return tmp_path / "latents.safetensors"


def noise_in(batch, clean, timestep):
    """Solve x = √ᾱ·x₀ + √(1−ᾱ)·noise for the noise, in float64, with ᾱ from the betas."""
    betas = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)
    kept = torch.cumprod(1 - betas, dim=0)[timestep]
    return (batch.kwargs["hidden_states"].double() - kept.sqrt() * clean.double()) / (1 - kept).sqrt()


def test_latents_are_noised_as_in_training(read, array):
    batches = list(read(array, batch_size=6, timesteps="980,500,20"))
    noised = [noise_in(batch, LATENTS, timestep) for batch, timestep in zip(batches, (980, 500, 20), strict=True)]
    torch.testing.assert_close(noised[0], noised[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(noised[0], noised[2], rtol=1e-3, atol=1e-3)  # where little of it is in the sum
    assert abs(noised[0].mean()) < 0.1
    assert abs(noised[0].std() - 1) < 0.1
    other = next(iter(read(array, batch_size=6, timesteps="980,", seed=1)))
    assert not torch.allclose(noise_in(other, LATENTS, 980), noised[0], atol=0.1)


def test_each_latent_is_a_source_at_every_timestep(read, array):
    inputs = read(array, batch_size=4, limit=5, timesteps="980,0")
    batches = list(inputs)
    assert [batch.part for batch in batches] == ["timestep 980", "timestep 0"] * 2
    assert [len(batch.samples) for batch in batches] == [4, 4, 1, 1]
    assert [batch.kwargs["timestep"].unique().tolist() for batch in batches] == [[980], [0], [980], [0]]
    seen = samples_of(batches)
    assert {(sample.source, sample.source_index) for sample in seen} == {(f"latent {i}", i) for i in range(5)}
    assert len({sample.index for sample in seen}) == inputs.n_samples == 10
    assert inputs.description == f"{array}: the first 5 of 6 latents with noise (seed 0, null class), timesteps 980, 0"
    for batch in batches:
        assert (batch.kwargs["class_labels"] == 5).all()


def test_classes_of_the_file(read, labelled):
    inputs = read(labelled, limit=4, timesteps="0,")
    (batch,) = inputs
    assert batch.kwargs["class_labels"].tolist() == [4, 3, 2, 1]
    assert batch.kwargs["class_labels"].dtype == torch.int64
    assert batch.kwargs["hidden_states"].dtype == torch.float32
    some = f"{labelled}: the first 4 of 6 latents"
    assert inputs.description == f"{some} with noise (seed 0, classes of the file), timestep 0"
    with pytest.raises(UsageError, match=r"Guidance \(4\) steers the model's own trajectories"):
        read(labelled, guidance=4.0)


@pytest.mark.parametrize(
    ("latents", "error"),
    [
        (np.zeros((2, 4, 8, 9), np.float32), r"are \(2, 4, 8, 9\); the model takes \(latents, 4, 8, 8\), at least one"),
        (np.zeros((0, 4, 8, 8), np.float32), r"are \(0, 4, 8, 8\); the model takes"),
        (np.float32(1), r"are \(\); the model takes"),
        (np.zeros((2, 4, 8, 8), np.int64), "are int64; the model takes floating-point numbers"),
        (np.zeros((2, 4, 8, 8), "U3"), "cannot be read as a npy file of latents"),
        (np.array([{}]), "cannot be read as a npy file of latents: .*Python objects"),
        (np.stack([np.zeros((4, 8, 8)), np.full((4, 8, 8), np.nan)]), "Latent 1 in .* infinite or not a number"),
        (torch.zeros(9, dtype=torch.long), "one for each of the 2 latents"),
        (torch.tensor([0, 6]), r"class_labels in .* go from 0 to 6; the model has classes from 0 to 4, and 5 for none"),
        (torch.tensor([-1, 0]), "class_labels in .* go from -1 to 0"),
        (torch.tensor([0.0, 1.0]), r"class_labels in .* are float32 of shape \(2,\); they have to be integers"),
        (torch.tensor([[0], [1]]), r"class_labels in .* are int64 of shape \(2, 1\)"),
    ],
)
def test_wrong_latents_or_class_labels_are_refused(read, tmp_path, latents, error):
    if isinstance(latents, torch.Tensor):
        path = tmp_path / "wrong.safetensors"
        save_file({"latents": LATENTS[:2].clone(), "class_labels": latents}, path)
    else:
        path = tmp_path / "wrong.npy"
        np.save(path, latents)
    with pytest.raises(DataError, match=error):
        read(path)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("images.safetensors", "contains no tensor 'latents', only images"),
        ("broken.npy", "cannot be read as a npy file of latents"),
        ("broken.safetensors", "cannot be read as a safetensors file of latents"),
        ("latents.pt", r"Latents are read from \.npy and \.safetensors files, not .*latents\.pt"),
        ("", "is a folder; latents are read from one .npy or .safetensors file"),
    ],
)
def test_files_without_latents_are_refused(read, tmp_path, name, error):
    if name == "images.safetensors":
        save_file({"images": torch.zeros(2)}, tmp_path / name)
    elif name:
        (tmp_path / name).write_bytes(b"damaged")
    with pytest.raises(DataError, match=error):
        read(tmp_path / name)


def test_the_noise_of_a_latent_does_not_depend_on_order_and_rank(read, array):
    def by_sample(*samplers, **changes):
        noised = {}
        for sampler in samplers:
            for chunk in read(array, timesteps="980,0", **changes).chunks(sampler):
                assert [batch.part for batch in chunk.batches] == ["timestep 980", "timestep 0"]
                for batch in chunk.batches:
                    assert [sample.source_index for sample in batch.samples] == list(chunk.numbers)
                    noised |= dict(zip(batch.samples, batch.kwargs["hidden_states"].unbind(), strict=True))
        return noised

    expected = by_sample(ALL, batch_size=6)
    assert len(expected) == 12
    thirds = [RankSampler(rank, 3) for rank in range(3)]
    for noised in (by_sample(*thirds, batch_size=1), by_sample(ALL, batch_size=4, shuffle=True, seed=0)):
        assert noised.keys() == expected.keys()
        assert all(torch.equal(noised[sample], latent) for sample, latent in expected.items())
    noises = torch.stack([noise for sample, noise in expected.items() if sample.index % 1000 == 980]).flatten(1)
    assert torch.corrcoef(noises).triu(1).abs().max() < 0.4, "latents at 980 are nearly noise, 6 of 256 numbers"
    assert set(read(array, timesteps="980,0").known_samples()) == expected.keys()


def test_only_selected_latents_have_to_be_finite(read, tmp_path):
    latents = LATENTS.clone()
    latents[4, 0, 0, 0] = torch.inf
    np.save(tmp_path / "some.npy", latents.numpy())
    assert len(list(read(tmp_path / "some.npy", limit=4, timesteps="0,"))) == 1
    with pytest.raises(DataError, match=r"Latent 4 in .* infinite or not a number"):
        read(tmp_path / "some.npy")
