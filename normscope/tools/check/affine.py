"""Mean and affine step of the norms: the cost of dropping the mean, and where γ is unusual."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from normscope.errors import count, first_few
from normscope.fits.card import centring_of
from normscope.inputs.wrappers import submodule
from normscope.pairs.sums.magnitudes import of_tokens
from normscope.show.tables.table import percent
from normscope.swaps.standalone import tied_heads
from normscope.tools.check.evidence import Evidence
from normscope.tools.check.reports import Answer

_HARMLESS = 1e-4  # of Σy², 1 % of the length of y
_SHUT, _AMPLIFIED = 1e-3, 10  # times the median |γ|
_NEXT_TO = 1e-3  # distance of γ from 0 or 1, at which training may begin
_SIGNS = 0.1  # share of channels of either sign, of weights that are centred on 0


def mean(evidence: Evidence) -> Answer:
    """Answer what it costs to drop the mean, and at which sites `simplify` makes it exact."""
    rows, plan = list[dict[str, Any]](), evidence.plan
    for site, stats in evidence.norms():
        if site.form and site.centred:
            change = centring_of(site, of_tokens(stats.token_offsets)).change_without
            is_exact = None if plan is None else site.name in plan and not plan[site.name].blocked
            rows.append({"site": site.name, "change_without": change, "exact": is_exact})
    if not rows:
        return Answer("mean", "omitted", "no norm here subtracts a mean that its tokens determine")
    worst = max(rows, key=lambda row: row["change_without"])
    exact = sum(bool(row["exact"]) for row in rows)
    harmless = sum(row["change_without"] <= _HARMLESS for row in rows)
    norms, most = count(len(rows), "norm"), percent(math.sqrt(worst["change_without"]))
    sentence = f"dropping it alone changes y by up to {most} ({evidence.short[worst['site']]})"
    if harmless:
        sentence += f", and by less than 1% at {harmless} of {norms}"
    if plan is not None:
        sentence = f"`normscope simplify` drops it exactly at {exact} of {norms}; {sentence}"
    elif harmless < len(rows):
        sentence += "; `normscope simplify` finds where it can be dropped exactly"
    return Answer("mean", "ok" if len(rows) in (harmless, exact) else "note", sentence, worst["site"], rows)


def gamma(evidence: Evidence) -> Answer:
    """Answer whether γ is near 0 or 1, which channels it shuts off or amplifies, and where it folds."""
    if evidence.module is None:
        return Answer("γ", "omitted", "a capture does not contain γ; `normscope check MODEL` reads it")
    rows = []
    for site, _ in evidence.norms():
        if site.affine and site.name in evidence.affine:
            gain, stored = evidence.affine[site.name][0], getattr(submodule(evidence.module, site.path), "weight", None)
            norm = (evidence.plan or {}).get(site.name)
            folds_into = [name for name, *_ in norm.readers] if norm and norm.folded else None
            rows.append({"site": site.name, **_of_gain(gain, stored), "folds_into": folds_into})
    if not rows:
        return Answer("γ", "omitted", "no norm here has a weight")

    def names(key: str) -> list[str]:
        return [evidence.short[row["site"]] for row in rows if row[key]]

    missing = [row["site"] for row in rows if row["centred_on_0"] and not row["adds_1"]]
    if len(missing) > len(rows) / 2:  # the first norm of an RMSNorm network may be centred on 0 by itself
        where = first_few([evidence.short[site] for site in missing])
        sentence = f"the checkpoint may mean 1 + γ: γ is centred on 0 at {where}, and the module does not add 1"
        return Answer("γ", "problem", sentence, missing[0], rows)
    trained = [row for row in rows if not row["untrained"]]
    extreme = max(
        trained or rows, key=lambda row: (row["shut"] + row["amplified"], row["largest"] / (row["median"] or 1))
    )
    parts, unusual = [], []
    if untrained := names("untrained"):
        parts.append(f"it is 1 or 0 in all channels at {first_few(untrained)}: untrained, or folded already")
    if adding := names("adds_1"):
        parts.append(f"the module adds 1 to the stored weight at {first_few(adding)}")
    if trained:
        where = evidence.short[extreme["site"]]
        parts.append(f"|γ| differs most at {where}, {extreme['smallest']:.3g} to {extreme['largest']:.3g}")
        unusual = [f"shuts {extreme['shut']} off (under {_SHUT:g} times the median)"] if extreme["shut"] else []
        unusual += (
            [f"amplifies {extreme['amplified']} (over {_AMPLIFIED} times the median)"] if extreme["amplified"] else []
        )
    parts += [f"of its {extreme['channels']} channels it {' and '.join(unusual)}"] if unusual else []
    if evidence.plan is None:
        parts.append("`normscope simplify` finds where it folds into the next linear layers")
    else:
        least = "at least " if tied_heads(evidence.module) else ""  # simplify unties the head first
        folded = f"{least}{len(names('folds_into'))} of {len(rows)}"
        parts.append(f"`normscope simplify` folds {folded} into the next linear layers")
    return Answer("γ", "note" if untrained or unusual else "ok", "; ".join(parts), extreme["site"], rows)


def _of_gain(gain: Tensor, weight: Any) -> dict[str, Any]:
    """Describe γ as it is applied, and whether it is the weight that is stored."""
    size, median = gain.abs(), float(gain.abs().median())
    stored = weight.detach().float().cpu().flatten() if isinstance(weight, Tensor) else gain
    return {
        "channels": len(gain),
        **{"smallest": float(size.min()), "median": median, "largest": float(size.max())},
        "shut": int((size <= _SHUT * median).sum()),
        "amplified": int((size > _AMPLIFIED * median).sum()) if median else 0,
        "untrained": any(bool((gain - constant).abs().max() < _NEXT_TO) for constant in (0, 1)),
        "adds_1": stored.shape == gain.shape and bool((gain - 1 - stored).abs().max() < _NEXT_TO),
        "centred_on_0": min(float((stored > 0).float().mean()), float((stored < 0).float().mean())) > _SIGNS,
    }
