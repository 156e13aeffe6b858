"""Range of half precision: values that norms store, and squares that code in half precision would compute."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from normscope.errors import count, first_few
from normscope.inputs.wrappers import submodule
from normscope.norms.formulas import FORMS
from normscope.norms.recognition import call_with, shapes_at
from normscope.norms.sites import NormSite
from normscope.pairs.sums.magnitudes import of_tokens
from normscope.pairs.sums.stats import PairStats
from normscope.runtime.spread import copied
from normscope.show.tables.table import rounded
from normscope.tools.check.evidence import Evidence
from normscope.tools.check.reports import Answer, Verdict, percent

_HALF = torch.finfo(torch.float16)
_INFINITE = _HALF.max * (1 + _HALF.eps / 4)  # half a step above the largest number, values round to infinity


def float16(evidence: Evidence) -> Answer:
    """Answer whether x, the output, or squares that code in float16 would compute leave its range."""
    rows = [_largest_x(site, stats) | _in_float16(evidence, site, stats) for site, stats in evidence.norms()]
    sites = count(len(rows), "site")
    stored = [row for row in rows if {"x", "output"} & set(row["overflows"])]
    squared = [row for row in rows if row["overflows"]]
    own = [evidence.short[row["site"]] for row in squared if row["squares_in_float16"]]
    lost = [evidence.short[site.name] for site, stats in evidence.norms() if stats.nonfinite_tokens]
    parts = [f"tokens with NaN or infinity in {first_few(lost)}, which no number includes"] if lost else []
    end, has_outputs = rounded(_HALF.max), any(row["max_output"] is not None for row in rows)
    fits = f"x and outputs stay below {end}" if has_outputs else f"x stays below {end}"
    if stored:
        fits = f"keep x and outputs in bfloat16 or float32: they exceed {end} at {len(stored)} of {sites}"
    elif evidence.affine is None:
        fits += " (a capture lacks γ and β for outputs)"
    parts.append(f"{fits}; the largest is {_size(evidence, max(stored or rows, key=_largest))}")
    if own:
        parts.append(f"squares overflow at {first_few(own)}: compute them in float32")
    elif squared:
        norms = "torch's norms" if evidence.affine is None else "these norms"
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
    answered = [row["site"] for row in rows if row["max_output"] is not None or evidence.affine is None]
    parts[-1] += evidence.left_out(answered, "for outputs")
    worst = max(stored or squared or rows, key=_largest)
    return Answer("float16", verdict, "; ".join(parts), worst["site"], rows)


def bfloat16(evidence: Evidence) -> Answer:
    """Answer the same for bfloat16, whose range is float32's, and whose steps are coarse at large |x|."""
    rows = [_largest_x(site, stats) | _in_bfloat16(stats) for site, stats in evidence.norms()]
    worst = max(rows, key=lambda row: row["step"] / max(row["sigma"], 1e-300))
    sentence = f"nothing overflows; its step is {rounded(worst['step'])} at {_size(evidence, worst)}"
    if coarse := worst["step"] > worst["sigma"]:
        sentence += (
            f"; smaller updates are lost there (median σ {rounded(worst['sigma'])}) unless the stream is float32"
        )
    return Answer("bfloat16", "note" if coarse else "ok", sentence, worst["site"], rows)


def _in_float16(evidence: Evidence, site: NormSite, stats: PairStats) -> dict[str, Any]:
    x, sigma = float(stats.reach.max()), of_tokens(stats.token_scales)
    outputs, sums = _outputs(evidence, site, stats), _sums(site, stats)
    ends = {"x": (x, x), "output": outputs, "x²": (x * x, x * x), "Σx²": sums}
    module = None if site.is_call else evidence.module
    return {
        "max_sum": sums and sums[0],
        "max_sum_bound": sums and sums[1],
        "max_output": outputs and outputs[0],
        "max_output_bound": outputs and outputs[1],
        "overflows": [name for name, pair in ends.items() if pair and pair[0] >= _INFINITE],
        "may_overflow": [name for name, pair in ends.items() if pair and pair[0] < _INFINITE <= pair[1]],
        "squares_in_float16": _squares_in_half(submodule(module, site.path), site)
        if module and x * x >= _INFINITE
        else None,
        "subnormal": sigma.below(math.sqrt(_HALF.tiny)) / sigma.count,
        "eps_as_stored": float(torch.tensor(site.eps).half()) if site.form else None,
    }


def _in_bfloat16(stats: PairStats) -> dict[str, Any]:
    octave = 2.0 ** math.floor(math.log2(float(stats.reach.max().clamp_min(2.0**-126))))
    step, sigma = torch.finfo(torch.bfloat16).eps * octave, of_tokens(stats.token_scales).quantile(0.5)
    return {"step": step, "sigma": sigma}


def _squares_in_half(norm: nn.Module, site: NormSite) -> bool | None:
    """True if the output of a norm in float16 is another than in float32 for |x| = 1000, whose squares are infinite."""
    for shape in shapes_at(site):
        x = 1000 * torch.randn(shape, generator=torch.Generator().manual_seed(0)).sign()
        outputs = []
        with contextlib.suppress(Exception), torch.no_grad():  # code that is not ours may take one number of axes alone
            for dtype in (torch.float16, torch.float32):
                args, kwargs = call_with(norm, x.to(dtype))
                outputs.append(copied(norm).cpu().to(dtype).eval()(*args, **kwargs).float())
            return not bool((outputs[0] - outputs[1]).norm() < outputs[1].norm() / 2)
    return None


def _largest_x(site: NormSite, stats: PairStats) -> dict[str, Any]:
    first = int(stats.largest.x.abs().amax(1).argmax())
    channel = None if stats.grouped else int(stats.largest.x[first].abs().argmax())
    position = int(stats.largest.position[first])
    return {"site": site.name, "max_x": float(stats.reach.max()), "channel": channel, "token": position}


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
    affine = (evidence.affine or {}).get(site.name)
    if affine is None or stats.grouped or not site.bounded:
        return None
    least = float((stats.largest.y * affine.gain + affine.offset).abs().max())
    return least, max(least, float((affine.gain.abs() * site.bound + affine.offset.abs()).max()))


def _largest(row: Mapping[str, Any]) -> float:
    return float(max(row["max_x"], row.get("max_output") or 0.0))


def _size(evidence: Evidence, row: Mapping[str, Any]) -> str:
    """Name the larger one of |x| and the output, and its place."""
    name, channel = evidence.short[row["site"]], "" if row["channel"] is None else f"channel {row['channel']}, "
    if row["max_x"] < (output := row.get("max_output") or 0.0):
        return f"an output of {rounded(output)} in {name}"
    return f"|x| = {rounded(row['max_x'])} in {name} ({channel}token {row['token']})"
