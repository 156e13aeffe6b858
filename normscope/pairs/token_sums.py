"""Second pass over inputs: sums over whole tokens, from which a few channels predict each token's σ² and mean."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normscope.pairs.capture import captured
from normscope.pairs.norms.formulas import FORMS
from normscope.pairs.norms.sites import NormSite
from normscope.pairs.recorder import Summing
from normscope.runtime.progress import Progress, silent

MOST_CANDIDATES = 128
POWERS = (0, 2, 4)  # p of the weights σ⁻ᵖ
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
        y_squares: Σy² of each channel over all tokens, float64 ``(channels,)``.
        least: smallest σ².
    """

    site: NormSite
    channels: Tensor
    centre: Tensor
    gram: Tensor
    y_squares: Tensor
    least: float = torch.inf

    @classmethod
    def begun(cls, site: NormSite, rows: Tensor) -> TokenSums:
        """Return empty sums, with candidates chosen from token rows ``(tokens, d)``."""
        x = rows.double()
        channels = x.square().sum(0).topk(min(MOST_CANDIDATES, site.channels)).indices
        size = 2 * len(channels) + 3
        return cls(
            *(site, channels, x[:, channels].mean(0).float()),
            gram=x.new_zeros(2, len(POWERS), size, size),
            y_squares=x.new_zeros(site.channels),
        )

    def add(self, rows: Tensor, part: int) -> None:
        """Add token rows ``(tokens, d)`` to part 0, to learn from, or 1, held out."""
        for first in range(0, len(rows), _TOKENS_AT_ONCE):
            x = rows[first : first + _TOKENS_AT_ONCE].double()
            x = x[x.isfinite().all(1) & (x != x[:, :1]).any(1)]
            if not len(x):
                continue
            shift, rstd = FORMS[self.site.form].line(x, self.site.eps)  # type: ignore[index]  # fit_few checks it
            z = x[:, self.channels] - self.centre
            v = torch.cat([torch.ones_like(rstd), z, z.square(), rstd**-2, shift], 1)
            for gram, power in zip(self.gram[part], POWERS, strict=True):
                gram.addmm_((v * rstd**power).mT, v)
            self.y_squares += ((x - shift) * rstd).square().sum(0)
            self.least = min(self.least, float(rstd.max()) ** -2)


def second_pass(
    model: nn.Module,
    learned: Iterable[Any],
    held_out: Iterable[Any],
    sites: Sequence[NormSite],
    progress: Progress = silent,
) -> dict[str, TokenSums]:
    """Sum up the tokens at some norm sites, by name; batches are those of :func:`normscope.capture`.

    >>> from normscope.pairs.norms.trace import find_norms
    >>> from normscope.inputs.batch import Batch
    >>> model, x = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)), torch.randn(16, 4)
    >>> second_pass(model, [x], [x], find_norms(model, Batch((x,))).sites)["1"].gram.shape
    torch.Size([2, 3, 19, 19])
    """
    sums: dict[str, TokenSums] = {}
    for part, batches in enumerate((learned, held_out)):

        def add(site: NormSite, rows: Tensor, y: Tensor, part: int = part) -> None:
            if site.name not in sums:
                sums[site.name] = TokenSums.begun(site, rows)
            sums[site.name].add(rows, part)

        captured(model, batches, Summing(observe=add), layers=[site.name for site in sites], progress=progress)
    return sums
