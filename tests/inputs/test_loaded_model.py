"""Loaded models are arguments of every step; their outputs are read as tensors."""

import copy

import pytest
import torch

import normscope
from normscope.errors import ModelError, UsageError
from normscope.inputs.batch import Batch
from normscope.inputs.held_out import learned_and_held_out
from normscope.inputs.loaded_model import Outputs, first_tensor, without_variances


@pytest.fixture(scope="module")
def network():
    return normscope.load("demo_dit", limit=4, timesteps="980,500", device="cpu")


@pytest.fixture(scope="module")
def seen(network):
    return normscope.capture(network, layers="0,5")


def test_a_capture_of_a_loaded_model(network, seen):
    apart = normscope.capture(network.module, network.inputs, layers="0,5", about=network.about)
    assert seen.about == apart.about and seen.about["model"] == "demo_dit"
    assert all(torch.equal(seen.stats[name].moments, own.moments) for name, own in apart.stats.items())


def test_other_batches_replace_the_description(network):
    learned, _ = learned_and_held_out(network.inputs)
    assert normscope.capture(network, learned, layers="0,").about == {
        **normscope.capture(network, layers="0,").about,
        "data": learned.description,
    }
    unnamed = normscope.capture(network, list(network.inputs)[:1], layers="0,").about
    assert (unnamed["model"], unnamed["data"]) == ("demo_dit", "not named")
    mine = normscope.capture(network, layers="0,", about={"weights": "mine"}).about
    assert mine == {**network.about, "weights": "mine", "dtype": "float32"}


@pytest.mark.slow
def test_a_drift_of_a_loaded_model_has_ends_of_trajectories(network, seen):
    modules = normscope.replacements(network, "dyt", seen)
    apart = normscope.drift(
        network.module,
        network.inputs,
        modules,
        outputs=network.outputs,
        ends=network.inputs.ends,
        quality=network.task,
        about=network.about,
    )
    report = normscope.drift(network, replacements=modules)
    assert report.as_dict() == apart.as_dict() and report.end is not None


def test_healing_learns_from_the_calibration_inputs():
    network = normscope.load("demo_vit", limit=8, device="cpu")
    swapped = copy.deepcopy(network.module)
    normscope.swap(swapped, "dyt", normscope.capture(network, layers="final", by_gamma=True))
    again = copy.deepcopy(swapped)
    report = normscope.heal(network, swapped, steps=2)
    own = {"outputs": network.outputs, "quality": network.task}
    apart = normscope.heal(network.module, again, network.calibration, network.inputs, **own, steps=2)
    assert report.about == {**network.about, "data": network.inputs.description}
    assert report.as_dict() == {**report.about, **apart.as_dict()} and not apart.about
    with pytest.raises(UsageError, match="learns from some inputs and is judged by others"):
        normscope.heal(network, swapped, held_out=network.inputs)


@pytest.mark.slow
def test_a_bench_takes_the_first_sample_on_a_cpu(network):
    report = normscope.bench(network, curves="dyt", quick=True)
    assert report.about == {**network.about, "data": f"1 sample of {network.about['data']}"}


@pytest.mark.parametrize("step", [normscope.capture, normscope.bench])
def test_a_module_alone_brings_no_batches(step):
    with pytest.raises(UsageError, match="A LayerNorm brings no batches: pass some"):
        step(torch.nn.LayerNorm(4))
    with pytest.raises(UsageError, match="brings no batches"):
        normscope.drift(torch.nn.LayerNorm(4), replacements={"0": torch.nn.Identity()})


FLOATS, INTEGERS = torch.randn(2, 3), torch.tensor([3, 3])


@pytest.mark.parametrize(
    "returned",
    [
        FLOATS,
        (FLOATS, INTEGERS),
        [INTEGERS, FLOATS],
        {"lengths": INTEGERS, "logits": FLOATS},
        (None, FLOATS, FLOATS + 1),
    ],
)
def test_first_tensor(returned):
    assert first_tensor(returned, Batch()) is FLOATS
    assert Outputs().read(returned, Batch()) is FLOATS


@pytest.mark.parametrize("returned", [INTEGERS, (), None])
def test_outputs_without_a_floating_point_tensor_are_refused(returned):
    kind = type(returned).__name__
    with pytest.raises(ModelError, match=rf"returned a {kind} that contains no floating-point tensor to compare\."):
        first_tensor(returned, Batch())


@pytest.mark.parametrize("shape", [(4, 2, 2), (6,)])
def test_learned_variances_are_omitted(shape):
    latents = torch.randn(2, *shape)
    batch = Batch(kwargs={"hidden_states": latents})
    doubled = torch.cat([latents, torch.randn_like(latents)], dim=1)
    assert torch.equal(without_variances((doubled,), batch), latents)
    assert torch.equal(without_variances({"sample": latents}, batch), latents)
