"""Batches of a network's inputs, with the origin of each sample: what models make and pairs consume."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from normscope.errors import count

if TYPE_CHECKING:
    import torch
    from torch import Tensor

logger = logging.getLogger(__name__)

# How to pass what a batch cannot be told from: lists of images, records, objects.
BY_HAND = (
    "Pass a normscope.Batch, which names its samples. With one sample in it, its arguments can be anything: "
    "normscope.Batch(args=(x,), samples=(normscope.Sample('image 7', source_index=7, index=7),)) calls forward(x). "
    "Or say how the model is run on what your loader gives: "
    "normscope.capture(model, loader, forward=lambda model, batch: …)."
)


@dataclass(frozen=True)
class Sample:
    """Identity of one sample. Intervals are honest only if samples of one source stay together.

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
        part: what a capture can keep apart besides the whole, ``timestep 980`` for example; empty for nothing.
        forward: runs the module on them, as ``forward(module, *args, **kwargs)``; None for ``module.forward`` itself.
        valid_within: the same as ``valid`` for parts of the network that count other positions, by the path of the
            module: of an encoder that hears, beside a decoder that writes.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()
    valid: Tensor | None = None
    part: str = ""
    forward: Callable[..., Any] | None = None
    valid_within: Mapping[str, Tensor | None] = field(default_factory=dict)

    def valid_at(self, path: str) -> Tensor | None:
        """Return which positions are data where the network counts as the module of this path does; None for all.

        >>> import torch
        >>> batch = Batch(valid=torch.ones(1, 4), valid_within={"encoder": torch.ones(1, 9)})
        >>> batch.valid_at("encoder.layers.0").shape, batch.valid_at("encoders").shape
        (torch.Size([1, 9]), torch.Size([1, 4]))
        """
        around = [module for module in self.valid_within if f"{path}.".startswith(f"{module}.")]
        return self.valid_within[max(around, key=len)] if around else self.valid

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
        def part(tensor: Tensor) -> Tensor:
            return tensor[which] if tensor.ndim > 0 and len(tensor) == len(self.samples) else tensor

        samples = self.samples[which] if isinstance(which, slice) else tuple(self.samples[i] for i in which)
        return replace(self._each(part, of_lists=self.forward is not None), samples=samples)

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
        """True if any position is padding; this waits for a mask on a GPU."""
        masks = [mask for mask in (self.valid, *self.valid_within.values()) if mask is not None]
        return not all(bool(mask.all()) for mask in masks)

    @property
    def divisible(self) -> bool:
        """True if every argument can be divided by samples, or serves any of them.

        A tensor that counts the samples has one; a number, a text or a tensor of another length serves any. A list of
        images, or an object of the user's own, is in no part.
        """
        import torch

        def counts(value: Any) -> bool:
            return isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == len(self.samples)

        values = list(leaves((*self.args, self.kwargs), of_lists=self.forward is not None))
        serving = (torch.Tensor, torch.dtype, torch.device, int, float, complex, str, bytes, type(None))
        return any(map(counts, values)) and all(isinstance(value, serving) for value in values)

    def to(self, device: torch.device, dtype: torch.dtype | None, kept: Container[torch.dtype] = ()) -> Batch:
        """Move every tensor to ``device``, and floating-point ones to ``dtype``; without waiting where pinned.

        Those of a dtype in ``kept`` stay in theirs, and all do where ``dtype`` is None.
        """

        def move(tensor: Tensor) -> Tensor:
            pinned = device.type == "cuda" and tensor.is_pinned()
            converts = dtype is not None and tensor.is_floating_point() and tensor.dtype not in kept
            return tensor.to(device, dtype if converts else tensor.dtype, non_blocking=pinned)

        return self._each(move)

    def pin_memory(self) -> Batch:
        """Copy every tensor into memory from which a GPU can fetch it while the CPU goes on."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Callable[[Tensor], Tensor], *, of_lists: bool = False) -> Batch:
        import torch

        def changed(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {key: changed(entry) for key, entry in value.items()}
            if of_lists and isinstance(value, (tuple, list)):  # one entry of a user's own loader
                make = getattr(type(value), "_make", type(value))  # of a namedtuple
                return make(map(changed, value))
            return change(value) if isinstance(value, torch.Tensor) else value

        args, kwargs = tuple(map(changed, self.args)), changed(self.kwargs)
        return replace(
            self, args=args, kwargs=kwargs, valid=changed(self.valid), valid_within=changed(self.valid_within)
        )


def leaves(values: Iterable[Any], *, of_lists: bool = False) -> Iterator[Any]:
    """Yield the values within arguments: the entries of mappings, of lists of numbers, and on request of all lists."""
    for value in values:
        if isinstance(value, Mapping):
            yield from leaves(value.values(), of_lists=of_lists)
        elif isinstance(value, (list, tuple)) and of_lists:
            yield from leaves(value, of_lists=True)
        elif isinstance(value, (list, tuple)) and all(isinstance(entry, (int, float, type(None))) for entry in value):
            yield from value
        else:
            yield value


def tensors_of(value: Any) -> list[Tensor]:
    """List the tensors of a batch, or of a value: of tuples, lists and mappings, those within."""
    if isinstance(value, Batch):
        value = [value.args, value.kwargs, value.valid, value.valid_within]
    return [tensor for _, tensor in tensors_at(value)]


def tensors_at(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Yield the tensors within tuples, lists and mappings, with the indices and keys that lead to them."""
    import torch

    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (Mapping, list, tuple)):
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from tensors_at(part, (*path, key))


def tensor_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor's elements, in order."""
    import torch

    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def joined(batches: Sequence[Batch]) -> list[Batch]:
    """Make one batch of several where their tensors allow it; else leave them as they are.

    >>> import torch
    >>> one = Batch((torch.zeros(1, 3),), samples=(Sample("a", 0, 0),))
    >>> [len(batch.samples) for batch in joined([one, one])]
    [2]
    """
    first = batches[0]
    if any(batch.kwargs.keys() != first.kwargs.keys() for batch in batches):
        return list(batches)
    if any(batch.valid_within.keys() != first.valid_within.keys() for batch in batches):
        return list(batches)
    try:
        args = tuple(_joined(values, batches) for values in zip(*(batch.args for batch in batches), strict=True))
        kwargs = {name: _joined([batch.kwargs[name] for batch in batches], batches) for name in first.kwargs}
        valid = _joined([batch.valid for batch in batches], batches)
        within = {at: _joined([batch.valid_within[at] for batch in batches], batches) for at in first.valid_within}
    except ValueError:
        return list(batches)
    samples = tuple(sample for batch in batches for sample in batch.samples)
    return [replace(first, args=args, kwargs=kwargs, samples=samples, valid=valid, part="", valid_within=within)]


def _joined(values: Sequence[Any], batches: Sequence[Batch]) -> Any:
    """Join one argument of several batches; ValueError where that cannot be done."""
    import torch

    first = values[0]
    if all(isinstance(value, torch.Tensor) for value in values) and first.ndim:
        whole = [len(value) == len(batch.samples) for value, batch in zip(values, batches, strict=True)]
        if all(whole) and len({(value.shape[1:], value.dtype, value.device) for value in values}) == 1:
            return torch.cat(list(values))
        if len({value.shape for value in values}) == 1 and all(bool((value == first).all()) for value in values):
            if any(whole):
                raise ValueError
            return first
        raise ValueError
    if any(isinstance(value, (torch.Tensor, Mapping)) for value in values) or any(value != first for value in values):
        raise ValueError
    return first


def copied_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return copies of the arguments of one call, see :meth:`Batch.copied`."""
    memo: dict[int, Any] = {}
    return tuple(_copied(value, memo) for value in args), {name: _copied(value, memo) for name, value in kwargs.items()}


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Copy a value once, by its identity; ``memo`` keeps what was copied, as :func:`copy.deepcopy` has it."""
    import torch

    if id(value) in memo:
        return memo[id(value)]
    copied: Any
    if isinstance(value, torch.Tensor):
        # A deep copy would copy all of the storage that a slice of a larger batch is a view of.
        copied = value.detach().clone()
        if value.requires_grad:
            copied.requires_grad_()
    elif isinstance(value, torch.nn.Module):
        copied = value
    elif type(value) is dict:
        copied = {key: _copied(entry, memo) for key, entry in value.items()}
    elif type(value) in (list, tuple):
        copied = type(value)(_copied(entry, memo) for entry in value)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        copied = type(value)._make(_copied(entry, memo) for entry in value)  # type: ignore[attr-defined]
    else:
        try:
            copied = copy.deepcopy(value, memo)
        except Exception:  # of an object of the user's own: a lock, an open file
            copied = value
    memo[id(value)] = copied
    return copied


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
        """Repeat the last piece in halves; later pieces have that size too."""
        self._at_most = len(piece.samples) // 2
        self._left.append((piece, note))
        logger.warning(
            "Memory ended with %s in a batch; from here on they are %s %d at a time.",
            count(len(piece.samples), "sample"),
            self._verb,
            self._at_most,
        )
