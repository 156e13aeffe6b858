"""The truth that the kernels are held to: float64, by the functions of numpy, scipy and torch."""

from typing import NamedTuple

import numpy as np
import scipy.special
import torch
from torch import Tensor

from normscope.swaps.kernels import fused
from normscope.swaps.kernels.launch import backward_launches, forward_launch
from normscope.swaps.kernels.layout import layout_of
from normscope.swaps.kernels.parameters import Parameters
from normscope.swaps.kernels.reference import Gradients

BY_NUMPY = {"tanh": np.tanh, "isru": lambda u: u / np.hypot(u, 1), "erf": scipy.special.erf}
BY_TORCH = {"tanh": torch.tanh, "isru": lambda u: u / torch.hypot(u, u.new_ones(())), "erf": torch.special.erf}
HALF_ULP = 2.0**-24  # of float32, in which everything between a load and a store is
SMALLEST = 2.0**-126  # what float32 has of a derivative below may be zero
CANCELLED = 2.0**-50  # of what autograd makes of a derivative in float64, 1 − tanh² and 1/r − u²/r³
CHEAP_ERF = 6e-5  # relative: the bound in functions.cheap_erf
# The interpreter cuts float32 off to bfloat16 where a GPU rounds: an ulp for each, of eight and eleven digits.
ULP = {torch.float32: HALF_ULP, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
LEAST = {torch.float32: 0.0, torch.bfloat16: 2.0**-126, torch.float16: 2.0**-24}


class Held(NamedTuple):
    """A number of float64, or some, and how far from it float32 arithmetic may be."""

    value: Tensor
    error: Tensor


def spread(part: Tensor | None, x: Tensor, behind: int, none: float = 0.0) -> Tensor:
    """Return, for each element of x, what the parameter of its channel is."""
    if part is None:
        part = torch.full((1,), none)
    own = part.double().reshape(()) if part.numel() == 1 else part.double()[(..., *[None] * behind)]
    return own.expand(x.shape).clone()


def truth(curve: str, x: Tensor, own: Parameters, behind: int, dy: Tensor) -> dict[str, Held]:
    """Return y and every gradient, each with a bound on the error of float32 arithmetic in any order.

    Each element has parameters of its own here, whose gradients are the terms of the sums: their magnitudes bound how
    far a sum may be off. An error of u is one of f by f′ and one of log f′ by at most 2 + 2|u|.
    """
    given = {name: spread(part, x, behind) for name, part in vars(own).items()} | {"x": x.double().clone()}
    leaves = {name: tensor.requires_grad_() for name, tensor in given.items()}
    u = leaves["alpha"] * leaves["x"] + leaves["shift"]
    f = BY_TORCH[curve](u)
    (leaves["weight"] * f + leaves["bias"]).backward(dy.double())
    terms = {name: leaf.grad for name, leaf in leaves.items()}
    alpha, shift, weight, bias = (leaves[name].detach() for name in vars(own))
    u, upstream, own_x = u.detach(), dy.double(), x.double()
    slope = torch.autograd.functional.jvp(BY_TORCH[curve], u, torch.ones_like(u))[1]
    reach = (alpha * own_x).abs() + shift.abs()
    f = torch.from_numpy(np.asarray(BY_NUMPY[curve](u.numpy())))
    cheap = CHEAP_ERF if curve == "erf" and x.dtype != torch.float32 else 0.0
    of_f = f.abs() * (16 * HALF_ULP + cheap) + 4 * HALF_ULP * slope * reach
    of_slope = slope * HALF_ULP * (16 + 4 * (1 + u.abs()) * reach) + CANCELLED + SMALLEST
    through = weight.abs() * upstream.abs() * of_slope
    errors = {
        "x": alpha.abs() * through,
        "alpha": own_x.abs() * through,
        "shift": through,
        "weight": upstream.abs() * of_f,
        "bias": torch.zeros_like(u),
    }
    y = Held(weight * f + bias, weight.abs() * of_f + 4 * HALF_ULP * ((weight * f).abs() + bias.abs()))
    made = {"y": y, "x": Held(terms["x"], errors["x"])}
    for name, part in vars(own).items():
        if part is not None:
            # A few dozen additions meet any one term: in a register, across a tile, in another order.
            bound = errors[name] + 32 * HALF_ULP * terms[name].abs()
            made[name] = Held(*(summed(each, part, behind) for each in (terms[name], bound)))
    return made


def summed(terms: Tensor, part: Tensor, behind: int) -> Tensor:
    """Add up the terms of each number of a parameter."""
    if part.numel() == 1:
        return terms.sum().reshape(part.shape)
    first = terms.ndim - behind - part.ndim
    axes = [axis for axis in range(terms.ndim) if not first <= axis < first + part.ndim]
    return terms.sum(axes) if axes else terms


def agree(made: Tensor, held: Held, what: object) -> None:
    """Compare to what float32 arithmetic and one rounding allow."""
    allowed = held.error + ULP[made.dtype] * (held.value.abs() + held.error) + LEAST[made.dtype]
    excess = (made.double() - held.value).abs() / allowed.clamp(min=SMALLEST)
    assert (excess <= 1).all(), (what, float(excess.max()))


def hold(curve: str, x: Tensor, own: Parameters, behind: int = 0, dy: Tensor | None = None) -> None:
    """Hold y and every gradient to float64, and where x is half precision also what is there before it is rounded."""
    if dy is None:
        dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x.dtype)
    held = truth(curve, x, own, behind, dy)
    y = fused.forward(x, own, curve, behind)
    gradients = fused.backward(dy, x, own, curve, behind, True, True)
    for name, made in {"y": y, **gradients._asdict()}.items():
        like = x if name in "xy" else getattr(own, name)
        assert (made is None) == (like is None), name
        if made is not None:
            assert (made.shape, made.dtype) == (like.shape, like.dtype), name
            assert made.stride() == (like.clone() if name in "xy" else torch.zeros(like.shape)).stride(), name
            agree(made, held[name], (curve, x.dtype, name))
    if x.dtype != torch.float32 and x.numel() > 0:
        for name, made in unrounded(curve, x, own, behind, dy).items():
            agree(made, held[name], (curve, x.dtype, name, "not rounded"))


def unrounded(curve: str, x: Tensor, own: Parameters, behind: int, dy: Tensor) -> dict[str, Tensor]:
    """Return what the kernels make of half precision where what they fill is float32."""
    axes = own.channel_axes(x, behind)
    x, dy = x.contiguous(), dy.contiguous()
    own = own.each(Tensor.contiguous)
    y, dx = torch.empty(x.shape), torch.empty(x.shape)
    gradients = Gradients(dx, *(None if part is None else torch.empty(part.shape) for part in vars(own).values()))
    forward_launch(x, y, own, layout_of([x, y], *axes), curve).run()
    for launch in backward_launches(dy, x, own, gradients, layout_of([dy, x, dx], *axes), curve):
        launch.run()
    return {"y": y} | {name: made for name, made in gradients._asdict().items() if made is not None}


def parameters(
    curve: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, each: str = "weight bias", without: str = ""
) -> Parameters:
    """Return random parameters: one a channel those in ``each``, one number the others, none those ``without``."""
    generator = torch.Generator().manual_seed(2)

    def some(name: str, low: float, high: float) -> Tensor | None:
        own = torch.rand(shape if name in each.split() else (1,), generator=generator) * (high - low) + low
        return None if name in without.split() else own.to(dtype)

    return Parameters(some("alpha", 0.4, 1.5), some("shift", -0.5, 0.5), some("weight", -2, 2), some("bias", -1, 1))


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return normal numbers of magnitudes from 0.05 to 5, so that a curve is straight for some and flat for others."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.rand(shape, generator=generator) * 4.6 - 3
    return (torch.randn(shape, generator=generator) * scales.exp()).to(dtype)
