"""Numbers of one step: from a capture to one number per metric and site, with fits of A, α and s alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from normscope.curves.known import Curve
from normscope.fits.card import MASSIVE_RATIO, MASSIVE_SIZE, centring_of
from normscope.fits.form import FitForm
from normscope.fits.jackknife import solved
from normscope.fits.nodes import FitBatch, batches
from normscope.fits.saturation import share_beyond, site_saturation
from normscope.fits.scale import scale_of
from normscope.fits.targets import site_target
from normscope.norms.sites import NormSite
from normscope.pairs.captures import Capture
from normscope.pairs.sums.magnitudes import of_pairs, of_tokens
from normscope.pairs.sums.stats import PairStats
from normscope.runtime.records import as_json
from normscope.tools.probe.timeline import CURVE_METRICS, NORM_METRICS, POINTWISE_METRICS, SITE_METRICS

FORM = FitForm()  # A, α and s are free, as normscope.fit has them
_LOW, _HIGH = 0.005, 0.995  # shares of the pairs below the percentiles of x

Numbers = dict[str, float | None]


def numbers_of(capture: Capture, sites: Sequence[NormSite], curves: Sequence[Curve]) -> dict[str, list[float | None]]:
    """Return one number per site for each metric of :mod:`normscope.tools.probe.timeline`.

    A and α are those of :func:`normscope.fit`, without its folds, intervals and ceiling. A number is None where it does
    not apply, is not finite, or is not identified: at a site without finite pairs all are. ``sites`` are all sites of
    the run, in order; the capture of one step may lack some of them.
    """
    site_numbers: dict[str, Numbers] = {site.name: {} for site in sites}
    targets = []
    for site in capture.sites:
        stats = capture.stats[site.name]
        moments = stats.moments.sum(0, keepdim=True)
        if moments[0, 0].any():
            site_numbers[site.name] |= _numbers_of_site(site, stats, moments[0])
            targets.append(site_target(site, stats, moments))
    for indices, problems in batches(targets):
        for curve in curves:
            for index, numbers in zip(indices, _numbers_of_curve(problems, curve), strict=True):
                site_numbers[targets[index].site] |= numbers
    names = [f"{name}/{curve.name}" for curve in curves for name in CURVE_METRICS] + list(SITE_METRICS)
    names += NORM_METRICS if any(site.pointwise is None for site in sites) else ()
    names += POINTWISE_METRICS if any(site.pointwise is not None for site in sites) else ()
    return {name: [as_json(numbers.get(name)) for numbers in site_numbers.values()] for name in names}


def _numbers_of_site(site: NormSite, stats: PairStats, moments: Tensor) -> Numbers:
    reach, x = stats.reach.double(), of_pairs(moments, signed=True)
    massive = max(MASSIVE_SIZE, MASSIVE_RATIO * of_pairs(moments).quantile(0.5))
    numbers: Numbers = {
        "low": x.quantile(_LOW),
        "high": x.quantile(_HIGH),
        "largest": float(reach.max()),
        "channel": int(reach.argmax()),
        "massive": int((reach > massive).sum()),
    }
    if (module := site_saturation(site, stats)) is not None:
        return numbers | {
            "module_alpha": module.alpha.p50,
            "module_slope": module.slope.p50 if module.slope else None,
            **{name: getattr(module, name) for name in ("beyond_1", "beyond_2", "beyond_3", "inverse_std")},
        }
    scale = scale_of(site, of_tokens(stats.token_scales))
    offset = centring_of(site, of_tokens(stats.token_offsets)).offset_p50 if site.form else None
    return numbers | {"sigma": scale.sigma_p50, "spread": scale.spread, "offset": offset}


def _numbers_of_curve(problems: FitBatch, curve: Curve) -> Iterator[Numbers]:
    """Yield the numbers at each site; NaN if the pairs do not identify one."""
    solutions, nodes = solved(problems, curve, FORM), problems.nodes()
    bends = solutions.converged & ~solutions.unbent
    has_slope = solutions.converged & (~solutions.unbent | curve.linear_at_origin)
    slope = solutions.amplitude * solutions.alpha * curve.derivative(solutions.shift)
    at_zero = solutions.amplitude * curve.function(solutions.shift)
    columns = {
        "r2": 1 - nodes.residual(solutions.predicted(curve, nodes.x)) / nodes.total,
        "amplitude": solutions.amplitude.where(bends, torch.nan),
        "alpha": solutions.alpha.where(bends, torch.nan),
        "shift": solutions.shift.where(bends, torch.nan),
        "slope": slope.where(has_slope, torch.nan),
        "at_zero": at_zero.where(has_slope, torch.nan),
    }
    for number, target in enumerate(problems.targets):
        numbers: Numbers = {f"{name}/{curve.name}": float(values[number]) for name, values in columns.items()}
        if bends[number]:
            solution = solutions.of(torch.tensor([number]))
            beyond = share_beyond((-1, 1), target.moments[0, :, None], solution.alpha, solution.shift)
            numbers[f"beyond/{curve.name}"] = beyond
        yield numbers
