"""Running a network and restoring what was changed for it."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from normscope.errors import MemoryEndedError, ModelError, NormscopeError, count
from normscope.inputs.batch import BY_HAND, Batch
from normscope.inputs.wrappers import wrapped_name

_ALLOCATORS = (
    *("DefaultCPUAllocator", "MPS backend out of memory", "CUDA out of memory", "CUDA error: out of memory"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "Triton Error [CUDA]: out of memory"),
)
_one_thread = threading.RLock()  # torch's settings, and hooks on a network, are of the whole process
_COMPILE_NOTHING = ("torch.nn.", "torchaudio.", "normscope.")


@contextlib.contextmanager
def restoring(model: nn.Module, *, timed: bool = False) -> Iterator[SavedBuffers]:
    """Run the block in eval mode without gradients, then restore training flags, grad mode, RNG states and buffers.

    Torch compiles and fuses nothing, see :func:`module_by_module`, unless ``timed``. Other threads wait to enter such a
    block. Yields the original buffers, which independent passes restore in between.
    """
    with _one_thread, contextlib.ExitStack() as restored:
        for module in model.modules():
            restored.callback(setattr, module, "training", module.training)
        model.eval()
        buffers = SavedBuffers(model)
        restored.callback(buffers.restore)
        if not timed:
            restored.enter_context(module_by_module(model))
        restored.enter_context(restoring_random_states(cuda_devices(model)))
        # Its copies of weights may be from before an update in the caller's context.
        restored.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        restored.enter_context(torch.no_grad())
        restored.callback(_shard_again, model)
        yield buffers


def _shard_again(model: nn.Module) -> None:
    """Shard the weights of FSDP2: without a backward pass its root keeps them whole, for passes after an update too."""
    for module in model.modules():
        if hasattr(module, "set_reshard_after_forward"):
            module.reshard()  # type: ignore[operator]


@contextlib.contextmanager
def restoring_random_states(gpus: Sequence[int] = ()) -> Iterator[None]:
    """Restore the states of torch's, NumPy's and Python's global random number generators after the block."""
    with contextlib.ExitStack() as restored:
        restored.callback(random.setstate, random.getstate())
        restored.callback(np.random.set_state, np.random.get_state())
        restored.enter_context(torch.random.fork_rng(gpus))
        yield


@contextlib.contextmanager
def module_by_module(model: nn.Module) -> Iterator[None]:
    """Disable torch.compile, whose code does not call new hooks, and torch's fused encoder layers in the block.

    A fused :class:`torch.nn.TransformerEncoder` passes nested tensors to modules with hooks, which do not accept them.

    >>> compiled = torch.compile(nn.LayerNorm(4), backend=lambda graph, inputs: print("compiling"))
    >>> with module_by_module(compiled):
    ...     compiled(torch.zeros(1, 4))
    tensor([[0., 0., 0., 0.]], grad_fn=<NativeLayerNormBackward0>)
    """
    with contextlib.ExitStack() as restored:
        restored.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        modules = (type(module).__module__ for module in model.modules())
        if "torch._dynamo" in sys.modules or not all(name.startswith(_COMPILE_NOTHING) for name in modules):
            restored.enter_context(torch.compiler.set_stance("force_eager"))  # an import of a second
        yield


class PassHooks:
    """Hooks that run during the passes of one capture, in all threads of a pass, one at a time."""

    def __init__(self) -> None:
        self._lock, self._running = threading.RLock(), False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the hooks during a pass in the block."""
        self._running = True
        try:
            yield
        finally:
            self._running = False

    def limited(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook that ignores calls outside of passes."""

        def limited(*call: Any) -> Any:
            if not self._running:
                return None
            with self._lock:
                return hook(*call)

        return limited


class SavedBuffers:
    """The current buffers of a network, to be restored after forward passes that change them.

    A module whose buffers were replaced also gets its other attributes back, such as the length of a position table.
    Meta, lazy, sparse and quantized tensors, and subclasses of Tensor, keep their values.

    >>> norm = nn.BatchNorm1d(2)
    >>> kept = SavedBuffers(norm)
    >>> norm.running_mean += 1
    >>> kept.changed
    True
    >>> kept.restore()
    >>> norm.running_mean
    tensor([0., 0.])
    """

    def __init__(self, model: nn.Module) -> None:
        # The tensors of a script module have a new wrapper at each access.
        modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
        self._modules = [(module, dict(module._buffers), dict(vars(module))) for module in modules]
        self._values = [(buffer, buffer.detach().clone()) for buffer in model.buffers() if _has_values(buffer)]

    @property
    def changed(self) -> bool:
        same = all(_same_objects(module._buffers, buffers) for module, buffers, _ in self._modules)
        return not (same and all(_same_values(buffer, value) for buffer, value in self._values))

    def restore(self) -> None:
        """Restore the modules' buffers and their values; unchanged ones are not written."""
        for module, buffers, attributes in self._modules:
            if not _same_objects(module._buffers, buffers):
                module._buffers.clear()
                module._buffers.update(buffers)
                vars(module).clear()
                vars(module).update(attributes)
        for buffer, value in self._values:
            if not _same_values(buffer, value):
                with torch.no_grad(), torch.inference_mode(buffer.is_inference()):
                    if _alike(buffer, value):
                        buffer.copy_(value)
                    else:
                        buffer.data = value.clone()


def _has_values(buffer: Tensor) -> bool:
    plain = type(buffer) in (Tensor, nn.Parameter) and buffer.layout == torch.strided
    return plain and not (buffer.is_meta or buffer.is_quantized)


def _same_objects(first: Mapping[str, object], second: Mapping[str, object]) -> bool:
    return len(first) == len(second) and all(value is second.get(name) for name, value in first.items())


def _alike(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def _same_values(buffer: Tensor, value: Tensor) -> bool:
    """Compare bit by bit: NaN equals NaN, and version counters would miss changes through ``.data``."""

    def bits(tensor: Tensor) -> Tensor:
        return tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)

    return _alike(buffer, value) and torch.equal(bits(buffer), bits(value))


def cuda_devices(model: nn.Module) -> list[int]:
    devices = {parameter.device for parameter in model.parameters()}
    return sorted(device.index for device in devices if device.type == "cuda" and device.index is not None)


def run(model: nn.Module, batch: Batch, watch: contextlib.AbstractContextManager[Any] | None = None) -> Any:
    """Run the model, within ``watch``, on a copy of a batch, as it may change it in place, and return its output.

    Raises:
        MemoryEndedError: if memory ends.
        ModelError: if the model raises anything else.
    """
    try:
        batch = batch.copied()
        with watch or contextlib.nullcontext():
            return call(model, batch)
    except NormscopeError:  # of a hook
        raise
    except Exception as error:
        if not memory_ended(error):
            raise ModelError(_failure(model, batch, error)) from error
    # Outside of the handler: the error's traceback keeps the tensors of every frame in memory.
    smaller = "smaller batches, " if len(batch.samples) > 1 else ""
    raise MemoryEndedError(
        f"{type(model).__name__} takes more memory with {count(len(batch.samples), 'sample')} in a batch than there "
        f"is. Take {smaller}another device, or a smaller --dtype."
    )


def _failure(model: nn.Module, batch: Batch, error: Exception) -> str:
    line = str(error).strip().partition("\n")[0].rstrip(".") or "without a message"
    tensors = [value for value in (*batch.args, *batch.kwargs.values()) if isinstance(value, Tensor)]
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "(none)"
    about_arguments = (
        " A tuple or a list is taken for the arguments of forward, one by one, and a dict for its keyword arguments: "
        f"leave labels out. For a forward that takes a list or a record there is another way. {BY_HAND}"
    )
    misread = isinstance(error, TypeError) or len(batch.args) > 1 or "list" in str(error)
    return (
        f"{type(model).__name__} raised {type(error).__name__} on inputs of the shapes {shapes}: {line}."
        f"{about_arguments if misread else ''}"
    )


def call(model: nn.Module, batch: Batch) -> Any:
    """Run the model on the batch itself, which it may change."""
    if batch.forward is not None:
        return batch.forward(model, *batch.args, **batch.kwargs)
    return model(*batch.args, **batch.kwargs)


@contextlib.contextmanager
def memory_for(action: str) -> Iterator[None]:
    """Raise MemoryEndedError with the ``action`` if memory ends in the block."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not memory_ended(error):
            raise
        raise MemoryEndedError(f"Memory ended while {action}. Take smaller batches: --batch-size.") from error


def memory_ended(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _ALLOCATORS)


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the network inside torch.compile's wrapper."""
    inner: Any = model
    return inner._orig_mod if wrapped_name(type(model)) == "_orig_mod" else inner  # type: ignore[no-any-return]
