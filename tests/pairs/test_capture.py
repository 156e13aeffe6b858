"""Captures against raw pairs computed independently, and the network left as it was found."""

import contextlib
import copy
import itertools
import re

import numpy as np
import pytest
import torch
from networks import Detector, State, network_of, numbered_samples
from torch import nn

import normscope
from normscope.errors import DataError, ModelError, NormscopeError, UsageError
from normscope.inputs.batch import Batch, Sample
from normscope.pairs.capture import captured
from normscope.pairs.recorder import CaptureOptions
from normscope.pairs.sums.binning import PAIR_GRID


def network() -> nn.Module:
    """Two norms of different kind after layers whose tokens differ in scale."""

    def forward(self, x):
        x = self.embed(x) * x.norm(dim=-1, keepdim=True) ** 3
        x = x + self.first(x)
        return self.dropout(self.second(x))

    torch.manual_seed(0)
    norms = {"first": nn.LayerNorm(24, eps=1e-5), "second": nn.RMSNorm(24, eps=1e-6)}
    return network_of(forward, embed=nn.Linear(6, 24), **norms, dropout=nn.Dropout(0.5))


def inputs(count: int = 3, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 10, 6, generator=generator) for _ in range(count)]


def raw_pairs(network: nn.Module, batches: list[torch.Tensor]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """x by hooks of our own, y by numpy in float64 from the definition of the norms."""
    network, seen = copy.deepcopy(network).eval(), {"first": [], "second": []}
    for name, rows in seen.items():
        network.get_submodule(name).register_forward_pre_hook(
            lambda module, args, rows=rows: rows.append(args[0].numpy().reshape(-1, 24).copy())
        )
    with torch.no_grad():
        for batch in batches:
            network(batch)
    x = {name: np.concatenate(rows).astype(np.float64) for name, rows in seen.items()}
    centred = x["first"] - x["first"].mean(1, keepdims=True)
    first = centred / np.sqrt(x["first"].var(1, keepdims=True) + 1e-5)
    second = x["second"] / np.sqrt((x["second"] ** 2).mean(1, keepdims=True) + 1e-6)
    return {"first": (x["first"], first), "second": (x["second"], second)}


def test_sums_equal_those_of_the_raw_pairs():
    model, batches = network(), inputs()
    model.first.weight.data[:] = torch.linspace(0, 2, 24)  # y is before the affine step, also where γ is zero
    seen = normscope.capture(model, batches)
    for name, (x, y) in raw_pairs(model, batches).items():
        stats = seen.stats[name]
        assert stats.n_pairs == x.size == stats.density.sum()
        bins = np.searchsorted(PAIR_GRID.edges().numpy(), x.ravel(), side="right") - 1
        positive = x.ravel() >= 0  # bins of negative numbers hold their upper edge, which no raw x here hits
        assert positive.any()
        counts = np.bincount(bins, minlength=PAIR_GRID.size)
        np.testing.assert_array_equal(stats.moments[:, 0].sum(0).numpy(), counts)
        ours = stats.moments.sum((0, 2)).numpy()
        expected = [x.size, x.sum(), y.sum(), (x * x).sum(), (x * y).sum(), (y * y).sum()]
        scale = [x.size, abs(x).sum(), abs(y).sum(), (x * x).sum(), abs(x * y).sum(), (y * y).sum()]
        assert (abs(ours - expected) <= 1e-12 * np.array(scale)).all()
        np.testing.assert_allclose(stats.channel_sums[1].numpy(), (x**2).sum(0), rtol=1e-12)
        assert (abs(stats.channel_sums[0].numpy() - x.sum(0)) <= 1e-12 * abs(x).sum(0)).all()
        np.testing.assert_array_equal(stats.channel_extremes.numpy(), [x.min(0), x.max(0)])


def test_sums_by_gamma_and_per_channel_equal_those_of_the_raw_pairs():
    model, batches = network(), inputs()
    model.first.weight.data[:] = torch.linspace(-2, 2, 24)
    seen = normscope.capture(model, batches, by_gamma=True, per_channel=True)
    x, y = raw_pairs(model, batches)["first"]
    stats = seen.stats["first"]
    weight = model.first.weight.detach().double().numpy() ** 2
    ours = stats.gamma_moments.sum((0, 2)).numpy()
    expected = [len(x) * weight.sum(), *((weight * v).sum() for v in (x, y, x * x, x * y, y * y))]
    np.testing.assert_allclose(ours, expected, rtol=1e-12, atol=1e-9)  # Σy nearly cancels
    assert stats.gamma_moments.shape == stats.moments.shape
    per_channel = stats.channel_moments.sum(2).numpy()
    np.testing.assert_array_equal(per_channel[0], np.full(24, len(x)))
    np.testing.assert_allclose(per_channel[3], (x * x).sum(0), rtol=1e-12)
    np.testing.assert_allclose(per_channel[4], (x * y).sum(0), rtol=1e-12)


def test_batches_and_their_order_do_not_matter():
    model = network()
    whole = torch.cat(inputs())
    samples = numbered_samples(12)

    def cut(*bounds: int) -> list[Batch]:
        return [Batch((whole[a:b],), samples=samples[a:b]) for a, b in itertools.pairwise(bounds)]

    expected = normscope.capture(model, cut(0, 12)).stats["first"]
    for batches in (cut(0, 5, 6, 12), cut(0, 5, 12)[::-1]):
        stats = normscope.capture(model, batches).stats["first"]
        assert torch.equal(stats.moments[:, 0], expected.moments[:, 0])
        # A matrix product over another batch may round differently in the last place, so compare loosely here.
        assert torch.allclose(stats.moments, expected.moments, rtol=1e-5, atol=1e-4)
        assert torch.equal(stats.tokens.key, expected.tokens.key)
        assert torch.equal(stats.pairs.key, expected.pairs.key)


def broken_after(failure):
    def batches():
        yield inputs(1)[0]
        torch.rand(3)  # a data set that draws random numbers of its own
        if failure is not None:
            raise failure

    return batches()


BAD = torch.zeros(4, 10, 5)


@pytest.mark.parametrize(
    ("batches", "error", "words"),
    [
        (broken_after(None), None, None),
        (broken_after(ValueError("broken")), ValueError, "broken"),
        (broken_after(KeyboardInterrupt()), KeyboardInterrupt, None),
        ([BAD], ModelError, r"raised RuntimeError on inputs of the shapes \(1, 10, 5\): "),
        ([*inputs(1), BAD], ModelError, r"raised RuntimeError on inputs of the shapes \(4, 10, 5\): "),
    ],
)
def test_the_network_is_restored(batches, error, words):
    model = network().train()
    model.first.eval()
    before, drawn = State(model), torch.get_rng_state()
    with contextlib.nullcontext() if error is None else pytest.raises(error, match=words):
        normscope.capture(model, batches)
    before.assert_same(model)
    assert torch.is_grad_enabled() and torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_input_is_normalized_in_float32(dtype):
    seen = []
    model = nn.Sequential(nn.LayerNorm(16)).to(dtype)
    batch = (torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(0)) * 5).to(dtype)
    captured(model, [batch], CaptureOptions(verify=True, observe=lambda site, x, y: seen.append(y.clone())))
    exact = nn.functional.layer_norm(batch.double(), (16,))
    assert torch.allclose(seen[0].view(4, 8, 16).double(), exact, atol=2e-5)


def test_both_calls_of_a_norm_are_summed():
    norm = nn.LayerNorm(8)
    model = nn.Sequential(norm, nn.Linear(8, 8), norm)
    seen = normscope.capture(model, [torch.randn(2, 5, 8)])
    assert seen.sites[0].calls == 2
    assert seen.stats["0"].n_pairs == 2 * 2 * 5 * 8
    assert len(seen.stats["0"].tokens.key.unique()) == 20


def test_a_norm_without_tokens_adds_nothing():
    expert = network_of(lambda self, x: self.norm(x[x[:, 0] > 0]), norm=nn.LayerNorm(4))  # of a mixture
    ones = torch.ones(2, 4) + torch.arange(4)
    for sample in (None, 3):
        stats = normscope.capture(expert, [ones, -ones, ones], sample=sample).stats["norm"]
        assert stats.n_tokens == 4


def test_tokens_that_every_sample_shares_have_no_folds():
    queries = nn.Parameter(torch.randn(1, 8, 16))
    model = network_of(lambda self, x: x + self.norm(self.queries), queries=queries, norm=nn.LayerNorm(16))
    stats = normscope.capture(model, [torch.randn(4, 8, 16), torch.randn(4, 8, 16)]).stats["norm"]
    assert stats.fold_by is None
    assert stats.n_tokens == len(stats.tokens.key.unique()) == 16


def test_norms_that_are_called_for_some_samples_only():
    def forward(self, x):
        self.count += 1
        return self.always(self.first(x) if self.count == 1 else self.later(x))

    norms = {name: nn.LayerNorm(8) for name in ("always", "first", "later")}
    seen = normscope.capture(network_of(forward, count=0, **norms), [torch.randn(2, 8)])
    assert [site.name for site in seen.sites] == ["always"]
    assert [(norm.name, norm.reason) for norm in seen.skipped] == [
        ("later", "not called by the first sample, only by later ones"),
        ("first", "called for the first sample alone, and never again"),
    ]


def test_exported_models_are_refused_and_traced_ones_run():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    exported = torch.export.export(model, (batch,))
    for graph in (exported, exported.module(), nn.Sequential(exported.module(), nn.LayerNorm(8))):
        with pytest.raises(ModelError, match=r"Pass the module as it was before torch\.export\.export"):
            normscope.capture(graph, [batch])
    traced = normscope.capture(torch.fx.symbolic_trace(model), [batch])
    assert torch.equal(traced.stats["1"].moments, normscope.capture(model, [batch]).stats["1"].moments)


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_norms_of_nested_tensors_are_named_as_skipped(layout):
    def forward(self, x):
        parts = [part[: 1 + number] for number, part in enumerate(self.plain(x))]
        self.ragged(torch.nested.nested_tensor(parts, layout=layout))
        return x

    model = network_of(forward, plain=nn.LayerNorm(8), ragged=nn.LayerNorm(8))
    seen = normscope.capture(model, [torch.randn(4, 5, 8)])
    assert list(seen.stats) == ["plain"]
    reason = "it takes a nested tensor, whose tokens cannot be told apart by sample"
    assert [(norm.name, norm.reason) for norm in seen.skipped] == [("ragged", reason)]


@pytest.mark.parametrize(
    ("model", "entry"),
    [
        (Detector, [torch.zeros(3, 4, 8)]),
        (Detector, {"images": [torch.zeros(3, 4, 8)]}),
        (lambda: nn.LayerNorm(8), {"input": torch.zeros(4, 8), "label": torch.zeros(4)}),
        (lambda: nn.LayerNorm(8), object()),
    ],
)
def test_batches_that_are_no_arguments_name_a_batch_that_works(model, entry):
    with pytest.raises(NormscopeError) as caught:
        normscope.capture(model(), [entry])
    (example,) = re.findall(r"normscope\.Batch\(.*\)\)", str(caught.value))
    image = torch.randn(3, 4, 8)
    batch = eval(example, {"normscope": normscope, "x": [image]})  # noqa: S307 - as a reader would copy it
    seen = normscope.capture(Detector(), [batch])
    assert (seen.n_samples, seen.stats["norm"].n_pairs) == (1, image.numel())


REFUSED = {
    "no batch": ([], "all", DataError, "no batch"),
    "a number": ([3], "all", DataError, "Batch 0 is a int"),
    "no tensor": ([{"scale": 2.0}], "all", DataError, "has no tensor"),
    "an empty tensor": ([torch.zeros(0, 10, 6)], "all", DataError, "Batch 0 contains no sample"),
    "no samples": ([Batch((torch.zeros(2, 10, 6),))], "all", DataError, "Batch 0 contains no sample"),
    "a misspelt layer": (inputs(1), "frist", UsageError, "Did you mean 'first'"),
}


@pytest.mark.parametrize(("batches", "layers", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_refusals(batches, layers, error, words):
    with pytest.raises(error, match=words):
        normscope.capture(network(), batches, layers=layers)


def test_progress_counts_samples():
    network, steps = normscope.load("demo_vit", limit=20, device="cpu"), []
    for batches, total in ((None, 20), (iter(list(network.inputs)), None)):
        steps.clear()
        normscope.capture(network, batches, layers="norm", progress=lambda *step: steps.append(step))
        assert steps == [("samples", n, total) for n in (0, 8, 16, 20)]


def test_options_and_samples_may_be_numbers_of_numpy_and_torch(tmp_path):
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    samples = tuple(Sample("a", i, i, label=torch.tensor(3)) for i in np.arange(2))
    batch = normscope.Batch((torch.randn(2, 5, 4),), samples=samples)
    seen = normscope.capture(model, [batch], seed=np.int64(1), sample=np.int64(3), skip=np.int64(1))
    normscope.save_capture(seen, tmp_path / "seen.safetensors")
    assert normscope.load_capture(tmp_path / "seen.safetensors").seed == 1
