"""Healing: what it lowers, what it leaves alone, and that it goes on where it stopped."""

import contextlib
import copy
import itertools
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import State, network_of, numbered_batches, same, values_of
from safetensors.torch import load_file
from torch import nn

import normscope
from normscope.errors import DataError, ModelError, UsageError
from normscope.inputs.batch import Batch, Sample, joined
from normscope.inputs.held_out import Pool
from normscope.inputs.loaded_model import Outputs
from normscope.runtime.checked_files import read_checked, write_checked
from normscope.swaps.calibrate.closed_form import least_squares
from normscope.swaps.distances import output_errors
from normscope.swaps.pointwise import PointwiseFunction
from normscope.swaps.standalone import RMSNorm
from normscope.tools.heal import heal as stages
from normscope.tools.heal import training
from normscope.tools.heal.training import TrainedParameters, TrainingTargets, drawn, pooled_loss, steps_of

SITES = ["blocks.0.1", "blocks.1.1"]


def small():
    """Two blocks with a LayerNorm each, and a head that has none."""

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    blocks = [nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)]
    return network_of(forward, blocks=nn.ModuleList(blocks), head=nn.Linear(8, 3))


def batches(number, seed, data="noise"):
    return numbered_batches(number, lambda generator, size: torch.randn(size, 4, 8, generator=generator), 8, seed, data)


@pytest.fixture(scope="module")
def untrained():
    torch.manual_seed(0)
    original = small().eval()
    with torch.no_grad():
        for site in SITES:
            original.get_submodule(site).weight.copy_(0.5 + torch.rand(16))
            original.get_submodule(site).bias.copy_(torch.randn(16))
    swapped = copy.deepcopy(original)
    normscope.swap(swapped, "tanh", normscope.capture(original, batches(8, 1)))
    return original, swapped


@pytest.fixture
def networks(untrained):
    """A network and its swap, which a test may change."""
    return copy.deepcopy(untrained)


LEARN, HELD_OUT = batches(32, 1), batches(4, 2, data="others")


def drift(original, swapped, inputs=HELD_OUT):
    """Median relative L2, sample by sample in numpy."""
    with torch.no_grad():
        pairs = [
            (original(*b.args)[i].numpy(), swapped(*b.args)[i].numpy()) for b in inputs for i in range(len(b.samples))
        ]
    errors = sorted(float((((z - y) ** 2).sum() / (y**2).sum()) ** 0.5) for y, z in pairs)
    return (errors[len(errors) // 2 - 1] + errors[len(errors) // 2]) / 2


def test_healing_closes_most_of_the_drift_and_reports_the_share(networks):
    original, swapped = networks
    untouched, before = values_of(original), drift(original, swapped)
    report = normscope.heal(original, swapped, LEARN, HELD_OUT, steps=150)
    assert same(values_of(original), untouched)
    after = drift(original, swapped)
    # Sums in another order, in float32.
    assert report.before["median"] == pytest.approx(before, rel=1e-5)
    assert report.after["median"] == pytest.approx(after, rel=1e-5)
    assert report.closed == pytest.approx(1 - after / before, rel=1e-5)
    medians = [quantiles["median"] for quantiles in report.drifts.values()]
    assert list(report.drifts) == ["start", "calibrated", "trained"] and medians == sorted(medians, reverse=True)
    assert report.left_with == "trained" and not report.restored
    assert (report.steps, len(report.checks), report.checks[-1].step) == (150, 12, 150)
    # A fourth of 256 samples decides, as it is no more than a hundred.
    assert (report.n_learned, report.n_judged, report.n_held_out) == (192, 64, 32)


@pytest.mark.parametrize("rate", [1e-3, 1e4])
def test_the_best_state_is_kept_and_never_one_worse_than_the_start(networks, monkeypatch, rate):
    original, swapped = networks
    monkeypatch.setattr(stages, "rate_for", lambda width, steps: rate)
    before, validation = drift(original, swapped), Pool.of(LEARN).validation
    judged_before = drift(original, swapped, validation)
    report = normscope.heal(original, swapped, LEARN, HELD_OUT, calibrated=False, steps=60)
    best = report.before["median"]
    least = [check.drift for check in report.checks if check.kept]
    assert report.before_training == pytest.approx(judged_before, rel=1e-5) and report.training_kept == bool(least)
    assert least == sorted(least, reverse=True)
    assert all(check.drift is None or check.drift >= min([best, *least]) for check in report.checks)
    if rate == 1e4:
        assert report.restored and not least and drift(original, swapped) == before
    else:
        assert drift(original, swapped, validation) == pytest.approx(least[-1], rel=1e-5)
    assert report.after["median"] <= report.before["median"]
    assert all(bool(value.isfinite().all()) for value in swapped.parameters())


@pytest.mark.parametrize(("medians", "left"), [((1, 2, 3), "start"), ((3, 1, 2), "calibrated"), ((3, 2, 1), "trained")])
def test_the_stage_with_the_least_drift_on_validation_inputs_is_kept(networks, monkeypatch, medians, left):
    original, swapped = networks
    quantiles, states, validation = stages._quantiles, [], itertools.chain(medians, itertools.repeat(medians[-1]))

    def decided(errors):
        if len(errors) == 64:
            return {**quantiles(errors), "median": float(next(validation))}
        states.append(values_of(swapped))  # 32 held-out inputs, which report on each stage
        return quantiles(errors)

    monkeypatch.setattr(stages, "_quantiles", decided)
    report = normscope.heal(original, swapped, LEARN, HELD_OUT, steps=24)
    assert report.left_with == left and report.training_kept == (left == "trained")
    assert report.restored == (left == "start")
    kept = dict(zip(("start", "calibrated", "trained"), states, strict=True))
    assert same(values_of(swapped), kept[left]) and not same(kept["start"], kept["calibrated"])


def test_calibration_uses_an_even_subset_of_many_inputs(networks, monkeypatch):
    calibrate = mock.Mock(wraps=stages.calibrate)
    monkeypatch.setattr(stages, "calibrate", calibrate)
    many = batches(100, 1)
    normscope.heal(*networks, many, HELD_OUT, steps=1)
    learned = calibrate.call_args.args[2]
    of_all, some = ([sample for batch in part for sample in batch.samples] for part in (many, learned))
    assert some == of_all[::3] and 200 < len(some) <= 320


def test_steps_join_batches_and_their_order_depends_on_the_seed():
    orders = [[drawn(seed, step, number=9) for step in range(18)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0][:9]) == sorted(orders[0][9:]) == list(range(9)) and orders[0][:9] != orders[0][9:]
    pool = Pool.of(batches(100, 3))
    assert min(len(batch.samples) for batch in pool.learned) < 4
    steps = steps_of(pool.learned, 16, 1)
    assert all(len(step) == 1 and len(step[0].samples) >= 16 for step in steps[:-1])
    together = [sample for step in steps for batch in step for sample in batch.samples]
    assert together == [sample for batch in pool.learned for sample in batch.samples]
    values = torch.cat([batch.args[0] for step in steps for batch in step])
    assert torch.equal(values, torch.cat([batch.args[0] for batch in pool.learned]))


@pytest.mark.parametrize(("tokens", "samples"), [(4, 66), (512, 12), (4096, 6)])
def test_a_step_of_long_inputs_has_fewer_samples(networks, tokens, samples):
    """Whole batches, of which 6 samples each are learned from: of at least 64 samples or 4096 tokens, or just one."""
    original, swapped = networks
    trained: set[int] = set()

    def note(module, args, output):
        if output.requires_grad:
            trained.add(len(output))

    swapped.head.register_forward_hook(note)
    long = numbered_batches(11, lambda generator, size: torch.randn(size, tokens, 8, generator=generator), 8, 1)
    normscope.heal(original, swapped, long, HELD_OUT, calibrated=False, steps=1)
    assert trained == {samples}


def test_padded_and_unlike_batches_make_smaller_steps():
    unpadded = [replace(texts([length] * 5), valid=None) for length in (3, 4, 3, 4, 4, 4)]
    steps = steps_of(unpadded, 64, 12)
    assert [[len(b.args[0]) for b in step] for step in steps] == [[5, 5], [5, 5], [10]]
    steps = steps_of([texts([3] * 20), texts([4] * 4), texts([3, 100] * 3), texts([3, 100] * 6)], 64, 8)
    shapes = [[tuple(batch.args[0].shape) for batch in step] for step in steps]
    assert shapes == [[(7, 3)], [(7, 3)], [(6, 3)], [(4, 4), (3, 3)], [(3, 100)], [(6, 3)], [(6, 100)]]


def texts(lengths):
    valid = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return Batch((valid.float(),), samples=tuple(Sample(f"{n}", n, n) for n in range(len(lengths))), valid=valid)


def test_least_squares_at_a_site_is_numpys(networks):
    original, swapped = networks
    function = swapped.get_submodule(SITES[0])
    with torch.no_grad():
        x = torch.cat([original.blocks[0][0](batch.args[0]).reshape(-1, 16) for batch in LEARN])
        y = original.get_submodule(SITES[0])(x).double()
        x = x.double()
    values = {name: value.double() for name, value in least_squares(function, x, y).items()}
    f = torch.tanh(values["alpha"] * x + values["shift"])
    for channel in range(16):
        columns = torch.stack([f[:, channel], torch.ones(len(f), dtype=torch.float64)], dim=1)
        line = torch.linalg.lstsq(columns, y[:, channel]).solution
        fitted = torch.stack([values["weight"][channel], values["bias"][channel]])
        torch.testing.assert_close(fitted, line, rtol=1e-4, atol=1e-5)  # float32 parameters
    residual = (y - values["weight"] * f - values["bias"]).square().sum()
    for factor in (0.97, 1.03):
        g = torch.tanh(factor * values["alpha"] * x + values["shift"])
        g, z = g - g.mean(0), y - y.mean(0)
        assert residual < (z.square().sum(0) - (g * z).sum(0) ** 2 / g.square().sum(0)).sum()


def gradients(original, swapped, batch, sites=SITES):
    """The loss on a batch, and what it adds to the network's gradients."""
    swapped = copy.deepcopy(swapped)
    loss = TrainingTargets(original.eval(), swapped.eval(), Outputs(), sites, [[batch]]).gradients(0)
    return loss, [parameter.grad for parameter in swapped.parameters()]


def unpadded_and_padded():
    """A batch of two positions, values with two more that are padding, and their mask."""
    x = torch.randn(8, 2, 8, generator=torch.Generator().manual_seed(0))
    padded = torch.cat([x, torch.full_like(x, 1e3)], dim=1)
    return Batch((x,), samples=LEARN[0].samples), padded, torch.arange(4).expand(8, 4) < 2


def test_padding_does_not_affect_healing(networks):
    original, swapped = networks
    own, values, valid = unpadded_and_padded()
    padded = Batch((values,), samples=own.samples, valid=valid)
    (loss, mine), (same_loss, theirs) = (gradients(original, swapped, batch) for batch in (own, padded))
    assert loss == pytest.approx(same_loss, rel=1e-5)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)  # float32
    torch.testing.assert_close(*(output_errors(original, swapped, [batch], Outputs()) for batch in (own, padded)))


def test_a_mask_within_one_module_excludes_its_padding(networks):
    original, swapped = networks
    unpadded, values, valid = unpadded_and_padded()
    part, ends = SITES[0].rpartition(".")[0], []
    masked = Batch((values,), samples=unpadded.samples, valid_within={part: valid})
    for batch in (unpadded, masked):
        lesson = TrainingTargets(original, swapped, Outputs(), SITES[:1], [[batch]])
        (of_site,) = lesson.targets(0)[0][1][SITES[0]]
        with torch.no_grad():
            mine = swapped.blocks[0][1](original.blocks[0][0](batch.args[0]))
        ends.append(float(pooled_loss(mine, of_site, batch.valid_at(SITES[0]))))
    assert ends[0] == pytest.approx(ends[1], rel=1e-5)  # float32
    (both,) = joined([masked, masked])
    assert torch.equal(both.valid_within[part], torch.cat([valid, valid])) and both.valid is None
    assert len(joined([masked, unpadded])) == 2


@pytest.mark.parametrize("room", [0, 1000, 2**30])
def test_targets_are_computed_once_within_the_memory_limit(networks, monkeypatch, room):
    original, swapped = networks
    monkeypatch.setattr(training, "MOST_TARGET_BYTES", room)
    runs = []
    original.register_forward_hook(lambda *_: runs.append(1))
    lesson = TrainingTargets(original, swapped, Outputs(), SITES, [[batch] for batch in LEARN[:3]])
    losses = [[lesson.gradients(number) for number in range(3)] for _ in range(3)]
    assert losses[0] == losses[1] == losses[2]
    assert len(runs) == (3 if room == 2**30 else 9)


class _StopError(Exception):
    pass


@pytest.fixture(scope="module")
def whole(untrained):
    """A healing of 24 steps without an interruption: its report, and what it left."""
    original, swapped = copy.deepcopy(untrained)
    return normscope.heal(original, swapped, LEARN, HELD_OUT, steps=24), values_of(swapped)


@pytest.mark.parametrize(("stage", "at"), [("calibrate", 1), ("train", 15), (None, None)])
def test_healing_resumes_identically_to_the_bit(networks, whole, tmp_path, stage, at):
    original, other = networks
    (report, values), path = whole, tmp_path / "at.safetensors"

    def stopping(of_stage, done, of):
        if (of_stage, done) == (stage, at):
            raise _StopError

    options, stages_run = {"steps": 24, "checkpoint": path}, []
    with pytest.raises(_StopError) if stage else contextlib.nullcontext():
        normscope.heal(original, copy.deepcopy(other), LEARN, HELD_OUT, **options, progress=stopping)
    assert path.exists() == (stage != "calibrate")
    if not stage:  # a finished healing is only read
        assert not any(name.startswith(("moment", "trained")) for name in load_file(path))
    resumed = normscope.heal(original, other, LEARN, HELD_OUT, **options, progress=lambda *now: stages_run.append(now))
    assert same(values_of(other), values)
    assert resumed.as_dict() == report.as_dict()
    assert ("calibrate" in {of_stage for of_stage, _, _ in stages_run}) == (stage == "calibrate")
    assert min((done for of_stage, done, _ in stages_run if of_stage == "train"), default=None) == at


class _Clock:
    """Seconds that pass only as a test says: in calibration, in each step of a training, and in each measurement."""

    def __init__(self, monkeypatch, of_calibration, of_step, of_measuring):
        self.now, self.steps, self.rates = 1000.0, 0, []
        monkeypatch.setattr(stages, "time", SimpleNamespace(monotonic=lambda: self.now))
        errors = type("SlowErrors", (stages.OutputErrors,), {})  # calibration measures by the plain ones
        monkeypatch.setattr(stages, "OutputErrors", errors)
        for owner, name, seconds in (
            (stages, "calibrate", lambda: of_calibration),
            (errors, "of", lambda: of_measuring),
            (stages, "output_errors", lambda: of_measuring),
            (TrainingTargets, "gradients", lambda: of_step(self.steps)),
            (torch.optim.AdamW, "step", lambda: 0),
        ):
            monkeypatch.setattr(owner, name, self._slowed(getattr(owner, name), seconds))

    def _slowed(self, call, seconds):
        def slowly(*args, **kwargs):
            self.now += seconds()
            if isinstance(args[0], torch.optim.AdamW):
                self.rates.append(args[0].param_groups[0]["lr"])
            self.steps += isinstance(args[0], TrainingTargets)
            return call(*args, **kwargs)

        return slowly


@pytest.mark.parametrize("later", [0.5, 8.0])
def test_the_budget_holds_on_a_machine_of_changing_speed(networks, monkeypatch, later):
    clock = _Clock(monkeypatch, 100, lambda step: 2.0 if step < 30 else later, 5)
    began = clock.now

    def quality(module):
        clock.now += 7
        return 1.0

    report = normscope.heal(*networks, LEARN, HELD_OUT, minutes=6, quality=quality)
    # Two measurements follow the last step, which began in time.
    assert 360 - 2 * later <= clock.now - began <= 360 + later
    assert report.steps == clock.steps == len(clock.rates) and report.checks[-1].step == report.steps
    largest = max(clock.rates)
    assert clock.rates[-1] < 0.05 * largest and clock.rates[0] < 0.5 * largest  # the schedule is gone through
    assert len(report.checks) == 12


def test_calibration_may_use_the_whole_budget(networks, monkeypatch):
    _Clock(monkeypatch, 400, lambda step: 1.0, 1)
    report = normscope.heal(*networks, LEARN, HELD_OUT, minutes=6)
    assert report.steps == 0 and not report.checks and report.closed > 0


def test_a_resumed_healing_has_only_the_remaining_minutes(networks, tmp_path, monkeypatch):
    original, swapped = networks
    other, asked = copy.deepcopy(swapped), {"minutes": 6, "checkpoint": tmp_path / "at.safetensors"}
    clock = _Clock(monkeypatch, 100, lambda step: 1.0, 5)

    def stopping(stage, done, of):
        if stage == "train" and done > of // 2:
            raise _StopError

    with pytest.raises(_StopError):
        normscope.heal(original, swapped, LEARN, HELD_OUT, **asked, progress=stopping)
    clock.now += 10_000
    began = clock.now
    report = normscope.heal(original, other, LEARN, HELD_OUT, **asked)
    assert 100 < clock.now - began < 180 and len(report.checks) == 12
    with pytest.raises(UsageError, match=r"its minutes is 6, not 7"):
        normscope.heal(original, other, LEARN, HELD_OUT, **{**asked, "minutes": 7})


def test_a_module_that_is_no_known_norm_may_be_replaced():
    original = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    swapped = copy.deepcopy(original)
    swapped[1] = nn.Identity()
    learn, held_out = (list(torch.randn(number, 16, 4)) for number in (12, 3))
    assert normscope.heal(original, swapped, learn, held_out, steps=2, calibrated=False).steps == 2


@pytest.mark.parametrize("train", ["norms", "neighbours", "all"])
def test_only_trained_parameters_change(networks, train):
    original, swapped = networks
    swapped.extra = nn.Embedding(3, 2)
    original.extra = copy.deepcopy(swapped.extra)
    before = values_of(swapped)
    report = normscope.heal(original, swapped, LEARN, HELD_OUT, calibrated=False, train=train, steps=24)
    changed = {
        name.rpartition(".")[0] for name, value in values_of(swapped).items() if not torch.equal(value, before[name])
    }
    beside = {"blocks.0.0", "blocks.0.3", "blocks.1.0", "blocks.1.3", "head"}
    assert report.left_with == "trained" and report.train == train
    assert changed == {*SITES, *(() if train == "norms" else beside)}


def test_an_rms_norm_is_trained_alone(networks):
    original, swapped = networks
    for site in SITES:
        swapped.set_submodule(site, RMSNorm(16, elementwise_affine=True))
    report = normscope.heal(original, swapped, LEARN, HELD_OUT, steps=24)
    assert list(report.drifts) == ["start", "trained"] and report.closed > 0


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"steps": 24}, "steps is 12, not 24"),
        ({"train": "norms"}, "other train"),
        ({"learn": LEARN[:20]}, r"healing: other inputs; remove"),
    ],
)
def test_a_checkpoint_of_another_healing_is_refused(networks, tmp_path, changed, named):
    original, swapped = networks
    other, path = copy.deepcopy(swapped), tmp_path / "at.safetensors"
    asked = {"learn": LEARN, "held_out": HELD_OUT, "steps": 12, "checkpoint": path, "calibrated": False}
    normscope.heal(original, swapped, **asked)
    start = values_of(other)
    with pytest.raises(UsageError, match=named):
        normscope.heal(original, other, **{**asked, **changed})
    assert same(values_of(other), start)
    torch.nn.init.zeros_(other.blocks[0][1].bias)
    with pytest.raises(UsageError, match="start values"):
        normscope.heal(original, other, **asked)


def test_a_damaged_checkpoint_is_refused(networks, tmp_path):
    path = tmp_path / "at.safetensors"
    options = {"steps": 6, "checkpoint": path, "calibrated": False}
    normscope.heal(networks[0], copy.deepcopy(networks[1]), LEARN, HELD_OUT, **options)
    header, tensors = read_checked(path, "normscope-healing", 7)
    write_checked(path, {**header, "course": {"strange": 1}}, tensors)
    with pytest.raises(DataError, match="remove it"):
        normscope.heal(*networks, LEARN, HELD_OUT, **options)


def test_flags_modes_and_random_states_are_restored(networks):
    original, swapped = networks
    original.train()
    swapped.head.train()
    swapped.head.weight.requires_grad_(False)
    whole, before = State(original), torch.get_rng_state()
    flags = [(module.training, dict(module._forward_hooks)) for module in swapped.modules()]
    normscope.heal(original, swapped, LEARN, HELD_OUT, steps=12)
    whole.assert_same(original)
    assert torch.equal(torch.get_rng_state(), before) and torch.is_grad_enabled()
    assert [(module.training, dict(module._forward_hooks)) for module in swapped.modules()] == flags
    assert not swapped.head.weight.requires_grad and swapped.blocks[0][0].weight.requires_grad
    assert all(parameter.grad is None for parameter in swapped.parameters())


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (lambda original, _: {"swapped": original}, UsageError, "Nothing was swapped"),
        (lambda original, _: {"swapped": copy.deepcopy(original)}, UsageError, "Nothing was swapped"),
        (lambda _, swapped: {"swapped": swapped.bfloat16()}, UsageError, "float32"),
        ({"steps": 0}, UsageError, "steps has to be at least 1, not 0"),
        ({"minutes": 0}, UsageError, "minutes has to be a time above 0, not 0"),
        ({"minutes": float("nan")}, UsageError, "minutes has to be a time above 0, not nan"),
        ({"steps": 3, "minutes": 2}, UsageError, "3 steps and 2 minutes are two lengths of one training; pass one"),
        ({"train": "norm"}, UsageError, "Did you mean 'norms'"),
        ({"held_out": []}, DataError, "no held-out"),
        ({"learn": []}, DataError, "no batch"),
        ({"outputs": Outputs("tensor", lambda y, batch: y.mean())}, ModelError, "axis 0 has to count the samples"),
        ({"outputs": Outputs("tensor", lambda y, b: y.movedim(0, -1))}, ModelError, "axis 0 has to count the samples"),
        ({"checkpoint": Path(__file__)}, DataError, "remove it"),
    ],
)
def test_refusals(networks, changes, error, words):
    arguments = {"original": networks[0], "swapped": networks[1], "learn": LEARN, "held_out": HELD_OUT}
    changes = changes(*networks) if callable(changes) else changes
    with pytest.raises(error, match=words):
        normscope.heal(**arguments | changes)


def test_infinite_outputs_do_not_select_a_state(networks):
    original, swapped = networks
    with torch.no_grad():
        swapped.blocks[0][1].weight.fill_(torch.inf)
    report = normscope.heal(original, swapped, LEARN, HELD_OUT, steps=12)
    assert report.before["median"] == torch.inf
    document = report.as_dict()
    assert document["before"]["median"] is None
    assert report.after["median"] < 2 and report.closed == 1  # least squares needs no start


CHANNELS = 3
NAMES = ["weight", "alpha", "shift", "bias"]
numbers = st.floats(-3, 3)
alphas = st.tuples(st.floats(-6, 1), st.sampled_from([-1, 1])).map(lambda drawn: drawn[1] * 10 ** drawn[0])


@st.composite
def functions(draw):
    curve, shifted, per_channel = draw(st.tuples(st.sampled_from(["tanh", "isru", "linear"]), *[st.booleans()] * 2))
    size = CHANNELS if per_channel else 1
    alpha = torch.tensor(draw(st.lists(alphas, min_size=size, max_size=size)))
    shift = torch.tensor(draw(st.lists(numbers, min_size=size, max_size=size))) * alpha if shifted else None
    function = PointwiseFunction(curve, CHANNELS, alpha=alpha, shift=shift).double()
    with torch.no_grad():
        slope = torch.tensor(draw(st.lists(numbers, min_size=CHANNELS, max_size=CHANNELS)), dtype=torch.float64)
        function.weight.copy_(slope / function.alpha)
    return function


@settings(max_examples=30)
@given(functions())
def test_trained_parameters_are_the_same_function_up_to_rounding(function):
    x = torch.linspace(-4, 4, 30, dtype=torch.float64).reshape(10, 3)
    before, values = function(x).detach(), copy.deepcopy(function.state_dict())
    trained = TrainedParameters(function, list(values))
    assert all(torch.equal(value, values[name]) for name, value in function.state_dict().items())
    trained.put()
    torch.testing.assert_close(function(x).detach(), before, rtol=1e-12, atol=1e-12)  # float64


@settings(max_examples=30)
@given(functions(), st.lists(st.floats(-1, 1), min_size=4, max_size=4))
def test_gradients_are_those_of_the_function_written_out(function, by):
    x = torch.linspace(-4, 4, 30, dtype=torch.float64).reshape(10, 3)
    begun = function.alpha.detach().clone()
    trained = TrainedParameters(function, [name for name, _ in function.named_parameters()])
    with torch.no_grad():
        for tensor, step in zip(trained.tensors.values(), by, strict=False):
            tensor += step
    trained.put()
    own = {name: tensor.detach().clone().requires_grad_() for name, tensor in trained.tensors.items()}
    alpha = begun * own["alpha"].exp()
    inside = x + own["shift"] if "shift" in own else x
    by_hand = own["weight"] / alpha * function.curve.function(alpha * inside) + own["bias"]
    torch.testing.assert_close(function(x), by_hand, rtol=1e-9, atol=1e-9)
    target = torch.cos(3 * x)
    (by_hand - target).square().sum().backward()
    (function(x) - target).square().sum().backward()
    trained.convert_gradients()
    for name, tensor in trained.tensors.items():
        scale = max(1.0, float(own[name].grad.abs().max()))
        # Of log α large terms cancel: as large as weight · gradient of the weight, which hold 1/α and α.
        torch.testing.assert_close(tensor.grad, own[name].grad, rtol=1e-6, atol=1e-6 * scale, msg=name)


@pytest.mark.parametrize("alpha", [1e-5, 1.0])
def test_a_step_moves_a_nearly_straight_function_as_far_as_a_bent_one(alpha):
    """Trained as they are, one step of s by 3e-4 moves a function of weight 10⁵ by 30."""
    function = PointwiseFunction("tanh", CHANNELS, alpha=alpha, shift=0.0)
    with torch.no_grad():
        function.weight.fill_(1 / alpha)
    x = torch.linspace(-1, 1, 30).reshape(10, 3)
    before, trained = function(x).detach(), TrainedParameters(function, NAMES)
    with torch.no_grad():
        for tensor in trained.tensors.values():
            tensor += 3e-4
    trained.put()
    assert 0 < float((function(x).detach() - before).abs().max()) < 2e-3


def test_an_alpha_of_zero_can_be_trained():
    function = PointwiseFunction("tanh", CHANNELS, alpha=0.0)
    trained = TrainedParameters(function, ["weight", "alpha", "bias"])
    function(torch.ones(1, CHANNELS)).sum().backward()
    trained.convert_gradients()
    trained.put()
    assert all(
        bool(tensor.isfinite().all()) and bool(tensor.grad.isfinite().all()) for tensor in trained.tensors.values()
    )


def test_other_parameters_are_trained_directly():
    network = nn.Sequential(nn.Linear(2, CHANNELS), PointwiseFunction("tanh", CHANNELS))
    trained = TrainedParameters(network, ["0.weight", "1.alpha", "1.weight", "1.bias"])
    assert trained.tensors["0.weight"] is network[0].weight and trained.tensors["1.bias"] is network[1].bias
    assert math.isclose(float(trained.tensors["1.weight"][0]), 0.5)
    trained.load({name: torch.zeros_like(value) + 0.1 for name, value in trained.tensors.items()})
    assert float(network[0].weight.detach().mean()) == pytest.approx(0.1)
    assert float(network[1].alpha.detach()) == pytest.approx(0.5 * math.exp(0.1))
