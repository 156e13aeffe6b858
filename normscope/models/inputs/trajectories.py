"""Inputs of a diffusion transformer: the latents of its own DDIM trajectories, at some of their timesteps."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from safetensors.torch import load_file
from torch import Tensor, nn

from normscope.errors import DataError, UsageError, count
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.chunks import ALL, Chunk, RankSampler
from normscope.inputs.loaded_model import LoadOptions
from normscope.inputs.previews import Preview
from normscope.models.inputs.dataset import InputDataset, Item, listing_digest
from normscope.runtime.network import run
from normscope.runtime.progress import StageProgress, report

TIMESTEPS = 4  # of a trajectory to run the model at, by default
_STAGE = "steps of trajectories"
_LISTED = 8  # timesteps that a description names one by one
STEPS = 50  # of a trajectory, as DiTPipeline takes them
_TOGETHER = 4 * 32 * 32  # numbers of latents that are walked as one batch: a single one of DiT-XL has them


def select_timesteps(visited: Sequence[int], request: str | int | None = None) -> list[int]:
    """Return some of the timesteps that a trajectory visits, in its order, each once; or UsageError.

    ``request`` is a lone number for that many of them, evenly along the trajectory, its ends included; or timesteps
    separated by commas (``"980,"`` for one); or None for 4.

    >>> select_timesteps(range(980, -1, -20)), select_timesteps(range(980, -1, -20), "0,980,500")
    ([980, 660, 320, 0], [980, 500, 0])
    """
    text = str(TIMESTEPS if request is None else request)
    parts = [entry.strip() for entry in text.split(",") if entry.strip()]
    if not parts or not all(re.fullmatch(r"[+-]?\d{1,18}", entry, re.ASCII) for entry in parts):
        raise UsageError(
            f"The timesteps {text!r} cannot be understood. Give a number of them, 4 for example, or the timesteps "
            f"themselves, with commas: '{visited[0]},{visited[-1]}', or '{visited[0]},' for one."
        )
    numbers = [int(entry) for entry in parts]
    if "," not in text:
        return _evenly(visited, numbers[0])
    for number in numbers:
        if number not in visited:
            near = sorted(sorted(visited, key=lambda timestep: abs(timestep - number))[:2], reverse=True)
            raise UsageError(
                f"The trajectory does not visit the timestep {number}: its {len(visited)} go from {visited[0]} to "
                f"{visited[-1]}. Nearest are {' and '.join(map(str, near))}."
            )
    return [timestep for timestep in visited if timestep in numbers]


def listed(timesteps: Sequence[int]) -> str:
    """Name timesteps, or where there are many, how many they are.

    >>> listed([980, 0]), listed([980]), listed(range(980, -1, -20))
    ('timesteps 980, 0', 'timestep 980', '50 timesteps from 980 to 0')
    """
    if len(timesteps) > _LISTED:
        return f"{len(timesteps)} timesteps from {timesteps[0]} to {timesteps[-1]}"
    return f"{'timestep' if len(timesteps) == 1 else 'timesteps'} {', '.join(map(str, timesteps))}"


def _evenly(visited: Sequence[int], number: int) -> list[int]:
    if number < 1:
        raise UsageError(f"The number of timesteps must be at least 1, not {number}.")
    if number > len(visited):
        meant = f" For the timestep {number} alone, write '{number},'." if number in visited else ""
        raise UsageError(f"The trajectory has {len(visited)} timesteps, not {number}.{meant}")
    if number == 1:
        return [visited[len(visited) // 2]]
    return [visited[round(i * (len(visited) - 1) / (number - 1))] for i in range(number)]


@dataclass(frozen=True)
class LatentSpace:
    """The latents and classes that a class-conditional DiT takes."""

    channels: int
    size: int  # height and width
    classes: int  # their number, which is also the label of no class


class Trajectories(InputDataset):
    """DDIM trajectories without added noise (η = 0), from noise, with a class label for each.

    With guidance each latent runs twice in a batch, with its label and with the null label, and a step follows
    without + guidance · (with − without). A batch of trajectories is walked to the last of the timesteps when its first
    latents are requested, and its latents are kept. Tiny latents are walked in larger batches.

    Attributes:
        module: transformer that makes the trajectories and is run on them; to be set once its weights are loaded.
        scheduler: of training, with its timesteps set.
        noise: starts of the trajectories: float32 ``(trajectories, channels, height, width)``, on the CPU.
        labels: int64 ``(trajectories,)``.
        timesteps: at which to run the module, in the order of the trajectory.
    """

    module: nn.Module

    def __init__(
        self,
        space: LatentSpace,
        scheduler: DDIMScheduler,
        options: LoadOptions,
        *,
        guidance: float,
        trajectories: int,
        steps: Sequence[int] = (STEPS,),
        remark: str = "",
    ) -> None:
        """Draw noise and labels under ``options.seed``; UsageError if an option is wrong.

        Labels go through all classes, in a random order, before one recurs. The noise is what DiTPipeline draws for
        each image from one generator of that seed.

        ``guidance`` is the default of ``options.guidance``, ``trajectories`` their number before ``options.limit``. Of
        the numbers of ``steps``, the first that visits the requested timesteps is taken.
        """
        super().__init__(trajectories, options)
        self._guidance = guidance if options.guidance is None else float(options.guidance)
        if not (math.isfinite(self._guidance) and self._guidance >= 1):
            raise UsageError(f"The guidance is {self._guidance:g}; it has to be 1, for none, or more.")
        self.scheduler, self.timesteps = scheduler, chosen_timesteps(scheduler, options, steps)
        generator = torch.Generator().manual_seed(options.seed)
        shape = (space.channels, space.size, space.size)
        self.noise = torch.stack([torch.randn(shape, generator=generator) for _ in range(trajectories)])
        order = torch.randperm(space.classes, generator=torch.Generator().manual_seed(options.seed))
        self.labels = order[torch.arange(trajectories) % len(order)]
        self._null_class, self._remark = space.classes, remark
        self._runs = 1 if self._guidance == 1 else 2  # of each latent
        self.batch_size = max(1, options.batch_size // self._runs)  # both samples of a guided latent are in one batch
        self._visited: list[int] = scheduler.timesteps.tolist()
        self._n_steps = self._visited.index(self.timesteps[-1])
        self._latents: dict[int, Tensor] = {}  # of a trajectory: (timesteps, channels, height, width)
        self._progress: StageProgress | None = None

    @property
    def description(self) -> str:
        guidance = "no guidance" if self._guidance == 1 else f"guidance {self._guidance:g}"
        shuffled = "shuffled" if self._options.shuffle else ""
        remarks = ", ".join(filter(None, [f"seed {self._options.seed}", guidance, shuffled, self._remark]))
        trajectories = "trajectory" if len(self.order) == 1 else "trajectories"
        steps = count(len(self._visited), "step")
        return f"{len(self.order)} DDIM {trajectories} of {steps} ({remarks}), {listed(self.timesteps)}"

    def samples(self, number: int) -> list[Sample]:
        return [self._sample(number, timestep, half) for timestep in self.timesteps for half in range(self._runs)]

    def preview(self, batch: Batch, index: int) -> Preview | None:
        """Return the latent of a sample; None of one that runs without its label, beside itself with it."""
        return None if batch.samples[index].index % 2 else super().preview(batch, index)

    def ends(self, sampler: RankSampler = ALL) -> Iterator[tuple[tuple[Sample, ...], Tensor]]:
        """Walk the trajectories of a rank to their ends, with the module as it is now, keeping nothing.

        Yields samples, one a trajectory, and clean latents: float32 ``(trajectories, channels, height, width)``.
        """
        for numbers in sampler.groups(self.order, self._walked_together):
            latents = self.noise[numbers]
            for timestep in self._visited:
                latents = self._denoised(latents, timestep, numbers)
            yield tuple(self._sample(number, self._visited[-1], half=0) for number in numbers), latents

    def first_sample(self) -> Batch:
        """Return the first sample; that of the first timestep takes no step."""
        number, timestep = self.order[0], self.timesteps[0]
        latents = self.noise[[number]] if timestep == self._visited[0] else self.load(number)[:1]
        return self._batch([number], timestep, latents).first_sample()

    def chunks(self, sampler: RankSampler) -> Iterator[Chunk]:
        numbers = chain.from_iterable(sampler.groups(self.order, self.batch_size))
        walks = {self._walked_with(number)[0] for number in numbers if number not in self._latents}
        self._progress = StageProgress(report, _STAGE, self._n_steps * len(walks)) if self._n_steps and walks else None
        yield from super().chunks(sampler)

    def __getitem__(self, number: int) -> Item:
        return Item(number, self.load(number))  # errors of the network are raised

    def load(self, number: int) -> Tensor:
        """Return the latents of a trajectory at the timesteps, and keep those of the trajectories walked with it."""
        if number not in self._latents:
            numbers = self._walked_with(number)
            latents = self.noise[list(numbers)]
            at_timesteps = [latents] if self._visited[0] in self.timesteps else []
            for timestep, following in pairwise(self._visited[: self._n_steps + 1]):
                latents = self._denoised(latents, timestep, numbers)
                at_timesteps += [latents] if following in self.timesteps else []
                if self._progress is not None:
                    self._progress.add(1)
            self._latents |= dict(zip(numbers, torch.stack(at_timesteps, dim=1), strict=True))
        return self._latents[number]

    def batches(self, items: Sequence[Item]) -> list[Batch]:
        numbers, latents = [item.number for item in items], torch.stack([item.content for item in items], dim=1)
        at_timesteps = zip(self.timesteps, latents, strict=True)
        return [self._batch(numbers, timestep, at_timestep) for timestep, at_timestep in at_timesteps]

    def _walked_with(self, number: int) -> Sequence[int]:
        """Return the trajectories that are walked in one batch, the same for every rank, with one among them.

        Matrix products of other shapes round differently.
        """
        size = self._walked_together
        first = self.order.index(number) // size * size
        return self.order[first : first + size]

    @property
    def _walked_together(self) -> int:
        """Number of trajectories walked in one batch: those of a chunk, or of several chunks if tiny."""
        return max(self.batch_size, _TOGETHER // self.noise[0].numel() // self.batch_size * self.batch_size)

    @torch.inference_mode(False)  # what is kept may later be the input of a pass with gradients
    @torch.no_grad()
    def _denoised(self, latents: Tensor, timestep: int, numbers: Sequence[int]) -> Tensor:
        """Make the step at ``timestep``, in float32 on the CPU except for the module."""
        output = run(self.module, self._batch(numbers, timestep, latents))[0]  # of a copy: latents are kept
        predicted = output[:, : latents.shape[1]].float().cpu()  # behind these channels are learned variances
        if self._runs == 2:
            with_label, without = predicted.chunk(2)
            predicted = without + self._guidance * (with_label - without)
        step: Tensor = self.scheduler.step(predicted, timestep, latents, return_dict=False)[0]
        return step

    def _batch(self, numbers: Sequence[int], timestep: int, latents: Tensor) -> Batch:
        labels = self.labels[list(numbers)]
        if self._runs == 2:
            latents = torch.cat([latents, latents])
            labels = torch.cat([labels, torch.full_like(labels, self._null_class)])
        samples = [self._sample(number, timestep, half) for half in range(self._runs) for number in numbers]
        batch = denoising_batch(latents, timestep, labels, samples)
        return batch.to(self._options.device, self._options.dtype)

    def _sample(self, trajectory: int, timestep: int, half: int) -> Sample:
        index = (trajectory * len(self._visited) + self._visited.index(timestep)) * 2 + half
        return Sample(f"trajectory {trajectory}", trajectory, index, data=f"DDIM from seed {self._options.seed}")


def denoising_batch(latents: Tensor, timestep: int, labels: Tensor, samples: Sequence[Sample]) -> Batch:
    """Return one forward pass of a DiT: latents ``(samples, channels, height, width)``, labels int64 ``(samples,)``."""
    arguments = {
        "hidden_states": latents,
        "timestep": torch.full((len(latents),), timestep),
        "class_labels": labels,
        "return_dict": False,
    }
    return Batch(kwargs=arguments, samples=tuple(samples), part=f"timestep {timestep}")


def chosen_timesteps(scheduler: DDIMScheduler, options: LoadOptions, steps: Sequence[int] = (STEPS,)) -> list[int]:
    """Set the scheduler's timesteps, and return those that ``options.timesteps`` selects.

    ``steps`` are numbers of them, ascending: the first that visits all of these is set; see :func:`select_timesteps`.
    """
    for number in steps:
        scheduler.set_timesteps(min(number, scheduler.config["num_train_timesteps"]))
        with contextlib.suppress(UsageError):
            return select_timesteps(scheduler.timesteps.tolist(), options.timesteps)
    return select_timesteps(scheduler.timesteps.tolist(), options.timesteps)


class NoisedLatents(InputDataset):
    """Clean latents of a file, each noised to several timesteps, as in training: √ᾱ·x₀ + √(1−ᾱ)·noise.

    Each latent runs once at each timestep, with its own class or the null class. It has one noise for all timesteps,
    which follows from the seed and from the latent's number in its file.
    """

    def __init__(self, path: Path, space: LatentSpace, scheduler: DDIMScheduler, options: LoadOptions) -> None:
        """Read a file.

        A ``.npy`` file contains floats ``(latents, channels, height, width)``, already multiplied by the autoencoder's
        scaling factor; a ``.safetensors`` file such a tensor ``latents``, and optionally integers ``class_labels``.

        Raises:
            UsageError: if ``options.guidance`` is set, or ``options.timesteps`` is wrong.
            DataError: if the file cannot be read, its content is not in ``space``, or a selected latent is not finite.
        """
        if options.guidance is not None:
            raise UsageError(
                f"Guidance ({options.guidance:g}) steers the model's own trajectories, and latents from a file run "
                "along none. Leave out either guidance or data."
            )
        self._path, self._scheduler, self._data = path, scheduler, listing_digest(path, [path])
        self.timesteps = chosen_timesteps(scheduler, options)
        tensors = _read(path)
        if "latents" not in tensors:
            names = ", ".join(sorted(tensors)) or "none at all"
            raise DataError(f"{str(path)!r} contains no tensor 'latents', only {names}.")
        self._latents = latents = _checked_shape(path, tensors["latents"], space)
        self._labels, self._remark = torch.full((len(latents),), space.classes), "null class"
        if "class_labels" in tensors:
            self._labels = _checked_labels(path, tensors["class_labels"], len(latents), space.classes)
            self._remark = "classes of the file"
        super().__init__(len(latents), options)
        for number in self.order:
            if not latents[number].float().isfinite().all():
                raise DataError(f"Latent {number} in {str(path)!r} contains numbers that are infinite or not a number.")

    @property
    def description(self) -> str:
        latents, seed = self._selected_of(count(self._total, "latent")), self._options.seed
        return f"{self._path}: {latents} with noise (seed {seed}, {self._remark}), {listed(self.timesteps)}"

    def samples(self, number: int) -> list[Sample]:
        return [self._sample(number, timestep) for timestep in self.timesteps]

    def load(self, number: int) -> Tensor:
        """Return a clean latent and its noise, ``(2, channels, height, width)``."""
        return torch.stack([self._latents[number].float(), self._noise(number)])

    def batches(self, items: Sequence[Item]) -> list[Batch]:
        clean, noise = torch.stack([item.content for item in items], dim=1)
        numbers, batches = [item.number for item in items], []
        for timestep in self.timesteps:
            every = torch.full((len(clean),), timestep)
            noised = self._scheduler.add_noise(clean, noise, every)  # type: ignore[arg-type]  # all integers do
            samples = [self._sample(number, timestep) for number in numbers]
            batches.append(denoising_batch(noised, timestep, self._labels[numbers], samples))
        return batches

    def truth(self, samples: Sequence[Sample]) -> Tensor | None:
        """Return the perfect prediction for some samples, ε, x₀ or v: float32 like the latents, on the CPU.

        None if any sample is of other inputs.
        """
        if any(sample.data != self._data for sample in samples):
            return None
        numbers = [sample.source_index for sample in samples]
        clean, noise = self._latents[numbers].float(), torch.stack([self._noise(number) for number in numbers])
        steps = torch.tensor([sample.index % self._scheduler.config["num_train_timesteps"] for sample in samples])
        velocity = self._scheduler.get_velocity(clean, noise, steps)  # type: ignore[arg-type]  # all integers do
        by_name = {"epsilon": noise, "sample": clean, "v_prediction": velocity}
        return by_name[self._scheduler.config["prediction_type"]]

    def _noise(self, number: int) -> Tensor:
        generator = np.random.default_rng([self._options.seed % 2**64, number])
        return torch.from_numpy(generator.standard_normal(self._latents.shape[1:], dtype=np.float32))

    def _sample(self, number: int, timestep: int) -> Sample:
        index = number * self._scheduler.config["num_train_timesteps"] + timestep
        return Sample(f"latent {number}", number, index, self._data)


def _read(path: Path) -> dict[str, Tensor]:
    """Map a file's tensors into memory, unchecked."""
    kind = path.suffix.lower()
    if path.is_dir():
        raise DataError(f"{str(path)!r} is a folder; latents are read from one .npy or .safetensors file.")
    if kind not in (".npy", ".safetensors"):
        raise DataError(f"Latents are read from .npy and .safetensors files, not from {str(path)!r}.")
    try:
        if kind == ".safetensors":
            return load_file(path)
        return {"latents": torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))}
    except Exception as error:  # numpy, the parsers of headers and torch each have their own
        raise DataError(f"{str(path)!r} cannot be read as a {kind[1:]} file of latents: {error}") from error


def _checked_shape(path: Path, latents: Tensor, space: LatentSpace) -> Tensor:
    expected = (space.channels, space.size, space.size)
    if tuple(latents.shape[1:]) != expected or not len(latents):
        raise DataError(
            f"The latents in {str(path)!r} are {tuple(latents.shape)}; the model takes (latents, "
            f"{', '.join(map(str, expected))}), at least one."
        )
    if not latents.is_floating_point():
        dtype = str(latents.dtype).removeprefix("torch.")
        raise DataError(f"The latents in {str(path)!r} are {dtype}; the model takes floating-point numbers.")
    return latents


def _checked_labels(path: Path, labels: Tensor, number: int, classes: int) -> Tensor:
    if labels.shape != (number,) or labels.dtype == torch.bool or labels.is_floating_point() or labels.is_complex():
        raise DataError(
            f"The class_labels in {str(path)!r} are {str(labels.dtype).removeprefix('torch.')} of shape "
            f"{tuple(labels.shape)}; they have to be integers, one for each of the {number} latents."
        )
    labels = labels.long()
    if ((labels < 0) | (labels > classes)).any():
        raise DataError(
            f"The class_labels in {str(path)!r} go from {int(labels.min())} to {int(labels.max())}; the model has "
            f"classes from 0 to {classes - 1}, and {classes} for none."
        )
    return labels
