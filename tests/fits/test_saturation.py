"""Point-wise functions against raw inputs from hooks: numpy's shares, autograd's slopes, planted channels."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from networks import network_of
from torch import nn

import normscope
from normscope.fits.saturation import MODULE, with_modules

D = 24
END = math.atanh(math.sqrt(0.95))  # tanh′ = 1 − tanh² is 0.05 there


def heavy_tailed(seed=0, samples=60):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 40, D, generator=generator)
    return x * torch.exp(0.8 * torch.randn(samples, 40, 1, generator=generator)) + 0.3


def captured(modules, batches, **options):
    """Return a capture of modules that all see the same inputs, and these inputs in float64, by hooks of this test."""
    raw = {}
    network = network_of(lambda self, x: [module(x) for module in self.sites.values()], sites=nn.ModuleDict(modules))
    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=name: raw.setdefault(name, []).append(args[0].double()))
        for name, module in modules.items()
    ]
    with torch.no_grad():
        for batch in batches:
            network(batch)
    for hook in hooks:
        hook.remove()
    seen = normscope.capture(network, batches, **options)
    return seen, {f"sites.{name}": torch.cat(each).flatten(0, -2).numpy() for name, each in raw.items()}


def functions():
    torch.manual_seed(0)
    modules = {
        "dyt": normscope.DyT(D, alpha=0.7),
        "derf": normscope.Derf(D, alpha=0.4, shift=0.3),
        "dyisru": normscope.DyISRU(D, C=2.0),
        "falling": normscope.Derf(D, alpha=-0.6, shift=-0.2),
    }
    for module in modules.values():
        nn.init.normal_(module.weight)
        nn.init.normal_(module.bias)
    return modules


def plain(module, x):
    """The module without weight and bias, for autograd."""
    u = module.alpha.detach().double() * x + (0 if module.shift is None else module.shift.detach().double())
    return {"tanh": torch.tanh, "derf": torch.erf, "isru": lambda u: u / (1 + u * u).sqrt()}[module.curve.name](u)


def slopes(module, x):
    x = torch.as_tensor(x, dtype=torch.float64).requires_grad_()
    return torch.autograd.grad(plain(module, x).sum(), x)[0].numpy()


@pytest.fixture(scope="module")
def everything():
    modules = functions()
    seen, raw = captured(modules, [heavy_tailed(), heavy_tailed(1)])
    return {f"sites.{name}": module for name, module in modules.items()}, normscope.saturation(seen), raw, seen


def test_shares_and_spread_are_those_of_the_raw_inputs(everything):
    modules, records, raw, _ = everything
    assert [record.site for record in records] == list(modules)
    for record in records:
        module, x = modules[record.site], raw[record.site]
        shift = 0.0 if module.shift is None else module.shift.item()
        u = np.abs(module.alpha.item() * x + shift)
        assert record.inverse_std == pytest.approx(1 / x.std(), rel=1e-6)
        assert record.alpha_std == pytest.approx(module.alpha.item() * x.std(), rel=1e-6)
        for end in (1, 2, 3):
            # A bin contains up to 0.5 % of the pairs; by its mean and variance all but a hundredth are placed.
            assert getattr(record, f"beyond_{end}") == pytest.approx(np.mean(u > end), abs=1e-4)
        flat = slopes(module, x)
        peak = np.abs(slopes(module, np.linspace(-9, 9, 100_001))).max()
        assert np.mean(np.abs(flat) < 0.05 * peak) > 0.01
        assert record.saturated == pytest.approx(np.mean(np.abs(flat) < 0.05 * peak), abs=1e-4)


def test_parameters_are_those_of_the_modules_and_the_slope_is_autograds(everything):
    modules, records, _, _ = everything
    for record in records:
        module = modules[record.site]
        weight = module.weight.detach().abs().double().numpy()
        expected = [np.percentile(weight, share) for share in (50, 5, 95)]
        assert dataclasses.astuple(record.weight) == pytest.approx(expected)
        assert dataclasses.astuple(record.alpha) == pytest.approx([module.alpha.item()] * 3)
        assert record.shift.p50 == pytest.approx(0 if module.shift is None else module.shift.item())
        assert record.slope.p50 == pytest.approx(slopes(module, [0.0]).item(), rel=1e-6)
        assert (record.stuck, record.dead) == ([], [])


def test_a_different_scale_for_each_channel():
    alpha = torch.linspace(0.05, 2, D)
    module = normscope.PointwiseFunction("tanh", D, alpha=alpha, shift=0.2)
    seen, raw = captured({"dyt": module}, [heavy_tailed()])
    (record,) = normscope.saturation(seen)
    u = alpha.numpy() * raw["sites.dyt"] + 0.2
    assert dataclasses.astuple(record.alpha) == pytest.approx(np.percentile(alpha.numpy(), (50, 5, 95)).tolist())
    # A bin is a quarter of an octave here.
    shares = [record.beyond_1, record.beyond_2, record.beyond_3, record.saturated]
    assert shares == pytest.approx([np.mean(np.abs(u) > end) for end in (1, 2, 3, END)], abs=1e-3)
    assert record.alpha_std == pytest.approx(np.median(alpha) * raw["sites.dyt"].std(), rel=1e-6)
    ((fit,),) = [[fit for fit in with_modules(seen, []) if fit.curve == MODULE]]
    assert fit.alpha == record.alpha.p50


def test_channels_that_are_always_saturated_and_channels_of_constant_output():
    x = heavy_tailed().clamp(-1, 1)
    x[..., 2] = 1.01 * END + x[..., 2].abs()
    x[..., 3] = -1.01 * END - x[..., 3].abs()
    x[..., 4] = 0.99 * END + x[..., 4].abs()  # nearly: one pair may be inside
    x[0, 0, 4] = 0.99 * END
    x[..., 5] = 9.0 * x[..., 5].sign() + x[..., 5]  # beyond both ends, in turn
    x[..., 6] = 0.5
    x[..., 7] = 5.0
    modules = {"dyt": normscope.DyT(D, alpha=1.0), "falling": normscope.Derf(D, alpha=-1.0, shift=0.5)}
    with torch.no_grad():
        modules["dyt"].weight[8] = 0
    seen, _ = captured(modules, [x])
    dyt, falling = normscope.saturation(seen)
    assert dyt.stuck == [2, 3, 7]
    assert dyt.dead == [6, 7, 8]
    ends = 1.7308  # erf′ = 2/√π·exp(−u²) is 5 % of its peak where u² = ln 20
    assert ends == pytest.approx(math.sqrt(math.log(20)), abs=1e-4)
    u = -x.flatten(0, 1) + 0.5
    assert falling.stuck == np.flatnonzero((u.amax(0) < -ends) | (u.amin(0) > ends)).tolist() == [3, 7]


def test_a_module_that_is_switched_off_is_dead_everywhere():
    seen, _ = captured({"dyt": normscope.DyT(D), "norm": nn.LayerNorm(D)}, [heavy_tailed()])
    site = dataclasses.replace(seen.sites[0].pointwise, alpha=(0.0,), shift=(1.5,))
    seen.sites[0] = dataclasses.replace(seen.sites[0], pointwise=site)
    (record,) = normscope.saturation(seen)
    assert record.dead == list(range(D))
    assert (record.beyond_1, record.beyond_2, record.saturated, record.alpha_std) == (1, 0, 0, 0)


def test_a_table_of_values_has_no_slope_and_norms_have_no_record():
    seen, raw = captured({"norm": nn.LayerNorm(D), "dyt": normscope.DyT(D, alpha=1.0)}, [heavy_tailed()])
    table = dataclasses.replace(seen.sites[1].pointwise, curve="free")
    seen.sites[1] = dataclasses.replace(seen.sites[1], pointwise=table)
    (record,) = normscope.saturation(seen)
    assert record.site == "sites.dyt"
    assert (record.slope, record.saturated, record.stuck) == (None, None, None)
    assert record.beyond_1 == pytest.approx(np.mean(np.abs(raw["sites.dyt"]) > 1), abs=1e-3)
    assert {fit.curve for fit in with_modules(seen, [])} == set()
    (norm, card) = normscope.norm_cards(seen)
    assert norm.saturation is None and norm.scale is not None
    assert card.saturation == record and (card.centring, card.scale, card.linear) == (None, None, None)
    assert card.tails.largest == pytest.approx(np.abs(raw["sites.dyt"]).max())


def test_without_a_finite_pair_only_the_parameters_remain():
    seen = normscope.capture(nn.Sequential(normscope.DyT(4, alpha=0.25)), [torch.full((3, 4), math.nan)])
    (record,) = normscope.saturation(seen)
    row = record.as_dict()
    assert row["alpha"] == {"p50": 0.25, "p5": 0.25, "p95": 0.25}
    assert [row[name] for name in ("beyond_1", "saturated", "inverse_std", "alpha_std")] == [None] * 4
    assert (row["stuck"], row["dead"]) == ([], [])
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    (card,) = normscope.norm_cards(seen)
    assert card.degenerate == "no finite pair" and card.as_dict()["saturation"] == row


def test_the_modules_own_function_joins_its_fits(everything):
    modules, records, _, seen = everything
    fits = normscope.fit(seen, "tanh,derf")
    shown = with_modules(seen, fits)
    assert [fit.site for fit in shown] == [site for site in modules for _ in range(3)]
    own = [fit for fit in shown if fit.curve == MODULE]
    assert [(fit.amplitude, fit.parameters) for fit in own] == [(1, 0)] * 4
    for fit, record in zip(own, records, strict=True):
        assert (fit.alpha, fit.shift, fit.saturated) == (record.alpha.p50, record.shift.p50, record.saturated)
        assert fit.slope == pytest.approx(record.slope.p50)
        x = torch.linspace(-3, 3, 7, dtype=torch.float64)
        torch.testing.assert_close(fit(x), plain(modules[fit.site], x).detach())
    # The fit of the module's own curve finds it.
    tanh = fits["sites.dyt", "tanh"]
    assert fits["sites.dyt", "dyt"] is tanh
    assert (tanh.amplitude, tanh.alpha) == pytest.approx((1, 0.7), rel=1e-3)
    assert tanh.saturated == pytest.approx(own[0].saturated, abs=2e-3)


def test_a_comparison_follows_the_modules_own_scale():
    def step(alpha, scale):
        module = normscope.DyT(D, alpha=alpha)
        return captured({"norm": nn.LayerNorm(D), "dyt": module}, [scale * heavy_tailed()])[0]

    rows = normscope.compare([step(0.5, 1), step(0.8, 1), step(0.8, 2)], "tanh")
    own = [row for row in rows if row.curve == MODULE]
    assert [(row.site, row.number) for row in own] == [("sites.dyt", number) for number in (1, 2, 3)]
    assert [row.alpha and row.alpha.value for row in own] == [None, pytest.approx(1.6), pytest.approx(1.6)]
    assert own[1].alpha.interval is None  # it was not fitted
    assert own[0].fit.saturated < own[1].fit.saturated < own[2].fit.saturated
    assert own[2].as_dict()["saturated"] == own[2].fit.saturated
    assert [row.site for row in rows if row.curve == "tanh"] == ["sites.norm"] * 3 + ["sites.dyt"] * 3
