"""Drift against numpy in float64 on small networks, and against single drifts that have to be equal."""

import copy
import json
import math
from contextlib import nullcontext
from dataclasses import astuple, replace

import numpy as np
import pytest
import torch
from networks import PreNorm, State, network_of, numbered_batches, same, values_of
from torch import nn

import normscope
from normscope.errors import DataError, ModelError, UsageError
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.held_out import learned_and_held_out
from normscope.inputs.loaded_model import Outputs
from normscope.pairs.ranks import Ranks
from normscope.swaps.drift.drift import drift
from normscope.swaps.drift.paired_passes import KeptEnds
from normscope.swaps.pointwise import DyISRU, DyT
from normscope.swaps.reports import END, OUTPUT
from normscope.swaps.standalone import RMSNorm

CLASSES = Outputs("classes")


def inputs(n=4, samples=5, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(samples, 8, generator=draw) for _ in range(n)]


def dyts(model):
    return {f"norms.{n}": DyT(8, alpha=0.2 + 0.3 * n) for n in (1, 0, 2)[: len(model.norms)]}


def tokens_of_sizes(generator, size):
    """Tokens whose size differs by the sample: what a norm takes away, and a function of x alone does not."""
    scales = 0.5 + 2 * torch.rand(size, 1, 1, generator=generator)
    return scales * torch.randn(size, 5, 8, generator=generator)


LEARN, JUDGE = (numbered_batches(number, tokens_of_sizes, seed=number, data=f"{number}") for number in (24, 8))


def test_a_linear_layer_and_a_norm_by_hand():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6)).double()
    with torch.no_grad():
        model[1].weight.uniform_(0.5, 2), model[1].bias.uniform_(-1, 1)
    (x,) = inputs(1, 9)
    function = DyISRU(6, C=2.0).double()
    report = drift(model, [x[:4].double(), x[4:].double()], {"1": function}, outputs=CLASSES, func="dyisru")
    weight, bias, gamma, beta = (part.detach().numpy() for part in model.parameters())
    u = x.double().numpy() @ weight.T + bias
    norm = gamma * (u - u.mean(1, keepdims=True)) / np.sqrt(u.var(1, keepdims=True) + 1e-5) + beta
    other = u / np.sqrt(u * u + 2.0)
    moved = np.linalg.norm(other - norm, axis=1) / np.linalg.norm(norm, axis=1)
    angles = (other * norm).sum(1) / np.linalg.norm(other, axis=1) / np.linalg.norm(norm, axis=1)
    row = report.all
    # α is kept in float32, here as exact 1/√2 to 6e-8.
    for quantiles, values in ((row.relative_l2, moved), (row.cosine, angles)):
        expected = np.quantile(values, [0, 0.1, 0.5, 0.9, 1])
        np.testing.assert_allclose(astuple(quantiles)[:5], expected, rtol=1e-6)
    assert row.inputs == row.answers == 9
    assert row.top1 == pytest.approx((norm.argmax(1) == other.argmax(1)).mean())
    assert [one.relative_l2 for one in report.at_sites] == [row.relative_l2]  # the norm is the network's end


def test_identical_copies_move_nothing():
    model = PreNorm()
    copies = {f"norms.{n}": copy.deepcopy(model.norms[n]) for n in range(3)}
    report = drift(model, inputs(), copies, outputs=CLASSES, most=None)
    for row in report.rows:
        assert row.relative_l2.max == 0 and row.cosine.min == 1 and row.inputs == 20
        assert row.at != OUTPUT or (row.kl.max == 0 and row.top1 == row.top5 == row.top5_overlap == 1)
    assert len(report.rows) == 1 + 3 + 3 + 3


def test_each_site_alone_equals_a_drift_of_that_site():
    model, modules = PreNorm(), dyts(PreNorm())
    report = drift(model, inputs(), modules, outputs=CLASSES, func="dyt", init="paper", most=None)
    assert [row.site for row in report.by_site] == list(modules) == list(report.sites)
    for row in report.by_site:
        single = drift(model, inputs(), {row.site: modules[row.site]}, outputs=CLASSES, cumulative=False).all
        assert row == replace(single, func="dyt", init="paper", swapped="one", site=row.site)


def test_the_cumulative_order_is_that_of_each_site_alone():
    model, modules = PreNorm(), dyts(PreNorm())
    report = drift(model, inputs(), modules, most=None)
    order = sorted(report.by_site, key=lambda row: row.relative_l2.p50)
    assert [row.site for row in report.cumulative] == [row.site for row in order] == report.least_harmful(3)
    assert [row.sites_swapped for row in report.cumulative] == [1, 2, 3]
    two = {path: modules[path] for path in report.least_harmful(2)}
    by_hand = [order[0], drift(model, inputs(), two, cumulative=False).all, report.all]
    assert [row.relative_l2 for row in report.cumulative] == [row.relative_l2 for row in by_hand]


def test_a_site_is_compared_at_its_own_output():
    model, modules = PreNorm(), dyts(PreNorm())
    report = drift(model, inputs(1), modules)
    (x,) = inputs(1)
    seen = []
    for norms in (model.norms, [modules[f"norms.{n}"] for n in range(3)]):
        h, given = x, []
        for norm, layer in zip(norms, model.layers, strict=True):
            given.append(norm(h).detach().double().numpy())
            h = h + layer(norm(h)).relu()
        seen.append(given)
    for row in report.at_sites:
        own, other = (given[int(row.at[-1])] for given in seen)
        moved = np.linalg.norm(other - own, axis=1) / np.linalg.norm(own, axis=1)
        assert row.relative_l2.p50 == pytest.approx(np.median(moved), rel=1e-6)  # the norms' own float32


def failing_function():
    def forward(self, input):
        raise ArithmeticError("no more")

    return network_of(forward)


@pytest.mark.parametrize("failing", [{}, {"norms.2": failing_function()}, {"norms.9": DyT(8)}])
def test_the_model_is_restored_also_after_an_exception(failing):
    model = PreNorm().train()
    model.layers[1].eval()
    before, state = State(model), torch.get_rng_state()
    with pytest.raises(ModelError, match=r"ArithmeticError|no module 'norms\.9'") if failing else nullcontext():
        drift(model, inputs(), {**dyts(model), **failing})
    before.assert_same(model)
    assert torch.equal(torch.get_rng_state(), state) and torch.is_grad_enabled()


def test_nan_is_reported_and_not_averaged():
    spoilt = network_of(lambda self, input: torch.where(input[:, :1] > x[2, 0] - 1e-6, input * torch.nan, input))
    x = torch.cat(inputs(4))
    x[2, 0] = x[:, 0].max() + 1
    model = PreNorm()
    report = drift(model, list(x.split(5)), {"norms.0": spoilt, "norms.1": DyT(8)}, outputs=CLASSES)
    row = report.all
    assert (row.inputs, row.nonfinite, row.left_out, row.answers) == (20, 1, 0, 20)
    assert row.relative_l2.max == math.inf == row.kl.max and math.isfinite(row.relative_l2.p90)
    assert row.cosine.min == -math.inf and row.top1 < 1
    document = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert document["rows"][0]["relative_l2"]["max"] is None and document["rows"][0]["nonfinite"] == 1
    assert [one.nonfinite for one in report.by_site] == [1, 0]


def test_each_part_of_the_data_has_a_row():
    samples = tuple(Sample(f"s{n}", n, n) for n in range(5))
    parts = ("timestep 9", "timestep 0")
    batches = [Batch((x,), samples=samples, part=parts[n % 2]) for n, x in enumerate(inputs())]
    model, modules = PreNorm(), dyts(PreNorm())
    report = drift(model, batches, modules, outputs=Outputs("prediction"))
    assert [row.part for row in report.by_part] == list(parts) and not report.rows[0].part  # all of it comes first
    for number, row in enumerate(report.by_part):
        alone = drift(model, inputs()[number::2], modules, cumulative=False, one_at_a_time=False).all
        assert row.relative_l2 == alone.relative_l2 and row.inputs == 10
    assert report.all.inputs == 20 and not report.all.part


def padded_batch():
    """Three samples of 6, 2 and 4 positions."""
    x = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(0))
    samples = tuple(Sample(f"s{n}", n, n) for n in range(3))
    return Batch((x,), samples=samples, valid=torch.arange(6) < torch.tensor([[6], [2], [4]]))


def test_padding_is_excluded_from_every_distance():
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 11)), padded_batch()
    padded = drift(model, [batch], {"1": DyT(8)}, outputs=Outputs("tokens"))
    single = [x[None, valid] for x, valid in zip(batch.args[0], batch.valid, strict=True)]
    alone = drift(model, single, {"1": DyT(8)}, outputs=Outputs("tokens"))
    assert padded.all.answers == alone.all.answers == 12
    for one, other in zip(padded.rows, alone.rows, strict=True):
        # Matrix products of other shapes round differently, in float32.
        assert one.relative_l2.p50 == pytest.approx(other.relative_l2.p50, rel=1e-5)
        assert one.cosine.p10 == pytest.approx(other.cosine.p10, rel=1e-5)
        assert one.kl is None or one.kl.max == pytest.approx(other.kl.max, rel=1e-5)


def test_distances_of_frames_are_those_of_all_sites():
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8))
    batch, functions = padded_batch(), {path: DyT(8) for path in ("0", "2")}
    report = drift(model, [batch], functions, outputs=Outputs("frames"))
    with torch.no_grad():
        original = model(*batch.args)[batch.valid].double()
        swapped = functions["2"](model[1](functions["0"](*batch.args)))[batch.valid].double()
    single = (swapped - original).norm(dim=-1) / original.norm(dim=-1)
    assert report.all.frames.n == 12
    assert report.all.frames.p50 == pytest.approx(np.median(single), rel=1e-5)  # float32 in the network
    assert [row.frames for row in report.rows if row is not report.all] == [None] * (len(report.rows) - 1)


def test_samples_on_the_second_axis_are_compared_one_by_one():
    def forward(self, x):  # (samples, positions, 8), in the middle (positions, samples, 8)
        return self.norm(x.transpose(0, 1)).transpose(0, 1)

    x = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 5.0, 25.0])[:, None, None]
    report = drift(network_of(forward, norm=nn.LayerNorm(8)), [x], {"norm": DyT(8)})
    assert report.at_sites[0].relative_l2 == report.all.relative_l2 and report.all.inputs == 3


def test_a_norm_that_is_called_twice_is_compared_over_both_calls():
    twice = network_of(lambda self, x: torch.cat([self.norm(x), self.norm(2 * x + 1)], 1), norm=nn.LayerNorm(8))
    report = drift(twice, inputs(), {"norm": DyT(8)})
    assert report.at_sites[0].relative_l2.p50 == pytest.approx(report.all.relative_l2.p50, rel=1e-12)


def test_randomness_is_the_same_in_every_pass():
    model = network_of(lambda self, x: self.norm(x + torch.randn_like(x)), norm=nn.LayerNorm(8))
    report = drift(model, inputs(), {"norm": copy.deepcopy(model.norm)}, cumulative=False)
    assert report.all.relative_l2.max == 0


def test_a_norm_that_is_not_called_by_its_path_is_refused():
    norms = nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(8)])
    model = network_of(lambda self, x: self.kept[0](x), norms=norms, kept=[norms[0]])  # no child module of this name
    with pytest.raises(ModelError, match=r"calls the norm 'norms\.0', but not the module"):
        drift(model, inputs(), {"norms.0": DyT(8)})
    with pytest.raises(ModelError, match=r"does not call 'norms\.1'"):
        drift(model, inputs(), {"norms.1": DyT(8)})


def test_ends_of_trajectories_are_computed_with_and_without_the_swap():
    model, (x,) = PreNorm(), inputs(1, 6)
    samples = [Sample(f"s{n}", n, n) for n in range(6)]
    taken = []

    def ends():
        for first in (0, 3):
            taken.append(type(model.norms[0]).__name__)
            with torch.no_grad():
                yield samples[first : first + 3], model(x[first : first + 3])

    report = drift(model, [x], dyts(model), ends=ends)
    assert taken == ["LayerNorm", "PointwiseFunction"] * 2
    assert report.end.at == END and report.end.relative_l2.p50 == pytest.approx(report.all.relative_l2.p50, rel=1e-5)
    assert report.end.inputs == 6 and torch.is_grad_enabled()

    def at_once():
        return list(ends())

    assert drift(model, [x], dyts(model), ends=at_once).end == report.end
    taken.clear()
    kept = KeptEnds(ends)
    assert [drift(model, [x], dyts(model), ends=kept).end for _ in range(3)] == [report.end] * 3
    assert taken == ["LayerNorm", "PointwiseFunction"] * 2 + ["PointwiseFunction"] * 4


@pytest.mark.parametrize(("n_batches", "size", "chosen"), [(8, 4, range(0, 32, 2)), (4, 16, range(0, 64, 4))])
def test_few_samples_are_evenly_spaced(n_batches, size, chosen):
    model, modules, data = PreNorm(), dyts(PreNorm()), inputs(n_batches, size)
    report = drift(model, data, modules, outputs=CLASSES)
    few = [torch.cat(data)[list(chosen)]]
    expected = drift(model, few, modules, outputs=CLASSES, most=None)
    assert report.all.inputs == sum(map(len, data))
    for row, by_hand in zip(report.by_site + report.cumulative, expected.by_site + expected.cumulative, strict=True):
        assert row.site == by_hand.site and row.inputs == by_hand.inputs == len(chosen)
        assert row.relative_l2.p50 == pytest.approx(by_hand.relative_l2.p50, rel=1e-5)  # float32, in other batches


def test_samples_whose_numbers_have_gaps_are_chosen_like_others():
    """One of four digits is held out; a sample of a trajectory has its timestep in its number."""
    loaded = normscope.load("demo_dit", limit=4, timesteps="500,0", device="cpu")
    _, held_out = learned_and_held_out(loaded.inputs)
    seen = normscope.capture(loaded.module, held_out, layers="0,1")
    modules = normscope.replacements(loaded, "dyt", seen)
    report = drift(loaded, held_out, modules, cumulative=False)
    assert [row.inputs for row in report.by_site] == [report.all.inputs] * 2 == [held_out.n_samples] * 2


@pytest.mark.parametrize(
    ("options", "total"),
    [
        ({}, 2 * 20 + 4 * 16 + 3 * 16),
        ({"cumulative": False}, 2 * 20 + 4 * 16),
        ({"cumulative": False, "one_at_a_time": False}, 2 * 20),
        ({"init": "calibrated", "learn": LEARN}, 3 + 3 + 2),  # sites, all, each alone, and two
    ],
)
def test_progress_counts_passes_of_samples_or_calibrated_sites(options, total):
    model, progress = PreNorm(), []
    drift(model, inputs(), dyts(model), func="dyt", progress=lambda *stage: progress.append(stage), **options)
    counts = [done for stage, done, _ in progress if stage.startswith("dyt")]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == total


@pytest.mark.parametrize(
    ("rounds", "number", "message"), [(False, 1, "one_at_a_time"), (True, 7, "number is 7; it has to be from 1 to 3")]
)
def test_least_harmful_sites_need_each_site_alone(rounds, number, message):
    report = drift(PreNorm(), inputs(), dyts(PreNorm()), cumulative=rounds, one_at_a_time=rounds)
    with pytest.raises(UsageError, match=message):
        report.least_harmful(number)


def one_number(result, batch):
    return result.sum()


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"replacements": {}}, UsageError, "nothing to swap"),
        ({"one_at_a_time": False}, UsageError, "cumulative order"),
        ({"batches": iter(inputs())}, DataError, r"iterated only once.* or cumulative=False\."),
        ({"batches": []}, DataError, "no batch"),
        ({"outputs": Outputs("tensor", one_number)}, ModelError, "axis 0 has to count the samples"),
        ({"init": "fit", "learn": inputs()}, UsageError, "learn requires init='calibrated'; with init='fit'"),
        ({"init": "paper", "refit": "norms"}, UsageError, "refit requires init='calibrated'; with init='paper'"),
        (
            {"init": "calibrated", "learn": inputs(), "refit": "all"},
            UsageError,
            "There is no set of refitted weights 'all'",
        ),
        (
            {"init": "calibrated", "learn": inputs(), "replacements": {"norms.1": RMSNorm(8)}},
            *(UsageError, "The replacement of norms.1 is a RMSNorm, and only point-wise functions can"),
        ),
        ({"init": "calibrated", "learn": []}, DataError, "no batch to learn from"),
        ({"init": "calibrated"}, UsageError, "other inputs than the drift is measured on"),
        ({"init": "calibrated", "learn": LEARN, "batches": LEARN}, UsageError, "learn and batches are the same inputs"),
        (
            {"init": "calibrated", "learn": LEARN, "batches": iter(inputs())},
            *(DataError, "are needed several times; pass a list of batches, or one_at_a_time=False and cumulative"),
        ),
        (
            {"init": "calibrated", "learn": LEARN, "ranks": Ranks(0, 2)},
            *(UsageError, "Calibration runs in one process, but 2 measure this drift"),
        ),
    ],
)
def test_refusals(changed, error, message):
    model = PreNorm()
    with pytest.raises(error, match=message):
        drift(**{"model": model, "batches": inputs(), "replacements": dyts(model), **changed})


@pytest.fixture(scope="module")
def measured():
    """A network, its start values, and its drift with them and calibrated."""
    model = PreNorm()
    seen = normscope.capture(model, LEARN, by_gamma=True)
    modules = normscope.replacements(model, "dyt", seen)
    reports = {
        init: normscope.drift(model, JUDGE, modules, init=init, learn=learn, most=None)
        for init, learn in (("fit", None), ("calibrated", LEARN))
    }
    return model, seen, modules, reports


def by_hand(model, seen, sites, **options):
    """The relative L2 of every sample, with a swap that is calibrated as a context."""
    swapped = copy.deepcopy(model)
    moved = []
    with torch.no_grad(), normscope.swap(swapped, "dyt", seen, layers=sites, init="calibrated", learn=LEARN, **options):
        for batch in JUDGE:
            before, after = (one(*batch.args).double().flatten(1) for one in (model, swapped))
            moved += ((after - before).norm(dim=1) / before.norm(dim=1)).tolist()
    return torch.tensor(moved, dtype=torch.float64)


def test_every_row_is_a_calibration_with_its_own_sites_alone(measured):
    model, seen, _, reports = measured
    report = reports["calibrated"]
    order = report.least_harmful(3)
    rows = {tuple(report.sites): report.all, **{(row.site,): row for row in report.by_site}}
    rows[tuple(sorted(order[:2]))] = report.cumulative[1]
    assert len(rows) == 5
    for sites, row in rows.items():
        moved = by_hand(model, seen, list(sites))
        # the same float32 passes; of the distances alone are sums in another order, in float64
        assert row.relative_l2.p50 == pytest.approx(float(moved.quantile(0.5)), rel=1e-9)
        assert row.relative_l2.max == pytest.approx(float(moved.max()), rel=1e-9)
        assert row.init == "calibrated" and row.inputs == 64


def test_calibration_lowers_the_drift_on_held_out_inputs(measured):
    *_, reports = measured
    for before, after in zip(reports["fit"].by_site, reports["calibrated"].by_site, strict=True):
        assert after.relative_l2.p50 < before.relative_l2.p50
    assert reports["calibrated"].all.relative_l2.p50 < 0.85 * reports["fit"].all.relative_l2.p50
    calibration = reports["calibrated"].as_dict()["calibration"]
    assert reports["fit"].as_dict()["calibration"] is None
    assert calibration.pop("data") == "" and calibration.pop("left") == {}
    assert calibration == {"refit": "neighbours", "n_learned": 144, "n_judged": 48, "left_out": 0, "restored": 0}


@pytest.mark.parametrize("fails", [False, True])
def test_calibrated_drift_leaves_network_and_start_values_unchanged(measured, fails):
    model, _, modules, _ = measured
    whole, kept, refitted = State(model), [values_of(module) for module in modules.values()], []

    def quality(module):
        refitted.append((type(module.norms[0]) is nn.LayerNorm, same(values_of(module.layers), layers)))
        return "no number" if fails else 0.0

    layers = values_of(model.layers)
    options = {"init": "calibrated", "learn": LEARN, "cumulative": False}
    with pytest.raises(UsageError, match="return a number") if fails else nullcontext():
        normscope.drift(model, JUDGE, modules, quality=quality, **options)
    whole.assert_same(model)
    assert all(same(values_of(module), before) for module, before in zip(modules.values(), kept, strict=True))
    assert refitted == [(True, True), (False, False)][: 1 if fails else 2]


def test_functions_alone_leave_the_layers(measured):
    model, seen, modules, reports = measured
    seen_layers, layers = [], values_of(model.layers)

    def look(module):
        seen_layers.append(same(values_of(module.layers), layers))
        return 0.0

    options = {"init": "calibrated", "learn": LEARN, "refit": "norms", "one_at_a_time": False, "cumulative": False}
    report = normscope.drift(model, JUDGE, modules, quality=look, **options)
    assert seen_layers == [True, True] and report.calibration.refit == "norms"
    moved = by_hand(model, seen, list(modules), refit="norms")
    assert report.all.relative_l2.p50 == pytest.approx(float(moved.quantile(0.5)), rel=1e-9)  # float64 sums
    assert reports["calibrated"].all.relative_l2.p50 < report.all.relative_l2.p50 < reports["fit"].all.relative_l2.p50


def test_a_loaded_model_learns_from_its_calibration():
    loaded = normscope.load("demo_vit", limit=32, batch_size=16, device="cpu")
    seen = normscope.capture(loaded, loaded.calibration, by_gamma=True, layers="2,final")
    modules = normscope.replacements(loaded, "dyt", seen)
    reports = [
        normscope.drift(loaded, replacements=modules, init=init, cumulative=False, most=None)
        for init in ("fit", "calibrated")
    ]
    calibration = reports[1].calibration
    # At the last norm so few samples lead nowhere, and the row may be that of the start values.
    assert reports[1].by_site[0].relative_l2.p50 < reports[0].by_site[0].relative_l2.p50
    assert calibration.data.startswith("the first 32 of 1,437 digits")
    assert calibration.n_learned + calibration.n_judged == 32
    assert reports[1].about["data"] == "the first 32 of 64 held-out digits"


def test_without_calibration_a_fourth_of_the_sources_is_measured_on():
    loaded = normscope.load("demo_vit", limit=32, batch_size=16, device="cpu")
    alone = replace(loaded, calibration=None)
    modules = normscope.replacements(alone, "dyt", normscope.capture(alone, by_gamma=True, layers="final"))
    report = normscope.drift(alone, replacements=modules, init="calibrated", one_at_a_time=False, cumulative=False)
    assert report.all.inputs == 8 and report.calibration.n_learned + report.calibration.n_judged == 24
    assert "8 of 32 samples held out" in report.about["data"]
    with pytest.raises(UsageError, match=r"than the drift is measured on: pass batches as learn="):
        normscope.drift(alone, list(alone.inputs), modules, init="calibrated")
