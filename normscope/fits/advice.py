"""Start values for training without norms, one curve for all sites, and the slopes of tokens."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from normscope.curves.known import FREE
from normscope.fits.curve_fit import CurveFit, SiteRecord, about_site
from normscope.fits.targets import as_capture
from normscope.norms.sites import NormSite, kind_of_site
from normscope.pairs.captures import Capture
from normscope.pairs.sums.magnitudes import of_tokens
from normscope.runtime.records import Record, Records, Tabled, as_json

Feeds = Literal["attention", "other"]
LANGUAGE, OWN = "language", "your own"
SOURCE = "arXiv 2503.10622"
NOTE_ON_START = (
    "A norm-free layer is γ·f(αx + s) + β, with one α a layer. Start α (and s) here and its weight γ at A: a fit "
    "explains a norm's output before γ and β. The x are those of the trained network; one that starts with others "
    "needs another α, in inverse proportion."
)
NOTE_ON_PUBLISHED = f"The published α₀ are DyT's, with γ starting at 1 ({SOURCE}, section 7)."
NOTE = f"{NOTE_ON_START} {NOTE_ON_PUBLISHED}"
SHARES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)  # of the quantiles of slopes
_ELSEWHERE = 0.5  # the default of section 7, outside language models
# Section 7, tables of α₀ of LLaMA: norms in attention blocks, and all others, by the width of the network.
BY_WIDTH: dict[int, tuple[float, float]] = {
    1024: (1.0, 1.0),
    2048: (1.0, 0.5),
    4096: (0.8, 0.2),
    5120: (0.6, 0.15),
    8192: (0.2, 0.05),
}
# Last parts of module paths that identify what a pre-norm feeds, in transformers and in the code it was ported from.
_ATTENTION = re.compile(
    r"(input_layernorm|ln_?1|norm_?1|ln_attn|(attention|attn)_norm|pre_?(attention|attn)_?(layer)?norm)"
)
_OTHER = re.compile(
    r"(post_attention_layernorm|ln_?2|norm_?2|ln_mlp|(ffn|mlp|feed_?forward)_norm"
    r"|pre_?(mlp|ffn|feed_?forward)_?(layer)?norm)"
)


@dataclass(frozen=True)
class StartingValue:
    """A number to start from: the median, the smallest and the largest over the sites of one kind."""

    value: float
    least: float
    most: float


@dataclass(frozen=True)
class Published:
    """Published α₀ of DyT, and the networks that it is for, in words."""

    alpha: float
    of: str


@dataclass(frozen=True, repr=False)
class Advice(Tabled):
    """Start values of the point-wise functions at one kind of site.

    Attributes:
        model: the fitted network.
        kind: module paths that differ in numbers alone, with ``*`` for those.
        curve: name of f.
        sites: number of sites whose pairs bend; all values are over these.
        straight, not_converged, nothing: numbers of sites left out: pairs that do not bend, no α found, nothing to fit.
        alpha, shift, amplitude: α in units of 1/x, s, and A to start γ at; None if every site is left out.
        feeds: ``attention`` or ``other``, the layers after these norms; None if unknown.
        published: the published value for such a norm; None without one.
    """

    model: str
    kind: str
    curve: str
    sites: int
    straight: int
    not_converged: int
    nothing: int
    alpha: StartingValue | None
    shift: StartingValue | None
    amplitude: StartingValue | None
    feeds: Feeds | None
    published: Published | None

    @property
    def C(self) -> float | None:  # noqa: N802 - the paper's own sign
        """DyISRU's constant, 1/α² of the α to start from (arXiv 2503.21708); None for other curves."""
        return self.alpha.value**-2 if self.alpha and self.curve == "isru" else None

    @property
    def left_out(self) -> int:
        """Number of sites of the kind without a start value."""
        return self.straight + self.not_converged + self.nothing

    def as_dict(self) -> dict[str, Any]:
        """Return a row of JSON."""
        names = ("model", "kind", "curve", "alpha", "shift", "amplitude", "C", "sites")
        return {name: as_json(getattr(self, name)) for name in names} | {
            "left_out": {"straight": self.straight, "not_converged": self.not_converged, "nothing": self.nothing},
            "feeds": self.feeds or "unknown",
            "published_alpha": self.published.alpha if self.published else None,
            "published_of": self.published.of if self.published else None,
        }


def advise(fits: Sequence[CurveFit], sites: Sequence[NormSite] = (), *, family: str | None = None) -> Records[Advice]:
    """Derive start values for each kind of site from the fits to a trained network.

    The start is the median over the sites of a kind that bend, for α on the log scale. A mean, or a fit to all pairs
    together, would follow single sites with a few huge activations, whose α is far below their neighbours'.

    Args:
        fits: of one network, site by site; fits of channels, of ``free`` and of point-wise functions are left out. A
            layer without s, such as DyT, starts at fits with ``shift=False``.
        sites: its norm sites, for width and placement, which published values for language models need.
        family: as ``normscope models`` lists it. For ``language`` models the published α₀ depends on the width; for
            None and ``your own`` there is none.

    Returns:
        One record per kind, in the order of the network, and curve.

    >>> import normscope
    >>> network = normscope.load("demo_vit", limit=8)
    >>> seen = normscope.capture(network.module, network.inputs, about=network.about)
    >>> [(row.kind, row.sites) for row in advise(normscope.fit(seen, "tanh", shift=False), seen.sites, family="vision")]
    [('blocks.*.norm1', 8), ('blocks.*.norm2', 8), ('norm', 1)]
    """
    by_name = {site.name: site for site in sites}
    groups: dict[tuple[str, str, str], list[CurveFit]] = {}
    for fit in fits:
        if fit.channel is None and fit.curve != FREE and (fit.norm is None or fit.norm.pointwise is None):
            groups.setdefault((fit.model, kind_of_site(fit.site), fit.curve), []).append(fit)
    return Records(
        _advice(kind, group, [by_name[fit.site] for fit in group if fit.site in by_name], family)
        for (_, kind, _), group in groups.items()
    )


def _advice(kind: str, fits: Sequence[CurveFit], sites: Sequence[NormSite], family: str | None) -> Advice:
    bent = [fit for fit in fits if fit.identified]
    feeds = feeds_of(kind, {site.placement for site in sites})
    return Advice(
        model=fits[0].model,
        kind=kind,
        curve=fits[0].curve,
        sites=len(bent),
        straight=sum(fit.doubt not in (None, "not converged") for fit in fits),
        not_converged=sum(fit.doubt == "not converged" for fit in fits),
        nothing=sum(fit.degenerate for fit in fits),
        alpha=_median([fit.alpha for fit in bent], logarithmic=True),
        shift=_median([fit.shift for fit in bent]),
        amplitude=_median([fit.amplitude for fit in bent]),
        feeds=feeds,
        published=published(family, {site.d for site in sites}, feeds) if fits[0].curve == "tanh" else None,
    )


def _median(numbers: Sequence[float], *, logarithmic: bool = False) -> StartingValue | None:
    if not numbers:
        return None
    middle = math.exp(statistics.median(map(math.log, numbers))) if logarithmic else statistics.median(numbers)
    return StartingValue(middle, min(numbers), max(numbers))


def feeds_of(kind: str, placements: set[str | None]) -> Feeds | None:
    """Layers after a kind of site: by the last part of its name for a pre-norm; other for a ``final`` norm.

    A name counts only if it means the same in all libraries: ``self_attn_layer_norm`` may come before or after the
    attention.

    >>> feeds_of("model.layers.*.input_layernorm", {"pre-norm"})
    'attention'
    >>> feeds_of("model.layers.*.post_attention_layernorm", {"pre-norm"})
    'other'
    """
    if placements == {"final"}:
        return "other"
    if placements != {"pre-norm"}:
        return None
    name = kind.rpartition(".")[2]
    return "attention" if _ATTENTION.fullmatch(name) else "other" if _OTHER.fullmatch(name) else None


def published(family: str | None, widths: set[int], feeds: Feeds | None) -> Published | None:
    """α₀ of DyT in arXiv 2503.10622, for the nearest published width on a log scale.

    >>> published("language", {4096}, "attention")
    Published(alpha=0.8, of='LLaMA of width 4096, attention')
    >>> published("vision", {768}, "attention")
    Published(alpha=0.5, of='all but language models')
    """
    if family in (None, OWN):
        return None
    if family != LANGUAGE:
        return Published(_ELSEWHERE, "all but language models")
    if feeds is None or len(widths) != 1:
        return None
    (width,) = widths
    nearest = min(BY_WIDTH, key=lambda tabulated: abs(math.log(tabulated / width)))
    attention, other = BY_WIDTH[nearest]
    which = "" if nearest == width else f", the nearest to {width}"
    return Published(attention if feeds == "attention" else other, f"LLaMA of width {nearest}{which}, {feeds}")


@dataclass(frozen=True)
class Layerwise(Record):
    """One curve for all sites against the best at each, as in arXiv 2605.14047 (70.2 and 91.6 % for a ViT).

    Attributes:
        func: the best curve for all sites.
        r2: its mean R² over sites, with A, α and s of each site.
        r2_best: mean R² if each site takes its own best curve.
        sites: number of sites.
        curves: number of curves that were compared.
        parameters: number of free parameters of each.
    """

    func: str
    r2: float
    r2_best: float
    sites: int
    curves: int
    parameters: int | None


def layerwise(fits: Sequence[CurveFit]) -> Layerwise | None:
    """Compare one curve for all sites with the best at each; None with fewer than two curves to compare.

    Args:
        fits: of several curves at several sites. Only curves with the most common number of free parameters are
            compared. A curve that some sites lack, as with ``best``, counts for the best at each alone.

    >>> import normscope, torch
    >>> model = torch.nn.Sequential(torch.nn.LayerNorm(8))
    >>> seen = normscope.capture(model, [torch.randn(64, 8, generator=torch.Generator().manual_seed(0))])
    >>> layerwise(normscope.fit(seen, "tanh,isru,linear")).curves
    2
    """
    scored = [fit for fit in fits if fit.curve != FREE and math.isfinite(fit.r2)]
    curves: dict[int | None, set[str]] = {}
    for fit in scored:
        curves.setdefault(fit.parameters, set()).add(fit.curve)
    if max(map(len, curves.values()), default=0) < 2:
        return None
    parameters = max(curves, key=lambda number: (len(curves[number]), number or 0))
    by_site: dict[tuple[str, int | None], dict[str, float]] = {}
    for fit in scored:
        r2_of = by_site.setdefault((fit.site, fit.channel), {})
        if fit.parameters == parameters:
            r2_of[fit.curve] = fit.r2
    sites = list(by_site.values())
    everywhere = [curve for curve in sites[0] if all(curve in r2_of for r2_of in sites)]
    if not everywhere:
        return None
    means = {curve: sum(r2_of[curve] for r2_of in sites) / len(sites) for curve in everywhere}
    func = max(means, key=lambda curve: means[curve])
    best = sum(max(r2_of.values()) for r2_of in sites) / len(sites)
    return Layerwise(func, means[func], best, len(sites), len(curves[parameters]), parameters)


@dataclass(frozen=True, repr=False)
class TokenSlopes(SiteRecord):
    """The slopes of all tokens' lines y = (x − μ)/σ at one norm site.

    Attributes:
        n_tokens: number of tokens.
        slopes: quantiles of 1/σ over all tokens, in units of 1/x, by their shares; right to 9 %, as tokens are counted
            in eight bins an octave.
        ratio: the 95th percentile of the slopes over the 5th: 1 if one line fits all tokens.
        drawn: number of drawn tokens that were compared with their own lines.
        largest_error: largest |y − (x − μ)/σ| among their elements, which is rounding.
    """

    n_tokens: int
    slopes: Mapping[float, float]
    ratio: float
    drawn: int
    largest_error: float

    def as_dict(self) -> dict[str, Any]:
        """Return the columns of ``normscope fit --per token --json``; a number that is not finite is None."""
        row = {name: getattr(self, name) for name in ("model", "weights", "data", "site", "n_tokens", "drawn")}
        row |= {f"slope_{100 * share:g}": slope for share, slope in self.slopes.items()}
        row |= {"ratio": self.ratio, "largest_error": self.largest_error}
        return as_json(row)  # type: ignore[no-any-return]


def token_slopes(capture: Capture) -> Records[TokenSlopes]:
    """Distributions of the slopes of the tokens' lines, site by site.

    A fit per token needs no search: a norm is linear on each token, and R² is 1. Point-wise functions are left out.

    >>> import normscope, torch
    >>> model = torch.nn.Sequential(torch.nn.LayerNorm(8))
    >>> seen = normscope.capture(model, [torch.randn(64, 8, generator=torch.Generator().manual_seed(0))])
    >>> token_slopes(seen)[0].n_tokens
    64
    """
    capture = as_capture(capture, "token_slopes")
    return Records(_slopes(capture, site.name) for site in capture.sites if site.pointwise is None)


def _slopes(capture: Capture, site: str) -> TokenSlopes:
    stats = capture.stats[site]
    scales = of_tokens(stats.token_scales)
    slopes = {share: 1 / scales.quantile(1 - share) if scales.count else math.nan for share in SHARES}
    x, y, rstd = stats.tokens.x.double(), stats.tokens.y.double(), stats.tokens.rstd.double()
    line = y.mean(-1, keepdim=True) + (x - x.mean(-1, keepdim=True)) * rstd[:, None]
    return TokenSlopes(
        **about_site(capture, site),
        n_tokens=stats.n_tokens,
        slopes=slopes,
        ratio=slopes[0.95] / slopes[0.05],
        drawn=len(stats.tokens.key),
        largest_error=float((y - line).abs().max()) if len(y) else math.nan,
    )
