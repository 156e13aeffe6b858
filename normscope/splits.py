"""Inputs divided into those to learn from and those held out, source by source.

Whatever is fitted or trained is judged on other inputs; crops of one photograph are not other inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from normscope.batches import Batch, Sample, as_batches
from normscope.errors import DataError, count
from normscope.shares import Chunk, LeftOut, Share

if TYPE_CHECKING:
    from torch import Tensor

_ONE_IN = 4  # sources is held out

_Key = tuple[str, str | int]


class Inputs(Protocol):
    """Batches that say what they are; iterating again gives the same batches again.

    Attributes:
        batch_size: how many inputs are read together, at most. Setting it changes what comes next.
        left_out: what the latest iteration could not read, or has cut.
    """

    batch_size: int
    left_out: LeftOut

    @property
    def description(self) -> str:
        """One line that says what was read."""

    @property
    def n_samples(self) -> int | None:
        """How many samples there are at most; None where only iterating would tell."""

    @property
    def n_inputs(self) -> int | None:
        """How many inputs there are; None where only iterating would tell."""

    def __iter__(self) -> Iterator[Batch]:
        """Yield all batches; DataError at the end where there was none."""

    def chunks(self, share: Share) -> Iterator[Chunk]:
        """Yield the chunks of one process's share, and note in ``left_out`` what of them could not be read."""

    def first_sample(self) -> Batch:
        """Return the first sample that can be read, whoever's share it is in; DataError where there is none."""


@dataclass(frozen=True)
class Part:
    """Some of the samples of other inputs, in batches; to be iterated again and again, as they can be.

    Attributes:
        inputs: all of them.
        description: what they are, and which part this is.
        by: what was kept together: ``source`` or ``sample``.
        n_samples: number of samples of this part.
    """

    inputs: Iterable[Any]
    description: str
    by: str
    n_samples: int
    _keys: frozenset[_Key]

    def __iter__(self) -> Iterator[Batch]:
        for batch in as_batches(self.inputs):
            own = [i for i, sample in enumerate(batch.samples) if _key(sample, self.by) in self._keys]
            if own:
                yield batch if len(own) == len(batch.samples) else batch.take(own)

    @property
    def ends(self) -> Callable[[], Iterator[tuple[Sequence[Sample], Tensor]]] | None:
        """What walks this part's trajectories to their ends; None where the inputs are none, or are a single one's."""
        walk = getattr(self.inputs, "ends", None)
        return None if walk is None or self.by != "source" else lambda: self._own(walk())

    def _own(self, ends: Iterable[tuple[Sequence[Sample], Tensor]]) -> Iterator[tuple[Sequence[Sample], Tensor]]:
        for samples, latents in ends:
            own = [i for i, sample in enumerate(samples) if _key(sample, self.by) in self._keys]
            if own:
                yield [samples[i] for i in own], latents[own]


def divided(inputs: Inputs, calibration: Inputs | None = None) -> tuple[Inputs | Part, Inputs | Part]:
    """Return what to learn from, and what to judge by: calibration and inputs, or two parts of the inputs.

    Args:
        inputs: of a :class:`normscope.models.base.LoadedModel`.
        calibration: likewise.

    Raises:
        DataError: see :func:`learned_and_held_out`.
    """
    return learned_and_held_out(inputs) if calibration is None else (calibration, inputs)


def learned_and_held_out(inputs: Iterable[Any]) -> tuple[Part, Part]:
    """Divide inputs: every fourth source is held out, and the last one where there are fewer than four.

    Of a single source the samples are divided instead, and the descriptions say so. The inputs are gone through once,
    to see what there is.

    Args:
        inputs: batches as :func:`normscope.capture` takes them, that can be iterated more than once: a list, or the
            inputs of a :class:`normscope.models.base.LoadedModel`.

    Raises:
        DataError: if there are fewer than two samples, or if the inputs cannot be iterated again.

    >>> import torch
    >>> learned, held_out = learned_and_held_out([torch.zeros(4, 8), torch.zeros(4, 8)])
    >>> learned.n_samples, held_out.n_samples
    (6, 2)
    """
    if iter(inputs) is inputs:
        raise DataError(
            "The inputs can be iterated only once, and a part of them has to be held out; pass a list of batches."
        )
    samples = [sample for batch in as_batches(inputs) for sample in batch.samples]
    by = "source" if len({_key(sample, "source") for sample in samples}) > 1 else "sample"
    keys = list(dict.fromkeys(_key(sample, by) for sample in samples))
    if len(keys) < 2:
        raise DataError(
            f"The inputs hold {count(len(keys), 'sample')}; to learn from some and hold others out takes two at least."
        )
    held = frozenset(keys[_ONE_IN - 1 :: _ONE_IN] or keys[-1:])
    return (
        _part(inputs, samples, by, frozenset(keys) - held, "to learn from"),
        _part(inputs, samples, by, held, "held out"),
    )


def _part(inputs: Iterable[Any], samples: Sequence[Sample], by: str, keys: frozenset[_Key], which: str) -> Part:
    number = sum(_key(sample, by) in keys for sample in samples)
    of_one = "" if by == "source" else ", all of one source"
    described = f"{getattr(inputs, 'description', 'inputs')} · {number} of {len(samples)} samples {which}{of_one}"
    return Part(inputs, described, by, number, keys)


def _key(sample: Sample, by: str) -> _Key:
    return sample.data, sample.source if by == "source" else sample.index
