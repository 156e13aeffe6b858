"""Sums of the Jacobian's diagonal, against automatic differentiation over all tokens."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from networks import network_of
from torch import nn
from torch.func import jacrev, vmap

import normscope
from normscope.errors import DataError
from normscope.inputs.batch import Sample
from normscope.norms.formulas import root_mean_square, std_norm
from normscope.pairs.sums import reference
from normscope.pairs.sums.binning import PAIR_GRID
from normscope.pairs.sums.sampling import FOLDS, SourcesSeen

D, EPS, POSITIONS = 12, 1e-2, 7


CLAMPED = network_of(lambda self, x: root_mean_square(x, self.eps)[0], "Clamped", eps=2.5)  # some tokens' length
BY_DEVIATION = network_of(lambda self, x: std_norm(x, self.eps)[0], "ByDeviation", eps=EPS)


class Network(nn.Module):
    """A norm of every form, weighted where norms have weights, and two whose diagonal nobody sums."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.rms = nn.LayerNorm(D, eps=EPS), nn.RMSNorm(D, eps=EPS)
        self.clamped, self.deviation = CLAMPED, BY_DEVIATION
        self.one, self.group = nn.LayerNorm(1), nn.GroupNorm(1, POSITIONS)
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, x):
        self.one(x[..., :1])
        self.group(x)
        return [norm(x) for norm in (self.layer, self.rms, self.clamped, self.deviation)]


# What torch itself makes of one token.
TRUTH = {
    "layer": lambda x: F.layer_norm(x, (D,), eps=EPS),
    "rms": lambda x: F.rms_norm(x, (D,), eps=EPS),
    "clamped": lambda x: math.sqrt(D) * F.normalize(x, dim=0, eps=CLAMPED.eps),
    "deviation": lambda x: x / torch.sqrt(torch.var(x) + EPS),
}
NEVER = ("one", "group")


@pytest.fixture(scope="module", autouse=True)
def registered():
    normscope.register_norm(type(CLAMPED), normalize=root_mean_square)
    normscope.register_norm(type(BY_DEVIATION), normalize=std_norm)


def samples(numbers):
    return tuple(Sample(f"photo {number // 2}", number // 2, number, "noise") for number in numbers)


def batch(*numbers, part="", valid=None):
    """Samples whose tokens differ in scale and mean, each two of one source."""
    x = torch.stack([torch.randn(POSITIONS, D, generator=torch.Generator().manual_seed(number)) for number in numbers])
    x = x * torch.linspace(-2, 2, POSITIONS).exp()[:, None] + torch.linspace(-1, 1, POSITIONS)[:, None]
    return normscope.Batch((x,), samples=samples(numbers), part=part, valid=valid)


def whole():
    """Two parts, of which one has padding, and a token that is no number."""
    valid = torch.arange(POSITIONS) < torch.tensor([[7], [4], [6]])
    batches = [batch(0, 1, 2, part="early"), batch(3, 4, 9, part="late", valid=valid), batch(5, 6, part="early")]
    batches[2].args[0][0, 3, 5] = torch.nan
    return batches


def truth(name, x, folds):
    """The sums that pairs (x, ∂y/∂x) of some tokens leave, and those of their magnitudes, ``(folds, 6, bins)``."""
    x = x.double()
    slopes = vmap(jacrev(TRUTH[name]))(x).diagonal(dim1=1, dim2=2)
    bins = folds[:, None] * PAIR_GRID.size + PAIR_GRID.index(x.float())
    return [
        reference.binned_moments(a, b, bins, FOLDS * PAIR_GRID.size).view(6, FOLDS, -1).transpose(0, 1)
        for a, b in ((x, slopes), (x.abs(), slopes.abs()))
    ]


def of_batches(name, batches):
    """The same of the tokens of some batches that are data."""
    rows, folds = [], []
    for one in batches:
        x = one.args[0]
        data = torch.isfinite(x).all(2) & (torch.tensor(True) if one.valid is None else one.valid)
        own = torch.tensor(SourcesSeen("several").folds_of(one.samples))
        rows.append(x[data])
        folds.append(own[:, None].expand(data.shape)[data])
    return truth(name, torch.cat(rows), torch.cat(folds))


def assert_sums(moments, expected):
    sums, terms = expected
    assert torch.equal(moments[:, 0], sums[:, 0])
    # float64 sums in another order, of terms that the two formulas round differently: some 1e-15 of the slopes' size.
    assert ((moments - sums).abs() <= 1e-12 * terms.sum((0, 2), keepdim=True)).all()


def captured(batches, **options):
    # A norm that mixes positions refuses padding.
    layers = [name for name in (*TRUTH, *NEVER) if name != "group" or all(one.valid is None for one in batches)]
    return normscope.capture(Network(), batches, layers=layers, diagonal=True, by_part=True, **options)


@pytest.mark.parametrize("name", TRUTH)
def test_sums_are_those_of_automatic_differentiation(name):
    batches = whole()
    seen = captured(batches, by_gamma=True, per_channel=True)
    stats = seen.stats[name]
    assert stats.diagonal_moments.shape == stats.moments.shape and stats.diagonal_moments.dtype == torch.float64
    assert torch.equal(stats.diagonal_moments[:, 0], stats.moments[:, 0])
    assert int((stats.moments[:, 0].sum(1) > 0).sum()) > 3  # several folds
    assert stats.n_tokens == 3 * POSITIONS + 7 + 4 + 6 + 2 * POSITIONS - 1
    assert_sums(stats.diagonal_moments, of_batches(name, batches))
    for part in ("early", "late"):
        own = [one for one in batches if one.part == part]
        assert_sums(seen.parts[part].stats[name].diagonal_moments, of_batches(name, own))


def test_a_clamped_norm_is_clamped_at_some_tokens():
    lengths = torch.cat([one.args[0].flatten(0, 1) for one in whole()]).norm(dim=1)
    assert (lengths < CLAMPED.eps).any() and (lengths > CLAMPED.eps).any()


def test_folds_of_one_source_become_one_beside_another():
    crops = [dataclasses.replace(batch(number), samples=(Sample("photo", 3, number),)) for number in (0, 1)]
    one = captured(crops)
    assert int((one.stats["layer"].diagonal_moments[:, 0].sum(1) > 0).sum()) == 2
    both = one.merge(captured([batch(4)]))
    moments = both.stats["layer"].diagonal_moments
    assert torch.equal(moments[:, 0], both.stats["layer"].moments[:, 0])
    assert sorted(moments[:, 0].sum(1).tolist())[-3:] == [0, POSITIONS * D, 2 * POSITIONS * D]


def test_two_captures_are_one(tmp_path):
    first, second = [batch(0, 1, 4)], [batch(5, 8), batch(9)]
    merged = captured(first).merge(captured(second))
    files = [normscope.save_capture(captured(own), tmp_path / name) for own, name in ((first, "a"), (second, "b"))]
    for seen in (merged, normscope.merge_captures(files)):
        for name in TRUTH:
            assert_sums(seen.stats[name].diagonal_moments, of_batches(name, first + second))
        for name in NEVER:
            assert seen.stats[name].diagonal_moments is None
    without = normscope.capture(Network(), [batch(12)], layers=[*TRUTH, *NEVER])
    for one, other in ((merged, without), (without, merged)):
        with pytest.raises(DataError, match="Cannot merge sums with diagonal_moments and sums without; capture both"):
            one.merge(other)


def test_norms_that_follow_from_no_form_have_none():
    def by_largest(rows, eps):
        rstd = 1 / (rows.abs().amax(-1, keepdim=True) + eps)
        return rows * rstd, rstd

    norm = network_of(lambda self, x: by_largest(x, self.eps)[0], "ByLargest", eps=EPS)
    normscope.register_norm(type(norm), normalize=by_largest, centred=False)
    model = nn.Sequential(norm, nn.Flatten(0, 1), nn.BatchNorm1d(D), nn.LayerNorm(D)).eval()
    seen = normscope.capture(model, [batch(0, 1).args[0]], diagonal=True)
    assert [stats.diagonal_moments is None for stats in seen.stats.values()] == [True, True, False]


def test_steps_of_bounded_memory_add_up(monkeypatch):
    """A wide batch is taken some tokens at a time."""
    truth = captured([batch(*range(20))])
    monkeypatch.setattr(reference, "_PAIRS_AT_ONCE", 5 * D)
    seen = captured([batch(*range(20))])
    for name in TRUTH:
        ours, theirs = seen.stats[name].diagonal_moments, truth.stats[name].diagonal_moments
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)  # the same terms in another order
