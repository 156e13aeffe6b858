"""Which norms ``swap`` and ``heal`` keep: their options, the choice, and what is said and drawn of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import normscope
from normscope.cli.options import SWAP
from normscope.errors import UsageError, count

if TYPE_CHECKING:
    from torch import nn

    from normscope.cli.output import Output
    from normscope.cli.swapping import Learner
    from normscope.runtime.processes import Place

Keep = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        rich_help_panel=SWAP,
        help="Leave so many of these norms as they are: those that are worth most in the partly swapped network.",
        show_default=False,
    ),
]
MaxDrift = Annotated[
    float | None,
    typer.Option(
        metavar="D",
        rich_help_panel=SWAP,
        help="Leave as few of these norms as keep the median error at the output (relative L2; KL divergence of "
        "logits) at or below D, on inputs to learn from.",
        show_default=False,
    ),
]


def check_keep(keep: int | None, max_drift: float | None, sites: str, place: Place) -> None:
    """Refuse, before any work, what cannot choose the norms to keep; UsageError."""
    if keep is None and max_drift is None:
        return
    if keep is not None and max_drift is not None:
        raise UsageError(
            "--keep says how many norms to leave, and --max-drift lets the drift say it; give one of them."
        )
    if keep is not None and keep < 1:
        raise UsageError(f"--keep {keep} leaves no norm: take 1 or more, or leave it out.")
    if max_drift is not None and not 0 <= max_drift < math.inf:
        raise UsageError(f"--max-drift is {max_drift:g}; it is an error at the output, 0 or more.")
    if sites.strip().startswith("least"):
        raise UsageError(
            f"--sites {sites} and {'--keep' if keep else '--max-drift'} both choose norms; give one of them."
        )
    if not place.alone:
        raise UsageError(
            f"Norms to keep are chosen in one process, and torchrun started {place.ranks}. Start it without torchrun."
        )


def figure_of_choice(folder: Path) -> Path:
    """Where the figure of the norms kept is written, beside the folder of the swap."""
    return folder.parent / f"{folder.name}-keep.png"


def choose(
    learner: Learner,
    modules: Mapping[str, nn.Module],
    number: int | None,
    max_drift: float | None,
    func: str,
    init: str,
    say: Output,
    *,
    after: Callable[[Sequence[str]], float] | None = None,
) -> normscope.KeepReport:
    """Choose the norms to keep, on the inputs to learn from; arguments are those of :func:`normscope.keep`."""
    from normscope.swaps.keep import MOST_SAMPLES

    if number is not None and number >= len(modules):
        raise UsageError(f"--keep {number} leaves nothing to swap: there are {count(len(modules), 'norm')}.")
    trials = "" if after is None else ", and each number of norms that is tried a calibration"
    say.remark(f"every norm kept takes up to {len(modules)} passes over at most {MOST_SAMPLES} samples{trials}")
    with say.bars() as progress:
        return normscope.keep(
            learner.network,
            learner.learned,
            modules,
            number=number,
            max_drift=max_drift,
            held_out=learner.held_out,
            after=after,
            func=func,
            init=init,
            about=learner.about,
            progress=progress,
        )


def tell_choice(choice: normscope.KeepReport, title: str, drawn: Path, say: Output) -> None:
    """Print the table of the norms kept, and draw it."""
    from normscope.tables.keep import keep_table

    say.result(keep_table(choice))
    if not choice.kept:
        say.remark("all norms could be swapped: none had to be kept")
    about = {**choice.about, "func": choice.func}
    normscope.save_figure(normscope.plot_keep(choice, title), drawn, about)
