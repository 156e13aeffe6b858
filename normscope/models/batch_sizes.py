"""How many inputs a network takes at once: twice as many, and twice as many again, until memory ends."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import torch
from torch import nn

from normscope.batches import Batch
from normscope.errors import MemoryEndedError
from normscope.models.base import LoadedModel
from normscope.models.memory import Gauge
from normscope.processes import Place
from normscope.splits import Inputs
from normscope.state import left_as_found, memory_ended, run

_MOST = 1024  # beyond it nothing becomes faster, and checkpoints, which wait for a chunk's end, become rare
_LONGEST = 5.0  # seconds of a pass; a slow network is not made to try what would take minutes
_SHARE = 0.8  # of the room; the rest is for the sums' loops, which take a copy of one norm's input


@dataclass(frozen=True)
class Fitting:
    """A batch size that fits.

    Attributes:
        size: inputs in a batch.
        because: why it is no larger.

    >>> print(Fitting(256, "memory ends at 512"))
    batches of 256: memory ends at 512
    """

    size: int
    because: str

    def __str__(self) -> str:
        return f"batches of {self.size}: {self.because}"


def fit_batches(network: LoadedModel) -> Fitting:
    """Set the batch size of a network's inputs to the largest that fits, also of those to learn from.

    Raises:
        MemoryEndedError: see :func:`largest`.

    >>> from normscope.models.registry import load
    >>> network = load("demo_vit", limit=6, device="cpu")
    >>> print(fit_batches(network), [len(batch.samples) for batch in network.inputs])
    batches of 6: all inputs in one [6]
    """
    found = largest(network.module, network.inputs)
    for inputs in (network.inputs, network.calibration):
        if inputs is not None:
            inputs.batch_size = found.size
    return found


def largest(module: nn.Module, inputs: Inputs) -> Fitting:
    """Find the largest batch size that fits: 1, 2, 4, … copies of the first sample, until memory ends; then back.

    Memory ends where an allocation fails, and where twice of what a pass took would leave less than a fifth of the
    room: the sums need some of it, and on a CPU nothing fails before the machine swaps, or ends the process. Where
    later inputs are longer than the first (texts), a batch may still not fit; it is split then.

    Args:
        module: ready to run. Its training flags, the grad mode and torch's random numbers are left as found.
        inputs: of which the first that can be read is run. Their batch size is changed.

    Raises:
        MemoryEndedError: if a single sample takes more memory than there is.
        ModelError: if the module raises anything else.
    """
    inputs.batch_size = _MOST
    if inputs.batch_size == 1:
        return Fitting(1, "these inputs are taken one at a time")
    first = inputs.first_sample()
    gauge = Gauge(tensor.device for tensor in itertools.chain(module.parameters(), module.buffers()))
    ranks = Place.from_environment().ranks
    share = -(-(inputs.n_inputs or _MOST) // ranks)  # or one rank would have all of them in one batch
    most = min(share, _MOST)
    fits, size = 0, 1
    with left_as_found(module):
        while True:
            gauge.start()
            began = time.perf_counter()
            if not _fits(module, first, size):
                torch.cuda.empty_cache()
                return Fitting(fits, f"memory ends at {size}")
            fullness, seconds = gauge.fullness, time.perf_counter() - began
            if size == most:
                return Fitting(size, _whole(ranks) if size == share else "more are not tried")
            larger = min(2 * size, most)
            if larger / size * fullness > _SHARE:
                return Fitting(size, f"memory ends at {larger}")
            if seconds > _LONGEST:
                return Fitting(size, f"one takes {seconds:.0f} s already")
            fits, size = size, larger


def _whole(ranks: int) -> str:
    return "all inputs in one" if ranks == 1 else f"all inputs in one for each of {ranks} ranks"


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
