"""Which modules normalize, over which axes, and their output before the affine step.

A hook sees a norm's output after its affine step, and dividing by γ is no way back: trained γ reach zero. The output
before it is recomputed from the input, in float32, by the row of the table below that fits the module's class.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import UsageError

Axes = Callable[[nn.Module, int], tuple[int, ...]]
Normalize = Callable[[Tensor, float], tuple[Tensor, Tensor]]
Affine = Callable[[nn.Module, Tensor], Tensor]


@dataclass(frozen=True)
class NormKind:
    """How one class of modules normalizes.

    Attributes:
        name: what tables and figures call it.
        axes: from the module and the number of axes of its input to the axes that share one statistic.
        normalize: from token rows ``(tokens, d)`` in float32 and eps to ``(y, rstd)``: y of the same shape, and the
            slope of each token's straight line, ``(tokens, 1)``.
        affine: from the module and y to the module's true output, both ``(tokens, d)``: how weight and bias enter.
        centred: whether the token's mean is taken away, so that |y| ≤ √(d−1) and not √d.
    """

    name: str
    axes: Axes
    normalize: Normalize
    affine: Affine
    centred: bool

    def rows(self, module: nn.Module, x: Tensor, batch_axis: int = 0) -> Tensor:
        """Lay the tokens of ``x`` out as rows ``(tokens, d)``, samples one after the other, in ``x``'s dtype."""
        return token_rows(x, self.axes(module, x.ndim), batch_axis)

    def gamma(self, module: nn.Module, d: int) -> Tensor:
        """Return what the affine step multiplies each channel's y by, ``(d,)``, whatever it makes of the weight."""
        device = next((parameter.device for parameter in module.parameters()), None)
        zero, one = torch.zeros(1, d, device=device), torch.ones(1, d, device=device)
        return (self.affine(module, one) - self.affine(module, zero)).detach().flatten()


def token_rows(x: Tensor, axes: tuple[int, ...], batch_axis: int = 0) -> Tensor:
    """Move ``axes`` to the end and ``batch_axis`` to the front, and flatten to ``(tokens, d)``.

    >>> token_rows(torch.zeros(2, 8, 3, 3), axes=(1,)).shape
    torch.Size([18, 8])
    """
    normalized = {axis % x.ndim for axis in axes}
    others = [axis for axis in range(x.ndim) if axis not in normalized]
    if batch_axis in others:
        others = [batch_axis, *(axis for axis in others if axis != batch_axis)]
    d = math.prod(x.shape[axis] for axis in normalized)
    return x.permute(*others, *(axis % x.ndim for axis in axes)).reshape(-1, d)


def layer_norm(rows: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Y = (x − mean) / √(variance + eps) over each row of float32 ``(tokens, d)``; returns y and rstd."""
    y, _, rstd = torch.native_layer_norm(rows, [rows.shape[-1]], None, None, eps)
    return y, rstd


def rms_norm(rows: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Y = x / √(mean of x² + eps) over each row of float32 ``(tokens, d)`` (arXiv 1910.07467, eq. 4)."""
    rstd = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    return rows * rstd, rstd


def scale_and_shift(module: nn.Module, y: Tensor) -> Tensor:
    """Weight · y + bias, whichever of the two the module has."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if weight is not None:
        y = y * weight.float().flatten()
    if bias is not None:
        y = y + bias.float().flatten()
    return y


def trailing_axes(module: nn.Module, ndim: int) -> tuple[int, ...]:
    """Return the last axes, as many as ``normalized_shape`` has (one where the module does not say)."""
    shape = getattr(module, "normalized_shape", None)
    count = len(shape) if isinstance(shape, (tuple, list, torch.Size)) else 1
    return tuple(range(-count, 0))


_TABLE: dict[str, NormKind] = {}


def register_norm(
    module_type: type[nn.Module] | str,
    *,
    name: str | None = None,
    axes: int | tuple[int, ...] | Axes = trailing_axes,
    normalize: Normalize = layer_norm,
    affine: Affine = scale_and_shift,
    centred: bool | None = None,
) -> None:
    """Teach normscope a class of norms; subclasses that keep its ``forward`` are known with it.

    Args:
        module_type: the class, or its full name where importing it only for this would be too much.
        name: what tables and figures call it; the class's own name by default.
        axes: the axis or axes of the input that share one statistic, or a function of (module, number of axes).
        normalize: from float32 rows ``(tokens, d)`` and eps to (y, rstd), of shapes ``(tokens, d)`` and
            ``(tokens, 1)``.
        affine: from (module, y) to the module's output; ``weight · y + bias`` by default.
        centred: whether the mean is taken away; by default, whether ``normalize`` is not :func:`rms_norm`.

    ``normscope layers MODEL --verify`` compares what this makes of a module's input with the module's own output.

    >>> class GemmaNorm(nn.Module):
    ...     def __init__(self, d):
    ...         super().__init__()
    ...         self.weight, self.eps = nn.Parameter(torch.zeros(d)), 1e-6
    >>> register_norm(GemmaNorm, axes=-1, normalize=rms_norm, affine=lambda norm, y: y * (1 + norm.weight))
    >>> kind_of(GemmaNorm(8)).name
    'GemmaNorm'
    """
    key = module_type if isinstance(module_type, str) else _full_name(module_type)
    if isinstance(axes, int):
        axes = (axes,)
    if isinstance(axes, tuple):
        if not axes:
            raise UsageError(f"The norm {key} needs at least one axis that shares a statistic; axes=() names none.")
        fixed = axes

        def axes(module: nn.Module, ndim: int) -> tuple[int, ...]:
            return fixed

    _TABLE[key] = NormKind(
        name or key.rpartition(".")[2],
        axes,
        normalize,
        affine,
        normalize is not rms_norm if centred is None else centred,
    )


def kind_of(module: nn.Module) -> NormKind | None:
    """Look up how a module normalizes; None where its class, or the class whose ``forward`` it runs, is not known."""
    for ancestor in type(module).__mro__:
        kind = _TABLE.get(_full_name(ancestor))
        if kind is not None:
            return kind if _same_forward(type(module), ancestor) else None
    return None


def ancestor_kind(module: nn.Module) -> NormKind | None:
    """Look up the nearest known ancestor's way, for a subclass whose own ``forward`` may do something else with it."""
    kinds = (_TABLE.get(_full_name(ancestor)) for ancestor in type(module).__mro__)
    return next((kind for kind in kinds if kind is not None), None)


def eps_of(module: nn.Module, dtype: torch.dtype) -> float:
    """Return the module's eps; where it is None, as nn.RMSNorm allows, that of the dtype that torch computes in.

    torch computes half precision in float32, and takes eps from there: 1.2e-7, not float16's 9.8e-4.
    """
    eps: Any = getattr(module, "eps", None)
    if eps is None:
        eps = getattr(module, "variance_epsilon", None)
    computed_in = torch.float64 if dtype == torch.float64 else torch.float32
    return float(eps) if eps is not None else torch.finfo(computed_in).eps


def _full_name(module_type: type) -> str:
    return f"{module_type.__module__}.{module_type.__qualname__}"


def _same_forward(module_type: type, ancestor: type) -> bool:
    return getattr(module_type, "forward", None) is getattr(ancestor, "forward", None)


register_norm(nn.LayerNorm, name="LayerNorm")
register_norm(nn.RMSNorm, name="RMSNorm", normalize=rms_norm)
register_norm("timm.layers.norm.LayerNorm", name="LayerNorm")
register_norm("timm.layers.norm.LayerNorm2d", name="LayerNorm2d", axes=1)
register_norm("timm.layers.norm.RmsNorm", name="RmsNorm", normalize=rms_norm)
