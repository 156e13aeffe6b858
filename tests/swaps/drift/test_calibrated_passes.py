"""Drift of calibrated swaps: every row is a calibration of its own, on other inputs, and nothing of it stays."""

import copy

import pytest
import torch
from torch import nn

import normscope
from normscope.errors import DataError, UsageError
from normscope.inputs.batch import Batch, Sample
from normscope.pairs.ranks import ALONE
from normscope.swaps.calibrate.calibrate import calibrate
from normscope.swaps.drift.calibrated_passes import calibrations
from normscope.swaps.pointwise import RMSNorm

SITES = ["1", "3.0", "4"]


class Added(nn.Module):
    """A residual block: a pre-norm, and a layer whose output is added."""

    def __init__(self):
        super().__init__()
        self.add_module("0", nn.LayerNorm(16))
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        return x + self.layer(self.get_submodule("0")(x)).relu()


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 16), Added(), nn.LayerNorm(16), nn.Linear(16, 3)
    )


def batches(number, seed, size=8):
    """Tokens whose size differs by the sample: what a norm takes away, and a function of x alone does not."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 0.5 + 2 * torch.rand(number, size, 1, 1, generator=generator)
    return [
        Batch(
            (scale * torch.randn(size, 5, 6, generator=generator),),
            samples=tuple(Sample(f"{seed} {i}", i, i, f"{seed}") for i in range(n * size, (n + 1) * size)),
        )
        for n, scale in enumerate(sizes)
    ]


LEARN, JUDGE = batches(24, 1), batches(8, 2)


@pytest.fixture(scope="module")
def measured():
    """A network, its start values, and its drift with them and calibrated."""
    model = network()
    seen = normscope.capture(model, LEARN, by_gamma=True)
    modules = normscope.replacements(model, "dyt", seen)
    reports = {
        init: normscope.drift(model, JUDGE, modules, init=init, learn=learn)
        for init, learn in (("fit", None), ("calibrated", LEARN))
    }
    return model, seen, modules, reports


def by_hand(model, seen, sites, **options):
    """The relative L2 of every sample, with a swap that is calibrated as a context."""
    swapped = copy.deepcopy(model)
    moved = []
    with torch.no_grad(), normscope.swap(swapped, "dyt", seen, sites=sites, init="calibrated", learn=LEARN, **options):
        for batch in JUDGE:
            before, after = (one(*batch.args).double().flatten(1) for one in (model, swapped))
            moved += ((after - before).norm(dim=1) / before.norm(dim=1)).tolist()
    return torch.tensor(moved, dtype=torch.float64)


def test_every_row_is_a_calibration_with_its_own_sites_alone(measured):
    model, seen, _, reports = measured
    report = reports["calibrated"]
    order = report.least_harmful(3)
    rows = {tuple(SITES): report.all, **{(row.site,): row for row in report.by_site}}
    rows[tuple(sorted(order[:2]))] = report.cumulative[1]
    assert len(rows) == 5
    for sites, row in rows.items():
        moved = by_hand(model, seen, list(sites))
        # the same float32 passes; of the distances alone are sums in another order, in float64
        assert row.relative_l2.p50 == pytest.approx(float(moved.quantile(0.5)), rel=1e-9)
        assert row.relative_l2.max == pytest.approx(float(moved.max()), rel=1e-9)
        assert row.init == "calibrated" and row.inputs == 64


def test_it_moves_held_out_outputs_less_than_start_values_do(measured):
    _, _, _, reports = measured
    for before, after in zip(reports["fit"].by_site, reports["calibrated"].by_site, strict=True):
        assert after.relative_l2.p50 < before.relative_l2.p50
    assert reports["calibrated"].all.relative_l2.p50 < 0.8 * reports["fit"].all.relative_l2.p50


def test_it_says_what_was_learned_from(measured):
    _, _, _, reports = measured
    told = reports["calibrated"].calibration
    assert reports["fit"].calibration is None
    assert (told.refit, told.n_learned, told.n_judged, told.left_out, told.restored) == ("neighbours", 144, 48, 0, 0)
    document = reports["calibrated"].as_dict()
    assert document["calibration"]["n_learned"] == 144 and reports["fit"].as_dict()["calibration"] is None


def test_the_network_and_the_start_values_stay_to_the_bit(measured):
    model, _, modules, _ = measured
    kept = [copy.deepcopy(one.state_dict()) for one in (model, *modules.values())]
    own, refitted = model[2].weight, []

    def spoil(module):
        refitted.append((type(module[1]) is nn.LayerNorm, torch.equal(module[2].weight, kept[0]["2.weight"])))
        return 0.0

    for quality in (spoil, lambda module: "no number"):
        options = {"init": "calibrated", "learn": LEARN, "cumulative": False, "quality": quality}
        if quality is spoil:
            normscope.drift(model, JUDGE, modules, **options)
            assert refitted == [(True, True), (False, False)]
        else:
            with pytest.raises(UsageError, match="has to return a number"):
                normscope.drift(model, JUDGE, modules, **options)
        for one, before in zip((model, *modules.values()), kept, strict=True):
            now = one.state_dict()
            assert now.keys() == before.keys() and all(torch.equal(now[name], before[name]) for name in now)
        assert model[2].weight is own and isinstance(model[1], nn.LayerNorm)


def test_functions_alone_leave_the_layers(measured):
    model, seen, modules, reports = measured
    seen_layers = []

    def look(module):
        seen_layers.append(torch.equal(module[2].weight, model[2].weight))
        return 0.0

    options = {"init": "calibrated", "learn": LEARN, "refit": "norms", "one_at_a_time": False, "cumulative": False}
    report = normscope.drift(model, JUDGE, modules, quality=look, **options)
    assert seen_layers == [True, True] and report.calibration.refit == "norms"
    moved = by_hand(model, seen, SITES, refit="norms")
    assert report.all.relative_l2.p50 == pytest.approx(float(moved.quantile(0.5)), rel=1e-9)  # float64 sums
    assert reports["calibrated"].all.relative_l2.p50 < report.all.relative_l2.p50 < reports["fit"].all.relative_l2.p50


def test_a_loaded_model_learns_from_its_calibration():
    loaded = normscope.load("demo_vit", limit=32, batch_size=16, device="cpu")
    seen = normscope.capture(loaded, loaded.calibration, by_gamma=True)
    modules = normscope.replacements(loaded, "dyt", seen, sites="5,final")
    reports = [
        normscope.drift(loaded, replacements=modules, init=init, cumulative=False) for init in ("fit", "calibrated")
    ]
    original = copy.deepcopy(loaded.module)
    for path, row in zip(modules, reports[1].by_site, strict=True):
        with torch.no_grad(), normscope.swap(loaded, "dyt", seen, sites=[path], init="calibrated"):
            pairs = [[one(*batch.args) for one in (original, loaded.module)] for batch in loaded.inputs]
        moved = torch.cat([(after - before).norm(dim=1) / before.norm(dim=1) for before, after in pairs])
        assert row.site == path and row.relative_l2.p50 == pytest.approx(
            float(moved.quantile(0.5)), rel=1e-5
        )  # float32
    told = reports[1].calibration
    # At the last norm so few samples lead nowhere, and the row may be that of the start values.
    assert reports[1].by_site[0].relative_l2.p50 < reports[0].by_site[0].relative_l2.p50
    assert told.data.startswith("the first 32 of 1,437 digits") and told.n_learned + told.n_judged == 32
    assert reports[1].about["data"] == "the first 32 of 64 held-out digits"


def test_without_calibration_a_fourth_of_the_sources_is_measured_on():
    loaded = normscope.load("demo_vit", limit=32, batch_size=16, device="cpu")
    alone = normscope.LoadedModel(**{**vars(loaded), "calibration": None})
    seen = normscope.capture(alone, by_gamma=True)
    modules = normscope.replacements(alone, "dyt", seen, sites="final")
    report = normscope.drift(alone, replacements=modules, init="calibrated", one_at_a_time=False, cumulative=False)
    assert report.all.inputs == 8 and report.calibration.n_learned + report.calibration.n_judged == 24
    assert "8 of 32 samples held out" in report.about["data"]
    with pytest.raises(UsageError, match=r"learns from other inputs than the drift is measured on: pass learn="):
        normscope.drift(alone, list(alone.inputs), modules, init="calibrated")


def test_progress_counts_the_sites_of_all_rows(measured):
    model, _, modules, _ = measured
    told = []
    normscope.drift(
        model, JUDGE, modules, func="dyt", init="calibrated", learn=LEARN, progress=lambda *a: told.append(a)
    )
    memory, counted = (
        [one for one in told if one[0].endswith("…")],
        [one for one in told if one[0] == "dyt, calibrated"],
    )
    assert len(memory) == 1 and "wait at each module" in memory[0][0]
    done = [one[1] for one in counted]
    assert done == sorted(done) and done[0] == 0 and done[-1] == calibrations(3) == 3 + 3 + 2
    assert {one[2] for one in counted} == {8}


def test_mistakes_are_sentences(measured):
    model, _, modules, _ = measured
    with pytest.raises(UsageError, match="With init='fit' nothing is calibrated: learn goes with init='calibrated'"):
        normscope.drift(model, JUDGE, modules, init="fit", learn=LEARN)
    with pytest.raises(UsageError, match="With init='paper' nothing is calibrated: refit goes with init='calibrated'"):
        normscope.drift(model, JUDGE, modules, init="paper", refit="norms")
    with pytest.raises(UsageError, match="There is no refit 'all'"):
        normscope.drift(model, JUDGE, modules, init="calibrated", learn=LEARN, refit="all")
    with pytest.raises(UsageError, match="What takes the place of 1 is a RMSNorm: point-wise functions alone are"):
        normscope.drift(model, JUDGE, {"1": RMSNorm(16)}, init="calibrated", learn=LEARN)
    with pytest.raises(DataError, match="no batch to learn from"):
        normscope.drift(model, JUDGE, modules, init="calibrated", learn=[])
    with pytest.raises(UsageError, match="other inputs than the drift is measured on"):
        normscope.drift(model, JUDGE, modules, init="calibrated")
    with pytest.raises(UsageError, match="both are the same here"):
        normscope.drift(model, LEARN, modules, init="calibrated", learn=LEARN)
    with pytest.raises(DataError, match="every calibrated row is measured on all of them; pass a list"):
        normscope.drift(model, iter(JUDGE), modules, init="calibrated", learn=LEARN)
    one = {"one_at_a_time": False, "cumulative": False}
    assert normscope.drift(model, iter(JUDGE), modules, init="calibrated", learn=iter(LEARN), **one).all.inputs == 64


def test_several_processes_are_refused(measured):
    model, _, modules, _ = measured
    two = copy.copy(ALONE)
    object.__setattr__(two, "size", 2)
    with pytest.raises(UsageError, match="Calibration runs in one process, and 2 measure this drift"):
        normscope.drift(model, JUDGE, modules, init="calibrated", learn=LEARN, ranks=two)


def test_a_single_site_is_calibrated_no_further_than_it_reaches():
    """Of the inputs to learn from, the modules behind its neighbours see none."""
    original, seen = network(), []
    swapped = copy.deepcopy(original)
    swapped[1] = normscope.PointwiseFunction("tanh", 16, alpha=0.5)
    for one in (original, swapped):
        one[5].register_forward_hook(lambda module, args, output: seen.append(len(args[0])))
    report = calibrate(original, swapped, LEARN)
    assert [one.path for one in report.modules] == ["1", "2"]
    # the originals of those that decide, the swapped network's before and after, and two passes that look at modules
    assert sum(seen) == 3 * report.n_judged + 2 + 1
