"""Errors at the output that calibration and healing minimize: KL divergence of logits, relative L2 of other outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from normscope.inputs.batch import Batch
from normscope.inputs.loaded_model import Kind, Outputs
from normscope.runtime.network import SavedBuffers, run
from normscope.swaps.distances import kl_at_positions, output_by_sample

KL, RELATIVE_L2 = "KL divergence", "relative L2"
MOST_OUTPUT_BYTES = 2**30  # of the original's outputs that are kept in memory


def relative_errors(output: Tensor, target: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return ‖output − target‖ / ‖target‖ of each sample ``(samples, …)`` without padding, in float32 at least.

    >>> relative_errors(torch.tensor([[3.0, 5.0], [1.0, 0.0]]), torch.tensor([[3.0, 4.0], [1.0, 0.0]]))
    tensor([0.2000, 0.0000])
    """
    inside = torch.promote_types(output.dtype, torch.float32)
    output, target = (without_padding(values.to(inside), valid) for values in (output, target))
    norms = vector_norm(target.flatten(1), dim=1).clamp_min(torch.finfo(inside).tiny)
    errors: Tensor = vector_norm((output - target).flatten(1), dim=1) / norms
    return errors


def without_padding(values: Tensor, valid: Tensor | None) -> Tensor:
    """Put zeros in place of padding if the mask has the first axes ``(samples, positions)`` of the values."""
    if valid is None or values.ndim < 3 or values.shape[:2] != valid.shape:
        return values
    return values * valid.to(values.device).view(*valid.shape, *[1] * (values.ndim - 2))


def kl_divergences(output: Tensor, target: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return KL(target ‖ output) of logits ``(samples, …, classes)`` in nats, the mean over a sample's valid positions.

    >>> target, output = torch.zeros(1, 2, 2), torch.tensor([[[1.0, 3.0], [9.0, 0.0]]]).log()
    >>> kl_divergences(output, target, torch.tensor([[True, False]]))  # ½ log(½ / ¼) + ½ log(½ / ¾)
    tensor([0.1438])
    """
    inside = torch.promote_types(output.dtype, torch.float32)
    if valid is None or output.shape[:2] != valid.shape:
        valid = torch.ones(len(output), 1, dtype=torch.bool).expand(-1, output[0].numel() // output.shape[-1])
    divergences = []
    for mine, theirs, kept in zip(output, target, valid.to(output.device), strict=True):  # few logits at a time
        a, b = (x.reshape(-1, x.shape[-1])[kept].to(inside) for x in (theirs, mine))
        divergences.append(kl_at_positions(a, b).mean())
    return torch.stack(divergences)


def measure_of(kind: Kind) -> str:
    """Return the name of the error for outputs of a kind: KL divergence for logits.

    >>> measure_of("tokens"), measure_of("frames")
    ('KL divergence', 'relative L2')
    """
    return KL if kind in ("classes", "tokens") else RELATIVE_L2


def output_errors(original: nn.Module, swapped: nn.Module, batches: Iterable[Batch], outputs: Outputs) -> Tensor:
    """Return the errors of :class:`OutputErrors` for batches that need not fit into memory together."""
    errors = (OutputErrors(original, [batch], outputs).of(swapped) for batch in batches)
    return torch.cat([torch.zeros(0, dtype=torch.float64), *errors])


@dataclass
class OutputErrors:
    """Errors of networks at the output, relative to an original, for batches in memory.

    The original's outputs are computed when first needed, and a gibibyte of them is kept. Passes leave the batches, and
    the buffers of the networks, unchanged.
    """

    original: nn.Module
    batches: Sequence[Batch]
    outputs: Outputs

    def __post_init__(self) -> None:
        self._kept: dict[int, Tensor] = {}
        self._bytes_left = MOST_OUTPUT_BYTES

    def of(self, swapped: nn.Module) -> Tensor:
        """Return the error of each sample: float64 ``(samples,)`` on the CPU; ∞ if it is not finite.

        Raises:
            ModelError: if axis 0 of the output does not count the samples.
        """
        errors = [torch.zeros(0, dtype=torch.float64)]
        for number, batch in enumerate(self.batches):
            target = self._target(number)  # of which the kind of outputs may be inferred
            measure = kl_divergences if measure_of(self.outputs.kind) == KL else relative_errors
            errors.append(measure(self._output(swapped, batch), target, batch.valid).double().cpu())
        return torch.cat(errors).nan_to_num(nan=torch.inf)

    def _target(self, number: int) -> Tensor:
        if number in self._kept:
            return self._kept[number]
        batch = self.batches[number]
        output = self._output(self.original, batch)
        output_by_sample(output, batch, self.outputs.kind)  # raises ModelError without an axis of samples
        if output.nbytes <= self._bytes_left:
            self._bytes_left -= output.nbytes
            self._kept[number] = output
        return output

    @torch.no_grad()
    def _output(self, network: nn.Module, batch: Batch) -> Tensor:
        buffers = SavedBuffers(network)
        output = self.outputs.read(run(network, batch), batch).clone()  # it may be a buffer
        buffers.restore()
        return output
