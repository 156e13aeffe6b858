"""Norms in fewer bits: range and rounding of half precision, error of int8 and FP8, and the effect of another eps."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from normscope.errors import count, first_few
from normscope.inputs.wrappers import submodule
from normscope.norms.formulas import BESIDE_ROOT, BOUNDS_LENGTH, BOUNDS_SQUARE, FORMS
from normscope.norms.recognition import call_with, shapes_at
from normscope.norms.sites import NormSite
from normscope.pairs.sums.magnitudes import Magnitudes, of_pairs, of_tokens
from normscope.pairs.sums.stats import PairStats
from normscope.runtime.spread import copied
from normscope.show.tables.table import percent, rounded
from normscope.tools.check.evidence import Evidence
from normscope.tools.check.reports import Answer, Verdict

_HALF = torch.finfo(torch.float16)
_INFINITE = _HALF.max * (1 + _HALF.eps / 4)  # half a step above the largest number, values round to infinity
_COMPARED = (1e-5, 1e-6, 1e-12)  # eps
_NOTICED = 0.01  # change of outputs by another eps
_ROUNDING = {name: torch.finfo(getattr(torch, name)).eps / 2 for name in ("float32", "float16", "bfloat16")}
_MOST = 0.05  # relative error of a site that counts
_E4M3 = 448.0  # largest number of float8_e4m3fn
_NAMED = 3  # channels and positions at most
# Errors with other scales: in words, and as a remedy, in the order in which these are worth trying.
_WAYS = {
    "token_median": ("per token", "use a scale per token"),
    "without_channels": ("per tensor without these channels", "keep these channels in 16 bits"),
    "channel_median": ("per channel", "use a scale per channel"),
}

Quantized = Callable[[Tensor, Tensor, Tensor], Tensor]


def float16(evidence: Evidence) -> Answer:
    """Answer whether x, the output, or squares that code in float16 would compute leave its range."""
    rows = [_largest_x(site, stats) | _in_float16(evidence, site, stats) for site, stats in evidence.norms()]
    sites = count(len(rows), "site")
    stored = [row for row in rows if {"x", "output"} & set(row["overflows"])]
    squared = [row for row in rows if row["overflows"]]
    own = [evidence.short[row["site"]] for row in squared if row["squares_in_float16"]]
    lost = [evidence.short[site.name] for site, stats in evidence.norms() if stats.nonfinite_tokens]
    parts = [f"NaN or infinity in tokens of {first_few(lost)}, which are left out of all numbers"] if lost else []
    end, has_outputs = rounded(_HALF.max), any(row["max_output"] is not None for row in rows)
    fits = f"x and outputs stay below {end}" if has_outputs else f"x stays below {end}"
    if stored:
        fits = f"keep x and outputs in bfloat16 or float32: they exceed {end} at {len(stored)} of {sites}"
    elif evidence.module is None:
        fits += " (outputs need γ and β, which a capture lacks)"
    parts.append(f"{fits}; the largest is {_size(evidence, max(stored or rows, key=_largest))}")
    if own:
        parts.append(f"squares overflow at {first_few(own)}: compute them in float32")
    elif squared:
        norms = "torch's norms" if evidence.module is None else "these norms"
        parts.append(f"squares would overflow at {len(squared)} of {sites}: compute them in float32, as {norms} do")
    if unsure := sum(bool(row["may_overflow"]) for row in rows):
        parts.append(f"by its bound, Σx² or the output may overflow at {unsure} of {sites}")
    small = max(rows, key=lambda row: row["subnormal"])
    if small["subnormal"]:
        tokens = f"{percent(small['subnormal'])} of the tokens in {evidence.short[small['site']]}"
        parts.append(f"the mean x² of {tokens} is below {rounded(_HALF.tiny)}, where float16 loses digits")
    if zero := sum(row["eps_as_stored"] == 0 for row in rows):
        parts.append(f"add eps in float32: it is 0 in float16 at {zero} of {sites}")
    verdict: Verdict = "problem" if stored or own or lost else "note" if len(parts) > 1 else "ok"
    answered = [row["site"] for row in rows if row["max_output"] is not None or evidence.module is None]
    parts[-1] += evidence.left_out(answered, "for outputs")
    worst = max(stored or squared or rows, key=_largest)
    return Answer("float16", verdict, "; ".join(parts), worst["site"], rows)


def _in_float16(evidence: Evidence, site: NormSite, stats: PairStats) -> dict[str, Any]:
    x, sigma = float(stats.reach.max()), of_tokens(stats.token_scales)
    outputs, sums = _outputs(evidence, site, stats), _sums(site, stats)
    ends = {"x": (x, x), "output": outputs, "x²": (x * x, x * x), "Σx²": sums}
    return {
        "max_sum": sums and sums[0],
        "max_sum_bound": sums and sums[1],
        "max_output": outputs and outputs[0],
        "max_output_bound": outputs and outputs[1],
        "overflows": [name for name, pair in ends.items() if pair and pair[0] >= _INFINITE],
        "may_overflow": [name for name, pair in ends.items() if pair and pair[0] < _INFINITE <= pair[1]],
        "squares_in_float16": _squares_in_half(evidence, site) if x * x >= _INFINITE else None,
        "subnormal": sigma.below(math.sqrt(_HALF.tiny)) / sigma.count,
        "eps_as_stored": float(torch.tensor(site.eps).half()) if site.form else None,
    }


def _sums(site: NormSite, stats: PairStats) -> tuple[float, float] | None:
    """Bound the largest Σx² of a token: by the 16 tokens of largest |x|, and by the largest counted σ and μ/σ."""
    if site.form is None or stats.grouped:
        return None
    sigma, offset = (float(of_tokens(counts).high[-1]) for counts in (stats.token_scales, stats.token_offsets))
    bound = site.d * sigma**2 * (1 + offset**2 * FORMS[site.form].about_mean)
    least = float(stats.largest.x.double().square().sum(1).max())
    return least, max(least, min(bound, float(stats.reach.double().square().sum())))


def _outputs(evidence: Evidence, site: NormSite, stats: PairStats) -> tuple[float, float] | None:
    """Bound the largest |γy + β|: by the 16 tokens of largest |x|, and by the bound of |y|."""
    if site.name not in evidence.affine or stats.grouped or not site.bounded:
        return None
    gain, offset = evidence.affine[site.name]
    least = float((stats.largest.y * gain + offset).abs().max())
    return least, max(least, float((gain.abs() * site.bound + offset.abs()).max()))


def _squares_in_half(evidence: Evidence, site: NormSite) -> bool | None:
    """True if the output of a norm in float16 is another than in float32 for |x| = 1000, whose squares are infinite."""
    if evidence.module is None or site.is_call:
        return None
    norm = submodule(evidence.module, site.path)
    for shape in shapes_at(site):
        x = 1000 * torch.randn(shape, generator=torch.Generator().manual_seed(0)).sign()
        outputs = []
        with contextlib.suppress(Exception), torch.no_grad():  # code that is not ours may take one number of axes alone
            for dtype in (torch.float16, torch.float32):
                args, kwargs = call_with(norm, x.to(dtype))
                outputs.append(copied(norm).cpu().to(dtype).eval()(*args, **kwargs).float())
            return not bool((outputs[0] - outputs[1]).norm() < outputs[1].norm() / 2)
    return None


def bfloat16(evidence: Evidence) -> Answer:
    """Answer the same for bfloat16, whose range is float32's, and whose steps are coarse at large |x|."""
    rows = []
    for site, stats in evidence.norms():
        largest, sigma = _largest_x(site, stats), of_tokens(stats.token_scales).quantile(0.5)
        octave = 2.0 ** math.floor(math.log2(max(largest["max_x"], torch.finfo(torch.bfloat16).tiny)))
        rows.append({**largest, "step": torch.finfo(torch.bfloat16).eps * octave, "sigma": sigma})
    worst = max(rows, key=lambda row: row["step"] / max(row["sigma"], 1e-300))
    sentence = f"nothing overflows; its step is {rounded(worst['step'])} at {_size(evidence, worst)}"
    if coarse := worst["step"] > worst["sigma"]:
        typical = f"updates of the size of the median σ, {rounded(worst['sigma'])}"
        sentence += f", which loses {typical}, unless the stream is float32"
    return Answer("bfloat16", "note" if coarse else "ok", sentence, worst["site"], rows)


def _largest_x(site: NormSite, stats: PairStats) -> dict[str, Any]:
    first = int(stats.largest.x.abs().amax(1).argmax())
    channel = None if stats.grouped else int(stats.largest.x[first].abs().argmax())
    position = int(stats.largest.position[first])
    return {"site": site.name, "max_x": float(stats.reach.max()), "channel": channel, "token": position}


def _largest(row: Mapping[str, Any]) -> float:
    return float(max(row["max_x"], row.get("max_output") or 0.0))


def _size(evidence: Evidence, row: Mapping[str, Any]) -> str:
    """Name the larger one of |x| and the output, and its place."""
    name, channel = evidence.short[row["site"]], "" if row["channel"] is None else f"channel {row['channel']}, "
    if row["max_x"] < (output := row.get("max_output") or 0.0):
        return f"an output of {rounded(output)} in {name}"
    return f"|x| = {rounded(row['max_x'])} in {name} ({channel}token {row['token']})"


def int8(evidence: Evidence) -> Answer:
    """Answer how far 256 even steps from the smallest to the largest x are from a norm's input."""
    return _eight_bits(evidence, "int8", _to_uint8)


def fp8(evidence: Evidence) -> Answer:
    """Answer the same for FP8 (e4m3), scaled so that the largest |x| is 448."""
    return _eight_bits(evidence, "fp8", _to_e4m3)


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


def _eight_bits(evidence: Evidence, name: str, quantized: Quantized) -> Answer:
    rows = [_in_eight_bits(site, stats, quantized) for site, stats in evidence.norms()]
    beyond, worst = [row for row in rows if _error(row) > _MOST], max(rows, key=_error)
    site = evidence.short[worst["site"]]
    if beyond:
        enough = (remedy for key, (_, remedy) in _WAYS.items() if all(_is_enough(row[key]) for row in beyond))
        lost = f"one per tensor loses over {percent(_MOST)} at {len(beyond)} of {count(len(rows), 'site')}"
        half = f"half of the tokens lose {percent(worst['tensor_median'])} or more"
        sentence = f"{next(enough, 'keep x in 16 bits')}: {lost}; in {site}, {_cause(worst)} sets it, and {half}"
    else:
        sentence = f"per tensor at most {percent(_error(worst))} ({site})"
    shown = [key for key in _WAYS if worst[key] is not None and (beyond or key != "without_channels")]
    parts = [sentence, ", ".join(f"{_WAYS[key][0]} {percent(worst[key])}" for key in shown)]
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


def _in_eight_bits(site: NormSite, stats: PairStats, quantized: Quantized) -> dict[str, Any]:
    n, x = _spread(of_pairs(stats.moments.sum(0), signed=True))
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


def epsilon(evidence: Evidence) -> Answer:
    """Answer how far the outputs of norms change with another eps: ``eps``, or 1e-5, 1e-6 and 1e-12."""
    asked, rows = (_COMPARED if evidence.eps is None else (evidence.eps,)), list[dict[str, Any]]()
    for site, stats in evidence.norms():
        if site.form:
            changes = {eps: _change(site, stats, eps) for eps in dict.fromkeys([*asked, *_COMPARED])}
            pooled = {f"{eps:g}": whole for eps, (whole, _) in changes.items()}
            worst_token = max(changes[eps][1] for eps in asked)
            rows.append({"site": site.name, "eps": site.eps, **pooled, "worst_token": worst_token})
    left_out = evidence.left_out([row["site"] for row in rows], "without σ of a token")
    if not rows:
        return Answer("eps", "omitted", f"no norm divides by σ of a token{left_out}")
    worst, eps = max(((row, f"{eps:g}") for row in rows for eps in asked), key=lambda pair: pair[0][pair[1]])
    worst_token = max(row["worst_token"] for row in rows)
    above = [name for name, size in _ROUNDING.items() if worst_token < size]
    size = (
        f"below the rounding of {', '.join(above)}" if above else "above bfloat16's rounding: keep the checkpoint's eps"
    )
    is_harmless = evidence.capture.about.get("dtype") in above
    most, most_of_token = percent(worst[eps]), percent(worst_token)
    sentence = f"{eps} in place of {worst['eps']:g} changes outputs by up to {most} ({evidence.short[worst['site']]}), "
    sentence += f"a single token by up to {most_of_token}, {'harmless: ' * is_harmless}{size}{left_out}"
    is_problem = evidence.eps is not None and worst[eps] >= _NOTICED
    return Answer("eps", "ok" if is_harmless else "problem" if is_problem else "note", sentence, worst["site"], rows)


def _change(site: NormSite, stats: PairStats, eps: float) -> tuple[float, float]:
    """Return the relative L2 of a norm's output for another eps, of all tokens together and of a single one at most.

    By the counted σ = 1/rstd of the tokens. Where eps bounds σ, a token's own σ is unknown, and taken to be that bound.
    """
    form, (n, sigma) = FORMS[site.form or ""], _spread(of_tokens(stats.token_scales))
    added = 0.0 if form.eps_at in (BOUNDS_LENGTH, BOUNDS_SQUARE) else site.eps
    beside = form.eps_at == BESIDE_ROOT
    mean_square = (sigma - added).clamp(min=0) ** 2 if beside else (sigma**2 - added).clamp(min=0)
    squares = mean_square * (site.d - form.correction)
    slope, changed = (form.slope(squares, site.d, value) for value in (site.eps, eps))
    energy = n * squares * slope.square()  # of y
    change = (changed / slope - 1).abs().where(energy > 0, 0.0)
    pooled = ((energy * change.square()).sum() / energy.sum()).sqrt().nan_to_num()
    return float(pooled), float(change.max())


def _spread(numbers: Magnitudes) -> tuple[Tensor, Tensor]:
    """Return the counts of the bins, ``(bins, 1)``, and eight numbers within each, ``(bins, 8)``."""
    n, low, high = (torch.from_numpy(part)[:, None] for part in (numbers.n, numbers.low, numbers.high))
    return n, low + (high - low) * (torch.arange(8, dtype=torch.float64) + 0.5) / 8
