"""The page's data as JSON: captures with their sites, curves, swaps and colours."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from normscope.curves.known import CURVES, FREE, Curve
from normscope.errors import UsageError
from normscope.fits.card import norm_cards
from normscope.fits.comparison import match
from normscope.fits.curve_fit import CurveFit
from normscope.fits.nodes import Nodes, batches
from normscope.fits.targets import fit_targets
from normscope.inputs.loaded_model import Provenance
from normscope.norms.sites import short_names
from normscope.page.input_data import inputs_data, site_inputs
from normscope.page.packing import packed
from normscope.page.site_data import LINE_POINTS, ROWS, site_data
from normscope.pairs.captures import Capture
from normscope.show.figures.sheet import heading
from normscope.show.figures.style import STYLES, Style
from normscope.show.tables.glossary import definitions
from normscope.tools.probe.figure import plot_scurves_by_step, plot_timeline
from normscope.tools.probe.table import timeline_tables
from normscope.tools.probe.timeline import Timeline

FORMAT = 2
_ELEMENTS = 2_400_000  # of tokens that are shown, over all sites of all captures: two bytes each
_MOST_ELEMENTS, _LEAST_ELEMENTS = 32_000, 4_000  # of one site
_DOTS = 160  # an inch, of a timeline's figures
_SAMPLED_UP_TO = 1e6  # |u| of a user's function, which may overflow there, but not below 1e3
_SAMPLES = 4001  # odd: one of them is zero
_RANDOM = Provenance.random(0).description.removesuffix("0")
_ABOUT = ("model", "part", "weights", "data", "dtype", "sample")


def document(
    seen: Sequence[Capture],
    fits: Sequence[Sequence[CurveFit]],
    swaps: Mapping[str, Any],
    timeline: Timeline | None = None,
    checks: Sequence[Sequence[Mapping[str, Any]]] = (),
) -> dict[str, Any]:
    """Return the page's data; below ``drawn``, that of each site's figures, which are read when it is opened."""
    if not seen:
        raise UsageError("There is no capture to report on.")
    if len(seen) != len(fits):
        raise UsageError(f"There are {len(seen)} captures and {len(fits)} lists of fits; give one for each.")
    checks = checks or [[]] * len(seen)
    if len(checks) != len(seen):
        raise UsageError(f"There are {len(seen)} captures and {len(checks)} checks; give one for each, or None.")
    elements = _ELEMENTS // max(sum(len(capture.sites) for capture in seen), 1)
    elements = min(max(elements, _LEAST_ELEMENTS), _MOST_ELEMENTS)
    captures = [
        capture_data(capture, capture_fits, elements) | {"check": list(answers)}
        for capture, capture_fits, answers in zip(seen, fits, checks, strict=True)
    ]
    sites = {
        f"drawn-{number}-{site_number}": site
        for number, capture in enumerate(captures)
        for site_number, site in enumerate(capture["sites"])
    }
    names = list(dict.fromkeys(fit.curve for capture_fits in fits for fit in capture_fits))
    user_curves = {fit.curve: fit.function for capture_fits in fits for fit in capture_fits if fit.curve not in CURVES}
    return {
        "format": FORMAT,
        "title": " · ".join(dict.fromkeys(heading(capture.about) for capture in seen)),
        "captures": captures,
        "drawn": {name: site.pop("drawn") for name, site in sites.items()},
        "line_points": LINE_POINTS,
        "density_rows": ROWS,
        "terms": {
            "sites": definitions("report") | definitions("fit"),
            "swaps": definitions("swap-bench"),
            "training": definitions("timeline"),
        },
        "matches": [match(seen[0].sites, capture.sites).counterparts for capture in seen],
        "curves": {curve.name: curve_data(curve) for curve in [*CURVES.values(), *user_curves.values()]},
        "swaps": dict(swaps),
        "training": training_data(timeline) if timeline else None,
        "styles": {name: style_data(style, names) for name, style in STYLES.items()},
    }


def capture_data(capture: Capture, fits: Sequence[CurveFit], elements: int) -> dict[str, Any]:
    """Return the data of one capture, with its sites in the order of their calls."""
    names = {site.name for site in capture.sites}
    site_fits = [fit for fit in fits if fit.channel is None and fit.site in names]
    weights_by, *more = sorted({fit.weights_by for fit in site_fits}) or ["pairs"]
    if more:
        raise UsageError(f"The fits weight pairs by {' and by '.join([weights_by, *more])}; report on one of them.")
    nodes = nodes_of_sites(capture, weights_by)
    short, sites = short_names(site.name for site in capture.sites), []
    for site, card in zip(capture.sites, norm_cards(capture), strict=True):
        fits_here = [fit for fit in site_fits if fit.site == site.name]
        data = site_data(site, capture.stats[site.name], fits_here, card, nodes.get(site.name), elements)
        if data["drawn"]:
            data["drawn"] |= site_inputs(capture.inputs, site, card)
        sites.append(data | {"short": short[site.name]})
    return {
        "about": {name: capture.about[name] for name in _ABOUT if name in capture.about},
        "random": _RANDOM in capture.about.get("weights", ""),
        "samples": capture.n_samples,
        "seed": capture.seed,
        "versions": dict(capture.versions),
        "weights_by": weights_by,
        "curves": list(dict.fromkeys(fit.curve for fit in site_fits)),
        "skipped": [norm.as_dict() for norm in capture.skipped],
        "inputs": inputs_data(capture.inputs),
        "sites": sites,
    }


def training_data(timeline: Timeline) -> dict[str, Any]:
    """Return the figures of a timeline, a PNG in each style, and its tables."""
    figures = {"By step and depth": plot_timeline, "S-curves by step": plot_scurves_by_step}
    tables = []
    for table in timeline_tables(timeline):
        rows: list[list[str]] = []
        for site, *cells in table.rows:
            rows.append([site or rows[-1][0], *cells])  # the page may sort them
        name = "norms" if "curve" in table.headings else "point-wise functions"
        tables.append({"name": name, "heads": table.headings, "rows": rows})
    return {
        "about": timeline.about,
        "figures": [
            {"label": label, **{style: _png(plot(timeline, style=style, title="none")) for style in STYLES}}
            for label, plot in figures.items()
        ],
        "tables": tables,
    }


def _png(figure: Any) -> str:
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=_DOTS, format="png")
    return f"data:image/png;base64,{base64.b64encode(drawn.getvalue()).decode()}"


def nodes_of_sites(capture: Capture, weights_by: str) -> dict[str, Nodes]:
    """Return the weighted points that fits of each site are made on, by its name; no site without pairs to fit."""
    levels, nodes_by_site = fit_targets(capture, weights_by=weights_by), dict[str, Nodes]()
    for numbers, problems in batches(levels):
        nodes = problems.nodes()
        for row, number in enumerate(numbers):
            nodes_by_site[levels[number].site] = Nodes(*(values[row : row + 1] for values in vars(nodes).values()))
    return nodes_by_site


def curve_data(curve: Curve) -> dict[str, Any]:
    """Return the data of a curve; ``sampled`` are values of a user's f, which the page has no function for."""
    is_sampled, end = curve.name not in (*CURVES, FREE), math.asinh(_SAMPLED_UP_TO)
    points = torch.linspace(-end, end, _SAMPLES, dtype=torch.float64).sinh()
    return {
        "formula": curve.formula,
        "aliases": list(curve.aliases),
        "function": curve.function_name,
        "inverse": curve.amplitude_is_inverse_scale,
        "linear": curve.name == "linear",
        "sampled": {"values": packed(curve.function(points), "f4"), "reach": _SAMPLED_UP_TO} if is_sampled else None,
    }


def style_data(style: Style, curves: Iterable[str]) -> dict[str, Any]:
    """Return a theme of the figures: its colours, and a colour and dashes for every curve."""
    lines = {
        name: {"colour": colour, "dashes": [] if dashes == "-" else [float(length) for length in dashes[1]]}
        for name, (colour, dashes) in style.looks(curves).items()
    }
    return {**{name: getattr(style, name) for name in ("background", "ink", "faint", "channels")}, "curves": lines}
