"""What is compared on a GPU: who computes a point-wise function or a norm, forward and backward, and what is exact."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normscope.fits.curves.known import CURVES as FITTED
from normscope.swaps.bench.timing import bytes_moved, cache_of, sets_beyond_cache
from normscope.swaps.kernels import eager as reference
from normscope.swaps.kernels import operators
from normscope.swaps.kernels.parameters import Parameters

CURVES = {"tanh": "DyT", "isru": "DyISRU", "erf": "Derf"}
OURS, OPERATOR, PUBLISHED, IN_FLOAT32 = "normscope", "normscope, its operator", "as published", "in float32"
EAGER, COMPILED, TUNED = "eager", "torch.compile", "torch.compile max-autotune-no-cudagraphs"
LAYER_NORM, RMS_NORM, LIGER, QUACK = "F.layer_norm", "F.rms_norm", "Liger", "QuACK"
EPS, ALPHA, SHIFT = 1e-6, 0.7, 0.1
ALLOWED = {torch.bfloat16: 0.1, torch.float16: 0.02, torch.float32: 1e-4}  # of the largest; half: each step may round
ROWS = 32  # that are checked at both ends
_SEED = 0


@dataclass(frozen=True)
class Operands:
    """What one call takes: the input, the gradient of the output, and room for a result; of one shape all."""

    x: Tensor
    dy: Tensor
    out: Tensor


@dataclass(frozen=True)
class Contender:
    """Who computes what.

    Attributes:
        of: what it computes: DyT, DyISRU, Derf, LayerNorm or RMSNorm.
        way: who computes it, and how.
        call: from x and the parameters to y.
        parameters: by which, besides x, gradients are made.
        exact: the same of float64.
        back: from x and dy to the gradients, that by x first, where it is no autograd that is timed.
    """

    of: str
    way: str
    call: Callable[..., Tensor]
    parameters: tuple[Tensor, ...]
    exact: Callable[..., Tensor]
    back: Callable[[Tensor, Tensor], Any] | None = None

    @property
    def ours(self) -> bool:
        """Whether it is normscope's kernels."""
        return self.way in (OURS, OPERATOR)

    def forward(self, own: Operands) -> Tensor:
        """Return y, with nothing kept for a backward pass."""
        with torch.no_grad():
            return self.call(own.x, *self.parameters)

    def backward(self, own: Operands) -> Callable[[], Any]:
        """Run the forward pass, and return what makes the gradients by x and all parameters, as often as wanted.

        Autograd goes backward on the stream that is current here.
        """
        if (back := self.back) is not None:
            return lambda: back(own.x, own.dy)
        x = own.x.detach().requires_grad_()
        y = self.call(x, *self.parameters)
        return lambda: torch.autograd.grad(y, [x, *self.parameters], own.dy, retain_graph=True)


def operands(shape: tuple[int, int], dtype: torch.dtype, device: str, number: int | None = None) -> list[Operands]:
    """Return so many sets of random values; by default one, or on CUDA as many as no cache holds together."""
    generator = torch.Generator(device).manual_seed(_SEED)

    def noise() -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    if number is None and device == "cuda":
        nbytes = bytes_moved("forward", math.prod(shape), dtype.itemsize)
        number = sets_beyond_cache(nbytes, cache_of(torch.device(device)))
    return [Operands(noise(), noise(), torch.empty(shape, dtype=dtype, device=device)) for _ in range(number or 1)]


def own_parameters(curve: str, channels: int, dtype: torch.dtype, device: str) -> Parameters:
    """Return α and, of Derf alone, a shift, one number each; weight and bias, one a channel; all of one dtype."""
    generator = torch.Generator(device).manual_seed(_SEED)

    def near(middle: float, number: int) -> Tensor:
        noise = torch.randn(number, generator=generator, device=device)
        return (middle + 0.1 * noise).to(dtype).requires_grad_()

    one = {name: torch.full((1,), value, dtype=dtype, device=device) for name, value in _SCALARS.items()}
    return Parameters(
        one["alpha"].requires_grad_(),
        one["shift"].requires_grad_() if curve == "erf" else None,
        near(1, channels),
        near(0, channels),
    )


_SCALARS = {"alpha": ALPHA, "shift": SHIFT}


def pointwise(curve: str, channels: int, dtype: torch.dtype, device: str) -> list[Contender]:
    """Return normscope's kernels by autograd and by the operator itself, and plain torch in two ways."""
    own = own_parameters(curve, channels, dtype, device)
    given = tuple(part for part in vars(own).values() if part is not None)

    def parted(parameters: tuple[Tensor, ...]) -> Parameters:
        alpha, *shift, weight, bias = parameters
        return Parameters(alpha, shift[0] if shift else None, weight, bias)

    def fused(x: Tensor, *parameters: Tensor) -> Tensor:
        return operators.pointwise(x, *vars(parted(parameters)).values(), curve, 0)

    def operator_back(x: Tensor, dy: Tensor) -> Any:
        return operators.pointwise_backward(dy, x, *vars(own).values(), curve, 0, True, True)

    def in_float32(x: Tensor, *parameters: Tensor) -> Tensor:
        return reference.pointwise(x, FITTED[curve].function, parted(parameters), 0)

    published = _PUBLISHED[curve]
    learned = given
    if curve == "isru":  # the paper learns C = 1/α²
        learned = (torch.full_like(own.alpha, ALPHA**-2).requires_grad_(), *given[1:])
    of = CURVES[curve]
    return [
        Contender(of, OURS, fused, given, in_float32),
        Contender(of, OPERATOR, fused, given, in_float32, operator_back),
        Contender(of, f"{EAGER}, {PUBLISHED}", published, learned, published),
        Contender(of, f"{EAGER}, {IN_FLOAT32}", in_float32, given, in_float32),
    ]


def _dyt(x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.tanh(alpha * x) * weight + bias


def _dyisru(x: Tensor, c: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x / torch.sqrt(x * x + c) * weight + bias


def _derf(x: Tensor, alpha: Tensor, shift: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.erf(alpha * x + shift) * weight + bias


_PUBLISHED: dict[str, Callable[..., Tensor]] = {"tanh": _dyt, "isru": _dyisru, "erf": _derf}  # in x's dtype, as written


def norms(channels: int, dtype: torch.dtype, device: str) -> list[Contender]:
    """Return torch's own norms: LayerNorm with weight and bias, RMSNorm with a weight."""
    own = own_parameters("tanh", channels, dtype, device)
    return [
        Contender("LayerNorm", LAYER_NORM, _layer_norm, (own.weight, own.bias), _layer_norm),
        Contender("RMSNorm", RMS_NORM, _rms_norm, (own.weight,), _rms_norm),
    ]


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def compiled(plain: Contender, tuned: bool, rehearsal: bool) -> Contender:
    """Return the same by torch.compile; in a rehearsal without a compiler's code, by its tracing alone.

    Tuned is max-autotune-no-cudagraphs: the CUDA graphs of max-autotune itself would be captured within ours.
    """
    how: dict[str, Any] = {"backend": "aot_eager"} if rehearsal else {}
    if tuned and not rehearsal:
        how = {"mode": "max-autotune-no-cudagraphs"}
    call = torch.compile(plain.call, fullgraph=True, dynamic=False, **how)
    eager, name = f"{EAGER}, ", TUNED if tuned else COMPILED
    return replace(plain, way=f"{name}, {plain.way.removeprefix(eager)}", call=call)


def peers(channels: int, dtype: torch.dtype, device: str) -> Iterator[Contender | str]:
    """Yield others' kernels, or a sentence of each that is not to be had."""
    for way, made in ((LIGER, _ligers), (QUACK, _quacks)):
        try:
            yield made(channels, dtype, device)
        except Exception as error:  # of whatever a package that is not ours does when it is imported and made
            yield f"{way}: {described(error)}"


def _ligers(channels: int, dtype: torch.dtype, device: str) -> Contender:
    own = own_parameters("tanh", channels, dtype, device)
    module = import_module("liger_kernel.transformers.dyt").LigerDyT(channels, beta=True, init_alpha=ALPHA)
    module = module.to(device, dtype)
    with torch.no_grad():
        module.gamma.copy_(own.weight)
        module.beta.copy_(own.bias)
    learned = (module.alpha, module.gamma, module.beta)
    return Contender("DyT", LIGER, lambda x, *_: module(x), learned, _dyt)


def _quacks(channels: int, dtype: torch.dtype, device: str) -> Contender:
    rmsnorm = import_module("quack").rmsnorm
    own = own_parameters("tanh", channels, dtype, device)
    return Contender("RMSNorm", QUACK, lambda x, weight: rmsnorm(x, weight=weight, eps=EPS), (own.weight,), _rms_norm)


def wrong(contender: Contender, own: Operands) -> str:
    """Say how far off y and the gradient by x are, at both ends of the rows, where that is too far; else nothing."""
    results = {"y": contender.forward(own), "dx": contender.backward(own)()[0]}
    learned = [part.detach().double() for part in contender.parameters]
    for rows in (slice(None, ROWS), slice(-ROWS, None)):
        x = own.x[rows].double().requires_grad_()
        y = contender.exact(x, *learned)
        [dx] = torch.autograd.grad(y, x, own.dy[rows].double())
        for name, exact in (("y", y.detach()), ("dx", dx)):
            off = float((results[name][rows].detach().double() - exact).abs().max() / exact.abs().max())
            if not off <= ALLOWED[own.x.dtype]:
                return (
                    f"{contender.of} by {contender.way}, {name}, {own.x.dtype}, {tuple(own.x.shape)}: off by {off:.2g} "
                    f"of the largest, and {ALLOWED[own.x.dtype]:g} is allowed; it is not timed."
                )
    return ""


def described(error: Exception) -> str:
    """Name an error and say the first line of its message, and likewise of that which came before it.

    The capture of a CUDA graph that fails says no more than that something failed before.
    """
    own = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return f"{own}; before that {described(before)}" if isinstance(before, Exception) else own
