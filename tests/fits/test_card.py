"""The norm card against raw pairs: numpy's percentiles, scipy's kurtosis, and the real modules called on c·x."""

import json
import math

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import torch
from captures import observed
from diffusers.models.normalization import LpNorm
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import OneNorm
from torch import nn

import normscope
from normscope.errors import DataError
from normscope.inputs.held_out import Pool
from normscope.pairs.sums.binning import TOKEN_GRID
from normscope.pairs.sums.magnitudes import of_tokens

D, EPS = 96, 1e-5
ABOUT_THE_MEAN = ("ln", "quiet")
# Tokens are counted in bins an eighth of an octave wide, evenly filled: a third of such a bin is more than any
# percentile of some thousands of tokens is off by.
IN_A_BIN = 0.04


def heavy_tailed(samples=40, tokens=60, seed=0):
    """Tokens of very different mean and σ, with two channels that reach far out."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(*shape, generator=generator)

    x = noise(samples, tokens, D) * torch.exp(0.8 * noise(samples, tokens, 1))
    x[..., 7] *= 20
    x[..., 9] *= -8
    return x + 0.7 * x.std(-1, keepdim=True) * noise(samples, tokens, 1)


def cards_of(model, batches, **options):
    seen, raw = observed(model, batches, **options)
    return {card.site: card for card in normscope.norm_cards(seen)}, raw


@pytest.fixture(scope="module")
def norms():
    return nn.ModuleDict(
        {
            "ln": nn.LayerNorm(D, eps=1e-9),
            "rms": nn.RMSNorm(D, eps=1e-9),
            "quiet": nn.LayerNorm(D, eps=EPS),
            "quiet_rms": nn.RMSNorm(D, eps=EPS),
        }
    )


@pytest.fixture(scope="module")
def found(norms):
    norms.forward = lambda x: [norms[name](x * (3e-3 if "quiet" in name else 1)) for name in norms]
    return cards_of(norms, [heavy_tailed(), heavy_tailed(seed=1)])


def sigma_of(name, x, eps):
    return np.sqrt((x.var(1, unbiased=False) if name in ABOUT_THE_MEAN else x.square().mean(1)).numpy() + eps)


@pytest.mark.parametrize("name", ["ln", "rms"])
def test_offsets_are_those_of_the_raw_tokens(found, name):
    cards, raw = found
    x = raw[name][0]
    offsets = (x.mean(1).abs() / x.std(1, unbiased=False)).numpy()
    own = cards[name].centring
    # For RMSNorm |μ|/√(mean of x²) is counted, of which |μ|/σ takes four times the relative error at |μ|/σ = 2.
    tolerance = IN_A_BIN * (1 if name == "ln" else 1 + np.percentile(offsets, 95) ** 2)
    assert own.offset_p50 == pytest.approx(np.percentile(offsets, 50), rel=tolerance)
    assert own.offset_p95 == pytest.approx(np.percentile(offsets, 95), rel=tolerance)
    share = (x.mean(1).square() / x.square().mean(1)).mean().item()
    # Bins 12 % wide, filled nearly evenly: see test_stated_accuracy.
    assert own.mean_share == pytest.approx(share, rel=5e-3)


def test_the_change_without_centring_is_that_of_torchs_rmsnorm(found):
    cards, raw = found
    x = raw["ln"][0]
    y = nn.LayerNorm(D, eps=0, dtype=torch.float64)(x)
    z = nn.RMSNorm(D, eps=0, dtype=torch.float64)(x)
    off = ((y - z).square().mean(1) / y.square().mean(1)).mean().item()
    assert off > 0.1
    assert cards["ln"].centring.change_without == pytest.approx(off, rel=5e-3)
    assert cards["rms"].centring.change_without is None


@pytest.mark.parametrize("name", ["ln", "quiet_rms"])
def test_sigma_is_that_of_the_raw_tokens(found, name):
    cards, raw = found
    sigma = sigma_of(name, raw[name][0], cards[name].eps)
    own = cards[name].scale
    for share, ours in ((5, own.sigma_p5), (50, own.sigma_p50), (95, own.sigma_p95)):
        assert ours == pytest.approx(np.percentile(sigma, share), rel=IN_A_BIN)
    assert own.spread == own.sigma_p95 / own.sigma_p5


@pytest.mark.parametrize("name", ["quiet", "quiet_rms"])
def test_tokens_touched_by_eps_are_those_with_a_smaller_y(found, norms, name):
    cards, raw = found
    x = raw[name][0]
    with_eps = type(norms[name])(D, eps=EPS, dtype=torch.float64)(x)
    without = type(norms[name])(D, eps=0, dtype=torch.float64)(x)
    touched = (with_eps.norm(dim=1) < 0.99 * without.norm(dim=1)).double().mean().item()
    assert 0.1 < touched < 0.95
    assert cards[name].scale.touched == pytest.approx(touched, abs=0.01)  # few tokens lie within the last bin
    assert cards["ln"].scale.touched == 0


@pytest.mark.parametrize("name", ["ln", "rms", "quiet", "quiet_rms"])
def test_y_of_c_times_x_is_that_of_x_down_to_the_cards_c(found, norms, name):
    cards, raw = found
    x, scale = raw[name][0], cards[name].scale
    norm = type(norms[name])(D, eps=cards[name].eps, dtype=torch.float64)
    for c, share in ((scale.holds_to, 0.01), (scale.holds_to_p50, 0.5)):
        # As far to either side as a percentile of σ may be off.
        assert changed(norm, x, c * (1 + IN_A_BIN)) < share < changed(norm, x, c * (1 - IN_A_BIN))


def changed(norm, x, c):
    """Share of tokens whose y(c·x) is smaller than y(x) by more than 1 %."""
    return (norm(c * x).norm(dim=1) < 0.99 * norm(x).norm(dim=1)).double().mean().item()


def test_an_eps_that_bounds_the_norm():
    eps = 2.0
    rows = heavy_tailed(8).flatten(0, 1) * 0.3
    rows[:24] *= 1e-4
    norm = LpNorm(dim=-1, eps=eps)
    cards, raw = cards_of(nn.Sequential(norm), [rows])
    x, scale = raw["0"][0], cards["0"].scale
    bounded = (x.norm(dim=1) < eps).double().mean().item()
    assert 0.04 < bounded < 0.4
    in_the_bin = ((x.norm(dim=1) / eps).log2().abs() < 0.25).double().mean().item()
    assert bounded <= scale.touched <= bounded + in_the_bin
    assert scale.holds_to == pytest.approx(0.99, rel=IN_A_BIN)
    median = scale.holds_to_p50
    assert changed(norm, x, median * (1 + IN_A_BIN)) < 0.5 < changed(norm, x, median * (1 - IN_A_BIN))


@pytest.mark.parametrize("name", ["ln", "quiet_rms"])
def test_the_linear_range_is_that_of_the_raw_pairs(found, name):
    cards, raw = found
    share, farthest = linear_range(*raw[name])
    assert 0.5 < share < 0.998
    assert not cards[name].straight
    assert cards[name].linear == pytest.approx(share, abs=5e-4)  # half of what a bin there contains
    assert cards[name].linear_up_to == pytest.approx(farthest, rel=1e-3)


def linear_range(x, y):
    """Share and largest |x| of the pairs at which scipy's tanh through all of them is within 5 % of its tangent."""
    x, y = x.flatten().numpy(), y.flatten().numpy()
    start = (np.abs(y).max() / 2, 1 / x.std())
    (_, alpha, s), _ = scipy.optimize.curve_fit(lambda x, scale, a, s: scale * np.tanh(a * x + s), x, y, p0=(*start, 0))
    u = np.abs(alpha * x + s)
    inside = np.tanh(u) >= 0.95 * u
    return np.mean(inside), np.abs(x[inside]).max()


def test_pairs_that_do_not_bend_are_linear_all_over():
    x = nn.LayerNorm(D)(torch.randn(500, D)).detach()  # of σ = 1, all of them
    cards, _ = cards_of(nn.Sequential(nn.LayerNorm(D)), [x])
    assert (cards["0"].straight, cards["0"].linear, cards["0"].linear_up_to) == (True, 1.0, None)


@pytest.mark.parametrize("name", ["ln", "quiet_rms"])
def test_tails_are_those_of_the_raw_pairs(found, name):
    cards, raw = found
    x, tails = raw[name][0], cards[name].tails
    assert (cards[name].n_pairs, cards[name].n_tokens) == (x.numel(), len(x))
    assert {own.channel for own in tails.channels[:2]} == {7, 9}
    size = x.abs()
    assert tails.kurtosis == pytest.approx(scipy.stats.kurtosis(x.numpy(), axis=None, fisher=False), rel=1e-6)
    median = np.median(size)
    assert tails.median == pytest.approx(median, rel=2e-3)  # an eighth of a bin
    assert tails.largest == pytest.approx(size.max().item(), rel=1e-7)
    assert tails.channel == int(size.amax(0).argmax())
    for number, factor in ((tails.beyond_100, 100), (tails.beyond_1000, 1000)):
        least, most = ((size > factor * median * edge).sum().item() for edge in (1.01, 0.99))
        assert least <= number <= most
    shares = x.square().sum(0) / x.square().sum()
    for own, (share, channel) in zip(tails.channels, zip(*shares.topk(4), strict=True), strict=True):
        assert (own.channel, own.share) == (int(channel), pytest.approx(float(share), rel=1e-9))
        assert (own.low, own.high) == (x[:, channel].min().item(), x[:, channel].max().item())
    reach, rows = size.amax(1).sort(descending=True)
    assert [abs(token.x) for token in tails.tokens] == reach[:16].tolist()
    assert [token.channel for token in tails.tokens] == size[rows[:16]].argmax(1).tolist()
    assert all(x[token.sample * 60 + token.position, token.channel].item() == token.x for token in tails.tokens)


def test_massive_activations_are_counted_where_they_were_planted():
    x = torch.randn(6, 10, D, generator=torch.Generator().manual_seed(0)) * 0.1
    x[:, 0, 5] = 1500.0
    x[2, 4, 8] = -160.0
    x[3, 7, 8] = 90.0  # beyond 1000 times the median, and yet not beyond 100
    cards, _ = cards_of(nn.Sequential(nn.LayerNorm(D)), [x[:3], x[3:]])
    tails = cards["0"].tails
    assert (tails.massive, tails.beyond_1000, tails.channel) == (7, 8, 5)
    first = [(token.position, token.channel) for token in tails.tokens[:8]]
    assert first == [(0, 5)] * 6 + [(4, 8), (7, 8)]
    assert [token.sample for token in tails.tokens[6:8]] == [2, 3]
    assert sorted(token.sample for token in tails.tokens[:6]) == list(range(6))
    assert tails.positions[0] == (0, 6)


def test_massive_activations_are_not_counted_without_a_median():
    x = torch.randn(40, D).relu_()
    x[:, ::5] = 0
    tails = cards_of(nn.Sequential(nn.LayerNorm(D)), [x])[0]["0"].tails
    assert (tails.median, tails.beyond_100, tails.beyond_1000, tails.massive) == (0, None, None, None)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(2.0**-20, 1e4, width=32), min_size=1, max_size=60), st.floats(0, 1), st.floats(1e-7, 1e5))
def test_quantiles_and_shares_stay_within_a_bin(values, share, value):
    counts = torch.bincount(TOKEN_GRID.index(torch.tensor(values)), minlength=TOKEN_GRID.size)
    found = of_tokens(counts)
    truth = np.quantile(np.array(values, np.float32), share, method="inverted_cdf")
    assert truth / 1.126 <= found.quantile(share) <= truth * 1.126 or share == 0
    least, most = (sum(own <= value * edge for own in values) for edge in (1 / 1.126, 1.126))
    assert least - 1e-9 <= found.below(value) <= most + 1e-9


def test_norms_with_other_statistics_have_the_numbers_that_apply():
    x = torch.randn(10, 8, 30, generator=torch.Generator().manual_seed(0)) + 0.5
    x[4, 5, 17] = 80
    model = nn.ModuleDict({"group": nn.GroupNorm(2, 8), "batch": nn.BatchNorm1d(8)})
    model.forward = lambda x: [norm(x) for norm in model.values()]
    cards, raw = cards_of(model, [x])
    group, batch = cards["group"], cards["batch"]
    rows = raw["group"][0]
    lost = (nn.LayerNorm(120, 0, dtype=torch.float64)(rows) - nn.RMSNorm(120, 0, dtype=torch.float64)(rows)).square()
    assert group.centring.change_without == pytest.approx(lost.mean().item(), rel=IN_A_BIN)  # of 20 tokens
    first = group.tails.tokens[0]
    assert (first.sample, first.position, first.channel, first.x) == (4, 1, None, 80)
    assert (group.tails.channel, group.tails.channels[0].channel) == (5, 5)
    assert batch.centring is None
    assert (batch.scale.touched, batch.scale.holds_to, batch.scale.holds_to_p50) == (None, None, None)
    assert batch.tails.largest == 80


@pytest.mark.parametrize(
    ("x", "why"),
    [
        (torch.full((3, 8), math.nan), "no finite pair"),
        (torch.full((3, 8), 1.5), "constant input"),
        (torch.arange(8.0)[None], "one token"),
    ],
)
def test_degenerate_sites_have_a_reason(x, why):
    (card,) = normscope.norm_cards(normscope.capture(nn.Sequential(nn.LayerNorm(8)), [x]))
    assert card.degenerate == why
    assert [card.as_dict()[name] for name in ("centring", "scale", "linear", "tails")] == [None] * 4


def test_tokens_that_are_all_mean():
    x = torch.arange(1.0, 31).repeat_interleave(D).view(30, D)
    cards, _ = cards_of(nn.RMSNorm(D, eps=0.0), [x])
    (card,) = cards.values()
    assert card.centring.mean_share == pytest.approx(1, rel=0.07)  # μ/√(mean of x²) is counted in bins
    row = json.loads(json.dumps(card.as_dict(), allow_nan=False))
    assert card.centring.offset_p50 == math.inf and row["centring"]["offset_p50"] is None
    assert row == card.as_dict() and row["scale"]["spread"] == card.scale.spread


def test_sparsity_and_cosine_of_y_are_those_of_the_tokens():
    cards, raw = cards_of(nn.Sequential(nn.LayerNorm(D)), [heavy_tailed(2, 8)])
    y, tails = raw["0"][1].double().numpy(), cards["0"].tails
    squares = -np.sort(-(y**2), axis=1)
    needed = [np.searchsorted(np.cumsum(row), 0.9 * row.sum()) + 1 for row in squares]
    assert tails.elements == pytest.approx(np.median(needed) / D)
    unit = y / np.linalg.norm(y, axis=1, keepdims=True)
    assert tails.cosine == pytest.approx((unit @ unit.T)[np.triu_indices(16, 1)].mean(), rel=1e-6)


@pytest.fixture(scope="module")
def gained():
    """A norm whose γ is zero at channel 7, which carries most of Σx², and negative at channel 9."""
    norm = nn.LayerNorm(D, eps=EPS)
    nn.init.uniform_(norm.weight, 0.5, 2.0, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        norm.weight[7], norm.weight[9] = 0.0, -3.0
    model = OneNorm(norm).eval()
    batches = list(heavy_tailed().split(5))
    (card,) = normscope.norm_cards(normscope.capture(model, batches), model, batches)
    return model, batches, card


def test_leading_channels_have_their_shares_of_the_output(gained):
    model, batches, card = gained
    with torch.no_grad():
        x = torch.cat(batches).reshape(-1, D).double()
        y = nn.functional.layer_norm(x, (D,), eps=EPS)
        gamma = model.norm.weight.double()
    output = (gamma * y).square().sum(0)
    median = np.median(gamma.abs())
    assert len(card.tails.channels) == 4
    for each in card.tails.channels:
        assert each.of_y == pytest.approx(float(y[:, each.channel].square().sum() / y.square().sum()), rel=1e-6)
        assert each.of_output == pytest.approx(float(output[each.channel] / output.sum()), rel=1e-6)
        assert each.gamma == pytest.approx(float(gamma[each.channel]) / median, rel=1e-6)
    first, second = card.tails.channels[:2]
    assert (first.channel, first.of_output, first.gamma) == (7, 0, 0)
    assert second.channel == 9 and second.gamma < 0


def test_r2_of_the_variance_is_that_of_a_regression(gained):
    _, batches, card = gained
    pool = Pool.of(batches)
    learned, judged = (
        torch.cat([batch.args[0] for batch in part]).reshape(-1, D).double().numpy()
        for part in (pool.learned, pool.validation)
    )
    expected = held_out_r2(learned, judged, card.scale.channels, EPS)
    np.testing.assert_allclose(card.scale.r2, expected, atol=1e-6)
    assert len(card.scale.r2) == len(set(card.scale.channels)) == 16
    alone = [held_out_r2(learned, judged, [n], EPS)[0] for n in range(D)]
    assert card.scale.channels[0] == np.argmax(alone) == 7


def held_out_r2(learned, judged, channels, eps):
    """R² of σ² on some tokens by least squares on others, in the first 1, 2, … channels and their squares."""
    r2 = []
    for k in range(1, len(channels) + 1):
        chosen = list(channels[:k])
        design, held = (np.column_stack([np.ones(len(x)), x[:, chosen], x[:, chosen] ** 2]) for x in (learned, judged))
        square, truth = learned.var(1) + eps, judged.var(1) + eps
        slopes = np.linalg.lstsq(design, square, rcond=None)[0]
        r2.append(1 - ((truth - held @ slopes) ** 2).sum() / ((truth - truth.mean()) ** 2).sum())
    return r2


def test_a_second_pass_leaves_out_norms_whose_scale_is_not_the_tokens_own():
    model = nn.Sequential(nn.GroupNorm(4, D), nn.LayerNorm(D)).eval()
    batches = [torch.randn(6, D, generator=torch.Generator().manual_seed(0))]
    group, layer = normscope.norm_cards(normscope.capture(model, batches), model, batches)
    assert (group.scale.r2, group.tails.channels[0].gamma, group.tails.elements, group.tails.cosine) == (
        (),
        *[None] * 3,
    )
    assert [each.gamma for each in layer.tails.channels] == [1, 1, 1, 1] and len(layer.scale.r2) == 16
    seen = normscope.capture(model, batches, layers="0-0")
    (alone,) = normscope.norm_cards(seen, model, batches)
    assert alone.scale.r2 == ()
    with pytest.raises(DataError, match="two"):
        normscope.norm_cards(normscope.capture(model, batches, layers="1-1"), model, [batches[0][:1]])
