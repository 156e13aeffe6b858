"""Sinks, tokens that carry most of Σx², as a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from normscope.errors import count
from normscope.runtime.files import visible

if TYPE_CHECKING:
    from normscope.fits.card import NormCard
    from normscope.fits.curve_fit import CurveFit


def sink_sentence(records: Sequence[CurveFit | NormCard]) -> str | None:
    """Describe the sink that changes R² most, and the number of further sites with one; None if there is none.

    Of several records of one site, the first counts.
    """
    sinks = {record.site: record.sink for record in reversed(records) if record.sink}
    if not sinks:
        return None

    def gain(site: str) -> tuple[float, float]:
        r2, without, share = sinks[site].r2, sinks[site].r2_without, sinks[site].share
        return (-1.0 if r2 is None or without is None else without - r2), share

    site = max(sinks, key=gain)
    sink, more = sinks[site], len(sinks) - 1
    share = f"{100 * sink.share:.0f} %" if sink.share < 0.995 else "over 99 %"
    text = f"{visible(site)}: position {sink.position} carries {share} of Σx²"
    if sink.r2_without is not None:
        with_it = f"({sink.r2:.3f} with it): --skip {sink.position + 1}"
        text += f"; without it {sink.curve}'s R² (of all pairs) is {sink.r2_without:.3f} {with_it}"
    return text + (f"; likewise at {count(more, 'further site')}" if more else "")
