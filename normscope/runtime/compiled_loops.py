"""Compilation of CPU loops by numba, their cache on disk, and the threads that run them.

Threads are Python's own, in which compiled code runs without the interpreter's lock, and not a second pool of OpenMP
beside torch's.
"""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from numba import njit
from numba.core import event

from normscope.runtime.progress import report

_ours: set[str] = set()  # modules that hold loops of this package


def compiled(fastmath: set[str] | bool = False, *, within: bool = False) -> Any:
    """Return a decorator that has numba compile a function when it is first called, and keep what it compiled.

    Args:
        fastmath: what the compiler may assume of float arithmetic, by LLVM's names; nothing by default.
        within: whether compiled functions alone call it. It needs no way in from Python then, whose making would take
            a fifth of the compiling, and is kept with those that call it.
    """
    options: Any = {"nogil": True, "error_model": "numpy", "fastmath": fastmath}
    if within:
        options |= {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}

    def decorate(function: Any) -> Any:
        _ours.add(function.__module__)
        if within:
            return njit(**options)(function)
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError:  # there is no folder to keep it in: it is compiled anew by every process
            return njit(**options)(function)

    return decorate


class _Compiling(event.Listener):
    """Reports that loops are being compiled, which numba does once and keeps; what others compile is theirs."""

    _depth = 0  # a loop is compiled with the functions that it calls

    def on_start(self, happened: event.Event) -> None:
        if self._is_of_ours(happened):
            if not self._depth:
                self._stage = _compiling(happened.data["dispatcher"])
                report(self._stage, 0, 1)
            self._depth += 1

    def on_end(self, happened: event.Event) -> None:
        if self._is_of_ours(happened):
            self._depth -= 1
            if not self._depth:
                report(self._stage, 1, 1)

    def _is_of_ours(self, happened: event.Event) -> bool:
        function = getattr(happened.data.get("dispatcher"), "py_func", None)
        return getattr(function, "__module__", "") in _ours


event.register("numba:compile", _Compiling())  # type: ignore[no-untyped-call]


def _compiling(loop: Any) -> str:
    kept = loop.stats.cache_path is not None
    how_often = "once on this machine" if kept else "in every process, as there is no folder to keep them in"
    return f"compiling loops for this CPU ({how_often}, a few seconds) …"


@functools.cache
def threads() -> ThreadPoolExecutor:
    """Return the threads for further shares of a loop, beside the one that calls it."""
    return ThreadPoolExecutor(os.cpu_count(), "normscope")


os.register_at_fork(after_in_child=threads.cache_clear)  # threads do not survive in the child
