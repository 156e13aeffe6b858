"""The relative L2 between what two networks give, sample by sample: what learning goes by, and is judged by."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from normscope.inputs.batch import Batch
from normscope.inputs.loaded_model import Outputs
from normscope.runtime.network import KeptBuffers, run
from normscope.swaps.drift.distances import output_by_sample


def relative_errors(output: Tensor, wanted: Tensor, valid: Tensor | None = None) -> Tensor:
    """Relative L2 of each sample, ‖output − wanted‖ / ‖wanted‖ over all that is not padding.

    Args:
        output: ``(samples, …)``.
        wanted: likewise.
        valid: which positions are data, bool ``(samples, positions)``; None for all, and where the tensors do not have
            those positions.

    Returns:
        ``(samples,)``, in the dtype of ``output``, float32 at least.

    >>> relative_errors(torch.tensor([[3.0, 5.0], [1.0, 0.0]]), torch.tensor([[3.0, 4.0], [1.0, 0.0]]))
    tensor([0.2000, 0.0000])
    """
    inside = torch.promote_types(output.dtype, torch.float32)
    output, wanted = output.to(inside), wanted.to(inside)
    if valid is not None and output.shape[:2] == valid.shape:
        kept = valid.to(output.device).view(*valid.shape, *[1] * (output.ndim - 2))
        output, wanted = output * kept, wanted * kept
    norms = vector_norm(wanted.flatten(1), dim=1).clamp_min(torch.finfo(inside).tiny)
    errors: Tensor = vector_norm((output - wanted).flatten(1), dim=1) / norms
    return errors


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
        output = outputs.read(run(swapped, batch), batch).clone()
        for kept in buffers:
            kept.put_back()
        errors.append(relative_errors(output, wanted, batch.valid).double().cpu())
    return torch.cat([torch.zeros(0, dtype=torch.float64), *errors]).nan_to_num(nan=torch.inf)
