"""Token-wise functions whose σ² and μ are predicted from few channels, against regressions by numpy."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from networks import OneNorm, numbered_batches
from torch import nn

import normscope
from normscope.errors import ModelError, UsageError
from normscope.inputs.held_out import Pool
from normscope.pairs.token_sums import POWERS

WIDTH, EPS = 12, 1e-5


def tokens(generator, size):
    """Tokens of scales from 1 to 20 or so, of which channels 3 and 7 carry most, and whose means differ."""
    scale = torch.randn(size, 5, 1, generator=generator).exp()
    x = torch.randn(size, 5, WIDTH, generator=generator) * (0.3 + 0.7 * scale)
    x[..., 3] = 9 * scale[..., 0] + 1
    x[..., 7] = 4 * x[..., 7] - 2
    return x


BATCHES = numbered_batches(12, tokens)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    network = nn.Sequential(OneNorm(nn.LayerNorm(WIDTH, eps=EPS)), nn.Linear(WIDTH, 3)).eval()
    nn.init.normal_(network[0].norm.weight)
    nn.init.normal_(network[0].norm.bias)
    return network


@pytest.fixture(scope="module")
def fit(model):
    (fit,) = normscope.fit_scale(model, BATCHES, "few:2")
    return fit


def rows(batches):
    return torch.cat([batch.args[0] for batch in batches]).reshape(-1, WIDTH).double().numpy()


def regression(x, channels, power):
    """Return coefficients of σ² and μ in 1, x and x² of some channels, and the function that predicts both."""

    def features(x):
        return np.column_stack([np.ones(len(x)), x[:, channels], x[:, channels] ** 2])

    square, mean = x.var(1) + EPS, x.mean(1)
    weight = square ** (-power / 4)  # its square is σ⁻ᵖ
    targets = np.column_stack([square, mean])
    slopes = np.linalg.lstsq(features(x) * weight[:, None], targets * weight[:, None], rcond=None)[0]
    return lambda x: (features(x) @ slopes).T


def held_out_r2(channels, power):
    pool = Pool.of(BATCHES)
    learned, judged = rows(pool.learned), rows(pool.judged)
    predicted, _ = regression(learned, channels, power)(judged)
    square = judged.var(1) + EPS
    weight = square ** (-power / 2)
    mean = (weight * square).sum() / weight.sum()
    return 1 - (weight * (square - predicted) ** 2).sum() / (weight * (square - mean) ** 2).sum()


def test_the_channels_have_the_best_held_out_r2_step_by_step(fit):
    first = [held_out_r2([n], fit.power) for n in range(WIDTH)]
    assert fit.channels[0] == np.argmax(first) == 3
    second = [held_out_r2([3, n], fit.power) if n != 3 else -np.inf for n in range(WIDTH)]
    assert fit.channels[1] == np.argmax(second)
    np.testing.assert_allclose(fit.r2, [max(first), max(second)], atol=1e-6)


def test_the_output_is_that_of_a_weighted_regression_over_all_tokens(model, fit):
    x = rows(BATCHES)
    far = np.concatenate([x[:200], -50 + 0 * x[:1], 1e-3 * x[:1]])  # also of tokens unlike all that were seen
    square, mean = regression(x, list(fit.channels), fit.power)(far)
    square = np.maximum(square, (x.var(1) + EPS).min() / 2)
    norm = model[0].norm
    weight, bias = (part.detach().double().numpy() for part in (norm.weight, norm.bias))
    with normscope.swap(model, "few:2", [fit]), torch.no_grad():
        output = model[0](torch.from_numpy(far).float()).double().numpy()
    np.testing.assert_allclose(
        output, (far - mean[:, None]) / np.sqrt(square)[:, None] * weight + bias, rtol=2e-4, atol=2e-4
    )


def test_the_weights_are_those_of_the_least_held_out_drift(model, fit):
    pool = Pool.of(BATCHES)
    x = torch.from_numpy(rows(BATCHES)), [batch.args[0].double() for batch in pool.judged]
    weight, bias = model[0].norm.weight.double(), model[0].norm.bias.double()
    last, errors = model[1], []
    for power in POWERS:
        channels = normscope_channels(power)
        predict = regression(x[0].numpy(), channels, power)
        floor = float((x[0].var(1, correction=0) + EPS).min()) / 2
        moved = []
        for batch in x[1]:
            square, mean = predict(batch.reshape(-1, WIDTH).numpy())
            mean, square = (torch.from_numpy(each).view(*batch.shape[:2], 1) for each in (mean, square))
            y = (batch - mean) / square.clamp_min(floor).sqrt() * weight + bias
            truth = nn.functional.layer_norm(batch, (WIDTH,), weight, bias, EPS)
            change = (y - truth) @ last.weight.double().T
            original = truth @ last.weight.double().T + last.bias.double()
            moved += (change.flatten(1).norm(dim=1) / original.flatten(1).norm(dim=1)).tolist()
        errors.append(np.median(moved))
    assert POWERS[int(np.argmin(errors))] == fit.power


def normscope_channels(power):
    """The two channels that a search by numpy chooses."""
    first = max(range(WIDTH), key=lambda n: held_out_r2([n], power))
    return [first, max((n for n in range(WIDTH) if n != first), key=lambda n: held_out_r2([first, n], power))]


def test_all_channels_of_an_rmsnorm_are_the_norm_itself():
    """Its σ² is the mean of x², and its μ is zero: both are linear in the features."""
    model = OneNorm(nn.RMSNorm(WIDTH, eps=0.5)).eval()
    fits = normscope.fit_scale(model, BATCHES, f"few:{WIDTH}")
    x = BATCHES[0].args[0]
    with torch.no_grad():
        truth = model(x)
        with normscope.swap(model, f"few:{WIDTH}", fits):
            torch.testing.assert_close(model(x), truth, rtol=1e-4, atol=1e-4)


def test_channels_of_pictures_lie_on_axis_one(model, fit):
    norms = pytest.importorskip("timm.layers.norm")
    pictures = nn.Sequential(norms.LayerNorm2d(WIDTH)).eval()
    pictures[0].load_state_dict(model[0].norm.state_dict())
    x = tokens(torch.Generator().manual_seed(5), 2)
    of_pictures = normscope.fit_scale(pictures, [batch.args[0].mT[..., None] for batch in BATCHES], "few:2")
    with normscope.swap(model, "few:2", [fit]), torch.no_grad():
        of_tokens = model[0](x)
    site = of_pictures[0].norm
    with normscope.swap(pictures, "few:2", [replace(fit, norm=site)]), torch.no_grad():
        torch.testing.assert_close(pictures(x.mT[..., None])[..., 0].mT, of_tokens)


def test_drift_keep_and_the_network_afterwards(model):
    network = normscope.load("demo_vit", device="cpu", limit=8)
    fits = normscope.fit_scale(network, list(network.calibration)[:4], "few:4", layers="0,8,final")
    modules = normscope.replacements(network, "few:4", fits)
    assert [fit.norm.name for fit in fits] == list(modules) == ["blocks.0.norm1", "blocks.4.norm1", "norm"]
    moved = normscope.drift(network, replacements=modules)
    assert 0 < moved.all.relative_l2.p50 < 0.3
    kept = normscope.keep(network, network.inputs, modules, number=1)
    assert kept.steps[1].error.p50 < kept.steps[0].error.p50
    assert not any("predictor" in name for name in network.module.state_dict())
    with normscope.swap(network, "few:4", fits) as swapped:
        assert str(swapped) == "Swap: FewChannelNorm in place of 3 norms of VisionTransformer"
        report = normscope.find_norms(network)
        assert len(report.sites) == 14 and {norm.kind for norm in report.skipped} == {"FewChannelNorm"}


def test_predictions_stay_in_float32_in_half_precision(model, fit):
    x = BATCHES[0].args[0]
    module = normscope.replacements(model, "few:2", [fit])["0.norm"]
    with torch.no_grad():
        truth, half = module(x), module.bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16 and module.weight.dtype == torch.bfloat16
    assert all(part.dtype in (torch.float32, torch.int64) for part in module.predictor.buffers())
    torch.testing.assert_close(half.float(), truth, rtol=0.05, atol=0.05)


GROUPED = nn.Sequential(nn.GroupNorm(4, WIDTH)).eval()


@pytest.mark.parametrize(
    ("call", "fragment"),
    [
        (lambda model, fit: normscope.swap(model, "few", [fit]), r"few:8 takes its own fits: .*inputs, 'few:8'\)"),
        (lambda model, fit: normscope.swap(model, "few:2", normscope.capture(model, BATCHES)), "few:2 takes its own"),
        (lambda model, fit: normscope.swap(model, "frozen", [fit]), r"frozen takes its own fits: .*inputs, 'frozen'\)"),
        (lambda model, fit: normscope.swap(model, "few:0", [fit]), "There is no curve 'few:0'"),
        (lambda model, fit: normscope.swap(model, "few:2", [fit], init="calibrated"), "no calibrated start of few:2"),
        (lambda model, fit: normscope.fit_scale(model, BATCHES, "few:13"), "13 channels cannot be chosen at 0.norm"),
        (lambda model, fit: normscope.fit_scale(model, BATCHES, "dyt"), "fits few:K and frozen, not dyt"),
        (
            lambda model, fit: normscope.fit_scale(GROUPED, [batch.args[0].mT for batch in BATCHES]),
            "A fit of σ cannot take the place of 0: it is a GroupNorm",
        ),
    ],
)
def test_what_cannot_be_is_explained(model, fit, call, fragment):
    with pytest.raises((ModelError, UsageError), match=fragment):
        call(model, fit)
    assert isinstance(model[0].norm, nn.LayerNorm)


def test_norm_modules_alone_are_predicted():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.function = nn.LayerNorm(WIDTH), normscope.DyT(WIDTH)

        def forward(self, x):
            return self.function(x) + self.norm(x) + nn.functional.rms_norm(x, (WIDTH,))

    model = Mixed().eval()
    assert len(normscope.find_norms(model, BATCHES[0]).sites) == 3
    assert [fit.norm.name for fit in normscope.fit_scale(model, BATCHES, "few:2")] == ["norm"]
    with pytest.raises(UsageError, match="a module cannot replace a call"):
        normscope.fit_scale(model, BATCHES, "few:2", layers="*rms_norm*")
