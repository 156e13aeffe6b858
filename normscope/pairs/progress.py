"""A capture under way: its sums, and the inputs that are in them; stored in checkpoints and merged over ranks."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import safetensors.torch
from torch import Tensor

from normscope.errors import DataError
from normscope.inputs.chunks import InputSet, LeftOut
from normscope.pairs.captures import Capture, added, shared_input
from normscope.pairs.ranks import Ranks, bytes_as_tensor
from normscope.pairs.storage import pack, unpack
from normscope.runtime.records import converted


@dataclass
class CaptureProgress:
    """A capture under way, and the inputs that are in it.

    Attributes:
        capture: its parts contain the sums so far, one part without a name among them; the whole is summed in the end.
        first: least number of an input of each part, by which parts are ordered.
        processed: inputs that are in the sums, or could not be read.
        left_out: inputs that reading omitted.
    """

    capture: Capture
    first: dict[str, int] = field(default_factory=dict)
    processed: InputSet = field(default_factory=InputSet)
    left_out: LeftOut = field(default_factory=LeftOut)

    def part(self, name: str, number: int) -> Capture:
        """Return a part of the data, to which an input of this number belongs."""
        self.first[name] = min(number, self.first.get(name, number))
        empty = replace(self.capture, skipped=[], stats={}, parts={}, inputs=())
        return self.capture.parts.setdefault(name, empty)

    def merge(self, other: CaptureProgress) -> CaptureProgress:
        """Return the progress of both, whose inputs differ."""
        least = {name: min(number, other.first.get(name, number)) for name, number in self.first.items()}
        merged = CaptureProgress(added(self.capture, other.capture), {**other.first, **least})
        for progress in (self, other):
            merged.processed.update(progress.processed)
            merged.left_out.add(progress.left_out)
        return merged


@dataclass(frozen=True)
class _Stored:
    """JSON that progress has besides its capture."""

    first: dict[str, int]
    unreadable: list[tuple[int, str]]
    cut: int


def pack_progress(progress: CaptureProgress) -> tuple[dict[str, Any], dict[str, Tensor]]:
    header, tensors = pack(progress.capture)
    unreadable = list(progress.left_out.unreadable.items())
    header |= {"first": progress.first, "unreadable": unreadable, "cut": progress.left_out.cut}
    return header, tensors | {"done": bytes_as_tensor(progress.processed.flags)}


def unpack_progress(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> CaptureProgress:
    stored = converted(_Stored, header, "progress")
    processed, left_out = InputSet(tensors["done"].numpy().tobytes()), LeftOut(dict(stored.unreadable), stored.cut)
    return CaptureProgress(unpack(header, tensors), stored.first, processed, left_out)


def merge_progress(progress: CaptureProgress, ranks: Ranks) -> CaptureProgress:
    """Return the progress of all ranks, which observe the same sites.

    Raises:
        DataError: if two ranks with batches of their own had the same input.
    """
    if ranks.size == 1:
        return progress
    header, tensors = pack_progress(progress)
    headers = ranks.gather(header)
    files = ranks.gather_bytes(safetensors.torch.save(tensors))
    parts = (unpack_progress(*part) for part in zip(headers, map(safetensors.torch.load, files), strict=True))
    return functools.reduce(_merged_apart if ranks.own_batches else CaptureProgress.merge, parts)


def _merged_apart(first: CaptureProgress, second: CaptureProgress) -> CaptureProgress:
    """Merge the progress of ranks with batches of their own."""
    for name, part in second.capture.parts.items():
        before = first.capture.parts.get(name)
        if before is not None and (common := shared_input(before, part)):
            raise DataError(
                f"Two ranks have captured {common}, which would be counted twice. Each rank passes its own batches; if "
                "ranks have the same on purpose, as in tensor parallelism, pass the ranks with different batches as "
                "group: mesh['dp'], or None if all have the same."
            )
    return first.merge(second)
