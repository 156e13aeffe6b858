"""Curves that may replace a norm: one table row each, with f, f′, the formula, the properties and the source.

Every curve is used as y ≈ A·f(αx + s), with amplitude A, scale α and shift s. :func:`curve_of` makes a curve of any
torch function. The page's scripts, its figures and the module of a swapped folder take f from the same row.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from normscope.curves.properties import Function, autograd_of, grid, kinks_of, properties_of
from normscope.errors import UsageError

FREE, BEST = "free", "best"
NO_CURVES = (FREE, BEST, "all")  # names that ``--func`` takes besides those of curves
FLAT = 0.05  # of the largest |f′|: a flatter curve does not tell inputs apart
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}")
_DYT = "DyT, arXiv 2503.10622"
_TRIED = f"{_DYT}, which tries it in tanh's place"
_DERF = "arXiv 2512.10938, ViT/other_functions"
_ERF_SLOPE = 2 / math.sqrt(math.pi)
_TANH_SLOPE = "4 * (t := torch.exp(-2 * u.abs())) / (1 + t).square()"  # does not cancel for large u


@dataclass(frozen=True)
class Curve:
    """One function f of u = αx + s.

    Attributes:
        name: for ``--func``.
        aliases: other names, from the papers and their authors' modules.
        formula: f for readers.
        function: f, of float64 tensors of any shape.
        derivative: f′, likewise; of one side if it jumps.
        source: publication.
        limit: supremum of |f|; None if f is unbounded.
        zero_centred: f(−u) = −f(u).
        monotone: f never falls, or never rises.
        slope_at_origin: f′(0), infinite if f is vertical there; NaN at a kink.
        peak: largest |f′|, infinite if f is vertical somewhere.
        smooth: f′ is continuous.
        shift_of: name of the curve that this is with a shift s, which its own layer learns; None for all others.
        amplitude_is_inverse_scale: A is 1/α.
        expression: f of a built-in curve in torch, of a tensor ``u`` and the modules torch and math.
        javascript: likewise in JavaScript, of a number ``u`` and the functions of the page's functions.js.
        tex: likewise in the part of TeX that matplotlib typesets.
    """

    name: str
    aliases: tuple[str, ...]
    formula: str
    function: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]
    source: str
    limit: float | None
    zero_centred: bool
    monotone: bool
    slope_at_origin: float
    peak: float
    smooth: bool
    shift_of: str | None = None
    amplitude_is_inverse_scale: bool = False
    expression: str = field(default="", repr=False, compare=False)
    javascript: str = field(default="", repr=False, compare=False)
    tex: str = field(default="", repr=False, compare=False)

    @property
    def shifted(self) -> bool:
        """True if the curve's own layer learns a shift s."""
        return self.shift_of is not None

    @property
    def function_name(self) -> str:
        """Name of f: derf is erf with a shift."""
        return self.shift_of or self.name

    @property
    def bounded(self) -> bool:
        """True if |f| has a limit."""
        return self.limit is not None

    @property
    def centre_sensitive(self) -> bool:
        """True if f′(0) is not zero, so that f has no flat region about the origin (arXiv 2512.10938)."""
        return self.slope_at_origin != 0

    @property
    def linear_at_origin(self) -> bool:
        """True if f′(0) is finite and not zero, so that f(αx) is a line in the limit α → 0."""
        return self.centre_sensitive and math.isfinite(self.slope_at_origin)

    @property
    def vertical_at_origin(self) -> bool:
        """True if f′(0) is infinite, so that the curve has no slope to report there."""
        return math.isinf(self.slope_at_origin)

    @functools.cached_property
    def zero_at_origin(self) -> bool:
        """True if f(0) is zero."""
        return not self.function(torch.zeros(1, dtype=torch.float64)).any()

    @functools.cached_property
    def ends(self) -> tuple[float, float] | None:
        """The u below and above which |f′| stays under 5 % of its peak, to 1e-4 of u; None if the peak is infinite.

        >>> low, high = CURVES["tanh"].ends
        >>> low == -high, round(math.tanh(high) ** 2, 3)  # tanh′ is 1 − tanh²
        (True, 0.95)
        """
        if not math.isfinite(self.peak):
            return None
        u = torch.logspace(-6, 6, 2**18 + 1, dtype=torch.float64)
        steep = (u[self.derivative(side * u).abs() >= FLAT * self.peak].tolist() for side in (-1, 1))
        low, high = (max(values, default=0.0) for values in steep)
        return -low if low < u[-1] else -math.inf, high if high < u[-1] else math.inf

    @functools.cached_property
    def kinks(self) -> tuple[float, ...]:
        """The u at which f′ jumps, ascending, as far as a grid of |u| = 1e-6 … 1e6 and 0 shows them.

        >>> CURVES["tanh"].kinks, [round(u, 9) for u in CURVES["hardtanh"].kinks]
        ((), [-1.0, 1.0])
        """
        if self.smooth:
            return ()
        u = grid(points_a_decade=64)
        return kinks_of(self.derivative, u, self.function(u), self.derivative(u))


class Functions:
    """f and f′ of the built-in curves, for pickle."""


def _of(name: str, expression: str) -> Function:
    function = eval(f"lambda u: {expression}", {"torch": torch, "math": math})  # noqa: S307
    function.__module__, function.__name__, function.__qualname__ = __name__, name, f"{Functions.__name__}.{name}"
    setattr(Functions, name, staticmethod(function))
    return getattr(Functions, name)  # type: ignore[no-any-return]


def _built_in(name: str, formula: str, tex: str, *, f: str, slope: str, js: str, **properties: Any) -> Curve:
    """Make a curve of expressions in u; ``properties`` replace those of most curves."""
    usual = {"limit": 1.0, "zero_centred": True, "monotone": True, "smooth": True, "slope_at_origin": 1.0, "peak": 1.0}
    properties = {"aliases": (), "source": f"{_DERF}/{name}.py", **usual, **properties}
    return Curve(
        name=name,
        formula=formula,
        function=_of(name, f),
        derivative=_of(f"{name}_slope", slope),
        expression=f,
        javascript=js,
        tex=tex,
        **properties,
    )


# f and f′ keep their digits over all of float64, from denormal u to ±1e308: nothing overflows or cancels. At a jump f′
# is that of the inner side.
BUILT_IN = (
    _built_in(
        "tanh",
        "tanh(u)",
        r"\tanh(u)",
        f="torch.tanh(u)",
        slope=_TANH_SLOPE,
        js="Math.tanh(u)",
        source=f"{_DYT}, eq. 2",
        aliases=("dyt",),
    ),
    _built_in(
        "isru",
        "u / √(1 + u²)",
        r"u / \sqrt{1 + u^2}",
        f="(v := u.clamp(-1e9, 1e9)) * torch.rsqrt(1 + v.square())",  # on a CPU 1.5 times as fast as by hypot
        slope="torch.hypot(u, torch.ones_like(u)).reciprocal().pow(3)",
        js="u / Math.hypot(u, 1)",
        source="DyISRU, arXiv 2503.21708",
        aliases=("dyisru",),
    ),
    _built_in(
        "erf",
        "erf(u)",
        r"\mathrm{erf}(u)",
        f="torch.erf(u)",
        slope="2 / math.sqrt(math.pi) * torch.exp(-u.square())",
        js="erf(u)",
        source="Derf, arXiv 2512.10938, without its shift",
        slope_at_origin=_ERF_SLOPE,
        peak=_ERF_SLOPE,
    ),
    _built_in(
        "hardtanh",
        "clip(u, −1, 1)",
        r"\mathrm{clip}(u,\ {-}1,\ 1)",
        f="u.clamp(-1, 1)",
        slope="(u.abs() <= 1).to(u.dtype)",
        js="clipped(u, -1, 1)",
        source=_TRIED,
        aliases=("linear_clip", "linearclip"),
        smooth=False,
    ),
    _built_in(
        "linear",
        "u",
        "u",
        f="torch.clone(u)",
        slope="torch.ones_like(u)",
        js="u",
        source=_TRIED,
        aliases=("identity",),
        limit=None,
    ),
    _built_in(
        "softcap",
        "tanh(u), A = 1/α",
        r"\tanh(u),\ A = 1/\alpha",
        f="torch.tanh(u)",
        slope=_TANH_SLOPE,
        js="Math.tanh(u)",
        source="Gemma 2, arXiv 2408.00118: t·tanh(x/t)",
        amplitude_is_inverse_scale=True,
    ),
    _built_in(  # (1 + tanh(u/2)) / 2: with an offset, tanh with half its α and A
        "sigmoid",
        "1 / (1 + e^(−u))",
        "1 / (1 + e^{-u})",
        f="torch.exp(u.clamp(max=0)) / (1 + torch.exp(-u.abs()))",
        slope="(t := torch.exp(-u.abs())) / (1 + t).square()",
        js="1 / (1 + Math.exp(-u))",
        source=_TRIED,
        zero_centred=False,
        slope_at_origin=0.25,
        peak=0.25,
    ),
    _built_in(
        "arctan",
        "2/π · atan(u)",
        r"2/\pi\;\mathrm{atan}(u)",
        f="2 / math.pi * torch.atan(u)",
        slope="2 / math.pi / (1 + u.square())",
        js="2 / Math.PI * Math.atan(u)",
        slope_at_origin=2 / math.pi,
        peak=2 / math.pi,
    ),
    _built_in(
        "satursin",
        "sin(clip(u, −π/2, π/2))",
        r"\sin(\mathrm{clip}(u,\ {-}\pi/2,\ \pi/2))",
        f="torch.sin(u.clamp(-math.pi / 2, math.pi / 2))",
        slope="torch.cos(u).where(u.abs() <= math.pi / 2, 0.0)",
        js="Math.sin(clipped(u, -Math.PI / 2, Math.PI / 2))",
    ),
    _built_in(
        "expsign",
        "sign(u)·(1 − e^(−|u|))",
        r"\mathrm{sign}(u)\,(1 - e^{-|u|})",
        f="torch.copysign(-torch.expm1(-u.abs()), u)",
        slope="torch.exp(-u.abs())",
        js="-Math.sign(u) * Math.expm1(-Math.abs(u))",
    ),
    _built_in(  # stays within ±1, so that smoothsign_clip is the same function
        "softsign",
        "u / (1 + |u|)",
        "u / (1 + |u|)",
        f="u / (1 + u.abs())",
        slope="1 / (1 + u.abs()).square()",
        js="u / (1 + Math.abs(u))",
        source=f"{_DERF}/smoothsign.py",
        aliases=("smoothsign", "smoothsign_clip"),
    ),
    _built_in(  # tan of half the angle whose tan is u
        "relsign",
        "u / (1 + √(1 + u²))",
        r"u / (1 + \sqrt{1 + u^2})",
        f="u / (1 + torch.hypot(u, torch.ones_like(u)))",
        slope="1 / ((h := torch.hypot(u, torch.ones_like(u))) * (1 + h))",
        js="u / (1 + Math.hypot(u, 1))",
        slope_at_origin=0.5,
        peak=0.5,
    ),
    _built_in(
        "cubsign",
        "u³ / (1 + |u|³)",
        "u^3 / (1 + |u|^3)",
        f="(v := u.clamp(-1e6, 1e6).pow(3)) / (1 + v.abs())",
        slope="3 * (u / (1 + u.abs().pow(3))).square()",
        js="u ** 3 / (1 + Math.abs(u) ** 3)",
        slope_at_origin=0.0,
        peak=4 / 3 * 0.5 ** (2 / 3),
    ),
    _built_in(  # nears ±1 so slowly that at u = 1e6 it is 0.93
        "saturlog",
        "sign(u)·L / (1 + L), L = ln(1 + |u|)",
        r"\mathrm{sign}(u)\,L / (1 + L),\ L = \ln(1 + |u|)",
        f="torch.copysign((v := torch.log1p(u.abs())) / (1 + v), u)",
        slope="1 / (1 + (m := u.abs())) / (1 + torch.log1p(m)).square()",
        js="Math.sign(u) * Math.log1p(Math.abs(u)) / (1 + Math.log1p(Math.abs(u)))",
    ),
    _built_in(
        "logquad_clip",
        "clip(sign(u)·ln(1 + u²), −1, 1)",
        r"\mathrm{clip}(\mathrm{sign}(u)\,\ln(1 + u^2),\ {-}1,\ 1)",
        f="torch.copysign(torch.log1p(u.square()).clamp(max=1), u)",
        slope="(2 * (m := u.abs().clamp(max=2)) / (1 + (s := m.square()))).where(torch.log1p(s) <= 1, 0.0)",
        js="Math.sign(u) * Math.min(Math.log1p(u * u), 1)",
        slope_at_origin=0.0,
        smooth=False,
    ),
    _built_in(
        "logsign_clip",
        "clip(sign(u)·ln(1 + |u|), −1, 1)",
        r"\mathrm{clip}(\mathrm{sign}(u)\,\ln(1 + |u|),\ {-}1,\ 1)",
        f="torch.copysign(torch.log1p(u.abs()).clamp(max=1), u)",
        slope="(1 / (1 + (m := u.abs()))).where(torch.log1p(m) <= 1, 0.0)",
        js="Math.sign(u) * Math.min(Math.log1p(Math.abs(u)), 1)",
        smooth=False,
    ),
)
# derf is not among ``all``: it is the name of erf with a shift.
CURVES = {curve.name: curve for curve in BUILT_IN}
CURVES["derf"] = replace(CURVES["erf"], name="derf", source="Derf, arXiv 2512.10938", shift_of="erf")
BY_NAME = {name: curve for curve in CURVES.values() for name in (curve.name, *curve.aliases)}


def curve_of(
    function: Callable[[Tensor], Tensor],
    name: str,
    formula: str = "",
    derivative: Callable[[Tensor], Tensor] | None = None,
    source: str = "yours",
) -> Curve:
    """Make a curve of any elementwise torch function; its properties are measured at |u| = 1e-6 … 1e6 and at 0.

    Args:
        function: f, of float64 tensors of any shape.
        name: a name that no built-in curve has.
        formula: f for readers.
        derivative: f′; by default by torch's autograd.
        source: publication.

    Raises:
        UsageError: if the name is taken or no word, or if the function is no curve: not elementwise, not real,
            constant, not differentiable, or f or f′ not finite for |u| ≤ 1000.

    >>> swish = curve_of(torch.nn.functional.silu, "swish", "u·sigmoid(u)")
    >>> swish.bounded, swish.monotone, swish.slope_at_origin
    (False, False, 0.5)
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"A curve cannot be called {name!r}: take up to 40 letters, digits and _, a letter first.")
    if name.lower() in BY_NAME or name.lower() in NO_CURVES:
        raise UsageError(f"A curve of your own cannot be called {name!r}: that name has a meaning already.")
    slope = derivative or autograd_of(function)
    return Curve(name, (), formula or f"{name}(u)", function, slope, source, **properties_of(function, slope, name))
