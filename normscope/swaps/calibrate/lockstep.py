"""Forward passes in step: each waits at every station until it is told to go on, so that all can be looked at there.

What is learned at one station can then be put into the network before any pass goes past it, and no pass is run twice.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import ModelError
from normscope.inputs.batch import Batch
from normscope.pairs.norms.trace import input_of
from normscope.runtime.network import run


@dataclass(frozen=True)
class Stop:
    """Where a pass waits.

    Attributes:
        path: of the module.
        input: what the module is called with.
        output: what it gave; None in front of it.
    """

    path: str
    input: Tensor
    output: Tensor | None = None


class _Abandoned(BaseException):
    """Raised within a pass that nobody goes on with; a BaseException, so that no network catches it."""


class WaitingPass:
    """One forward pass in a thread of its own. It runs only while :meth:`go_on` waits for it.

    Args:
        network: to run; :func:`stations` makes it stop.
        batch: what it is run on.

    >>> layer = nn.Linear(2, 2)
    >>> with stations(layer, [""], behind=False):
    ...     one = WaitingPass(layer, Batch((torch.zeros(1, 2),)))
    ...     stop = one.go_on()
    ...     _ = layer.bias.data.fill_(3.0)
    ...     _ = one.go_on()
    >>> stop.input, one.result
    (tensor([[0., 0.]]), tensor([[3., 3.]]))
    """

    def __init__(self, network: nn.Module, batch: Batch) -> None:
        self.network, self.batch = network, batch
        self.result: Any = None
        self.outputs: dict[str, Tensor] = {}  # of modules that :func:`stations` keeps
        self._stop: Stop | None = None
        self._error: BaseException | None = None
        self._go, self._here = threading.Semaphore(0), threading.Semaphore(0)
        self._abandoned = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def go_on(self) -> Stop | None:
        """Run to the next station; None where the pass is at its end.

        Raises:
            NormscopeError: if the network fails.
        """
        if self._thread.is_alive():
            self._go.release()
        else:
            self._thread.start()
        self._here.acquire()
        if self._error is not None:
            raise self._error
        return self._stop

    def wait_at(self, stop: Stop) -> None:
        """Wait, in the pass's own thread, until somebody goes on with it."""
        self._stop = stop
        self._here.release()
        self._go.acquire()
        if self._abandoned:
            raise _Abandoned

    def abandon(self) -> None:
        """End the pass where it waits."""
        if self._thread.is_alive():
            self._abandoned = True
            self._go.release()
            self._thread.join()

    def _run(self) -> None:
        _here.waiting_pass = self
        try:
            with torch.no_grad():
                self.result = run(self.network, self.batch)
        except _Abandoned:
            pass
        except BaseException as error:  # raised where the pass is waited for
            self._error = error
        self._stop = None
        self._here.release()


_here = threading.local()


def _of_this_thread() -> WaitingPass | None:
    return getattr(_here, "waiting_pass", None)


@contextlib.contextmanager
def stations(network: nn.Module, paths: Sequence[str], *, behind: bool, kept: Sequence[str] = ()) -> Iterator[None]:
    """Let every :class:`WaitingPass` of a network wait at some modules.

    Args:
        network: which is run by nobody else meanwhile.
        paths: of the modules.
        behind: whether it waits behind them; else in front of them.
        kept: those whose outputs a pass keeps.
    """
    with contextlib.ExitStack() as hooks:
        for path in paths:
            module = network.get_submodule(path)
            if behind:
                hooks.callback(module.register_forward_hook(_behind(path), with_kwargs=True).remove)
            else:
                hooks.callback(module.register_forward_pre_hook(_in_front_of(path), with_kwargs=True).remove)
        for path in kept:
            hooks.callback(network.get_submodule(path).register_forward_hook(_keep_output(path)).remove)
        yield


def _behind(path: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        one, given = _of_this_thread(), input_of(args, kwargs)
        if one is not None and given is not None:
            one.wait_at(Stop(path, given, output))

    return hook


def _in_front_of(path: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        one, given = _of_this_thread(), input_of(args, kwargs)
        if one is not None and given is not None:
            one.wait_at(Stop(path, given))

    return hook


def _keep_output(path: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        one = _of_this_thread()
        if one is not None:
            one.outputs[path] = output

    return hook


@contextlib.contextmanager
def waiting_passes(network: nn.Module, batches: Sequence[Batch]) -> Iterator[list[WaitingPass]]:
    """Begin a pass of each batch, and leave none behind."""
    passes = [WaitingPass(network, batch) for batch in batches]
    try:
        yield passes
    finally:
        for one in passes:
            one.abandon()


def all_to(passes: Sequence[WaitingPass], path: str) -> list[Stop]:
    """Let every pass go on to its next station, which has to be this one.

    Raises:
        ModelError: if one comes to another: the network calls its modules in an order that depends on its input.
    """
    stops = []
    for number, one in enumerate(passes):
        stop = one.go_on()
        if stop is None or stop.path != path:
            there = "the end" if stop is None else stop.path
            raise ModelError(
                f"Batch {number} comes to {there} where the first one came to {path}: the network calls its modules in "
                "an order that depends on its input, so that it cannot be calibrated site by site."
            )
        stops.append(stop)
    return stops
