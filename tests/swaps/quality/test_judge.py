"""Quality before and after a swap, and after healing, against scikit-learn; a function of one's own; and reasons."""

import copy
import json
import math

import pytest
import torch
from scipy import stats
from sklearn.metrics import accuracy_score
from torch import nn

import normscope
from normscope.errors import UsageError
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.loaded_model import LoadedModel, Outputs, Provenance, Task
from normscope.pairs.ranks import Ranks
from normscope.runtime.progress import silent
from normscope.swaps.drift.drift import drift
from normscope.swaps.heal.heal import heal
from normscope.swaps.pointwise import DyT
from normscope.swaps.quality.judge import Judge


def judged(task, module, batches, outputs):
    judge = Judge(task, batches, outputs, silent)
    judge.add("original", module)
    return judge


@pytest.fixture(scope="module")
def digits():
    return normscope.load("demo_vit", device="cpu")


def plain_logits(module, batches):
    with torch.no_grad():
        return torch.cat([module(batch.args[0]) for batch in batches]).double()


def test_top_1_is_scikit_learns_accuracy_before_and_after(digits):
    labels = [sample.label for batch in digits.inputs for sample in batch.samples]
    modules = {f"blocks.{n}.norm1": DyT(64, alpha=0.4) for n in range(8)}
    report = drift(digits, None, modules, one_at_a_time=False, cumulative=False)
    before = accuracy_score(labels, plain_logits(digits.module, digits.inputs).argmax(1).tolist())
    with normscope.Swap(digits.module, modules):
        after = accuracy_score(labels, plain_logits(digits.module, digits.inputs).argmax(1).tolist())
    found = report.quality
    assert (found.name, found.n, found.over, found.higher_is_better) == (
        *("top-1 accuracy", 64, "64 labelled samples", True),
    )
    assert {name: score.value for name, score in found.scores.items()} == {"original": before, "swapped": after}
    assert after < before and report.no_quality == ""
    # Wilson's interval by its formula; both are float64.
    z, p, n = stats.norm.ppf(0.975), after, 64
    middle, half = (
        (p + z * z / 2 / n) / (1 + z * z / n),
        z * math.sqrt(p * (1 - p) / n + z * z / 4 / n**2) / (1 + z * z / n),
    )
    assert found.scores["swapped"].interval == pytest.approx((middle - half, middle + half), rel=1e-9)
    document = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert document["quality"]["scores"]["swapped"]["value"] == after and document["no_quality"] == ""


def test_samples_that_share_a_source_get_no_interval():
    batch = Batch((torch.eye(4),), samples=tuple(Sample("one photograph", 0, n, label=n) for n in range(4)))
    score = judged(Task("top-1"), nn.Identity(), [batch], Outputs("classes")).quality.scores["original"]
    assert (score.value, score.interval) == (1.0, None)


def test_equal_names_in_two_data_sets_are_independent_sources():
    samples = tuple(Sample(f"{n % 2}.png", n % 2, n % 2, data="ab"[n // 2], label=n) for n in range(4))
    batch = Batch((torch.eye(4),), samples=samples)
    score = judged(Task("top-1"), nn.Identity(), [batch], Outputs("classes")).quality.scores["original"]
    expected = stats.binomtest(4, 4).proportion_ci(0.95, method="wilson")
    assert score.interval == pytest.approx((expected.low, expected.high))


class Block(nn.Module):
    """A norm and a layer of 4 channels; its memory ends with more samples than fit."""

    def __init__(self, fits=99):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head, self.fits = nn.LayerNorm(4), nn.Linear(4, 3), fits

    def forward(self, x):
        if len(x) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.head(self.norm(x))


def labelled(n=10, seed=1):
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))
    return Batch((x,), samples=tuple(Sample(f"s{i}", i, i, label=i % 3) for i in range(n)))


class KeptBatches(list):
    description, left_out, unreadable = "ten points", None, ()


def loaded(module, task=None):
    provenance, outputs = Provenance("custom", "made here"), Outputs("classes")
    batches = KeptBatches([labelled()])
    return LoadedModel("block", module, batches, provenance, outputs, task=task or Task("top-1"))


def test_batches_are_halved_where_memory_ends():
    whole = judged(Task("top-1"), Block(), [labelled()], Outputs("classes")).quality
    halved = judged(Task("top-1"), Block(fits=3), [labelled()], Outputs("classes")).quality
    assert halved == whole and whole.n == 10


def test_what_is_not_finite_is_wrong_and_none_in_json():
    class Spoilt(nn.Module):
        def forward(self, x):
            return torch.full_like(x, math.nan)

    report = drift(loaded(Block()), None, {"norm": Spoilt()})
    assert report.quality.scores["swapped"].value == 0 < report.quality.scores["original"].value


def test_a_function_of_ones_own_sees_the_network_swapped_and_left_as_found():
    model = Block().train()
    x = labelled().args[0]
    seen = []

    def brightness(module):
        seen.append((type(module.norm).__name__, module.training, torch.is_grad_enabled()))
        return module(x).mean()

    function = DyT(4)
    report = drift(model, [x], {"norm": function}, quality=brightness)
    assert seen == [("LayerNorm", False, False), ("PointwiseFunction", False, False)] and model.training
    with torch.no_grad():
        wanted = {"original": float(model(x).mean()), "swapped": float(model.head(function(x)).mean())}
    assert {name: score.value for name, score in report.quality.scores.items()} == pytest.approx(wanted)
    assert (report.quality.name, report.quality.n, report.quality.higher_is_better) == ("brightness", None, None)
    # It takes the place of what a loaded model's labels tell, too.
    assert drift(loaded(model), None, {"norm": function}, quality=lambda module: 7).quality.name == "quality"
    with pytest.raises(UsageError, match=r"quality= returned a str; it has to return a number\."):
        drift(model, [x], {"norm": function}, quality=lambda module: "good")


def test_why_there_is_none_is_said():
    function = {"norm": DyT(4)}
    plain = drift(Block(), [labelled()], function)
    assert plain.quality is None and "pass quality=" in plain.no_quality
    other = drift(loaded(Block()), [labelled().args[0]], function)
    assert (other.quality, other.no_quality) == (None, "the samples have no labels")
    once = drift(loaded(Block()), iter([labelled()]), function, cumulative=False)
    assert (once.quality, once.no_quality) == (None, "the batches can be iterated only once")


def test_the_first_rank_measures_and_all_know():
    report = drift(loaded(Block()), None, {"norm": DyT(4)})
    judge = Judge(Task("top-1"), [], Outputs("classes"), silent)

    class Second(Ranks):
        def told(self, message):
            assert message == [None, ""]
            document = report.as_dict()
            return [[document["quality"], ""], message]

    judge.settle(Second(rank=1, size=2))
    assert judge.quality == report.quality and report.quality.scores["original"].interval is not None


def test_healing_says_the_same_number_before_and_after():
    network = loaded(Block())
    swapped = copy.deepcopy(network.module)
    normscope.Swap(swapped, {"norm": DyT(4)})
    first = copy.deepcopy(swapped)
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(7))
    report = heal(network, swapped, list(x.split(4)), [labelled()], steps=40)
    labels = [sample.label for sample in labelled().samples]
    wanted = {}
    for name, module in (("original", network.module), ("swapped", first), ("healed", swapped)):
        wanted[name] = accuracy_score(labels, plain_logits(module, [labelled()]).argmax(1).tolist())
    assert {name: score.value for name, score in report.quality.scores.items()} == wanted
    assert report.as_dict()["quality"]["scores"]["healed"]["value"] == wanted["healed"]

    def weight(module):
        return module.head.weight.sum()

    own = heal(network, copy.deepcopy(first), list(x.split(4)), [labelled()], steps=4, quality=weight).quality
    assert own.scores["original"] == own.scores["swapped"] != own.scores["healed"]
    without = heal(network.module, copy.deepcopy(first), list(x.split(4)), [labelled()], steps=4)
    assert without.quality is None and "pass quality=" in without.no_quality
