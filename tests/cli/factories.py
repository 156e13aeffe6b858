"""Networks of a user's own, which commands load as ``py:FILE:function``."""

import torch
from torch import nn


class Block(nn.Module):
    """A norm before a layer, beside a residual connection."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.layer = norm, nn.Linear(16, 16)

    def forward(self, x):
        return x + self.layer(self.norm(x)).relu()


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), Block(nn.LayerNorm(16)), Block(nn.LayerNorm(16)), nn.LayerNorm(16))
    return model, [torch.randn(8, 5, 4) * 3 for _ in range(4)]


def groups():
    model = nn.Sequential(nn.Linear(4, 16), Block(nn.GroupNorm(1, 5)), nn.GroupNorm(1, 5))
    return model, [torch.randn(8, 5, 4) for _ in range(4)]


def overflowing():
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)), [torch.full((3, 5, 4), torch.inf) for _ in range(2)]


def small():
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)), [torch.randn(3, 5, 4) for _ in range(8)]


def two():
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8)
    return nn.Sequential(*layers), [torch.randn(3, 5, 4) for _ in range(8)]


class OddNorm(nn.Module):
    """A norm of a form that normscope does not know."""

    def forward(self, x):
        return x / x.abs().amax(-1, keepdim=True)


def unknown():
    return nn.Sequential(OddNorm()), [torch.randn(4, 8)]


def known_and_unknown():
    return nn.Sequential(nn.LayerNorm(8), OddNorm()), [torch.randn(4, 8)]
