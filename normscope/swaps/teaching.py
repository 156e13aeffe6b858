"""What a swapped network is taught by the original: the outputs of its blocks, and its output."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from normscope.batches import Batch
from normscope.outputs import Outputs
from normscope.swaps.matching import output_errors, pooled_loss, relative_errors, tensors_in, training_loss

_OF_BLOCKS = 2.0  # the weight of what blocks give beside what the network gives


@dataclass(frozen=True)
class Call:
    """One call of a block: its arguments and what it returned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


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

    def errors(self, batches: Iterable[Batch]) -> Tensor:
        """Return how far the outputs lie apart, sample by sample, see :func:`output_errors`."""
        return output_errors(self.original, self.swapped, batches, self.outputs)

    def whole(self, batches: Sequence[Batch]) -> float:
        """Add the gradients of the loss at the output, and of that at the blocks; return the former.

        The blocks' own outputs say more about an input than the few numbers at the end, so that fewer inputs do.
        """
        total = 0.0
        for batch in batches:
            with torch.no_grad(), watched(self.original, self.blocks) as taught:
                wanted = self.outputs.read(self.original(*batch.args, **batch.kwargs), batch)
            with torch.enable_grad(), watched(self.swapped, self.blocks) as learned:
                found = self.outputs.read(self.swapped(*batch.args, **batch.kwargs), batch)
                loss = training_loss(found, wanted, batch.valid)
                total += float(loss.detach()) / len(batches)
                hidden = [
                    _loss(mine.result, theirs.result, batch.valid)
                    for path, calls in taught.calls.items()
                    for mine, theirs in zip(learned.calls[path], calls, strict=True)
                ]
                if hidden:
                    loss = loss + _OF_BLOCKS * torch.stack(hidden).mean()
                (loss / len(batches)).backward()  # type: ignore[no-untyped-call]
        return total

    def by_blocks(self, batches: Sequence[Batch]) -> float:
        """Add the gradients of every block by itself, called as the original called its own; return the mean loss."""
        total = 0.0
        for batch in batches:
            with torch.no_grad(), watched(self.original, self.blocks) as taught:
                self.original(*batch.args, **batch.kwargs)
            calls = [(path, call) for path, own in taught.calls.items() for call in own]
            for path, call in calls:
                with torch.enable_grad():
                    found = self.swapped.get_submodule(path)(*call.args, **call.kwargs)
                    loss = _loss(found, call.result, batch.valid)
                    (loss / len(batches)).backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach()) / len(calls) / len(batches)
        return total


@contextlib.contextmanager
def watched(network: nn.Module, blocks: Sequence[str]) -> Iterator[Watched]:
    """Note every call of some blocks of a network."""
    seen = Watched()

    def hook_of(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            seen.calls.setdefault(path, []).append(Call(args, kwargs, result))

        return hook

    with contextlib.ExitStack() as hooks:
        for path in blocks:
            hooks.callback(network.get_submodule(path).register_forward_hook(hook_of(path), with_kwargs=True).remove)
        yield seen


@torch.no_grad()
def repeatable(original: nn.Module, blocks: Sequence[str], batch: Batch) -> list[str]:
    """Keep the blocks that give the same again when called again as in a forward pass.

    One that fills a cache or changes its arguments gives something else; there is nothing to teach it by itself.
    """
    with watched(original, blocks) as seen:
        original(*batch.args, **batch.kwargs)
    return [path for path, calls in seen.calls.items() if all(_gives_it_again(original, path, call) for call in calls)]


def _gives_it_again(original: nn.Module, path: str, call: Call) -> bool:
    wanted = [tensor.clone() for tensor in tensors_in(call.result)]
    found = tensors_in(original.get_submodule(path)(*call.args, **call.kwargs))
    if not wanted or len(found) != len(wanted) or any(a.shape != b.shape for a, b in zip(found, wanted, strict=True)):
        return False
    # Not to the bit: kernels on a GPU may sum in another order.
    return all(float(relative_errors(a[None], b[None])) < 1e-3 for a, b in zip(found, wanted, strict=True))


def _loss(found: Any, wanted: Any, valid: Tensor | None) -> Tensor:
    pairs = zip(tensors_in(found), tensors_in(wanted), strict=True)
    return torch.stack([pooled_loss(mine, theirs.detach(), valid) for mine, theirs in pairs]).mean()
