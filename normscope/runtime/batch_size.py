"""The batch size that fits into memory: doubled until memory ends."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import torch
from torch import nn

from normscope.errors import MemoryEndedError
from normscope.inputs.batch import Batch
from normscope.inputs.chunks import Inputs
from normscope.inputs.loaded_model import LoadedModel
from normscope.runtime.network import left_as_found, memory_ended, run
from normscope.runtime.processes import Place

_SUMS = 2**28  # bytes of a GPU reserved for what is kept of the norms: some 5 MB each, and steps of their loops
_SHARE = 0.8  # of a GPU's memory; the rest is for the sums' loops, which copy one norm's input
_MOST = 1024  # beyond it nothing becomes faster, and checkpoints, which wait for a chunk's end, become rare
_MOST_WITHOUT_CUDA = 32  # larger batches save no time, and a CPU's memory ends without an error
_LONGEST = 5.0  # seconds of a pass; a slow network is not made to try what would take minutes


@dataclass(frozen=True)
class Fitting:
    """A batch size that fits, and the reason why it is no larger.

    >>> print(Fitting(256, "memory ends at 512"))
    batches of 256: memory ends at 512
    """

    size: int
    because: str

    def __str__(self) -> str:
        return f"batches of {self.size}: {self.because}"


def fit_batches(network: LoadedModel) -> Fitting:
    """Set the batch size of a network's inputs and calibration inputs to the largest that fits, and note the reason.

    Raises:
        MemoryEndedError: see :func:`largest`.

    >>> import normscope
    >>> network = normscope.load("demo_vit", limit=6, device="cpu")
    >>> print(fit_batches(network), [len(batch.samples) for batch in network.inputs])
    batches of 6: all inputs in one [6]
    """
    fitting = largest(network.module, network.inputs)
    for inputs in (network.inputs, network.calibration):
        if inputs is not None:
            inputs.batch_size = fitting.size
    network.fitting = str(fitting)
    return fitting


def largest(module: nn.Module, inputs: Inputs) -> Fitting:
    """Find the largest batch size that fits: 1, 2, 4, … copies of the first readable sample, until memory ends.

    Memory ends if an allocation fails, and on a GPU if twice the memory of a pass would exceed four fifths of the free
    memory: the sums need the rest. Without a GPU the limit is 32 samples. Batches of longer inputs, such as texts, are
    split if they do not fit. The network is left as found; the batch size of the inputs changes.

    Raises:
        MemoryEndedError: if a single sample takes more memory than there is.
        ModelError: if the module raises anything else.
    """
    inputs.batch_size = _MOST
    if inputs.batch_size == 1:
        return Fitting(1, "these inputs are taken one at a time")
    first = inputs.first_sample()
    tensors = itertools.chain(module.parameters(), module.buffers())
    gpus = {
        device: torch.cuda.memory_allocated(device)
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}
    }
    ranks = Place.from_environment().ranks
    share = -(-(inputs.n_inputs or _MOST) // ranks)  # or one rank would have all of them in one batch
    most = min(share, _MOST if gpus else _MOST_WITHOUT_CUDA)
    fits, size = 0, 1
    with left_as_found(module):
        while True:
            for device in gpus:
                torch.cuda.reset_peak_memory_stats(device)
            began = time.perf_counter()
            if not _fits(module, first, size):
                torch.cuda.empty_cache()
                return Fitting(fits, f"memory ends at {size}")
            fullness = max((_fullness(device, before) for device, before in gpus.items()), default=0.0)
            seconds = time.perf_counter() - began
            if size == most:
                whole = "all inputs in one" + (f" for each of {ranks} ranks" if ranks > 1 else "")
                return Fitting(size, whole if size == share else "more are not tried")
            larger = min(2 * size, most)
            if larger / size * fullness > _SHARE:
                return Fitting(size, f"memory ends at {larger}")
            if seconds > _LONGEST:
                return Fitting(size, f"one takes {seconds:.0f} s already")
            fits, size = size, larger


def _fullness(gpu: torch.device, before: int) -> float:
    """Return the last pass's peak as a fraction of the memory available to passes."""
    torch.cuda.synchronize(gpu)
    room = torch.cuda.mem_get_info(gpu)[0] + torch.cuda.memory_reserved(gpu) - before - _SUMS
    return (torch.cuda.max_memory_allocated(gpu) - before) / max(room, 1)


def _fits(module: nn.Module, first: Batch, size: int) -> bool:
    try:
        run(module, first.take([0] * size))
    except MemoryEndedError:
        if size == 1:
            raise
        return False
    except (RuntimeError, MemoryError) as error:  # of the copies themselves
        if not memory_ended(error):
            raise
        return False
    return True
