"""``normscope stats``."""

from __future__ import annotations

from pathlib import Path

import normscope
from normscope.cli.options import Look, check_plot, declared
from normscope.cli.output import Output, skipped_as_json
from normscope.cli.running import RunOptions, captures, sources
from normscope.tables.card import card_tables


@declared(
    "normscope stats vit_b16 · normscope stats demo_vit --layers norm · "
    "normscope stats capture.safetensors --json -o cards.json",
    without=("verify", "figure_format", "dpi", "style"),
)
def stats(
    models: list[str] | None = None,
    *,
    layers: str = "all",
    run: RunOptions,
    by: str | None = None,
    plot: Path | None = None,
    look: Look,
    say: Output,
) -> None:
    """Report the effects of centring and scaling at every norm, and the channels and tokens that form its tails."""
    names = sources(models, run, by, say)
    check_plot(plot, names, by)
    seen, rows = [], []
    for capture in captures([(name, run) for name in names], layers, say, by):
        cards = normscope.norm_cards(capture)
        say.heading(capture.about)
        for table in card_tables(cards):
            say.table(table)
        if plot:
            figure = normscope.plot_tails(capture, cards, **look.of_figure)
            say.result(str(normscope.save_figure(figure, plot, capture)))
        seen.append(capture)
        rows += [card.as_dict() for card in cards]
    say.document({"sites": rows, "skipped": skipped_as_json(seen)}, rows)
