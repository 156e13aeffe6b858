"""Captures without the first positions of each sample, against the raw pairs of the positions that stay."""

import numpy as np
import pytest
import torch
from captures import moments_of, observed
from networks import OneNorm, network_of, numbered_samples
from torch import nn

import normscope
from normscope.errors import DataError, UsageError
from normscope.inputs.batch import Batch
from normscope.pairs.sums import loops, reference

D, LENGTH = 12, 9
EPS = 1e-5
LEFT = [[0] * 3 + [1] * 6, [0] * 8 + [1], [1] * 9, [0] * 9]
RIGHT = [[1] * 6 + [0] * 3, [1] + [0] * 8, [1] * 9, [1] * 2 + [0] * 7]
ALL = [[1] * 9] * 4
HOLES = [[0, 1, 0, 1, 1, 0, 1, 1, 0], [1] * 9, [0, 0, 1, 1, 0, 0, 0, 0, 1], [1, 0, 1, 0, 1, 0, 1, 0, 1]]


def texts(number=4, length=LENGTH, seed=0, d=D):
    """Tokens of different scales, of which the first of each text is large."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, length, d, generator=generator) * torch.rand(number, length, 1, generator=generator)
    x[:, 0] *= 20
    return x


def rows_kept(x, skip, mask=None):
    """The tokens from data position ``skip`` on, sample by sample, by a loop over each."""
    mask = np.ones(x.shape[:2]) if mask is None else np.array(mask)
    kept = [sample[row == 1][skip:] for sample, row in zip(x.double().numpy(), mask, strict=True)]
    return np.concatenate(kept)


def pairs_of(rows):
    """x and y = (x − μ)/σ of a LayerNorm, in float64."""
    return rows, (rows - rows.mean(1, keepdims=True)) / np.sqrt(rows.var(1, keepdims=True) + EPS)


def assert_sums(seen, rows):
    x, y = pairs_of(rows)
    assert (seen.n_tokens, seen.n_pairs) == (len(rows), rows.size)
    truth = moments_of(x.ravel(), y.ravel())
    torch.testing.assert_close(seen.moments.sum(0), truth, rtol=1e-9, atol=1e-9)
    assert seen.channel_sums[1].numpy() == pytest.approx((rows**2).sum(0), rel=1e-9)
    assert seen.channel_extremes.numpy() == pytest.approx(np.stack([rows.min(0), rows.max(0)]), rel=1e-6)
    drawn = {tuple(token) for token in seen.tokens.x.numpy().round(5).tolist()}
    assert drawn <= {tuple(row) for row in rows.astype(np.float32).round(5).tolist()}


@pytest.mark.parametrize("skip", [0, 1, 3])
@pytest.mark.parametrize("mask", [None, LEFT, RIGHT, HOLES], ids=["none", "left", "right", "holes"])
def test_sums_contain_only_later_positions(skip, mask):
    x = texts()
    valid = None if mask is None else torch.tensor(mask, dtype=torch.bool)
    seen = normscope.capture(
        OneNorm(nn.LayerNorm(D)), [Batch((x,), samples=numbered_samples(4), valid=valid)], skip=skip
    )
    sums = seen.stats["norm"]
    assert_sums(sums, rows_kept(x, skip, mask))
    sequences = [sample[row == 1] for sample, row in zip(x.double().numpy(), np.array(mask or ALL), strict=True)]
    truth = np.zeros((2, LENGTH))
    for tokens in sequences:
        for position, token in enumerate(tokens[skip:], skip):
            truth[:, position] += 1, (token**2).sum()
    assert sums.position_sums[:, :LENGTH].numpy() == pytest.approx(truth, rel=1e-9)
    assert not sums.position_sums[:, LENGTH:].any()
    x_first, y_first = pairs_of(np.concatenate([tokens[skip : skip + 1] for tokens in sequences]))
    truth = moments_of(x_first.ravel(), y_first.ravel())
    torch.testing.assert_close(sums.first_moments.mT, truth, rtol=1e-9, atol=1e-9)


def test_the_first_position_and_the_rest_are_the_whole():
    """To rounding, bin by bin; without positions that are left out, on their own."""
    batches = [Batch((texts(seed=n),), samples=numbered_samples(4, 4 * n)) for n in range(3)]
    whole, later = (normscope.capture(OneNorm(nn.LayerNorm(D)), batches, skip=skip).stats["norm"] for skip in (0, 1))
    both = later.moments.sum(0) + whole.first_moments.mT
    torch.testing.assert_close(whole.moments.sum(0), both, rtol=1e-12, atol=1e-12)
    assert whole.position_sums[1].sum() == pytest.approx(float(whole.channel_sums[1].sum()), rel=1e-12)
    assert torch.equal(later.position_sums[:, 1:], whole.position_sums[:, 1:])


def test_all_sums_raw_pairs_and_kept_inputs_omit_them():
    x = texts()
    options = {"by_gamma": True, "per_channel": True, "diagonal": True, "keep_inputs": 1}
    model = OneNorm(nn.LayerNorm(D))
    with torch.no_grad():
        model.norm.weight.copy_(torch.linspace(0.5, 2, D))
    seen, raw = observed(model, [Batch((x,), samples=numbered_samples(4))], skip=2, **options)
    rows, y = pairs_of(rows_kept(x, 2))
    assert raw["norm"][0].numpy() == pytest.approx(rows, rel=1e-6)
    sums, gamma = seen.stats["norm"], torch.linspace(0.5, 2, D).double().numpy()
    weighted = np.broadcast_to(gamma**2, rows.shape)
    assert sums.gamma_moments.sum((0, 2)).numpy() == pytest.approx(
        [(weighted * part).sum() for part in (np.ones_like(rows), rows, y, rows**2, rows * y, y**2)], rel=1e-6
    )
    assert sums.channel_moments[0].sum(1).tolist() == [len(rows)] * D
    assert int(sums.diagonal_moments[:, 0].sum()) == rows.size
    for kept in seen.inputs:
        assert kept.tokens["norm"].sigma.isnan().tolist() == [True, True] + [False] * (LENGTH - 2)


def queries_of_heads(heads_first):
    """Queries by head, (B, H, L, d) or (B, L, H, d), behind a norm of (B, L, 4 · d)."""

    def forward(self, x):
        q = self.norm(x).unflatten(-1, (4, -1))
        return self.q_norm(q.transpose(1, 2) if heads_first else q)

    return network_of(forward, norm=nn.LayerNorm(24), q_norm=nn.LayerNorm(6))


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("mask", [None, LEFT])
def test_norms_of_heads(heads_first, mask):
    x = texts(d=24)
    valid = None if mask is None else torch.tensor(mask, dtype=torch.bool)
    model = queries_of_heads(heads_first)
    seen = normscope.capture(model, [Batch((x,), samples=numbered_samples(4), valid=valid)], skip=1)
    q = model.norm(x).detach().unflatten(-1, (4, -1))
    rows = rows_kept(q.flatten(2), 1, mask).reshape(-1, 6)
    assert seen.stats["q_norm"].n_tokens == len(rows)
    assert float(seen.stats["q_norm"].channel_sums[1].sum()) == pytest.approx(float((rows**2).sum()), rel=1e-9)


@pytest.mark.parametrize("batch", [1, 4])
def test_positions_before_samples_and_channels_before_positions(batch):
    x = texts(batch)
    sequence_first = network_of(lambda net, x: net.norm(x.transpose(0, 1)), norm=nn.LayerNorm(D))
    seen = normscope.capture(sequence_first, [Batch((x,), samples=numbered_samples(batch))], skip=2)
    assert_sums(seen.stats["norm"], rows_kept(x, 2))


def test_a_site_with_fewer_positions_counts_its_own():
    """As behind a merging of patches: the first of three positions, each of two tokens."""
    merging = network_of(
        lambda net, x: net.norm2(net.norm1(x).unflatten(1, (3, 3))[:, :, :2].flatten(2)),
        norm1=nn.LayerNorm(D),
        norm2=nn.LayerNorm(2 * D),
    )
    seen = normscope.capture(merging, [Batch((texts(),), samples=numbered_samples(4))], skip=1)
    assert (seen.stats["norm1"].n_tokens, seen.stats["norm2"].n_tokens) == (4 * 8, 4 * 2)


def windows(net, x):
    return net.windowed(net.whole(x).unflatten(1, (3, 3)).flatten(0, 1))


def of_one_norm(reshaped, norm=None):
    return network_of(lambda net, x: net.norm(reshaped(x)), norm=norm or nn.LayerNorm(D))


REFUSED = {
    "all positions": (of_one_norm(lambda x: x.mT, nn.GroupNorm(2, D)), "norm .its token contains all positions"),
    "statistics": (of_one_norm(lambda x: x.mT, nn.BatchNorm1d(D)), "norm .its token contains all positions"),
    "pooled": (of_one_norm(lambda x: x.mean(1)), r"norm .its input \(1, 12\) of one sample has no axis of positions"),
    "unpadded": (
        of_one_norm(lambda x: x.flatten(0, 1)),
        r"norm .its input \(9, 12\) of one sample has no axis of positions",
    ),
    "a picture": (
        of_one_norm(lambda x: x.unflatten(1, (3, 3))),
        r"norm .its input \(1, 3, 3, 12\) .* positions along several axes",
    ),
    "windows": (
        network_of(windows, whole=nn.LayerNorm(D), windowed=nn.LayerNorm(D)),
        "windowed .*no axis of samples alone",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_norms_without_positions_are_refused_by_name(case):
    model, words = REFUSED[case]
    with pytest.raises(UsageError, match=words):
        normscope.capture(model, [Batch((texts(),), samples=numbered_samples(4))], skip=1)
    normscope.capture(model, [Batch((texts(),), samples=numbered_samples(4))])


def test_as_many_heads_as_positions_are_refused():
    batches = [Batch((texts(length=4, d=24),), samples=numbered_samples(4))]
    with pytest.raises(UsageError, match=r"at q_norm .* heads and positions that cannot be told apart"):
        normscope.capture(queries_of_heads(True), batches, skip=1)
    assert normscope.capture(queries_of_heads(True), batches, layers="norm", skip=1).stats["norm"].n_tokens == 12


def test_wrong_numbers_of_positions_are_refused():
    model, x = OneNorm(nn.LayerNorm(D)), texts()
    with pytest.raises(UsageError, match="skip is -1"):
        normscope.capture(model, [x], skip=-1)
    for skip in ("1", None, 1.5):
        with pytest.raises(UsageError, match=f"skip is {skip!r}: it is a number of positions"):
            normscope.capture(model, [x], skip=skip)
    with pytest.raises(DataError, match="No token is left at norm"):
        normscope.capture(model, [x], skip=LENGTH)
    assert normscope.capture(model, [x], skip=LENGTH - 1).stats["norm"].n_tokens == 4


def test_a_capture_describes_the_positions_it_omits(tmp_path):
    model = OneNorm(nn.LayerNorm(D))
    seen = [
        normscope.capture(model, [Batch((texts(),), samples=numbered_samples(4, 4 * n))], skip=n) for n in (0, 1, 2)
    ]
    again = normscope.load_capture(normscope.save_capture(seen[2], tmp_path / "seen.safetensors"))
    assert (seen[0].skip, again.skip) == (0, 2)
    assert torch.equal(again.stats["norm"].first_moments, seen[2].stats["norm"].first_moments)
    assert "without the first 2 positions of each sample" in repr(again)
    assert again.about["data"].endswith("without the first 2 positions of each sample")
    assert "without" not in repr(seen[0]) and "without" not in seen[0].about["data"]
    with pytest.raises(DataError, match="skip=1 with one with skip=2"):
        seen[1].merge(seen[2])
    merged = seen[1].merge(normscope.capture(model, [Batch((texts(),), samples=numbered_samples(4, 90))], skip=1))
    assert merged.skip == 1 and merged.stats["norm"].position_sums[0, :3].tolist() == [0.0, 8.0, 8.0]


def test_the_reference_and_the_compiled_loop_agree(monkeypatch):
    """Also at a norm with given lines, and where a token has a NaN."""
    x = texts()
    x[1, 0, 3] = torch.nan
    valid = torch.tensor(HOLES, dtype=torch.bool)
    batches = [Batch((x,), samples=numbered_samples(4), valid=valid)]
    for norm in (nn.LayerNorm(D), nn.RMSNorm(D)):
        by_loop = normscope.capture(OneNorm(norm), batches).stats["norm"]
        with monkeypatch.context() as patch:
            patch.setattr(loops, "loop_of", lambda device: reference.add)
            by_reference = normscope.capture(OneNorm(norm), batches).stats["norm"]
        for name in ("position_sums", "first_moments"):
            torch.testing.assert_close(getattr(by_loop, name), getattr(by_reference, name), rtol=1e-9, atol=1e-9)
        assert by_loop.position_sums[0].sum() == by_loop.n_tokens


def test_positions_beyond_the_last_are_counted_together():
    seen = normscope.capture(nn.LayerNorm(2), [torch.randn(1, 4100, 2)]).stats[""]
    assert seen.position_sums[0].tolist()[-2:] == [1.0, 4.0] and seen.position_sums[0].sum() == 4100
