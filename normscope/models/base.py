"""What loading a model takes and what it gives; the words that every family shares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from normscope import splits
from normscope.outputs import Outputs

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn


@dataclass(frozen=True)
class Provenance:
    """Where the weights of a network come from.

    Attributes:
        kind: ``pretrained`` from a hub, ``random``, ``file``, ``embedded`` in this package, or ``custom``: as a
            factory of the user's made them.
        description: one line that every table, figure and file prints, with the revision or hash that makes the
            weights findable again.

    >>> Provenance.random(seed=0)
    Provenance(kind='random', description='random weights, seed 0')
    """

    kind: Literal["pretrained", "random", "file", "embedded", "custom"]
    description: str

    @classmethod
    def random(cls, seed: int, on: str = "") -> Provenance:
        """Say that the weights are as their initialization under ``seed`` left them: the CPU's, or that of ``on``."""
        return cls("random", f"random weights, seed {seed}{f' of a {on}' if on else ''}")


class Inputs(splits.Inputs, Protocol):
    """Batches to run a network on, on its device and in its dtype."""

    @property
    def unreadable(self) -> list[str]:
        """``path: reason`` of each input that the latest iteration left out, in order; among ``n_samples``."""


@dataclass(frozen=True)
class LoadOptions:
    """Everything that :func:`normscope.models.load` was asked for, checked, except which model.

    Attributes:
        weights: ``pretrained``, ``random``, or the path of a file.
        data: a file or a folder of what the family takes; None for the model's own default inputs.
        limit: the largest number of samples, or None.
        batch_size: samples per batch, at most.
        seed: of random weights, of the choice of default inputs, and of their order where it is shuffled.
        dtype: of weights and inputs; None to leave them as the library or the user's function makes them.
        guidance: scale of classifier-free guidance along a diffusion model's trajectory; None for the model's own.
        timesteps: at which timesteps of it, see :func:`normscope.models.load`; None for the default.
        workers: how many processes read inputs ahead of the network, 0 for none but its own; None for a number that
            suits the device, see :func:`normscope.models.workers.number_of_workers`.
        shuffle: whether inputs are taken in an order that the seed draws, of which ``limit`` takes the first.
        device_map: ``auto`` to spread the network, see :mod:`normscope.models.spreading`; None for one device.
    """

    weights: str | Path
    data: str | None
    limit: int | None
    batch_size: int
    seed: int
    device: torch.device
    dtype: torch.dtype | None
    guidance: float | None = None
    timesteps: str | int | None = None
    workers: int | None = None
    shuffle: bool = False
    device_map: str | None = None


@dataclass
class LoadedModel:
    """A network that is ready to run, and what to run it on.

    Attributes:
        name: the name it was loaded by.
        module: in eval mode, on the asked-for device and in the asked-for dtype.
        inputs: batches on the same device, floating-point tensors in a dtype that the module takes.
        provenance: where the weights come from.
        outputs: how to read what the module returns.
        calibration: inputs to learn from, apart from ``inputs``: what a swap's start values are fitted to, and what it
            is healed on; None where there are none but ``inputs``.
    """

    name: str
    module: nn.Module
    inputs: Inputs
    provenance: Provenance
    outputs: Outputs = field(default_factory=Outputs)
    calibration: Inputs | None = None

    @property
    def about(self) -> dict[str, str]:
        """Return what every output names: the model, its weights, and the data."""
        return {
            "model": self.name,
            "weights": self.provenance.description,
            "data": self.inputs.description,
        }
