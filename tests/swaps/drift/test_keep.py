"""keep(): the norms whose return lowers the drift most, against brute force, and nothing else touched."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch
from networks import PreNorm, State
from torch import nn

import normscope
from normscope import PointwiseFunction, drift, keep, load_swapped, replacements, save_swapped
from normscope.errors import UsageError
from normscope.figures import plot_keep
from normscope.norms.sites import short_names
from normscope.swaps.drift.keep import MOST_SAMPLES
from normscope.swaps.store.record import read_record


def chain_of(seed, gains=(0.3, 1.0, 0.1, 0.6)):
    """A residual network with four norms, whose branches weigh differently."""
    model = PreNorm(4, 16, 16, seed).eval().requires_grad_(False)
    for gain, layer in zip(gains, model.layers, strict=True):
        layer.weight.mul_(gain), layer.bias.mul_(gain)
    return model


@pytest.fixture(scope="module")
def chain():
    model = chain_of(0)
    for norm in model.norms:
        norm.weight.data.uniform_(0.5, 1.5)
    x = torch.randn(48, 16) * torch.logspace(-1, 1, 48)[:, None]  # tokens of many scales, which a function cannot know
    return model, x[torch.randperm(48)].split(8)


def modules_of(model):
    return {f"norms.{number}": PointwiseFunction("tanh", 16, alpha=0.3 + 0.2 * number) for number in range(4)}


def median(model, batches, modules):
    """The drift with these modules in, by the public function. keep() makes other batches, which round otherwise."""
    moved = drift(model, batches, modules, one_at_a_time=False, cumulative=False).all.relative_l2.p50
    return pytest.approx(moved, rel=1e-5)  # a few units of float32 in each of many products


def test_each_norm_to_keep_is_the_best_beside_those_before_it(chain):
    model, batches = chain
    modules = modules_of(model)
    report = keep(model, batches, modules, number=3)
    assert [(step.kept, step.swapped, step.site) for step in report.steps] == [
        (number, 4 - number, None if number == 0 else report.kept[number - 1]) for number in range(4)
    ]
    assert report.swapped == [path for path in modules if path not in report.kept]
    assert report.steps[0].error.p50 == median(model, batches, modules)
    for number, step in enumerate(report.steps[1:]):
        before = set(report.kept[:number])
        moved = {
            path: median(model, batches, {name: one for name, one in modules.items() if name not in {*before, path}})
            for path in modules
            if path not in before
        }
        least = min(moved, key=lambda path: moved[path].expected)
        assert (step.site, step.error.p50) == (least, moved[least])


def test_the_norm_that_causes_all_drift_is_restored_first():
    """Three sites get functions that are the norms themselves, to the bit: only the fourth moves anything."""
    model = chain_of(1)
    modules = {f"norms.{number}": nn.LayerNorm(16) for number in range(4)}
    modules["norms.2"] = PointwiseFunction("tanh", 16)
    report = keep(model, torch.randn(32, 16).split(8), modules, number=1)
    assert report.kept == ["norms.2"]
    assert report.steps[0].error.p50 > 0 == report.steps[1].error.p50


@pytest.mark.parametrize("share", [1.1, 0.9, 0.5, 0.2])
def test_as_few_norms_as_the_drift_allows(chain, share):
    model, batches = chain
    modules = modules_of(model)
    whole = keep(model, batches, modules, number=3)
    most = share * whole.steps[0].error.p50
    medians = [step.error.p50 for step in whole.steps]
    fewest = next(number for number, error in enumerate(medians) if error <= most)
    report = keep(model, batches, modules, max_drift=most)
    assert (report.kept, len(report.steps)) == (whole.kept[:fewest], fewest + 1)


@pytest.mark.parametrize("needed", [0, 1, 4, 7])
def test_what_works_on_the_rest_decides_where_it_is_given(needed):
    """Halving finds the fewest for which it is enough, whatever that number is, in few trials."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(9) for layer in (nn.Linear(4, 4), nn.LayerNorm(4))])
    modules = {str(2 * number + 1): PointwiseFunction("tanh", 4) for number in range(9)}
    tried = []

    def after(swapped):
        tried.append(9 - len(swapped))
        return 0.1 if 9 - len(swapped) >= needed else 0.9

    report = keep(model, torch.randn(16, 4).split(4), modules, max_drift=0.5, after=after)
    assert len(report.kept) == needed
    assert len(tried) == len(set(tried)) <= 2 * math.ceil(math.log2(9)) + 1
    assert {step.kept: step.worked_on for step in report.steps if step.worked_on is not None} == {
        kept: 0.1 if kept >= needed else 0.9 for kept in tried
    }


def test_held_out_inputs_report_and_do_not_choose(chain):
    model, batches = chain
    modules = modules_of(model)
    others = [3 * batch.flip(1) for batch in batches]
    before = State(model)
    report = keep(model, batches, modules, number=2, held_out=others, quality=lambda module: module.norms[0].weight[0])
    before.assert_same(model)
    assert report.kept == keep(model, batches, modules, number=2).kept
    for kept, step in enumerate(report.steps):
        left = {path: one for path, one in modules.items() if path not in report.kept[:kept]}
        assert step.held_out.p50 == median(model, others, left)
    assert list(report.quality.scores) == ["original", "0 kept", "1 kept", "2 kept"]


def test_it_chooses_on_few_inputs_from_all_over(chain):
    model, _ = chain

    def batches():
        for number in range(100):
            yield torch.full((4, 16), float(number)) + torch.randn(4, 16)

    report = keep(model, list(batches()), modules_of(model), number=1)
    assert MOST_SAMPLES / 2 < report.n_chosen_on <= MOST_SAMPLES


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"number": 4}, "4 norms cannot be kept of 4: take 1 to 3"),
        ({"number": 0}, "0 norms cannot be kept"),
        ({}, "one of the two"),
        ({"number": 1, "max_drift": 0.1}, "one of the two"),
        ({"max_drift": -0.1}, "an error at the output, 0 or more"),
        ({"max_drift": math.nan}, "an error at the output, 0 or more"),
        ({"max_drift": 0.0}, r"With norms\.\d alone swapped, the median error at the output is .*, above 0: no norm"),
        ({"number": 1, "replacements": {}}, "nothing to swap"),
    ],
)
def test_refusals(chain, options, said):
    model, batches = chain
    with pytest.raises(UsageError, match=said):
        keep(**{"model": model, "batches": batches, "replacements": modules_of(model), **options})


@pytest.mark.slow
def test_the_choice_is_saved_shown_and_drawn(tmp_path):
    network = normscope.load("demo_vit", limit=16, device="cpu")
    modules = replacements(network, "dyt", normscope.capture(network, network.calibration))
    report = keep(network, network.calibration, modules, number=2, held_out=network.inputs, func="dyt", init="fit")
    assert report.quality.name == "top-1 accuracy"
    normscope.Swap(network.module, {path: modules[path] for path in report.swapped})
    save_swapped(network.module, tmp_path / "swap", network.about, kept=report)
    record = read_record(tmp_path / "swap")
    assert [one.name for one in record.kept] == report.kept
    medians = [step.error.p50 for step in report.steps]
    assert [(one.swapped, one.kept) for one in record.kept] == list(itertools.pairwise(medians))
    assert "dyt in place of 15 norms" not in record.description and "15 norms, 2 norms kept" in record.description
    for path in report.kept:
        assert isinstance(load_swapped(tmp_path / "swap", device="cpu").module.get_submodule(path), nn.LayerNorm)
    lines = str(report.table()).splitlines()
    assert lines[0].split()[:5] == ["kept", "norm", "put", "back", "swapped"]
    assert [line.split()[0] for line in lines[1:4]] == ["0", "1", "2"] and report.kept[0] in lines[2]
    figure = plot_keep(report)
    drifts, quality = figure.axes
    chosen, held_out = drifts.lines[:2]
    assert [round(x) for x in chosen.get_xdata()] == [0, 1, 2] and list(chosen.get_ydata()) == medians
    assert list(held_out.get_ydata()) == [step.held_out.p50 for step in report.steps]
    names = [tick.get_text() for tick in drifts.get_xticklabels()]
    kept = ["none", *(short_names(report.sites)[path] for path in report.kept)]
    assert names == [f"{number}\n{name}" for number, name in enumerate(kept)]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    samples = (f"{report.n_chosen_on} inputs used to choose", "16 held-out inputs")
    assert legend == [*(f"uncalibrated, {which}" for which in samples), "original"]
    tried = replace(report, steps=[replace(step, worked_on=0.5) for step in report.steps])
    for shown, crosses in ((tried, 3), (replace(tried, calibrated=report.steps[2].error), 2)):
        ax, _ = plot_keep(shown).axes
        assert [line.get_xydata().tolist() for line in ax.lines if line.get_marker() == "X"] == [
            [[kept, 0.5] for kept in range(crosses)]
        ]
    assert [medians[2]] in [list(line.get_ydata()) for line in ax.lines]  # the calibrated swap on held-out inputs
    assert list(quality.lines[0].get_ydata()) == [report.quality.scores[f"{kept} kept"].value for kept in range(3)]
    plt.close(figure)
    normscope.figures.save_figure(figure, Path(tmp_path, "keep.png"), report.about)
