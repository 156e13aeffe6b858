"""Latents of the user's own as inputs of a diffusion transformer: clean ones, noised to some timesteps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from safetensors.torch import load_file
from torch import Tensor

from normscope.errors import DataError, UsageError, count
from normscope.inputs.batch import Sample
from normscope.inputs.loaded_model import LoadOptions
from normscope.inputs.splits import Chunk
from normscope.models.inputs.file_inputs import listing_digest
from normscope.models.inputs.numbered_inputs import ReadInputs
from normscope.models.inputs.trajectories import LatentSpace, chosen_timesteps, denoising_batch, listed


class NoisedLatents(ReadInputs):
    """Clean latents, each noised to several timesteps, as in training: √ᾱ·x₀ + √(1−ᾱ)·noise.

    Each latent has one noise for all timesteps, which follows from the seed and from the latent's number in its file.
    """

    kept = True

    def __init__(
        self,
        path: Path,
        latents: Tensor,
        labels: Tensor,
        scheduler: DDIMScheduler,
        timesteps: Sequence[int],
        options: LoadOptions,
        remark: str,
    ) -> None:
        """Keep, or map into memory, all latents of a file.

        Args:
            path: of the file that they come from.
            latents: x₀: floats ``(latents, channels, height, width)``.
            labels: class of each: int64 ``(latents,)``.
            scheduler: of training; it knows ᾱ.
            timesteps: what they are noised to.
            options: ``seed``, those that say which are taken, and those that say how to batch are read.
            remark: whose classes they have, for the description.

        Raises:
            DataError: if one that is taken is not finite.
        """
        super().__init__(len(latents), options)
        self._path, self._latents, self._labels, self._remark = path, latents, labels, remark
        self._scheduler, self.timesteps = scheduler, timesteps
        self._data = listing_digest(path, [path])
        for number in self.order:
            if not latents[number].float().isfinite().all():
                raise DataError(f"Latent {number} in {str(path)!r} holds numbers that are infinite or not a number.")

    @property
    def description(self) -> str:
        """Say what was read and what it was noised to."""
        latents, seed = self._taken_of(count(self._total, "latent")), self._options.seed
        return f"{self._path}: {latents} with noise (seed {seed}, {self._remark}), {listed(self.timesteps)}"

    @property
    def n_samples(self) -> int:
        """Number of samples: each latent at each timestep."""
        return len(self.order) * len(self.timesteps)

    def read(self, numbers: Sequence[int]) -> Chunk:
        """Noise some latents to each of the timesteps."""
        which = list(numbers)
        clean = self._latents[which].float()
        noise = torch.stack([self._noise(number) for number in which])
        batches = []
        for timestep in self.timesteps:
            every = torch.full((len(clean),), timestep)
            noised = self._scheduler.add_noise(clean, noise, every)  # type: ignore[arg-type]  # all integers do
            samples = [self._sample(number, timestep) for number in which]
            batches.append(denoising_batch(noised, timestep, self._labels[which], samples))
        return Chunk(numbers, batches)

    def truth(self, samples: Sequence[Sample]) -> Tensor | None:
        """Return what a perfect network would predict of some samples: ε, x₀ or v, as the scheduler says.

        Args:
            samples: of :meth:`known_samples`.

        Returns:
            float32 ``(samples, channels, height, width)``, on the CPU; None if any sample is of other inputs.
        """
        if any(sample.data != self._data for sample in samples):
            return None
        numbers = [sample.source_index for sample in samples]
        clean, noise = self._latents[numbers].float(), torch.stack([self._noise(number) for number in numbers])
        steps = torch.tensor([sample.index % self._scheduler.config["num_train_timesteps"] for sample in samples])
        velocity = self._scheduler.get_velocity(clean, noise, steps)  # type: ignore[arg-type]  # all integers do
        by_name = {"epsilon": noise, "sample": clean, "v_prediction": velocity}
        return by_name[self._scheduler.config["prediction_type"]]

    def known_samples(self) -> Iterator[Sample]:
        """Yield a sample for each timestep of each latent that is taken."""
        return (self._sample(number, timestep) for number in self.order for timestep in self.timesteps)

    def _noise(self, number: int) -> Tensor:
        generator = np.random.default_rng([self._options.seed % 2**64, number])
        return torch.from_numpy(generator.standard_normal(self._latents.shape[1:], dtype=np.float32))

    def _sample(self, number: int, timestep: int) -> Sample:
        index = number * self._scheduler.config["num_train_timesteps"] + timestep
        return Sample(f"latent {number}", number, index, self._data)


def read_latents(path: Path, space: LatentSpace, scheduler: DDIMScheduler, options: LoadOptions) -> NoisedLatents:
    """Return the latents of a file, each to be run once at each timestep, with its own class or the null class.

    Args:
        path: a ``.npy`` file of floats ``(latents, channels, height, width)``; or a ``.safetensors`` file that holds
            such a tensor ``latents``, and may hold integers ``class_labels``, ``(latents,)``. Latents are as the model
            takes them: an autoencoder's, times its scaling factor.
        space: what the model takes.
        scheduler: of training.
        options: ``limit``, ``shuffle``, ``seed``, ``timesteps`` and those that say how to batch are read.

    Raises:
        UsageError: if ``options.guidance`` is given: nothing is guided; or if ``options.timesteps`` is wrong.
        DataError: if the file cannot be read, or what it holds is not in ``space``.
    """
    if options.guidance is not None:
        raise UsageError(
            f"Guidance ({options.guidance:g}) steers the model's own trajectories, and latents from a file run "
            "along none. Leave out either guidance or data."
        )
    timesteps = chosen_timesteps(scheduler, options)
    tensors = _read(path)
    if "latents" not in tensors:
        raise DataError(f"{str(path)!r} holds no tensor 'latents', only {', '.join(sorted(tensors)) or 'none at all'}.")
    latents = _checked_shape(path, tensors["latents"], space)
    labels, remark = torch.full((len(latents),), space.classes), "null class"
    if "class_labels" in tensors:
        labels = _checked_labels(path, tensors["class_labels"], len(latents), space.classes)
        remark = "classes of the file"
    return NoisedLatents(path, latents, labels, scheduler, timesteps, options, remark)


def _read(path: Path) -> dict[str, Tensor]:
    """Map a file's tensors into memory, unchecked."""
    if path.is_dir():
        raise DataError(f"{str(path)!r} is a folder; latents are read from one .npy or .safetensors file.")
    kind = path.suffix.lower()
    if kind not in (".npy", ".safetensors"):
        raise DataError(f"Latents are read from .npy and .safetensors files, not from {str(path)!r}.")
    try:
        if kind == ".safetensors":
            return load_file(path)
        return {"latents": torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))}
    except Exception as error:  # numpy, the parsers of headers and torch each have their own
        raise DataError(f"{str(path)!r} cannot be read as a {kind[1:]} file of latents: {error}") from error


def _checked_shape(path: Path, latents: Tensor, space: LatentSpace) -> Tensor:
    wanted = (space.channels, space.size, space.size)
    if latents.ndim != 4 or tuple(latents.shape[1:]) != wanted or not len(latents):
        raise DataError(
            f"The latents in {str(path)!r} are {tuple(latents.shape)}; the model takes (latents, "
            f"{', '.join(map(str, wanted))}), at least one."
        )
    if not latents.is_floating_point():
        dtype = str(latents.dtype).removeprefix("torch.")
        raise DataError(f"The latents in {str(path)!r} are {dtype}; the model takes floating-point numbers.")
    return latents


def _checked_labels(path: Path, labels: Tensor, wanted: int, classes: int) -> Tensor:
    if labels.shape != (wanted,) or labels.dtype == torch.bool or labels.is_floating_point() or labels.is_complex():
        raise DataError(
            f"The class_labels in {str(path)!r} are {str(labels.dtype).removeprefix('torch.')} of shape "
            f"{tuple(labels.shape)}; they have to be integers, one for each of the {wanted} latents."
        )
    labels = labels.long()
    if ((labels < 0) | (labels > classes)).any():
        raise DataError(
            f"The class_labels in {str(path)!r} go from {int(labels.min())} to {int(labels.max())}; the model has "
            f"classes from 0 to {classes - 1}, and {classes} for none."
        )
    return labels
