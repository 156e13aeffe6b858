"""Make the coefficients of the kernels' functions: ``python scripts/kernel_coefficients.py``.

They stand in normscope/swaps/kernels/, in loops.py and cpu.py. Each is that of a polynomial, or of a
quotient of two, whose largest relative error, in the function that it is for, is the smallest: Lawson's algorithm,
least squares with weights that grow where the error is large (C. L. Lawson, 1961).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.polynomial import Chebyshev, Polynomial
from numpy.polynomial.chebyshev import chebvander
from numpy.typing import NDArray
from scipy.special import erf, erfc

Array = NDArray[np.float64]
TANH_UP_TO, TANH_COEFFICIENTS = 1.2, 8
ERF_UP_TO, ERF_COEFFICIENTS = 3.0, 3
EXPM1_UP_TO, EXPM1_COEFFICIENTS = np.log(2) / 2 * 1.01, 5  # and a little, for what rounding adds
QUOTIENT_UP_TO, QUOTIENT_DEGREE = 3.92, 5
ROUNDS = 500


def main() -> None:
    over, under = erf_quotient()
    polynomials = {
        "NEAR_TANH": tanh_coefficients(),
        "ERF_AS_TANH": erf_coefficients(),
        "EXPM1": expm1_coefficients(),
        "ERF_OVER": over,
        "ERF_UNDER": under,
    }
    for name, coefficients in polynomials.items():
        print(name, ", ".join(f"{coefficient:.9g}" for coefficient in np.float32(coefficients)))


def tanh_coefficients() -> Array:
    """Return c of tanh u ≈ u + u³·(c₀ + c₁u² + …)."""

    def target(square: Array) -> Array:
        u = np.sqrt(square)
        series = -1 / 3 + square * (2 / 15 - square * (17 / 315 - square * 62 / 2835))
        return np.where(square < 1e-3, series, (np.tanh(u) / u - 1) / square)  # which cancels near zero

    def weight(square: Array) -> Array:
        return square * np.sqrt(square) / np.tanh(np.sqrt(square))

    return minimax(target, weight, TANH_COEFFICIENTS, TANH_UP_TO**2)


def erf_coefficients() -> Array:
    """Return c of erf u ≈ tanh(u·(c₀ + c₁u² + …)): of artanh(erf u)/u, weighted by what tanh makes of its errors."""

    def target(square: Array) -> Array:
        u = np.sqrt(square)
        return np.log((1 + erf(u)) / erfc(u)) / (2 * u)

    def weight(square: Array) -> Array:
        u = np.sqrt(square)
        return u * erfc(u) * (1 + erf(u)) / erf(u)

    return minimax(target, weight, ERF_COEFFICIENTS, ERF_UP_TO**2)


def expm1_coefficients() -> Array:
    """Return c of e^r − 1 ≈ r + r²·(c₀ + c₁r + …)."""

    def target(r: Array) -> Array:
        series = 1 / 2 + r * (1 / 6 + r * (1 / 24 + r * (1 / 120 + r * (1 / 720 + r / 5040))))
        return np.where(np.abs(r) < 0.03, series, (np.expm1(r) - r) / np.where(r == 0, 1, r) ** 2)

    def weight(r: Array) -> Array:
        return np.abs(r) * np.where(r == 0, 1, r / np.expm1(np.where(r == 0, 1, r)))

    return minimax(target, weight, EXPM1_COEFFICIENTS, EXPM1_UP_TO, -EXPM1_UP_TO)


def erf_quotient() -> tuple[Array, Array]:
    """Return the coefficients of P and Q in erf u ≈ u·P(u²)/Q(u²), Q(0) = 1."""
    square, place = nodes(0.0, QUOTIENT_UP_TO**2)
    u = np.sqrt(square)
    expected, basis = erf(u) / u, chebvander(place, QUOTIENT_DEGREE)
    attention, below = np.ones_like(u), np.ones_like(u)
    for _ in range(ROUNDS):
        # P/(wanted·Q) − 1, with the Q of the round before under what is linear in both.
        factor = np.sqrt(attention) / (below * expected)
        both = np.hstack([basis, -expected[:, None] * basis[:, 1:]]) * factor[:, None]
        solution, *_ = np.linalg.lstsq(both, expected * factor)
        over, under = solution[: QUOTIENT_DEGREE + 1], np.append(1, solution[QUOTIENT_DEGREE + 1 :])
        below = basis @ under
        attention *= np.abs(basis @ over / (below * expected) - 1)
        attention /= attention.sum()
    powers = [Chebyshev(part, domain=[0, QUOTIENT_UP_TO**2]).convert(kind=Polynomial).coef for part in (over, under)]
    return powers[0] / powers[1][0], powers[1] / powers[1][0]


def nodes(begin: float, up_to: float) -> tuple[Array, Array]:
    """Return points that lie closer together towards the ends, and where they are between −1 and 1."""
    place = -np.cos(np.linspace(0, np.pi, 2001)[1:])
    return begin + (up_to - begin) * (1 + place) / 2, place


def minimax(
    target: Callable[[Array], Array],
    weight: Callable[[Array], Array],
    coefficients: int,
    up_to: float,
    begin: float = 0.0,
) -> Array:
    """Return the polynomial whose largest weighted error up to ``up_to`` is the smallest, lowest power first."""
    at, place = nodes(begin, up_to)
    expected, own = target(at), weight(at)
    basis = chebvander(place, coefficients - 1)
    attention = np.ones_like(at)
    for _ in range(ROUNDS):
        factor = np.sqrt(attention) * own
        solution, *_ = np.linalg.lstsq(basis * factor[:, None], expected * factor)
        attention *= np.abs(own * (basis @ solution - expected))
        attention /= attention.sum()
    return Chebyshev(solution, domain=[begin, up_to]).convert(kind=Polynomial).coef


if __name__ == "__main__":
    main()
