"""``normscope swap``."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normscope.cli.options import (
    AsCsv,
    AsJson,
    BatchSize,
    Data,
    Device,
    Dtype,
    Guidance,
    Limit,
    Model,
    Quiet,
    Seed,
    Timesteps,
    Weights,
)
from normscope.cli.output import Output
from normscope.cli.sources import Run, check_models
from normscope.errors import UsageError, unknown
from normscope.files import check_folder_writable

if TYPE_CHECKING:
    from normscope.fits.curve_fit import CurveFit
    from normscope.fits.curves import Curve
    from normscope.models.base import Inputs, LoadedModel
    from normscope.pairs.sites import NormSite, SkippedNorm
    from normscope.splits import Part
    from normscope.swaps.start import Start

EXAMPLES = (
    "Examples: normscope swap demo_vit --func dyt -o demo_vit-dyt · "
    "normscope swap vit_b16 --func dyisru --sites final,pre-norm -o safe · normscope swap demo_dit --func best -o best"
)
LEVELS = ("site", "channel")

Func = Annotated[
    str,
    typer.Option(
        help="One curve: dyt (tanh), dyisru (isru), derf, identity, …; free, E\\[y|x] itself; best, each site's own; "
        "rmsnorm, the norm without centring; or your own formula of x, 'mine=x/(1+abs(x))'."
    ),
]
Folder = Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The folder to write; --weights takes it.")]
Init = Annotated[
    str,
    typer.Option(
        metavar="fit|theory|paper",
        help="Where to start: this network's own fits; A and α in theory; or A = 1, α = 0.5, as the papers do.",
    ),
]
Sites = Annotated[
    str,
    typer.Option(
        help="Which norms: all; pre-norm, post-norm, qk, final; or indices, ranges, names, globs; or a number."
    ),
]
Per = Annotated[str, typer.Option(metavar="site|channel", help="One A and α a site, or one for each channel.")]
Shift = Annotated[
    bool | None,
    typer.Option("--shift/--no-shift", help="Fit s in f(αx + s), or not; by default it is.", show_default=False),
]


def swap(
    model: Model,
    output: Folder,
    func: Func = "dyt",
    init: Init = "fit",
    sites: Sites = "all",
    per: Per = "site",
    shift: Shift = None,
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
    as_csv: AsCsv = False,
    quiet: Quiet = False,
) -> None:
    """Put point-wise functions in the place of a model's norms, and write the model: its weights and what is where."""
    say = Output(as_json, quiet, as_csv=as_csv)
    check_models([model])
    from normscope.swaps.record import FILES
    from normscope.swaps.replace import Swap, replacements
    from normscope.swaps.start import RMS_NORM, asked_for, starts
    from normscope.swaps.store import save_swapped

    asked = asked_for(func, init)
    how = How(asked, init, per, shift)
    check_folder_writable(output, FILES)
    run = Run(weights, data, limit, batch_size, seed, device, dtype, guidance=guidance, timesteps=timesteps)
    network = run.load(model, say)
    learned = _to_learn_from(network) if how.fits else network.inputs
    norms, skipped = norms_to_swap(network, learned, sites)
    if not how.fits:
        say.skipped(skipped)
    fits, about = start_values(network, learned, norms, how, seed, say)
    begin = "fit" if how.fits else init  # fits of theory's A and α are made already
    rows = [_row(start, fits) for start in starts(asked, fits, begin)]
    Swap(network.module, replacements(network.module, asked, fits, init=begin))
    folder = save_swapped(network.module, output, about, func=func, init=None if asked == RMS_NORM else init)
    from normscope.figures.swap_tables import swapped_table

    say.result("{model} · {weights} · {data}".format(**about))
    say.result(swapped_table(rows))
    say.result(str(folder))
    say.remark(f"--weights {folder} takes it in every command; in Python, {call_to_load(model, str(folder))}")
    whole = {**about, "folder": str(folder), "func": func, "init": init, "per": per}
    left_out = [{"model": model, **asdict(norm)} for norm in skipped]
    say.document({**whole, "sites": rows, "skipped": left_out}, [{**whole, **row} for row in rows])


@dataclass(frozen=True)
class How:
    """How start values are found; UsageError where options do not go together."""

    asked: Curve | str
    init: str
    per: str
    shift: bool | None

    def __post_init__(self) -> None:
        from normscope.fits.curves import Curve

        if self.per not in LEVELS:
            raise UsageError(unknown("level", self.per, LEVELS))
        if isinstance(self.asked, Curve) and self.init == "fit":
            return
        what = f"--init {self.init}" if self.init != "fit" else f"--func {self.asked}"
        if self.per != "site":
            raise UsageError(f"--per channel fits one curve in each channel: it can have no effect with {what}.")
        if self.shift is not None:
            raise UsageError(f"Nothing is fitted with an s of its own with {what}; leave --shift and --no-shift out.")

    @property
    def fits(self) -> bool:
        """Whether they are made of pairs."""
        from normscope.swaps.start import RMS_NORM

        return self.init != "paper" and self.asked != RMS_NORM


def _to_learn_from(network: LoadedModel) -> Inputs | Part:
    """Return the inputs that nothing is judged by afterwards."""
    from normscope.splits import learned_and_held_out

    return network.calibration or learned_and_held_out(network.inputs)[0]


def norms_to_swap(network: LoadedModel, learned: Inputs | Part, sites: str) -> tuple[list[NormSite], list[SkippedNorm]]:
    """Find the norms that are to be replaced, and those that cannot be."""
    from normscope.pairs.trace import find_norms
    from normscope.swaps.replace import chosen

    report = find_norms(network.module, next(iter(learned)).first_sample())
    return chosen(report.sites, sites), report.skipped


def start_values(
    network: LoadedModel, learned: Inputs | Part, norms: Sequence[NormSite], how: How, seed: int, say: Output
) -> tuple[Sequence[CurveFit] | Sequence[NormSite], dict[str, str]]:
    """Fit what takes the norms' places, and say to what; where nothing is fitted, the norms are all that it takes."""
    if not how.fits:
        return norms, {**network.about, "data": "no data, as nothing was fitted"}
    from normscope.pairs.hooks import capture
    from normscope.swaps.start import fitted

    seen = capture(
        network.module,
        say.tracked(learned),
        layers=[norm.name for norm in norms],
        about=network.about,
        seed=seed,
        by_gamma=how.per == "site",
        per_channel=how.per == "channel",
    )
    say.account(seen, (network.calibration or network.inputs).unreadable)
    return fitted(seen, how.asked, how.init, per=how.per, shift=how.shift is not False), dict(seen.about)


def call_to_load(model: str, folder: str) -> str:
    """Write the call that loads it; a network of the user's own is loaded by its name."""
    own = model.startswith("py:")
    return f"normscope.load({model!r}, weights={folder!r})" if own else f"normscope.load_swapped({folder!r})"


def _row(start: Start, fits: Sequence[CurveFit] | Sequence[NormSite]) -> dict[str, Any]:
    """Describe what was put at one site; where each channel has numbers of its own, by their medians."""
    from normscope.fits.curve_fit import CurveFit
    from normscope.fits.curves import FREE

    own = [one for one in fits if isinstance(one, CurveFit) and one.function is start.curve and one.norm is start.norm]
    r2 = [one.r2 for one in own if not one.degenerate]
    has_parameters = start.curve is not None and start.curve.name != FREE
    return {
        "site": start.norm.name,
        "norm": start.norm.kind,
        "func": start.curve.name if start.curve else "rmsnorm",
        "A": float(start.amplitude.median()) if has_parameters else None,
        "alpha": float(start.alpha.median()) if has_parameters else None,
        "shift": float(start.shift.median()) if has_parameters and start.shift is not None else None,
        "r2": statistics.median(r2) if r2 else None,
        "per_channel": start.alpha.numel() > 1,
    }
