"""A calibrated swap: what it takes, and that everything it changed comes back."""

import copy

import pytest
import torch
from torch import nn

import normscope
from normscope.errors import UsageError
from normscope.swaps.distances import output_errors


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 24), nn.LayerNorm(24), nn.Linear(24, 24), nn.GELU(), nn.LayerNorm(24), nn.Linear(24, 3)
    )


def batches(number=4):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 5, 6, generator=generator) for _ in range(number)]


def values(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_a_context_gives_back_refitted_layers_to_the_bit():
    model, x = network(), batches()
    seen, before, own = normscope.capture(model, x), values(model), model[2].weight
    with normscope.swap(model, "dyt", seen, init="calibrated", learn=x) as made:
        inside = values(model)
        assert not torch.equal(inside["2.weight"], before["2.weight"])
        assert made.calibration.after < made.calibration.before
        model[5].bias.data.add_(1.0)  # a calibrated layer gets its own back, whatever was done to it since
    assert same(values(model), before) and model[2].weight is own


def test_it_is_what_calibrate_makes_of_a_swapped_copy():
    model, x = network(), batches()
    seen, swapped = normscope.capture(model, x), copy.deepcopy(model)
    normscope.swap(swapped, "dyt", seen)
    normscope.calibrate(model, swapped, x, refit="norms")
    normscope.swap(model, "dyt", seen, init="calibrated", learn=x, refit="norms")
    assert same(values(model), values(swapped))


@pytest.mark.slow
def test_a_loaded_model_learns_from_its_own_calibration():
    loaded = normscope.load("demo_vit", limit=48, batch_size=16, device="cpu")
    inputs = list(loaded.inputs)
    original = copy.deepcopy(loaded.module)
    seen = normscope.capture(loaded, loaded.calibration, by_gamma=True)
    medians = []
    for init in ("fit", "calibrated"):
        with normscope.swap(loaded, "dyt", seen, init=init) as made:
            medians.append(float(output_errors(original, loaded.module, inputs, loaded.outputs).median()))
    assert medians[1] < 0.6 * medians[0]
    assert made.calibration.n_learned + made.calibration.n_judged == 48


@pytest.mark.parametrize("init", ["fit", "calibrated"])
def test_a_swap_that_fails_leaves_the_network_as_it_was(init):
    model, x = network(), batches()
    seen, before = normscope.capture(model, x), values(model)
    options = {"learn": [x[0], "no batch"]} if init == "calibrated" else {"learn": x}
    with pytest.raises(normscope.NormscopeError):
        normscope.swap(model, "dyt", seen, init=init, **options)
    assert same(values(model), before) and isinstance(model[1], nn.LayerNorm)


def test_an_interrupted_calibration_leaves_the_network_as_it_was():
    model, x = network(), batches()
    seen, before, asked = normscope.capture(model, x), values(model), []

    def stop(stage, done, of):
        asked.append(done)
        assert same(values(model), before) and isinstance(model[1], nn.LayerNorm)  # it is a copy that is calibrated
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        normscope.swap(model, "dyt", seen, init="calibrated", learn=x, progress=stop)
    assert asked[-1] == 2 and same(values(model), before)


def test_mistakes_are_sentences():
    model, x = network(), batches()
    seen = normscope.capture(model, x)
    for curve, options, fragment in (
        ("dyt", {"init": "calibrated"}, "learns from inputs, and a Sequential brings none: pass learn="),
        ("dyt", {"init": "theory", "refit": "norms"}, "nothing is calibrated: refit goes with init='calibrated'"),
        ("rmsnorm", {"init": "calibrated", "learn": x}, "There is no calibrated start of rmsnorm"),
    ):
        with pytest.raises(UsageError, match=fragment):
            normscope.swap(model, curve, seen, **options)
    assert isinstance(model[1], nn.LayerNorm)
