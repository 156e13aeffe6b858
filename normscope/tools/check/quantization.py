"""Error of a norm's input in int8 and FP8: per tensor, per channel and per token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from normscope.errors import count
from normscope.norms.sites import NormSite
from normscope.pairs.sums.magnitudes import of_pairs
from normscope.pairs.sums.stats import PairStats
from normscope.tools.check.evidence import Evidence
from normscope.tools.check.reports import Answer, percent

_MOST = 0.05  # relative error of a site that counts
_E4M3 = 448.0  # largest number of float8_e4m3fn
_PLACES = (torch.arange(8, dtype=torch.float64) + 0.5) / 8  # within a bin
_NAMED = 3  # channels and positions at most
# Errors with other scales: in words, and as a remedy, in the order in which these are worth trying.
_WAYS = {
    "token_median": ("per token", "use a scale per token"),
    "without_channels": ("in the other channels alone", "keep these channels in 16 bits"),
    "channel_median": ("per channel", "use a scale per channel"),
}

Quantized = Callable[[Tensor, Tensor, Tensor], Tensor]


def int8(evidence: Evidence) -> Answer:
    """Answer how far 256 even steps from the smallest to the largest x are from a norm's input."""
    return _answer(evidence, "int8", _to_uint8)


def fp8(evidence: Evidence) -> Answer:
    """Answer the same for FP8 (e4m3), scaled so that the largest |x| is 448."""
    return _answer(evidence, "fp8", _to_e4m3)


def _to_uint8(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Round x to 256 even steps from low to high, one of which is 0."""
    low, high = low.clamp(max=0), high.clamp(min=0)
    step = ((high - low) / 255).where(high > low, 1.0)
    zero = (low / step).round()
    return (x / step).round().clamp(zero, zero + 255) * step


def _to_e4m3(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Round x to float8_e4m3fn, scaled so that the larger of |low| and |high| is 448."""
    largest = torch.maximum(low.abs(), high.abs())
    scale = _E4M3 / largest.where(largest > 0, 1.0)
    return (x * scale).float().to(torch.float8_e4m3fn).to(x.dtype) / scale


def _answer(evidence: Evidence, name: str, quantized: Quantized) -> Answer:
    rows = [_row(site, stats, quantized) for site, stats in evidence.norms()]
    beyond, worst = [row for row in rows if _error(row) > _MOST], max(rows, key=_error)
    site = evidence.short[worst["site"]]
    if beyond:
        enough = (remedy for key, (_, remedy) in _WAYS.items() if all(_is_enough(row[key]) for row in beyond))
        lost = f"one per tensor loses over {percent(_MOST)} at {len(beyond)} of {count(len(rows), 'site')}"
        half = f"half of the tokens lose {percent(worst['tensor_median'])} or more"
        sentence = f"{next(enough, 'keep x in 16 bits')}: {lost}; in {site}, {_cause(worst)} sets it, and {half}"
    else:
        sentence = f"per tensor at most {percent(_error(worst))} ({site})"
    numbers = [f"{way} {percent(worst[key])}" for key, (way, _) in _WAYS.items() if worst[key] is not None]
    parts = [sentence, ", ".join(numbers)]
    if name == "fp8" and (saturated := sum(row["max_x"] > _E4M3 for row in rows)):
        parts.append(f"unscaled, x beyond {_E4M3:.0f} saturates at {count(saturated, 'site')}")
    return Answer(name, "problem" if beyond else "ok", "; ".join(parts), worst["site"], rows)


def _is_enough(error: float | None) -> bool:
    return error is not None and error <= _MOST


def _error(row: Mapping[str, Any]) -> float:
    return float(max(row["tensor"], row["tensor_median"]))


def _cause(row: Mapping[str, Any]) -> str:
    """Name the channels and positions of the largest |x|."""
    tokens, channels = f"token {' or '.join(map(str, row['tokens']))}", ", ".join(map(str, row["channels"]))
    if len(row["channels"]) > _NAMED:
        return f"one of several channels of {tokens}"
    return f"channel {channels} of {tokens}" if channels else tokens


def _row(site: NormSite, stats: PairStats, quantized: Quantized) -> dict[str, Any]:
    pairs = of_pairs(stats.moments.sum(0), signed=True)
    n, start, end = (torch.from_numpy(part)[:, None] for part in (pairs.n, pairs.low, pairs.high))
    x = start + (end - start) * _PLACES
    low, high = stats.channel_extremes.double()
    squares, error = ((n * part.square()).sum() for part in (x, quantized(x, low.min(), high.max()) - x))
    half, tokens = stats.reach.max() / 2, stats.tokens.x.double()
    causes, rest = (stats.reach >= half).nonzero().flatten(), (stats.reach < half).nonzero().flatten()
    positions = Counter(stats.largest.position[stats.largest.x.abs().amax(1) >= half].tolist())
    is_rest = not stats.grouped and len(rest) and len(causes) <= _NAMED

    def median(x: Tensor, low: Tensor, high: Tensor) -> float:
        """Return the median over tokens of the relative error; 0 of tokens of zeros."""
        error = (quantized(x, low, high) - x).norm(dim=1)
        return float((error / x.norm(dim=1).clamp_min(1e-300)).quantile(0.5))

    return {
        "site": site.name,
        "tensor": float((error / squares).sqrt().nan_to_num()),
        "tensor_median": median(tokens, low.min(), high.max()),
        "without_channels": median(tokens[:, rest], low[rest].min(), high[rest].max()) if is_rest else None,
        "channel_median": None if stats.grouped else median(tokens, low, high),
        "token_median": median(tokens, *tokens.aminmax(dim=1, keepdim=True)),
        "max_x": 2 * float(half),
        "channels": [] if stats.grouped else causes[: _NAMED + 1].tolist(),
        "tokens": [position for position, _ in positions.most_common(_NAMED)],
    }
