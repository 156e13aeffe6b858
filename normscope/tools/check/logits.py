"""Logits of attention: the largest, and the bound by the lengths of queries and keys, with and without QK-norm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from normscope.errors import count
from normscope.norms.formulas import FORMS
from normscope.norms.sites import NormSite
from normscope.pairs.sums.magnitudes import of_tokens
from normscope.pairs.sums.stats import PairStats
from normscope.tools.check.evidence import Evidence
from normscope.tools.check.reports import Answer, Verdict

_QUESTION = "attention logits"
_COLUMNS = ("largest", "bound", "estimate", "head_dim", "scale")
_CAPS = ("attn_logit_softcapping", "attention_logit_cap", "attn_logit_softcap", "softcap")
_ROUNDING = 2**-8  # relative, of bfloat16
_NOTICED = 0.1  # relative change of an attention weight
_FLOAT16 = 65504


def logits(evidence: Evidence) -> Answer:
    """Answer how large attention's logits are, how large the lengths of q and k allow, and what QK-norm changes."""
    without, found = _without_norm(evidence), evidence.logits
    rows: list[dict[str, Any]] = [
        {
            "site": name,
            **{column: getattr(found.get(name), column, None) for column in _COLUMNS},
            **without.get(name, {"bound_without": None, "estimate_without": None}),
        }
        for name in found or without
        if name in evidence.short
    ]
    if not rows:
        needed = "attention called neither scaled_dot_product_attention nor a softmax of four axes behind a norm"
        if evidence.module is None:
            needed = "a capture without QK-norm does not contain queries and keys; `normscope check MODEL` reads them"
        return Answer(_QUESTION, "omitted", needed)
    worst = max(rows, key=lambda row: row["largest" if found else "bound_without"])
    at = evidence.short[worst["site"]]
    if not found:
        needed = "they follow from γ, which a capture does not contain"
        if evidence.module is not None:
            needed = "they need a second pass, and these batches can be read only once"
        sentence = (
            f"without QK-norm, logits q·k/√d could reach {worst['bound_without']:.3g} at {at}, by the 95th percentiles "
            f"of q and k {worst['estimate_without']:.3g}; with it {needed}"
        )
        return Answer(_QUESTION, "note", sentence, worst["site"], rows)
    allowed = f" (lengths of q and k allow {worst['bound']:.3g})" if worst["scale"] else ""
    verdict, consequence = _consequence(worst["largest"])
    largest = f"the largest of {count(len(rows), 'attention')} is {worst['largest']:.3g}, behind {at}{allowed}"
    sentence = "; ".join([largest, consequence, *_protection(evidence, worst, bool(without))])
    return Answer(_QUESTION, verdict, sentence, worst["site"], rows)


def _consequence(largest: float) -> tuple[Verdict, str]:
    if not largest < _FLOAT16:
        return "problem", "float16 overflows there"
    change = math.expm1(largest * _ROUNDING)
    if change > _NOTICED:
        return "note", f"keep logits in float32, as fused attention does: bfloat16 may change a weight by {change:.0%}"
    return "ok", f"rounding it to bfloat16 changes a weight by less than {_NOTICED:.0%}"


def _protection(evidence: Evidence, worst: Mapping[str, Any], has_qk_norm: bool) -> list[str]:
    """Return what bounds the logits: QK-norm and soft caps, or neither."""
    parts = []
    if worst["bound_without"] is not None:
        parts.append(f"QK-norm is at work, and without it they could reach {worst['bound_without']:.3g}")
    elif has_qk_norm:
        parts.append("QK-norm is at work at other sites")
    modules = evidence.module.modules() if evidence.module else ()
    caps = {value for part in modules for name in _CAPS if isinstance(value := getattr(part, name, None), int | float)}
    if cap := max(caps, default=0):
        here = "at work, and this includes it" if worst["scale"] is None else "configured, but not applied here"
        parts.append(f"a soft cap of {cap:g} is {here}")
    return parts or ["there is neither QK-norm nor a soft cap"]


def _without_norm(evidence: Evidence) -> dict[str, dict[str, float]]:
    """Return the logits scale · q·k of what QK-norms read, by the norm of the queries, from counts of tokens."""
    pairs: dict[str, list[tuple[NormSite, PairStats]]] = {}
    for site, stats in evidence.norms():
        if site.placement == "qk" and site.form and not site.grouped:
            pairs.setdefault(site.path if site.is_call else site.path.rpartition(".")[0], []).append((site, stats))
    without = {}
    for (queries, of_queries), (keys, of_keys) in (pair for pair in pairs.values() if len(pair) == 2):
        found = evidence.logits.get(queries.name)
        head = (found and found.head_dim) or queries.d
        scale = (found and found.scale) or head**-0.5
        (most_q, usual_q), (most_k, usual_k) = _lengths(queries, of_queries), _lengths(keys, of_keys)
        # A head has at most the whole length of a token that all heads share, and usually its part of it.
        most, usual = scale * queries.d * most_q * most_k, scale * head * usual_q * usual_k
        without[queries.name] = {"bound_without": most, "estimate_without": usual}
    return without


def _lengths(site: NormSite, stats: PairStats) -> tuple[float, float]:
    """Return a bound of all tokens' root mean squares of x, and about their 95th percentile."""
    scales, offsets = of_tokens(stats.token_scales), of_tokens(stats.token_offsets)
    about_mean = FORMS[site.form or ""].about_mean
    most = float(scales.high[-1]) * math.hypot(1, offsets.high[-1] * about_mean)
    return most, scales.quantile(0.95) * math.hypot(1, offsets.quantile(0.5) * about_mean)
