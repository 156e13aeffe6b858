"""Second pass over inputs: sums over whole tokens, for predictions of each token's σ²."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normscope.inputs.held_out import Pool
from normscope.inputs.wrappers import submodule
from normscope.norms.formulas import FORMS
from normscope.norms.sites import NormSite
from normscope.norms.trace import NormReport
from normscope.pairs.capture import captured
from normscope.pairs.recorder import CaptureOptions
from normscope.runtime.progress import Progress

MOST_CANDIDATES = 128
_TOKENS_AT_ONCE = 4096


@dataclass(eq=False)
class TokenSums:
    """Gram matrices of the tokens at one norm site.

    A token x, with y = (x − μ)/σ, has the features v = [1, z, z², σ²], where z = x − centre at the candidate channels.
    Tokens without variance (y = 0) are left out. A site takes 1.1 MB.

    Attributes:
        site: the norm; σ² includes its eps.
        channels: M candidates: the channels of largest Σx² in the first call, 128 at most; int64 ``(M,)``.
        centre: their means in the first call, float32 ``(M,)``.
        gram: Σ v vᵀ of the tokens to learn from and of the held-out ones: float64 ``(2, 2M + 2, 2M + 2)``.
        gamma: γ of every channel, float32 ``(d,)``.
        squares: Σy² of every channel, over all tokens, float64 ``(d,)``.
    """

    site: NormSite
    channels: Tensor
    centre: Tensor
    gram: Tensor
    gamma: Tensor
    squares: Tensor

    @classmethod
    def begun(cls, site: NormSite, rows: Tensor, gamma: Tensor) -> TokenSums:
        """Return empty sums, with candidates chosen from token rows ``(tokens, d)``."""
        x = rows.double()
        channels = x.square().sum(0).topk(min(MOST_CANDIDATES, site.channels)).indices
        size = 2 * len(channels) + 2
        gram, squares = x.new_zeros(2, size, size), x.new_zeros(site.channels)
        return cls(site, channels, x[:, channels].mean(0).float(), gram, gamma.cpu(), squares)

    def add(self, rows: Tensor, split: int) -> None:
        """Add token rows ``(tokens, d)`` to split 0, to learn from, or 1, held out."""
        for first in range(0, len(rows), _TOKENS_AT_ONCE):
            x = rows[first : first + _TOKENS_AT_ONCE].double()
            x = x[x.isfinite().all(1) & (x != x[:, :1]).any(1)]
            shift, rstd = FORMS[self.site.form].line(x, self.site.eps)  # type: ignore[index]  # norm_cards checks it
            self.squares += ((x - shift) * rstd).square().sum(0)
            z = x[:, self.channels] - self.centre
            v = torch.cat([torch.ones_like(rstd), z, z.square(), rstd**-2], 1)
            self.gram[split].addmm_(v.mT, v)


def token_sums(
    network: nn.Module, pool: Pool, report: NormReport, sites: Sequence[NormSite], progress: Progress
) -> dict[str, TokenSums]:
    """Run a network over inputs to learn from and held-out ones, and return the sums at some norm modules, by name."""
    sums: dict[str, TokenSums] = {}
    for split, batches in enumerate((pool.learned, pool.validation) if sites else ()):

        def add(site: NormSite, rows: Tensor, _: Tensor, split: int = split) -> None:
            if site.name not in sums:
                gamma = report.kinds[site.name].gamma(submodule(network, site.path), site.channels)
                sums[site.name] = TokenSums.begun(site, rows, gamma)
            sums[site.name].add(rows, split)

        names = [site.name for site in sites]
        captured(network, batches, CaptureOptions(observe=add), layers=names, progress=progress)
    return sums
