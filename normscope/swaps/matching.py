"""How far outputs lie from others, sample by sample; and modules' results read and compared where they hold data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from normscope.batches import Batch
from normscope.outputs import Outputs
from normscope.state import KeptBuffers, run
from normscope.swaps.arrange import output_by_sample

_LEAST_OF_TYPICAL = 0.1  # of the batch's root mean square norm: a sample of almost nothing must not lead the training


def relative_errors(found: Tensor, wanted: Tensor, valid: Tensor | None = None, *, least: float = 0.0) -> Tensor:
    """Relative L2 of each sample, ‖found − wanted‖ / ‖wanted‖ over all that is not padding.

    Args:
        found: ``(samples, …)``.
        wanted: likewise.
        valid: which positions are data, bool ``(samples, positions)``; None for all, and where the tensors do not have
            those positions.
        least: the smallest ‖wanted‖ to divide by, as a share of its root mean square over the samples.

    Returns:
        ``(samples,)``, in the dtype of what was found, float32 at least.

    >>> relative_errors(torch.tensor([[3.0, 5.0], [1.0, 0.0]]), torch.tensor([[3.0, 4.0], [1.0, 0.0]]))
    tensor([0.2000, 0.0000])
    """
    inside = torch.promote_types(found.dtype, torch.float32)
    found, wanted = found.to(inside), wanted.to(inside)
    if valid is not None and found.shape[:2] == valid.shape:
        kept = valid.to(found.device).view(*valid.shape, *[1] * (found.ndim - 2))
        found, wanted = found * kept, wanted * kept
    norms = vector_norm(wanted.flatten(1), dim=1)
    floor = least * norms.square().mean().sqrt() + torch.finfo(inside).tiny
    errors: Tensor = vector_norm((found - wanted).flatten(1), dim=1) / norms.clamp_min(floor)
    return errors


def training_loss(found: Tensor, wanted: Tensor, valid: Tensor | None) -> Tensor:
    """Return the mean relative L2 over the samples; samples of almost no norm count by what is typical of others."""
    return relative_errors(found, wanted, valid, least=_LEAST_OF_TYPICAL).mean()


def pooled_loss(found: Tensor, wanted: Tensor, valid: Tensor | None) -> Tensor:
    """Return the relative L2 of all samples and positions together, by which none of them leads the others."""
    if valid is not None and found.shape[:2] == valid.shape:
        kept = valid.to(found.device).view(*valid.shape, *[1] * (found.ndim - 2))
        found, wanted = found * kept, wanted * kept
    error: Tensor = vector_norm(found - wanted) / vector_norm(wanted).clamp_min(torch.finfo(torch.float32).tiny)
    return error


@torch.no_grad()
def output_errors(original: nn.Module, swapped: nn.Module, batches: Iterable[Batch], outputs: Outputs) -> Tensor:
    """Return the relative L2 at the output of every sample: float64 ``(samples,)`` on the CPU, ∞ where not finite.

    Every pass begins from the buffers that the networks have now, and leaves them and its batch so.

    Raises:
        ModelError: if axis 0 of the output does not count the samples.
    """
    errors: list[Tensor] = []
    buffers = [KeptBuffers(network) for network in (original, swapped)]
    for batch in batches:
        wanted = outputs.read(run(original, batch), batch).clone()  # it may be a buffer
        output_by_sample(wanted, batch, outputs.kind)  # which refuses what has no axis of samples
        found = outputs.read(run(swapped, batch), batch).clone()
        for own in buffers:
            own.put_back()
        errors.append(relative_errors(found, wanted, batch.valid).double().cpu())
    return torch.cat([torch.zeros(0, dtype=torch.float64), *errors]).nan_to_num(nan=torch.inf)


def tensors_in(result: Any) -> list[Tensor]:
    """List the floating-point tensors of what a module returned: of tuples and mappings, those within."""
    if isinstance(result, Tensor):
        return [result] if result.is_floating_point() else []
    values = result.values() if isinstance(result, Mapping) else result if isinstance(result, (tuple, list)) else ()
    return [tensor for value in values for tensor in tensors_in(value)]
