"""The norms of the libraries, by the full names of their classes, so that no library is imported for them.

A row is the kind of norm, the reason why the class is no norm site, or a function from the module to either.
Classes without a row, as most of transformers', are tried: :mod:`normscope.norms.trials`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from normscope.norms.formulas import rms_norm, std_norm, unit_offset
from normscope.norms.kinds import (
    Axes,
    NormKind,
    group_norm,
    pointwise_function,
    running_norm,
    token_norm,
    trailing_axes,
)

Row = NormKind | str | Callable[[nn.Module], NormKind | str]

_OVER_THE_BATCH = (
    "it normalizes over the whole batch (it keeps no running statistics), so that no token is one sample's own"
)
_NO_STATISTIC = "it normalizes by constants, the same for every input, and by no statistic of a layer"
_EVO_NORM = "it is an activation that divides by a statistic of its own input, and no y stands before an affine step"
_FILTER_RESPONSE = (
    "it divides each channel by its mean square over all positions and cuts the result at a learned level"
)
_GLOBAL_RESPONSE = "it scales whole channels by their share in the norm of all, and adds its input"
_LOCAL_RESPONSE = "it divides by the energy of neighbouring channels to a power, and has no statistic of a token"


def _dropped_and_activated(module: Any, out: Tensor) -> Tensor:
    out = module.drop(out) if hasattr(module, "drop") else out
    activated: Tensor = module.act(out) if hasattr(module, "act") else out
    return activated


def _activated_as_named(module: Any, out: Tensor) -> Tensor:
    activated: Tensor = module.activation(out)
    return activated


def _batch_norm(name: str, **options: Any) -> Callable[[nn.Module], NormKind | str]:
    def row(module: nn.Module) -> NormKind | str:
        return _OVER_THE_BATCH if getattr(module, "running_mean", None) is None else running_norm(name, **options)

    return row


def _instance_norm(dimensions: int) -> Callable[[nn.Module], NormKind | str]:
    def row(module: nn.Module) -> NormKind:
        describe = group_norm if getattr(module, "running_mean", None) is None else running_norm
        return describe("InstanceNorm", unbatched_axes=dimensions + 1, own_precision=True)

    return row


def _swapped_axes(module: Any) -> Axes | tuple[int, ...]:
    return (module.channel_axis,) if len(module.normalized_shape) == 1 else trailing_axes


def _pointwise(module: Any) -> NormKind:
    activation = type(module).activate if module.activations else None
    return pointwise_function("PointwiseFunction", module.curve, axes=_swapped_axes(module), activation=activation)


def _in(package: str, rows: dict[str, Row]) -> dict[str, Row]:
    return {f"{package}.{name}": row for name, row in rows.items()}


def _transformers(families: Iterable[str], class_name: str, kind: Callable[[str], NormKind]) -> dict[str, Row]:
    """Name the same class of several families: ``llama`` and ``{}RMSNorm`` make ``LlamaRMSNorm``."""
    rows: dict[str, Row] = {}
    for family in families:
        module, _, prefix = family.partition(":")
        name = class_name.format(prefix or module.capitalize())
        rows[f"transformers.models.{module}.modeling_{module}.{name}"] = kind(name)
    return rows


def _rms(name: str) -> NormKind:
    return token_norm(name, normalize=rms_norm)


def _rms_unit_offset(name: str) -> NormKind:
    return token_norm(name, normalize=rms_norm, affine=unit_offset)


def _activated(kind: NormKind) -> NormKind:
    return replace(kind, activation=_dropped_and_activated)


_TORCH: dict[str, Row] = {
    "normalization.LayerNorm": token_norm("LayerNorm"),
    "normalization.RMSNorm": _rms("RMSNorm"),
    "normalization.GroupNorm": group_norm("GroupNorm"),
    "normalization.LocalResponseNorm": _LOCAL_RESPONSE,
    **{f"instancenorm.InstanceNorm{n}d": _instance_norm(n) for n in (1, 2, 3)},
    **{f"batchnorm.BatchNorm{n}d": _batch_norm("BatchNorm") for n in (1, 2, 3)},
    "batchnorm.SyncBatchNorm": _batch_norm("BatchNorm"),
}

_TIMM: dict[str, Row] = {
    "norm.LayerNorm": token_norm("LayerNorm"),
    "norm.LayerNormFp32": token_norm("LayerNorm"),
    "norm.LayerNorm2d": token_norm("LayerNorm2d", axes=(1,)),
    "norm.LayerNorm2dFp32": token_norm("LayerNorm2d", axes=(1,)),
    "norm.LayerNormExp2d": token_norm("LayerNormExp2d", axes=(1,), own_precision=True),
    "norm.RmsNorm": _rms("RmsNorm"),
    "norm.RmsNormFp32": _rms("RmsNorm"),
    "norm.RmsNorm2d": token_norm("RmsNorm2d", axes=(1,), normalize=rms_norm, own_precision=True),
    "norm.RmsNorm2dFp32": token_norm("RmsNorm2d", axes=(1,), normalize=rms_norm),
    "norm.SimpleNorm": token_norm("SimpleNorm", normalize=std_norm, own_precision=True),
    "norm.SimpleNormFp32": token_norm("SimpleNorm", normalize=std_norm),
    "norm.SimpleNorm2d": token_norm("SimpleNorm2d", axes=(1,), normalize=std_norm, own_precision=True),
    "norm.SimpleNorm2dFp32": token_norm("SimpleNorm2d", axes=(1,), normalize=std_norm),
    "norm.GroupNorm": group_norm("GroupNorm"),
    "norm.GroupNorm1": group_norm("GroupNorm1"),
    "norm_act.BatchNormAct2d": _batch_norm("BatchNormAct2d", activation=_dropped_and_activated),
    "norm_act.SyncBatchNormAct": _batch_norm("BatchNormAct2d", activation=_dropped_and_activated),
    "norm_act.FrozenBatchNormAct2d": _batch_norm(
        "FrozenBatchNormAct2d", activation=_dropped_and_activated, own_precision=True
    ),
    "split_batchnorm.SplitBatchNorm2d": _batch_norm("SplitBatchNorm2d", activation=_dropped_and_activated),
    "norm_act.GroupNormAct": _activated(group_norm("GroupNormAct")),
    "norm_act.GroupNorm1Act": _activated(group_norm("GroupNorm1Act")),
    "norm_act.LayerNormAct": _activated(token_norm("LayerNormAct")),
    "norm_act.LayerNormActFp32": _activated(token_norm("LayerNormAct")),
    "norm_act.LayerNormAct2d": _activated(token_norm("LayerNormAct2d", axes=(1,))),
    "norm_act.LayerNormAct2dFp32": _activated(token_norm("LayerNormAct2d", axes=(1,))),
    "norm_act.RmsNormAct": _activated(_rms("RmsNormAct")),
    "norm_act.RmsNormActFp32": _activated(_rms("RmsNormAct")),
    "norm_act.RmsNormAct2d": _activated(token_norm("RmsNormAct2d", axes=(1,), normalize=rms_norm, own_precision=True)),
    "norm_act.RmsNormAct2dFp32": _activated(token_norm("RmsNormAct2d", axes=(1,), normalize=rms_norm)),
    "inplace_abn.InplaceAbn": "it overwrites its own input, so that no hook sees what it normalized",
    **{f"evo_norm.EvoNorm2d{n}": _EVO_NORM for n in ("B0", "B1", "B2", "S0", "S0a", "S1", "S1a", "S2", "S2a")},
    **{f"filter_response_norm.FilterResponseNorm{n}": _FILTER_RESPONSE for n in ("Act2d", "Tlu2d")},
    "grn.GlobalResponseNorm": _GLOBAL_RESPONSE,
}

_DIFFUSERS: dict[str, Row] = {
    "models.normalization.RMSNorm": _rms("RMSNorm"),
    "models.normalization.MochiRMSNorm": _rms("MochiRMSNorm"),
    "models.normalization.FP32LayerNorm": token_norm("FP32LayerNorm"),
    "models.normalization.GlobalResponseNorm": _GLOBAL_RESPONSE,
    "models.unets.unet_stable_cascade.GlobalResponseNorm": _GLOBAL_RESPONSE,
}

_UNIT_OFFSET = ("gemma", "gemma2", "gemma3", "qwen3_next:Qwen3Next")
_PLAIN = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "phi3", "olmo2", "deepseek_v3:DeepseekV3", "gpt_oss:GptOss")

NORMS: dict[str, Row] = {
    **_in("torch.nn.modules", _TORCH),
    **_in("timm.layers", _TIMM),
    **_in("diffusers", _DIFFUSERS),
    **_transformers(_PLAIN, "{}RMSNorm", _rms),
    **_transformers(_UNIT_OFFSET, "{}RMSNorm", _rms_unit_offset),
    **_transformers(("t5", "mt5:MT5", "longt5:LongT5"), "{}LayerNorm", _rms),
    "transformers.models.bit.modeling_bit.BitGroupNormActivation": group_norm(
        "BitGroupNormActivation", activation=_activated_as_named
    ),
    "transformers.models.mobilebert.modeling_mobilebert.NoNorm": "it only scales and shifts, and normalizes nothing",
    "transformers.models.phi4_multimodal.modeling_phi4_multimodal.Phi4MultimodalAudioMeanVarianceNormLayer": (
        _NO_STATISTIC
    ),
    "torchaudio.models.wav2vec2.components.LayerNorm": token_norm("LayerNorm", axes=(1,)),
    "torchaudio.pipelines.rnnt_pipeline._GlobalStatsNormalization": _NO_STATISTIC,
    "torchvision.models.convnext.LayerNorm2d": token_norm("LayerNorm2d", axes=(1,)),
    "torchvision.ops.misc.FrozenBatchNorm2d": _batch_norm("FrozenBatchNorm2d", own_precision=True),
    "torchvision.transforms.transforms.Normalize": _NO_STATISTIC,
    "torchvision.transforms.v2._misc.Normalize": _NO_STATISTIC,
    "normscope.swaps.standalone.RMSNorm": lambda module: token_norm(
        "RMSNorm", axes=_swapped_axes(module), normalize=rms_norm
    ),
    "normscope.swaps.pointwise.PointwiseFunction": _pointwise,
}
