"""The curves that may stand in for a norm: one table of them, each with its formula, its properties and its source.

Every curve is used as y ≈ A·f(αx + s), with amplitude A, scale α and shift s. The functions themselves are in
:mod:`normscope.fits.curves.functions`; one of your own is made by :func:`curve_of`, or from a formula by
:func:`normscope.fits.curves.expressions.curve_from`.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from normscope.errors import UsageError
from normscope.fits.curves import functions as f
from normscope.fits.curves.properties import autograd_of, properties_of

FREE, BEST = "free", "best"
NO_CURVES = (FREE, BEST, "all")  # what ``--func`` takes besides curves
_NEAR_ORIGIN = 1e-8
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}")


@dataclass(frozen=True)
class Curve:
    """One function f of u = αx + s.

    Attributes:
        name: what ``--func`` takes.
        aliases: names of the papers' and their authors' modules; ``--func`` takes these too.
        formula: f, to be read.
        function: f, of float64 tensors of any shape.
        derivative: f′, likewise; one side's where it jumps, and infinite where f is vertical.
        source: where the field has it from.
        limit: supremum of |f|; None where f is unbounded.
        zero_centred: f(−u) = −f(u).
        monotone: f never falls, or never rises.
        slope_at_origin: f′(0); 0 where f is flat there, infinite where it is vertical, NaN where it has a kink.
        peak: largest |f′|, infinite where f is vertical somewhere.
        smooth: f′ is continuous.
        power_at_origin: p, where f(u) − f(0) goes as |u|^p for small u: 1 where f has a tangent; NaN without any.
        shift_of: name of the curve that this is with a shift s, which its own layer learns; None for all others.
        amplitude_is_inverse_scale: A is no number of its own but 1/α.
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
    power_at_origin: float = 1.0
    shift_of: str | None = None
    amplitude_is_inverse_scale: bool = False

    @property
    def shifted(self) -> bool:
        """Whether the curve's own layer learns a shift s."""
        return self.shift_of is not None

    @property
    def function_name(self) -> str:
        """Name of f: derf is erf with a shift."""
        return self.shift_of or self.name

    @property
    def bounded(self) -> bool:
        """Whether |f| has a limit."""
        return self.limit is not None

    @property
    def centre_sensitive(self) -> bool:
        """Whether f′(0) is not zero, so that f has no flat region about the origin (arXiv 2512.10938)."""
        return self.slope_at_origin != 0

    @property
    def linear_at_origin(self) -> bool:
        """Whether f′(0) is finite and not zero, so that f(αx) is a straight line in the limit α → 0."""
        return self.centre_sensitive and math.isfinite(self.slope_at_origin)

    @functools.cached_property
    def coefficient_at_origin(self) -> float:
        """c, where f(u) − f(0) tends to c·u^p for small u > 0; f′(0) of a curve with a tangent there."""
        if self.linear_at_origin:
            return self.slope_at_origin
        u = torch.tensor([0.0, _NEAR_ORIGIN], dtype=torch.float64)
        at_origin, near = self.function(u).tolist()
        return float((near - at_origin) / _NEAR_ORIGIN**self.power_at_origin)


_DYT = "DyT, arXiv 2503.10622"
_TRIED = f"{_DYT}, which tries it in tanh's place"
_DERF = "arXiv 2512.10938, ViT/other_functions"


def _built_in(name: str, formula: str, source: str = "", aliases: tuple[str, ...] = (), **properties: Any) -> Curve:
    """A curve of :mod:`normscope.fits.curves.functions`, which has what most have but for the properties given.

    Most are odd, rise everywhere and tend to ±1; most of these are smooth, and steepest at the origin, with slope 1.
    """
    return Curve(
        **{
            "name": name,
            "aliases": aliases,
            "formula": formula,
            "function": getattr(f, name, None),
            "derivative": getattr(f, f"{name}_derivative", None),
            "source": source or f"{_DERF}/{name}.py",
            **{
                "limit": 1.0,
                "zero_centred": True,
                "monotone": True,
                "smooth": True,
                "slope_at_origin": 1.0,
                "peak": 1.0,
            },
            **properties,
        }
    )


_VERTICAL: dict[str, Any] = {"slope_at_origin": math.inf, "peak": math.inf, "smooth": False}
_TANH: dict[str, Any] = {"function": torch.tanh, "derivative": f.tanh_derivative}
_LINE: dict[str, Any] = {"function": torch.clone, "derivative": torch.ones_like, "limit": None}
_ERF_SLOPE = 2 / math.sqrt(math.pi)

BUILT_IN = (
    _built_in("tanh", "tanh(u)", f"{_DYT}, eq. 2", ("dyt",), **_TANH),
    _built_in("isru", "u / √(1 + u²)", "DyISRU, arXiv 2503.21708", ("dyisru",)),
    _built_in(
        *("erf", "erf(u)", "Derf, arXiv 2512.10938, without its shift"),
        function=torch.erf,
        slope_at_origin=_ERF_SLOPE,
        peak=_ERF_SLOPE,
    ),
    _built_in("hardtanh", "clip(u, −1, 1)", _TRIED, ("linear_clip", "linearclip"), smooth=False),
    _built_in("linear", "u", _TRIED, ("identity",), **_LINE),
    _built_in(
        *("softcap", "tanh(u), A = 1/α", "Gemma 2, arXiv 2408.00118: t·tanh(x/t)"),
        amplitude_is_inverse_scale=True,
        **_TANH,
    ),
    _built_in("sigmoid", "1 / (1 + e^(−u))", _TRIED, zero_centred=False, slope_at_origin=0.25, peak=0.25),
    _built_in("arctan", "2/π · atan(u)", slope_at_origin=2 / math.pi, peak=2 / math.pi),
    _built_in("satursin", "sin(clip(u, −π/2, π/2))"),
    _built_in("expsign", "sign(u)·(1 − e^(−|u|))"),
    _built_in("softsign", "u / (1 + |u|)", f"{_DERF}/smoothsign.py", ("smoothsign", "smoothsign_clip")),
    _built_in("relsign", "u / (1 + √(1 + u²))", slope_at_origin=0.5, peak=0.5),
    _built_in("cubsign", "u³ / (1 + |u|³)", slope_at_origin=0.0, peak=4 / 3 * 0.5 ** (2 / 3), power_at_origin=3.0),
    _built_in("exproot", "sign(u)·(1 − e^(−√|u|))", power_at_origin=1 / 2, **_VERTICAL),
    _built_in("saturlog", "sign(u)·L / (1 + L), L = ln(1 + |u|)"),
    _built_in(
        "logquad_clip", "clip(sign(u)·ln(1 + u²), −1, 1)", slope_at_origin=0.0, smooth=False, power_at_origin=2.0
    ),
    _built_in("logsign_clip", "clip(sign(u)·ln(1 + |u|), −1, 1)", smooth=False),
    _built_in("power23_clip", "clip(sign(u)·|u|^(2/3), −1, 1)", power_at_origin=2 / 3, **_VERTICAL),
)
# derf is not among all that are compared: it has one free parameter more, and with as many erf takes its place.
CURVES = {curve.name: curve for curve in BUILT_IN}
CURVES["derf"] = replace(CURVES["erf"], name="derf", source="Derf, arXiv 2512.10938", shift_of="erf")
BY_NAME = {name: curve for curve in CURVES.values() for name in (curve.name, *curve.aliases)}


def _own_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise UsageError(f"A curve cannot be called {name!r}: take up to 40 letters, digits and _, a letter first.")
    if name.lower() in BY_NAME or name.lower() in NO_CURVES:
        raise UsageError(f"A curve of your own cannot be called {name!r}: that name has a meaning already.")
    return name


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
        name: what tables call it; no built-in curve's.
        formula: f, to be read.
        derivative: f′; by torch's autograd where None.
        source: where it is from.

    Raises:
        UsageError: if the name is taken or no word, or if the function is no curve: not elementwise, not real, not
            finite for |u| ≤ 1000, constant, or not differentiable by torch where no derivative is given.

    >>> swish = curve_of(torch.nn.functional.silu, "swish", "u·sigmoid(u)")
    >>> swish.bounded, swish.monotone, swish.slope_at_origin
    (False, False, 0.5)
    """
    slope = derivative or autograd_of(function)
    measured = properties_of(function, slope, _own_name(name))
    return Curve(name, (), formula or f"{name}(u)", function, slope, source, **asdict(measured))
