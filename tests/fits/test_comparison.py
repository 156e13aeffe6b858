"""Comparisons are held to raw pairs, to captures that really lack a fold, and to scipy's Student."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import nn

import normscope
from normscope.errors import UsageError
from normscope.fits.comparison import compare, compared, match
from normscope.inputs.batch import as_batches
from normscope.norms.sites import NormSite
from normscope.pairs.sums.sampling import SourcesSeen

D, EPS = 16, 1e-12  # so small that LN(kx) = LN(x) to float32's rounding
ABOUT = {"model": "net", "weights": "made", "data": "noise"}


def noise(seed, tokens=12, samples=32, spread=0.7):
    """Tokens whose norms differ, so that their pairs bend; and samples that differ, so that intervals have a width."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, tokens, D, generator=draw)
    of_token, of_sample = torch.randn(samples, tokens, 1, generator=draw), torch.randn(samples, 1, 1, generator=draw)
    return x * torch.exp(spread * of_token + 0.1 * of_sample)


def network(*names, before=lambda x: x):
    model = nn.Module()
    for name in names:
        model.add_module(name, nn.LayerNorm(D, eps=EPS))
    model.forward = lambda x: [norm(before(x)) for norm in model.children()]
    return model


def captured(x, *names, before=lambda x: x, **about):
    return normscope.capture(network(*names or ("norm",), before=before), [x], about={**ABOUT, **about})


def twice(x):
    return 2 * x


def raw(x):
    x = x.double().numpy().reshape(-1, D)
    y = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + EPS)
    return x.ravel(), y.ravel()


def test_twice_the_input_halves_alpha_and_slope_beyond_all_noise():
    x = noise(0)
    first, second = compare([captured(x), captured(x, before=twice)], "tanh")
    assert (first.number, first.matched, first.alpha, first.r2_of_first) == (1, None, None, None)
    # 1e-5: float32 inputs fall into other bins of the same width once doubled, all else is equal.
    assert second.alpha.value == pytest.approx(0.5, rel=1e-5)
    assert second.slope.value == pytest.approx(0.5, rel=1e-5)
    # The same in every fold, as the inputs are the same: the pairing takes out what both intervals share.
    assert second.alpha.paired and second.alpha.interval == pytest.approx((0.5, 0.5), rel=1e-4)
    low, high = second.fit.intervals["alpha"]
    assert high / low > 1.05
    assert second.alpha.in_noise is False and second.slope.in_noise is False


def test_a_capture_differs_from_itself_in_nothing():
    seen = captured(noise(0))
    _, row = compare([seen, seen], "tanh")
    assert row.alpha.value == row.slope.value == 1
    assert row.alpha.in_noise and row.slope.in_noise
    # 1e-5: the fit's own R² is taken on bins eight times as wide.
    assert row.r2_lost == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("curve, function", [("tanh", np.tanh), ("isru", lambda u: u / np.sqrt(1 + u * u))])
def test_r2_of_the_first_curve_is_that_on_the_second_raw_pairs(curve, function):
    x = 3 * noise(1, spread=1.2) + 0.2
    first, second = compare([captured(noise(0)), captured(x, data="other noise")], curve)
    own_x, own_y = raw(x)
    predicted = first.fit.amplitude * function(first.fit.alpha * own_x + first.fit.shift)
    truth = 1 - ((own_y - predicted) ** 2).sum() / ((own_y - own_y.mean()) ** 2).sum()
    # 1e-5: bins of 1/128 octave stand for their pairs to second order.
    assert second.r2_of_first == pytest.approx(truth, abs=1e-5)
    assert second.r2_lost == pytest.approx(second.fit.r2 - truth, abs=1e-5)
    assert second.r2_lost > 0.05


def test_a_straight_fit_is_transferred_as_the_line_it_makes():
    x = noise(0)
    x = x - x.mean(-1, keepdim=True)
    x = x / x.square().mean(-1, keepdim=True).sqrt()  # y = x, a line through all pairs
    first, second = compare([captured(x), captured(1000 * x, data="louder noise")], "tanh")
    assert first.fit.straight and second.fit.straight
    # It predicts 1000·y, whose mean is 0: R² = 1 − 999². 1e-3: tanh's line is that of a tanh that hardly bends.
    assert second.r2_of_first == pytest.approx(1 - 999**2, rel=1e-3)
    assert second.alpha is None
    assert second.slope.value == pytest.approx(1e-3, rel=1e-5)


@pytest.mark.slow
def test_of_the_same_inputs_each_fold_is_left_out_of_both():
    x = noise(2)

    def later(x):  # what another checkpoint makes of the same samples
        return x * torch.exp(0.3 * x[..., :1].tanh())

    row = compare([captured(x, weights="step 1"), captured(x, before=later, weights="step 2")], "tanh")[1]

    def log_ratio(kept):
        fits = [normscope.fit(captured(inputs[kept]), "tanh")[0] for inputs in (x, later(x))]
        return math.log(fits[1].alpha / fits[0].alpha), math.log(fits[1].slope / fits[0].slope)

    [batch] = as_batches([x])
    fold = torch.tensor(SourcesSeen("several").folds_of(batch.samples))
    whole = log_ratio(fold >= 0)
    without = np.array([log_ratio(fold != f) for f in range(8)])
    # Of folds of one size, the jackknife's textbook form.
    errors = np.sqrt(7 / 8 * ((without - without.mean(0)) ** 2).sum(0))
    for ratio, centre, error in zip((row.alpha, row.slope), whole, errors, strict=True):
        width = stats.t.ppf(0.975, 7) * error
        assert ratio.paired
        # 1e-3 of the width: both are searched to 1e-7 in log α, of intervals that are about 1e-2 wide.
        assert np.log(ratio.interval) == pytest.approx((centre - width, centre + width), abs=1e-3 * width)


OTHER_INPUTS = {
    "other samples": lambda x: captured(noise(3)),
    "another seed": lambda x: normscope.capture(network("norm", before=twice), [x], about=ABOUT, seed=1),
    "three samples": lambda x: captured(noise(3, samples=3)),
}


@pytest.mark.parametrize("other", OTHER_INPUTS)
def test_of_other_inputs_errors_add_up_as_squares_and_the_fewer_folds_count(other):
    rows = compare([captured(noise(0)), OTHER_INPUTS[other](noise(0))], "tanh")
    students = stats.t.ppf(0.975, [7, 2 if other == "three samples" else 7])
    bounds = (row.fit.intervals["alpha"] for row in rows)
    errors = [math.log(high / low) / 2 / t for (low, high), t in zip(bounds, students, strict=True)]
    width = students[1] * math.hypot(*errors)
    value = rows[1].fit.alpha / rows[0].fit.alpha
    assert not rows[1].alpha.paired
    # 1e-6: t is tabulated to seven digits.
    assert rows[1].alpha.interval == pytest.approx((value * math.exp(-width), value * math.exp(width)), rel=1e-6)


def test_ratios_without_a_fit_are_none():
    x = noise(0)
    model = network("a", "b")
    model.forward = lambda x: [model.a(x), model.b(0 * x)]
    seen = [normscope.capture(model, [x], about=ABOUT), captured(x, "a", "b")]
    fits = [normscope.fit(one, "tanh") for one in seen]
    rows = compared(seen, fits).rows
    empty = rows[3]
    assert rows[2].fit.nothing == "all zero"
    assert (empty.counterpart, empty.alpha, empty.slope, empty.r2_of_first, empty.r2_lost) == ("b", *[None] * 4)
    backwards = compared(seen[::-1], fits[::-1]).rows[3]
    assert (backwards.alpha, backwards.r2_of_first) == (None, None)
    assert json.loads(json.dumps(rows[2].as_dict(), allow_nan=False))["nothing"] == "all zero"


def test_without_folds_a_ratio_has_no_interval():
    second = compare([captured(noise(0)[:1]), captured(2 * noise(0)[:1])], "tanh")[1]
    assert second.alpha.value == pytest.approx(0.5, rel=1e-5)
    assert (second.alpha.interval, second.alpha.in_noise) == (None, None)
    row = second.as_dict()
    assert (row["alpha_ratio_in_noise"], row["paired"], row["intervals"]) == (None, None, {})


def test_rows_go_site_by_site_and_sites_without_a_counterpart_are_listed():
    seen = [captured(noise(0), "a", "b"), captured(noise(1), "a", "b", "c", data="others"), captured(noise(0), "a")]
    comparison = compared(seen, [normscope.fit(one, "tanh,isru") for one in seen])
    assert comparison.unmatched() == [
        {"capture": 2, "site": "c", "lacking_in": 1},
        {"capture": 1, "site": "b", "lacking_in": 3},
    ]
    rows = [row.as_dict() for row in comparison.rows]
    places = [(row["counterpart"], row["curve"], row["capture"]) for row in rows]
    numbers = {"a": (1, 2, 3), "b": (1, 2)}
    assert places == [(site, curve, n) for site in "ab" for curve in ("tanh", "isru") for n in numbers[site]]
    assert rows[1]["alpha_ratio"] == rows[1]["alpha"] / rows[0]["alpha"]
    assert rows[1]["intervals"]["alpha_ratio"][0] < rows[1]["alpha_ratio"] < rows[1]["intervals"]["alpha_ratio"][1]
    assert [rows[n]["matched"] for n in (0, 1)] == [None, "name"]


def test_free_is_compared_by_r2_alone():
    seen = [captured(noise(0)), captured(2 * noise(0))]
    second = compare(seen, "free")[1]
    assert (second.alpha, second.slope) == (None, None)
    assert second.r2_of_first < second.fit.r2
    json.dumps(second.as_dict(), allow_nan=False)


def sites(*names, placement="pre-norm"):
    known = ("LayerNorm", (8,), -1, 8, 1e-6, True, placement, 1, 1, True)
    return [NormSite(number, name, *known) for number, name in enumerate(names)]


@pytest.mark.parametrize(
    "first, second, by, counterparts, unmatched",
    [
        (sites("a", "b", "c", "d"), sites("d", "b", "a"), "name", {"a": "a", "b": "b", "d": "d"}, (("c",), ())),
        (  # one name that happens to be shared makes no architecture
            [*sites("blocks.0", "blocks.1"), *sites("norm", placement="final")],
            [*sites("stem.0", "norm", "layers.1"), *sites("ln_f", placement="final")],
            "depth",
            {"blocks.0": "stem.0", "blocks.1": "layers.1", "norm": "ln_f"},
            ((), ("norm",)),
        ),
        (sites("q", placement="qk"), sites("p"), "depth", {}, (("q",), ("p",))),
        (
            [*sites("a", "b"), *sites("c", placement="final")],
            [*sites("p", placement=None), *sites("d", "e", "f", placement="post-norm")],
            "depth",
            {"a": "d", "b": "f"},
            (("c",), ("p", "e")),
        ),
        (
            [*sites("a", "b"), *sites("c", placement="post-norm")],
            sites("d", "e", placement="post-norm"),
            "depth",
            {"c": "d"},
            (("a", "b"), ("e",)),
        ),
        (
            [*sites("a", "b"), *sites("p", placement="post-norm")],
            [*sites("q", "r", placement="post-norm"), *sites("c")],
            "depth",
            {"a": "c", "p": "q"},
            (("b",), ("r",)),
        ),
    ],
    ids=["built alike", "one name", "no placement shared", "pre- and post-norm", "both and post-norm", "both in both"],
)
def test_sites_are_matched_by_name_in_networks_built_alike_and_otherwise_by_depth(
    first, second, by, counterparts, unmatched
):
    matched = match(first, second)
    assert (matched.by, matched.counterparts, matched.unmatched) == (by, counterparts, unmatched)


@given(st.integers(1, 60), st.integers(1, 60))
def test_by_depth_each_site_has_one_counterpart_in_order(here, there):
    first = sites(*(f"a{n}" for n in range(here)))
    second = sites(*(f"b{n}" for n in range(there)))
    pairs = [(int(a[1:]), int(b[1:])) for a, b in match(first, second).counterparts.items()]
    assert len(pairs) == min(here, there)
    assert all(a < c and b < d for (a, b), (c, d) in pairwise(pairs))
    if min(here, there) > 1:
        assert (pairs[0], pairs[-1]) == ((0, 0), (here - 1, there - 1))
        # Nowhere farther apart than the rounding to a whole site of the one that has more of them.
        assert all(abs(a / (here - 1) - b / (there - 1)) <= 0.5 / (max(here, there) - 1) + 1e-12 for a, b in pairs)


@pytest.mark.parametrize(
    "names, curves, sentence",
    [
        (["norm"], "tanh", "two or more captures"),
        (["norm", "norm"], "best", "another at every site"),
        (["norm", "norm"], "thanh", "Did you mean 'tanh'"),
        (["q_norm", "first"], "tanh", "No norm site of net has a counterpart"),
    ],
)
def test_mistakes_are_refused(names, curves, sentence):
    with pytest.raises(UsageError, match=sentence):
        compare([captured(noise(0), name) for name in names], curves)
