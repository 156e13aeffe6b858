"""Drift of RMSNorms in a network whose streams were centred exactly."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from normscope.errors import ModelError
from normscope.inputs.loaded_model import LoadedModel
from normscope.pairs.norms.sites import NormSite
from normscope.pairs.norms.streams import unpacked
from normscope.runtime.network import left_as_found, run, uncompiled
from normscope.runtime.spread import check_whole
from normscope.swaps.distances import Configuration, Tallies, distances, output_by_sample
from normscope.swaps.replace import Swap, replacements
from normscope.swaps.reports import OUTPUT, DriftReport
from normscope.swaps.simplify.simplify import simplify
from normscope.swaps.start import RMS_NORM


def centred_drift(
    model: nn.Module | LoadedModel, learn: Iterable[Any], batches: Iterable[Any], norms: Sequence[NormSite]
) -> DriftReport:
    """Measure the drift of a copy that :func:`normscope.simplify` rewrites, where RMSNorm replaces the norms left.

    The report has the output's row alone. ModelError if none of the norms can be rewritten exactly.
    """
    module, batches, about, outputs = unpacked(model, batches)
    check_whole(module, "Centring")
    original, rewritten = uncompiled(module), copy.deepcopy(uncompiled(module))
    exact, sites = {norm.site for norm in simplify(rewritten, learn).exact}, [norm.name for norm in norms]
    if exact.isdisjoint(sites):
        raise ModelError("No norm here can be rewritten exactly.")
    if left := [norm for norm in norms if norm.name not in exact]:
        Swap(rewritten, replacements(rewritten, RMS_NORM, left))
    tallies = Tallies([everything := Configuration("all", None, tuple(sites))])
    with left_as_found(original), left_as_found(rewritten):
        for number, batch in enumerate(batches):
            read = (outputs.read(run(network, batch), batch) for network in (original, rewritten))
            (before, valid), (after, _) = (output_by_sample(output, batch, outputs.kind) for output in read)
            tallies.add(everything, OUTPUT, "", distances(before, after, valid, outputs.kind), (number, 0))
    func = f"{RMS_NORM} centred"
    return DriftReport(func, "", sites, [replace(row, func=func) for row in tallies.rows([])], about)
