"""The probe: training is the same to the bit with it, and its numbers are those of capture and fit."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import torch
from networks import PreNorm, State, network_of, same, values_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import normscope
from normscope.errors import UsageError
from normscope.tools.probe.timeline import load_timeline

WIDTH = 8


def mixed():
    """A norm module, a norm with buffers, dropout, a point-wise function and a functional norm."""

    def forward(self, x):
        x = x + self.drop(self.batch(self.norm(self.first(x))))
        x = nn.functional.rms_norm(self.tanh(x) + x, (WIDTH,))
        return self.head(x)

    torch.manual_seed(0)
    first, norm, batch = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
    tanh, drop, head = normscope.DyT(WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, 3)
    return network_of(forward, first=first, norm=norm, batch=batch, tanh=tanh, drop=drop, head=head)


def inputs(number=64, width=WIDTH, seed=1):
    x = torch.randn(number, width, generator=torch.Generator().manual_seed(seed))
    return x * torch.linspace(0.2, 4, number)[:, None]  # so that pairs bend


def trained(model, probe_of=None, *, steps=6, called=None, autocast=False, accumulate=1, inside=False):
    """Train a network; return losses, weights and buffers, and what was probed."""
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    probe = probe_of(model) if probe_of else None
    losses, records, called = [], [], model if called is None else called
    for step in range(steps):
        for part in range(accumulate):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = called(inputs(16, seed=step * accumulate + part)).square().mean()
                if probe and inside and part == 0:  # between two passes in one autocast context
                    records.append(probe.run())
                if inside:
                    loss = loss + called(inputs(8, seed=99)).square().mean()
            loss.backward()
            losses.append(loss.detach().clone())
        if probe and not inside:
            records.append(probe.step(loss=loss))  # gradients are there
        optimizer.step()
        optimizer.zero_grad()
    losses.append(torch.rand(1))
    return torch.stack([each.reshape(()) for each in losses]), values_of(model), records


def assert_same_training(one, other):
    assert torch.equal(one[0], other[0])
    assert same(one[1], other[1])


@pytest.mark.parametrize(
    "how",
    [{}, {"autocast": True}, {"autocast": True, "inside": True}, {"accumulate": 2}],
    ids=["float32", "autocast", "within autocast", "accumulated"],
)
def test_weights_buffers_losses_and_random_numbers_are_those_without_a_probe(how):
    probed = trained(mixed(), lambda model: normscope.Probe(model, inputs(), every=2, curves="tanh"), **how)
    assert_same_training(probed, trained(mixed(), **how))
    assert sum(record is not None for record in probed[2]) == (6 if how.get("inside") else 3)


def test_no_hook_flag_gradient_or_tensor_remains():
    model = mixed().train()
    model.drop.eval()
    model(inputs()).sum().backward()
    before = State(model)
    probe = normscope.Probe(model, inputs(), every=1)
    before.assert_same(model)
    probe.step()
    before.assert_same(model)


def test_random_states_of_numpy_and_python_are_unchanged():
    def forward(network, x):
        return network.norm(x * random.random() * np.random.rand())  # noqa: S311

    model = network_of(forward, norm=nn.LayerNorm(WIDTH))
    random.seed(0), np.random.seed(0)
    expected = random.random(), np.random.rand()  # noqa: S311
    random.seed(0), np.random.seed(0)
    normscope.Probe(model, inputs()).run()
    assert (random.random(), np.random.rand()) == expected  # noqa: S311


def test_within_autocast_the_weights_are_those_after_the_update():
    """Autocast keeps copies of weights until its context ends."""
    model = mixed()
    probe = normscope.Probe(model, inputs(), curves="tanh")
    with torch.autocast("cpu", torch.bfloat16):
        model(inputs())
        with torch.no_grad():
            model.first.weight.mul_(3)
        within = probe.run()
    with torch.autocast("cpu", torch.bfloat16):
        assert probe.run().numbers == within.numbers


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_network_trains_the_same_and_compiles_nothing_anew(in_place):
    """With a backend that runs the traced graph; inductor's code differs in nothing that a probe could touch."""
    from torch._dynamo.utils import counters

    def run(probed):
        torch._dynamo.reset()
        counters.clear()
        model = mixed()
        called = model if in_place else torch.compile(model, backend="aot_eager")
        if in_place:
            model.compile(backend="aot_eager")
        probe_of = (lambda _: normscope.Probe(called, inputs(), every=2, curves="tanh")) if probed else None
        return (
            trained(model, probe_of, called=called),
            counters["stats"]["unique_graphs"],
            sum(counters["graph_break"].values()),
        )

    (probed, graphs, breaks), (plain, expected_graphs, expected_breaks) = run(True), run(False)
    assert_same_training(probed, plain)
    assert (graphs, breaks) == (expected_graphs, expected_breaks) and graphs > 0
    assert [record.step for record in probed[2] if record] == [2, 4, 6]


def test_the_file_reports_that_training_is_compiled_and_the_dtype_of_the_passes(tmp_path):
    model, path = PreNorm(depth=1), tmp_path / "run.jsonl"
    probe = normscope.Probe(torch.compile(model, backend="eager"), inputs(), path=path, curves="tanh")
    with torch.autocast("cpu", torch.bfloat16):
        probe.run()
    read = load_timeline(path)
    assert read.compiled and read.dtype == "float32, autocast to bfloat16" and read.model == "PreNorm"
    assert [site.name for site in read.sites] == ["norms.0"]


def test_numbers_are_those_of_capture_fit_and_card():
    model = mixed()
    with torch.no_grad():
        model.tanh.alpha.fill_(0.7)
    curves = ("tanh", "isru", "erf", "hardtanh")
    record = normscope.Probe(model, inputs(256), curves=curves).run()
    seen = normscope.capture(model, [inputs(256)])
    names = [site.name for site in seen.sites]
    assert record.sites == tuple(names) == ("norm", "batch", "tanh", "(model):rms_norm.0")
    metrics = record.metrics()
    for fit in normscope.fit(seen, curves):
        for name in ("r2", "amplitude", "alpha", "shift"):
            number = metrics.get(f"{fit.site}/{name}/{fit.curve}")
            if name == "r2" or fit.identified:
                # The folds' sums are added in another order, which moves a minimum by some 1e-8.
                assert number == pytest.approx(getattr(fit, name), rel=1e-6, abs=1e-6)
            else:
                assert number is None
    for card in normscope.norm_cards(seen):
        assert metrics[f"{card.site}/largest"] == card.tails.largest
        assert metrics[f"{card.site}/channel"] == card.tails.channel
        if card.scale:
            assert metrics[f"{card.site}/sigma"] == card.scale.sigma_p50
            assert metrics[f"{card.site}/spread"] == pytest.approx(card.scale.spread, rel=1e-12)
        if card.centring:
            assert metrics[f"{card.site}/offset"] == card.centring.offset_p50
    [of_module] = normscope.saturation(seen)
    assert metrics["tanh/module_alpha"] == pytest.approx(0.7) == of_module.alpha.p50
    assert metrics["tanh/beyond_2"] == of_module.beyond_2
    assert "norm/module_alpha" not in metrics and "tanh/sigma" not in metrics


def test_percentiles_and_shares_are_those_of_the_raw_pairs():
    x = inputs(512)
    record = normscope.Probe(nn.Sequential(nn.LayerNorm(WIDTH)), x, curves="tanh").run()
    numbers = record.metrics()
    # Percentiles are right to a bin, a 64th of an octave; shares to the pairs of one bin.
    low, high = np.quantile(x.double().numpy(), (0.005, 0.995))
    assert numbers["0/low"] == pytest.approx(low, rel=2**-5) and numbers["0/high"] == pytest.approx(high, rel=2**-5)
    bent = (numbers["0/alpha/tanh"] * x.double() + numbers["0/shift/tanh"]).abs() > 1
    assert numbers["0/beyond/tanh"] == pytest.approx(float(bent.double().mean()), abs=1e-3)
    # At x = 0, not where tanh is steepest.
    slope = numbers["0/amplitude/tanh"] * numbers["0/alpha/tanh"] / np.cosh(numbers["0/shift/tanh"]) ** 2
    assert numbers["0/slope/tanh"] == pytest.approx(slope, rel=1e-9)


@pytest.mark.parametrize("curve", ["tanh", "isru", "softsign", "arctan"])
def test_the_slope_is_that_of_a_fit(curve):
    """A LayerNorm's tokens of unequal offsets: the curve's centre is far from zero."""
    x = inputs(512).abs() ** 2
    model = nn.Sequential(nn.LayerNorm(WIDTH))
    numbers = normscope.Probe(model, x, curves=curve).run().metrics()
    (fit,) = normscope.fit(normscope.capture(model, [x]), curve)
    assert abs(fit.shift) > 0.1 and numbers[f"0/slope/{curve}"] == pytest.approx(fit.slope, rel=1e-3)


def test_massive_channels_are_counted():
    x = inputs(64)
    x[:, 2] += 1e5
    x[3, 5] = -3e6
    metrics = normscope.Probe(nn.Sequential(nn.RMSNorm(WIDTH)), x, curves="tanh").run().metrics()
    assert (metrics["0/massive"], metrics["0/channel"], metrics["0/largest"]) == (2, 5, 3e6)


def test_alpha_of_a_point_wise_function_follows_training():
    model = mixed()
    probe, alphas = normscope.Probe(model, inputs(), curves="tanh"), []
    for alpha in (0.5, 1.25):
        with torch.no_grad():
            model.tanh.alpha.fill_(alpha)
        alphas.append(probe.run().metrics()["tanh/module_alpha"])
    assert alphas == [0.5, 1.25]
    assert next(site for site in probe.capture.sites if site.name == "tanh").pointwise.alpha == (1.25,)


def test_a_network_that_diverged_is_recorded_without_numbers(tmp_path):
    model = mixed()
    probe = normscope.Probe(model, inputs(), path=tmp_path / "run.jsonl")
    with torch.no_grad():
        model.first.weight.fill_(torch.nan)
    assert probe.run(loss=torch.tensor(torch.nan)).metrics().keys() == {"loss"}
    assert np.isnan(load_timeline(tmp_path / "run.jsonl").values("r2/tanh")).all()


def test_every_n_th_step_is_recorded_on_the_same_inputs(tmp_path):
    x, path = inputs(), tmp_path / "new" / "run.jsonl"
    model = PreNorm(depth=1)
    probe = normscope.Probe(model, x, every=3, path=path, curves="tanh", about={"model": "net", "data": "noise"})
    first = probe.run()
    x.zero_()  # the probe has a copy
    records = [probe.step(loss=i) for i in range(1, 8)]
    assert [record and record.step for record in records] == [None, None, 3, None, None, 6, None]
    assert records[2].numbers == first.numbers and records[2].loss == 3
    assert probe.step(step=1200).step == 1200 and probe.steps == 1200
    read = load_timeline(path)
    assert read.steps.tolist() == [0, 3, 6, 1200] and (read.model, read.data) == ("net", "noise")


def test_another_run_with_the_same_sites_continues_the_file(tmp_path):
    path = tmp_path / "run.jsonl"

    def probe(**options):
        return normscope.Probe(PreNorm(depth=1), inputs(), **{"path": path, "every": 1, "curves": "tanh"} | options)

    earlier = probe()
    for _ in range(4):
        earlier.step()
    with path.open("ab") as file:
        file.write(b'{"step":5,"time"')  # of a killed run
    probe().step(step=3)
    assert load_timeline(path).steps.tolist() == [1, 2, 3]
    for options, what in ({"curves": "isru"}, "curves"), ({"keep": tmp_path / "captures"}, "captures"):
        with pytest.raises(UsageError, match=f"of another run, with the {what} .*another path"):
            probe(**options)
    with pytest.raises(UsageError, match=r"with the sites '1 site from norms.0 to norms.0', not '2 sites"):
        normscope.Probe(PreNorm(depth=2), inputs(), path=path, curves="tanh")


def test_captures_are_kept_beside_the_file(tmp_path):
    path = tmp_path / "run.jsonl"
    probe = normscope.Probe(PreNorm(depth=1), inputs(), every=1, path=path, keep=tmp_path / "captures", curves="tanh")
    record = probe.step()
    folder = path.parent / load_timeline(path).captures
    kept = normscope.load_capture(folder / "step-00000001.safetensors")
    assert kept.stats["norms.0"].n_pairs == 64 * WIDTH and kept.about["weights"] == "in training"
    assert normscope.fit(kept, "tanh")[0].r2 == pytest.approx(record.metrics()["norms.0/r2/tanh"], abs=1e-9)


@pytest.mark.parametrize("generator", [None, torch.Generator().manual_seed(5)])
def test_reading_the_first_samples_leaves_the_loader_unchanged(generator):
    data, model = TensorDataset(inputs(40), torch.arange(40)), PreNorm(depth=1)
    loader = DataLoader(data, batch_size=16, shuffle=True, generator=generator)
    state = generator and generator.get_state()
    torch.manual_seed(7)
    expected = [labels for _, labels in loader]
    if generator is not None:
        generator.set_state(state)
    torch.manual_seed(7)
    probe = normscope.Probe(model, loader, samples=24)
    assert all(map(torch.equal, expected, (labels for _, labels in loader)))
    assert probe.run() and probe.capture.n_samples == 24


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 0}, "every is 0; it is at least 1"),
        ({"curves": "free"}, "free is no curve with A and α"),
        ({"curves": "thanh"}, "Did you mean 'tanh'"),
        ({"layers": "blocks.9"}, "norm site"),
        ({"path": "."}, "it is a folder"),
        ({"path": "file/run.jsonl"}, "Cannot write"),
        ({"path": "file"}, "is no timeline of normscope"),
        ({"batch": DataLoader(TensorDataset(inputs()))}, "DataLoader; pass samples=16 to read"),
        ({"batch": [], "samples": 4}, "yields no batch"),
        ({"logger": []}, r"of type builtins\.list, .* neither log\(dict, step=\)"),
    ],
)
def test_invalid_arguments_are_refused_before_training(tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("{}\n")
    with pytest.raises(normscope.errors.NormscopeError, match=words):
        normscope.Probe(PreNorm(depth=1), **{"batch": inputs(), **options})


def test_a_changed_network_is_refused():
    model = PreNorm(depth=2)
    probe = normscope.Probe(model, inputs(), every=1)
    model.norms[1] = normscope.DyT(WIDTH)
    with pytest.raises(UsageError, match=r"'norms\.1' was replaced since the probe was made"):
        probe.step()


KILLED = """
    import sys, torch, normscope
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    probe = normscope.Probe(model, torch.randn(64, 8), every=1, path=sys.argv[1], curves="tanh")
    while True:
        probe.step()
"""


@pytest.mark.slow
def test_the_file_of_a_killed_run_is_read(tmp_path):
    path = tmp_path / "run.jsonl"
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(KILLED), path])
    while process.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < 8):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    steps = load_timeline(path).steps.tolist()
    assert len(steps) >= 7 and steps == list(range(1, len(steps) + 1))
    for line in path.read_bytes().split(b"\n")[:-1]:
        json.loads(line)


@pytest.mark.slow
def test_memory_stays_flat(tmp_path):
    """What Python and torch allocated after 10 probes is what is allocated after 40, up to caches of single objects."""
    import gc
    import tracemalloc

    probe = normscope.Probe(PreNorm(depth=4), inputs(256), every=1, path=tmp_path / "run.jsonl")
    sizes = []
    tracemalloc.start()
    try:
        for _ in range(4):
            for _ in range(10):
                probe.step()
            gc.collect()
            tensors = sum(t.nbytes for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter))  # no fakes
            sizes.append((tracemalloc.get_traced_memory()[0], tensors))
    finally:
        tracemalloc.stop()
    for (python, tensors), (later_python, later_tensors) in itertools.pairwise(sizes[1:]):
        assert later_tensors <= tensors + 4096 and later_python <= python + 20_000
