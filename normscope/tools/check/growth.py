"""Questions about the residual stream: the growth of σ, and spikes such as massive activations."""

from __future__ import annotations

import itertools

from normscope.errors import count
from normscope.fits.spikes import SPIKE_RATIO, Spike, stream_of
from normscope.show.tables.table import rounded
from normscope.tools.check.evidence import Evidence
from normscope.tools.check.reports import Answer

_MUCH = 10  # times: α that suits one norm does not suit another
_SMALL_GAMMA = 0.01  # of the median |γ|
_ALIKE = 0.9  # cosine


def growth(evidence: Evidence) -> Answer:
    """Report σ from the first norm to the last, and the sublayer with which it grows most."""
    stream = stream_of(evidence.capture)
    rows = [norm.as_dict() for norm in stream.norms]
    with_sigma = {site.name for site in evidence.capture.sites if site.form}  # of tokens, not of running statistics
    if stream.placement is None or len(rows) < 2 or not with_sigma.issuperset(row["site"] for row in rows):
        return Answer("growth", "omitted", "no two norms of one residual stream divide by σ of a token", sites=rows)
    (first, *_, last), short = stream.norms, evidence.short
    words = f"median σ goes from {rounded(first.sigma)} in {short[first.site]} to {rounded(last.sigma)} in "
    words += short[last.site]
    if stream.placement == "post-norm":
        return Answer("growth", "ok", f"{words}; post-norms normalize the stream itself", None, rows)
    before, steepest = max(itertools.pairwise(stream.norms), key=lambda pair: pair[1].sigma / pair[0].sigma)
    step = f"({rounded(steepest.sigma / before.sigma)} ×) {_behind(short[before.site], steepest.written_by)}"
    words += f", a factor of {rounded(last.sigma / first.sigma)}; it grows most {step}"
    if last.sigma > _MUCH * first.sigma:
        return Answer("growth", "note", f"{words}: each norm needs an α of its own", steepest.site, rows)
    return Answer("growth", "ok", words, steepest.site, rows)


def spikes(evidence: Evidence) -> Answer:
    """Report the largest spike, with the sublayers that write and remove it, and the number of further ones."""
    stream = stream_of(evidence.capture)
    if not stream.norms:
        return Answer("spikes", "omitted", "at no norm, the median of |x| is above 0")
    if not stream.spikes:
        highest = max(stream.norms, key=lambda norm: norm.ratio)
        where = f"{evidence.short[highest.site]}, channel {highest.channel}"
        words = f"no |x| exceeds {SPIKE_RATIO} × the median; the largest is {rounded(highest.ratio)} × in {where}"
        return Answer("spikes", "ok", words, highest.site)
    rows = [{**spike.as_dict(), "gamma": _gamma(evidence, spike)} for spike in stream.spikes]
    spike = max(stream.spikes, key=lambda spike: spike.ratio)
    largest = f"{rounded(spike.ratio)} × the median of |x| in {evidence.short[spike.peak]}"
    parts = [f"channel {spike.channel}{_tokens(evidence, spike)}: {largest}"]
    parts += _life(evidence, spike) if stream.placement == "pre-norm" else []
    if spike.cosine is not None and spike.cosine > _ALIKE:
        parts.append(f"the tokens have the same y (cosine {spike.cosine:.2f}), which acts as a bias")
    ignored = [row for row in rows if row["gamma"] is not None and abs(row["gamma"]) < _SMALL_GAMMA]
    parts += [
        f"in {evidence.short[row['peak']]}, γ of channel {row['channel']} is near 0: it only sets σ" for row in ignored
    ]
    parts += [count(len(rows) - 1, "further spike")] if len(rows) > 1 else []
    return Answer("spikes", "note", "; ".join(parts), spike.peak, rows)


def _tokens(evidence: Evidence, spike: Spike) -> str:
    """Name the positions at which every sample has a spike, or the only position, or their number."""
    samples = evidence.capture.n_samples
    always = sorted(position for position, tokens in spike.positions if tokens == samples > 1)
    if always:
        return f" at token{'s' * (len(always) > 1)} {' and '.join(map(str, always))} of all {samples} samples"
    if len(spike.positions) == 1:
        return f" at token {spike.positions[0][0]}"
    return f" at {len(spike.positions)} positions" if spike.positions else ""


def _life(evidence: Evidence, spike: Spike) -> list[str]:
    """Describe where a spike is born and where it ends, and by which sublayers."""
    short = evidence.short
    born, ended = f"born in {short[spike.site]}", "lasts to the end of the stream"
    if spike.before is not None:
        born += f" {_behind('the norm before', spike.written_by)} ({rounded(spike.before)} × before)"
    if spike.after is not None:
        ended = f"gone {_behind(short[spike.last], spike.removed_by)} ({rounded(spike.after)} ×)"
    if spike.massive is None:
        return [born, ended]
    first, last = (short[site] for site in spike.massive)
    return [born, f"massive from {first} to {last}", ended]


def _behind(site: str, sublayer: str | None) -> str:
    return f"behind {site}" if sublayer is None else f"by the {sublayer}"


def _gamma(evidence: Evidence, spike: Spike) -> float | None:
    """Return γ of the channel over the median |γ| at the peak; None without the network, or without γ."""
    gain, _ = evidence.affine.get(spike.peak, (None, None))
    return float(gain[spike.channel] / gain.abs().median()) if gain is not None and gain.abs().median() else None
