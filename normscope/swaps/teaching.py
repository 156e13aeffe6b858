"""What a swapped network is taught by the original: the outputs of its blocks, and its output."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from normscope.batches import Batch, copied_arguments
from normscope.outputs import Outputs
from normscope.state import KeptBuffers, run
from normscope.swaps.matching import output_errors, pooled_loss, relative_errors, tensors_in, training_loss

_OF_BLOCKS = 2.0  # the weight of what blocks give beside what the network gives


@dataclass(frozen=True)
class Call:
    """One call of a block, as it was then: the network may go on to change in place what it was called with or gave.

    Attributes:
        args: positional arguments; none where they were not asked for.
        kwargs: keyword arguments, likewise.
        given: the floating-point tensors that it returned.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: list[Tensor]


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
                found = self.outputs.read(run(self.swapped, batch), batch)
                loss = training_loss(found, wanted, batch.valid)
                total += float(loss.detach()) / len(batches)
                hidden = [
                    _loss(mine.given, theirs.given, batch.valid)
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
            calls = [(path, call) for path, own in taught.calls.items() for call in own]
            for path, call in calls:
                with torch.enable_grad():
                    found = self.swapped.get_submodule(path)(*call.args, **call.kwargs)
                    loss = _loss(tensors_in(found), call.given, batch.valid)
                    (loss / len(batches)).backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach()) / len(calls) / len(batches)
            of_swapped.put_back()
        return total


@contextlib.contextmanager
def watched(network: nn.Module, blocks: Sequence[str], *, arguments: bool = False) -> Iterator[Watched]:
    """Note every call of some blocks of a network: what they gave, and where asked for what they were called with."""
    seen = Watched()
    entered: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {path: [] for path in blocks}

    def enter(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            entered[path].append(copied_arguments(args, kwargs))

        return hook

    def leave(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, result: Any) -> None:
            given = [tensor.clone() for tensor in tensors_in(result)]
            called_with = entered[path].pop() if arguments else ((), {})
            seen.calls.setdefault(path, []).append(Call(*called_with, given))

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
    """Keep the blocks that give the same again when called again as in a forward pass.

    One that fills a cache of its own gives something else; there is nothing to teach it by itself.
    """
    buffers = KeptBuffers(original)
    with watched(original, blocks, arguments=True) as seen:
        run(original, batch)
    buffers.put_back()
    kept = [path for path, calls in seen.calls.items() if all(_gives_it_again(original, path, call) for call in calls)]
    buffers.put_back()
    return kept


def _gives_it_again(original: nn.Module, path: str, call: Call) -> bool:
    wanted = call.given
    found = tensors_in(original.get_submodule(path)(*call.args, **call.kwargs))
    if not wanted or len(found) != len(wanted) or any(a.shape != b.shape for a, b in zip(found, wanted, strict=True)):
        return False
    # Not to the bit: kernels on a GPU may sum in another order.
    return all(float(relative_errors(a[None], b[None])) < 1e-3 for a, b in zip(found, wanted, strict=True))


def _loss(found: Sequence[Tensor], wanted: Sequence[Tensor], valid: Tensor | None) -> Tensor:
    pairs = zip(found, wanted, strict=True)
    return torch.stack([pooled_loss(mine, theirs.detach(), valid) for mine, theirs in pairs]).mean()
