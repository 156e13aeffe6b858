"""The loop that fills the sums of a site, by device: compiled by numba or Triton, or in plain torch."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from importlib import import_module

from normscope.pairs.sums import reference
from normscope.pairs.sums.site_sums import SiteSums, Tokens
from normscope.runtime.launches import TRITON, VARIABLE, cannot_be_met, why_no_launcher

_COMPILED_BY = {"cpu": "numba", "cuda": "triton"}


def add(stats: SiteSums, tokens: Tokens) -> None:
    """Add the pairs of ``tokens`` to all of ``stats``, on the same device, by the device's fastest loop.

    All loops assign each pair to the same bin.

    Raises:
        UsageError: on CUDA, if ``NORMSCOPE_KERNELS=triton`` asks for kernels and Triton cannot launch any.
    """
    if tokens.rows.numel():
        device = tokens.rows.device.type
        # The kernels compute y from shift and rstd alone.
        by_reference = device == "cuda" and tokens.lines.explicit_y is not None
        (reference.add if by_reference else loop_of(device))(stats, tokens)


def loop_of(device: str) -> Callable[[SiteSums, Tokens], None]:
    """Return the fastest loop that runs on a type of device here."""
    loop = _compiled_loop_of(device)
    if device != "cuda" or loop is reference.add or not (reason := why_no_launcher()):
        return loop
    if os.environ.get(VARIABLE) == TRITON:
        raise cannot_be_met(reason)
    return reference.add


@functools.cache
def _compiled_loop_of(device: str) -> Callable[[SiteSums, Tokens], None]:
    if device not in _COMPILED_BY:
        return reference.add
    try:
        loop: Callable[[SiteSums, Tokens], None] = import_module(f"normscope.pairs.sums.binning.{device}").add
    except ImportError as error:
        warnings.warn(
            f"{_COMPILED_BY[device]} does not work here ({error}): the same sums are taken in plain torch, and slowly.",
            stacklevel=2,
        )
        return reference.add
    return loop
