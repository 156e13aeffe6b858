"""Swaps of language models: judged, calibrated, kept and healed by KL divergence, and never through a tied head."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normscope
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.loaded_model import Outputs
from normscope.inputs.pool import Pool
from normscope.pairs.norms.streams import unpacked
from normscope.swaps.calibrate import calibrate as module
from normscope.swaps.heal.lessons import Lessons
from normscope.swaps.heal.training import Course

ENTRIES, USED = 40, 12


class TinyForCausalLM(nn.Module):
    """A pre-norm decoder that adds up its past in place of attention; few entries of its vocabulary ever occur."""

    def __init__(self, *, tied):
        super().__init__()
        self.words = nn.Embedding(ENTRIES, 16)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, ENTRIES, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, input_ids):
        x = self.words(input_ids).cumsum(1) / torch.arange(1, 1 + input_ids.shape[1])[:, None].sqrt()
        for norm, layer in zip(self.norms, self.layers, strict=False):
            x = x + layer(norm(x)).relu()
        return self.head(self.norms[-1](x))


def texts(number, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(USED, (number, 8, 6), generator=generator)
    return [
        Batch(kwargs={"input_ids": own}, samples=tuple(Sample(f"{n} {i}", i, 8 * n + i) for i in range(8)))
        for n, own in enumerate(ids)
    ]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def decoder(request):
    """A trained decoder, and its capture."""
    torch.manual_seed(0)
    model = TinyForCausalLM(tied=request.param)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):  # each token is followed by the next one, of those that occur
        ids = torch.randint(USED, (16, 6))
        loss = F.cross_entropy(model(ids).flatten(0, 1), ((ids + 1) % USED).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval().requires_grad_(False)
    return model, normscope.capture(model, texts(8, 1), by_gamma=True)


@torch.no_grad()
def kl(original, swapped, batches):
    """Each text's mean over its tokens, by torch's own divergence."""
    found = []
    for batch in batches:
        p, q = (network(**batch.kwargs).double().log_softmax(-1) for network in (original, swapped))
        found.append(F.kl_div(q, p, log_target=True, reduction="none").sum(-1).mean(-1))
    return torch.cat(found).sort().values


def swapped_of(decoder):
    swapped = copy.deepcopy(decoder[0])
    normscope.swap(swapped, "tanh", decoder[1])
    return swapped


def test_a_head_that_shares_the_word_embeddings_is_left_alone(decoder):
    original, _ = decoder
    swapped, tied = swapped_of(decoder), original.head.weight is original.words.weight
    report = normscope.calibrate(original, swapped, texts(8, 1))
    assert torch.equal(swapped.words.weight, original.words.weight)
    assert ("head" in report.left) == tied and ("head" in {one.path for one in report.modules}) != tied


def test_calibration_is_judged_by_the_divergence_of_what_logits_mean(decoder):
    original, learn = decoder[0], texts(8, 1)
    swapped, judged, held_out = swapped_of(decoder), Pool.of(learn).judged, texts(4, 2)
    before, far = kl(original, swapped, judged), kl(original, swapped, held_out)
    report = normscope.calibrate(original, swapped, learn)
    after, near = kl(original, swapped, judged), kl(original, swapped, held_out)
    assert report.measure == "KL divergence" and not report.restored
    # Float32, and a median that lies at one of the samples.
    assert report.before == pytest.approx(float(before[len(before) // 2]), rel=1e-3)
    assert report.after == pytest.approx(float(after[len(after) // 2]), rel=1e-3)
    assert near.quantile(0.5) < far.quantile(0.5) and near.quantile(0.9) < far.quantile(0.9)


def test_a_refitted_head_that_says_less_of_each_word_is_put_back(decoder, monkeypatch):
    """Least squares over all entries may fit those that never occur at the cost of the others."""
    original, swapped = decoder[0], swapped_of(decoder)
    if original.head.weight is original.words.weight:
        pytest.skip("it is not refitted")
    put = module.Refitting._at_layer

    def spoiled(own, station, *rest):
        put(own, station, *rest)
        if station.path == "head":
            own._swapped.head.weight[:USED] *= 0.2

    monkeypatch.setattr(module.Refitting, "_at_layer", spoiled)
    normscope.calibrate(original, swapped, texts(8, 1))
    assert torch.equal(swapped.head.weight, original.head.weight)


def test_a_90th_percentile_that_rises_puts_the_start_values_back(decoder, monkeypatch):
    swapped, found = swapped_of(decoder), iter([(0.2, 0.5), (0.1, 0.6), (0.1, 0.6)])
    start = {name: value.clone() for name, value in swapped.state_dict().items()}
    monkeypatch.setattr(module, "_quantiles", lambda *given: next(found))
    report = normscope.calibrate(decoder[0], swapped, texts(8, 1))
    assert report.restored and (report.before, report.after) == (0.2, 0.2)
    assert all(torch.equal(value, start[name]) for name, value in swapped.state_dict().items() if name in start)


def test_the_norm_that_is_kept_is_that_of_the_least_divergence(decoder):
    original, batches = decoder[0], texts(4, 3)
    modules = normscope.replacements(original, "tanh", decoder[1])
    report = normscope.keep(original, batches, modules, number=1)
    found = {}
    for path in modules:
        swapped = copy.deepcopy(original)
        normscope.Swap(swapped, {name: copy.deepcopy(one) for name, one in modules.items() if name != path})
        found[path] = float(kl(original, swapped, batches).quantile(0.5))
    assert report.measure == "KL divergence" and report.kept == [min(found, key=found.get)]
    assert report.steps[1].error.p50 == pytest.approx(min(found.values()), rel=1e-3)


def test_healing_learns_from_logits_by_their_divergence(decoder):
    original, swapped, (batch, *_) = decoder[0], swapped_of(decoder), texts(1, 4)
    loss = Lessons(original, swapped.requires_grad_(True), Outputs("tokens"), [], [[batch]]).gradients(0)
    assert loss == pytest.approx(float(kl(original, swapped, [batch]).mean()) ** 0.5, rel=1e-3)
    report = normscope.heal(original, swapped_of(decoder), texts(8, 1), texts(4, 2), steps=24)
    assert report.measure == "KL divergence"
    assert report.after["median"] < report.before["median"] and report.after["p90"] <= report.before["p90"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("GPT2LMHeadModel", "tokens"), ("BertForMaskedLM", "tokens"), ("ViTForImageClassification", "classes")],
)
def test_what_a_module_gives_is_told_from_its_class_or_that_of_a_base(name, kind):
    derived = type("Mine", (type(name, (nn.Linear,), {}),), {})
    assert unpacked(derived(2, 2), [])[3].kind == kind
    assert unpacked(nn.Linear(2, 2), [])[3].kind == "tensor"
    assert unpacked(derived(2, 2), [], outputs=Outputs("frames"))[3].kind == "frames"


def test_a_state_that_is_far_off_for_some_inputs_is_not_kept():
    course = Course(0.5, 0.8)
    assert [course.check(*found, 0.0).kept for found in ((0.4, 0.9), (0.45, 0.8), (0.44, 0.7))] == [False, True, True]
