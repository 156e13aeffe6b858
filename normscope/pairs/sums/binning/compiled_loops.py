"""How loops on the CPU are compiled by numba and kept on disk, and the threads that they run in.

Threads are Python's own, in which compiled code runs without the interpreter's lock, and not a second pool of OpenMP
beside torch's.
"""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from numba import njit


def compiled(fastmath: set[str] | bool = False) -> Any:
    """Return a decorator that has numba compile a function when it is first called, and keep what it compiled.

    Args:
        fastmath: what the compiler may assume of float arithmetic, by LLVM's names; nothing by default.
    """

    def decorate(function: Any) -> Any:
        options: Any = {"nogil": True, "error_model": "numpy", "fastmath": fastmath}
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError:  # there is no folder to keep it in: it is compiled anew by every process
            return njit(**options)(function)

    return decorate


@functools.cache
def threads() -> ThreadPoolExecutor:
    """Return the threads for further shares of a loop, beside the one that calls it."""
    return ThreadPoolExecutor(os.cpu_count(), "normscope")


os.register_at_fork(after_in_child=threads.cache_clear)  # threads do not survive in the child
