"""How the elements of an output or of a norm's output lie as samples, positions and features."""

from __future__ import annotations

import torch
from torch import Tensor

from normscope.batches import Batch
from normscope.errors import DataError, ModelError
from normscope.outputs import Kind
from normscope.pairs.layouts import batch_axis

Arranged = tuple[Tensor, Tensor | None]  # (samples, positions, features), and which positions are data


def output_by_sample(output: Tensor, batch: Batch, kind: Kind) -> Arranged:
    """View a network's output, whose axis 0 counts samples, as ``(samples, positions, features)``.

    Positions are told apart where they mean something: in logits of tokens, in frames, and where padding lies there.

    Raises:
        ModelError: if axis 0 does not count the samples of the batch.
    """
    samples = len(batch.samples)
    if not output.ndim or len(output) != samples:
        raise ModelError(
            f"The output that is compared is {tuple(output.shape)}, but axis 0 has to count the samples, of which the "
            f"batch holds {samples}. Say with normscope.outputs.Outputs how to read it."
        )
    padded = batch.valid is not None and output.ndim > 2 and output.shape[1] == batch.valid.shape[1]
    if kind in ("tokens", "frames") or (kind == "tensor" and padded):
        return output.reshape(samples, output.shape[1], -1), batch.valid if padded else None
    return output.reshape(samples, 1, -1), None


class SiteLayout:
    """How the output of one norm site lies; it remembers where positions were found when it could be told.

    Args:
        path: of the site.
        of_one_sample: shape of its output of one sample; None where that is not known, and samples come first.
    """

    def __init__(self, path: str, of_one_sample: torch.Size | None) -> None:
        self.path, self.of_one_sample = path, of_one_sample
        self._position_axis: int | None = None

    def by_sample(self, output: Tensor, batch: Batch) -> Arranged:
        """View it as ``(samples, positions, features)``, with one position where nothing is padded.

        What does not grow with the number of samples belongs to each of them.

        Raises:
            DataError: if it cannot be told which of its elements are padding.
        """
        samples, valid = len(batch.samples), batch.valid
        positions = None if valid is None else valid.shape[1]
        axis: int | None = 0
        if self.of_one_sample is not None:
            axis = batch_axis(self.of_one_sample, output.shape, samples, positions)
        if axis is None or output.shape[axis] % samples:
            return output.reshape(1, 1, -1).expand(samples, -1, -1), None
        first = output.movedim(axis, 0)
        if len(first) != samples:  # several rows a sample: its windows, its heads or its positions
            first = first.reshape(samples, -1, *first.shape[1:])
        if valid is None or bool(valid.all()):
            return first.reshape(samples, 1, -1), None
        along = self._positions(first, valid)
        if along is None:
            return first.reshape(samples, 1, -1), None
        return first.movedim(along, 1).reshape(samples, valid.shape[1], -1), valid

    def _positions(self, first: Tensor, valid: Tensor) -> int | None:
        along = [axis for axis in range(1, first.ndim) if first.shape[axis] == valid.shape[1]]
        if len(along) == 1:
            self._position_axis = along[0]
        if along and self._position_axis not in along:
            raise DataError(
                f"At the norm {self.path} (output {tuple(first.shape)}) it cannot be told which elements are padding, "
                f"of {valid.shape[1]} positions. Pass samples of one length, or one at a time (--batch-size 1)."
            )
        return self._position_axis if along else None
