"""as_batches(): batches of a network's arguments from the entries of a user's own loader."""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from normscope.errors import DataError
from normscope.inputs.batch import BY_HAND, Batch, Sample, leaves, tensor_bytes, tensors_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    Forward = Callable[[nn.Module, Any], Any]

logger = logging.getLogger(__name__)

# Words in the names of optional parameters that take a whole number for each sample: what looks like a label is none.
_WHOLE_NUMBERS = ("label", "target", "class", "length", "time", "step", "ids", "index", "position", "size", "num")
_COLOURS = (1, 3, 4)


def as_batches(
    batches: Iterable[Any], model: nn.Module | None = None, forward: Forward | None = None
) -> Iterator[Batch]:
    """Yield a :class:`Batch` for each tensor, tuple of arguments, dict of keyword arguments, or Batch.

    Of a tuple, ``model.forward`` gets as many entries as it takes, and of a dict those that it has names for: labels
    beside the inputs are left out, and a warning says so once. A list of images becomes a batch for each.

    The samples of anything but a Batch are numbered through, and each counts as a source of its own. What tells their
    data set from others is a hash of the first batch.

    Args:
        batches: any iterable, a DataLoader for example.
        model: whose ``forward`` decides; None to take every entry for an argument.
        forward: runs the model on an entry, whatever that is: ``forward(model, entry)``. Where all its tensors agree on
            their axis 0, that counts samples; otherwise, and where it is a list of images, an entry is one.

    Raises:
        DataError: if an entry is none of these, holds no tensor with an axis of samples or no sample, if its tensors
            disagree on the number of samples, or one of them is nested.

    >>> import torch
    >>> [batch.samples[-1].index for batch in as_batches([torch.zeros(2, 3), (torch.zeros(2, 3),)])]
    [1, 3]
    >>> labelled = [{"image": torch.zeros(2, 3), "label": torch.tensor([0, 1])}]
    >>> [(len(batch.args), list(batch.kwargs)) for batch in as_batches(labelled, torch.nn.Linear(3, 3))]
    [(1, [])]
    """
    return read(batches, ForwardSignature.of(model), forward)


def read(batches: Iterable[Any], signature: ForwardSignature, forward: Forward | None) -> Iterator[Batch]:
    """Yield batches as :func:`as_batches` does, for a network of this signature; warn once of omitted entries."""
    seen, data = 0, ""
    for number, entry in enumerate(batches):
        if isinstance(entry, Batch):
            _refuse_nested(entry.args, entry.kwargs, number)
            read: Iterable[Batch] = [entry]
        elif forward is not None:
            _refuse_nested((entry,), {}, number)
            read = [Batch((entry,), samples=(_UNNAMED,) * _n_samples(entry), forward=forward)]
        else:
            read = signature.read(entry, number)
        for batch in read:
            if not batch.samples:
                raise DataError(f"Batch {number} holds no sample.")
            if batch.samples[0] is _UNNAMED:
                data = data or _digest(batch)
                named = (Sample(f"sample {i}", i, i, data) for i in range(seen, seen + len(batch.samples)))
                batch = replace(batch, samples=tuple(named))
                seen += len(batch.samples)
            yield batch


_UNNAMED = Sample("", -1, -1)


def taken_once(batches: Iterable[Any]) -> bool:
    """True if batches can be iterated only once, as a generator can, or wrap such batches."""
    return isinstance(batches, Iterator) or bool(getattr(batches, "taken_once", False))


@dataclass
class ForwardSignature:
    """Signature of a network's forward.

    Attributes:
        name: of the network's class; empty where nothing is known of it.
        positional: the parameters that a tuple's entries go to, in order; None for any number.
        required: how many of them have no default.
        named: the parameters that a dict's entries go to; None for any name.
        warned: whether it has been said that something is left out.
    """

    name: str = ""
    positional: Sequence[str] | None = None
    required: int = 0
    named: frozenset[str] | None = None
    warned: bool = False

    @classmethod
    def of(cls, model: nn.Module | None) -> ForwardSignature:
        """Read the signature of ``model.forward``."""
        model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
        try:
            parameters = inspect.signature(model.forward).parameters.values()  # type: ignore[union-attr]
        except (AttributeError, TypeError, ValueError):  # no network, or a forward that is not written in Python
            return cls()
        kinds = {parameter.kind for parameter in parameters}
        places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        names = (p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD))
        return cls(
            type(model).__name__,
            None if inspect.Parameter.VAR_POSITIONAL in kinds else [p.name for p in places],
            sum(p.default is p.empty for p in places),
            None if inspect.Parameter.VAR_KEYWORD in kinds else frozenset(names),
        )

    def read(self, entry: Any, number: int) -> Iterable[Batch]:
        """Return the batches that an entry holds, their samples without names."""
        import torch

        if (images := _images(entry)) is not None:
            if len(entry) > 1 and entry is not images:
                self._leave_out("what comes beside the images")
            return [Batch(([image],), samples=(_UNNAMED,)) for image in images]
        args: tuple[Any, ...] = ()
        kwargs: Mapping[str, Any] = {}
        match entry:
            case torch.Tensor():
                args = (entry,)
            case tuple() | list():
                args = self._in_places(tuple(entry))
            case Mapping():
                args, kwargs = self._in_place(self._by_name(entry))
            case _:
                raise DataError(
                    f"Batch {number} is a {type(entry).__name__}; a batch is a tensor, a tuple of arguments, "
                    f"or a dict of keyword arguments. {BY_HAND}"
                )
        _refuse_nested(args, kwargs, number)
        return [Batch(args, kwargs, (_UNNAMED,) * len(_counting(args, kwargs, number)))]

    def _in_places(self, entries: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the entries of a tuple up to the first that forward takes none of, or only as what it is not."""
        if self.positional is None or len(entries) <= self.required:
            return entries
        taken = self.required
        for name, value in zip(self.positional[taken:], entries[taken:], strict=False):
            if _looks_like_labels(value) and not any(word in name.lower() for word in _WHOLE_NUMBERS):
                break
            taken += 1
        if taken < len(entries):
            self._leave_out(", ".join(f"entry {i} ({_kind(entries[i])})" for i in range(taken, len(entries))))
        return entries[:taken]

    def _by_name(self, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the entries of a dict without labels that forward has no name for."""
        if self.named is None:
            return entry
        labels = [name for name, value in entry.items() if name not in self.named and _looks_like_labels(value)]
        if labels:
            self._leave_out(", ".join(map(repr, labels)))
        return {name: value for name, value in entry.items() if name not in labels} if labels else entry

    def _in_place(self, entry: Mapping[str, Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return the one entry that forward has no name for as its one argument, and the others by name."""
        if self.named is None or self.required != 1 or self.positional is None or self.positional[0] in entry:
            return (), entry
        unnamed = [name for name in entry if name not in self.named]
        if len(unnamed) != 1:
            return (), entry
        return (entry[unnamed[0]],), {name: value for name, value in entry.items() if name != unnamed[0]}

    def _leave_out(self, what: str) -> None:
        if not self.warned and self.name:
            takes = " and ".join(self.positional or sorted(self.named or ())[:3]) or "what it takes"
            logger.warning(
                "Of each batch %s is left out: the forward of %s takes %s. To pass more, say how: "
                "forward=lambda model, batch: model(…).",
                what,
                self.name,
                takes,
            )
        self.warned = True


def _images(entry: Any) -> Sequence[Tensor] | None:
    """Return the images of a list of them, by themselves or before their targets, as detection takes them."""
    if not isinstance(entry, (list, tuple)) or not entry:
        return None
    if _all_images(entry[0]):
        images: Sequence[Tensor] = entry[0]
        return images
    # Of one size they are alike to arguments, which a list may hold as well.
    several_sizes = isinstance(entry, list) and _all_images(entry) and len({image.shape[1:] for image in entry}) > 1
    return entry if several_sizes and _have_colours(entry) else None


def _all_images(values: Any) -> bool:
    import torch

    listed = isinstance(values, (list, tuple)) and len(values) > 0
    return listed and all(isinstance(value, torch.Tensor) and value.ndim == 3 for value in values)


def _have_colours(images: Sequence[Tensor]) -> bool:
    return len({len(image) for image in images}) == 1 and len(images[0]) in _COLOURS


def _looks_like_labels(value: Any) -> bool:
    """True for whole numbers, one a sample, or values that are no tensor: classes, captions, boxes in dicts."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.ndim <= 1 and not value.is_floating_point()
    return isinstance(value, (int, str, list, tuple, Mapping))


def _kind(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" if shape is None else f"{str(value.dtype).removeprefix('torch.')} {tuple(shape)}"


def _n_samples(entry: Any) -> int:
    """Return how many samples an entry of any kind holds: what its tensors agree on, else one."""
    import torch

    if _all_images(entry) and _have_colours(entry):
        return 1
    sizes = {len(leaf) if leaf.ndim else 0 for leaf in leaves([entry], of_lists=True) if isinstance(leaf, torch.Tensor)}
    return sizes.pop() if len(sizes) == 1 and sizes != {0} else 1


def _refuse_nested(args: tuple[Any, ...], kwargs: Mapping[str, Any], number: int) -> None:
    """Refuse tensors that have no axes to tell samples and positions by."""
    import torch

    if any(isinstance(value, torch.Tensor) and value.is_nested for value in leaves((*args, kwargs), of_lists=True)):
        raise DataError(
            f"Batch {number} holds a nested tensor, of which norms see tokens of no known sample. Pad it, "
            "padded = x.to_padded_tensor(0.0), and say which positions are data, bool (samples, positions): "
            "normscope.Batch(args=(padded,), samples=samples, valid=valid), with a normscope.Sample for each sample."
        )


def _counting(args: tuple[Any, ...], kwargs: Mapping[str, Any], number: int) -> Tensor:
    """Return the tensor whose axis 0 counts samples."""
    import torch

    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.ndim]
    if not tensors:
        raise DataError(f"Batch {number} holds no tensor whose axis 0 counts samples. {BY_HAND}")
    counting = [tensor for tensor in tensors if len(tensor) != 1] or tensors  # an axis of one serves every sample
    if len({len(tensor) for tensor in counting}) > 1:
        sizes = " and ".join(str(size) for size in dict.fromkeys(len(tensor) for tensor in counting))
        raise DataError(
            f"The tensors of batch {number} have {sizes} entries along axis 0, so that it cannot be told how many "
            f"samples it holds. {BY_HAND}"
        )
    return counting[0]


def _digest(batch: Batch) -> str:
    """Return a hash of the first tensor of a batch that counts its samples, or of the first, if there is any."""
    values = list(leaves([*batch.args, batch.kwargs], of_lists=True))
    values += [value for record in values for value in leaves(getattr(record, "__dict__", {}).values(), of_lists=True)]
    tensors = tensors_of(values)
    counting = [tensor for tensor in tensors if tensor.ndim and len(tensor) == len(batch.samples)] or tensors
    content = b"".join(map(tensor_bytes, counting[:1]))
    return hashlib.blake2b(content, digest_size=8).hexdigest()
