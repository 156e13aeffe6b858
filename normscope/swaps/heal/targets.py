"""Training targets: outputs of the original network and of its norms, in a seeded order of inputs."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from normscope.inputs.batch import Batch, joined, tensors_of
from normscope.inputs.held_out import by_length
from normscope.inputs.loaded_model import Outputs
from normscope.runtime.network import KeptBuffers, run
from normscope.swaps.distances import KL, kl_divergences, measure_of


def pooled_loss(output: Tensor, target: Tensor, valid: Tensor | None) -> Tensor:
    """Return the relative L2 of all samples and positions together, so that none dominates."""
    if valid is not None and output.ndim > 2 and output.shape[:2] == valid.shape:
        kept = valid.to(output.device).view(*valid.shape, *[1] * (output.ndim - 2))
        output, target = output * kept, target * kept
    error: Tensor = vector_norm(output - target) / vector_norm(target).clamp_min(torch.finfo(torch.float32).tiny)
    return error


_LEAST_KL = 1e-12  # below which rounding is all that is left of it
MOST_TARGET_BYTES = 4 * 2**30  # of what the original gave, that is kept in memory


Target = tuple[Tensor, Mapping[str, list[Tensor]]]  # outputs of the network, and of each call of a norm by its path


class TrainingTargets:
    """Targets of batches to learn from, given by the original network, and gradients of the loss towards them.

    Targets are computed once and kept, up to four gibibytes of them; beyond, whenever they are needed. The sites are
    paths of swapped modules, which imitate their norms. Gradients of each list of batches are summed.
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
        """Return how many targets there are."""
        return len(self._batches)

    def targets(self, number: int) -> list[Target]:
        """Return the original's outputs for a list of batches, copied because the network may change them."""
        if number in self._kept:
            return self._kept[number]
        targets = [self._target(batch) for batch in self._batches[number]]
        size = sum(tensor.nbytes for tensor in tensors_of(targets))
        if size <= self._bytes_left:
            self._bytes_left -= size
            self._kept[number] = targets
        return targets

    @torch.no_grad()
    def _target(self, batch: Batch) -> Target:
        with _given(self._original, self._sites) as of_sites:
            output = self._outputs.read(run(self._original, batch), batch).clone()  # it may be a buffer
        self._buffers[0].put_back()
        return output, of_sites

    def gradients(self, number: int) -> float:
        """Add the gradients of the loss on a list of batches, and return the loss.

        The loss is the relative L2 at the output, or the root of the KL divergence of logits, plus the mean relative L2
        at the sites: outputs of norms tell far more of an input than the few numbers at the end.
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
            pooled_loss(given, original, batch.valid_at(path))
            for path, calls in target[1].items()
            for given, original in zip(of_sites[path], calls, strict=True)
        ]
        if measure_of(self._outputs.kind) == KL:
            loss = kl_divergences(output, target[0], batch.valid).mean().clamp_min(_LEAST_KL).sqrt()
        else:
            loss = pooled_loss(output, target[0], batch.valid)
        return loss + torch.stack(at_sites).mean() if at_sites else loss


@contextlib.contextmanager
def _given(network: nn.Module, paths: Sequence[str]) -> Iterator[dict[str, list[Tensor]]]:
    """Record copies of the outputs of some modules, call by call."""
    seen: dict[str, list[Tensor]] = {}

    def keep(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, result: Any) -> None:
            tensors = (tensor for tensor in tensors_of(result) if tensor.is_floating_point())
            seen.setdefault(path, []).extend(tensor.clone() for tensor in tensors)

        return hook

    with contextlib.ExitStack() as hooks:
        for path in paths:
            hooks.callback(network.get_submodule(path).register_forward_hook(keep(path)).remove)
        yield seen


def steps_of(batches: Sequence[Batch], at_once: int, apart: int) -> list[list[Batch]]:
    """Divide batches among steps, in order; padded ones by length.

    A step has at least ``at_once`` samples if they can be joined and run in one pass, else at most ``apart``.

    >>> from normscope.inputs.batch import Sample
    >>> ones = [Batch((torch.zeros(1, size),), samples=(Sample("a", 0, 0),)) for size in (3, 3, 3, 4, 3)]
    >>> [[batch.args[0].shape for batch in step] for step in steps_of(ones, 3, 2)]
    [[torch.Size([3, 3])], [torch.Size([1, 4]), torch.Size([1, 3])]]
    """
    steps: list[list[Batch]] = []
    for batch in (part for whole in batches for part in by_length(whole, apart)):
        last = steps[-1] if steps else []
        samples = sum(len(part.samples) for part in last)
        both = joined([*last, batch]) if len(last) == 1 and samples < at_once and batch.valid is None else []
        if len(both) == 1:
            steps[-1] = both
        elif last and samples + len(batch.samples) <= apart:
            last.append(batch)
        else:
            steps.append([batch])
    return steps


def drawn(seed: int, step: int, *, number: int) -> int:
    """Draw the target of a step: all of them in a new order, again and again, determined by seed and step alone.

    >>> sorted(drawn(0, step, number=4) for step in range(4, 8))
    [0, 1, 2, 3]
    """
    key = hashlib.blake2b(f"{seed} {step // number}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key))
    return int(torch.randperm(number, generator=generator)[step % number])
