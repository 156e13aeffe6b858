"""The norms of the libraries, by the full names of their classes: nothing is imported for a class that is not there.

A row is how the class normalizes, or why it is no norm site, or a function of the module where that depends on it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from normscope.pairs.kinds import NormKind, group_norm, rms_norm, running_norm, token_norm

Row = NormKind | str | Callable[[nn.Module], NormKind | str]

_OVER_THE_BATCH = (
    "it normalizes over the whole batch (it keeps no running statistics), so that no token is one sample's own"
)


def _batch_norm(module: nn.Module) -> NormKind | str:
    return running_norm("BatchNorm") if getattr(module, "running_mean", None) is not None else _OVER_THE_BATCH


def _instance_norm(module: nn.Module) -> NormKind:
    return (
        running_norm("InstanceNorm")
        if getattr(module, "running_mean", None) is not None
        else group_norm("InstanceNorm")
    )


_DIMENSIONS = ("1d", "2d", "3d")

NORMS: dict[str, Row] = {
    "torch.nn.modules.normalization.LayerNorm": token_norm("LayerNorm"),
    "torch.nn.modules.normalization.RMSNorm": token_norm("RMSNorm", normalize=rms_norm),
    "torch.nn.modules.normalization.GroupNorm": group_norm("GroupNorm"),
    **{f"torch.nn.modules.instancenorm.InstanceNorm{n}": _instance_norm for n in _DIMENSIONS},
    **{f"torch.nn.modules.batchnorm.BatchNorm{n}": _batch_norm for n in _DIMENSIONS},
    "torch.nn.modules.batchnorm.SyncBatchNorm": _batch_norm,
    "timm.layers.norm.LayerNorm": token_norm("LayerNorm"),
    "timm.layers.norm.LayerNorm2d": token_norm("LayerNorm2d", axes=(1,)),
    "timm.layers.norm.RmsNorm": token_norm("RmsNorm", normalize=rms_norm),
}
