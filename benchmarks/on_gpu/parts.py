"""The parts that benchmarks/gpu.py is made of: each runs in a process of its own, which may fail by itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from common import Measurement

_A_WHILE = 0.5  # seconds between two looks at a process
_TO_END = 2.0  # seconds that a process has for it, once it has said what it found


@dataclass(frozen=True)
class Setting:
    """Where parts run.

    Attributes:
        rehearsal: on the CPU, with kernels in Triton's interpreter and of everything as little as shows that it runs.
    """

    rehearsal: bool = False

    @property
    def device(self) -> str:
        """What torch calls it."""
        return "cpu" if self.rehearsal else "cuda"


@dataclass(frozen=True)
class Found:
    """What a part has found.

    Attributes:
        measurements: times, and how many checks there were and how far off the furthest was.
        failures: what is not right, a sentence each.
        left_out: what was not run and why, a sentence each.
    """

    measurements: list[Measurement] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Part:
    """What runs at once and is kept at once.

    Attributes:
        name: of it, by which ``--only`` finds it.
        run: called with the setting and the arguments, in a process of its own: a function of a module, by its name.
        args: of it.
        seconds: after which it is ended, at most 450, so that a command has them; nothing of it is kept then but that.
    """

    name: str
    run: Callable[..., Found]
    args: tuple[Any, ...] = ()
    seconds: int = 120


def found_by(part: Part, setting: Setting) -> tuple[Found, float]:
    """Run a part in a new process, and say what it found and how many seconds it took.

    That it ended with an exception, by a signal or late is a failure, found like others. Processes that it has started
    end with it.
    """
    if setting.rehearsal:
        os.environ["TRITON_INTERPRET"] = "1"
    context, begun = get_context("spawn"), time.monotonic()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(part, setting, theirs))
    process.start()
    theirs.close()
    try:
        found = _received(part, process, ours)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        ours.close()
    if found is None:
        found = Found(failures=[f"{part.name}: its process ended with status {process.exitcode}, and said nothing."])
    return found, time.monotonic() - begun


def _received(part: Part, process: BaseProcess, ours: Connection) -> Found | None:
    ends = time.monotonic() + part.seconds
    while not ours.poll(_A_WHILE):
        if time.monotonic() > ends:
            return Found(failures=[f"{part.name}: it took more than {part.seconds} seconds and was ended."])
        if not process.is_alive() and not ours.poll():  # what it forked may hold the pipe open
            return None
    try:
        found: Found = ours.recv()
    except (EOFError, OSError):  # it ended before it spoke, or while it did
        return None
    process.join(_TO_END)
    return found


def _run(part: Part, setting: Setting, theirs: Connection) -> None:
    os.setsid()  # so that all processes that it starts can be ended with it, and Ctrl-C meets the parent alone
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    try:
        found = part.run(setting, *part.args)
        json.dumps(asdict(found))  # or it could not be kept
    except Exception as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        found = Found(failures=[f"{part.name}: {type(error).__name__}: {lines[0]}"])
    sys.stdout.flush()
    theirs.send(found)


def _end_with_the_parent() -> None:
    parent_process().join()
    os.killpg(0, signal.SIGKILL)
