"""Latents of the user's own as inputs of a diffusion transformer: clean ones, noised to some timesteps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from safetensors.torch import load_file
from torch import Tensor

from normscope.batches import Batch, Sample
from normscope.errors import DataError, UsageError, count
from normscope.models.base import LoadOptions
from normscope.models.inputs import listing_digest
from normscope.models.trajectories import LatentSpace, chosen_timesteps, denoising_batch, listed


@dataclass
class NoisedLatents:
    """Clean latents, each noised to several timesteps, as in training: √ᾱ·x₀ + √(1−ᾱ)·noise.

    Attributes:
        path: of the file that they come from.
        latents: x₀: float32 ``(latents, channels, height, width)``.
        labels: class of each: int64 ``(latents,)``.
        scheduler: of training; it knows ᾱ.
        timesteps: what they are noised to; each latent has one noise, under ``options.seed``, for all of them.
        options: ``batch_size``, ``seed``, ``device`` and ``dtype`` are read.
        total: how many the file holds.
        remark: whose classes they have, for the description.
        unreadable: empty; nothing can go wrong any more.
    """

    path: Path
    latents: Tensor
    labels: Tensor
    scheduler: DDIMScheduler
    timesteps: Sequence[int]
    options: LoadOptions
    total: int
    remark: str
    unreadable: list[str] = field(default_factory=list)

    @property
    def description(self) -> str:
        """Say what was read and what it was noised to."""
        latents = count(self.total, "latent")
        if len(self.latents) < self.total:
            latents = f"the first {len(self.latents)} of {latents}"
        return f"{self.path}: {latents} with noise (seed {self.options.seed}, {self.remark}), {listed(self.timesteps)}"

    @property
    def n_samples(self) -> int:
        """How many samples there are: each latent at each timestep."""
        return len(self.latents) * len(self.timesteps)

    def __iter__(self) -> Iterator[Batch]:
        """Yield some latents at each of the timesteps, then the next ones."""
        data = listing_digest(self.path, [self.path])
        trained = self.scheduler.config["num_train_timesteps"]
        generator = torch.Generator().manual_seed(self.options.seed)
        for first in range(0, len(self.latents), self.options.batch_size):
            chunk = range(first, min(first + self.options.batch_size, len(self.latents)))
            clean = self.latents[chunk.start : chunk.stop]
            noise = torch.stack([torch.randn(latent.shape, generator=generator) for latent in clean])
            for timestep in self.timesteps:
                every = torch.full((len(clean),), timestep)
                noised = self.scheduler.add_noise(clean, noise, every)  # type: ignore[arg-type]  # all integers do
                samples = [Sample(f"latent {i}", i, i * trained + timestep, data) for i in chunk]
                labels = self.labels[chunk.start : chunk.stop]
                yield denoising_batch(noised, timestep, labels, samples, self.options)


def read_latents(path: Path, space: LatentSpace, scheduler: DDIMScheduler, options: LoadOptions) -> NoisedLatents:
    """Return the latents of a file, each to be run once at each timestep, with its own class or the null class.

    Args:
        path: a ``.npy`` file of floats ``(latents, channels, height, width)``; or a ``.safetensors`` file that holds
            such a tensor ``latents``, and may hold integers ``class_labels``, ``(latents,)``. Latents are as the model
            takes them: an autoencoder's, times its scaling factor.
        space: what the model takes.
        scheduler: of training.
        options: ``limit``, ``seed``, ``timesteps`` and those that say how to batch are read.

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
    total = len(_checked_shape(path, tensors["latents"], space))
    latents = _checked_values(path, tensors["latents"][: options.limit])
    labels, remark = torch.full((total,), space.classes), "null class"
    if "class_labels" in tensors:
        labels, remark = _checked_labels(path, tensors["class_labels"], total, space.classes), "classes of the file"
    return NoisedLatents(path, latents, labels[: options.limit], scheduler, timesteps, options, total, remark)


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


def _checked_values(path: Path, latents: Tensor) -> Tensor:
    latents = latents.float()
    finite = latents.isfinite().flatten(1).all(dim=1)
    if not finite.all():
        first = int(finite.logical_not().nonzero()[0])
        raise DataError(f"Latent {first} in {str(path)!r} holds numbers that are infinite or not a number.")
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
