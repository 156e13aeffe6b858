"""Scale of a norm's tokens: predicted from a few of their channels, or constant."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from normscope.errors import UsageError, count
from normscope.pairs.norms.sites import NormSite
from normscope.pairs.token_sums import FIRST, POWERS, TokenSums

_RIDGE = 1e-9  # of features of unit mean square: only for features that are linear functions of others
_FACTOR = 2.0  # between a first position's σ and that of the rest, beyond which the position has its own


@dataclass(frozen=True, eq=False)
class FewFit:
    """σ² and μ of a norm's tokens from K channels: (σ², μ) ≈ predictors · [1, z, z²], where z = x − centre.

    Attributes:
        norm: the site.
        channels: the K channels, in the order in which they were chosen.
        r2: held-out R² of σ² with the first 1, 2, … K of them, under the weights.
        power: p of the weights σ⁻ᵖ of the least squares.
        centre: float32 ``(K,)``.
        predictors: of σ² and of μ, float64 ``(2, 2K + 1)``.
        floor: half of the smallest σ² seen; a smaller prediction is set to it.
    """

    norm: NormSite
    channels: tuple[int, ...]
    r2: tuple[float, ...]
    power: int
    centre: Tensor
    predictors: Tensor
    floor: float

    @property
    def func(self) -> str:
        """Name of the function."""
        return f"few:{len(self.channels)}"

    def state(self) -> dict[str, Tensor]:
        """Return the buffers of :class:`normscope.swaps.standalone.Predictor`."""
        channels, floor = torch.tensor(self.channels), torch.tensor(self.floor)
        return {"channels": channels, "centre": self.centre, "predictors": self.predictors, "floor": floor}


@dataclass(frozen=True)
class FrozenFit:
    """One σ for the tokens of a norm, with their exact means.

    σ leaves the least squared error of the output γy: σ = Σ γ²(x − μ)² / Σ γ²(x − μ)y. A first position has its own σ
    if that differs from the σ of all later tokens by more than a factor of 2.

    Attributes:
        norm: the site.
        sigma: σ of tokens at positions 0 to 3, and of all others.
    """

    norm: NormSite
    sigma: tuple[float, ...]
    func = "frozen"

    def state(self) -> dict[str, Tensor]:
        """Return the buffers of :class:`normscope.swaps.standalone.ConstantScale`."""
        return {"sigma": torch.tensor(self.sigma), "centring": torch.tensor(float(self.norm.centred))}


ScaleFit = FewFit | FrozenFit


def frozen_fit(sums: TokenSums) -> FrozenFit:
    """Estimate one σ, and those of first positions that differ from it."""
    of_position = sums.by_position.cpu()
    later = of_position[FIRST:] if of_position[FIRST, 1] else of_position
    ratio = _sigma(of_position) / _sigma(later.sum(0))
    own = torch.maximum(ratio, 1 / ratio) > _FACTOR  # NaN, of positions without tokens, is no larger
    sigma = _sigma(of_position).where(own, _sigma(of_position[~own].sum(0))).nan_to_num(1.0)  # where γ is zero
    return FrozenFit(sums.site, tuple(sigma.tolist()))


def _sigma(energy: Tensor) -> Tensor:
    return energy[..., 1] / energy[..., 0]


def few_fit(sums: TokenSums, k: int, power: int = 0, seed: int | None = None) -> FewFit:
    """Predict σ² and μ by weighted least squares on K channels, chosen greedily by the held-out R² of σ².

    Args:
        sums: of the second pass.
        k: number of channels, K.
        power: p of the weights σ⁻ᵖ, one of :data:`POWERS`.
        seed: draws the channels from the candidates instead; None to choose them.

    Raises:
        UsageError: if there are fewer than K channels.
    """
    if k > len(sums.channels):
        candidates = count(len(sums.channels), "channel")
        raise UsageError(f"{k} channels cannot be chosen at {sums.site.name}: there are {candidates} to choose from.")
    drawn = None
    if seed is not None:
        drawn = torch.randperm(len(sums.channels), generator=torch.Generator().manual_seed(seed))[:k].tolist()
    places, r2 = chosen_channels(sums, k, power, drawn)
    gram = sums.gram[:, POWERS.index(power)].sum(0).cpu()
    features = _features(sums, torch.tensor([places]))
    predictors = _least_squares(gram, features, torch.tensor([-2, -1]))[0].mT
    channels, centre = sums.channels[places].tolist(), sums.centre[places].cpu()
    return FewFit(sums.site, tuple(channels), tuple(r2), power, centre, predictors, sums.least / 2)


def chosen_channels(
    sums: TokenSums, k: int, power: int = 0, drawn: list[int] | None = None
) -> tuple[list[int], list[float]]:
    """Return places of K channels among the candidates, and the held-out R² of σ² after each.

    Each step adds the channel that leaves the smallest held-out error; ``drawn`` are places to add instead, in order.
    """
    learned, held_out = sums.gram[:, POWERS.index(power)].cpu()
    total = held_out[-2, -2] - held_out[0, -2] ** 2 / held_out[0, 0]
    places, r2 = list[int](), list[float]()
    for step in range(k):
        left = [n for n in range(len(sums.channels)) if n not in places] if drawn is None else [drawn[step]]
        features = _features(sums, torch.tensor([[*places, n] for n in left]))
        slopes = _least_squares(learned, features, torch.tensor([-2]))  # (trials, features, 1)
        of_features = held_out[features[:, :, None], features[:, None, :]]
        explained = slopes.mT @ (2 * held_out[features, -2, None] - of_features @ slopes)
        errors = held_out[-2, -2] - explained.flatten()
        best = int(errors.argmin())
        places.append(left[best])
        r2.append(float(1 - errors[best] / total))
    return places, r2


def _features(sums: TokenSums, places: Tensor) -> Tensor:
    """Return the indices in v of 1, z and z² at some places: ``(trials, 2K + 1)`` of ``(trials, K)``."""
    return torch.cat([torch.zeros(len(places), 1, dtype=torch.long), 1 + places, 1 + len(sums.channels) + places], 1)


def _least_squares(gram: Tensor, features: Tensor, targets: Tensor) -> Tensor:
    """Return the coefficients of some trials' features, ``(trials, features, targets)``, by a Gram matrix."""
    diagonal = gram.diagonal()[features]
    unit = diagonal.rsqrt().where(diagonal > 0, 0.0)[:, :, None]
    within = gram[features[:, :, None], features[:, None, :]] * unit * unit.mT
    within = within + _RIDGE * torch.eye(within.shape[-1], dtype=gram.dtype)
    slopes: Tensor = torch.linalg.solve(within, gram[features][:, :, targets] * unit)
    return unit * slopes
