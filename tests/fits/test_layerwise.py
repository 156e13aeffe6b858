"""One curve for all sites against the best at each, on numbers of fits."""

from dataclasses import replace

import pytest

from normscope.curves.known import CURVES
from normscope.fits.curve_fit import CurveFit
from normscope.fits.layerwise import layerwise


def made(site, alpha=1.0, amplitude=1.0, curve="tanh", **changed):
    found = CurveFit(
        model="net", weights="made", data="noise", site=site, curve=curve, amplitude=amplitude, alpha=alpha, shift=0.0,
        r2=0.9, r2_ceiling=0.95, folds="source", rmse=0.1, n_pairs=100, straight=False, converged=True,
        function=CURVES.get(curve, CURVES["linear"]),
    )  # fmt: skip
    return replace(found, **changed)


def test_one_curve_everywhere_is_compared_with_the_best_at_each_site():
    r2 = {"tanh": (0.9, 0.7), "isru": (0.8, 0.9), "softsign": (0.5, 0.95)}
    fits = [made(site, curve=curve, r2=r2[curve][n], parameters=3) for n, site in enumerate("ab") for curve in r2]
    fits += [made(site, curve="linear", r2=0.99, parameters=2) for site in "ab"] + [made("a", curve="free", r2=1.0)]
    best = layerwise(fits)
    assert (best.func, best.sites, best.curves, best.parameters) == ("isru", 2, 3, 3)
    assert (best.r2, best.r2_best) == (pytest.approx(0.85), pytest.approx(0.925))
    # A curve that some sites lack, as with ``best``, counts for the best at each alone.
    best = layerwise([fit for fit in fits if (fit.site, fit.curve) not in (("a", "isru"), ("a", "softsign"))])
    assert (best.func, best.r2, best.r2_best) == ("tanh", pytest.approx(0.8), pytest.approx(0.925))
    assert layerwise([fits[0], fits[4]]) is None  # no curve was fitted everywhere
    assert layerwise([fit for fit in fits if fit.curve in ("tanh", "linear", "free")]) is None
