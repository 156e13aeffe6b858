"""Compilation of CPU loops by numba, their cache on disk, and the threads that run them.

Compiled code runs without the interpreter's lock in Python's own threads, instead of a second OpenMP pool beside
torch's.
"""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from numba import njit
from numba.core import event

from normscope.runtime.progress import report


def compiled(fastmath: set[str] | bool = False, *, within: bool = False) -> Any:
    """Return a decorator: numba compiles the function at its first call, and caches the result on disk.

    ``fastmath`` contains assumptions of the compiler about float arithmetic, by LLVM's names. A function ``within``
    others is called by compiled functions alone. It needs no wrapper for Python, which takes a fifth of the
    compilation, and is cached with its callers.
    """
    options: Any = {"nogil": True, "error_model": "numpy", "fastmath": fastmath}
    if within:
        options |= {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}

    def decorate(function: Any) -> Any:
        if within:
            return njit(**options)(function)
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError:  # there is no folder for the cache: every process compiles it
            return njit(**options)(function)

    return decorate


class _Compiling(event.Listener):
    """Reports the compilation of this package's loops."""

    _depth = 0  # of nested compilations, as of the functions that a loop calls

    def on_start(self, happened: event.Event) -> None:
        if self._is_ours(happened):
            if not self._depth:
                cached = happened.data["dispatcher"].stats.cache_path is not None
                how_often = "once on this machine" if cached else "in every process, as no folder can keep them"
                self._stage = f"compiling loops for this CPU ({how_often}, a few seconds) …"
                report(self._stage, 0, 1)
            self._depth += 1

    def on_end(self, happened: event.Event) -> None:
        if self._is_ours(happened):
            self._depth -= 1
            if not self._depth:
                report(self._stage, 1, 1)

    def _is_ours(self, happened: event.Event) -> bool:
        function = getattr(happened.data.get("dispatcher"), "py_func", None)
        return (getattr(function, "__module__", None) or "").startswith("normscope.")  # None of a function by exec


event.register("numba:compile", _Compiling())  # type: ignore[no-untyped-call]


@functools.cache
def threads() -> ThreadPoolExecutor:
    """Return the threads for further shares of a loop, beside the one that calls it."""
    return ThreadPoolExecutor(os.cpu_count(), "normscope")


os.register_at_fork(after_in_child=threads.cache_clear)  # threads do not survive in the child
