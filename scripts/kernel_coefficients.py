"""Make the coefficients of normscope/swaps/kernels/device_functions.py: ``python scripts/kernel_coefficients.py``.

Each is that of a polynomial whose largest relative error, in the function that it is for, is the smallest: Lawson's
algorithm, least squares with weights that grow where the error is large (C. L. Lawson, 1961).
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
ROUNDS = 500


def main() -> None:
    for name, coefficients in {"NEAR_TANH": tanh_coefficients(), "ERF_AS_TANH": erf_coefficients()}.items():
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


def minimax(
    target: Callable[[Array], Array], weight: Callable[[Array], Array], coefficients: int, up_to: float
) -> Array:
    """Return the polynomial whose largest weighted error from zero to ``up_to`` is the smallest, lowest power first."""
    at = up_to * (1 - np.cos(np.linspace(0, np.pi, 2001)[1:])) / 2
    wanted, own = target(at), weight(at)
    basis = chebvander(2 * at / up_to - 1, coefficients - 1)
    attention = np.ones_like(at)
    for _ in range(ROUNDS):
        factor = np.sqrt(attention) * own
        found, *_ = np.linalg.lstsq(basis * factor[:, None], wanted * factor)
        attention *= np.abs(own * (basis @ found - wanted))
        attention /= attention.sum()
    return Chebyshev(found, domain=[0, up_to]).convert(kind=Polynomial).coef


if __name__ == "__main__":
    main()
