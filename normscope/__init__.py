"""See what the normalization layers of a pretrained network really do, and what happens when they are replaced.

>>> import normscope
>>> network = normscope.load("demo_vit")
>>> seen = normscope.capture(network.module, network.inputs, layers=4, about=network.about)
>>> fits = normscope.fit(seen, "tanh,isru")
>>> len(fits)
8
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from normscope.errors import NormscopeError
    from normscope.figures.comparison import plot_comparison
    from normscope.figures.drift import plot_drift
    from normscope.figures.gradient import plot_gradient
    from normscope.figures.healing import plot_healing
    from normscope.figures.overview import overview
    from normscope.figures.scurves import plot
    from normscope.figures.speed import plot_speed
    from normscope.fits.curve_fit import CurveFit
    from normscope.fits.curves.known import Curve, curve_of
    from normscope.fits.fit import fit
    from normscope.fits.views.advice import Advice, advise
    from normscope.fits.views.card import NormCard, norm_cards
    from normscope.fits.views.comparison import Compared, compare
    from normscope.fits.views.gradient import GradientView, gradient
    from normscope.fits.views.summaries import Layerwise, TokenSlopes, layerwise, token_slopes
    from normscope.inputs.batch import Batch, Sample
    from normscope.loading import load, load_swapped
    from normscope.pairs.capture import capture
    from normscope.pairs.captures import Capture
    from normscope.pairs.merging import merge_captures
    from normscope.pairs.norms.recognition import register_norm
    from normscope.pairs.storage import load as load_capture
    from normscope.pairs.storage import save as save_capture
    from normscope.pairs.sums.stats import PairStats
    from normscope.swaps.bench.bench import bench
    from normscope.swaps.drift.drift import drift
    from normscope.swaps.heal.heal import heal
    from normscope.swaps.pointwise import Derf, DyISRU, DyT, PointwiseFunction
    from normscope.swaps.replace import Swap, replacements, swap
    from normscope.swaps.reports import BenchReport, Drift, DriftReport, Timing
    from normscope.swaps.store import save_swapped

_HOMES = {
    "Advice": "fits.advice.Advice",
    "Batch": "batches.Batch",
    "BenchReport": "speeds.BenchReport",
    "Capture": "pairs.captures.Capture",
    "Compared": "fits.comparison.Compared",
    "Curve": "fits.curves.Curve",
    "CurveFit": "fits.curve_fit.CurveFit",
    "Derf": "swaps.pointwise.Derf",
    "Drift": "drifts.Drift",
    "DriftReport": "drifts.DriftReport",
    "DyISRU": "swaps.pointwise.DyISRU",
    "DyT": "swaps.pointwise.DyT",
    "GradientView": "fits.gradient.GradientView",
    "HealReport": "healings.HealReport",
    "Layerwise": "fits.layerwise.Layerwise",
    "NormCard": "fits.card.NormCard",
    "NormscopeError": "errors.NormscopeError",
    "PairStats": "pairs.stats.PairStats",
    "PointwiseFunction": "swaps.pointwise.PointwiseFunction",
    "Sample": "batches.Sample",
    "Swap": "swaps.replace.Swap",
    "Timing": "speeds.Timing",
    "TokenSlopes": "fits.tokens.TokenSlopes",
    "advise": "fits.advice.advise",
    "bench": "swaps.bench.bench",
    "capture": "pairs.hooks.capture",
    "compare": "fits.comparison.compare",
    "curve_of": "fits.curves.curve_of",
    "drift": "swaps.drift.drift",
    "fit": "fits.fit.fit",
    "gradient": "fits.gradient.gradient",
    "heal": "swaps.heal.heal",
    "layerwise": "fits.layerwise.layerwise",
    "load": "loading.load",
    "load_capture": "pairs.storage.load",
    "load_swapped": "loading.load_swapped",
    "merge_captures": "pairs.merges.merge_captures",
    "norm_cards": "fits.card.norm_cards",
    "overview": "figures.overview.overview",
    "plot": "figures.scurves.plot",
    "plot_comparison": "figures.comparison.plot_comparison",
    "plot_drift": "figures.drift.plot_drift",
    "plot_gradient": "figures.gradient.plot_gradient",
    "plot_healing": "figures.healing.plot_healing",
    "plot_speed": "figures.speed.plot_speed",
    "register_norm": "pairs.norms.register_norm",
    "replacements": "swaps.replace.replacements",
    "save_capture": "pairs.storage.save",
    "save_swapped": "swaps.store.save_swapped",
    "swap": "swaps.replace.swap",
    "token_slopes": "fits.tokens.token_slopes",
}

__all__ = [
    "Advice",
    "Batch",
    "BenchReport",
    "Capture",
    "Compared",
    "Curve",
    "CurveFit",
    "Derf",
    "Drift",
    "DriftReport",
    "DyISRU",
    "DyT",
    "GradientView",
    "HealReport",
    "Layerwise",
    "NormCard",
    "NormscopeError",
    "PairStats",
    "PointwiseFunction",
    "Sample",
    "Swap",
    "Timing",
    "TokenSlopes",
    "advise",
    "bench",
    "capture",
    "compare",
    "curve_of",
    "drift",
    "fit",
    "gradient",
    "heal",
    "layerwise",
    "load",
    "load_capture",
    "load_swapped",
    "merge_captures",
    "norm_cards",
    "overview",
    "plot",
    "plot_comparison",
    "plot_drift",
    "plot_gradient",
    "plot_healing",
    "plot_speed",
    "register_norm",
    "replacements",
    "save_capture",
    "save_swapped",
    "swap",
    "token_slopes",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `normscope --help` must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'normscope' has no attribute {name!r}")
    module, _, attribute = f"normscope.{_HOMES[name]}".rpartition(".")
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value
