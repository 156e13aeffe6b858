"""What a swapped network learns: the outputs of the original and of its blocks, on inputs drawn by a seed."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from normscope.errors import DataError
from normscope.inputs.batch import Batch, copied_arguments
from normscope.inputs.entries import as_batches
from normscope.inputs.loaded_model import Outputs
from normscope.inputs.splits import learned_and_held_out
from normscope.runtime.network import KeptBuffers, run
from normscope.swaps.drift.distances import output_by_sample

_LEAST_OF_TYPICAL = 0.1  # of the batch's root mean square norm: a sample of almost nothing must not lead the training


def relative_errors(output: Tensor, wanted: Tensor, valid: Tensor | None = None, *, least: float = 0.0) -> Tensor:
    """Relative L2 of each sample, ‖output − wanted‖ / ‖wanted‖ over all that is not padding.

    Args:
        output: ``(samples, …)``.
        wanted: likewise.
        valid: which positions are data, bool ``(samples, positions)``; None for all, and where the tensors do not have
            those positions.
        least: the smallest ‖wanted‖ to divide by, as a share of its root mean square over the samples.

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
    norms = vector_norm(wanted.flatten(1), dim=1)
    floor = least * norms.square().mean().sqrt() + torch.finfo(inside).tiny
    errors: Tensor = vector_norm((output - wanted).flatten(1), dim=1) / norms.clamp_min(floor)
    return errors


def training_loss(output: Tensor, wanted: Tensor, valid: Tensor | None) -> Tensor:
    """The mean relative L2 over the samples; samples of almost no norm are divided by a tenth of a typical one."""
    return relative_errors(output, wanted, valid, least=_LEAST_OF_TYPICAL).mean()


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


_OF_BLOCKS = 2.0  # the weight of what blocks give beside what the network gives


@dataclass(frozen=True)
class Call:
    """One call of a block, with copies: the network may change its arguments and outputs in place later.

    Attributes:
        args: positional arguments; none where they were not asked for.
        kwargs: keyword arguments, likewise.
        outputs: the floating-point tensors that it returned.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Tensor]


@dataclass
class Watched:
    """What the blocks of a network did in the last forward pass, by path."""

    calls: dict[str, list[Call]] = field(default_factory=dict)


@dataclass(frozen=True)
class Lesson:
    """The original and the swapped network, side by side.

    Attributes:
        original: taught by, without gradients.
        swapped: taught.
        outputs: how to read what they return.
        blocks: paths of the blocks whose outputs are to be alike.
    """

    original: nn.Module
    swapped: nn.Module
    outputs: Outputs
    blocks: Sequence[str]

    @functools.cached_property
    def buffers(self) -> tuple[KeptBuffers, KeptBuffers]:
        """The buffers of both as they are now: every pass begins from them, and leaves them so."""
        return KeptBuffers(self.original), KeptBuffers(self.swapped)

    def errors(self, batches: Iterable[Batch]) -> Tensor:
        """Return how far the outputs lie apart, sample by sample, see :func:`output_errors`."""
        return output_errors(self.original, self.swapped, batches, self.outputs)

    def whole(self, batches: Sequence[Batch]) -> float:
        """Add the gradients of the loss at the output, and of that at the blocks; return the former.

        The blocks' own outputs say more about an input than the few numbers at the end, so that fewer inputs do.
        """
        total = 0.0
        of_original, of_swapped = self.buffers
        for batch in batches:
            with torch.no_grad(), watched(self.original, self.blocks) as taught:
                wanted = self.outputs.read(run(self.original, batch), batch).clone()  # it may be a buffer
                of_original.put_back()
            with torch.enable_grad(), watched(self.swapped, self.blocks) as learned:
                output = self.outputs.read(run(self.swapped, batch), batch)
                loss = training_loss(output, wanted, batch.valid)
                total += float(loss.detach()) / len(batches)
                hidden = [
                    _loss(mine.outputs, theirs.outputs, batch.valid_at(path))
                    for path, calls in taught.calls.items()
                    for mine, theirs in zip(learned.calls[path], calls, strict=True)
                ]
                if hidden:
                    loss = loss + _OF_BLOCKS * torch.stack(hidden).mean()
                (loss / len(batches)).backward()  # type: ignore[no-untyped-call]
            of_swapped.put_back()  # no sooner: the gradients may hang on them
        return total

    def by_blocks(self, batches: Sequence[Batch]) -> float:
        """Add the gradients of every block by itself, called as the original called its own; return the mean loss."""
        total = 0.0
        of_original, of_swapped = self.buffers
        for batch in batches:
            with torch.no_grad(), watched(self.original, self.blocks, arguments=True) as taught:
                run(self.original, batch)
                of_original.put_back()
            calls = [(path, call) for path, of_block in taught.calls.items() for call in of_block]
            for path, call in calls:
                with torch.enable_grad():
                    output = self.swapped.get_submodule(path)(*call.args, **call.kwargs)
                    loss = _loss(tensors_in(output), call.outputs, batch.valid_at(path))
                    (loss / len(batches)).backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach()) / len(calls) / len(batches)
            of_swapped.put_back()
        return total


@contextlib.contextmanager
def watched(network: nn.Module, blocks: Sequence[str], *, arguments: bool = False) -> Iterator[Watched]:
    """Record every call of some blocks: their outputs, and with ``arguments`` what they were called with."""
    seen = Watched()
    entered: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {path: [] for path in blocks}

    def enter(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            entered[path].append(copied_arguments(args, kwargs))

        return hook

    def leave(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, result: Any) -> None:
            outputs = [tensor.clone() for tensor in tensors_in(result)]
            called_with = entered[path].pop() if arguments else ((), {})
            seen.calls.setdefault(path, []).append(Call(*called_with, outputs))

        return hook

    with contextlib.ExitStack() as hooks:
        for path in blocks:
            block = network.get_submodule(path)
            if arguments:
                hooks.callback(block.register_forward_pre_hook(enter(path), with_kwargs=True).remove)
            hooks.callback(block.register_forward_hook(leave(path)).remove)
        yield seen


@torch.no_grad()
def repeatable(original: nn.Module, blocks: Sequence[str], batch: Batch) -> list[str]:
    """The blocks that give the same output when called again with the same arguments.

    A block that fills a cache gives something else, and cannot be trained by itself.
    """
    buffers = KeptBuffers(original)
    with watched(original, blocks, arguments=True) as seen:
        run(original, batch)
    buffers.put_back()
    kept = [path for path, calls in seen.calls.items() if all(_gives_it_again(original, path, call) for call in calls)]
    buffers.put_back()
    return kept


def _gives_it_again(original: nn.Module, path: str, call: Call) -> bool:
    wanted = call.outputs
    again = tensors_in(original.get_submodule(path)(*call.args, **call.kwargs))
    if not wanted or len(again) != len(wanted) or any(a.shape != b.shape for a, b in zip(again, wanted, strict=True)):
        return False
    # Not to the bit: kernels on a GPU may sum in another order.
    return all(float(relative_errors(a[None], b[None])) < 1e-3 for a, b in zip(again, wanted, strict=True))


def _loss(outputs: Sequence[Tensor], wanted: Sequence[Tensor], valid: Tensor | None) -> Tensor:
    pairs = zip(outputs, wanted, strict=True)
    return torch.stack([pooled_loss(mine, theirs.detach(), valid) for mine, theirs in pairs]).mean()


MOST_BYTES = 2**30  # of inputs that are learned from
BATCHES_A_STEP = 4
_MOST_JUDGED = 100  # samples that decide which steps are kept


@dataclass(frozen=True)
class Pool:
    """Inputs to learn from, and, apart from them, inputs that decide which steps are kept.

    Attributes:
        learned: batches to take steps on.
        judged: batches that decide which steps are kept; other sources, where there are several.
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
        learned, judged = learned_and_held_out(kept)
        rest: list[Batch] = []
        while judged.n_samples > _MOST_JUDGED:
            batches = list(judged)
            more, judged = learned_and_held_out(batches)
            rest += more
        return cls([*learned, *rest], list(judged), left_out)

    def drawn(self, seed: int, stage: str, step: int) -> list[Batch]:
        """Draw the batches of a step: the same for the same seed, stage and step, whatever was drawn before."""
        key = hashlib.blake2b(f"{seed} {stage} {step}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key))
        chosen = torch.randperm(len(self.learned), generator=generator)[:BATCHES_A_STEP]
        return joined([self.learned[number] for number in chosen.tolist()])

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
