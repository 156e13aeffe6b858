"""A network is lent, not given: whatever is set to run it is put back, whatever happens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from normscope.batches import Batch
from normscope.errors import MemoryEndedError, ModelError, NormscopeError, count

_ALLOCATORS = (
    *("DefaultCPUAllocator", "MPS backend out of memory", "CUDA out of memory", "CUDA error: out of memory"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "Triton Error [CUDA]: out of memory"),
)


@contextlib.contextmanager
def left_as_found(model: nn.Module) -> Iterator[None]:
    """Run the block in eval mode without gradients; put training flags, grad mode and RNG states back afterwards."""
    training = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.random.fork_rng(cuda_devices(model)), torch.no_grad():
            yield
    finally:
        for module, flag in training.items():
            module.training = flag


def cuda_devices(model: nn.Module) -> list[int]:
    """Number the CUDA devices that a network is on."""
    devices = {parameter.device for parameter in model.parameters()}
    return sorted(device.index for device in devices if device.type == "cuda" and device.index is not None)


def run(model: nn.Module, batch: Batch) -> Any:
    """Run the model on a batch, and return what it gives.

    Raises:
        MemoryEndedError: if memory ends meanwhile.
        ModelError: if the model itself raises anything else.
    """
    try:
        return model(*batch.args, **batch.kwargs)
    except NormscopeError:  # of a hook
        raise
    except Exception as error:
        if not memory_ended(error):
            line = str(error).strip().partition("\n")[0].rstrip(".")
            tensors = [value for value in (*batch.args, *batch.kwargs.values()) if isinstance(value, Tensor)]
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
            raise ModelError(
                f"{type(model).__name__} raised {type(error).__name__} on inputs of the shapes {shapes or '(none)'}: "
                f"{line or 'without saying why'}."
            ) from error
    # Behind the handler: the error's traceback holds the tensors of every frame, and with them the memory.
    smaller = "smaller batches, " if len(batch.samples) > 1 else ""
    raise MemoryEndedError(
        f"{type(model).__name__} takes more memory with {count(len(batch.samples), 'sample')} in a batch than there "
        f"is. Take {smaller}another device, or a smaller --dtype."
    )


@contextlib.contextmanager
def memory_for(what: str) -> Iterator[None]:
    """Say it in a sentence if memory ends in the block while ``what`` was done.

    Raises:
        MemoryEndedError: if it does.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not memory_ended(error):
            raise
        raise MemoryEndedError(f"Memory ended while {what}. Take smaller batches: --batch-size.") from error


def memory_ended(error: BaseException) -> bool:
    """Return whether an allocation failed: on a GPU, whose error has a type of its own, or on the CPU or MPS."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _ALLOCATORS)
