"""What goes into a network: one batch of inputs, and for each of its samples where it came from.

The wing that makes batches (models) and the wing that consumes them (pairs) do not know each other; this is the
one word that they share.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from normscope.errors import DataError, count

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# How to pass what a batch cannot be told from: lists of images, records, objects.
BY_HAND = (
    "Pass a normscope.Batch, which names its samples. With one sample in it, its arguments can be anything: "
    "normscope.Batch(args=(x,), samples=(normscope.Sample('image 7', source_index=7, index=7),)) calls forward(x)."
)


@dataclass(frozen=True)
class Sample:
    """Identity of one sample: intervals are only honest when samples of one source stay together.

    Attributes:
        source: what is statistically independent of other sources: a photograph, a speaker, a text. The crops of
            one photograph are several samples of one source.
        source_index: number of the source within the data set.
        index: number of the sample within the data set.
        data: what tells the data set from others; sources of the same name in two data sets are two sources.
        label: what the sample is known to be, where it is: the number of its class, its word, or the score of the pair
            of sentences that it is one of.
    """

    source: str
    source_index: int
    index: int
    data: str = ""
    label: int | float | str | None = None


@dataclass(frozen=True)
class Batch:
    """Arguments of one forward pass, and the samples that they hold along axis 0 of their tensors.

    Attributes:
        args: positional arguments of ``module.forward``.
        kwargs: keyword arguments of ``module.forward``.
        samples: one :class:`Sample` for each entry of axis 0.
        valid: which positions of each sample are data and not padding: bool ``(samples, positions)``; None for all.
        part: what a capture keeps apart besides the whole, ``timestep 980`` for example; empty for nothing.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()
    valid: torch.Tensor | None = None
    part: str = ""

    def first_sample(self) -> Batch:
        """Return the batch that holds this batch's first sample alone."""
        return self.first(1)

    def first(self, number: int) -> Batch:
        """Return the batch that holds the first ``number`` of this batch's samples, or all where there are fewer."""
        return self._of(slice(number))

    def take(self, numbers: Sequence[int]) -> Batch:
        """Return the batch that holds some of this batch's samples, by their numbers within it; a range copies none."""
        if isinstance(numbers, range) and numbers.step == 1:
            return self._of(slice(numbers.start, numbers.stop))
        return self._of(list(numbers))

    def _of(self, which: slice | list[int]) -> Batch:
        import torch

        def part(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {key: part(own) for key, own in value.items()}
            whole = isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == len(self.samples)
            return value[which] if whole else value

        samples = self.samples[which] if isinstance(which, slice) else tuple(self.samples[i] for i in which)
        return replace(
            self,
            args=tuple(part(value) for value in self.args),
            kwargs=part(self.kwargs),
            samples=samples,
            valid=part(self.valid),
        )

    def copied(self) -> Batch:
        """Return the batch with copies of its arguments, so that it stays as it is whatever a network does to them.

        One tensor that stands in several places is one in the copy too. No gradient flows back to what was copied, and
        modules, and objects that cannot be copied, stay the same.

        >>> import torch
        >>> x = torch.ones(2)
        >>> lent = Batch((x, [x])).copied()
        >>> lent.args[0].mul_(2), lent.args[1], x
        (tensor([2., 2.]), [tensor([2., 2.])], tensor([1., 1.]))
        """
        args, kwargs = copied_arguments(self.args, self.kwargs)
        return replace(self, args=args, kwargs=kwargs)

    @property
    def padded(self) -> bool:
        """Whether any position is padding; of a mask on a GPU, that is waited for."""
        return self.valid is not None and not bool(self.valid.all())

    @property
    def divisible(self) -> bool:
        """Whether every argument is known to have a part for some samples, or to serve any of them.

        A tensor that counts the samples has one; a number, a text or a tensor of another length serves any. A list of
        images, or an object of the user's own, is in no part.
        """
        import torch

        def counts(value: Any) -> bool:
            return isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == len(self.samples)

        leaves = list(_leaves((*self.args, self.kwargs)))
        serving = (torch.Tensor, torch.dtype, torch.device, int, float, complex, str, bytes, type(None))
        return any(map(counts, leaves)) and all(isinstance(leaf, serving) for leaf in leaves)

    def to(self, device: torch.device, dtype: torch.dtype | None, kept: Container[torch.dtype] = ()) -> Batch:
        """Move every tensor to ``device``, and floating-point ones to ``dtype``; without waiting where pinned.

        Those of a dtype in ``kept`` stay in theirs, and all do where ``dtype`` is None.
        """

        def move(tensor: torch.Tensor) -> torch.Tensor:
            pinned = device.type == "cuda" and tensor.is_pinned()
            converts = dtype is not None and tensor.is_floating_point() and tensor.dtype not in kept
            return tensor.to(device, dtype if converts else tensor.dtype, non_blocking=pinned)

        return self._each(move)

    def pin_memory(self) -> Batch:
        """Copy every tensor into memory from which a GPU can fetch it while the CPU goes on."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        import torch

        def changed(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {key: changed(own) for key, own in value.items()}
            return change(value) if isinstance(value, torch.Tensor) else value

        return replace(
            self,
            args=tuple(changed(value) for value in self.args),
            kwargs=changed(self.kwargs),
            valid=changed(self.valid),
        )


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    """Yield what arguments hold: the entries of mappings, and of lists of plain numbers."""
    for value in values:
        if isinstance(value, Mapping):
            yield from _leaves(value.values())
        elif isinstance(value, (list, tuple)) and all(isinstance(one, (int, float, type(None))) for one in value):
            yield from value
        else:
            yield value


def copied_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return copies of the arguments of one call, see :meth:`Batch.copied`."""
    memo: dict[int, Any] = {}
    return tuple(_copied(value, memo) for value in args), {name: _copied(own, memo) for name, own in kwargs.items()}


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Copy a value once, by its identity; ``memo`` keeps what was copied, as :func:`copy.deepcopy` has it."""
    import torch

    if id(value) in memo:
        return memo[id(value)]
    made: Any
    if isinstance(value, torch.Tensor):
        # A deep copy would copy all of the memory that a part of a larger batch is a view of.
        made = value.detach().clone()
        if value.requires_grad:
            made.requires_grad_()
    elif isinstance(value, torch.nn.Module):
        made = value
    elif type(value) is dict:
        made = {key: _copied(own, memo) for key, own in value.items()}
    elif type(value) in (list, tuple):
        made = type(value)(_copied(own, memo) for own in value)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        made = type(value)._make(_copied(own, memo) for own in value)  # type: ignore[attr-defined]
    else:
        try:
            made = copy.deepcopy(value, memo)
        except Exception:  # of an object of the user's own: a lock, an open file
            made = value
    memo[id(value)] = made
    return made


_T = TypeVar("_T")


class Halving:
    """Batches in pieces that memory has room for: halved where it ends, and halves of them, then and from then on.

    >>> import torch
    >>> halving = Halving("taken")
    >>> batch = Batch((torch.zeros(5, 3),), samples=tuple(Sample("a", 0, i) for i in range(5)))
    >>> for piece, note in halving.pieces(batch, "new"):
    ...     print(len(piece.samples), note)
    ...     if len(piece.samples) > 2:
    ...         halving.halve(piece, "again")
    5 new
    2 again
    2 again
    1 again
    """

    def __init__(self, verb: str) -> None:
        """Keep what is done with the pieces, as the warning says it."""
        self._verb = verb
        self._at_most: int | None = None
        self._left: list[tuple[Batch, Any]] = []

    def pieces(self, batch: Batch, note: _T) -> Iterator[tuple[Batch, _T]]:
        """Yield the pieces of a batch in order, with the note of what they were cut from."""
        self._left = [(batch, note)]  # the next one last
        while self._left:
            piece, note = self._left.pop()
            number, step = len(piece.samples), self._at_most
            if step is None or number <= step or not piece.divisible:
                yield piece, note
                continue
            cuts = range(0, number, step)
            self._left += [(piece.take(range(cut, min(cut + step, number))), note) for cut in reversed(cuts)]

    def halve(self, piece: Batch, note: Any = None) -> None:
        """Take the piece that came last once more, in halves; what follows is cut so too."""
        self._at_most = len(piece.samples) // 2
        self._left.append((piece, note))
        logger.warning(
            "Memory ended with %s in a batch; from here on they are %s %d at a time.",
            count(len(piece.samples), "sample"),
            self._verb,
            self._at_most,
        )


def as_batches(batches: Iterable[Any]) -> Iterator[Batch]:
    """Yield a :class:`Batch` for each tensor, tuple of arguments, dict of keyword arguments, or Batch.

    An ``attention_mask`` of zeros and ones, ``(samples, positions)``, among the keyword arguments says which
    positions are padding, where the Batch does not say it itself. The samples of anything but a Batch are numbered
    through, and each counts as a source of its own. What tells their data set from others is a hash of the first batch.

    Raises:
        DataError: if an entry is none of these, holds no tensor with an axis of samples or no sample, if its tensors
            disagree on the number of samples, or one of them is nested.

    >>> import torch
    >>> [batch.samples[-1].index for batch in as_batches([torch.zeros(2, 3), (torch.zeros(2, 3),)])]
    [1, 3]
    """
    seen, data = 0, ""
    for number, entry in enumerate(batches):
        if isinstance(entry, Batch):
            _refuse_nested(entry.args, entry.kwargs, number)
            batch = entry
        else:
            args, kwargs, first = _arguments(entry, number)
            data = data or _digest(first)
            count = len(first)
            samples = tuple(Sample(f"sample {seen + i}", seen + i, seen + i, data) for i in range(count))
            seen += count
            batch = Batch(args, kwargs, samples)
        if not batch.samples:
            raise DataError(f"Batch {number} holds no sample.")
        yield replace(batch, valid=_valid(batch))


def _valid(batch: Batch) -> torch.Tensor | None:
    """Return which positions are data; None where nothing tells."""
    import torch

    mask = batch.kwargs.get("attention_mask")
    if batch.valid is not None or not isinstance(mask, torch.Tensor):
        return batch.valid
    if mask.ndim != 2 or len(mask) != len(batch.samples):  # of queries and keys, not of samples and positions
        return None
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise DataError(
            "An attention_mask of samples and positions holds other values than 0 and 1, so that it cannot be told "
            "which positions are padding. Say it in the valid of a normscope.Batch."
        )
    return mask != 0


def _refuse_nested(args: tuple[Any, ...], kwargs: Mapping[str, Any], number: int) -> None:
    """Refuse tensors that have no axes to tell samples and positions by."""
    import torch

    if any(isinstance(value, torch.Tensor) and value.is_nested for value in _leaves((*args, kwargs))):
        raise DataError(
            f"Batch {number} holds a nested tensor, of which norms see tokens of no known sample. Pad it, "
            "padded = x.to_padded_tensor(0.0), and say which positions are data, bool (samples, positions): "
            "normscope.Batch(args=(padded,), samples=samples, valid=valid), with a normscope.Sample for each sample."
        )


def _arguments(entry: Any, number: int) -> tuple[tuple[Any, ...], Mapping[str, Any], torch.Tensor]:
    """Tell positional from keyword arguments, and find the tensor whose axis 0 counts samples."""
    import torch

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    match entry:
        case torch.Tensor():
            args = (entry,)
        case tuple() | list():
            args = tuple(entry)
        case Mapping():
            kwargs = entry
        case _:
            raise DataError(
                f"Batch {number} is a {type(entry).__name__}; a batch is a tensor, a tuple of arguments, "
                f"or a dict of keyword arguments. {BY_HAND}"
            )
    _refuse_nested(args, kwargs, number)
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.ndim]
    if not tensors:
        raise DataError(f"Batch {number} holds no tensor whose axis 0 counts samples. {BY_HAND}")
    if any(tensor.is_meta for tensor in tensors):
        raise DataError(f"Batch {number} holds a tensor on the meta device, which has no values to run a model on.")
    counting = [tensor for tensor in tensors if len(tensor) != 1] or tensors  # an axis of one serves every sample
    if len({len(tensor) for tensor in counting}) > 1:
        sizes = " and ".join(str(size) for size in dict.fromkeys(len(tensor) for tensor in counting))
        raise DataError(
            f"The tensors of batch {number} have {sizes} entries along axis 0, so that it cannot be told how many "
            f"samples it holds. {BY_HAND}"
        )
    return args, kwargs, counting[0]


def _digest(tensor: torch.Tensor) -> str:
    import torch

    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(content, digest_size=8).hexdigest()
