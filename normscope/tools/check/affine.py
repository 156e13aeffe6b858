"""Mean and affine step of the norms: the cost of dropping the mean, and where γ is unusual."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from normscope.errors import count
from normscope.fits.card import centring_of
from normscope.inputs.wrappers import submodule
from normscope.norms.formulas import scale_and_shift
from normscope.norms.recognition import kind_at
from normscope.norms.sites import NormSite
from normscope.pairs.sums.magnitudes import of_tokens
from normscope.swaps.standalone import tied_heads
from normscope.tools.check.evidence import Affine, Evidence
from normscope.tools.check.reports import Answer, percent
from normscope.tools.simplify.dataflow import BlockedError

_HARMLESS = 1e-4  # of Σy², 1 % of the length of y
_SHUT, _AMPLIFIED = 1e-3, 10  # times the median |γ|
_NEXT_TO = 1e-3  # distance of γ from 1
_SIGNS = 0.1  # share of channels of either sign, of weights that are centred on 0


def mean(evidence: Evidence) -> Answer:
    """Answer what it costs to drop the mean, and at which sites `simplify` makes it exact."""
    rows: list[dict[str, Any]] = []
    for site, stats in evidence.norms():
        if site.form and site.centred:
            centring = centring_of(site, of_tokens(stats.token_offsets))
            row = {"site": site.name, "change_without": centring.change_without, "mean_share": centring.mean_share}
            rows.append(row)
    if not rows:
        return Answer("mean", "omitted", "no norm here subtracts a mean that its tokens determine")
    worst = max(rows, key=lambda row: row["change_without"])
    exact = _exact(evidence, {row["site"] for row in rows})
    rows = [row | {"exact": None if exact is None else row["site"] in exact} for row in rows]
    harmless = sum(row["change_without"] <= _HARMLESS for row in rows)
    parts = [
        f"dropping it changes y by {percent(math.sqrt(worst['change_without']))} at {evidence.short[worst['site']]}, "
        f"the most of {count(len(rows), 'norm')}" + (f", and by less than 1% at {harmless}" if harmless else "")
    ]
    if exact is not None:
        parts.append(f"by the data flow, `normscope simplify` drops it exactly at {len(exact)} of {len(rows)}")
    elif harmless < len(rows):
        parts.append("`normscope simplify` finds and proves where it can be dropped exactly")
    verdict = "ok" if max(harmless, len(exact or ())) == len(rows) else "note"
    return Answer("mean", verdict, "; ".join(parts), worst["site"], rows)  # type: ignore[arg-type]


def _exact(evidence: Evidence, names: Collection[str]) -> set[str] | None:
    """Return the LayerNorms that become RMSNorms by the data flow; None if it could not be followed."""
    if evidence.flow is None:
        return None
    written = {
        site.name: _of_flow(evidence, "writers", site)
        for site, _ in evidence.norms()
        if site.name in names and site.form == "layer_norm" and _is_rewritable(evidence, site)
    }
    blocked = [name for name, parameters in written.items() if parameters is None]
    centred = (name for _, served in evidence.flow.entries(blocked) for name in served)
    return {name for name, parameters in written.items() if parameters is not None}.union(centred)


def _is_rewritable(evidence: Evidence, site: NormSite) -> bool:
    """True for norms that `simplify` does not leave as they are."""
    if evidence.module is None or not site.replaceable:
        return False
    kind = kind_at(submodule(evidence.module, site.path), site)
    return not (isinstance(kind, str) or kind.form is None or kind.activation) and kind.affine is scale_and_shift


def _of_flow(evidence: Evidence, direction: str, site: NormSite) -> list[str] | None:
    """Return the parameters that write what a norm reads, or read what it writes; None if they cannot be rewritten."""
    if evidence.flow is None or not _is_rewritable(evidence, site):
        return None
    try:
        return [name for name, *_ in getattr(evidence.flow, direction)(site)]
    except BlockedError:
        return None


def gamma(evidence: Evidence) -> Answer:
    """Answer whether γ is near 0 or 1, which channels it shuts off or amplifies, and where it folds."""
    if evidence.module is None:
        return Answer("γ", "omitted", "a capture does not contain γ; `normscope check MODEL` reads it")
    rows = [
        {"site": site.name, **_of_gain(affine), "folds_into": _of_flow(evidence, "linear_readers", site)}
        for site, _ in evidence.norms()
        if site.affine and (affine := (evidence.affine or {}).get(site.name)) is not None
    ]
    if not rows:
        return Answer("γ", "omitted", "no norm here has a weight")

    def at(sites: Sequence[Mapping[str, Any]]) -> str:
        return f"at {evidence.short[sites[0]['site']]}" + (f" and {len(sites) - 1} more" if len(sites) > 1 else "")

    missing = [row for row in rows if row["centred_on_0"] and not row["adds_1"]]
    if len(missing) > len(rows) / 2:  # the first norm of an RMSNorm network may be centred on 0 by itself
        sentence = f"it is centred on 0 {at(missing)}, and the module does not add 1: the checkpoint may mean 1 + γ"
        return Answer("γ", "problem", sentence, missing[0]["site"], rows)
    extreme = max(rows, key=lambda row: (row["shut"] + row["amplified"], row["largest"] / (row["median"] or 1)))
    untrained, adding = ([row for row in rows if row[name]] for name in ("untrained", "adds_1"))
    parts = [f"it is 1 {at(untrained)}: untrained, or folded already"] if untrained else []
    parts += [f"the module adds 1 to the stored weight {at(adding)}"] if adding else []
    if len(untrained) < len(rows):
        parts.append(f"|γ| differs most {at([extreme])}, {extreme['smallest']:.3g} to {extreme['largest']:.3g}")
    unusual = [f"shuts {extreme['shut']} off (under {_SHUT:g} of the median)"] if extreme["shut"] else []
    unusual += [f"amplifies {extreme['amplified']} (over {_AMPLIFIED} times it)"] if extreme["amplified"] else []
    parts += [f"of its {extreme['channels']} channels it {' and '.join(unusual)}"] if unusual else []
    folded = sum(row["folds_into"] is not None for row in rows)
    least = "at least " if evidence.module and tied_heads(evidence.module) else ""  # simplify unties the head first
    where = f"{least}{folded} of {len(rows)} fold" if folded else "none folds"
    simplify = f"by the data flow, {where} into the next linear layers (`normscope simplify`)"
    parts.append(simplify if evidence.flow else "`normscope simplify` finds where it folds into the next linear layers")
    return Answer("γ", "note" if untrained or unusual else "ok", "; ".join(parts), extreme["site"], rows)


def _of_gain(affine: Affine) -> dict[str, Any]:
    gain, size, median = affine.gain, affine.gain.abs(), float(affine.gain.abs().median())
    stored = gain if affine.weight is None else affine.weight.detach().float().cpu().flatten()
    return {
        "channels": len(gain),
        **{"smallest": float(size.min()), "median": median, "largest": float(size.max())},
        "shut": int((size <= _SHUT * median).sum()),
        "amplified": int((size > _AMPLIFIED * median).sum()) if median else 0,
        "untrained": bool((gain - 1).abs().max() < _NEXT_TO),
        "adds_1": stored.shape == gain.shape and bool((gain - 1 - stored).abs().max() < _NEXT_TO),
        "centred_on_0": min(float((stored > 0).float().mean()), float((stored < 0).float().mean())) > _SIGNS,
    }
