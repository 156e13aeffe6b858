"""Formulas of norms: y from a token's elements, and the output from y by weight and bias.

Rows are tokens: ``(tokens, d)`` in float32. A normalization returns y and rstd, the slope of each token's line.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

# Names under which modules keep what they multiply y by, and what they add to it.
_GAINS = ("weight", "gamma", "scale", "g")
_SHIFTS = ("bias", "beta")


def layer_norm(rows: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Y = (x − mean) / √(variance + eps) over each row of float32 ``(tokens, d)``; returns y and rstd."""
    y, _, rstd = torch.native_layer_norm(rows, [rows.shape[-1]], None, None, eps)
    return y, rstd


def rms_norm(rows: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Y = x / √(mean of x² + eps) over each row of float32 ``(tokens, d)`` (arXiv 1910.07467, eq. 4)."""
    rstd = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    return rows * rstd, rstd


def root_mean_square(rows: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Y = √d · x / max(‖x‖, eps): RMSNorm as written with ``F.normalize``, whose eps is no part of the root.

    >>> root_mean_square(torch.tensor([[3.0, 4.0, 0.0, 0.0]]), 1e-12)[0]
    tensor([[1.2000, 1.6000, 0.0000, 0.0000]])
    """
    rstd = math.sqrt(rows.shape[-1]) / rows.norm(dim=-1, keepdim=True).clamp_min(eps)
    return rows * rstd, rstd


def std_norm(rows: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Y = x / √(variance + eps), the variance over d − 1 and the mean left in x (timm's SimpleNorm).

    >>> std_norm(torch.tensor([[1.0, 3.0]]), 0.0)[0]
    tensor([[0.7071, 2.1213]])
    """
    rstd = torch.rsqrt(rows.var(-1, keepdim=True) + eps)
    return rows * rstd, rstd


Normalize = Callable[[Tensor, float], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Form:
    """Computation of a token's line y = (x − shift) · rstd from its elements.

    Attributes:
        centred: whether shift is their mean; otherwise it is zero.
        about_mean: whether squares are taken about the mean.
        correction: what their sum is divided by is d less this.
        clamped: whether eps bounds ‖x‖ from below; otherwise it is added under the root.
    """

    centred: bool
    about_mean: bool
    correction: int = 0
    clamped: bool = False

    def line(self, rows: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return shift and rstd, both ``(tokens, 1)``, of rows ``(tokens, d)``, in their dtype.

        >>> FORMS[layer_norm].line(torch.tensor([[1.0, 3.0, 5.0, 3.0]]), 0.0)
        (tensor([[3.]]), tensor([[0.7071]]))
        """
        mean = rows.mean(-1, keepdim=True)
        squares = (rows - mean if self.about_mean else rows).square().sum(-1, keepdim=True)
        if self.clamped:
            rstd = math.sqrt(rows.shape[-1]) / squares.sqrt().clamp_min(eps)
        else:
            rstd = torch.rsqrt(squares / (rows.shape[-1] - self.correction) + eps)
        return mean if self.centred else torch.zeros_like(mean), rstd

    def jacobian(self, rows: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the Jacobian of each row is made of: ∂y_i/∂x_j = rstd·(δ_ij − c/d − pull_i·z_j).

        c is 1 where the mean is taken away, else 0. The squares under the root are of z/rstd, x or x less its mean, and
        their sum is divided by n: pull is y/n, and zero where eps bounds ‖x‖, as the norm is then linear.

        Args:
            rows: tokens, ``(tokens, d)``.
            eps: of the norm.

        Returns:
            rstd ``(tokens, 1)``, pull and z ``(tokens, d)``, in the rows' dtype.
        """
        shift, rstd = self.line(rows, eps)
        about = rows - rows.mean(-1, keepdim=True) if self.about_mean else rows
        pull = (rows - shift) * (rstd / (rows.shape[-1] - self.correction))
        if self.clamped:
            pull = pull.where(about.norm(dim=-1, keepdim=True) > eps, 0.0)
        return rstd, pull, about * rstd

    def diagonal(self, rows: Tensor, eps: float) -> Tensor:
        """Return ∂y_i/∂x_i of every element, rstd·(1 − c/d − y_i·z_i/n), ``(tokens, d)``, in the rows' dtype.

        >>> FORMS[rms_norm].diagonal(torch.tensor([[3.0, 4.0, 0.0, 0.0]]), 0.0)  # (1 − y²/d)/ρ, with ρ = 2.5
        tensor([[0.2560, 0.1440, 0.4000, 0.4000]])
        """
        rstd, pull, z = self.jacobian(rows, eps)
        return rstd * (1 - self.centred / rows.shape[-1] - pull * z)


@dataclass(frozen=True)
class Lines:
    """The straight line of each token, y = (x − shift) · rstd: how it follows from x, or the numbers themselves.

    Attributes:
        form: how it follows from the token's elements; None where the numbers are given.
        eps: of that form.
        shift: float64 ``(tokens,)``.
        rstd: float64 ``(tokens,)``.
    """

    form: Form | None = None
    eps: float = 0.0
    shift: Tensor | None = None
    rstd: Tensor | None = None

    def of(self, x: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Return shift and rstd of the tokens ``rows``, whose elements are ``x``, float64: two ``(tokens, 1)``."""
        if self.form is not None:
            return self.form.line(x, self.eps)
        assert self.shift is not None and self.rstd is not None  # noqa: S101 - one of the two ways is given
        return self.shift[rows, None], self.rstd[rows, None]

    def y(self, rows: Tensor) -> Tensor:
        """Return y of every token as it is summed: float64 ``(tokens, d)``, from x as float32 holds it.

        Args:
            rows: the elements of all tokens, ``(tokens, d)``, of any floating dtype.
        """
        x = rows.float().double()
        shift, rstd = self.of(x, slice(None))
        return (x - shift) * rstd


FORMS: dict[Normalize, Form] = {
    layer_norm: Form(centred=True, about_mean=True),
    rms_norm: Form(centred=False, about_mean=False),
    root_mean_square: Form(centred=False, about_mean=False, clamped=True),
    std_norm: Form(centred=False, about_mean=True, correction=1),
}


def form_name(form: Form) -> str:
    """Name a form of :data:`FORMS` by its function."""
    return next(normalize.__name__ for normalize, each in FORMS.items() if each is form)


def gain_and_shift(module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """The weight and bias that a module keeps, flat and in float32; None where it has none.

    They have one of the usual names or, where neither has, are all that the module learns: the weight, then the bias.

    >>> gain_and_shift(nn.LayerNorm(3, elementwise_affine=False))
    (None, None)
    """

    def first(names: tuple[str, ...]) -> Tensor | None:
        values = (getattr(module, name, None) for name in names)
        return next((value.float().flatten() for value in values if isinstance(value, Tensor)), None)

    gain, shift = first(_GAINS), first(_SHIFTS)
    if gain is None and shift is None:
        gain, shift = (*(vector.float().flatten() for vector in channel_vectors(module)), None, None)[:2]
    return gain, shift


def channel_vectors(module: nn.Module) -> list[nn.Parameter]:
    """Return all that a module learns where that is one weight for each channel and perhaps a bias; else nothing.

    It is what a norm learns, and a layer scale or a PReLU too.

    >>> [tuple(vector.shape) for vector in channel_vectors(nn.LayerNorm(3))], channel_vectors(nn.Linear(3, 3))
    ([(3,), (3,)], [])
    """
    parameters = list(module.parameters(recurse=False))
    if len(parameters) not in (1, 2) or any(next(child.parameters(), None) is not None for child in module.children()):
        return []
    vectors = [each for each in parameters if not is_lazy(each) and each.is_floating_point() and each.ndim]
    alike = len(vectors) == len(parameters) and len({vector.numel() for vector in vectors}) == 1
    return vectors if alike and all(max(vector.shape) == vector.numel() > 1 for vector in vectors) else []


def scale_and_shift(module: nn.Module, y: Tensor) -> Tensor:
    """Weight · y + bias, whichever of the two the module has."""
    gain, shift = gain_and_shift(module)
    y = y if gain is None else y * gain
    return y if shift is None else y + shift


def unit_offset(module: nn.Module, y: Tensor) -> Tensor:
    """(1 + weight) · y + bias: the weight is kept as an offset from one, so that weight decay draws it there."""
    return scale_and_shift(module, y) + y


def unit_length(module: nn.Module, y: Tensor) -> Tensor:
    """Weight · y/√d + bias: vectors of length one, as ``F.normalize`` leaves them."""
    return scale_and_shift(module, y / math.sqrt(y.shape[-1]))
