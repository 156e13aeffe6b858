"""Timelines in tests, of numbers that numpy makes."""

import numpy as np

from normscope.tools.probe.timeline import (
    CURVE_METRICS,
    NORM_METRICS,
    POINTWISE_METRICS,
    SITE_METRICS,
    StepRecord,
    Timeline,
    TimelineHeader,
    TimelineSite,
)


def run_of(steps=(0, 50, 100, 400), norms=6, functions=0, curves=("tanh", "isru")):
    """Header and records of norms, then point-wise functions; no two numbers of a metric are equal, and all are > 0."""
    sites = [TimelineSite(f"blocks.{n}.norm", "LayerNorm", "pre-norm", 8) for n in range(norms)]
    sites += [TimelineSite(f"blocks.{n}.norm", "DyT", "pre-norm", 8, "tanh") for n in range(norms, norms + functions)]
    names = [f"{name}/{curve}" for curve in curves for name in CURVE_METRICS] + [
        *SITE_METRICS,
        *NORM_METRICS,
        *POINTWISE_METRICS,
    ]
    draw, records = np.random.default_rng(0), []
    for step in steps:
        numbers = {name: draw.uniform(0.1, 0.9, len(sites)).tolist() for name in names}
        numbers |= {"low": [-5.0] * len(sites), "high": [7.0] * len(sites)}
        for name in (*NORM_METRICS, *POINTWISE_METRICS):
            numbers[name] = [
                v if bool(site.curve) == (name in POINTWISE_METRICS) else None
                for v, site in zip(numbers[name], sites, strict=True)
            ]
        records.append(
            StepRecord(step, 1.7e9 + step, 0.25, numbers, 2 - step / 1e3, tuple(site.name for site in sites))
        )
    return TimelineHeader("a_net", "random init", "noise & <more>", tuple(curves), tuple(sites)), records


def timeline(*of_run, **named):
    return Timeline.of(*run_of(*of_run, **named))


def written(path, *of_run, **named):
    header, records = run_of(*of_run, **named)
    path.write_text("".join(part.line() for part in (header, *records)))
    return path
