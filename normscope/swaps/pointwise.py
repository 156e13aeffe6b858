"""Point-wise functions that replace norms: weight · f(αx + s) + bias, with one curve f for each module."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normscope.curves.expressions import curves_named
from normscope.curves.known import CURVES, Curve
from normscope.errors import UsageError
from normscope.fits.ceiling import Piecewise
from normscope.runtime.spread import is_sharded, sharded_as, whole
from normscope.swaps import operators
from normscope.swaps.kernels.choice import by_kernels, loop_for
from normscope.swaps.kernels.parameters import Parameters
from normscope.swaps.standalone import Pointwise, Table, with_strides_kept


class PointwiseFunction(Pointwise):
    """Elementwise weight · f(αx + s) + bias, computed in float32 at least.

    Args:
        curve: f, or its name: ``tanh`` (``dyt``), ``isru`` (``dyisru``), ``derf``, …, or a formula of x.
        normalized_shape: sizes of the channel axes, as of the norm that it replaces.
        channel_axis: the channel axis, if ``normalized_shape`` is one number; several numbers are the last axes.
        alpha: initial α: a number, or one per channel, ``(channels,)``.
        shift: initial s, likewise; None for a function without s, or for zero with derf.
        elementwise_affine: use one weight and bias per channel; otherwise one weight, ``(1,)``, and no bias.
        bias: use a bias.

    Attributes:
        alpha: ``(1,)`` or, per channel, ``(channels,)``.
        shift: likewise, or None.
        weight: ``normalized_shape``, or ``(1,)``.
        bias: ``normalized_shape``, or None.
        in_place_of: full class name of the norm that it replaced; empty if none.

    tanh, isru and erf run in one pass (:mod:`normscope.swaps.kernels`) unless ``NORMSCOPE_KERNELS=eager``: on the CPU
    in a compiled loop if no gradient is needed; on CUDA in fused kernels. torch.compile and torch.export trace plain
    torch unless ``NORMSCOPE_KERNELS=triton``.

    The output has the dtype of the replaced norm's; without one the input's, or a half-precision weight's for a float32
    input. Arguments such as ``residual=None`` change nothing. Parameters are named as in the published layers.

    Raises:
        UsageError: if the curve is unknown or α or s do not match the channels; when called, if the input's channels
            differ, or if ``NORMSCOPE_KERNELS`` cannot be met.
        TypeError: if it is called with a second tensor.

    >>> layer = PointwiseFunction("tanh", 4, alpha=0.5)
    >>> layer(torch.tensor([[0.0, 1.0, 2.0, 100.0]]))
    tensor([[0.0000, 0.4621, 0.7616, 1.0000]], grad_fn=<...>)
    >>> sorted(layer.state_dict())
    ['alpha', 'bias', 'weight']
    """

    def __init__(
        self,
        curve: str | Curve,
        normalized_shape: int | Sequence[int],
        *,
        channel_axis: int = -1,
        alpha: float | Tensor = 0.5,
        shift: float | Tensor | None = None,
        elementwise_affine: bool = True,
        bias: bool = True,
    ) -> None:
        if isinstance(curve, str):
            curves = curves_named(curve)
            if len(curves) != 1:
                names = ", ".join(CURVES)
                raise UsageError(f"{curve!r} names {len(curves)} curves; a point-wise function has one of {names}.")
            (curve,) = curves
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if shift is None and curve.shifted:
            shift = 0.0
        lines, table = curve.function, None
        if isinstance(lines, Piecewise):
            table = Table(*map(torch.from_numpy, (lines.at, lines.mean, lines.slopes)))
        super().__init__(
            curve,
            shape,
            channel_axis=channel_axis,
            alpha=_one_or_each("alpha", alpha, shape),
            shift=None if shift is None else _one_or_each("shift", shift, shape),
            elementwise_affine=elementwise_affine,
            bias=bias,
            table=table,
        )

    @property
    def f(self) -> Callable[[Tensor], Tensor]:
        """The function of αx + s."""
        function: Callable[[Tensor], Tensor] = self.curve.function
        return function if self.table is None else self.table

    @property
    def per_channel(self) -> bool:
        """True if each channel has its own α."""
        return self.alpha.numel() > 1

    def applied(self, input: Tensor) -> Tensor:
        """Apply the function elementwise."""
        if is_sharded(input):
            return sharded_as(self.applied(whole(input)), input)
        parameters: Parameters = (self.alpha, self.shift, self.weight, self.bias)
        if is_sharded(self.weight):
            parameters = self._gathered(parameters)
        dtype, curve, behind = self.returned_dtype(input), self.curve.function_name, self.axes_behind(input)
        x = with_strides_kept(input, self.keeps).to(torch.promote_types(input.dtype, dtype))
        output = None
        if by_kernels(curve, x.device, x.dtype):
            output = operators.pointwise(x, *parameters, curve, behind)
        elif loop := loop_for(curve, x.device, x.dtype, x.numel()):
            output = loop.pointwise(x, parameters, curve, behind)
        if output is None:
            output = operators.eager(x, self.f, parameters, behind)
        return self.activate(output.to(dtype))

    def expand_to_channels(self) -> None:
        """Expand the weight and bias to one per channel; outputs stay the same."""
        shape = self.normalized_shape
        if self.weight.shape != shape:
            self.weight = nn.Parameter(self.weight.detach().expand(shape).clone())
        if self.bias is None:
            self.bias = nn.Parameter(torch.zeros_like(self.weight))

    def _gathered(self, parameters: Parameters) -> Any:
        if torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in parameters):
            raise UsageError(
                "A point-wise function that was swapped into a sharded network has no gradients: run it under "
                "torch.no_grad(), or swap the norms before the network is sharded, to train them."
            )
        return tuple(None if p is None else whole(p) for p in parameters)


def check_kernels(modules: Iterable[nn.Module]) -> None:
    """Raise UsageError if ``NORMSCOPE_KERNELS`` keeps a point-wise function among the modules from running.

    >>> check_kernels([DyT(4)])
    """
    for module in modules:
        if isinstance(module, PointwiseFunction):
            by_kernels(module.curve.function_name, module.weight.device, module.weight.dtype)


def DyT(  # noqa: N802 - the paper's own name
    normalized_shape: int | Sequence[int], *, alpha: float = 0.5, channel_axis: int = -1
) -> PointwiseFunction:
    """Dynamic Tanh: weight · tanh(αx) + bias, α one number, 0.5 to begin with (arXiv 2503.10622, eq. 3).

    >>> DyT(768)
    PointwiseFunction(tanh, 768)
    """
    return PointwiseFunction("tanh", normalized_shape, alpha=alpha, channel_axis=channel_axis)


def DyISRU(  # noqa: N802 - the paper's own name
    normalized_shape: int | Sequence[int],
    *,
    C: float = 4.0,  # noqa: N803 - the paper's own sign
    channel_axis: int = -1,
) -> PointwiseFunction:
    """Dynamic inverse square root unit: weight · x / √(x² + C) + bias, which is isru with α = 1/√C (arXiv 2503.21708).

    >>> DyISRU(768, C=4.0).alpha.item()
    0.5
    """
    if not 0 < C < math.inf:
        raise UsageError(f"C is {C}; it is a positive number, in units of x².")
    return PointwiseFunction("isru", normalized_shape, alpha=1 / math.sqrt(C), channel_axis=channel_axis)


def Derf(  # noqa: N802 - the paper's own name
    normalized_shape: int | Sequence[int], *, alpha: float = 0.5, shift: float = 0.0, channel_axis: int = -1
) -> PointwiseFunction:
    """Dynamic erf: weight · erf(αx + s) + bias, α 0.5 and s 0 to begin with (arXiv 2512.10938).

    >>> sorted(Derf(768).state_dict())
    ['alpha', 'bias', 'shift', 'weight']
    """
    return PointwiseFunction("derf", normalized_shape, alpha=alpha, shift=shift, channel_axis=channel_axis)


def _one_or_each(name: str, value: float | Tensor, shape: tuple[int, ...]) -> Tensor:
    tensor = torch.as_tensor(value, dtype=torch.float32).detach().clone()
    if tensor.numel() == 1:
        return tensor.reshape(1)
    if tensor.numel() != math.prod(shape):
        raise UsageError(
            f"{name} has {tensor.numel()} numbers; it takes one, or one for each of the {math.prod(shape)} channels."
        )
    return tensor.reshape(shape)
