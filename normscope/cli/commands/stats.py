"""``normscope stats``."""

from __future__ import annotations

from pathlib import Path

import normscope
from normscope.cli.options import check_plot
from normscope.cli.output import Output, skipped_as_json
from normscope.cli.running import RunOptions, captures, check_by, check_sources, named_or_embedded, runs_networks
from normscope.tables.card import card_tables

EXAMPLES = (
    "Examples: normscope stats vit_b16 · normscope stats demo_vit --layers 8, · "
    "normscope stats capture.safetensors --json -o cards.json"
)


@runs_networks()
def stats(
    models: list[str] | None = None,
    *,
    layers: str = "all",
    run: RunOptions,
    by: str | None = None,
    as_json: bool = False,
    as_csv: bool = False,
    output: Path | None = None,
    quiet: bool = False,
    plot: Path | None = None,
    width: float | None = None,
    title: str | None = None,
) -> None:
    """Say what centring and scaling do at every norm, and which channels and tokens make its tails: the norm card."""
    say = Output(as_json, quiet, output, as_csv=as_csv)
    names = named_or_embedded(models, say)
    check_plot(plot, names, by)
    check_sources(names, run)
    check_by(by, names)
    seen: list[normscope.Capture] = []
    cards: list[normscope.NormCard] = []
    for capture in captures([(name, run) for name in names], layers, say, by):
        of_capture = normscope.norm_cards(capture)
        say.heading(capture.about)
        for table in card_tables(of_capture):
            say.result(table)
        if plot:
            figure = normscope.plot_tails(capture, of_capture, width=width, title=title)
            say.result(str(normscope.save_figure(figure, plot, capture)))
        seen.append(capture)
        cards += of_capture
    rows = [card.as_dict() for card in cards]
    say.document({"sites": rows, "skipped": skipped_as_json(seen)}, rows)
