"""Sinks: a position that carries most of Σx² at a norm, such as the first token of each text."""

from __future__ import annotations

from dataclasses import dataclass, replace

from normscope.fits.targets import NO_PAIR, FitTarget, nothing_in
from normscope.pairs.sums.stats import PairStats

_SHARE = 0.5  # of Σx²
_TIMES = 2  # of the mean square at all other positions: in samples of two tokens, one has half of Σx²


@dataclass(frozen=True)
class Sink:
    """A position that carries more than half of Σx² at a site.

    Attributes:
        position: number of its token in each sample, from 0, without padding.
        share: of Σx² over all pairs.
        curve, r2: of a fit to all pairs.
        r2_without: R² of the same curve, fitted to the pairs at all other positions. None unless the position is the
            first that is in the sums, for E[y|x], for weighted pairs and for curves in theory.
    """

    position: int
    share: float
    curve: str | None = None
    r2: float | None = None
    r2_without: float | None = None


def sink_of(stats: PairStats) -> Sink | None:
    """Return the position that carries more than half of Σx², if there is one and all positions are known."""
    total, tokens = float(stats.channel_sums[1].sum()), stats.n_tokens
    if stats.position_sums[0].sum() < tokens or not total > 0:
        return None
    position = int(stats.position_sums[1, :-1].argmax())
    n, squares = stats.position_sums[:, position].tolist()
    share, above = squares / total, squares * (tokens - n) > _TIMES * (total - squares) * n
    return Sink(position, share) if share > _SHARE and above else None


def without_first(target: FitTarget, stats: PairStats) -> FitTarget:
    """Return the target of a site without the first position, and without folds."""
    moments = target.moments.sum(0) - stats.first_moments.mT
    moments = moments.where(moments[0] > 0.5, 0.0)[None]  # counts are whole numbers; what is left is rounding
    n, _, _, squares, *_ = moments[0]
    reach, nothing = float((squares / n.clamp_min(1)).max().sqrt()), nothing_in(moments, NO_PAIR)
    return replace(target, moments=moments, counts=moments[:, 0], reach=reach, nothing=nothing, fold_by=None)
