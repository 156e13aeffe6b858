"""Forward passes that pause at modules, each in a thread of its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import ModelError
from normscope.inputs.batch import Batch
from normscope.inputs.wrappers import submodule
from normscope.norms.recognition import input_of
from normscope.runtime.network import run

_thread_local = threading.local()


@dataclass(frozen=True)
class Pause:
    """Module at which a pass pauses: its path, its input, and behind it its output."""

    path: str
    input: Tensor
    output: Any = None


class _AbandonedError(BaseException):
    """Raised in a pass that is not continued; a BaseException, so that no network catches it."""


class PausedPass:
    """Forward pass in a thread of its own, which runs only during :meth:`advance`; see :func:`paused_passes`.

    Attributes:
        outputs: outputs of the modules to keep, by path.

    >>> layer = nn.Linear(2, 2)
    >>> with paused_passes(layer, [Batch((torch.zeros(1, 2),))], [""], behind=False) as (paused,):
    ...     paused.advance()
    ...     paused.advance()
    Pause(path='', input=tensor([[0., 0.]]), output=None)
    """

    def __init__(self, network: nn.Module, batch: Batch) -> None:
        self._network, self._batch = network, batch
        self.outputs: dict[str, Tensor] = {}
        self._pauses: SimpleQueue[Pause | BaseException | None] = SimpleQueue()
        self._continued: SimpleQueue[bool] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def advance(self) -> Pause | None:
        """Run to the next module; None at the end of the pass."""
        if self._thread.is_alive():
            self._continued.put(True)
        else:
            self._thread.start()
        pause = self._pauses.get()
        if isinstance(pause, BaseException):
            raise pause
        return pause

    def pause(self, pause: Pause) -> None:
        """Wait, in the pass's own thread, for the next :meth:`advance`."""
        self._pauses.put(pause)
        if not self._continued.get():
            raise _AbandonedError

    def end(self) -> None:
        """End the pass where it waits."""
        if self._thread.is_alive():
            self._continued.put(False)
            self._thread.join()

    def _run(self) -> None:
        _thread_local.paused_pass = self
        end = None
        try:
            with torch.no_grad():
                run(self._network, self._batch)
        except _AbandonedError:
            pass
        except BaseException as error:  # raised by advance()
            end = error
        self._pauses.put(end)


@contextlib.contextmanager
def paused_passes(
    network: nn.Module, batches: Sequence[Batch], paths: Sequence[str], *, behind: bool, kept: Sequence[str] = ()
) -> Iterator[list[PausedPass]]:
    """Begin a pass of each batch that pauses at some modules; all passes end with the block.

    Nothing else runs the network. Passes pause in front of the modules, or ``behind`` them, and keep the outputs of
    those in ``kept``.
    """

    def pausing(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None) -> None:
            if (x := input_of(args, kwargs)) is not None:
                _thread_local.paused_pass.pause(Pause(path, x, output))

        return hook

    def keeping(path: str) -> Callable[..., None]:
        return lambda module, args, output: _thread_local.paused_pass.outputs.update({path: output})

    passes = [PausedPass(network, batch) for batch in batches]
    with contextlib.ExitStack() as ended:
        for path in paths:
            module = submodule(network, path)
            register = module.register_forward_hook if behind else module.register_forward_pre_hook
            ended.callback(register(pausing(path), with_kwargs=True).remove)
        for path in kept:
            ended.callback(submodule(network, path).register_forward_hook(keeping(path)).remove)
        for paused in passes:
            ended.callback(paused.end)
        yield passes


def advance_to(passes: Sequence[PausedPass], path: str) -> list[Pause]:
    """Let every pass run to its next module, which has to be this one; otherwise ModelError."""
    pauses = []
    for number, paused in enumerate(passes):
        pause = paused.advance()
        if pause is None or pause.path != path:
            reached = "the end" if pause is None else pause.path
            raise ModelError(
                f"Batch {number} reaches {reached} where the first batch reached {path}: the network's order of calls "
                "depends on its input, so it cannot be calibrated."
            )
        pauses.append(pause)
    return pauses
