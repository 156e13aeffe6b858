"""Quality as a table for a terminal."""

import math

from normscope.show.tables.drift import quality_table, swapped_table
from normscope.swaps.reports import Quality, Score


def quality_of(name, scores, higher_is_better=True, over="64 labelled samples"):
    own = {network: score if isinstance(score, Score) else Score(score) for network, score in scores.items()}
    return Quality(name, higher_is_better, 64, over, own)


def columns(table):
    return dict(zip(table.headings, map(list, zip(*table.rows, strict=True)), strict=True))


def test_a_row_a_network_with_intervals_where_there_are_some():
    scores = {"original": Score(1.0, (0.943, 1.0)), "swapped": Score(0.5, (0.381, 0.619))}
    other = scores | {"swapped": Score(0.25, (0.16, 0.368))}
    table = quality_table(
        {("dyt", "fit"): quality_of("top-1 accuracy", scores), ("rmsnorm", ""): quality_of("top-1 accuracy", other)}
    )
    assert columns(table) == {
        "norms": ["original", "DyT", "rmsnorm"],
        "init": ["", "fit", ""],
        "top-1 accuracy": ["100.0%", "50.0%", "25.0%"],
        "95%": ["94.3% – 100.0%", "38.1% – 61.9%", "16.0% – 36.8%"],
    }
    assert table.caption == "64 labelled samples · higher is better · 95%: Wilson's interval"


def test_healed_networks_and_infinite_values():
    quality = quality_of(
        "perplexity", {"original": 29.371, "swapped": math.inf, "healed": 41.0}, False, "9 tokens of 2 texts"
    )
    table = quality_table({("dyisru", "fit"): quality})
    assert columns(table) == {
        "norms": ["original", "DyISRU", "DyISRU, after heal"],
        "init": ["", "fit", "fit"],
        "perplexity": ["29.371", "∞", "41.000"],
    }
    assert table.caption == "9 tokens of 2 texts · lower is better"


def test_a_function_of_ones_own_and_a_correlation_that_is_none():
    own = quality_table({("dyt", "fit"): quality_of("brightness", {"original": 0.5, "swapped": -0.25}, None, "")})
    assert columns(own)["brightness"] == ["0.50000", "-0.25000"] and own.caption == "a function of your own"
    none = quality_table(
        {("dyt", "fit"): quality_of("Spearman's rank correlation", {"original": 0.5, "swapped": math.nan})}
    )
    assert columns(none)["Spearman's rank correlation"] == ["0.50000", "–"]


def test_a_swap_marks_straight_sites_and_the_weights_of_its_fits():
    row = {"norm": "LayerNorm", "curve": "dyt", "shift": None, "r2": 0.99, "per_channel": False, "weights_by": "gamma"}
    numbers = (
        {"amplitude": 7342.0, "alpha": 1e-3, "straight": True},
        {"amplitude": 2.5, "alpha": 0.5, "straight": False},
    )
    table = swapped_table([{**row, **each, "site": site} for site, each in zip("ab", numbers, strict=True)])
    texts = columns(table)
    assert (texts["A"], texts["α"], texts["A·α"]) == (["straight", "2.5"], ["–", "0.5"], ["7.342", ""])
    assert texts["replaced by"] == ["DyT"] * 2
    said = table.caption
    assert "weighted by γ²" in said and "straight: the pairs do not bend" in said
