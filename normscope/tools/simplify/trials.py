"""Arithmetic and inputs of the proof: float64 throughout, and inputs beside the given ones."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from normscope.errors import NormscopeError
from normscope.inputs.batch import Batch, tensors_of
from normscope.inputs.loaded_model import Outputs
from normscope.runtime.network import restoring, run
from normscope.swaps.replace import outputs_at

Trial = tuple[str, Sequence[Batch], float]  # description, inputs, and the largest change of a norm's output
_WIDE = dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64)
_MOST = 2**16  # elements of a longer input, unless the given one has half as many


class Exact(TorchFunctionMode):
    """Computes in float64 where a network casts to another dtype, unless it is in float64: casts change rounding alone.

    Dispatch modes see it when the network converts a tensor to Python or NumPy.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._wide = {} if dtype == torch.float64 else _WIDE

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("tolist", "numpy", "__array__", "__dlpack__"):
            args[0].sum().item()
        func = Tensor.double if self._wide and func in (Tensor.float, Tensor.half, Tensor.bfloat16) else func
        args, kwargs = tree_map_only(torch.dtype, lambda dtype: self._wide.get(dtype, dtype), (args, kwargs or {}))
        result = func(*args, **kwargs)
        return result.double() if isinstance(result, Tensor) and result.dtype in self._wide else result


def trials(network: nn.Module, batch: Batch, outputs: Outputs, norms: Sequence[str]) -> list[Trial]:
    """Return other inputs than a batch that a network accepts, and on which its norms and its output are finite."""
    accepted: list[Trial] = []
    with restoring(network) as buffers:
        sizes = {module.num_embeddings for module in network.modules() if isinstance(module, nn.Embedding)}
        for words, trial in _candidates(batch, sorted(sizes)):
            with contextlib.suppress(NormscopeError), outputs_at(network, norms) as at_norms:  # or it takes none such
                output = outputs.read(run(network, trial), trial)
                tensors = [output, *itertools.chain(*at_norms.values())]
                if all(bool(tensor.isfinite().all()) for tensor in tensors):
                    accepted.append((f" on {words}", [trial], 1e-9))
            buffers.restore()
    return accepted


def _candidates(batch: Batch, sizes: Sequence[int]) -> Iterator[tuple[str, Batch]]:
    """Yield random numbers, token ids and masks, more samples, other lengths, and inputs without an argument.

    Token ids are also up to the sizes of embeddings.
    """
    sample, number = batch.first_sample(), len(batch.samples)
    yield f"{2 * number + 1} samples", _changed(batch.take([n % number for n in range(2 * number + 1)]), _random)
    for scale in (1, 8):
        yield "random inputs", _changed(sample, functools.partial(_random, scale=scale))
    tensors = tensors_of([sample.args, sample.kwargs])
    if any(map(_is_mask, tensors)):
        yield "random masks", _changed(sample, functools.partial(_masked, share=0.5))
        yield "masks of the first half", _changed(sample, _masked)
    if not all(tensor.is_floating_point() or _is_mask(tensor) for tensor in tensors):
        largest = max(int(ids.max()) for ids in tensors if ids.numel() and not ids.is_floating_point())
        for size in (*sizes, 2 * largest + 2):
            yield f"token ids below {size}", _changed(sample, functools.partial(_random, size=size))
    for name in sample.kwargs:
        yield f"inputs without {name}", replace(sample, kwargs={k: v for k, v in sample.kwargs.items() if k != name})
    # Not of images: networks may compute their positions anew.
    shapes = [tensor.shape for tensor in tensors if tensor.ndim < 4]
    most = max([_MOST, *(2 * shape.numel() for shape in shapes)])
    for axis, size in sorted({(n, shape[n]) for shape in shapes for n in range(1, len(shape)) if shape[n] > 1}):
        for new in sorted({size // 2, size - 1, size + 1, 2 * size, 4 * size}):
            if all(shape.numel() // size * new <= most for shape in shapes):
                resized = _changed(sample, functools.partial(_resized, axis=axis, size=size, new=new))
                yield f"inputs of size {new} in place of {size}", _changed(resized, _random)


def _changed(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    args, kwargs = tree_map_only(Tensor, change, (batch.args, dict(batch.kwargs)))
    return replace(batch, args=args, kwargs=kwargs, valid=None, valid_within={})


def _is_mask(tensor: Tensor) -> bool:
    return not tensor.is_complex() and bool(((tensor == 0) | (tensor == 1)).all())


def _random(tensor: Tensor, scale: float = 1, size: int = 0) -> Tensor:
    """Return noise of a multiple of a tensor's scale; whole numbers in its range or below a size; a mask as it is."""
    torch.manual_seed(0)
    if tensor.is_floating_point():
        return tensor.mean() + scale * tensor.std(correction=0) * torch.randn_like(tensor)
    if tensor.is_complex() or _is_mask(tensor):
        return tensor
    return torch.randint_like(tensor, *((0, size) if size else (int(tensor.min()), int(tensor.max()) + 1)))


def _masked(tensor: Tensor, share: float = 0) -> Tensor:
    """Invert a mask in its second half or, if a share is given, anywhere; a row of masks keeps its first entry."""
    torch.manual_seed(0)
    if not _is_mask(tensor):
        return tensor
    length = tensor.shape[-1] if tensor.ndim else 1
    where = torch.rand(tensor.shape) < share if share else (torch.arange(length) >= length / 2).expand(tensor.shape)
    kept = (torch.arange(length) == 0).expand(tensor.shape) if tensor.ndim > 1 else torch.zeros(tensor.shape) > 0
    return torch.where(where & ~kept, (1 - tensor.double()).to(tensor.dtype), tensor)


def _resized(tensor: Tensor, axis: int, size: int, new: int) -> Tensor:
    """Cut or repeat a tensor along an axis of a size, an attention mask along all of that size."""
    for n in range(1, tensor.ndim):
        if tensor.shape[n] == size and (n == axis or tensor.ndim > 3):
            tensor = tensor.index_select(n, torch.arange(new) % size)
    return tensor
