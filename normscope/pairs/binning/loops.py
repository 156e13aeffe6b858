"""Which loop adds up the pairs of a call: the fastest that its device has. All put each pair into the same bin."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from normscope.pairs.binning import reference
from normscope.pairs.tokens import Tokens

if TYPE_CHECKING:
    from normscope.pairs.stats import PairStats


def add(stats: PairStats, tokens: Tokens) -> None:
    """Add the pairs of ``tokens`` to everything that ``stats``, on the same device, keeps."""
    (_on_the_cpu() if tokens.rows.device.type == "cpu" else reference.add)(stats, tokens)


@functools.cache
def _on_the_cpu() -> Callable[[PairStats, Tokens], None]:
    try:
        from normscope.pairs.binning import cpu
    except ImportError as error:
        warnings.warn(
            f"numba does not work here ({error}): the same sums are taken in plain torch, many times slower.",
            stacklevel=2,
        )
        return reference.add
    return cpu.add
