"""``normscope stats``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import normscope
from normscope.cli import options
from normscope.cli.figure_files import PLOT_ONLY, FigureFiles, Look
from normscope.cli.output import Output, skipped_as_json
from normscope.cli.running import CAPTURE_ONLY, RunOptions, captures, sources
from normscope.errors import UsageError
from normscope.show.tables.card import card_tables


@options.with_groups(
    "normscope stats vit_b16 · normscope stats demo_vit --layers norm · "
    "normscope stats capture.safetensors --json -o cards.json",
    without=(*CAPTURE_ONLY, *PLOT_ONLY, "figure_format"),
)
def stats(
    models: options.Models = None,
    *,
    layers: options.Layers = "all",
    run: RunOptions,
    by: options.By = None,
    channels: options.Channels = False,
    plot: options.Plot = None,
    look: Look,
    out: Output,
) -> None:
    """Report the effects of centring and scaling at every norm, and the channels and tokens that form its tails.

    Point-wise functions in place of norms: α, s and the pairs that they saturate.
    """
    names = sources(models, run, by, out)
    if channels and (by or any(Path(name).is_file() for name in names)):
        raise UsageError("--channels takes a second pass over a model's inputs: name no capture file, and no --by.")
    files = FigureFiles(plot, look, names, ["tails"], by, "--plot") if plot else None
    seen, rows, networks = [], [], list[Any]()
    after = networks.append if channels else None
    for capture in captures([(name, run) for name in names], layers, out, by, after):
        with out.bars() as progress:
            cards = normscope.norm_cards(capture, networks.pop() if networks else None, progress=progress)
        out.heading(capture.about)
        out.table(*card_tables(cards))
        if files:
            figure = normscope.figures.plot_tails(capture, cards, **look.figure_options)
            files.save(figure, "tails", capture, out)
            if any(card.saturation for card in cards):
                figure = normscope.figures.plot_saturation(capture, **look.figure_options)
                files.save(figure, "saturation", capture, out)
        seen.append(capture)
        rows += [card.as_dict() for card in cards]
    out.document({"sites": rows, "skipped": skipped_as_json(seen)}, rows)
