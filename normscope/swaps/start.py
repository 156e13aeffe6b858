"""Start values of the curves that replace norms: A, α and s by fits, theory or the papers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normscope.curves.expressions import curves_named
from normscope.curves.known import BEST, BY_NAME, FREE, Curve
from normscope.errors import UsageError, count, unknown, warn
from normscope.fits.curve_fit import CurveFit
from normscope.fits.fit import fit as fit_curves
from normscope.norms.sites import Layers, NormSite, is_number, select
from normscope.pairs.captures import Capture
from normscope.swaps.inits import INITS

RMS_NORM = "rmsnorm"
_NORMS = ("layernorm", "layer_norm")


@dataclass(frozen=True)
class Start:
    """Replacement of one norm.

    Attributes:
        norm: the site.
        curve: f; None for an RMSNorm.
        amplitude: A in float64: one number ``()`` or one per channel ``(channels,)``.
        alpha: α, likewise.
        shift: s, likewise; None for a function without s.
    """

    norm: NormSite
    curve: Curve | None
    amplitude: Tensor
    alpha: Tensor
    shift: Tensor | None

    @property
    def func(self) -> str:
        """Name of the function."""
        return RMS_NORM if self.curve is None else self.curve.name


Fits = Capture | Sequence[CurveFit | NormSite]


def starts(curve: str | Curve, fits: Fits, init: str = "fit") -> list[Start]:
    """Return start values for each site of the fits, in their order.

    Args:
        curve: a curve or its name; ``free`` for E[y|x] itself, ``best`` for each site's best curve; ``rmsnorm``.
        fits: a capture, which :func:`fitted` fits; its fits, one per site or channel, of this and other curves; or norm
            sites alone if nothing is fitted (``paper``, ``rmsnorm``).
        init: ``fit``, ``theory``, ``paper`` or any other in :data:`INITS` that is not calibrated.

    Raises:
        UsageError: if there is no such curve or init, no fit of this curve, or nothing was fitted.
    """
    requested = asked_for(curve, init)
    function = requested if isinstance(requested, Curve) else None
    name = requested if isinstance(requested, str) else requested.name
    unit = torch.ones((), dtype=torch.float64)
    if name == RMS_NORM:
        return [Start(norm, None, unit, unit, None) for norm in norms_of(fits)]
    if constants := INITS[init].constants:
        values = [(norm, torch.tensor(constants(norm), dtype=torch.float64).unbind()) for norm in norms_of(fits)]
        shifted = function is not None and function.shifted
        return [Start(norm, function, a, alpha, s if shifted else None) for norm, (a, alpha, s) in values]
    if isinstance(fits, Capture):
        fits = fitted(fits, requested, init)
    elif INITS[init].theory:
        raise UsageError("Start values from theory are made of a capture, not of fits; pass the capture.")
    curve_fits = [fit for fit in fits if isinstance(fit, CurveFit)]
    chosen = [fit for fit in curve_fits if (fit.best if name == BEST else fit.curve == name)]
    if not chosen and function is not None:  # erf with a shift is fitted under the name derf
        chosen = [fit for fit in curve_fits if fit.function.function_name == function.function_name]
    if not chosen:
        raise UsageError(f"None of the fits is of {name}. Fit it first: normscope.fit(capture, {name!r}).")
    sites = dict.fromkeys(fit.site for fit in chosen)
    return [_fitted_start([fit for fit in chosen if fit.site == site], function) for site in sites]


def asked_for(curve: str | Curve, init: str = "fit") -> Curve | str:
    """Return a curve by its name; ``free``, ``best`` and ``rmsnorm`` as they are.

    Raises:
        UsageError: if there is no such curve or init, or they cannot be combined.

    >>> asked_for("DyISRU").name, asked_for("best")
    ('isru', 'best')
    """
    if init not in (names := [name for name, row in INITS.items() if not row.calibrated]):
        raise UsageError(unknown("initialization", init, names))
    name = curve.strip().lower() if isinstance(curve, str) else getattr(curve, "name", None)
    if name in _NORMS:
        raise UsageError(
            f"There is no swap for {name}: putting norms in place of point-wise functions is out of scope."
        )
    if name in (FREE, BEST) and not INITS[init].fits:
        raise UsageError(f"{name} is what was fitted: there is no {init} start of it.")
    if isinstance(name, str) and name.isidentifier() and isinstance(curve, str):
        takes = [*BY_NAME, FREE, BEST, RMS_NORM]
        if name not in (*takes, "all"):
            raise UsageError(unknown("replacement", curve, [*takes, "NAME=FORMULA"]))
    return name if name in (FREE, BEST, RMS_NORM) else _one_curve(curve)


def fitted(
    capture: Capture, curve: str | Curve, init: str = "fit", *, per: str = "site", shift: bool = True
) -> list[CurveFit]:
    """Fit a curve for a swap: with s, and weighted by γ² if the capture has those sums.

    Tokens of trained norms have nonzero means, for which a curve through the origin, without s, makes an error.

    Args:
        capture: with ``by_gamma``, for weights γ².
        curve: a curve or its name, ``free`` or ``best``.
        init: ``fit`` or ``theory``, which fits nothing.
        per: ``site`` or ``channel``, see :func:`normscope.fit`.
        shift: fit s, see :func:`normscope.fit`.
    """
    curve = curve if curve in (FREE, BEST) else _one_curve(curve)
    if INITS[init].theory:
        return fit_curves(capture, [curve], theory=True)
    by_gamma = per == "site" and all(stats.gamma_moments is not None for stats in capture.stats.values())
    return fit_curves(capture, [curve], per=per, shift=shift, weights_by="gamma" if by_gamma else "pairs")


def norms_of(fits: Fits, layers: Layers = "all") -> list[NormSite]:
    """Return the replaceable norm sites of fits, each once, in the order of the network; warn of others among all.

    UsageError if there is none, or if a fit pools several.
    """
    norms = [_norm_of(fit) for fit in (fits.sites if isinstance(fits, Capture) else fits)]
    if not norms:
        raise UsageError("There is no norm site to swap: pass a capture, fits of one, or norm sites.")
    sites = sorted({norm.name: norm for norm in norms}.values(), key=lambda norm: norm.index)
    chosen = replaceable(sites, layers)
    if layers == "all" and (left := why_not_replaced(sites)):
        warn(f"Not all norms are replaced: {left}.")
    return chosen


def replaceable(sites: Sequence[NormSite], layers: Layers = "all") -> list[NormSite]:
    """Return the norm modules among the chosen sites, see :func:`normscope.norms.sites.select`.

    A number of sites is a number of norm modules. UsageError if the chosen sites contain none.
    """
    modules = [site for site in sites if site.replaceable]
    numbered = isinstance(layers, int) or (isinstance(layers, str) and is_number(layers))
    chosen = select(modules if numbered and modules else sites, layers)
    norms = [site for site in chosen if site.replaceable]
    if chosen and not norms:
        raise UsageError(f"There is no norm to swap: {why_not_replaced(chosen)}.")
    return norms


def why_not_replaced(sites: Sequence[NormSite]) -> str:
    """Report the sites that a swap leaves, and the reasons; empty if it can replace all."""
    calls = sum(site.is_call for site in sites)
    functions = sum(site.pointwise is not None for site in sites)
    stay = [f"{count(calls, 'call')} of norm functions (a module cannot replace a call in the network's own code)"]
    stay += [f"{count(functions, 'point-wise function')} (replacing these is out of scope)"]
    left = [text for text, number in zip(stay, (calls, functions), strict=True) if number]
    left += [f"{s.name} (it is called with {s.called_with}, which changes its output)" for s in sites if s.called_with]
    return f"a swap leaves {' and '.join(left)}" if left else ""


def only(fits: Fits, norms: Sequence[NormSite]) -> Fits:
    """Return the fits of some norm sites."""
    names = [norm.name for norm in norms]
    return fits.only(names) if isinstance(fits, Capture) else [fit for fit in fits if _norm_of(fit).name in names]


def _one_curve(curve: str | Curve) -> Curve:
    curves = curves_named(curve if isinstance(curve, str) else [curve])
    if len(curves) != 1:
        raise UsageError(f"A swap puts one curve everywhere, or each site's best; {curve!r} names {len(curves)}.")
    return curves[0]


def _norm_of(fit: CurveFit | NormSite) -> NormSite:
    if isinstance(fit, NormSite):
        return fit
    if fit.norm is None:
        raise UsageError(f"The fit of {fit.site} pools several sites; a swap takes one fit a site, or one a channel.")
    return fit.norm


def _fitted_start(fits: Sequence[CurveFit], requested: Curve | None) -> Start:
    first, norm = fits[0], _norm_of(fits[0])
    if first.channel is None:
        if len(fits) > 1:
            raise UsageError(f"There are {len(fits)} fits of {first.curve} at {first.site}; a swap takes one.")
        if first.degenerate:
            raise UsageError(f"Nothing could be fitted at {first.site} ({first.nothing}); exclude it with layers.")
        amplitude, alpha, shift = (_numbers([first], name)[0] for name in ("amplitude", "alpha", "shift"))
    else:
        ordered = sorted(fits, key=lambda fit: fit.channel or 0)
        if [fit.channel for fit in ordered] != list(range(norm.channels)):
            raise UsageError(f"The fits of {first.site} are not one for each of its {norm.channels} channels.")
        # A channel that is constant in these data has no slope, only its offset.
        idle = torch.tensor([fit.degenerate for fit in ordered])
        amplitude = _numbers(ordered, "amplitude").masked_fill(idle, 0.0)
        alpha = _numbers(ordered, "alpha").masked_fill(idle, 1.0)
        shift = _numbers(ordered, "shift").masked_fill(idle, 0.0)
    curve = requested if requested is not None and requested.shifted else first.function
    return Start(norm, curve, amplitude, alpha, shift if curve.shifted or bool((shift != 0).any()) else None)


def _numbers(fits: Sequence[CurveFit], name: str) -> Tensor:
    return torch.tensor([getattr(fit, name) for fit in fits], dtype=torch.float64)
