"""Calibration: what it brings, what it leaves alone, and where it stays what it was."""

import copy

import pytest
import torch
from torch import nn

import normscope
from normscope.errors import UsageError
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.loaded_model import Outputs
from normscope.inputs.splits import divided
from normscope.swaps.calibrate.calibrate import calibrate
from normscope.swaps.drift.output_errors import output_errors


def batches(number, x_of, size=8):
    generator = torch.Generator().manual_seed(0)
    return [
        Batch((x_of(generator, size),), samples=tuple(Sample(f"{i}", i, i) for i in range(n * size, (n + 1) * size)))
        for n in range(number)
    ]


def drift(original, swapped, inputs, outputs=None):
    """The median relative L2, of logits too."""
    outputs = Outputs() if outputs is None else Outputs(read=outputs.read)
    return float(output_errors(original, swapped, inputs, outputs).median())


@pytest.fixture(scope="module")
def vit():
    """demo_vit, batches to learn from and held-out ones, and a capture of the former."""
    network = normscope.load("demo_vit", limit=160, batch_size=16, device="cpu")
    learn, held_out = divided(network.inputs, network.calibration)
    learn, held_out = list(learn)[:12], list(held_out)[:3]
    return network, learn, held_out, normscope.capture(network, learn, by_gamma=True)


def swapped_vit(vit, **options):
    network, _, _, seen = vit
    module = copy.deepcopy(network.module)
    normscope.swap(module, "dyt", seen, **options)
    return module


def test_a_norm_of_tokens_of_one_size_is_taken_over_exactly():
    """With every token of one mean and σ, a LayerNorm is a straight line, and so a straight line takes its place."""

    def of_one_size(generator, size):
        signs = torch.tensor([1.0, 1, 1, 1, -1, -1, -1, -1])
        orders = torch.stack([torch.randperm(8, generator=generator) for _ in range(size * 4)])
        return (2 * signs[orders] + 3).reshape(size, 4, 8)

    torch.manual_seed(0)
    original = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).requires_grad_(False)
    learn = batches(8, of_one_size)
    swapped = copy.deepcopy(original)
    swapped[0] = normscope.PointwiseFunction("linear", 8, alpha=0.1)
    report = calibrate(original, swapped, learn)
    assert report.before > 0.5 and report.after < 1e-3  # float32, and a ridge that shrinks
    assert not report.restored


@pytest.mark.slow
def test_most_of_a_vits_drift_goes_on_inputs_that_nothing_was_learned_from(vit):
    network, learn, held_out, _ = vit
    found = {}
    for refit in ("norms", "neighbours"):
        swapped = swapped_vit(vit)
        before = drift(network.module, swapped, held_out, network.outputs)
        # As features: by their KL divergence, functions alone make a tenth of these digits worse, and are put back.
        report = calibrate(network, swapped, learn, refit=refit, outputs=Outputs(read=network.outputs.read))
        found[refit] = drift(network.module, swapped, held_out, network.outputs) / before
        assert report.after < report.before and not report.restored
        assert all(one.after <= one.before for one in report.modules)
        assert (report.n_learned, report.n_judged) == (120, 40)
    assert found["neighbours"] < 0.45 < found["norms"] < 0.9


def test_the_original_stays_and_norms_alone_leave_layers_to_the_bit(vit):
    network, learn, _, _ = vit
    original = {name: value.clone() for name, value in network.module.state_dict().items()}
    swapped = swapped_vit(vit)
    calibrate(network, swapped, learn[:3], refit="norms")
    for name, value in network.module.state_dict().items():
        assert torch.equal(value, original[name]), name
    for name, value in swapped.state_dict().items():
        if "norm" not in name:
            assert torch.equal(value, original[name]), name


def test_one_site_refits_the_layers_beside_it(vit):
    network, learn, _, _ = vit
    swapped = swapped_vit(vit, sites="final")
    report = calibrate(network, swapped, learn[:4])
    before = swapped_vit(vit, sites="final").state_dict()
    changed = {name for name, value in swapped.state_dict().items() if not torch.equal(value, before[name])}
    assert {one.path for one in report.modules} == {"norm", "head"}
    assert changed <= {"norm.alpha", "norm.shift", "norm.weight", "norm.bias", "head.weight", "head.bias"}


@pytest.mark.slow
def test_the_same_call_gives_the_same_bits(vit):
    network, learn, _, _ = vit
    states = []
    for _ in range(2):
        swapped = swapped_vit(vit)
        calibrate(network, swapped, learn[:3])
        states.append(swapped.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_what_is_no_better_at_the_output_is_put_back(vit, monkeypatch):
    network, learn, _, _ = vit
    swapped = swapped_vit(vit)
    start = {name: value.clone() for name, value in swapped.state_dict().items()}
    found = iter([(0.1, 0.2), (0.2, 0.2), (0.1, 0.2)])
    module = __import__("normscope.swaps.calibrate.calibrate", fromlist=["calibrate"])
    monkeypatch.setattr(module, "_quantiles", lambda *given: next(found))
    report = calibrate(network, swapped, learn[:3])
    assert report.restored and (report.before, report.after) == (0.1, 0.1)
    assert all(torch.equal(value, start[name]) for name, value in swapped.state_dict().items())


def test_padding_is_learned_from_by_nothing():
    """What stands in padding changes no weight."""
    torch.manual_seed(0)
    original = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4)).requires_grad_(False)
    states = []
    for padding in (0.0, 50.0):
        learn = batches(6, lambda generator, size: torch.randn(size, 5, 8, generator=generator) * 3)
        valid = torch.ones(8, 5, dtype=torch.bool)
        valid[:, 3:] = False
        for batch in learn:
            batch.args[0][:, 3:] = padding
        padded = [Batch(batch.args, samples=batch.samples, valid=valid) for batch in learn]
        swapped = copy.deepcopy(original)
        swapped[0] = normscope.PointwiseFunction("tanh", 8, alpha=0.2)
        calibrate(original, swapped, padded)
        states.append(swapped.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_mistakes_are_sentences(vit):
    network, learn, _, _ = vit
    with pytest.raises(UsageError, match="Nothing was swapped: calibrate takes the original and a copy"):
        calibrate(network, copy.deepcopy(network.module), learn)
    with pytest.raises(UsageError, match="refit"):
        calibrate(network, swapped_vit(vit), learn, refit="all")


@pytest.mark.slow
def test_memory_is_said_before_it_is_taken(vit, monkeypatch):
    network, learn, _, _ = vit
    module = __import__("normscope.swaps.calibrate.calibrate", fromlist=["calibrate"])
    told = []
    report = calibrate(network, swapped_vit(vit), learn[:6], progress=lambda *given: told.append(given))
    said, ends = told[0][0].split(" of memory")
    assert said.startswith("passes of 96 samples wait at each module, in about ") and ends == " …"
    assert report.left_out == 0 and told[1][:2] == ("calibrate", 0) and told[-1][1] == told[-1][2]
    held = float(said.split()[-2]) * 1e9
    monkeypatch.setattr(module, "MOST_BYTES", int(held * 2 / 3))
    told.clear()
    report = calibrate(network, swapped_vit(vit), learn[:6], progress=lambda *given: told.append(given))
    assert 0 < report.left_out < 72 and report.n_learned + report.n_judged + report.left_out == 96
    assert f"and {report.left_out} samples left out" in told[0][0]
