"""``normscope swap-bench``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normscope.cli.figure_files import Destination, Dpi, Format, Theme, figure_path, figure_suffix
from normscope.cli.options import (
    AsJson,
    BatchSize,
    Data,
    Device,
    Dtype,
    Guidance,
    Limit,
    Models,
    Quiet,
    Seed,
    Timesteps,
    Weights,
)
from normscope.cli.output import Output
from normscope.cli.sources import Run, check_models, named_or_embedded
from normscope.cli.swap import How, Per, Shift, norms_to_swap, start_values
from normscope.errors import UsageError
from normscope.files import check_writable

if TYPE_CHECKING:
    from normscope.drifts import DriftReport
    from normscope.models.base import LoadedModel
    from normscope.pairs.sites import NormSite
    from normscope.speeds import SpeedReport

EXAMPLES = (
    "Examples: normscope swap-bench · normscope swap-bench demo_dit --func dyt,free,rmsnorm --init fit,paper · "
    "normscope swap-bench vit_b16 --sites least:8 · normscope swap-bench llama_7b --device cuda"
)
_LEAST = re.compile(r"least:(\d{1,6})")
_SECONDS = 35.0  # for a model's speed: three of them, and building them, take about two minutes

Funcs = Annotated[
    str,
    typer.Option(
        help="What takes the norms' place, separated by commas: dyt (tanh), dyisru (isru), derf, identity, …; rmsnorm; "
        "free, E\\[y|x] itself; best, each site's own; or your own formula of x."
    ),
]
Inits = Annotated[
    str,
    typer.Option(
        metavar="fit|theory|paper",
        help="Where to start, or several with commas: own fits; A and α in theory; or A = 1, α = 0.5.",
    ),
]
Sites = Annotated[
    str,
    typer.Option(
        help="Which norms: all; pre-norm, post-norm, qk, final; indices, ranges, names, globs; a number; or least:8, "
        "those that move the output least."
    ),
]
Full = Annotated[
    bool, typer.Option("--full", help="Time the whole matrix: whole networks compiled and backward, in every dtype.")
]
Seconds = Annotated[
    float | None,
    typer.Option(min=0, help="For each model's speed; by default 35, and of --full no limit.", show_default=False),
]


def swap_bench(
    models: Models = None,
    func: Funcs = "dyt,dyisru,derf",
    init: Inits = "fit",
    sites: Sites = "all",
    per: Per = "site",
    shift: Shift = None,
    full: Full = False,
    seconds: Seconds = None,
    figure_format: Format = None,
    dpi: Dpi = 200,
    style: Theme = "light",
    weights: Weights = "pretrained",
    data: Data = None,
    limit: Limit = None,
    batch_size: BatchSize = 8,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Dtype = "float32",
    guidance: Guidance = None,
    timesteps: Timesteps = None,
    as_json: AsJson = False,
    output: Destination = Path("outputs"),
    quiet: Quiet = False,
) -> None:
    """Replace norms by point-wise functions: how far the outputs move on held-out inputs, and how fast it is."""
    say = Output(as_json, quiet)
    from normscope.figures.style import style_named
    from normscope.models.devices import resolve_device
    from normscope.swaps.bench import in_words

    there = resolve_device(device)
    remark = "" if there.type == "cuda" else ": there is no CUDA here, or it was not asked for"
    say.result(f"on {in_words(there)}{remark}")
    names = named_or_embedded(models, say)
    check_models(names)
    style_named(style)
    wanted = Wanted.of(func, init, sites, per, shift)
    suffix = figure_suffix(output, figure_format, [*names, "speed"], None)
    for name in names:
        check_writable(figure_path(output, suffix, name, "drift", []))
    run = Run(weights, data, limit, batch_size, seed, device, dtype, guidance=guidance, timesteps=timesteps)
    drifts: list[dict[str, Any]] = []
    speeds: list[dict[str, Any]] = []
    figures: list[dict[str, str]] = []
    for name in names:
        network = run.load(name, say)
        reports, norms = _drift(network, wanted, seed, say)
        drifts += [report.as_dict() for report in reports]
        speed = _speed(network, wanted, run, full, seconds, say)
        speeds.append(speed.as_dict())
        for view, figure in _drawn(reports, norms, speed, style):
            path = figure_path(output, suffix, name, view, [entry["file"] for entry in figures])
            _save(figure, path, dpi)
            say.result(str(path))
            figures.append({"model": name, "view": view, "file": str(path)})
    say.document({"device": in_words(there), "drift": drifts, "speed": speeds, "figures": figures})


@dataclass(frozen=True)
class Wanted:
    """What is to be swapped in, how it starts, and where; UsageError where options do not go together."""

    ways: Sequence[tuple[str, str, How]]
    sites: str
    least: int | None

    @classmethod
    def of(cls, func: str, init: str, sites: str, per: str, shift: bool | None) -> Wanted:
        from normscope.fits.curves import split_names
        from normscope.swaps.start import RMS_NORM, asked_for

        inits = [part.strip() for part in init.split(",")]
        ways = []
        for name in dict.fromkeys(part.lower() if "=" not in part else part for part in split_names(func)):
            for own in dict.fromkeys(inits):
                asked = asked_for(name, own)
                if asked == RMS_NORM and own != inits[0]:  # it has no start values
                    continue
                ways.append((name, own, How(asked, own, per, shift)))
        least = _LEAST.fullmatch(sites.strip())
        if sites.strip().startswith("least") and not least:
            raise UsageError(f"--sites {sites} is not understood; least:8 takes the eight least harmful.")
        return cls(ways, "all" if least else sites, int(least[1]) if least else None)

    @property
    def curves(self) -> list[str]:
        """Names of what can be timed without a fit."""
        return list(dict.fromkeys(name for name, _, _ in self.ways if name not in ("free", "best")))


def _drift(
    network: LoadedModel, wanted: Wanted, seed: int, say: Output
) -> tuple[list[DriftReport], list[NormSite]]:
    """Measure drift for each function and start, on inputs that nothing was fitted to."""
    from normscope.splits import divided
    from normscope.swaps.drift import drift, passes
    from normscope.swaps.replace import replacements

    learned, held_out = divided(network)
    norms, skipped = norms_to_swap(network, learned, wanted.sites)
    say.skipped(skipped)
    about = {**network.about, "data": held_out.description}
    reports = []
    for name, init, how in wanted.ways:
        fits = start_values(network, learned, norms, how, seed, say)[0] if how.fits else norms
        modules = replacements(network.module, how.asked, fits, init="fit" if how.fits else init)
        done = {"outputs": network.outputs, "ends": getattr(held_out, "ends", None), "func": name, "init": init}
        if wanted.least is not None:
            alone = drift(network.module, held_out, modules, **done, cumulative=False, about=about)
            modules = {path: modules[path] for path in modules if path in alone.least_harmful(wanted.least)}
        samples = (held_out.n_samples or 0) * passes(len(modules))
        with say.counted(samples, f"{network.name}, {name}, {init}") as advance:
            reports.append(drift(network.module, held_out, modules, **done, about=about, progress=advance))
    return reports, norms
