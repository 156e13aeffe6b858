"""Curves as users write them: by name, or as a formula such as ``mine=x/(1+abs(x)**3)**(1/3)``.

Python's parser reads a formula, and nothing evaluates it: one walk over its tree allows the nodes listed below alone.
The resulting function calls torch only.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from normscope.curves.known import BUILT_IN, BY_NAME, NO_CURVES, Curve, curve_of
from normscope.errors import UsageError, count, unknown

Term = Callable[[Tensor], Tensor]

_LONGEST = 500  # characters
_DEEPEST = 50  # levels of brackets and operators
_SIGNS = re.compile(r"[^A-Za-z0-9_ .,+\-*/()]")
_VARIABLE = ("x", "u")
_CONSTANTS = {"pi": math.pi, "e": math.e}
_OPERATORS: dict[type[ast.AST], Callable[..., Tensor]] = {
    ast.Add: torch.add,
    ast.Sub: torch.sub,
    ast.Mult: torch.mul,
    ast.Div: torch.true_divide,
    ast.Pow: torch.pow,
    ast.UAdd: torch.clone,
    ast.USub: torch.neg,
}


_ELEMENTWISE = "abs sign sqrt exp expm1 log log1p sin cos tan sinh cosh tanh asinh atan arctan erf sigmoid"
_FUNCTIONS: dict[str, tuple[Callable[..., Tensor], int]] = {  # and their numbers of arguments
    **{name: (getattr(torch, name), 1) for name in _ELEMENTWISE.split()},
    "cbrt": (lambda x: torch.sign(x) * x.abs().pow(1 / 3), 1),
    "min": (torch.minimum, 2),
    "max": (torch.maximum, 2),
    "minimum": (torch.minimum, 2),
    "maximum": (torch.maximum, 2),
    "clip": (lambda x, low, high: torch.minimum(torch.maximum(x, low), high), 3),
}
_ALLOWED = f"A formula is made of x, numbers, pi, e, + - * / **, brackets and the functions {', '.join(_FUNCTIONS)}."


def split_names(names: str) -> list[str]:
    """Split at the commas that lie outside parentheses.

    >>> split_names("tanh, mine=clip(x, -1, 2), free")
    ['tanh', 'mine=clip(x, -1, 2)', 'free']
    """
    entries, depth = [""], 0
    for sign in names:
        depth = max(depth + (sign == "(") - (sign == ")"), 0)
        if sign == "," and not depth:
            entries.append("")
        else:
            entries[-1] += sign
    return [entry.strip() for entry in entries]


def curves_named(names: str | Sequence[str | Curve]) -> list[Curve]:
    """Look curves up, each once, by names separated by commas or in a list.

    Args:
        names: names or aliases of built-in curves, in any case; ``all`` of them, derf as erf; formulas
            (:func:`curve_from`); and, in a list, curves themselves.

    Raises:
        UsageError: if there is no such curve, if a formula is not understood, or if two curves share a name.

    >>> [curve.name for curve in curves_named("dyt,isru,tanh")]
    ['tanh', 'isru']
    >>> [curve.name for curve in curves_named(["Derf", "mine=x/(1+abs(x)**3)**(1/3)"])]
    ['derf', 'mine']
    """
    entries = split_names(names) if isinstance(names, str) else names
    curves: dict[str, Curve] = {}
    for entry in dict.fromkeys(entries):
        for curve in [entry] if isinstance(entry, Curve) else _curves_of(entry):
            if curves.setdefault(curve.name, curve) is not curve:
                raise UsageError(f"Two curves are called {curve.name!r}. Give each a name of its own.")
    return list(curves.values())


def _curves_of(entry: str) -> Sequence[Curve]:
    if not isinstance(entry, str):
        raise UsageError(f"{entry!r:.60} is no curve. Pass a name, a formula such as 'mine=x/(1+abs(x))', or a Curve.")
    entry = entry.strip()
    if "=" in entry:
        return [curve_from(entry)]
    if entry.lower() == "all":
        return BUILT_IN
    if set("()+*/") & set(entry):
        error = ""
        try:
            curve_from(f"mine={entry}")
        except UsageError as misunderstood:
            error = f" {misunderstood}"
        raise UsageError(f"A formula needs a name, such as 'mine={entry}'.{error}")
    if entry.lower() not in BY_NAME:
        raise UsageError(unknown("curve", entry, [*BY_NAME, *NO_CURVES, "NAME=FORMULA"]))
    return [BY_NAME[entry.lower()]]


def curve_from(text: str) -> Curve:
    """Make a curve of ``NAME=FORMULA``, a formula in x (or u).

    Raises:
        UsageError: if the formula is not understood, or is no curve (:func:`normscope.curves.known.curve_of`).

    >>> curve_from("mine=x/(1+abs(x)**3)**(1/3)").function(torch.tensor([-1.0, 0.0, 1e3]))
    tensor([-0.7937,  0.0000,  1.0000])
    >>> curve_from("mine=tanh(x/3)").formula
    'tanh(u/3)'
    """
    if len(text) > _LONGEST:
        raise UsageError(f"A formula has at most {_LONGEST} characters; this one has {len(text):,}.")
    name, equals, formula = (side.strip() for side in text.partition("="))
    if not equals or not formula:
        raise UsageError(f"{text!r} is no curve of your own: write NAME=FORMULA, such as mine=x/(1+abs(x)).")
    return curve_of(_Reader(formula).read(), name, re.sub(r"\bx\b", "u", formula))


class _Reader:
    """Turns a formula into a function, node by node."""

    def __init__(self, formula: str) -> None:
        self.formula = formula

    def read(self) -> Term:
        if strange := _SIGNS.search(self.formula):
            power = "; a power is written **" if strange[0] == "^" else ""
            self.refuse(f"the sign {strange[0]!r} means nothing here{power}", strange.start())
        try:
            tree = ast.parse(self.formula, mode="eval").body
        except SyntaxError as error:
            self.refuse(f"it cannot be read ({error.msg})", max((error.offset or 1) - 1, 0))
        except (ValueError, MemoryError, RecursionError):
            self.refuse("it is too deeply nested", 0)
        term = self.term(tree, 1)
        if not any(isinstance(node, ast.Name) and node.id in _VARIABLE for node in ast.walk(tree)):
            raise UsageError(f"The formula {self.formula!r} does not depend on x; a constant cannot be fitted.")
        at = term(torch.tensor([-2.5, -0.3, 2.5, 0.3], dtype=torch.float64))
        if at[:2].isnan().all() and at[2:].isfinite().all():  # the most likely mistake, such as x**(1/3)
            raise UsageError(
                f"The formula {self.formula!r} is no number for negative x. Roots, logarithms and broken powers have "
                "none there: take them of abs(x), and give the result its sign, as in sign(x)*abs(x)**(1/3)."
            )
        return term

    def term(self, node: ast.expr, depth: int) -> Term:
        """Turn one node of the tree into a function of x."""
        if depth > _DEEPEST:
            self.refuse(f"it is nested more than {_DEEPEST} levels deep", node.col_offset)
        match node:
            case ast.Name(id=name) if name in _VARIABLE:
                return lambda x: x
            case ast.Name(id=name) if name in _CONSTANTS:
                return self.constant(_CONSTANTS[name], node)
            case ast.Name(id=name) if name in _FUNCTIONS:
                self.refuse(f"the function {name} has no brackets after it", node.col_offset)
            case ast.Name(id=name):
                self.refuse(f"there is no {name!r}", node.col_offset)
            case ast.Constant(value=value):
                return self.constant(value, node)
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
                function, arguments = _OPERATORS[type(operator)], [left, right]
            case ast.UnaryOp(op=operator, operand=operand) if type(operator) in _OPERATORS:
                function, arguments = _OPERATORS[type(operator)], [operand]
            case ast.Call(func=ast.Name(id=name), args=arguments) if name in _FUNCTIONS:
                function, number = _FUNCTIONS[name]
                if node.keywords or len(arguments) != number:
                    self.refuse(f"{name} takes {count(number, 'argument')}, not {len(arguments)}", node.col_offset)
            case ast.Call(func=called):
                self.refuse(f"{self.written(called)} is no function", node.col_offset)
            case _:
                self.refuse(f"{self.written(node)} means nothing here", node.col_offset)
        terms = [self.term(argument, depth + 1) for argument in arguments]
        return lambda x: function(*(term(x) for term in terms))

    def constant(self, value: object, node: ast.expr) -> Term:
        if type(value) not in (int, float):
            self.refuse(f"{self.written(node)} is no real number", node.col_offset)
        number = float(str(value))  # infinite for an integer beyond float64
        if not math.isfinite(number):
            self.refuse("this number is too large for float64", node.col_offset)
        # A tensor, as Python's own numbers raise errors at 1/0 and overflow.
        fixed = torch.tensor(number, dtype=torch.float64)
        return lambda x: fixed

    def written(self, node: ast.expr) -> str:
        return repr(self.formula[node.col_offset : node.end_col_offset])

    def refuse(self, why: str, column: int) -> NoReturn:
        raise UsageError(f"The formula {self.formula!r} is not understood at column {column + 1}: {why}. {_ALLOWED}")
