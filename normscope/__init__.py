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
    from normscope.batches import Batch, Sample
    from normscope.errors import NormscopeError
    from normscope.figures.comparison import plot_comparison
    from normscope.figures.overview import overview
    from normscope.figures.scurves import plot
    from normscope.fits.advice import Advice, advise
    from normscope.fits.comparison import Compared, compare
    from normscope.fits.curve_fit import CurveFit
    from normscope.fits.fit import fit
    from normscope.models.registry import load
    from normscope.pairs.captures import Capture
    from normscope.pairs.hooks import capture
    from normscope.pairs.norms import register_norm
    from normscope.pairs.stats import PairStats
    from normscope.pairs.storage import load as load_capture
    from normscope.pairs.storage import save as save_capture

_HOMES = {
    "Advice": "fits.advice.Advice",
    "Batch": "batches.Batch",
    "Capture": "pairs.captures.Capture",
    "Compared": "fits.comparison.Compared",
    "CurveFit": "fits.curve_fit.CurveFit",
    "NormscopeError": "errors.NormscopeError",
    "PairStats": "pairs.stats.PairStats",
    "Sample": "batches.Sample",
    "advise": "fits.advice.advise",
    "capture": "pairs.hooks.capture",
    "compare": "fits.comparison.compare",
    "fit": "fits.fit.fit",
    "load": "models.registry.load",
    "load_capture": "pairs.storage.load",
    "overview": "figures.overview.overview",
    "plot": "figures.scurves.plot",
    "plot_comparison": "figures.comparison.plot_comparison",
    "register_norm": "pairs.norms.register_norm",
    "save_capture": "pairs.storage.save",
}

__all__ = [
    "Advice",
    "Batch",
    "Capture",
    "Compared",
    "CurveFit",
    "NormscopeError",
    "PairStats",
    "Sample",
    "advise",
    "capture",
    "compare",
    "fit",
    "load",
    "load_capture",
    "overview",
    "plot",
    "plot_comparison",
    "register_norm",
    "save_capture",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `normscope --help` must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'normscope' has no attribute {name!r}")
    module, _, attribute = f"normscope.{_HOMES[name]}".rpartition(".")
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value
