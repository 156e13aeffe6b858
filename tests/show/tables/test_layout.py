"""Tables at any width: columns in their order, folded names and whole numbers."""

import re

import pytest
import torch
from artists import printed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import normscope
from normscope.fits.saturation import with_modules
from normscope.fits.scale import token_slopes
from normscope.show.tables.card import saturation_table, scale_table, tails_table
from normscope.show.tables.catalogs import layers_table, models_table
from normscope.show.tables.drift import drift_table, sites_table
from normscope.show.tables.fit import channels_table, comparison_table, fits_table, slopes_table
from normscope.show.tables.glossary import unknown_column
from normscope.show.tables.gradient import gradient_tables
from normscope.show.tables.table import Column, names, several, table_of, words

_PATHS = st.lists(
    st.sampled_from(["encoder", "layers", "11", "feature_projection", "norm1", "0"]), min_size=1, max_size=7
)
_NUMBERS = st.floats(-1e4, 1e4).map("{:.4f}".format) | st.just("0.891 ± 0.014")
_ROWS = st.lists(st.tuples(_PATHS.map(".".join), st.lists(_NUMBERS, min_size=8, max_size=8)), min_size=1, max_size=5)


def of(rows, drops=(0, 7, 1, 6, 2, 5, 3, 4)):
    headings = [f"column {n}" for n in range(8)]
    columns = [names("site", lambda row: row[0]), *several(headings, lambda row: row[1], drops)]
    return table_of(
        rows, columns, caption=["All R² of 0.8910 and more, over some folds by source; a caption has 12 words"]
    )


@settings(max_examples=30)
@given(_ROWS, st.integers(60, 200))
def test_numbers_are_whole_at_any_width(rows, width):
    table = of(rows)
    text = printed(table, width)
    assert all(len(line) <= width for line in text.splitlines())
    whole = re.split(r"\s{2,}|\n", text)
    for number, heading in enumerate(table.headings[1:], 1):
        if f"{heading}," not in left_out(text):
            assert {row[number] for row in table.rows} <= set(whole)
    assert set(table.caption.split()) <= set(text.split())


def left_out(text):
    match = re.search(r"Left out at a width of \d+ \(all columns take \d+\): (.*?)\.$", " ".join(text.split()))
    return f"{match[1]}," if match else ""


@settings(max_examples=30)
@given(_ROWS, st.integers(60, 200))
def test_columns_give_way_in_their_order_and_are_named(rows, width):
    text = printed(of(rows), width)
    gone = re.findall(r"column (\d)", left_out(text))
    order = sorted(range(1, 8), key=(0, 7, 1, 6, 2, 5, 3, 4).__getitem__, reverse=True)
    assert set(map(int, gone)) == set(order[: len(gone)])
    assert text.split("Left out")[0].split().count("column") == 8 - len(gone)


def test_names_fold_after_dots_and_in_no_number():
    rows = ["model.encoder.layers.0.layer_norm", "2402.17762 of owner/model"]
    columns = [names("site", lambda row: row), *several(["a", "b"], lambda _: ["1" * 20] * 2)]
    text = printed(table_of(rows, columns), 60)
    first = [line.partition(" ")[0] for line in text.splitlines()]
    assert first == ["site", "model.encoder.", "layers.0.", "layer_norm", "2402.17762", "owner/model"]


def test_a_remark_is_a_line_below_the_table():
    columns = [words("site", str), Column("A", lambda _: "1.0"), Column("α", lambda _: "0.5")]
    table = table_of("abb", columns, remark=lambda row: "b: all of its pairs are alike" if row == "b" else None)
    assert printed(table, 60).splitlines() == [
        *("site    A    α", "a     1.0  0.5", "b       –    –", "b       –    –", "b: all of its pairs are alike"),
    ]


def test_the_name_of_a_site_is_shown_once():
    columns = [names("site", lambda row: row[0], once=True), Column("A", lambda row: row[1])]
    lines = printed(table_of([("a", "0.1"), ("a", "0.2"), ("norm", "0.3")], columns), 60).splitlines()
    assert [line.split() for line in lines[1:]] == [["a", "0.1"], ["0.2"], ["norm", "0.3"]]


def test_a_column_that_is_never_left_out_is_whole_in_any_terminal():
    text = printed(table_of(["a"], several(["x", "y"], lambda _: ["1" * 40] * 2)), 60)
    assert ["1" * 40, "1" * 40] in [line.split() for line in text.splitlines()]


def test_a_caption_defines_only_the_columns_that_are_shown():
    columns = [words("site", str), *several(["kurtosis", "median"], lambda _: ["1" * 40] * 2, (1, 2))]
    table = table_of("x", columns, caption=["y ≈ f(x)"], about="stats")
    below = {width: " ".join(printed(table, width).split("1" * 40)[-1].split()) for width in (90, 80)}
    assert below[90] == table.caption and "kurtosis: " in table.caption and "median: " in table.caption
    assert below[80].endswith("Left out at a width of 80 (all columns take 88): median.")
    assert "kurtosis: " in below[80] and "median: " not in below[80]


@pytest.fixture(scope="module")
def tables():
    """Every table of a small network, with the folds of eight sources and a site that holds nothing, by command."""
    network = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 8), nn.RMSNorm(8))
    x = torch.randn(8, 6, 16, generator=torch.Generator().manual_seed(0)) ** 3
    nn.init.zeros_(network[3].weight)
    nn.init.zeros_(network[3].bias)
    seen = normscope.capture(network, list(x.split(1)), diagonal=True, per_channel=True)
    fits = normscope.fit(seen, "tanh,isru,linear,free")
    cards = normscope.norm_cards(seen)
    derf = normscope.PointwiseFunction("derf", 16, alpha=torch.linspace(0.1, 2, 16), shift=-0.125)
    nn.init.normal_(derf.weight)
    functions = normscope.capture(nn.Sequential(nn.Linear(16, 16), normscope.DyT(16), derf), [x])
    moved = [
        normscope.drift(network, [x], normscope.replacements(network, func, seen, layers="0,1"), func=func, init="fit")
        for func in ("tanh", "isru", "derf")
    ]
    per_channel, slopes = channels_table(normscope.fit(seen.only([0]), per="channel")), slopes_table(token_slopes(seen))
    own = fits_table(with_modules(functions, normscope.fit(functions, "tanh")))
    return {
        "fit": [fits_table(fits), per_channel, slopes, own],
        "stats": [scale_table(cards), tails_table(cards), saturation_table(normscope.saturation(functions))],
        "gradient": gradient_tables(normscope.gradient(seen, fits[:2])),
        "compare": [comparison_table(normscope.compare([c.only([0])] * 2, "tanh")) for c in (seen, functions)],
        "swap-bench": [drift_table(moved), sites_table(moved)],
        "layers": [layers_table(seen.sites), layers_table(functions.sites)],
        "models": [models_table(normscope.list_models())],
    }


@pytest.mark.parametrize("command", ["fit", "stats", "gradient", "compare", "swap-bench", "layers", "models"])
def test_tables_break_no_number_at_any_width_and_define_every_column(tables, command):
    def numbers(text):
        return set(re.findall(r"[\d.,]*\d[\d.,]*", text))

    for table in tables[command]:
        assert unknown_column(command, filter(None, table.headings)) is None
        whole = printed(table, 1000)
        for width in (60, 80, 101, 140, 200):
            text = printed(table, width)
            assert max(map(len, text.splitlines())) <= width
            assert not any(line.endswith(" ") for line in text.splitlines())
            shown = text.partition("Left out at a width of")[0]
            assert numbers(shown) <= numbers(whole)
            assert numbers(shown) == numbers(whole) or shown != text


def test_chosen_columns_keep_remarks_and_definitions():
    columns = [words("site", str), Column("kurtosis", lambda _: "1.0"), Column("cosine", lambda _: "0.5")]
    table = table_of("ab", columns, about="stats", remark=lambda row: "b: all alike" if row == "b" else None)
    chosen = table.only(["cosine", "site", "none"])
    assert chosen.headings == ["cosine", "site"] and chosen.rows == [["0.5", "a"], ["–", "b"]]
    assert "cosine: " in chosen.caption and "kurtosis: " not in chosen.caption
    assert chosen.caption.endswith("\nb: all alike")
