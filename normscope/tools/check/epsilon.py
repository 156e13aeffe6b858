"""Effect of another eps on the outputs of norms."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from normscope.norms.formulas import BESIDE_ROOT, BOUNDS_LENGTH, BOUNDS_SQUARE, FORMS
from normscope.norms.sites import NormSite
from normscope.pairs.sums.magnitudes import of_tokens
from normscope.pairs.sums.stats import PairStats
from normscope.tools.check.evidence import Evidence
from normscope.tools.check.reports import Answer, percent

_COMPARED = (1e-5, 1e-6, 1e-12)
_NOTICED = 0.01
_ROUNDING = {name: torch.finfo(getattr(torch, name)).eps / 2 for name in ("float32", "float16", "bfloat16")}
_PLACES = (np.arange(8) + 0.5) / 8  # within a bin


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
    size = f"below the rounding of {', '.join(above)}" if above else "above bfloat16's rounding: keep the checkpoint's"
    is_harmless = evidence.capture.about.get("dtype") in above
    most, most_of_token = percent(worst[eps]), percent(worst_token)
    sentence = f"{eps} in place of {worst['eps']:g} changes outputs by up to {most} ({evidence.short[worst['site']]}), "
    sentence += f"a single token by up to {most_of_token}: {'harmless, ' * is_harmless}{size}{left_out}"
    is_problem = evidence.eps is not None and worst[eps] >= _NOTICED
    return Answer("eps", "ok" if is_harmless else "problem" if is_problem else "note", sentence, worst["site"], rows)


def _change(site: NormSite, stats: PairStats, eps: float) -> tuple[float, float]:
    """Return the relative L2 of a norm's output for another eps, of all tokens together and of a single one at most.

    By the counted σ = 1/rstd of the tokens. Where eps bounds σ, a token's own σ is unknown, and taken to be that bound.
    """
    form, counted = FORMS[site.form or ""], of_tokens(stats.token_scales)
    sigma = counted.low[:, None] + (counted.high - counted.low)[:, None] * _PLACES
    added = 0.0 if form.eps_at in (BOUNDS_LENGTH, BOUNDS_SQUARE) else site.eps
    mean_square = np.maximum(sigma - added, 0) ** 2 if form.eps_at == BESIDE_ROOT else np.maximum(sigma**2 - added, 0)
    squares = torch.from_numpy(mean_square) * (site.d - form.correction)
    slope, changed = (form.slope(squares, site.d, value) for value in (site.eps, eps))
    energy = torch.from_numpy(counted.n)[:, None] * squares * slope.square()  # of y
    change = (changed / slope - 1).abs().where(energy > 0, 0.0)
    pooled = ((energy * change.square()).sum() / energy.sum()).sqrt().nan_to_num()
    return float(pooled), float(change.max())
