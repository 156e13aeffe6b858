"""Make the coefficients of the kernels' functions: ``python scripts/kernel_coefficients.py``.

They stand in normscope/swaps/kernels/, in loops.py and cpu.py. Each is that of a polynomial, or of a quotient of two,
whose largest relative error, in the function that it is for, is the smallest: Lawson's algorithm, least squares with
weights that grow where the error is large (C. L. Lawson, 1961).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.polynomial import Chebyshev, Polynomial
from numpy.polynomial.chebyshev import chebvander
from numpy.typing import NDArray
from scipy.special import erf

Array = NDArray[np.float64]
# Largest squares and largest |r| of the approximations; e^r − 1 gets a little more, for what rounding adds.
NEAR, EXPM1_UP_TO, QUOTIENT_UP_TO = 1.2**2, np.log(2) / 2 * 1.01, 3.92**2
QUOTIENT_DEGREE = 5
ROUNDS = 500


def main() -> None:
    over, under = erf_quotient()
    polynomials = {
        "NEAR_TANH": minimax(tanh_remainder, 8, 0, NEAR),
        "EXPM1": minimax(expm1_remainder, 5, -EXPM1_UP_TO, EXPM1_UP_TO),
        "ERF_OVER": over,
        "ERF_UNDER": under,
    }
    for name, coefficients in polynomials.items():
        print(name, ", ".join(f"{coefficient:.9g}" for coefficient in np.float32(coefficients)))


def tanh_remainder(square: Array) -> tuple[Array, Array]:
    """Return p of tanh u = u + u³·p(u²), and the weight of its error in tanh u."""
    u = np.sqrt(square)
    return (np.tanh(u) / u - 1) / square, square * u / np.tanh(u)


def expm1_remainder(r: Array) -> tuple[Array, Array]:
    """Return p of e^r − 1 = r + r²·p(r), and the weight of its error in e^r − 1."""
    return (np.expm1(r) - r) / r**2, r**2 / np.abs(np.expm1(r))


def nodes(begin: float, end: float) -> tuple[Array, Array]:
    """Return points that lie closer together towards the ends, and their positions between −1 and 1."""
    position = -np.cos(np.linspace(0, np.pi, 2002)[1:])
    return begin + (end - begin) * (1 + position) / 2, position


def minimax(target: Callable[[Array], tuple[Array, Array]], terms: int, begin: float, end: float) -> Array:
    """Return the polynomial whose largest weighted error is the smallest, lowest power first."""
    points, position = nodes(begin, end)
    expected, weight = target(points)
    basis, attention = chebvander(position, terms - 1), np.ones_like(points)
    for _ in range(ROUNDS):
        factor = np.sqrt(attention) * weight
        solution, *_ = np.linalg.lstsq(basis * factor[:, None], expected * factor)
        attention *= np.abs(weight * (basis @ solution - expected))
        attention /= attention.sum()
    return powers(solution, begin, end)


def erf_quotient() -> tuple[Array, Array]:
    """Return the coefficients of P and Q in erf u ≈ u·P(u²)/Q(u²), Q(0) = 1."""
    square, position = nodes(0.0, QUOTIENT_UP_TO)
    u = np.sqrt(square)
    expected, basis = erf(u) / u, chebvander(position, QUOTIENT_DEGREE)
    attention, below = np.ones_like(u), np.ones_like(u)
    for _ in range(ROUNDS):
        # P/(expected·Q) − 1, with the Q of the round before under what is linear in both.
        factor = np.sqrt(attention) / (below * expected)
        both = np.hstack([basis, -expected[:, None] * basis[:, 1:]]) * factor[:, None]
        solution, *_ = np.linalg.lstsq(both, expected * factor)
        over, under = solution[: QUOTIENT_DEGREE + 1], np.append(1, solution[QUOTIENT_DEGREE + 1 :])
        below = basis @ under
        attention *= np.abs(basis @ over / (below * expected) - 1)
        attention /= attention.sum()
    top, bottom = (powers(part, 0.0, QUOTIENT_UP_TO) for part in (over, under))
    return top / bottom[0], bottom / bottom[0]


def powers(coefficients: Array, begin: float, end: float) -> Array:
    return Chebyshev(coefficients, domain=[begin, end]).convert(kind=Polynomial).coef


if __name__ == "__main__":
    main()
