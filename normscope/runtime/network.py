"""Running a network and restoring what was changed for it; its batch size."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from normscope.errors import MemoryEndedError, ModelError, NormscopeError, UsageError, count
from normscope.inputs.batch import BY_HAND, Batch
from normscope.inputs.chunks import Inputs
from normscope.inputs.loaded_model import LoadedModel
from normscope.inputs.wrappers import wrapped_name
from normscope.runtime.processes import Place

_ALLOCATORS = (
    *("DefaultCPUAllocator", "MPS backend out of memory", "CUDA out of memory", "CUDA error: out of memory"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "Triton Error [CUDA]: out of memory"),
)
_COMPILE_NOTHING = ("torch.nn.", "torchaudio.", "normscope.")


@contextlib.contextmanager
def left_as_found(model: nn.Module, *, timed: bool = False) -> Iterator[KeptBuffers]:
    """Run the block in eval mode without gradients, then restore training flags, grad mode, RNG states and buffers.

    Torch compiles and fuses nothing, see :func:`module_by_module`, unless ``timed``. Yields the original buffers, which
    independent passes restore in between.
    """
    with contextlib.ExitStack() as restored:
        for module in model.modules():
            restored.callback(setattr, module, "training", module.training)
        model.eval()
        buffers = KeptBuffers(model)
        restored.callback(buffers.put_back)
        if not timed:
            restored.enter_context(module_by_module(model))
        restored.enter_context(random_states_kept(cuda_devices(model)))
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
def random_states_kept(gpus: Sequence[int] = ()) -> Iterator[None]:
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
    eager = "torch._dynamo" in sys.modules or not all(
        type(module).__module__.startswith(_COMPILE_NOTHING) for module in model.modules()
    )
    _switches.begin(eager=eager)
    try:
        yield
    finally:
        _switches.end()


class _Switches:
    """Process-wide switches that overlapping threads set and restore once."""

    def __init__(self) -> None:
        self._lock, self._users, self._restored, self._eager = threading.Lock(), 0, contextlib.ExitStack(), False

    def begin(self, *, eager: bool) -> None:
        """Set the switches; ``eager`` disables torch.compile, which takes an import of a second."""
        with self._lock:
            if not self._users:
                mha = torch.backends.mha
                self._restored.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
                mha.set_fastpath_enabled(False)
                self._restored.callback(setattr, threading.Thread, "start", threading.Thread.start)
                threading.Thread.start = _inheriting(threading.Thread.start)  # type: ignore[assignment, method-assign]
            if eager and not self._eager:
                self._restored.enter_context(torch.compiler.set_stance("force_eager"))
                self._eager = True
            self._users += 1

    def end(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._restored.close()
                self._eager = False


_switches = _Switches()
_passes: Any = weakref.WeakKeyDictionary()  # from threads to the locks of their passes
_captured: dict[int, set[int]] = {}  # ids of modules by thread
_capturing = threading.Lock()


def _inheriting(start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    def started(thread: threading.Thread) -> None:
        _passes[thread] = _passes.get(threading.current_thread())
        start(thread)

    return started


@contextlib.contextmanager
def passes_by(lock: Any) -> Iterator[None]:
    """Run hooks of :func:`heard_by` in the block for passes of this thread and of threads that it starts."""
    thread = threading.current_thread()
    before, _passes[thread] = _passes.get(thread), lock
    try:
        yield
    finally:
        _passes[thread] = before


def heard_by(lock: Any, hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that ignores passes of unrelated threads; the others run it one at a time."""

    def limited(*call: Any) -> Any:
        if _passes.get(threading.current_thread()) is not lock:
            return None
        with lock:
            return hook(*call)

    return limited


@contextlib.contextmanager
def captured_once(model: nn.Module) -> Iterator[None]:
    """Raise UsageError if another thread is capturing the network or a part of it."""
    here, modules = threading.get_ident(), set(map(id, getattr(model, "modules", tuple)()))
    with _capturing:
        if any(thread != here and modules & others for thread, others in _captured.items()):
            raise UsageError(
                f"Another thread is capturing this {type(model).__name__}, or a part of it. Wait until that capture "
                "ends, or capture a copy: copy.deepcopy(model)."
            )
        before = _captured.get(here, set())
        _captured[here] = before | modules
    try:
        yield
    finally:
        _captured[here] = before


class KeptBuffers:
    """The current buffers of a network, to be restored after forward passes that change them.

    A module whose buffers were replaced also gets its other attributes back, such as the length of a position table.
    Meta, lazy, sparse and quantized tensors, and subclasses of Tensor, keep their values.

    >>> norm = nn.BatchNorm1d(2)
    >>> kept = KeptBuffers(norm)
    >>> norm.running_mean += 1
    >>> kept.changed
    True
    >>> kept.put_back()
    >>> norm.running_mean
    tensor([0., 0.])
    """

    def __init__(self, model: nn.Module) -> None:
        # The tensors of a script module have a new wrapper at each access.
        modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
        self._held = [(module, dict(module._buffers), dict(vars(module))) for module in modules]
        self._values = [(buffer, buffer.detach().clone()) for buffer in model.buffers() if _has_values(buffer)]

    @property
    def changed(self) -> bool:
        same = all(_same_objects(module._buffers, buffers) for module, buffers, _ in self._held)
        return not (same and all(_same_values(buffer, value) for buffer, value in self._values))

    def put_back(self) -> None:
        """Restore the modules' buffers and their values; unchanged ones are not written."""
        for module, buffers, attributes in self._held:
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


def _same_objects(some: Mapping[str, object], others: Mapping[str, object]) -> bool:
    return len(some) == len(others) and all(value is others.get(name) for name, value in some.items())


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
    line = str(error).strip().partition("\n")[0].rstrip(".") or "without saying why"
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
def memory_for(what: str) -> Iterator[None]:
    """Raise MemoryEndedError with the step ``what`` if memory ends in the block."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not memory_ended(error):
            raise
        raise MemoryEndedError(f"Memory ended while {what}. Take smaller batches: --batch-size.") from error


def memory_ended(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _ALLOCATORS)


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the network inside torch.compile's wrapper."""
    inner: Any = model
    return inner._orig_mod if wrapped_name(type(model)) == "_orig_mod" else inner  # type: ignore[no-any-return]


_SUMS = 2**28  # bytes of a GPU reserved for the sums of the norms, some 5 MB each, and the steps of their loops
_SHARE = 0.8  # of a GPU's memory; the loops of the sums, which copy one norm's input, need the rest
_MOST = 1024  # larger batches are not faster, and checkpoints, which wait for a chunk's end, become rare
_MOST_WITHOUT_CUDA = 32  # larger batches save no time, and a CPU's memory ends without an error
_LONGEST = 5.0  # seconds of a pass after which no larger size is tried


def fit_batches(network: LoadedModel) -> None:
    """Set the batch size of a network's inputs and calibration inputs to the largest that fits, and note the reason.

    Raises:
        MemoryEndedError: if a single sample takes more memory than there is.

    >>> import normscope
    >>> network = normscope.load("demo_vit", limit=6, device="cpu", batch_size="auto")
    >>> print(network.fitting, [len(batch.samples) for batch in network.inputs])
    batches of 6: all inputs in one [6]
    """
    size, reason = largest_batch(network.module, network.inputs)
    for inputs in (network.inputs, network.calibration):
        if inputs is not None:
            inputs.batch_size = size
    network.fitting = f"batches of {size}: {reason}"


def largest_batch(module: nn.Module, inputs: Inputs) -> tuple[int, str]:
    """Find the largest batch size that fits, and the reason why it is no larger.

    It tries 1, 2, 4, … copies of the first readable sample, until an allocation fails, or on a GPU until twice the
    memory of a pass would exceed four fifths of the free memory. Without a GPU the limit is 32 samples. Batches of
    longer inputs, such as texts, are split if they do not fit. The batch size of ``inputs`` changes.
    """
    inputs.batch_size = _MOST
    if inputs.batch_size == 1:
        return 1, "these inputs are taken one at a time"
    first, gpus = inputs.first_sample(), [torch.device("cuda", index) for index in cuda_devices(module)]
    before = {gpu: torch.cuda.memory_allocated(gpu) for gpu in gpus}
    ranks = Place.from_environment().ranks
    share = -(-(inputs.n_inputs or _MOST) // ranks)  # or one rank would have all of them in one batch
    most = min(share, _MOST if gpus else _MOST_WITHOUT_CUDA)
    fitting, size = 0, 1
    with left_as_found(module):
        while True:
            for gpu in gpus:
                torch.cuda.reset_peak_memory_stats(gpu)
            began = time.perf_counter()
            if not _fits(module, first, size):
                torch.cuda.empty_cache()
                return fitting, f"memory ends at {size}"
            fullness = max((_fullness(gpu, before[gpu]) for gpu in gpus), default=0.0)
            seconds = time.perf_counter() - began
            if size == most:
                whole = "all inputs in one" + (f" for each of {ranks} ranks" if ranks > 1 else "")
                return size, whole if size == share else "more are not tried"
            larger = min(2 * size, most)
            if larger / size * fullness > _SHARE:
                return size, f"memory ends at {larger}"
            if seconds > _LONGEST:
                return size, f"one takes {seconds:.0f} s already"
            fitting, size = size, larger


def _fullness(gpu: torch.device, before: int) -> float:
    """Peak of the last pass as a fraction of the memory available to passes."""
    torch.cuda.synchronize(gpu)
    room = torch.cuda.mem_get_info(gpu)[0] + torch.cuda.memory_reserved(gpu) - before - _SUMS
    return (torch.cuda.max_memory_allocated(gpu) - before) / max(room, 1)


def _fits(module: nn.Module, first: Batch, size: int) -> bool:
    try:
        run(module, first.take([0] * size))
    except (MemoryEndedError, RuntimeError, MemoryError) as error:
        if size == 1 or not (isinstance(error, MemoryEndedError) or memory_ended(error)):
            raise
        return False
    return True
