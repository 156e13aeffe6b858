"""LoadedModel: a network, inputs to run it on, where its weights come from, and how its outputs are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normscope.errors import ModelError, UsageError
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.chunks import Inputs as Inputs
from normscope.inputs.wrappers import unwrapped

Kind = Literal["classes", "tokens", "frames", "prediction", "tensor"]

_CAUSAL = ("ForCausalLM", "LMHeadModel")
_HEADS: dict[Kind, tuple[str, ...]] = {
    "tokens": (*_CAUSAL, "ForMaskedLM", "ForConditionalGeneration", "ForTokenClassification"),
    "classes": ("Classification",),
}
_OF_LOGITS: dict[int, Kind] = {2: "classes", 3: "tokens"}  # by their number of axes


def first_tensor(result: Any, batch: Batch) -> Tensor:
    """Return the first floating-point tensor of an output, which may be a tuple, a mapping or a record; or ModelError.

    Single numbers, such as a loss, are none; ``logits`` of a mapping come first.

    >>> first_tensor((torch.zeros(2, 3), torch.tensor([3, 3])), Batch()).shape
    torch.Size([2, 3])
    """
    values = [result.get("logits"), *result.values()] if isinstance(result, Mapping) else result
    for value in values if isinstance(values, (tuple, list)) else [values]:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim:
            return value
    raise ModelError(f"The model returned a {type(result).__name__} that contains no floating-point tensor to compare.")


def without_variances(result: Any, batch: Batch) -> Tensor:
    """Return a diffusion transformer's prediction, without the variances in the channels behind it.

    ``batch`` has the latents as keyword ``hidden_states``, ``(samples, channels, …)``.

    >>> without_variances((torch.zeros(2, 8, 4, 4),), Batch(kwargs={"hidden_states": torch.zeros(2, 4, 4, 4)})).shape
    torch.Size([2, 4, 4, 4])
    """
    return first_tensor(result, batch)[:, : batch.kwargs["hidden_states"].shape[1]]


@dataclass
class Outputs:
    """Reader of the outputs of a forward pass.

    Attributes:
        kind: logits of ``classes`` ``(samples, classes)``; logits of the next (or hidden) ``tokens``
            ``(samples, positions, vocabulary)``; ``frames`` ``(samples, frames, features)``; the ``prediction`` of a
            diffusion model, like its latents; or any other ``tensor`` whose axis 0 counts samples.
        read: from the module's result and the batch to that tensor.
    """

    kind: Kind = "tensor"
    read: Callable[[Any, Batch], Tensor] = first_tensor


@dataclass(frozen=True)
class Task:
    """Task of a network, from its head and the labels of its inputs; its quality is measured by it.

    Attributes:
        measure: ``top-1`` of classes and ``words`` spelled from frames, by the samples' labels; ``perplexity`` of a
            causal and ``pseudo-perplexity`` of a masked language model; ``spearman`` of embeddings, by the scores of
            pairs of sentences; ``denoising`` of latents, by the added noise; None if unknown.
        unmeasured: reason why it is unknown, as a clause; without effect if it is known.
        letters: of words: the letter of each output of a frame, the first for none.
        mask_id: token in place of a hidden one.
        unmasked: token ids that are never hidden: the tokenizer's own.
        pooling: from the embeddings of tokens to that of a text.
        truth: returns the perfect prediction for some samples, ``(samples, …)`` on the CPU, or None.
    """

    measure: Literal["top-1", "words", "perplexity", "pseudo-perplexity", "spearman", "denoising"] | None = None
    unmeasured: str = "the network's task is unknown (in Python, pass quality=, a function of the module)"
    letters: str = ""
    mask_id: int | None = None
    unmasked: frozenset[int] = frozenset()
    pooling: Literal["mean", "first", "last"] = "mean"
    truth: Callable[[Sequence[Sample]], Tensor | None] | None = None


@dataclass(frozen=True)
class Provenance:
    """Origin of a network's weights.

    Attributes:
        kind: ``pretrained`` from a hub, ``random``, ``file``, ``embedded`` in this package, or ``custom``: made by the
            user's factory.
        description: one line of every table, figure and file, with the revision or hash of the weights.

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
    """The checked options of :func:`normscope.load`; a ``dtype`` of None converts nothing.

    Where ``default_dtype`` is True, nobody asked for the dtype, and large or quantized weights keep theirs.
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
    default_dtype: bool = False


@dataclass(repr=False)
class LoadedModel:
    """A network that is ready to run, and its inputs.

    Attributes:
        name: as passed to :func:`normscope.load`.
        module: in eval mode, on the requested device and in the requested dtype.
        inputs: batches on the same device, floating-point tensors in a dtype that the module takes.
        provenance: origin of the weights.
        outputs: reader of the module's results.
        calibration: inputs apart from ``inputs``, on which swaps are initialized and healed; None if there are none.
        family: of the network, as ``normscope models`` lists it, if the name alone does not determine it.
        task: by which the network's quality is measured before and after a swap.
    """

    name: str
    module: nn.Module
    inputs: Inputs
    provenance: Provenance
    outputs: Outputs = field(default_factory=Outputs)
    calibration: Inputs | None = None
    family: str = ""
    task: Task = field(default_factory=Task)

    def __repr__(self) -> str:
        about = self.about
        return f"LoadedModel {self.name}: {type(self.module).__name__} · {about['weights']} · {about['data']}"

    @property
    def about(self) -> dict[str, str]:
        """Description of model, weights and data, and of the family if known, for every output."""
        return {
            "model": self.name,
            "weights": self.provenance.description,
            "data": self.inputs.description,
            **({"family": self.family} if self.family else {}),
        }


def module_of(model: nn.Module | LoadedModel) -> nn.Module:
    """Return the module itself, or that of a loaded model; or UsageError."""
    module = model.module if isinstance(model, LoadedModel) else model
    if not hasattr(module, "state_dict"):
        raise UsageError(f"model is {module!r:.60}. Pass a torch.nn.Module, or what normscope.load returned.")
    return module


def _has(model: nn.Module, heads: tuple[str, ...]) -> bool:
    return any(base.__name__.endswith(heads) for base in type(unwrapped(model)).__mro__)


class InferredOutputs(Outputs):
    """Reader of a module's first tensor, whose kind its results determine: classes or tokens if it is logits.

    A mapping, as transformers' outputs are, names them; of a tuple the module's class does. Scores of a regression, or
    of labels that do not exclude one another, are no such logits.

    >>> outputs = InferredOutputs(nn.Linear(2, 2))
    >>> logits = outputs.read({"loss": torch.zeros(()), "logits": torch.zeros(3, 5, 9)}, Batch())
    >>> outputs.kind, logits.shape
    ('tokens', torch.Size([3, 5, 9]))
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(next((kind for kind, heads in _HEADS.items() if _has(model, heads)), "tensor"), self._first)
        self._problem = getattr(getattr(unwrapped(model), "config", None), "problem_type", None)

    def _first(self, result: Any, batch: Batch) -> Tensor:
        tensor = first_tensor(result, batch)
        if isinstance(result, Mapping) and tensor is result.get("logits"):
            self.kind = _OF_LOGITS.get(tensor.ndim, "tensor")
        if self._problem in ("regression", "multi_label_classification") or tensor.shape[-1] == 1:
            self.kind = "tensor"
        return tensor


def inferred_task(model: nn.Module) -> Task:
    """Return the task that the class of a module states: perplexity of transformers' causal language models."""
    return Task("perplexity") if _has(model, _CAUSAL) else Task()
