"""The truth that the kernels are held to: float64, by the functions of numpy, scipy and torch."""

import os
from typing import NamedTuple

import numpy as np
import pytest
import scipy.special
import torch
from torch import Tensor

from normscope.swaps.kernels import launch
from normscope.swaps.kernels.eager import Parameters

MODE = os.environ.get("NORMSCOPE_KERNEL_TESTS", "")  # cuda; cpu: what is for a GPU alone, tiny, in the interpreter
GPU = MODE == "cuda"
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
for_a_gpu = pytest.mark.skipif(MODE not in ("cuda", "cpu"), reason="for a GPU alone: too much for the interpreter")
on_a_gpu = pytest.mark.skipif(not GPU, reason="for a GPU alone")

BY_NUMPY = {"tanh": np.tanh, "isru": lambda u: u / np.hypot(u, 1), "erf": scipy.special.erf}
BY_TORCH = {"tanh": torch.tanh, "isru": lambda u: u / torch.hypot(u, u.new_ones(())), "erf": torch.special.erf}
HALF_ULP = 2.0**-24  # of float32, in which everything between a load and a store is
SMALLEST = 2.0**-126  # what float32 has of a derivative below may be zero
CANCELLED = 2.0**-50  # of what autograd makes of a derivative in float64, 1 − tanh² and 1/r − u²/r³
TANH = 2.2e-5  # relative, of half precision: the bound in loops._tanh
# Of f in float32, of which tanh and isru have 5 at most and CUDA's erff, 2 ulp (CUDA C++ Programming Guide), 4; and of
# f′, where an error of the exponent is not in them: ex2.approx takes 4, div.full 4 (PTX ISA), twice, and rsqrt.approx
# 2.2, three times.
ROUNDINGS = 16
# The interpreter cuts float32 off to bfloat16, an ulp of eight digits, and so to float16; a GPU rounds, half of one.
HALVED = 0.5 if GPU else 1.0
ULP = {torch.float32: HALF_ULP, torch.bfloat16: HALVED * 2.0**-7, torch.float16: HALVED * 2.0**-10}
LEAST = {  # the interpreter has no subnormal bfloat16
    torch.float32: 0.0,
    torch.bfloat16: 2.0**-134 if GPU else 2.0**-126,
    torch.float16: HALVED * 2.0**-24,
}
QUANTITIES = ("y", "x", "alpha", "shift", "weight", "bias")  # the result, and what gradients are by
FEW = 2**20  # elements whose truth the CPU computes; that of more is computed where they are
PIECE = 2**23  # elements whose truth is in memory at once
FURTHEST: dict[str, float] = {}  # by curve, dtype and quantity: the largest error so far, over what is allowed


class Held(NamedTuple):
    """A number of float64, or some, and how far from it float32 arithmetic may be."""

    value: Tensor
    error: Tensor


def spread(part: Tensor | None, x: Tensor, behind: int, none: float = 0.0) -> Tensor:
    """Return, for each element of x, what the parameter of its channel is."""
    if part is None:
        part = x.new_full((1,), none)
    own = part.double().reshape(()) if part.numel() == 1 else part.double()[(..., *[None] * behind)]
    return own.expand(x.shape).clone()


def truth(curve: str, x: Tensor, own: Parameters, behind: int, dy: Tensor, additions: int = 32) -> dict[str, Held]:
    """Return y and every gradient, each with a bound on the error of float32 arithmetic in any order.

    Args:
        curve: by its name, as are the others of :func:`launch.backward`.
        additions: that meet any one term: in a register, across a tile, in another order.
    """
    if x.numel() <= FEW:
        x, own, dy = x.cpu(), own.each(Tensor.cpu), dy.cpu()
    return truth_there(curve, x, own, behind, dy, additions)


def truth_there(
    curve: str, x: Tensor, own: Parameters, behind: int, dy: Tensor, additions: int = 32
) -> dict[str, Held]:
    """Return :func:`truth`, computed where x is.

    Each element has parameters of its own here, whose gradients are the terms of the sums: their magnitudes bound how
    far a sum may be off. An error of u is one of f by f′ and one of log f′ by at most 2 + 2|u|; the exponent of erf′
    is rounded three times beside.
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
    f = BY_TORCH[curve](u) if u.is_cuda else torch.from_numpy(np.asarray(BY_NUMPY[curve](u.numpy())))
    cheap = TANH if curve == "tanh" and x.dtype != torch.float32 else 0.0
    of_f = f.abs() * (ROUNDINGS * HALF_ULP + cheap) + 4 * HALF_ULP * slope * reach
    of_exponent = 3 * u**2 if curve == "erf" and GPU else 0.0  # the interpreter is held without it
    roundings = ROUNDINGS + 4 * (1 + u.abs()) * reach + of_exponent
    of_slope = slope * HALF_ULP * roundings + CANCELLED + SMALLEST
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
            bound = errors[name] + additions * HALF_ULP * terms[name].abs()
            made[name] = Held(*(summed(each, part, behind) for each in (terms[name], bound)))
    return made


def summed(terms: Tensor, part: Tensor, behind: int) -> Tensor:
    """Add up the terms of each number of a parameter."""
    if part.numel() == 1:
        return terms.sum().reshape(part.shape)
    first = terms.ndim - behind - part.ndim
    axes = [axis for axis in range(terms.ndim) if not first <= axis < first + part.ndim]
    return terms.sum(axes) if axes else terms


def agree(made: Tensor, held: Held, *what: object) -> None:
    """Compare to what float32 arithmetic and one rounding allow."""
    allowed = held.error + ULP[made.dtype] * (held.value.abs() + held.error) + LEAST[made.dtype]
    off = (made.to(held.value.device).double() - held.value).abs()
    excess = off / allowed.clamp(min=SMALLEST)
    name, furthest = ", ".join(map(str, what)), float(excess.nan_to_num(1e30, 1e30).max()) if excess.numel() else 0.0
    FURTHEST[name] = max(FURTHEST.get(name, 0.0), furthest)
    assert (excess <= 1).all(), f"{name}: off by {furthest:.3g} of what is allowed, {float(off.max()):.3g} at most"


def made_by_kernels(curve: str, x: Tensor, own: Parameters, behind: int, dy: Tensor) -> dict[str, Tensor | None]:
    """Return y and every gradient, by the names of :data:`QUANTITIES`."""
    y = launch.forward(x, own, curve, behind)
    return dict(zip(QUANTITIES, (y, *launch.backward(dy, x, own, curve, behind)), strict=True))


def hold(curve: str, x: Tensor, own: Parameters, behind: int = 0, dy: Tensor | None = None) -> None:
    """Hold y and every gradient to float64, and check their shapes, dtypes, devices and strides."""
    if dy is None:
        drawn = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
        dy = drawn.to(device=x.device, dtype=x.dtype)
    held = truth(curve, x, own, behind, dy)
    for name, made in made_by_kernels(curve, x, own, behind, dy).items():
        like = x if name in "xy" else getattr(own, name)
        assert (made is None) == (like is None), name
        if made is not None:
            assert (made.shape, made.dtype, made.device) == (like.shape, like.dtype, like.device), name
            assert made.stride() == (torch.empty_like(like) if name in "xy" else torch.zeros(like.shape)).stride(), name
            agree(made, held[name], curve, x.dtype, name)


def hold_in_pieces(curve: str, x: Tensor, own: Parameters, dy: Tensor, behind: int = 0, additions: int = 32) -> None:
    """Hold y and every gradient of large tensors to float64, some rows after the other."""
    made, sums = made_by_kernels(curve, x, own, behind, dy), {}
    rows = max(1, PIECE // x[0].numel())
    for begin in range(0, len(x), rows):
        here = slice(begin, begin + rows)
        held = truth_there(curve, x[here], own, behind, dy[here], additions)
        for name in "yx":
            agree(made[name][here], held.pop(name), curve, x.dtype, name)
        for name, part in held.items():
            sums[name] = Held(*map(torch.add, sums[name], part)) if name in sums else part
    for name, held in sums.items():
        agree(made[name], held, curve, x.dtype, name)


def parameters(
    curve: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, each: str = "weight bias", without: str = ""
) -> Parameters:
    """Return random parameters: one a channel those in ``each``, one number the others, none those ``without``."""
    generator = torch.Generator().manual_seed(2)

    def some(name: str, low: float, high: float) -> Tensor | None:
        own = torch.rand(shape if name in each.split() else (1,), generator=generator) * (high - low) + low
        return None if name in without.split() else own.to(device=DEVICE, dtype=dtype)

    return Parameters(some("alpha", 0.4, 1.5), some("shift", -0.5, 0.5), some("weight", -2, 2), some("bias", -1, 1))


def numbers(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0, drawn_on: torch.device | str = "cpu"
) -> Tensor:
    """Return normal numbers of magnitudes from 0.05 to 5, so that a curve is straight for some and flat for others."""
    generator = torch.Generator(drawn_on).manual_seed(seed)
    scales = torch.rand(shape, generator=generator, device=drawn_on) * 4.6 - 3
    drawn = torch.randn(shape, generator=generator, device=drawn_on) * scales.exp()
    return drawn.to(device=DEVICE, dtype=dtype)
