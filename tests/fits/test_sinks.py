"""Positions that carry most of Σx², in fits, cards and tables."""

import pytest
import torch
from command_line import document, invoke, words
from networks import network_of
from torch import nn

import normscope
from normscope.inputs.batch import Batch, Sample
from normscope.show.tables.card import sink_sentence

D = 16


def texts(sink=0, size=1000.0, number=24, length=10, seed=0):
    """Texts whose token at one position has a channel of a size of its own."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, length, D, generator=generator)
    x *= 0.3 + torch.rand(number, length, 1, generator=generator)
    if sink is not None:
        x[:, sink, 3] = size
    return [Batch((x,), samples=tuple(Sample(f"text {i}", i, i) for i in range(number)))]


def two_norms(net, x):
    return net.second(x + net.first(x))


@pytest.fixture(scope="module")
def network():
    return network_of(two_norms, first=nn.RMSNorm(D), second=nn.LayerNorm(D))


@pytest.fixture(scope="module")
def seen(network):
    return normscope.capture(network, texts(), by_gamma=True, per_channel=True)


@pytest.fixture(scope="module")
def fits(seen):
    return normscope.fit(seen, "tanh")


def test_r2_without_a_sink_is_that_of_a_capture_without_it(network):
    skip, batches = 1, texts(sink=1)
    seen, without = (normscope.capture(network, batches, skip=n) for n in (skip, skip + 1))
    fits = normscope.fit(seen, "tanh,linear,free")
    others = normscope.fit(without, "tanh,linear")
    assert fits["first", "free"].sink.r2_without is None
    for fit in (others[fit.site, fit.curve] for fit in fits if fit.curve != "free"):
        sink = fits[fit.site, fit.curve].sink
        assert (sink.position, sink.curve, sink.r2) == (skip, fit.curve, fits[fit.site, fit.curve].r2)
        assert sink.r2_without == pytest.approx(fit.r2, abs=1e-9)
        assert fit.sink is None
    x = batches[0].args[0].double()
    assert fits["first", "tanh"].sink.share == pytest.approx(
        float(x[:, skip].square().sum() / x[:, skip:].square().sum())
    )


def test_another_position_is_named_with_its_share(network):
    fits = normscope.fit(normscope.capture(network, texts(sink=6)), "tanh")
    assert [(fit.sink.position, fit.sink.r2_without) for fit in fits] == [(6, None), (6, None)]
    assert sink_sentence(fits) == "first: position 6 carries over 99% of Σx²; likewise at 1 further site"


@pytest.mark.parametrize(
    ("sink", "size", "length"),
    [(0, 9.0, 10), (None, 0, 2), (None, 0, 1)],
    ids=["less than half", "two positions", "one position"],
)
def test_positions_with_an_ordinary_share_are_no_sinks(network, sink, size, length):
    fits = normscope.fit(normscope.capture(network, texts(sink, size, length=length), layers=["first"]), "tanh")
    assert [fit.sink for fit in fits] == [None] and sink_sentence(fits) is None


def test_no_sink_is_named_where_positions_are_unknown():
    flat = network_of(lambda net, x: net.norm(x.flatten(0, 1)), norm=nn.LayerNorm(D))
    assert normscope.fit(normscope.capture(flat, texts()), "tanh")[0].sink is None


def test_other_fits_have_no_r2_without_the_sink(seen):
    for options in ({"weights_by": "gamma"}, {"theory": True}):
        assert all(
            fit.sink.position == 0 and fit.sink.r2_without is None for fit in normscope.fit(seen, "tanh", **options)
        )
    assert normscope.fit(seen, "tanh", pool="all")[0].sink is None
    assert normscope.fit(seen, "tanh", per="channel")[0].sink is None


def test_merged_captures_have_the_sinks_of_both(network, tmp_path):
    (x,) = texts(seed=1)[0].args
    others = [Batch((x,), samples=tuple(Sample(f"other {i}", i, i) for i in range(100, 124)))]
    files = [tmp_path / "one.safetensors", tmp_path / "other.safetensors"]
    for file, batches in zip(files, (texts(), others), strict=True):
        normscope.save_capture(normscope.capture(network, batches), file)
    merged = normscope.fit(normscope.merge_captures(files).only(["first"]), "tanh")
    without = normscope.fit(normscope.capture(network, [*texts(), *others], skip=1, layers=["first"]), "tanh")
    assert [fit.sink.r2_without for fit in merged] == pytest.approx([fit.r2 for fit in without], abs=1e-9)


def test_the_norm_card_has_the_sink(seen, fits):
    cards = normscope.norm_cards(seen)
    assert [card.sink for card in cards] == [fit.sink for fit in fits]
    row = cards[0].as_dict()["sink"]
    assert list(row) == ["position", "share", "curve", "r2", "r2_without"] and row == fits[0].as_dict()["sink"]


def test_plot_and_stats_report_the_sink(seen, fits, tmp_path):
    file = normscope.save_capture(seen, tmp_path / "seen.safetensors")
    first, second = fits
    worst = max(first, second, key=lambda fit: fit.sink.r2_without - fit.r2)
    sentence = (
        f"{worst.site}: position 0 carries over 99% of Σx²; without it tanh's R² (of all pairs) is "
        f"{worst.sink.r2_without:.3f} ({worst.r2:.3f} with it): --skip 1; likewise at 1 further site"
    )
    assert sink_sentence([first, second]) == sentence
    assert sentence in words(invoke(f"stats {file}", COLUMNS="200").stdout)
    assert sentence in words(invoke(f"plot {file} -o {tmp_path / 'seen.svg'}").stderr)
    assert "position 0 carries" in (tmp_path / "seen.svg").read_text()


def test_the_option_leaves_the_class_token_out(tmp_path):
    """Of the 16 tokens of demo_vit."""
    rows = document("fit demo_vit --limit 4 --skip 1 --layers norm --func tanh")["fits"]
    assert rows[0]["n_pairs"] == 4 * 15 * 64 and "without the first position of each sample" in rows[0]["data"]
    invoke(f"swap demo_vit --limit 8 --skip 1 --func tanh --layers norm --init fit -o {tmp_path / 'tanh'}")
    assert "without the first position" in (tmp_path / "tanh" / "swap.json").read_text()
    assert "--skip" in invoke("capture -h").stdout
    assert "-1 is not at least 0" in words(invoke("fit demo_vit --skip -1", status=2).output)
