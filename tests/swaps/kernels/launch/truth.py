"""The truth that the kernels are held to: float64, by the functions of numpy, scipy and torch."""

import os
from typing import NamedTuple

import numpy as np
import pytest
import scipy.special
import torch
from torch import Tensor

from normscope.swaps.kernels import launch as fused
from normscope.swaps.kernels.eager import Gradients, Parameters, layout_of
from normscope.swaps.kernels.launch import backward_launches, forward_launch

MODE = os.environ.get("NORMSCOPE_KERNEL_TESTS", "")  # cuda; cpu: what is for a GPU alone, tiny, in the interpreter
GPU = MODE == "cuda"
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
for_a_gpu = pytest.mark.skipif(MODE not in ("cuda", "cpu"), reason="for a GPU alone: too much for the interpreter")
on_a_gpu = pytest.mark.skipif(not GPU, reason="there is nothing of it but on a GPU")

BY_NUMPY = {"tanh": np.tanh, "isru": lambda u: u / np.hypot(u, 1), "erf": scipy.special.erf}
BY_TORCH = {"tanh": torch.tanh, "isru": lambda u: u / torch.hypot(u, u.new_ones(())), "erf": torch.special.erf}
HALF_ULP = 2.0**-24  # of float32, in which everything between a load and a store is
SMALLEST = 2.0**-126  # what float32 has of a derivative below may be zero
CANCELLED = 2.0**-50  # of what autograd makes of a derivative in float64, 1 − tanh² and 1/r − u²/r³
CHEAP_ERF = 6e-5  # relative: the bound in functions.cheap_erf
TANH = 2.0**-11 if GPU else 0.0  # relative, of tanh.approx.f32 (PTX ISA); the interpreter has an ordinary tanh
BESIDE = 5e-5  # relative: the bound in functions.function_beside
# Of f in float32, of which tanh and isru have 5 at most and CUDA's erff, 2 ulp (CUDA C++ Programming Guide), 4; and of
# f′, where an error of the exponent is not in them: ex2.approx takes 4, rcp.approx 2 (PTX ISA), twice, and rsqrt.approx
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
EVERY, OF_INPUT, OF_PARAMETERS = [True] * 5, [True, *[False] * 4], [False, *[True] * 4]  # of the gradients
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
        curve: by its name, as are the others of :func:`fused.backward`.
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
    of_f = f.abs() * (ROUNDINGS * HALF_ULP + cheap(curve, x.dtype)) + 4 * HALF_ULP * slope * reach
    of_exponent = 3 * u**2 if curve == "erf" and GPU else 0.0  # the interpreter is held without it
    roundings = ROUNDINGS + 4 * (1 + u.abs()) * reach + of_exponent
    of_slope = slope * HALF_ULP * roundings + CANCELLED + SMALLEST
    through = weight.abs() * upstream.abs() * of_slope
    errors = {
        "x": alpha.abs() * through,
        "alpha": own_x.abs() * through,
        "shift": through,
        "weight": upstream.abs() * (of_f + (BESIDE if curve == "tanh" and x.dtype != torch.float32 else 0.0) * f.abs()),
        "bias": torch.zeros_like(u),
    }
    y = Held(weight * f + bias, weight.abs() * of_f + 4 * HALF_ULP * ((weight * f).abs() + bias.abs()))
    made = {"y": y, "x": Held(terms["x"], errors["x"])}
    for name, part in vars(own).items():
        if part is not None:
            bound = errors[name] + additions * HALF_ULP * terms[name].abs()
            made[name] = Held(*(summed(each, part, behind) for each in (terms[name], bound)))
    return made


def cheap(curve: str, dtype: torch.dtype) -> float:
    """Return how far off the cheap functions of half precision are, relative."""
    if dtype == torch.float32 or curve == "isru":
        return 0.0
    return TANH + (CHEAP_ERF if curve == "erf" else 0.0)


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


def hold(curve: str, x: Tensor, own: Parameters, behind: int = 0, dy: Tensor | None = None) -> None:
    """Hold y and every gradient to float64, and where x is half precision also what is there before it is rounded."""
    if dy is None:
        drawn = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
        dy = drawn.to(device=x.device, dtype=x.dtype)
    held = truth(curve, x, own, behind, dy)
    y = fused.forward(x, own, curve, behind)
    gradients = fused.backward(dy, x, own, curve, behind, EVERY)
    check_forms(y, gradients, x, own)
    for name, made in {"y": y, **gradients._asdict()}.items():
        if made is not None:
            agree(made, held[name], curve, x.dtype, name)
    if x.dtype != torch.float32 and x.numel() > 0:
        for name, made in unrounded(curve, x, own, behind, dy).items():
            agree(made, held[name], curve, x.dtype, f"{name} before it is rounded")


def check_forms(y: Tensor, gradients: Gradients, x: Tensor, own: Parameters) -> None:
    """Check that there is what there should be, in its shape, dtype, place and strides."""
    for name, made in {"y": y, **gradients._asdict()}.items():
        like = x if name in "xy" else getattr(own, name)
        assert (made is None) == (like is None), name
        if made is not None:
            assert (made.shape, made.dtype, made.device) == (like.shape, like.dtype, like.device), name
            assert made.stride() == (like.clone() if name in "xy" else torch.zeros(like.shape)).stride(), name


def hold_in_pieces(curve: str, x: Tensor, own: Parameters, y: Tensor, dy: Tensor, made: Gradients, behind: int) -> None:
    """Hold y and every gradient of large tensors to float64, some rows after the other."""
    additions, sums = most_additions(dy, x, own, made, curve, behind), {}
    rows = max(1, PIECE // x[0].numel())
    for begin in range(0, len(x), rows):
        here = slice(begin, begin + rows)
        held = truth_there(curve, x[here], own, behind, dy[here], additions)
        agree(y[here], held.pop("y"), curve, x.dtype, "y")
        agree(made.x[here], held.pop("x"), curve, x.dtype, "x")
        for name, part in held.items():
            sums[name] = Held(*map(torch.add, sums[name], part)) if name in sums else part
    for name, held in sums.items():
        agree(getattr(made, name), held, curve, x.dtype, name)


def most_additions(dy: Tensor, x: Tensor, own: Parameters, made: Gradients, curve: str, behind: int) -> int:
    """Return how many additions of float32 any one term meets: in its register, across a tile, and a few beside."""
    layout = layout_of([dy, x, made.x], *own.channel_axes(x, behind))
    if layout is None:  # contiguous ones are gone through, like those of dx
        layout = layout_of([made.x] * 3, *own.channel_axes(x, behind))
    given = backward_launches(dy, x, own, made, layout, curve)[0].arguments
    runs = -(-layout.others // (given["steps"] * given["block_others"])) * layout.outers
    tile = given["block_others"] * given["block_channels"]
    return -(-runs // given["programs"]) * given["steps"] + tile.bit_length() + 4


def fill(curve: str, x: Tensor, own: Parameters, behind: int, dy: Tensor, y: Tensor, made: Gradients) -> None:
    """Fill y and the gradients where they are, by the kernels alone."""
    axes = own.channel_axes(x, behind)
    forward_launch(x, y, own, layout_of([x, y], *axes), curve).run()
    for launch in backward_launches(dy, x, own, made, layout_of([dy, x, made.x], *axes), curve):
        launch.run()


def unrounded(curve: str, x: Tensor, own: Parameters, behind: int, dy: Tensor) -> dict[str, Tensor]:
    """Return what the kernels make of half precision where what they fill is float32."""
    x, dy = x.contiguous(), dy.contiguous()
    own = own.each(Tensor.contiguous)
    whole = {"dtype": torch.float32, "device": x.device}
    y, dx = torch.empty(x.shape, **whole), torch.empty(x.shape, **whole)
    parts = (None if part is None else torch.empty(part.shape, **whole) for part in vars(own).values())
    gradients = Gradients(dx, *parts)
    fill(curve, x, own, behind, dy, y, gradients)
    return {"y": y} | {name: made for name, made in gradients._asdict().items() if made is not None}


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
