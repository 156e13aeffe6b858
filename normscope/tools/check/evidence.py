"""Measurements that the questions of a check are answered from."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normscope.errors import ModelError, count
from normscope.inputs.batch import Batch
from normscope.inputs.wrappers import submodule
from normscope.norms.bound_inputs import BoundInputs
from normscope.norms.kinds import NormKind
from normscope.norms.recognition import kind_at
from normscope.norms.sites import NormSite, short_names
from normscope.norms.trace import find_norms
from normscope.pairs.captures import Capture
from normscope.pairs.sums.stats import PairStats
from normscope.swaps.replace import model_tensor
from normscope.tools.check.attention import AttentionLogits, attention_logits
from normscope.tools.simplify.dataflow import DataFlow
from normscope.tools.simplify.simplify import Plan, PlannedNorm

_PRECISE = (torch.float32, torch.float64)  # of weights, whose data flow can be followed by their numbers


@dataclass(frozen=True, eq=False)
class Evidence:
    """A capture, and what a check reads from the network itself.

    Attributes:
        capture: of the network; its 16 tokens of largest |x| per site are whole, ``stats[site].largest.x``.
        module: the network; None for a capture file, and questions that need it are omitted.
        batches: the inputs of the capture, for a second pass; None without a network, or if they can be read only once.
        eps: an eps to compare with each site's own, or None.
    """

    capture: Capture
    module: nn.Module | None = None
    batches: BoundInputs | None = None
    eps: float | None = None

    @functools.cached_property
    def affine(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Gain (γ, or 1 + γ where the module adds 1) and offset β by site, each ``(channels,)``; empty for a file."""
        affine = {}
        for site, _ in self.norms():
            if self.module is not None and not site.is_call:
                norm = submodule(self.module, site.path)
                kind = kind_at(norm, site)
                if isinstance(kind, NormKind):
                    gain, offset = kind.gain_and_offset(norm, site.channels)
                    affine[site.name] = gain.cpu(), offset.cpu()
        return affine

    @functools.cached_property
    def short(self) -> dict[str, str]:
        """Short names of all sites, for sentences."""
        names = short_names(site.name for site in self.capture.sites)
        return {name: short or "the network" for name, short in names.items()}

    def left_out(self, answered: Collection[str], why: str) -> str:
        """Return the end of a sentence: norms that an answer leaves out, with the reason, and point-wise functions."""
        functions = sum(site.pointwise is not None for site in self.capture.sites)
        others = [site.name for site, _ in self.norms() if site.name not in answered]
        parts = [f"{count(len(others), 'site')} {why}"] if others else []
        parts += [count(functions, "point-wise function")] if functions else []
        return f"; left out: {', '.join(parts)}" if parts else ""

    @functools.cached_property
    def logits(self) -> Mapping[str, AttentionLogits]:
        """Logits of attention by site, from a second pass; empty without one."""
        if self.module is None or self.batches is None:
            return {}
        return attention_logits(self.module, self._sites, self.batches)

    @functools.cached_property
    def plan(self) -> Mapping[str, PlannedNorm] | None:
        """Rewrites by `simplify` by site, as the data flow of one sample allows them.

        None without the network, or if its data flow cannot be followed, or in a precision too coarse to follow it in.
        """
        if self.module is None or self.batches is None:
            return None
        dtype = model_tensor(self.module).dtype
        if dtype not in _PRECISE:
            return None
        try:
            flow = DataFlow(self.module, [site for site in self._sites if site.replaceable], self._sample)
        except ModelError:  # of what hides readers
            return None
        return {norm.site: norm for norm in Plan(self.module, self._sites, flow, dtype).norms}

    @functools.cached_property
    def _sample(self) -> Batch:
        return next(iter(self.batches or ())).first_sample()

    @functools.cached_property
    def _sites(self) -> list[NormSite]:
        """All sites of the network, captured or not."""
        return find_norms(self.module, self._sample).sites if self.module else []

    def norms(self) -> Iterator[tuple[NormSite, PairStats]]:
        """Yield the norms that have pairs, with their sums; point-wise functions are left out."""
        for site in self.capture.sites:
            if site.pointwise is None and self.capture.stats[site.name].n_pairs:
                yield site, self.capture.stats[site.name]
