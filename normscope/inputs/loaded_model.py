"""LoadedModel: a network, inputs to run it on, where its weights come from, and how its outputs are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from normscope.errors import ModelError, UsageError
from normscope.inputs.chunks import Inputs as Inputs

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor, nn

    from normscope.inputs.batch import Batch, Sample


Kind = Literal["classes", "tokens", "frames", "prediction", "tensor"]


def first_tensor(result: Any, batch: Batch) -> Tensor:
    """Return the tensor itself, or the first floating-point one of a tuple, of a mapping, or of a library's record.

    Raises:
        ModelError: if there is none.

    >>> import torch
    >>> from normscope.inputs.batch import Batch
    >>> first_tensor((torch.zeros(2, 3), torch.tensor([3, 3])), Batch()).shape
    torch.Size([2, 3])
    """
    import torch

    values = [result]
    if isinstance(result, Mapping):
        values = list(result.values())
    elif isinstance(result, (tuple, list)):
        values = list(result)
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value
    raise ModelError(f"The model returned a {type(result).__name__} that holds no floating-point tensor to compare.")


def without_variances(result: Any, batch: Batch) -> Tensor:
    """Return what a diffusion transformer predicts, without the variances that some learn behind those channels.

    Args:
        result: its ``sample``, by itself or in a tuple or record: ``(samples, channels, …)``, at least the channels of
            the latents.
        batch: whose keyword ``hidden_states`` are the latents: ``(samples, channels, …)``.

    >>> import torch
    >>> from normscope.inputs.batch import Batch
    >>> without_variances((torch.zeros(2, 8, 4, 4),), Batch(kwargs={"hidden_states": torch.zeros(2, 4, 4, 4)})).shape
    torch.Size([2, 4, 4, 4])
    """
    return first_tensor(result, batch)[:, : batch.kwargs["hidden_states"].shape[1]]


@dataclass(frozen=True)
class Outputs:
    """Reader of the outputs of a forward pass.

    Attributes:
        kind: what the tensor holds: logits of ``classes`` ``(samples, classes)``; logits of the next (or hidden)
            ``tokens`` ``(samples, positions, vocabulary)``; ``frames`` ``(samples, frames, features)``; the
            ``prediction`` of a diffusion model, like its latents; or a ``tensor`` of which nothing is known but that
            axis 0 counts samples.
        read: from what the module returned, and the batch, to that tensor.
    """

    kind: Kind = "tensor"
    read: Callable[[Any, Batch], Tensor] = first_tensor


@dataclass(frozen=True)
class Task:
    """Task of a network, from its head and the labels of its inputs; its quality is measured by it.

    Attributes:
        measure: ``top-1`` of classes, by the samples' labels; ``words`` that are spelled rightly from frames, likewise;
            ``perplexity`` of a causal and ``pseudo-perplexity`` of a masked language model, by the text itself;
            ``spearman`` of embeddings, by the scores of pairs of sentences; ``denoising`` of latents, by the noise that
            was added; None where nothing tells.
        untold: why nothing does, as a clause.
        letters: of words: what each output of a frame stands for, the first for none.
        mask_id: of a masked language model: the token that stands for a hidden one.
        unmasked: token ids that are never hidden: those that the tokenizer puts around and between texts.
        pooling: from the embeddings of tokens to that of a text: their mean, or that of the first or last token.
        truth: of denoising: what a perfect network would predict of some samples, on the CPU: ``(samples, …)``, or None
            for samples that it does not know.

    >>> Task("spearman", pooling="first").untold
    ''
    """

    measure: Literal["top-1", "words", "perplexity", "pseudo-perplexity", "spearman", "denoising"] | None = None
    untold: str = ""
    letters: str = ""
    mask_id: int | None = None
    unmasked: frozenset[int] = frozenset()
    pooling: Literal["mean", "first", "last"] = "mean"
    truth: Callable[[Sequence[Sample]], Tensor | None] | None = None

    def __post_init__(self) -> None:
        """Set the usual reason for an unknown task, unless there is another."""
        if self.measure is None and not self.untold:
            why = "nothing tells what the network is for (in Python, pass quality=, a function of the module)"
            object.__setattr__(self, "untold", why)


@dataclass(frozen=True)
class Provenance:
    """Origin of a network's weights.

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
        """Provenance of weights initialized under ``seed``, on the CPU or on ``on``."""
        return cls("random", f"random weights, seed {seed}{f' of a {on}' if on else ''}")


@dataclass(frozen=True)
class LoadOptions:
    """Everything that :func:`normscope.load` was asked for, checked, except which model.

    Attributes:
        batch_size: samples per batch, at most: a number.
        dtype: of weights and inputs; None to leave them as the library or the user's function makes them.
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


@dataclass(repr=False)
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
        fitting: how many inputs a batch takes and why, where that was found out by running it; else empty.
        family: what kind of network it is, as ``normscope models`` lists it, where the name alone does not tell.
        task: what the network is for, by which its quality is measured before and after a swap.
    """

    name: str
    module: nn.Module
    inputs: Inputs
    provenance: Provenance
    outputs: Outputs = field(default_factory=Outputs)
    calibration: Inputs | None = None
    fitting: str = ""
    family: str = ""
    task: Task = field(default_factory=Task)

    def __repr__(self) -> str:
        about = self.about
        return f"LoadedModel {self.name}: {type(self.module).__name__} · {about['weights']} · {about['data']}"

    @property
    def about(self) -> dict[str, str]:
        """Return what every output names: the model, its weights, and the data; and its family, where that is known."""
        return {
            "model": self.name,
            "weights": self.provenance.description,
            "data": self.inputs.description,
            **({"family": self.family} if self.family else {}),
        }


def module_of(model: nn.Module | LoadedModel) -> nn.Module:
    """Return the module itself, or that of a loaded model; UsageError if it is neither."""
    module = model.module if isinstance(model, LoadedModel) else model
    if not hasattr(module, "state_dict"):
        raise UsageError(f"model is {module!r:.60}. Pass a torch.nn.Module, or what normscope.load returned.")
    return module


_HEADS: dict[str, Kind] = {
    "ForCausalLM": "tokens",
    "LMHeadModel": "tokens",
    "ForMaskedLM": "tokens",
    "ForSequenceClassification": "classes",
    "ForImageClassification": "classes",
}


def output_kind(model: nn.Module) -> Kind:
    """Return the kind of output that the names of transformers' classes state; ``tensor`` of other modules."""
    names = [base.__name__ for base in type(model).__mro__]
    return next((kind for head, kind in _HEADS.items() for name in names if name.endswith(head)), "tensor")
