"""Which loop adds up the pairs of a call: the fastest that its device has. All put each pair into the same bin."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from normscope.pairs.sums.binning import reference
from normscope.pairs.sums.binning.cuda_launcher import TRITON, VARIABLE, cannot_be_met, why_no_launcher
from normscope.pairs.sums.tokens import Tokens

if TYPE_CHECKING:
    from normscope.pairs.sums.stats import PairStats

_COMPILED = {"cpu": "numba", "cuda": "triton"}


def add(stats: PairStats, tokens: Tokens) -> None:
    """Add the pairs of ``tokens`` to everything that ``stats``, on the same device, keeps.

    Raises:
        UsageError: on CUDA, if ``NORMSCOPE_KERNELS=triton`` asks for kernels and Triton cannot launch any.
    """
    if tokens.rows.numel():
        _loop_of(tokens.rows.device.type)(stats, tokens)


def _loop_of(device: str) -> Callable[[PairStats, Tokens], None]:
    loop = _compiled_loop_of(device)
    if device != "cuda" or loop is reference.add or not (reason := why_no_launcher()):
        return loop
    if os.environ.get(VARIABLE) == TRITON:
        raise cannot_be_met(reason)
    return reference.add


@functools.cache
def _compiled_loop_of(device: str) -> Callable[[PairStats, Tokens], None]:
    if device not in _COMPILED:
        return reference.add
    try:
        loop: Callable[[PairStats, Tokens], None] = import_module(f"normscope.pairs.sums.binning.{device}").add
    except ImportError as error:
        warnings.warn(
            f"{_COMPILED[device]} does not work here ({error}): the same sums are taken in plain torch, and slowly.",
            stacklevel=2,
        )
        return reference.add
    return loop
