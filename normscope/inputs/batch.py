"""Batches of a network's inputs, with the origin of each sample; also from the entries of a user's own loader."""

from __future__ import annotations

import copy
import hashlib
import inspect
import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, IterableDataset

from normscope.errors import DataError, UsageError, count
from normscope.inputs.wrappers import unwrapped

Forward = Callable[[nn.Module, Any], Any]

logger = logging.getLogger(__name__)

# Words in the names of optional parameters that take a whole number per sample, which is therefore no label.
_WHOLE_NUMBERS = ("label", "target", "class", "len", "time", "step", "ids", "index", "position", "size", "num")
_COLOUR_CHANNELS = (1, 3, 4)

# Remedy for entries that cannot become batches: lists of images, records, objects.
BY_HAND = (
    "Pass a function that runs the model on an entry of your loader: "
    "normscope.capture(model, loader, forward=lambda model, batch: …). Or pass a normscope.Batch, which names its "
    "samples and, with one sample, can contain anything: "
    "normscope.Batch(args=(x,), samples=(normscope.inputs.batch.Sample('image 7', source_index=7, index=7),))."
)


@dataclass(frozen=True)
class Sample:
    """Identity of one sample.

    Attributes:
        source: name of the statistically independent unit: a photograph (of several crops), a speaker, a text.
            Intervals are honest only if samples of one source stay together.
        source_index: number of the source within the data set.
        index: number of the sample within the data set.
        data: identity of the data set; sources of the same name in two data sets are two sources.
        label: number of its class, its word, or the score of its pair of sentences, if known.
    """

    source: str
    source_index: int
    index: int
    data: str = ""
    label: int | float | str | None = None


_UNNAMED = Sample("", -1, -1)


@dataclass(frozen=True)
class Batch:
    """Arguments of one forward pass, and the samples along axis 0 of their tensors.

    Attributes:
        args: positional arguments of ``module.forward``.
        kwargs: keyword arguments of ``module.forward``.
        samples: one :class:`Sample` for each entry of axis 0.
        valid: True at positions of data, False at padding: bool ``(samples, positions)``; None for data alone.
        part: name under which a capture may sum the batch separately, such as ``timestep 980``; may be empty.
        forward: runs the module on them, as ``forward(module, *args, **kwargs)``; None for ``module.forward`` itself.
        valid_within: ``valid`` of parts of the network with other positions, by the path of the module: of an audio
            encoder beside a text decoder.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()
    valid: Tensor | None = None
    part: str = ""
    forward: Callable[..., Any] | None = None
    valid_within: Mapping[str, Tensor | None] = field(default_factory=dict)

    def valid_at(self, path: str) -> Tensor | None:
        """Return :attr:`valid` for the module of a path; None for data alone.

        >>> batch = Batch(valid=torch.ones(1, 4), valid_within={"encoder": torch.ones(1, 9)})
        >>> batch.valid_at("encoder.layers.0").shape, batch.valid_at("encoders").shape
        (torch.Size([1, 9]), torch.Size([1, 4]))
        """
        around = [module for module in self.valid_within if f"{path}.".startswith(f"{module}.")]
        return self.valid_within[max(around, key=len)] if around else self.valid

    def first_sample(self) -> Batch:
        return self.first(1)

    def first(self, number: int) -> Batch:
        """Return a batch of the first ``number`` samples, or of all if there are fewer."""
        return self.take(range(min(number, len(self.samples))))

    def take(self, numbers: Sequence[int]) -> Batch:
        """Return a batch of some samples, by their numbers within this one; a range copies none."""
        selection: slice | list[int] = list(numbers)
        if isinstance(numbers, range) and numbers.step == 1:
            selection = slice(numbers.start, numbers.stop)

        def taken(tensor: Tensor) -> Tensor:
            return tensor[selection] if tensor.ndim > 0 and len(tensor) == len(self.samples) else tensor

        samples = self.samples[selection] if isinstance(selection, slice) else tuple(self.samples[i] for i in selection)
        return replace(self.each(taken, of_lists=self.forward is not None), samples=samples)

    def copied(self) -> Batch:
        """Return the batch with copies of its arguments, which a network may then modify in place.

        A tensor in several arguments is one in the copy too, and detached. Modules, and objects that cannot be copied,
        stay the same.

        >>> x = torch.ones(2)
        >>> lent = Batch((x, [x])).copied()
        >>> lent.args[0].mul_(2), lent.args[1], x
        (tensor([2., 2.]), [tensor([2., 2.])], tensor([1., 1.]))
        """
        # A deep copy of a tensor copies the whole storage that a slice of a larger batch is a view of.
        memo: dict[int, Any] = {
            id(tensor): tensor.detach().clone().requires_grad_(tensor.requires_grad)
            for tensor in tensors_of([self.args, self.kwargs])
        }
        values = leaves((*self.args, self.kwargs), of_lists=True)
        memo |= {id(value): value for value in values if hasattr(value, "state_dict")}

        def copied(value: Any) -> Any:
            try:
                return copy.deepcopy(value, memo)
            except Exception:  # of an object of the user's own: a lock, an open file
                return value

        kwargs = {name: copied(value) for name, value in self.kwargs.items()}
        return replace(self, args=tuple(map(copied, self.args)), kwargs=kwargs)

    @property
    def padded(self) -> bool:
        """True if any position is padding; this waits for a mask on a GPU."""
        masks = [mask for mask in (self.valid, *self.valid_within.values()) if mask is not None]
        return not all(bool(mask.all()) for mask in masks)

    @property
    def divisible(self) -> bool:
        """True if every argument can be divided by samples, or serves any of them.

        A number, a text or a tensor of another length serves any; a list of images, or an object, cannot be divided.
        """
        values = list(leaves((*self.args, self.kwargs), of_lists=self.forward is not None))
        serving = (torch.Tensor, torch.dtype, torch.device, int, float, complex, str, bytes, type(None))
        sizes = [len(value) for value in values if isinstance(value, torch.Tensor) and value.ndim]
        return len(self.samples) in sizes and all(isinstance(value, serving) for value in values)

    def to(self, device: torch.device, dtype: torch.dtype | None, kept: Container[torch.dtype] = ()) -> Batch:
        """Move every tensor to ``device``, without waiting if pinned, and floating-point ones to ``dtype`` unless None.

        Tensors of a dtype in ``kept`` are not converted.
        """

        def move(tensor: Tensor) -> Tensor:
            pinned = device.type == "cuda" and tensor.is_pinned()
            converts = dtype is not None and tensor.is_floating_point() and tensor.dtype not in kept
            return tensor.to(device, dtype if converts else tensor.dtype, non_blocking=pinned)

        return self.each(move)

    def pin_memory(self) -> Batch:
        """Copy every tensor into pinned memory, for asynchronous copies to a GPU."""
        return self.each(lambda tensor: tensor.pin_memory())

    def each(self, change: Callable[[Tensor], Tensor], *, of_lists: bool = False) -> Batch:
        """Return the batch with another tensor in place of each; ``of_lists`` for those within lists too."""

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
    """Yield the values within arguments: of mappings, of lists of numbers, and with ``of_lists`` of all lists."""
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
    """List the tensors of a batch, or within tuples, lists and mappings."""
    if isinstance(value, Batch):
        value = [value.args, value.kwargs, value.valid, value.valid_within]
    return [tensor for _, tensor in tensors_at(value)]


def tensors_at(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Yield the tensors within tuples, lists and mappings, with the indices and keys that lead to them."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (Mapping, list, tuple)):
        for key, entry in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from tensors_at(entry, (*path, key))


def tensor_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def joined(batches: Sequence[Batch]) -> list[Batch]:
    """Join several batches into one if their tensors allow it; else return them as they are.

    >>> one = Batch((torch.zeros(1, 3),), samples=(Sample("a", 0, 0),))
    >>> [len(batch.samples) for batch in joined([one, one])]
    [2]
    """
    first = batches[0]
    if len({(frozenset(batch.kwargs), frozenset(batch.valid_within)) for batch in batches}) > 1:
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
    first = values[0]
    if all(isinstance(value, torch.Tensor) for value in values) and first.ndim:
        whole = [len(value) == len(batch.samples) for value, batch in zip(values, batches, strict=True)]
        if all(whole) and len({(value.shape[1:], value.dtype, value.device) for value in values}) == 1:
            return torch.cat(list(values))
        same = len({value.shape for value in values}) == 1 and all(bool((value == first).all()) for value in values)
        if same and not any(whole):
            return first
    elif not any(isinstance(value, (torch.Tensor, Mapping)) or value != first for value in values):
        return first
    raise ValueError


_T = TypeVar("_T")


class Halving:
    """Batches in pieces that memory has room for: halved where it ends, and so from then on.

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
        self._verb = verb
        self._at_most: int | None = None
        self._stack: list[tuple[Batch, Any]] = []

    def pieces(self, batch: Batch, note: _T) -> Iterator[tuple[Batch, _T]]:
        """Yield the pieces of a batch in order, each with a note of the caller's."""
        self._stack = [(batch, note)]
        while self._stack:
            piece, note = self._stack.pop()
            number = len(piece.samples)
            size = self._at_most or number
            if number <= size or not piece.divisible:
                yield piece, note
            else:
                firsts = reversed(range(0, number, size))
                self._stack += [(piece.take(range(first, min(first + size, number))), note) for first in firsts]

    def halve(self, piece: Batch, note: Any = None) -> None:
        """Repeat the last piece in halves; later pieces have that size too."""
        self._at_most, number = len(piece.samples) // 2, count(len(piece.samples), "sample")
        self._stack.append((piece, note))
        form = "Memory ended with %s in a batch; from here on they are %s %d at a time."
        logger.warning(form, number, self._verb, self._at_most)


def as_batches(
    batches: Iterable[Any], model: nn.Module | None = None, forward: Forward | None = None
) -> Iterator[Batch]:
    """Yield a :class:`Batch` for each tensor, tuple of arguments, dict of keyword arguments, or Batch.

    ``model.forward`` gets as many entries of a tuple as it takes, and those of a dict that it has names for: labels
    beside the inputs are omitted, with one warning. A list of images becomes a batch for each.

    Samples without a Batch are numbered, each as a source of its own; a hash of the first batch identifies the data.

    Args:
        batches: any iterable, a DataLoader for example.
        model: its ``forward`` selects the entries; None to pass all of them.
        forward: runs the model on any entry: ``forward(model, entry)``. Axis 0 counts samples if all tensors of an
            entry agree on it; otherwise, and for a list of images, an entry is one sample.

    Raises:
        DataError: if an entry is none of these, contains no sample, its tensors disagree on the number of samples, or
            one of them is nested.
        UsageError: if ``batches`` is a single tensor, dict or Batch.

    >>> [batch.samples[-1].index for batch in as_batches([torch.zeros(2, 3), (torch.zeros(2, 3),)])]
    [1, 3]
    >>> labelled = [{"image": torch.zeros(2, 3), "label": torch.tensor([0, 1])}]
    >>> [(len(batch.args), list(batch.kwargs)) for batch in as_batches(labelled, torch.nn.Linear(3, 3))]
    [(1, [])]
    """
    return read(batches, ForwardSignature.of(model), forward)


def read(batches: Iterable[Any], signature: ForwardSignature, forward: Forward | None) -> Iterator[Batch]:
    """Yield batches as :func:`as_batches` does, for a network of this signature; warn once of omitted entries."""
    check_several(batches)
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
                raise DataError(f"Batch {number} contains no sample.")
            if batch.samples[0] is _UNNAMED:
                data = data or _digest(batch)
                named = (Sample(f"sample {i}", i, i, data) for i in range(seen, seen + len(batch.samples)))
                batch = replace(batch, samples=tuple(named))
                seen += len(batch.samples)
            yield batch


def check_several(batches: object) -> None:
    """Refuse a single batch, whose rows or keys would be taken for several; UsageError."""
    if isinstance(batches, (Batch, Mapping)) or hasattr(batches, "__array__"):  # of tensors and NumPy
        shape = "".join(f" {tuple(size)}" for size in [getattr(batches, "shape", ())] if size)
        batch = "torch.from_numpy(X)" if type(batches).__module__ == "numpy" else "X"
        raise UsageError(
            f"The batches are a single {type(batches).__name__}{shape}, X. Pass a list of them: [{batch}]."
        )
    if _has_single_samples(batches):
        raise UsageError(
            f"The batches are a {type(batches).__name__} of single samples. Pass torch.utils.data.DataLoader(dataset, "
            "batch_size=8), or, if its entries are batches, iter(…) of it."
        )
    if isinstance(batches, str) or not (hasattr(batches, "__iter__") or hasattr(batches, "chunks")):
        raise UsageError(f"The batches are {batches!r:.60}. Pass an iterable of batches, [x] of a single one x.")


def _has_single_samples(batches: Any) -> bool:
    """True for a data set of samples by number, or a DataLoader that does not batch them."""
    if getattr(batches, "batch_sampler", batches) is None and hasattr(batches, "dataset"):
        return not isinstance(batches.dataset, IterableDataset) and not isinstance(batches.sampler, BatchSampler)
    return hasattr(batches, "__getitem__") and not hasattr(batches, "__iter__")


def taken_once(batches: Iterable[Any]) -> bool:
    """True if batches can be iterated only once, as a generator can, or wrap such batches."""
    return isinstance(batches, Iterator) or bool(getattr(batches, "taken_once", False))


@dataclass
class ForwardSignature:
    """Signature of a network's forward."""

    name: str = ""  # of the network's class, if known
    positional: Sequence[str] | None = None  # parameters for a tuple's entries, in order; None for any number
    required: int = 0  # of them, without a default
    named: frozenset[str] | None = None  # parameters for a dict's entries; None for any name
    warned: bool = False  # of omitted entries

    @classmethod
    def of(cls, model: nn.Module | None) -> ForwardSignature:
        """Read the signature of ``model.forward``."""
        model = None if model is None else unwrapped(model)
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
        """Return the batches of an entry, their samples without names."""
        if (images := _images(entry)) is not None:
            if len(entry) > 1 and entry is not images:
                self._warn("what comes beside the images")
            return [Batch(([image],), samples=(_UNNAMED,)) for image in images]
        args: tuple[Any, ...] = ()
        kwargs: Mapping[str, Any] = {}
        if isinstance(entry, torch.Tensor) or type(entry).__module__ == "numpy":
            args = (entry,)
        elif isinstance(entry, (tuple, list)):
            args = self._in_order(tuple(entry))
        elif isinstance(entry, Mapping):
            args, kwargs = self._by_name(entry)
        else:
            raise DataError(
                f"Batch {number} is a {type(entry).__name__}; a batch is a tensor, a tuple of arguments, "
                f"or a dict of keyword arguments. {BY_HAND}"
            )
        _refuse_nested(args, kwargs, number)
        return [Batch(args, kwargs, (_UNNAMED,) * _count_samples(args, kwargs, number))]

    def _in_order(self, entries: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the entries of a tuple for the parameters of forward, up to the first label that it does not take."""
        if self.positional is None or len(entries) <= self.required:
            return entries
        taken = self.required
        for name, value in zip(self.positional[taken:], entries[taken:], strict=False):
            if _looks_like_labels(value) and not any(word in name.lower() for word in _WHOLE_NUMBERS):
                break
            taken += 1
        if taken < len(entries):
            self._warn(", ".join(f"entry {i} ({_kind(entries[i])})" for i in range(taken, len(entries))))
        return entries[:taken]

    def _by_name(self, entry: Mapping[str, Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return the arguments of a dict, without labels that forward has no name for.

        A single entry under another name is the single argument that forward requires.
        """
        if self.named is None:
            return (), entry
        unnamed = [name for name in entry if name not in self.named]
        labels = [name for name in unnamed if _looks_like_labels(entry[name])]
        if labels:
            self._warn(", ".join(map(repr, labels)))
        kwargs = {name: value for name, value in entry.items() if name not in labels}
        unnamed = [name for name in unnamed if name not in labels]
        if self.required != 1 or self.positional is None or self.positional[0] in entry or len(unnamed) != 1:
            return (), kwargs
        return (kwargs.pop(unnamed[0]),), kwargs

    def _warn(self, omitted: str) -> None:
        if not self.warned and self.name:
            takes = " and ".join(self.positional or sorted(self.named or ())[:3]) or "what it takes"
            logger.warning(
                "Of each batch %s is left out: the forward of %s takes %s. To pass more, use "
                "forward=lambda model, batch: model(…).",
                omitted,
                self.name,
                takes,
            )
        self.warned = True


def _images(entry: Any) -> Sequence[Tensor] | None:
    """Return the images of a list of them, by themselves or before their targets, as detection takes them."""
    if not isinstance(entry, (list, tuple)) or not entry:
        return None
    if _are_images(entry[0]):
        images: Sequence[Tensor] = entry[0]
        return images
    # Images of one size look like arguments, which a list may contain as well.
    several_sizes = isinstance(entry, list) and _are_images(entry) and len({image.shape[1:] for image in entry}) > 1
    return entry if several_sizes and _have_colours(entry) else None


def _are_images(values: Any) -> bool:
    listed = isinstance(values, (list, tuple)) and len(values) > 0
    return listed and all(isinstance(value, torch.Tensor) and value.ndim == 3 for value in values)


def _have_colours(images: Sequence[Tensor]) -> bool:
    return len({len(image) for image in images}) == 1 and len(images[0]) in _COLOUR_CHANNELS


def _looks_like_labels(value: Any) -> bool:
    """True for whole numbers, one a sample, or values that are no tensor: classes, captions, boxes in dicts."""
    if isinstance(value, torch.Tensor):
        return value.ndim <= 1 and not value.is_floating_point()
    return isinstance(value, (int, str, list, tuple, Mapping))


def _kind(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" if shape is None else f"{str(value.dtype).removeprefix('torch.')} {tuple(shape)}"


def _n_samples(entry: Any) -> int:
    """Return the number of samples of an entry of any kind: the size on which its tensors agree, else one."""
    if _are_images(entry) and _have_colours(entry):
        return 1
    sizes = {len(leaf) if leaf.ndim else 0 for leaf in leaves([entry], of_lists=True) if isinstance(leaf, torch.Tensor)}
    return sizes.pop() if len(sizes) == 1 and sizes != {0} else 1


def _refuse_nested(args: tuple[Any, ...], kwargs: Mapping[str, Any], number: int) -> None:
    if any(isinstance(value, torch.Tensor) and value.is_nested for value in leaves((*args, kwargs), of_lists=True)):
        raise DataError(
            f"Batch {number} contains a nested tensor, whose tokens belong to no known sample. Pad it, "
            "padded = x.to_padded_tensor(0.0), and mark the positions of data, bool (samples, positions): "
            "normscope.Batch(args=(padded,), samples=samples, valid=valid), with one inputs.batch.Sample for each."
        )


def _count_samples(args: tuple[Any, ...], kwargs: Mapping[str, Any], number: int) -> int:
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.ndim]
    if not tensors:
        arrays = any(type(value).__module__ == "numpy" for value in (*args, *kwargs.values()))
        remedy = "Pass its arrays as tensors: torch.from_numpy(x)." if arrays else BY_HAND
        raise DataError(f"Batch {number} has no tensor whose axis 0 counts samples. {remedy}")
    counting = [tensor for tensor in tensors if len(tensor) != 1] or tensors  # an axis of one serves every sample
    if len({len(tensor) for tensor in counting}) > 1:
        sizes = " and ".join(str(size) for size in dict.fromkeys(len(tensor) for tensor in counting))
        raise DataError(
            f"The tensors of batch {number} have {sizes} entries along axis 0, so the number of its samples is "
            f"unknown. {BY_HAND}"
        )
    return len(counting[0])


def _digest(batch: Batch) -> str:
    """Return a hash of the first tensor of a batch that counts its samples, or of the first, if there is any."""
    values = list(leaves([*batch.args, batch.kwargs], of_lists=True))
    values += [value for record in values for value in leaves(getattr(record, "__dict__", {}).values(), of_lists=True)]
    tensors = tensors_of(values)
    counting = [tensor for tensor in tensors if tensor.ndim and len(tensor) == len(batch.samples)] or tensors
    content = b"".join(map(tensor_bytes, counting[:1]))
    return hashlib.blake2b(content, digest_size=8).hexdigest()
