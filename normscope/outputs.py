"""What a network gives, told to whoever compares two networks by it.

The wing that knows the networks (models) and the wing that swaps their norms (swaps) do not know each other; this and
:class:`normscope.Batch` are the words that they share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from normscope.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

    from normscope.batches import Batch

Kind = Literal["classes", "tokens", "frames", "prediction", "tensor"]


def first_tensor(result: Any, batch: Batch) -> Tensor:
    """Return the tensor itself, or the first floating-point one of a tuple, of a mapping, or of a library's record.

    Raises:
        ModelError: if there is none.

    >>> import torch
    >>> from normscope.batches import Batch
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
    >>> from normscope.batches import Batch
    >>> without_variances((torch.zeros(2, 8, 4, 4),), Batch(kwargs={"hidden_states": torch.zeros(2, 4, 4, 4)})).shape
    torch.Size([2, 4, 4, 4])
    """
    return first_tensor(result, batch)[:, : batch.kwargs["hidden_states"].shape[1]]


@dataclass(frozen=True)
class Outputs:
    """How to read what a forward pass returned.

    Attributes:
        kind: what the tensor holds: logits of ``classes`` ``(samples, classes)``; logits of the next (or hidden)
            ``tokens`` ``(samples, positions, vocabulary)``; ``frames`` ``(samples, frames, features)``; the
            ``prediction`` of a diffusion model, like its latents; or a ``tensor`` of which nothing is known but that
            axis 0 counts samples.
        read: from what the module returned, and the batch, to that tensor.
    """

    kind: Kind = "tensor"
    read: Callable[[Any, Batch], Tensor] = first_tensor
