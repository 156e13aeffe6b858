"""What a swapped network learns: the outputs of the original and of its norms, on inputs in an order by a seed."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from normscope.errors import DataError
from normscope.inputs.batch import Batch
from normscope.inputs.entries import as_batches
from normscope.inputs.loaded_model import Outputs
from normscope.inputs.splits import learned_and_held_out
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


def pooled_loss(output: Tensor, wanted: Tensor, valid: Tensor | None) -> Tensor:
    """The relative L2 of all samples and positions together, so that none dominates."""
    if valid is not None and output.shape[:2] == valid.shape:
        kept = valid.to(output.device).view(*valid.shape, *[1] * (output.ndim - 2))
        output, wanted = output * kept, wanted * kept
    error: Tensor = vector_norm(output - wanted) / vector_norm(wanted).clamp_min(torch.finfo(torch.float32).tiny)
    return error


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


def tensors_in(result: Any) -> list[Tensor]:
    """List the floating-point tensors of what a module returned: of tuples and mappings, those within."""
    return [tensor for tensor in _tensors(result) if tensor.is_floating_point()]


MOST_TARGET_BYTES = 4 * 2**30  # of what the original gave, that is kept in memory


@dataclass(frozen=True)
class Target:
    """What the original gave for one batch, with copies: it may change them in place later.

    Attributes:
        output: of the network.
        of_sites: the tensors that each call of a norm gave, by the path of the norm.
    """

    output: Tensor
    of_sites: Mapping[str, list[Tensor]]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in (self.output, *(one for each in self.of_sites.values() for one in each)))


class Lessons:
    """The original and the swapped network side by side, on batches to learn from.

    What the original gives for them is computed once and kept, up to four gibibytes of it; beyond, whenever it is
    asked for.

    Args:
        original: taught by, without gradients.
        swapped: taught.
        outputs: how to read what they return.
        sites: paths of what was swapped, which is to give what the norms gave.
        batches: to learn from; those of one lesson, whose gradients are taken together, are one list.
    """

    def __init__(
        self,
        original: nn.Module,
        swapped: nn.Module,
        outputs: Outputs,
        sites: Sequence[str],
        batches: Sequence[Sequence[Batch]],
    ) -> None:
        self._original, self._swapped, self._outputs = original, swapped, outputs
        self._sites, self._batches = sites, batches
        # As they are now: every pass begins from them, and leaves them so.
        self._buffers = KeptBuffers(original), KeptBuffers(swapped)
        self._kept: dict[int, list[Target]] = {}
        self._bytes_left = MOST_TARGET_BYTES

    def __len__(self) -> int:
        """Return how many lessons there are."""
        return len(self._batches)

    def targets(self, number: int) -> list[Target]:
        """Return what the original gives for the batches of a lesson."""
        if number in self._kept:
            return self._kept[number]
        targets = [self._target(batch) for batch in self._batches[number]]
        size = sum(target.nbytes for target in targets)
        if size <= self._bytes_left:
            self._bytes_left -= size
            self._kept[number] = targets
        return targets

    @torch.no_grad()
    def _target(self, batch: Batch) -> Target:
        with _given(self._original, self._sites) as of_sites:
            output = self._outputs.read(run(self._original, batch), batch).clone()  # it may be a buffer
        self._buffers[0].put_back()
        return Target(output, of_sites)

    def gradients(self, number: int) -> float:
        """Add the gradients of the loss on a lesson, and return the loss.

        The loss is the relative L2 at the output, plus the mean over the sites of what they give: what norms gave says
        far more about an input than the few numbers at the end, so that fewer inputs do.
        """
        total, batches = 0.0, self._batches[number]
        samples = sum(len(batch.samples) for batch in batches)
        for batch, target in zip(batches, self.targets(number), strict=True):
            with torch.enable_grad():
                loss = self._loss(batch, target) * (len(batch.samples) / samples)
                loss.backward()  # type: ignore[no-untyped-call]
            self._buffers[1].put_back()  # no sooner: the gradients may hang on them
            total += float(loss.detach())
        return total

    def _loss(self, batch: Batch, target: Target) -> Tensor:
        with _given(self._swapped, self._sites) as of_sites:
            output = self._outputs.read(run(self._swapped, batch), batch)
        at_sites = [
            pooled_loss(given, wanted, batch.valid_at(path))
            for path, calls in target.of_sites.items()
            for given, wanted in zip(of_sites[path], calls, strict=True)
        ]
        loss = pooled_loss(output, target.output, batch.valid)
        return loss + torch.stack(at_sites).mean() if at_sites else loss


@contextlib.contextmanager
def _given(network: nn.Module, paths: Sequence[str]) -> Iterator[dict[str, list[Tensor]]]:
    """Record the tensors that some modules give, with copies, call by call."""
    seen: dict[str, list[Tensor]] = {}

    def keep(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, result: Any) -> None:
            seen.setdefault(path, []).extend(tensor.clone() for tensor in tensors_in(result))

        return hook

    with contextlib.ExitStack() as hooks:
        for path in paths:
            hooks.callback(network.get_submodule(path).register_forward_hook(keep(path)).remove)
        yield seen


MOST_BYTES = 2**30  # of inputs that are learned from
_MOST_JUDGED = 100  # samples that decide what is kept


def kept_in_memory(inputs: Iterable[Any]) -> tuple[list[Batch], int]:
    """Take batches, in order, up to a gibibyte of them; and count the samples that were left out.

    Raises:
        DataError: if there is no batch.
    """
    kept: list[Batch] = []
    size = left_out = 0
    for batch in as_batches(inputs):
        size += sum(tensor.nbytes for tensor in _tensors(batch))
        if kept and size > MOST_BYTES:
            left_out += len(batch.samples)
        else:
            kept.append(batch)
    if not kept:
        raise DataError("There is no batch to learn from.")
    return kept, left_out


@dataclass(frozen=True)
class Pool:
    """Inputs to learn from, and, apart from them, inputs that decide what is kept.

    Attributes:
        learned: batches to learn from.
        judged: batches that decide what is kept; other sources, where there are several.
        left_out: samples that did not fit into memory.
    """

    learned: Sequence[Batch]
    judged: Sequence[Batch]
    left_out: int

    @classmethod
    def of(cls, inputs: Iterable[Any]) -> Pool:
        """Take inputs, in order, up to a gibibyte, and divide them.

        Raises:
            DataError: if there are fewer than two samples.
        """
        kept, left_out = kept_in_memory(inputs)
        learned, judged = learned_and_held_out(kept)
        rest: list[Batch] = []
        while judged.n_samples > _MOST_JUDGED:
            batches = list(judged)
            more, judged = learned_and_held_out(batches)
            rest += more
        return cls([*learned, *rest], list(judged), left_out)

    @property
    def digest(self) -> str:
        """Hash of the inputs, by which a checkpoint recognizes them."""
        content = hashlib.blake2b(digest_size=16)
        for batch in (*self.learned, None, *self.judged):
            if batch is None:
                content.update(b"judged")
                continue
            for tensor in _tensors(batch):
                content.update(tensor_bytes(tensor))
        return content.hexdigest()


def steps_of(batches: Sequence[Batch], at_once: int, apart: int) -> list[list[Batch]]:
    """Divide batches among steps, in order.

    Args:
        batches: all of them.
        at_once: samples of a step, at least, where they can be joined and run in one pass.
        apart: the same where they cannot, as each pass takes its time.

    >>> from normscope.inputs.batch import Sample
    >>> ones = [Batch((torch.zeros(1, size),), samples=(Sample("a", 0, 0),)) for size in (3, 3, 3, 4, 3)]
    >>> [[batch.args[0].shape for batch in step] for step in steps_of(ones, 3, 2)]
    [[torch.Size([3, 3])], [torch.Size([1, 4]), torch.Size([1, 3])]]
    """
    steps: list[list[Batch]] = []
    for batch in batches:
        last = steps[-1] if steps else []
        samples = sum(len(one.samples) for one in last)
        both = joined([*last, batch]) if len(last) == 1 and samples < at_once else []
        if len(both) == 1:
            steps[-1] = both
        elif last and samples < apart:
            last.append(batch)
        else:
            steps.append([batch])
    return [[part for batch in step for part in by_length(batch)] for step in steps]


_OF_A_LENGTH = 3  # samples that are padded to the longest of them


def by_length(batch: Batch) -> list[Batch]:
    """Divide a padded batch into several, of samples of about one length, and cut off what is padding in all of each.

    Only where it is certain what is padding: where every tensor with several axes has the positions of ``valid``, as a
    tokenizer gives them. Other batches stay as they are.

    >>> from normscope.inputs.batch import Sample
    >>> valid = torch.arange(8) < torch.tensor([2, 8, 2, 3])[:, None]
    >>> texts = Batch((torch.ones(4, 8),), samples=tuple(Sample("a", 0, n) for n in range(4)), valid=valid)
    >>> [(batch.args[0].shape, [sample.index for sample in batch.samples]) for batch in by_length(texts)]
    [(torch.Size([3, 3]), [0, 2, 3]), (torch.Size([1, 8]), [1])]
    """
    valid = batch.valid
    if valid is None or batch.valid_within or batch.forward is not None or bool(valid.all()):
        return [batch]
    given = [tensor for tensor in _tensors([batch.args, batch.kwargs]) if tensor.ndim > 1]
    nested = any(isinstance(value, (Mapping, tuple, list)) for value in (*batch.args, *batch.kwargs.values()))
    if nested or not given or any(tensor.shape != valid.shape for tensor in given):
        return [batch]
    order = valid.sum(1).argsort(stable=True).tolist()
    return [_cut(batch.take(order[first : first + _OF_A_LENGTH])) for first in range(0, len(order), _OF_A_LENGTH)]


def _cut(batch: Batch) -> Batch:
    """Leave out the positions that are padding in all samples."""
    if batch.valid is None:
        return batch
    data, shape = batch.valid.any(0).nonzero().flatten(), batch.valid.shape

    def cut(value: Any) -> Any:
        return value[:, data.to(value.device)] if isinstance(value, Tensor) and value.shape == shape else value

    kwargs = {name: cut(value) for name, value in batch.kwargs.items()}
    return replace(batch, args=tuple(map(cut, batch.args)), kwargs=kwargs, valid=cut(batch.valid))


def drawn(seed: int, step: int, *, number: int) -> int:
    """Draw which of a number of lessons a step takes: all of them in a new order, again and again.

    The same seed and step give the same one, whatever was drawn before.

    >>> sorted(drawn(0, step, number=4) for step in range(4, 8))
    [0, 1, 2, 3]
    """
    key = hashlib.blake2b(f"{seed} {step // number}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key))
    return int(torch.randperm(number, generator=generator)[step % number])


def joined(batches: Sequence[Batch]) -> list[Batch]:
    """Make one batch of several where their tensors allow it; else leave them as they are.

    >>> from normscope.inputs.batch import Sample
    >>> one = Batch((torch.zeros(1, 3),), samples=(Sample("a", 0, 0),))
    >>> [len(batch.samples) for batch in joined([one, one])]
    [2]
    """
    try:
        args = tuple(_joined(values, batches) for values in zip(*(batch.args for batch in batches), strict=True))
        if len({frozenset(batch.kwargs) for batch in batches}) > 1:
            return list(batches)
        kwargs = {name: _joined([batch.kwargs[name] for batch in batches], batches) for name in batches[0].kwargs}
        valid = _joined([batch.valid for batch in batches], batches)
        if len({frozenset(batch.valid_within) for batch in batches}) > 1:
            return list(batches)
        within = {
            path: _joined([batch.valid_within[path] for batch in batches], batches) for path in batches[0].valid_within
        }
    except ValueError:
        return list(batches)
    samples = tuple(sample for batch in batches for sample in batch.samples)
    return [replace(batches[0], args=args, kwargs=kwargs, samples=samples, valid=valid, part="", valid_within=within)]


def tensor_bytes(tensor: Tensor) -> bytes:
    """The bytes of a tensor's elements, in order."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _joined(values: Sequence[Any], batches: Sequence[Batch]) -> Any:
    """Join one argument of several batches; ValueError where that cannot be done."""
    first = values[0]
    if all(isinstance(value, Tensor) for value in values) and first.ndim:
        whole = [len(value) == len(batch.samples) for value, batch in zip(values, batches, strict=True)]
        if all(whole) and len({(value.shape[1:], value.dtype, value.device) for value in values}) == 1:
            return torch.cat(list(values))
        if len({value.shape for value in values}) == 1 and all(bool((value == first).all()) for value in values):
            if any(whole):
                raise ValueError
            return first
        raise ValueError
    if any(isinstance(value, (Tensor, Mapping)) for value in values) or any(value != first for value in values):
        raise ValueError
    return first


def _tensors(value: Any) -> list[Tensor]:
    """List the tensors of a batch or of its arguments."""
    if isinstance(value, Batch):
        return _tensors([value.args, value.kwargs, value.valid, value.valid_within])
    if isinstance(value, Tensor):
        return [value]
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for part in values for tensor in _tensors(part)]
