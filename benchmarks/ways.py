"""The ways to see what norms do that benchmarks/capture.py compares: each runs a batch and keeps what it saw."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol
from unittest import mock

import torch.nn.functional as F
from torch import Tensor, nn

from normscope import Batch
from normscope.pairs import recorder
from normscope.pairs.norms.trace import find_norms

PEERS = ("nnsight", "torchlens")


class Clock:
    """Times a function as a whole, and adds up the time that is spent within some others meanwhile."""

    def __init__(self) -> None:
        self.seconds = self.whole = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, on the clock."""

        @functools.wraps(function)
        def on_the_clock(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return on_the_clock

    def timed_whole(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, whose every call begins anew."""

        @functools.wraps(function)
        def on_the_clock(*args: Any, **kwargs: Any) -> Any:
            self.seconds, start = 0.0, time.perf_counter()
            output = function(*args, **kwargs)
            self.whole = time.perf_counter() - start
            return output

        return on_the_clock

    def read(self) -> tuple[float, float]:
        """Return the seconds of the latest call as a whole, and those within the others."""
        return self.whole, self.seconds


def time_normscope(clock: Clock) -> contextlib.AbstractContextManager[Any]:
    """Put normscope's hooks on the clock meanwhile."""
    make = recorder.Recorder._hook
    return mock.patch.object(recorder.Recorder, "_hook", lambda *args: clock.timed(make(*args)))


class Way(Protocol):
    """Runs a network on a batch and keeps what its norms took and gave, for as long as it lives."""

    def __call__(self, batch: Batch) -> None: ...

    def away(self) -> contextlib.AbstractContextManager[Any]:
        """Leave no trace meanwhile, so that the network runs as it would alone."""


class Naive:
    """Forward hooks that keep every x and y: what one writes without a library."""

    def __init__(self, module: nn.Module, batch: Batch, clock: Clock) -> None:
        self.module, self.kept, self.hook = module, [], clock.timed(self._keep)
        self.norms = [module.get_submodule(name) for name in sites(module, batch)]

    def __call__(self, batch: Batch) -> None:
        handles = [norm.register_forward_hook(self.hook) for norm in self.norms]
        self.module(*batch.args, **batch.kwargs)
        for handle in handles:
            handle.remove()

    def away(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def _keep(self, norm: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        (x,) = args
        if isinstance(norm, nn.GroupNorm):
            y = F.group_norm(x, norm.num_groups, eps=norm.eps)
        else:
            y = F.layer_norm(x, norm.normalized_shape, eps=norm.eps)
        self.kept.append((x, y))


class NNsight:
    """nnsight, which saves the inputs of the norms and their outputs, after the affine step."""

    def __init__(self, module: nn.Module, batch: Batch, clock: Clock) -> None:
        import nnsight

        self.save, self.model, self.names, self.kept = nnsight.save, nnsight.NNsight(module), sites(module, batch), []

    def __call__(self, batch: Batch) -> None:
        with self.model.trace(*batch.args, **batch.kwargs):
            kept = self.save([])
            for name in self.names:
                norm = self.model.get(name)
                kept.append((norm.input, norm.output))
        self.kept.append(kept)

    def away(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()


class Torchlens:
    """torchlens, its cheaper call, which saves the outputs of layer_norm and group_norm, and no inputs."""

    def __init__(self, module: nn.Module, batch: Batch, clock: Clock) -> None:
        import torchlens

        norms = torchlens.func("layer_norm") | torchlens.func("group_norm")
        self.record, self.kept = functools.partial(torchlens.record, module, save=norms), []

    def __call__(self, batch: Batch) -> None:
        self.kept.append(self.record(list(batch.args), dict(batch.kwargs)))

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        from torchlens.backends.torch.wrappers import unwrap_torch, wrap_torch

        unwrap_torch()
        yield
        wrap_torch()


WAYS: dict[str, Callable[[nn.Module, Batch, Clock], Way]] = {
    "naive hooks": Naive,
    "nnsight": NNsight,
    "torchlens": Torchlens,
}


def sites(module: nn.Module, batch: Batch) -> list[str]:
    """Name the norms, in the order in which they are called."""
    return [site.name for site in find_norms(module, batch.first_sample()).sites]


def elements(module: nn.Module, batch: Batch, names: list[str]) -> int:
    """Count the elements that the norms take in one pass."""
    counts: list[int] = []
    handles = [
        module.get_submodule(name).register_forward_pre_hook(lambda _, args: counts.append(args[0].numel()))
        for name in names
    ]
    module(*batch.args, **batch.kwargs)
    for handle in handles:
        handle.remove()
    return sum(counts)
