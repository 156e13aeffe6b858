"""Channels that predict the scale of a norm's tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from normscope.pairs.token_sums import TokenSums

_RIDGE = 1e-9  # of features of unit mean square: only for features that are linear functions of others


def chosen_channels(sums: TokenSums, k: int) -> tuple[list[int], list[float]]:
    """Return places of K channels among the candidates, and the held-out R² of σ² after each.

    σ² is predicted from 1, z and z² of the channels, by least squares. Each step adds the channel that leaves the
    smallest held-out error.
    """
    learned, held_out = sums.gram.cpu()
    total = held_out[-1, -1] - held_out[0, -1] ** 2 / held_out[0, 0]
    places, r2 = list[int](), list[float]()
    for _ in range(k):
        left = [n for n in range(len(sums.channels)) if n not in places]
        features = _features(sums, torch.tensor([[*places, n] for n in left]))
        slopes = _least_squares(learned, features)  # (trials, features, 1)
        of_features = held_out[features[:, :, None], features[:, None, :]]
        explained = slopes.mT @ (2 * held_out[features, -1, None] - of_features @ slopes)
        errors = held_out[-1, -1] - explained.flatten()
        best = int(errors.argmin())
        places.append(left[best])
        r2.append(float(1 - errors[best] / total))
    return places, r2


def _features(sums: TokenSums, places: Tensor) -> Tensor:
    """Return the indices in v of 1, z and z² at some places: ``(trials, 2K + 1)`` of ``(trials, K)``."""
    return torch.cat([torch.zeros(len(places), 1, dtype=torch.long), 1 + places, 1 + len(sums.channels) + places], 1)


def _least_squares(gram: Tensor, features: Tensor) -> Tensor:
    """Return the coefficients of some trials' features for σ², ``(trials, features, 1)``, by a Gram matrix."""
    diagonal = gram.diagonal()[features]
    unit = diagonal.rsqrt().where(diagonal > 0, 0.0)[:, :, None]
    within = gram[features[:, :, None], features[:, None, :]] * unit * unit.mT
    within = within + _RIDGE * torch.eye(within.shape[-1], dtype=gram.dtype)
    slopes: Tensor = torch.linalg.solve(within, gram[features][:, :, -1:] * unit)
    return unit * slopes
