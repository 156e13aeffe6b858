"""Output errors, sample by sample: KL divergence of logits, relative L2 of everything else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from normscope.inputs.batch import Batch
from normscope.inputs.loaded_model import Kind, Outputs
from normscope.runtime.network import KeptBuffers, run
from normscope.swaps.drift.distances import output_by_sample

KL, RELATIVE_L2 = "KL divergence", "relative L2"


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
    if valid is not None and output.ndim > 2 and output.shape[:2] == valid.shape:
        kept = valid.to(output.device).view(*valid.shape, *[1] * (output.ndim - 2))
        output, wanted = output * kept, wanted * kept
    norms = vector_norm(wanted.flatten(1), dim=1).clamp_min(torch.finfo(inside).tiny)
    errors: Tensor = vector_norm((output - wanted).flatten(1), dim=1) / norms
    return errors


def kl_divergences(output: Tensor, wanted: Tensor, valid: Tensor | None = None) -> Tensor:
    """KL(wanted ‖ output) of logits in nats, the mean over each sample's positions that are not padding.

    Args:
        output: ``(samples, …, classes)``.
        wanted: likewise.
        valid: as for :func:`relative_errors`.

    Returns:
        ``(samples,)``, in the dtype of ``output``, float32 at least.

    >>> wanted, output = torch.zeros(1, 2, 2), torch.tensor([[[1.0, 3.0], [9.0, 0.0]]]).log()
    >>> kl_divergences(output, wanted, torch.tensor([[True, False]]))  # ½ log(½ / ¼) + ½ log(½ / ¾)
    tensor([0.1438])
    """
    inside = torch.promote_types(output.dtype, torch.float32)
    if valid is None or output.shape[:2] != valid.shape:
        valid = torch.ones(len(output), 1, dtype=torch.bool).expand(-1, output[0].numel() // output.shape[-1])
    found = []
    for mine, theirs, kept in zip(output, wanted, valid.to(output.device), strict=True):  # few logits at a time
        a, b = (x.reshape(-1, x.shape[-1])[kept].to(inside).log_softmax(-1) for x in (theirs, mine))
        found.append((a.exp() * (a - b)).sum(-1).clamp_min(0).mean())  # rounding may pass Gibbs' inequality
    return torch.stack(found)


def measure_of(kind: Kind) -> str:
    """Name the error by which outputs of a kind are judged: logits by what they say of each class, not by their size.

    >>> measure_of("tokens"), measure_of("frames")
    ('KL divergence', 'relative L2')
    """
    return KL if kind in ("classes", "tokens") else RELATIVE_L2


def errors_by_kind(output: Tensor, wanted: Tensor, batch: Batch, kind: Kind) -> Tensor:
    """Return the error of each sample's output that :func:`measure_of` names: ``(samples,)``."""
    return (kl_divergences if measure_of(kind) == KL else relative_errors)(output, wanted, batch.valid)


def output_errors(original: nn.Module, swapped: nn.Module, batches: Iterable[Batch], outputs: Outputs) -> Tensor:
    """Return the error at the output of every sample: float64 ``(samples,)`` on the CPU, ∞ where not finite.

    Every pass begins from the buffers that the networks have now, and leaves them and its batch so.

    Raises:
        ModelError: if axis 0 of the output does not count the samples.
    """
    errors = (OutputErrors(original, [batch], outputs).of(swapped) for batch in batches)
    return torch.cat([torch.zeros(0, dtype=torch.float64), *errors])


MOST_OUTPUT_BYTES = 2**30  # of what the original gave, that is kept in memory


class OutputErrors:
    """What a network gives for some batches, computed once, and how far from that others are.

    Args:
        original: the network; called when it is first needed, and for outputs beyond a gibibyte again each time.
        batches: in memory; each is taken as :func:`normscope.swaps.drift.output_errors.output_errors` takes it.
        outputs: how to read what the networks return.
    """

    def __init__(self, original: nn.Module, batches: Sequence[Batch], outputs: Outputs) -> None:
        self._original, self._batches, self._outputs = original, batches, outputs
        self._kept: dict[int, Tensor] = {}
        self._bytes_left = MOST_OUTPUT_BYTES

    def of(self, swapped: nn.Module) -> Tensor:
        """Return the error at the output of every sample: float64 ``(samples,)`` on the CPU, ∞ where not finite.

        Raises:
            ModelError: if axis 0 of the output does not count the samples.
        """
        errors = [torch.zeros(0, dtype=torch.float64)]
        for number, batch in enumerate(self._batches):
            wanted = self._wanted(number)
            errors.append(errors_by_kind(self._given(swapped, batch), wanted, batch, self._outputs.kind).double().cpu())
        return torch.cat(errors).nan_to_num(nan=torch.inf)

    def _wanted(self, number: int) -> Tensor:
        if number in self._kept:
            return self._kept[number]
        batch = self._batches[number]
        wanted = self._given(self._original, batch)
        output_by_sample(wanted, batch, self._outputs.kind)  # which refuses what has no axis of samples
        if wanted.nbytes <= self._bytes_left:
            self._bytes_left -= wanted.nbytes
            self._kept[number] = wanted
        return wanted

    @torch.no_grad()
    def _given(self, network: nn.Module, batch: Batch) -> Tensor:
        buffers = KeptBuffers(network)
        given = self._outputs.read(run(network, batch), batch).clone()  # it may be a buffer
        buffers.put_back()
        return given
