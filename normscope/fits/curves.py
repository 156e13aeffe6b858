"""The curves that may stand in for a norm: pure functions of float64 tensors, each with its formula and its source.

Every curve is used as y ≈ A·f(αx + s), with amplitude A, scale α and shift s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normscope.errors import UsageError, unknown


@dataclass(frozen=True)
class Curve:
    """One function f of u = αx + s.

    Attributes:
        name: what ``--func`` takes.
        aliases: names of the modules that the papers make of it; ``--func`` takes these too.
        formula: f, to be read.
        function: f, of tensors of any shape.
        derivative: f′, likewise.
        source: where the field has it from.
    """

    name: str
    aliases: tuple[str, ...]
    formula: str
    function: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]
    source: str
    limit: float | None = 1.0
    zero_centred: bool = True
    centre_sensitive: bool = True
    monotone: bool = True
    peak: float = 1.0
    linear_at_origin: bool = True
    smooth: bool = True
    shifted: bool = False
    amplitude_is_inverse_scale: bool = False


def isru(u: Tensor) -> Tensor:
    """U / √(1 + u²), which neither overflows nor loses digits for large u.

    >>> isru(torch.tensor([0.75, -1e200], dtype=torch.float64)).tolist()
    [0.6, -1.0]
    """
    return u / torch.hypot(u, torch.ones_like(u))


def _isru_derivative(u: Tensor) -> Tensor:
    return torch.hypot(u, torch.ones_like(u)).reciprocal().pow(3)


def _tanh_derivative(u: Tensor) -> Tensor:
    return 1 / torch.cosh(u.clamp(-350, 350)).square()


FREE = "free"
BEST = "best"

CURVES = {
    curve.name: curve
    for curve in (
        Curve("tanh", ("dyt",), "tanh(u)", torch.tanh, _tanh_derivative, "DyT, arXiv 2503.10622, eq. 2"),
        Curve("isru", ("dyisru",), "u / √(1 + u²)", isru, _isru_derivative, "DyISRU, arXiv 2503.21708"),
    )
}


def curves_named(names: str | Sequence[str]) -> list[Curve]:
    """Look curves up by name or alias, separated by commas or as a list, each once.

    Raises:
        UsageError: if there is no such curve.

    >>> [curve.name for curve in curves_named("dyt,isru,tanh")]
    ['tanh', 'isru']
    """
    by_name = {name: curve for curve in CURVES.values() for name in (curve.name, *curve.aliases)}
    parts = [part.strip() for part in (names.split(",") if isinstance(names, str) else names)]
    found: dict[str, Curve] = {}
    for part in parts:
        curve = by_name.get(part.lower())
        if curve is None:
            raise UsageError(unknown("curve", part, by_name))
        found[curve.name] = curve
    return list(found.values())


def split_names(names):
    return names.split(",")
