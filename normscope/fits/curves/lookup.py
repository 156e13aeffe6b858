"""Curves by their names: built-in ones, formulas and curves themselves, as users list them."""

from __future__ import annotations

from collections.abc import Sequence

from normscope.errors import UsageError, unknown
from normscope.fits.curves.expressions import curve_from
from normscope.fits.curves.known import BUILT_IN, BY_NAME, NO_CURVES, Curve


def split_names(names: str) -> list[str]:
    """Split at the commas that lie outside parentheses.

    >>> split_names("tanh, mine=clip(x, -1, 2), free")
    ['tanh', 'mine=clip(x, -1, 2)', 'free']
    """
    parts, depth = [""], 0
    for sign in names:
        depth = max(depth + (sign == "(") - (sign == ")"), 0)
        if sign == "," and not depth:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts]


def curves_named(names: str | Sequence[str | Curve]) -> list[Curve]:
    """Look curves up by name or alias, separated by commas or as a list, each once.

    Args:
        names: names of built-in curves, in any case; ``all`` of them, derf as erf; ``NAME=FORMULA`` for one of your own
            (:func:`normscope.fits.curves.expressions.curve_from`); and, in a list, curves themselves.

    Raises:
        UsageError: if there is no such curve, if a formula is not understood, or if two curves share a name.

    >>> [curve.name for curve in curves_named("dyt,isru,tanh")]
    ['tanh', 'isru']
    >>> [curve.name for curve in curves_named(["Derf", "mine=x/(1+abs(x)**3)**(1/3)"])]
    ['derf', 'mine']
    """
    parts = split_names(names) if isinstance(names, str) else names
    curves: dict[str, Curve] = {}
    for part in dict.fromkeys(parts):
        for curve in [part] if isinstance(part, Curve) else _curves_of(part.strip()):
            if curves.setdefault(curve.name, curve) is not curve:
                raise UsageError(f"Two curves are called {curve.name!r}. Give each a name of its own.")
    return list(curves.values())


def _curves_of(part: str) -> Sequence[Curve]:
    if "=" in part:
        return [curve_from(part)]
    if part.lower() == "all":
        return BUILT_IN
    if part.lower() not in BY_NAME:
        raise UsageError(unknown("curve", part, [*BY_NAME, *NO_CURVES]))
    return [BY_NAME[part.lower()]]
