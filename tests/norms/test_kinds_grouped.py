"""Norms whose tokens are groups of channels over all positions: GroupNorm, InstanceNorm, BatchNorm."""

import numpy as np
import pytest
import torch
from captures import assert_same_tensors
from networks import numbered_samples
from torch import nn

import normscope
from normscope.errors import DataError
from normscope.inputs.batch import Sample
from normscope.pairs.storage import pack_sums
from normscope.pairs.sums.sampling import GROUPED_WIDTH
from normscope.pairs.sums.stats import PairStats

CHANNELS = 6


def norm(name: str) -> nn.Module:
    """A grouped norm of six channels with trained-like weights and statistics."""
    module = {
        "group": nn.GroupNorm(3, CHANNELS, eps=1e-3),
        "one group": nn.GroupNorm(1, CHANNELS),
        "instance": nn.InstanceNorm1d(CHANNELS, affine=True),
        "running instance": nn.InstanceNorm1d(CHANNELS, affine=True, track_running_stats=True),
        "batch": nn.BatchNorm1d(CHANNELS),
    }[name]
    generator = torch.Generator().manual_seed(2)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    if getattr(module, "running_mean", None) is not None:
        module.running_mean = torch.randn(CHANNELS, generator=generator)
        module.running_var = torch.rand(CHANNELS, generator=generator) + 0.1
    return module


NAMES = ["group", "one group", "instance", "running instance", "batch"]


def inputs(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.tensor([0.1, 1, 3, 0.5, 10, 2])[:, None]
    return [torch.randn(2, CHANNELS, length, generator=generator) * scale + scale.flip(0) for length in lengths]


def raw_y(name: str, module: nn.Module, x: np.ndarray) -> np.ndarray:
    """The definition in float64, over numpy arrays ``(samples, channels, positions)``."""
    if name in ("batch", "running instance"):
        mean, variance = (getattr(module, f"running_{what}").double().numpy()[:, None] for what in ("mean", "var"))
        return (x - mean) / np.sqrt(variance + module.eps)
    groups = {"group": 3, "one group": 1, "instance": CHANNELS}[name]
    rows = x.reshape(len(x), groups, -1)
    y = (rows - rows.mean(-1, keepdims=True)) / np.sqrt(rows.var(-1, keepdims=True) + module.eps)
    return y.reshape(x.shape)


@pytest.mark.parametrize("name", NAMES)
def test_sums_over_tokens_of_different_size_are_exact(name):
    module = norm(name)
    batches = inputs(1, 512, 33) if name not in ("instance", "running instance") else inputs(2, 512, 33)
    seen = normscope.capture(nn.Sequential(module), batches, by_gamma=True, per_channel=True, verify=True)
    assert module.training
    stats, (site,) = seen.stats["0"], seen.sites
    raw = [(x.double().numpy(), raw_y(name, module, x.double().numpy())) for x in batches]
    x, y = (
        np.concatenate([pair[which].transpose(1, 0, 2).reshape(CHANNELS, -1) for pair in raw], 1) for which in (0, 1)
    )
    assert stats.n_pairs == x.size == int(stats.density.sum())
    groups = {"group": 3, "one group": 1}.get(name, CHANNELS)
    assert (stats.n_tokens, stats.grouped, site.grouped, site.channels) == (6 * groups, True, True, CHANNELS)
    assert site.normalized_shape == (CHANNELS // groups, batches[0].shape[-1])
    n, sum_x, sum_y, sum_xx, sum_xy, sum_yy = stats.moments.sum((0, 2)).numpy()
    np.testing.assert_allclose([n, sum_x, sum_xx], [x.size, x.sum(), (x**2).sum()], rtol=1e-9)
    np.testing.assert_allclose([sum_xy, sum_yy], [(x * y).sum(), (y**2).sum()], rtol=1e-5)
    np.testing.assert_allclose(sum_y, y.sum(), atol=1e-6 * np.abs(y).sum())
    np.testing.assert_allclose(stats.channel_sums.numpy(), [x.sum(1), (x**2).sum(1)], rtol=1e-9)
    np.testing.assert_array_equal(stats.channel_extremes.numpy(), [x.min(1), x.max(1)])
    own = stats.channel_moments.sum(2).numpy()
    np.testing.assert_allclose(own[:2], [np.full(CHANNELS, x.shape[1]), x.sum(1)], rtol=1e-9)
    np.testing.assert_allclose(own[5], (y**2).sum(1), rtol=1e-5, atol=1e-6)
    gamma = module.weight.detach().double().numpy()[:, None] ** 2
    np.testing.assert_allclose(stats.gamma_moments.sum((0, 2))[5], (gamma * y**2).sum(), rtol=1e-5)
    assert stats.tokens.x.shape[1] == GROUPED_WIDTH
    assert float(stats.largest.x.abs().max()) == np.abs(x).max().astype(np.float32)


def test_captures_of_different_lengths_merge():
    module = nn.Sequential(norm("group"))
    batches = [
        normscope.Batch((x,), {}, numbered_samples(2, 2 * number)) for number, x in enumerate(inputs(1, 512, 33))
    ]
    options = {"by_gamma": True, "per_channel": True}
    whole = normscope.capture(module, batches, **options)
    one, two = (normscope.capture(module, part, **options) for part in (batches[:1], batches[1:]))
    assert one.sites != two.sites  # of another length each
    assert_same(one.merge(two).stats["0"], whole.stats["0"])
    assert_same(two.merge(one).stats["0"], whole.stats["0"])
    with pytest.raises(DataError, match="gamma_moments"):
        one.merge(normscope.capture(module, batches[1:], per_channel=True))


def assert_same(one: PairStats, other: PairStats) -> None:
    assert_same_tensors(pack_sums(one), pack_sums(other))
    assert (one.sources, one.seed, one.grouped) == (other.sources, other.seed, other.grouped)


def test_each_channel_of_a_batch_norm_is_one_line():
    module = norm("batch")
    seen = normscope.capture(nn.Sequential(module), inputs(100), per_channel=True)
    n, x, y, xx, xy, _ = seen.stats["0"].channel_moments.sum(2)
    slope = (n * xy - x * y) / (n * xx - x**2)
    torch.testing.assert_close(slope.float(), (module.running_var + module.eps).rsqrt(), rtol=1e-5, atol=0)
    assert seen.sites[0].bound == float("inf")


@pytest.mark.parametrize("affine", [True, False])
def test_instance_norms_accept_inputs_without_an_axis_of_samples(affine):
    module = nn.InstanceNorm2d(CHANNELS, affine=affine, eps=1e-3)
    x = torch.randn(CHANNELS, 5, 4, generator=torch.Generator().manual_seed(0))
    one = Sample("picture", 0, 0)
    seen = normscope.capture(nn.Sequential(module), [normscope.Batch((x,), {}, (one,))], verify=True)
    stats, site = seen.stats["0"], seen.sites[0]
    assert (stats.n_tokens, site.channels, site.normalized_shape) == (CHANNELS, CHANNELS, (1, 5, 4))
    torch.testing.assert_close(stats.channel_sums[0].float(), x.sum((1, 2)), rtol=1e-5, atol=1e-5)


def test_instance_norms_of_other_channels_are_skipped():
    model = nn.Sequential(nn.InstanceNorm1d(CHANNELS), nn.LayerNorm(8))
    with pytest.warns(UserWarning, match="num_features"):
        seen = normscope.capture(model, [torch.randn(2, 4, 8)])
    assert [norm.reason for norm in seen.skipped] == ["it was made for 6 channels and takes 4"]


def test_a_norm_is_captured_before_its_activation():
    from timm.layers import BatchNormAct2d, GroupNormAct

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 8, 4, 4, generator=generator) * 3 + 1
    for module, plain in ((GroupNormAct(8, 2), nn.GroupNorm(2, 8)), (BatchNormAct2d(8), nn.BatchNorm2d(8))):
        plain.load_state_dict(module.state_dict())
        acting, bare = (normscope.capture(nn.Sequential(each), [x], verify=True) for each in (module, plain))
        assert_same(acting.stats["0"], bare.stats["0"])
        assert float(acting.stats["0"].moments[:, 5].sum()) > 0 > float(acting.stats["0"].pairs.y.min())
