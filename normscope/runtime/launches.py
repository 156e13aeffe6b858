"""The choice of Triton's kernels by a variable, and the reason where Triton can launch none on this machine."""

from __future__ import annotations

import functools
import os
import subprocess
import warnings

from normscope.errors import UsageError, first_line

VARIABLE = "NORMSCOPE_KERNELS"
EAGER, TRITON = "eager", "triton"


@functools.cache
def why_no_launcher() -> str:
    """Return why Triton cannot launch a kernel on this machine's GPU; empty if it can.

    Triton builds a small C module for each kernel, which requires a compiler and Python's headers. Where it cannot,
    there is a warning once per process, unless ``NORMSCOPE_KERNELS`` is set.
    """
    try:
        from triton.runtime import driver

        _ = driver.active  # builds the module through which Triton calls the driver, or finds it in the cache
        return ""
    except (AssertionError, ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        reason = (
            f"Triton cannot build what launches its kernels ({first_line(error)}), which requires a C compiler and "
            "Python's headers (on Debian and Ubuntu: gcc and python3-dev)"
        )
    if not os.environ.get(VARIABLE):
        warnings.warn(
            f"{reason}: plain torch computes in their place, and more slowly. {VARIABLE}={EAGER} leaves this warning "
            "out.",
            stacklevel=3,
        )
    return reason


def cannot_be_met(reason: str) -> UsageError:
    """Return the error for ``NORMSCOPE_KERNELS=triton`` where there are no kernels.

    >>> str(cannot_be_met("Triton is not installed"))
    'NORMSCOPE_KERNELS=triton cannot be met: Triton is not installed. Unset it, or say NORMSCOPE_KERNELS=eager.'
    """
    return UsageError(f"{VARIABLE}={TRITON} cannot be met: {reason}. Unset it, or say {VARIABLE}={EAGER}.")
