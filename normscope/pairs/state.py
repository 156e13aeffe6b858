"""A network is lent, not given: whatever a capture sets is put back, whatever happens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def left_as_found(model: nn.Module) -> Iterator[None]:
    """Run the block in eval mode without gradients; put training flags, grad mode and RNG states back afterwards."""
    training = {module: module.training for module in model.modules()}
    cuda = sorted(
        {p.device.index for p in model.parameters() if p.device.type == "cuda" and p.device.index is not None}
    )
    try:
        model.eval()
        with torch.random.fork_rng(devices=cuda), torch.no_grad():
            yield
    finally:
        for module, flag in training.items():
            module.training = flag
