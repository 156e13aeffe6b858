"""Second pass over inputs: sums over whole tokens, for predictions of each token's σ² and mean, and for constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normscope.inputs.held_out import Pool
from normscope.inputs.wrappers import submodule
from normscope.pairs.capture import captured
from normscope.pairs.norms.formulas import FORMS
from normscope.pairs.norms.sites import NormSite
from normscope.pairs.norms.trace import NormReport
from normscope.pairs.recorder import Summing
from normscope.runtime.progress import Progress

MOST_CANDIDATES = 128
POWERS = (0, 2, 4)  # p of the weights σ⁻ᵖ
FIRST = 4  # positions that may have a σ of their own
_TOKENS_AT_ONCE = 4096


@dataclass(eq=False)
class TokenSums:
    """Weighted Gram matrices of the tokens at one norm site.

    A token x, with y = (x − μ)/σ, has the features v = [1, z, z², σ², μ], where z = x − centre at the candidate
    channels. Tokens without variance (y = 0) are left out. A site takes 3.2 MB.

    Attributes:
        site: the norm; σ² includes its eps.
        channels: M candidates: the channels of largest Σx² in the first call, 128 at most; int64 ``(M,)``.
        centre: their means in the first call, float32 ``(M,)``.
        gram: Σ σ⁻ᵖ v vᵀ for each p in :data:`POWERS`, of the tokens to learn from and of the held-out ones: float64
            ``(2, 3, 2M + 3, 2M + 3)``.
        gamma: γ of every channel, float32 ``(d,)``.
        squares: Σy² of every channel, over all tokens, float64 ``(d,)``.
        least: smallest σ².
        by_position: Σ γ²(x − μ)·y and Σ γ²(x − μ)², over all elements of the tokens at each of the first positions, and
            of all others: float64 ``(5, 2)``.
    """

    site: NormSite
    channels: Tensor
    centre: Tensor
    gram: Tensor
    gamma: Tensor
    squares: Tensor
    by_position: Tensor
    least: float = torch.inf

    @classmethod
    def begun(cls, site: NormSite, rows: Tensor, gamma: Tensor) -> TokenSums:
        """Return empty sums, with candidates chosen from token rows ``(tokens, d)``."""
        x = rows.double()
        channels = x.square().sum(0).topk(min(MOST_CANDIDATES, site.channels)).indices
        size = 2 * len(channels) + 3
        gram, squares = x.new_zeros(2, len(POWERS), size, size), x.new_zeros(site.channels)
        by_position = x.new_zeros(FIRST + 1, 2)
        return cls(site, channels, x[:, channels].mean(0).float(), gram, gamma.cpu(), squares, by_position)

    def add(self, rows: Tensor, positions: Tensor, part: int) -> None:
        """Add token rows ``(tokens, d)`` and their positions to part 0, to learn from, or 1, held out."""
        for first in range(0, len(rows), _TOKENS_AT_ONCE):
            some = slice(first, first + _TOKENS_AT_ONCE)
            x, at = rows[some].double(), positions[some]
            counted = x.isfinite().all(1) & (x != x[:, :1]).any(1)
            x, at = x[counted], at[counted]
            if not len(x):
                continue
            shift, rstd = FORMS[self.site.form].line(x, self.site.eps)  # type: ignore[index]  # fit_scale checks it
            self.squares += ((x - shift) * rstd).square().sum(0)
            square = ((x - shift) * self.gamma.to(x)).square().sum(1, keepdim=True)
            place = at.where((at >= 0) & (at < FIRST), FIRST)
            self.by_position.index_add_(0, place, square * torch.cat([rstd, torch.ones_like(rstd)], 1))
            z = x[:, self.channels] - self.centre
            v = torch.cat([torch.ones_like(rstd), z, z.square(), rstd**-2, shift], 1)
            for gram, power in zip(self.gram[part], POWERS, strict=True):
                gram.addmm_((v * rstd**power).mT, v)
            self.least = min(self.least, float(rstd.max()) ** -2)


def token_sums(
    network: nn.Module, pool: Pool, report: NormReport, sites: Sequence[NormSite], progress: Progress, skip: int = 0
) -> dict[str, TokenSums]:
    """Run a network over inputs to learn from and held-out ones, and return the sums at some norm modules, by name."""
    sums: dict[str, TokenSums] = {}
    for part, of_part in enumerate((pool.learned, pool.judged) if sites else ()):

        def add(site: NormSite, rows: Tensor, positions: Tensor, part: int = part) -> None:
            if site.name not in sums:
                gamma = report.kinds[site.name].gamma(submodule(network, site.path), site.channels)
                sums[site.name] = TokenSums.begun(site, rows, gamma)
            sums[site.name].add(rows, positions, part)

        names = [site.name for site in sites]
        captured(network, of_part, Summing(observe_tokens=add, skip=skip), layers=names, progress=progress)
    return sums
