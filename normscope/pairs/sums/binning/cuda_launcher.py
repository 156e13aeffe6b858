"""Whether Triton can launch kernels here: for each it builds a small C module, which takes a compiler and headers."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sysconfig
import warnings
from pathlib import Path

from normscope.errors import UsageError

VARIABLE = "NORMSCOPE_KERNELS"
EAGER, TRITON = "eager", "triton"

_NAME = "normscope_launcher"
_SOURCE = f"""// built with {{built_with}}
#include <Python.h>
static struct PyModuleDef definition = {{{{PyModuleDef_HEAD_INIT, "{_NAME}", NULL, -1, NULL}}}};
PyMODINIT_FUNC PyInit_{_NAME}(void) {{{{ return PyModule_Create(&definition); }}}}
"""


def why_no_launcher() -> str:
    """Why Triton cannot launch a kernel on this machine's GPU; empty where it can.

    It is tried once a process, before the first launch. Where it fails, and ``NORMSCOPE_KERNELS`` says nothing of who
    computes, the user is warned once.
    """
    reason = _tried()
    if reason and not os.environ.get(VARIABLE):
        _warn(reason)
    return reason


def cannot_be_met(reason: str) -> UsageError:
    """The error for ``NORMSCOPE_KERNELS=triton`` where there are no kernels.

    >>> str(cannot_be_met("Triton is not installed"))
    'NORMSCOPE_KERNELS=triton cannot be met: Triton is not installed. Unset it, or say NORMSCOPE_KERNELS=eager.'
    """
    return UsageError(f"{VARIABLE}={TRITON} cannot be met: {reason}. Unset it, or say {VARIABLE}={EAGER}.")


@functools.cache
def _tried() -> str:
    from triton.runtime import driver
    from triton.runtime.build import compile_module_from_src

    try:
        _ = driver.active  # builds what Triton asks the GPU by, or finds it in the cache
        compile_module_from_src(_SOURCE.format(built_with=_compiler()), _NAME)
    except (AssertionError, ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        return (
            f"Triton cannot build what launches its kernels ({_cause(error)}), for which it takes a C compiler and "
            "Python's headers (on Debian and Ubuntu: gcc and python3-dev)"
        )
    return ""


def _compiler() -> str:
    """What Triton builds with, in words, so that a cache from another machine is not mistaken for this one's."""
    named = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return f"{named and shutil.which(named)}, {_headers()}, {'with' if _with_headers() else 'without'} Python.h"


def _headers() -> str:
    """Return the folder where Triton expects Python.h."""
    scheme = sysconfig.get_default_scheme()
    return sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]


def _with_headers() -> bool:
    return (Path(_headers()) / "Python.h").exists()


def _cause(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        missing = "" if _with_headers() else f", and there is no Python.h in {_headers()}"
        return f"{Path(error.cmd[0]).name} ended with status {error.returncode}{missing}"
    first_line = str(error).strip().partition("\n")[0]
    return first_line.partition(". ")[0].rstrip(".") or type(error).__name__


@functools.cache
def _warn(reason: str) -> None:
    warnings.warn(
        f"{reason}: plain torch computes in their place, and more slowly. {VARIABLE}={EAGER} leaves this warning out.",
        stacklevel=3,
    )
