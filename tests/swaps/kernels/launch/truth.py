"""Results and gradients in float64, and the errors that float32 arithmetic allows, summed in any order."""

import os

import numpy as np
import scipy.special
import torch

from normscope.swaps.kernels import launch

GPU = os.environ.get("NORMSCOPE_KERNEL_TESTS") == "cuda"
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
BY_NUMPY = {"tanh": np.tanh, "isru": lambda u: u / np.hypot(u, 1), "erf": scipy.special.erf}
BY_TORCH = {"tanh": torch.tanh, "isru": lambda u: u / torch.hypot(u, u.new_ones(())), "erf": torch.special.erf}
SLOPES = {
    "tanh": lambda u: np.cosh(u) ** -2,
    "isru": lambda u: np.hypot(u, 1) ** -3,
    "erf": lambda u: 2 / np.sqrt(np.pi) * np.exp(-(u**2)),
}
HALF_ULP = 2.0**-24  # of float32, in which everything between a load and a store is computed
SMALLEST = 2.0**-126  # derivatives below may be zero in float32
CANCELLED = 2.0**-50  # of autograd's derivative in float64, 1 − tanh² and 1/r − u²/r³
TANH = 2.2e-5  # relative, of half precision: the bound in loops._tanh
# Of f in float32, of which tanh and isru have 5 at most and CUDA's erff, 2 ulp (CUDA C++ Programming Guide), 4; and of
# f′ without an error of the exponent: ex2.approx takes 4, div.full twice 4 (PTX ISA), and rsqrt.approx thrice 2.2.
ROUNDINGS = 16
# The interpreter truncates float32 to bfloat16, an ulp of eight digits, and so to float16; a GPU rounds, half of one.
HALVED = 0.5 if GPU else 1.0
ULP = {torch.float32: HALF_ULP, torch.bfloat16: HALVED * 2.0**-7, torch.float16: HALVED * 2.0**-10}
LEAST = {  # the interpreter has no subnormal bfloat16
    torch.float32: 0.0,
    torch.bfloat16: 2.0**-134 if GPU else 2.0**-126,
    torch.float16: HALVED * 2.0**-24,
}
NAMES = ("alpha", "shift", "weight", "bias")
QUANTITIES = ("y", "x", *NAMES)  # the output, and the tensors by which gradients are taken
FEW = 2**20  # elements whose truth the CPU computes
PIECE = 2**23  # elements whose truth is in memory at once
FURTHEST = {}  # by curve, dtype and quantity: the largest error so far, over what is allowed


def truth(curve, x, parameters, behind, dy, additions=32):
    """Return by name y and every gradient in float64, each with a bound on the error.

    Each element has parameters of its own here, whose gradients are the terms of the sums: their magnitudes bound the
    error of a sum of ``additions``. An error of u is one of f by f′ and one of log f′ by at most 2 + 2|u|; the exponent
    of erf′ is rounded three times besides.
    """
    if x.numel() <= FEW:
        x, dy = x.cpu(), dy.cpu()
        parameters = [None if part is None else part.cpu() for part in parameters]

    def spread(part):
        part = x.new_zeros(1) if part is None else part
        part = part.double().reshape(()) if part.numel() == 1 else part.double()[(..., *[None] * behind)]
        return part.expand(x.shape).clone().requires_grad_()

    leaves = {name: spread(part) for name, part in zip(NAMES, parameters, strict=True)}
    alpha, shift, weight, bias = leaves.values()
    leaves["x"] = wide = x.double().clone().requires_grad_()
    u = alpha * wide + shift
    (weight * BY_TORCH[curve](u) + bias).backward(dy.double())
    terms = {name: leaf.grad for name, leaf in leaves.items()}
    alpha, shift, weight, bias, wide, u = (t.detach() for t in (alpha, shift, weight, bias, wide, u))
    slope = torch.autograd.functional.jvp(BY_TORCH[curve], u, torch.ones_like(u))[1]
    reach = (alpha * wide).abs() + shift.abs()
    f = BY_TORCH[curve](u) if u.is_cuda else torch.from_numpy(np.asarray(BY_NUMPY[curve](u.numpy())))
    cheap = TANH if curve == "tanh" and x.dtype != torch.float32 else 0.0
    f_error = f.abs() * (ROUNDINGS * HALF_ULP + cheap) + 4 * HALF_ULP * slope * reach
    exponent = 3 * u**2 if curve == "erf" and GPU else 0.0  # the interpreter is held without it
    slope_error = slope * HALF_ULP * (ROUNDINGS + 4 * (1 + u.abs()) * reach + exponent) + CANCELLED + SMALLEST
    through = weight.abs() * dy.double().abs() * slope_error
    errors = {"alpha": wide.abs() * through, "shift": through, "weight": dy.double().abs() * f_error}
    y_error = weight.abs() * f_error + 4 * HALF_ULP * ((weight * f).abs() + bias.abs())
    results = {"y": (weight * f + bias, y_error), "x": (terms["x"], alpha.abs() * through)}
    for name, part in zip(NAMES, parameters, strict=True):
        if part is not None:
            bound = errors.get(name, 0) + additions * HALF_ULP * terms[name].abs()
            results[name] = summed(terms[name], part, behind), summed(bound, part, behind)
    return results


def summed(terms, part, behind):
    """Add up the terms of each number of a parameter."""
    if part.numel() == 1:
        return terms.sum().reshape(part.shape)
    first = terms.ndim - behind - part.ndim
    axes = [axis for axis in range(terms.ndim) if not first <= axis < first + part.ndim]
    return terms.sum(axes) if axes else terms


def assert_close(result, value, error, *what):
    """Allow the error of float32 arithmetic and one rounding."""
    allowed = error + ULP[result.dtype] * (value.abs() + error) + LEAST[result.dtype]
    excess = (result.to(value.device).double() - value).abs() / allowed.clamp(min=SMALLEST)
    name, furthest = ", ".join(map(str, what)), float(excess.nan_to_num(1e30, 1e30).max()) if excess.numel() else 0.0
    FURTHEST[name] = max(FURTHEST.get(name, 0.0), furthest)
    assert furthest <= 1, f"{name}: off by {furthest:.3g} of what is allowed"


def by_kernels(curve, x, parameters, behind, dy):
    """Return y and every gradient, by the names of :data:`QUANTITIES`."""
    y = launch.forward(x, parameters, curve, behind)
    return dict(zip(QUANTITIES, (y, *launch.backward(dy, x, parameters, curve, behind)), strict=True))


def check(curve, x, parameters, behind=0, dy=None):
    """Compare y and every gradient with float64; check their shapes, dtypes, devices and strides."""
    if dy is None:
        dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x)
    expected = truth(curve, x, parameters, behind, dy)
    for name, result in by_kernels(curve, x, parameters, behind, dy).items():
        like = x if name in "xy" else parameters[NAMES.index(name)]
        assert (result is None) == (like is None), name
        if result is not None:
            assert (result.shape, result.dtype, result.device) == (like.shape, like.dtype, like.device), name
            strides = torch.empty_like(like) if name in "xy" else torch.zeros(like.shape)
            assert result.stride() == strides.stride(), name
            assert_close(result, *expected[name], curve, x.dtype, name)


def check_in_pieces(curve, x, parameters, dy, behind=0, additions=32):
    """Compare y and every gradient of large tensors with float64, some rows after the other."""
    results, sums = by_kernels(curve, x, parameters, behind, dy), {}
    rows = max(1, PIECE // x[0].numel())
    for begin in range(0, len(x), rows):
        some = slice(begin, begin + rows)
        expected = truth(curve, x[some], parameters, behind, dy[some], additions)
        for name in "yx":
            assert_close(results[name][some], *expected.pop(name), curve, x.dtype, name)
        for name, part in expected.items():
            sums[name] = tuple(map(torch.add, sums[name], part)) if name in sums else part
    for name, expected in sums.items():
        assert_close(results[name], *(part.to(DEVICE) for part in expected), curve, x.dtype, name)


def parameters(shape, dtype=torch.float32, each="weight bias", without=""):
    """Return random α, s, weight and bias: one per channel those in ``each``, one number the others."""
    generator = torch.Generator().manual_seed(2)

    def some(name, low, high):
        part = torch.rand(shape if name in each.split() else (1,), generator=generator) * (high - low) + low
        return None if name in without.split() else part.to(device=DEVICE, dtype=dtype)

    return some("alpha", 0.4, 1.5), some("shift", -0.5, 0.5), some("weight", -2, 2), some("bias", -1, 1)


def numbers(shape, dtype=torch.float32, seed=0, drawn_on="cpu"):
    """Return normal numbers of magnitudes from 0.05 to 5, so that a curve is straight for some and flat for others."""
    generator = torch.Generator(drawn_on).manual_seed(seed)
    scales = torch.rand(shape, generator=generator, device=drawn_on) * 4.6 - 3
    drawn = torch.randn(shape, generator=generator, device=drawn_on) * scales.exp()
    return drawn.to(device=DEVICE, dtype=dtype)
