"""fit_scale(): token-wise functions that predict each token's scale from a few of its channels, or freeze it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import nn

from normscope.errors import ModelError, UsageError
from normscope.fits.scale import FewFit, FrozenFit, few_fit, frozen_fit
from normscope.inputs.held_out import Pool
from normscope.inputs.loaded_model import LoadedModel, Outputs
from normscope.pairs.norms.sites import Layers
from normscope.pairs.norms.streams import unpacked
from normscope.pairs.norms.trace import find_norms
from normscope.pairs.token_sums import POWERS, token_sums
from normscope.runtime.network import uncompiled
from normscope.runtime.progress import Progress, silent
from normscope.swaps.drift.drift import drift
from normscope.swaps.replace import check_token_wise, replacements
from normscope.swaps.start import FEW, RANDOM, asked_for, few_channels, fits_scale, replaceable


def fit_scale(
    model: nn.Module | LoadedModel,
    batches: Iterable[Any] | None = None,
    func: str = FEW,
    *,
    layers: Layers = "all",
    outputs: Outputs | None = None,
    skip: int = 0,
    progress: Progress = silent,
) -> list[FewFit] | list[FrozenFit]:
    """Estimate the scale of each norm's tokens, for ``swap(model, func, fits)``.

    A token-wise function y = (x − μ)/σ replaces each norm, before weight and bias.

    ``few:K``: σ² and μ are linear in x and x² of K channels, by least squares with weights 1, σ⁻² or σ⁻⁴. The channels
    are chosen greedily by the held-out R² of σ², the weights by the drift of the output on a fourth of the inputs with
    all sites swapped. Predictions of σ² below half of the smallest σ² seen are set to that. The function is no faster
    than the norm.

    ``frozen``: μ is exact, and σ is a constant, with the least squared error of the norm's output. Where the samples of
    a norm's input are sequences of tokens, each of the first four positions has its own σ if that differs by more than
    a factor of 2. The network then takes whole sequences, padded at their end.

    Args:
        model: the result of :func:`normscope.load`, or any module; it is left as found.
        batches: inputs to learn from, as :func:`normscope.capture` takes them, at most a gibibyte in memory. None for a
            loaded model's calibration inputs or, if it has none, its inputs.
        func: ``few:K``, by default K = 8; ``random:K`` for K channels drawn at random; or ``frozen``.
        layers: a selection of norms, as of :func:`normscope.swap`.
        outputs: how to read the network's output; by default as the loaded model states, or the first tensor.
        skip: number of first positions of each sample that no fit is made to, as of :func:`normscope.capture`.
        progress: called with the stage, the number of samples done, and the total.

    Returns:
        One :class:`normscope.fits.scale.FewFit` or :class:`normscope.fits.scale.FrozenFit` for each site.

    Raises:
        UsageError: if there is no such site or function, or K exceeds the number of candidates, 128 at most.
        ModelError: if a norm does not scale each token by the token's own σ.
        DataError: if there are fewer than two samples.

    >>> import normscope
    >>> network = normscope.load("demo_vit", device="cpu", limit=8)
    >>> fits = fit_scale(network, func="few:4", layers="final")
    >>> with normscope.swap(network, "few:4", fits):
    ...     print(network.module.norm)
    FewChannelNorm(
      64, k=4
      (predictor): Predictor()
    )
    """
    if not fits_scale(name := str(asked_for(func))):
        raise UsageError(f"fit_scale() fits few:K and frozen, not {func}.")
    return SecondPass(model, batches, layers=layers, outputs=outputs, skip=skip, progress=progress).fits(name)


class SecondPass:
    """Sums of a second pass over inputs to learn from, and the fits that follow; arguments are those of `fit_scale`."""

    def __init__(
        self,
        model: nn.Module | LoadedModel,
        batches: Iterable[Any] | None = None,
        *,
        layers: Layers = "all",
        outputs: Outputs | None = None,
        skip: int = 0,
        progress: Progress = silent,
    ) -> None:
        if batches is None and isinstance(model, LoadedModel):
            batches = model.inputs if model.calibration is None else model.calibration
        network, batches, _, self._outputs = unpacked(model, batches, outputs=outputs)
        self._network, self._pool, self._progress = uncompiled(network), Pool.of(batches), progress
        report = find_norms(self._network, self._pool.learned[0].first_sample())
        sites = replaceable(report.sites, layers)
        for site in sites:
            check_token_wise(site, report.kinds[site.name], "A fit of σ")
            if site.form is None:
                raise ModelError(f"A fit of σ cannot take the place of {site.name}: its formula is not known.")
        self._sums = token_sums(self._network, self._pool, report, sites, progress, skip)

    def fits(self, func: str, seed: int = 0) -> list[FewFit] | list[FrozenFit]:
        """Return the fits of ``few:K``, ``random:K`` or ``frozen``; ``seed`` draws the channels of ``random:K``."""
        if not (k := few_channels(func)):
            return [frozen_fit(sums) for sums in self._sums.values()]
        best, least = list[FewFit](), math.inf
        for power in POWERS:
            fits = [
                few_fit(sums, k, power, seed + sums.site.index if func.startswith(RANDOM) else None)
                for sums in self._sums.values()
            ]
            modules = replacements(self._network, func, fits)
            options: dict[str, Any] = {"outputs": self._outputs, "one_at_a_time": False, "cumulative": False}
            moved = drift(self._network, self._pool.judged, modules, **options, progress=self._progress).all
            if not best or moved.error.p50 < least:
                best, least = fits, moved.error.p50
        return best
