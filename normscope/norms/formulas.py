"""Formulas of norms: y from a token's elements, and the output from y. Rows are tokens, ``(tokens, d)``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

# Usual names of the parameters that multiply y, and of those that are added to it.
_GAINS = ("weight", "gamma", "scale", "g")
_SHIFTS = ("bias", "beta")

Normalize = Callable[[Tensor, float], tuple[Tensor, Tensor]]

# eps is added to the mean square under the root, bounds ‖x‖ or the mean square from below, or is added to the root.
UNDER_ROOT, BOUNDS_LENGTH, BOUNDS_SQUARE, BESIDE_ROOT = range(4)


@dataclass(frozen=True)
class Form:
    """A normalization by statistics of the token itself: y = (x − shift) · rstd.

    Attributes:
        name: its name in files and in :attr:`normscope.norms.sites.NormSite.form`.
        centred: whether shift is the mean of the token; otherwise it is zero.
        about_mean: whether squares are taken about the mean.
        correction: subtracted from d in the divisor of the sum of squares.
        eps_at: role of eps, one of :data:`UNDER_ROOT`, :data:`BOUNDS_LENGTH`, :data:`BOUNDS_SQUARE`,
            :data:`BESIDE_ROOT`.

    >>> rms_norm(torch.tensor([[3.0, 4.0, 0.0, 0.0]]), 0.0)  # x / √(mean of x² + eps), and the slope rstd
    (tensor([[1.2000, 1.6000, 0.0000, 0.0000]]), tensor([[0.4000]]))
    """

    name: str
    centred: bool
    about_mean: bool
    correction: int = 0
    eps_at: int = UNDER_ROOT

    def __call__(self, rows: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return y ``(tokens, d)`` and rstd ``(tokens, 1)`` of rows ``(tokens, d)``, in their dtype."""
        shift, rstd = self.line(rows, eps)
        return (rows - shift) * rstd, rstd

    def line(self, rows: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return shift and rstd, both ``(tokens, 1)``, of rows ``(tokens, d)``, in their dtype.

        >>> layer_norm.line(torch.tensor([[1.0, 3.0, 5.0, 3.0]]), 0.0)
        (tensor([[3.]]), tensor([[0.7071]]))
        """
        mean = rows.mean(-1, keepdim=True)
        squares = (rows - mean if self.about_mean else rows).square().sum(-1, keepdim=True)
        return mean if self.centred else torch.zeros_like(mean), self.slope(squares, rows.shape[-1], eps)

    def slope(self, squares: Tensor, d: int, eps: float) -> Tensor:
        """Return rstd from sums of the squares of d elements, in their shape."""
        if self.eps_at == BOUNDS_LENGTH:
            return math.sqrt(d) / squares.sqrt().clamp_min(eps)
        mean_square = squares / (d - self.correction)
        if self.eps_at == BESIDE_ROOT:
            return 1 / (mean_square.sqrt() + eps)
        return torch.rsqrt(mean_square.clamp_min(eps) if self.eps_at == BOUNDS_SQUARE else mean_square + eps)

    def jacobian(self, rows: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return the parts of each row's Jacobian, ∂y_i/∂x_j = rstd·(δ_ij − c/d − pull_i·z_j).

        c is 1 where the mean is subtracted, else 0. z/rstd is what is squared: x, or x less its mean. pull is y divided
        by the divisor of the sum of squares, and zero where eps bounds x, as the norm is then linear. With eps beside
        the root, it contains 1/σ in place of rstd = 1/(σ + eps).

        The parts are rstd ``(tokens, 1)``, pull and z ``(tokens, d)``, in the rows' dtype.
        """
        shift, rstd = self.line(rows, eps)
        about = rows - rows.mean(-1, keepdim=True) if self.about_mean else rows
        divisor = rows.shape[-1] - self.correction
        length = about.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
        slope = math.sqrt(divisor) / length if self.eps_at == BESIDE_ROOT else rstd
        pull = (rows - shift) * (slope / divisor)
        if self.eps_at in (BOUNDS_LENGTH, BOUNDS_SQUARE):
            bound = eps if self.eps_at == BOUNDS_LENGTH else math.sqrt(eps * divisor)
            pull = pull.where(length > bound, 0.0)
        return rstd, pull, about * rstd

    def diagonal(self, rows: Tensor, eps: float) -> Tensor:
        """Return ∂y_i/∂x_i of every element, ``(tokens, d)``, in the rows' dtype.

        >>> rms_norm.diagonal(torch.tensor([[3.0, 4.0, 0.0, 0.0]]), 0.0)  # (1 − y²/d)/ρ, with ρ = 2.5
        tensor([[0.2560, 0.1440, 0.4000, 0.4000]])
        """
        rstd, pull, z = self.jacobian(rows, eps)
        return rstd * (1 - self.centred / rows.shape[-1] - pull * z)


layer_norm = Form("layer_norm", centred=True, about_mean=True)
rms_norm = Form("rms_norm", centred=False, about_mean=False)  # arXiv 1910.07467, eq. 4
root_mean_square = Form("root_mean_square", False, False, eps_at=BOUNDS_LENGTH)  # √d · F.normalize(x)
std_norm = Form("std_norm", centred=False, about_mean=True, correction=1)  # timm's SimpleNorm
# torch.var and torch.std are unbiased by default.
_BASES = (
    layer_norm,
    rms_norm,
    std_norm,
    Form("unbiased_layer_norm", True, True, correction=1),
    Form("biased_std_norm", centred=False, about_mean=True),
)
_ELSEWHERE = [
    replace(form, name=f"{form.name}_{name}", eps_at=eps_at)
    for name, eps_at in (("clamped", BOUNDS_SQUARE), ("eps_beside_root", BESIDE_ROOT))
    for form in _BASES
]
FORMS = {form.name: form for form in (*_BASES, root_mean_square, *_ELSEWHERE)}


def deviation_norm(rows: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return y and rstd of (x − mean)/(mean of |x − mean| + eps), as a :class:`Form` does.

    >>> deviation_norm(torch.tensor([[1.0, 3.0, 5.0, 3.0]]), 0.0)[0]
    tensor([[-2.,  0.,  2.,  0.]])
    """
    about = rows - rows.mean(-1, keepdim=True)
    rstd = 1 / (about.abs().mean(-1, keepdim=True) + eps)
    return about * rstd, rstd


@dataclass(frozen=True)
class Lines:
    """The line y = (x − shift) · rstd of each token: by a form, or given as numbers; or y itself beside mean and 1/σ.

    Attributes:
        form: of the norm; None where the numbers are given.
        eps: of that form.
        shift: float64 ``(tokens,)``.
        rstd: float64 ``(tokens,)``.
        explicit_y: y of a point-wise function, float64 ``(tokens, d)``, which is on no line of its token; else None.
    """

    form: Form | None = None
    eps: float = 0.0
    shift: Tensor | None = None
    rstd: Tensor | None = None
    explicit_y: Tensor | None = None

    def of(self, x: Tensor, rows: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Return shift and rstd, both ``(tokens, 1)``, of the tokens ``rows`` with the float64 elements ``x``."""
        if self.form is not None:
            return self.form.line(x, self.eps)
        assert self.shift is not None and self.rstd is not None  # noqa: S101 - given in place of a form
        return self.shift[rows, None], self.rstd[rows, None]

    def y(self, rows: Tensor) -> Tensor:
        """Return the summed y of all tokens ``(tokens, d)``: float64, from x rounded to float32."""
        if self.explicit_y is not None:
            return self.explicit_y
        x = rows.float().double()
        shift, rstd = self.of(x, slice(None))
        return (x - shift) * rstd


def gain_and_shift(module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """Return the weight and bias of a module, flat and in float32; None where it has none.

    They have one of the usual names; otherwise they are all that the module learns, first the weight.

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
    """Return the parameters of a module that learns one weight per channel, and perhaps a bias; else nothing.

    Norms learn this, and so do layer scales and PReLU.

    >>> [tuple(vector.shape) for vector in channel_vectors(nn.LayerNorm(3))], channel_vectors(nn.Linear(3, 3))
    ([(3,), (3,)], [])
    """
    parameters = list(module.parameters(recurse=False))
    if len(parameters) not in (1, 2) or any(next(child.parameters(), None) is not None for child in module.children()):
        return []
    vectors = [vector for vector in parameters if not is_lazy(vector) and vector.is_floating_point() and vector.ndim]
    alike = len(vectors) == len(parameters) and len({vector.numel() for vector in vectors}) == 1
    if not alike or not all(max(vector.shape) == vector.numel() > 1 for vector in vectors):
        return []
    shifts = [getattr(module, name, None) for name in _SHIFTS]
    return sorted(vectors, key=lambda vector: any(vector is shift for shift in shifts))  # a bias may be made first


def scale_and_shift(module: nn.Module, y: Tensor) -> Tensor:
    """Weight · y + bias, as far as the module has them."""
    gain, shift = gain_and_shift(module)
    y = y if gain is None else y * gain
    return y if shift is None else y + shift


def unit_offset(module: nn.Module, y: Tensor) -> Tensor:
    """(1 + weight) · y + bias."""
    return scale_and_shift(module, y) + y


def unit_length(module: nn.Module, y: Tensor) -> Tensor:
    """Weight · y/√d + bias: vectors of length one, as of ``F.normalize``."""
    return scale_and_shift(module, y / math.sqrt(y.shape[-1]))
