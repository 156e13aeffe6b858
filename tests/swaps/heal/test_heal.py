"""Healing: what it lowers, what it leaves alone, and that it goes on where it stopped."""

import copy

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch._subclasses import FakeTensorMode

import normscope
from normscope.errors import DataError, ModelError, UsageError
from normscope.fits.solving.ceiling import Piecewise, curve_along
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.loaded_model import Outputs
from normscope.runtime.sealed_files import read_checked, write_checked
from normscope.swaps.calibrate.functions import least_squares
from normscope.swaps.heal import heal, training
from normscope.swaps.heal.by_site import norm_pairs
from normscope.swaps.heal.lessons import Lesson, Pool, joined, output_errors, repeatable
from normscope.swaps.pointwise import PointwiseFunction

SITES = ["blocks.0.1", "blocks.1.1"]


class Small(nn.Module):
    """Two blocks with a LayerNorm each, and a head that has none."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def batches(number, seed, size=8, data="noise"):
    generator = torch.Generator().manual_seed(seed)
    return [
        Batch(
            (torch.randn(size, 4, 8, generator=generator),),
            samples=tuple(Sample(f"{data} {i}", i, i, data) for i in range(n * size, (n + 1) * size)),
        )
        for n in range(number)
    ]


@pytest.fixture
def networks():
    torch.manual_seed(0)
    original = Small().eval()
    with torch.no_grad():
        for site in SITES:
            original.get_submodule(site).weight.copy_(0.5 + torch.rand(16))
            original.get_submodule(site).bias.copy_(torch.randn(16))
    swapped = copy.deepcopy(original)
    normscope.swap(swapped, "tanh", normscope.capture(original, batches(8, 1)))
    return original, swapped


LEARN, HELD_OUT = batches(32, 1), batches(4, 2, data="others")


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def drift(original, swapped, inputs=HELD_OUT):
    """Median relative L2, sample by sample in numpy."""
    with torch.no_grad():
        pairs = [
            (original(*b.args)[i].numpy(), swapped(*b.args)[i].numpy()) for b in inputs for i in range(len(b.samples))
        ]
    errors = sorted(float((((z - y) ** 2).sum() / (y**2).sum()) ** 0.5) for y, z in pairs)
    return (errors[len(errors) // 2 - 1] + errors[len(errors) // 2]) / 2


def test_it_closes_most_of_the_drift_and_says_by_how_much(networks):
    original = networks[0]
    swapped = copy.deepcopy(original)
    normscope.swap(swapped, "tanh", normscope.capture(original, LEARN[:1]), init="paper")
    untouched, before = state(original), drift(original, swapped)
    report = normscope.heal(original, swapped, LEARN, HELD_OUT, steps=150)
    assert same(state(original), untouched)
    after = drift(original, swapped)
    # Sums in another order, in float32.
    assert report.before["median"] == pytest.approx(before, rel=1e-5)
    assert report.after["median"] == pytest.approx(after, rel=1e-5)
    assert report.closed == pytest.approx(1 - after / before, rel=1e-5)
    assert report.closed > 0.7
    assert list(report.drifts) == ["start", "sites", "blocks", "whole"]
    assert not report.restored
    # A fourth of 256 samples decides, as it is no more than a hundred.
    assert (report.n_learned, report.n_judged, report.n_held_out) == (192, 64, 32)


def test_every_interval_that_was_kept_lowered_the_drift_of_those_that_decide(networks):
    original, swapped = networks
    best = drift(original, swapped, Pool.of(LEARN).judged)
    report = normscope.heal(original, swapped, LEARN, HELD_OUT, steps=60)
    for point in report.points:
        assert point.kept == (point.drift is not None and point.drift < best)
        best = point.drift if point.kept else best
    assert drift(original, swapped, Pool.of(LEARN).judged) == pytest.approx(best, rel=1e-5)


def test_steps_far_too_large_are_taken_back(networks, monkeypatch):
    original, swapped = networks
    monkeypatch.setattr(heal, "RATES", {"blocks": 1e4, "whole": 1e4})
    report = normscope.heal(original, swapped, LEARN, HELD_OUT, steps=24)
    assert not any(point.kept for point in report.points if point.stage != "sites")
    assert drift(original, swapped) <= report.before["median"] * (1 + 1e-5)
    assert report.after["median"] <= report.before["median"]
    assert all(bool(value.isfinite().all()) for value in swapped.parameters())


def test_start_values_remain_where_the_held_out_drift_did_not_fall(networks):
    original, _ = networks
    swapped = copy.deepcopy(original)
    normscope.swap(swapped, "tanh", normscope.capture(original, LEARN[:8]))
    start = state(swapped)
    seen = []
    quantiles = heal._quantiles

    def never_fell(errors):
        found = quantiles(errors)
        if len(errors) == report_on:
            seen.append(found["median"])
            return {**found, "median": float(len(seen))}
        return found

    report_on = sum(len(batch.samples) for batch in HELD_OUT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heal, "_quantiles", never_fell)
        report = normscope.heal(original, swapped, LEARN, HELD_OUT, steps=12)
    assert len(seen) == 4 and any(point.kept for point in report.points)
    assert report.restored and report.closed == 0
    assert same(state(swapped), start)


def test_what_decides_and_what_reports_is_learned_from_by_nothing():
    pool = Pool.of(LEARN)
    learned, judged = ({s.source for batch in part for s in batch.samples} for part in (pool.learned, pool.judged))
    assert not learned & judged
    assert len(learned) + len(judged) == 256
    many = Pool.of(batches(100, 3))  # 800 sources: 200 of them are more than it takes
    judged = [s for batch in many.judged for s in batch.samples]
    assert len(judged) == 50
    assert sum(len(batch.samples) for batch in many.learned) == 750


def test_batches_drawn_hang_on_seed_and_step_alone():
    pool = Pool.of(LEARN)
    first = pool.drawn(0, "whole", 7)
    pool.drawn(0, "whole", 8)
    again = pool.drawn(0, "whole", 7)
    assert [batch.samples for batch in first] == [batch.samples for batch in again]
    assert len({pool.drawn(seed, "whole", step)[0].samples for seed in range(3) for step in range(3)}) == 9
    assert sum(len(batch.samples) for batch in first) == first[0].args[0].shape[0]  # joined into one


def test_batches_of_several_lengths_stay_apart():
    own = [Batch((torch.zeros(1, n),), samples=(Sample(f"{n}", n, n),)) for n in (3, 4, 3)]
    assert len(Pool(own, own, 0).drawn(0, "whole", 0)) == 3


def test_the_first_stage_changes_the_parameters_of_the_sites_alone(networks, monkeypatch):
    original, swapped = networks
    monkeypatch.setattr(heal, "train", lambda *_: None)
    start = state(swapped)
    report = normscope.heal(original, swapped, LEARN, HELD_OUT, steps=12)
    changed = {name for name, value in state(swapped).items() if not torch.equal(value, start[name])}
    kept = [site for site, point in zip(SITES, report.points, strict=True) if point.kept]
    assert kept and {name.rpartition(".")[0] for name in changed} == set(kept)


def test_least_squares_at_a_site_is_numpys(networks):
    original, swapped = networks
    function = swapped.get_submodule(SITES[0])
    x, y = norm_pairs(original, {SITES[0]: function}, LEARN)[SITES[0]]
    own_x = torch.cat([original.blocks[0][0](batch.args[0]).reshape(-1, 16) for batch in LEARN]).double()
    torch.testing.assert_close(x, own_x.detach(), rtol=1e-6, atol=1e-6)
    found = least_squares(function, x, y)
    f = torch.tanh(found["alpha"].double() * x + found["shift"].double())
    for channel in range(16):
        columns = torch.stack([f[:, channel], torch.ones(len(f), dtype=torch.float64)], dim=1)
        weight, bias = torch.linalg.lstsq(columns, y[:, channel]).solution
        # float32 parameters
        assert float(found["weight"][channel]) == pytest.approx(float(weight), rel=1e-4)
        assert float(found["bias"][channel]) == pytest.approx(float(bias), rel=1e-4, abs=1e-5)
    residual = (y - found["weight"].double() * f - found["bias"].double()).square().sum()
    for alpha in (0.97, 1.03):
        g = torch.tanh(alpha * found["alpha"].double() * x + found["shift"].double())
        g, z = g - g.mean(0), y - y.mean(0)
        assert residual < (z.square().sum(0) - (g * z).sum(0) ** 2 / g.square().sum(0)).sum()


def test_padding_is_no_data(networks):
    original, swapped = networks
    x = torch.randn(8, 4, 8)
    junk = x.clone()
    junk[:, 2:] = 1e3
    valid = torch.arange(4).expand(8, 4) < 2
    functions = {SITES[0]: swapped.get_submodule(SITES[0])}
    samples = LEARN[0].samples
    (own, _), (padded, _) = (
        norm_pairs(original, functions, [batch])[SITES[0]]
        for batch in (Batch((x[:, :2],), samples=samples), Batch((junk,), samples=samples, valid=valid))
    )
    torch.testing.assert_close(own, padded)
    errors = [
        output_errors(original, swapped, [batch], Outputs())
        for batch in (Batch((x[:, :2],), samples=samples), Batch((junk,), samples=samples, valid=valid))
    ]
    torch.testing.assert_close(*errors)


def test_a_mask_of_a_part_alone_hides_its_padding_from_what_is_learned(networks):
    original, swapped = networks
    x = torch.randn(8, 4, 8)
    junk, valid = x.clone(), torch.arange(4).expand(8, 4) < 2
    junk[:, 2:] = 1e3
    samples, part = LEARN[0].samples, SITES[0].rpartition(".")[0]
    masked = Batch((junk,), samples=samples, valid_within={part: valid})
    functions = {SITES[0]: swapped.get_submodule(SITES[0])}
    short = Batch((x[:, :2],), samples=samples)
    for own, padded in zip(*(norm_pairs(original, functions, [one])[SITES[0]] for one in (short, masked)), strict=True):
        torch.testing.assert_close(own, padded)
    lesson = Lesson(original, swapped, Outputs(), [part])
    assert lesson.by_blocks([short]) == pytest.approx(lesson.by_blocks([masked]), rel=1e-5)  # float32
    (both,) = joined([masked, masked])
    assert torch.equal(both.valid_within[part], torch.cat([valid, valid])) and both.valid is None
    assert len(joined([masked, short])) == 2


class _StopError(Exception):
    pass


@pytest.mark.parametrize("stage", ["sites", "blocks", "whole"])
def test_it_goes_on_where_it_stopped_to_the_bit(networks, tmp_path, stage):
    original, swapped = networks
    other, path = copy.deepcopy(swapped), tmp_path / "at.safetensors"
    whole = normscope.heal(original, swapped, LEARN, HELD_OUT, steps=24)

    def stopping(at, done, of):
        if at == stage and done == (of if stage == "sites" else of // 2 + 1):
            raise _StopError

    again = copy.deepcopy(other)
    with pytest.raises(_StopError):
        normscope.heal(original, again, LEARN, HELD_OUT, steps=24, checkpoint=path, progress=stopping)
    assert path.exists() == (stage != "sites")
    asked = []
    resumed = normscope.heal(
        original, other, LEARN, HELD_OUT, steps=24, checkpoint=path, progress=lambda *told: asked.append(told)
    )
    assert same(state(other), state(swapped))
    assert resumed.as_dict() == whole.as_dict()
    assert ("sites" in {at for at, _, _ in asked}) == (stage == "sites")


def test_a_finished_healing_is_read_again(networks, tmp_path):
    original, swapped = networks
    other, path = copy.deepcopy(swapped), tmp_path / "at.safetensors"
    done = normscope.heal(original, swapped, LEARN, HELD_OUT, steps=12, checkpoint=path)
    told = []
    again = normscope.heal(
        original, other, LEARN, HELD_OUT, steps=12, checkpoint=path, progress=lambda *own: told.append(own)
    )
    assert again.as_dict() == done.as_dict() and told == []
    assert same(state(other), state(swapped))
    assert not any(name.startswith("moment") for name in load_file(path))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"steps": 24}, "steps is 12, not 24"),
        ({"seed": 1}, "seed is 0, not 1"),
        ({"learn": LEARN[:20]}, r"healing: other inputs; remove"),
    ],
)
def test_a_checkpoint_of_another_healing_is_refused(networks, tmp_path, changed, named):
    original, swapped = networks
    other, path = copy.deepcopy(swapped), tmp_path / "at.safetensors"
    asked = {"learn": LEARN, "held_out": HELD_OUT, "steps": 12, "checkpoint": path}
    normscope.heal(original, swapped, **asked)
    start = state(other)
    with pytest.raises(UsageError, match=named):
        normscope.heal(original, other, **{**asked, **changed})
    assert same(state(other), start)
    torch.nn.init.zeros_(other.blocks[0][1].bias)
    with pytest.raises(UsageError, match="start values"):
        normscope.heal(original, other, **asked)


def test_a_damaged_checkpoint_is_told(networks, tmp_path):
    original, swapped = networks
    path = tmp_path / "at.safetensors"
    path.write_bytes(b"nothing")
    with pytest.raises(DataError, match="remove it"):
        normscope.heal(original, swapped, LEARN, HELD_OUT, steps=12, checkpoint=path)


def test_everything_lent_is_given_back(networks):
    original, swapped = networks
    original.train()
    swapped.head.train()
    swapped.head.weight.requires_grad_(False)
    flags = [module.training for model in networks for module in model.modules()]
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    normscope.heal(original, swapped, LEARN, HELD_OUT, steps=12)
    assert torch.equal(torch.rand(3), wanted)
    assert [module.training for model in networks for module in model.modules()] == flags
    assert not swapped.head.weight.requires_grad and swapped.blocks[0][0].weight.requires_grad
    assert all(parameter.grad is None for model in networks for parameter in model.parameters())
    assert torch.is_grad_enabled()
    assert not any(module._forward_hooks for model in networks for module in model.modules())


def test_blocks_that_do_not_repeat_themselves_are_left_out():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.calls = nn.LayerNorm(8), 0

        def forward(self, x):
            self.calls += 1
            return self.norm(x) + self.calls

    network = nn.Sequential(Counting(), nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))
    assert repeatable(network, ["0", "1"], LEARN[0]) == ["1"]


def test_mistakes(networks):
    original, swapped = networks
    for given in (original, copy.deepcopy(original)):
        with pytest.raises(UsageError, match="Nothing was swapped"):
            normscope.heal(original, given, LEARN, HELD_OUT)
    with pytest.raises(UsageError, match="float32"):
        normscope.heal(original, copy.deepcopy(swapped).bfloat16(), LEARN, HELD_OUT)
    with pytest.raises(UsageError, match="steps is 0"):
        normscope.heal(original, swapped, LEARN, HELD_OUT, steps=0)
    with pytest.raises(DataError, match="no held-out"):
        normscope.heal(original, swapped, LEARN, [], steps=1)
    with pytest.raises(DataError, match="no batch"):
        normscope.heal(original, swapped, [], HELD_OUT, steps=1)
    for read in (lambda output, batch: output.mean(), lambda output, batch: output.movedim(0, -1)):
        with pytest.raises(ModelError, match="axis 0 has to count the samples"):
            normscope.heal(original, swapped, LEARN, HELD_OUT, outputs=Outputs("tensor", read), steps=1)


def test_outputs_that_are_not_finite_are_no_drift_to_go_by(networks):
    original, swapped = networks
    with torch.no_grad():
        swapped.blocks[0][1].weight.fill_(torch.inf)
    report = normscope.heal(original, swapped, LEARN, HELD_OUT, steps=12)
    assert report.before["median"] == torch.inf
    document = report.as_dict()
    assert document["before"]["median"] is None
    assert report.points[0].kept and report.after["median"] < 2  # least squares needs no start


def test_a_rate_so_small_ends_a_stage(networks, monkeypatch):
    original, swapped = networks
    monkeypatch.setattr(training, "_SLOWER", 1e-3)
    monkeypatch.setattr(heal, "RATES", {"blocks": 1e4, "whole": 1e4})
    report = normscope.heal(original, swapped, LEARN, HELD_OUT, steps=600)
    assert max(point.step for point in report.points if point.stage == "whole") < 100


def test_embedded_models_heal():
    network = normscope.load("demo_dit", limit=4, timesteps="900,", device="cpu")
    swapped = copy.deepcopy(network.module)
    normscope.swap(swapped, "dyisru", normscope.capture(network.module, network.inputs))
    other = normscope.load("demo_dit", limit=1, timesteps="900,", device="cpu", seed=3)
    report = normscope.heal(network.module, swapped, network.inputs, other.inputs, outputs=network.outputs, steps=12)
    assert report.closed > 0.05


def test_what_stands_in_padding_changes_nothing():
    class Masked(Small):
        def forward(self, x, attention_mask):
            return {"lengths": attention_mask.sum(1), "logits": super().forward(x)}

    torch.manual_seed(0)
    original = Masked().eval()
    mask = (torch.arange(4).expand(8, 4) < torch.arange(8).remainder(4)[:, None] + 1).long()
    clean = [{"x": batch.args[0] * mask[..., None], "attention_mask": mask} for batch in LEARN]
    junk = [{"x": own["x"] + 50 * (1 - mask[..., None]), "attention_mask": mask} for own in clean]
    start = copy.deepcopy(original)
    normscope.swap(start, "isru", normscope.capture(original, clean))
    healed = []
    for inputs in (clean, junk):
        swapped = copy.deepcopy(start)
        # One data set, as the name of one that has none is made of its tensors.
        report = normscope.heal(original, swapped, inputs[:24], inputs[24:], steps=12)
        assert report.closed > 0
        healed.append(swapped)
    for one, other in zip(*(model.parameters() for model in healed), strict=True):
        # Sums over rows that hold zeros are summed in another order by some kernels.
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_that_a_full_disk_does_not_take_is_told(networks, tmp_path, monkeypatch):
    def full(*_, **__):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(UsageError, match="No space left on device"):
        normscope.heal(*networks, LEARN, HELD_OUT, steps=6, checkpoint=tmp_path / "at.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("spoil", [lambda own: own.pop("start"), lambda own: own["start"].pop("median")])
def test_a_checkpoint_without_a_drift_is_damaged(networks, tmp_path, spoil):
    path = tmp_path / "at.safetensors"
    normscope.heal(networks[0], copy.deepcopy(networks[1]), LEARN, HELD_OUT, steps=6, checkpoint=path)
    header, tensors = read_checked(path, "normscope-healing", (3,))
    spoil(header["course"]["drifts"])
    write_checked(path, header, tensors)
    with pytest.raises(DataError, match="is damaged"):
        normscope.heal(*networks, LEARN, HELD_OUT, steps=6, checkpoint=path)


def test_lines_between_points_are_fitted_where_they_are_and_go_back_to_a_gpu():
    lines = curve_along(Piecewise(np.array([0.0, 1.0]), np.array([0.0, 3.0]), beyond=0.0))
    with FakeTensorMode():
        with torch.device("cuda"):
            function = PointwiseFunction(lines, 4)
        function.table.to("cuda")
        x, y = torch.randn(2, 9, 4, dtype=torch.float64)
        found = least_squares(function, x, y)
    assert {name: value.device.type for name, value in found.items()} == dict.fromkeys(
        ("alpha", "weight", "bias"), "cuda"
    )
