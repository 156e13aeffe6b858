"""Accuracy, perplexity and rank correlation against scipy, transformers' own loss, and plain loops."""

import copy
import itertools
import json
import math

import numpy as np
import pytest
import torch
import transformers
from networks import network_of
from scipy import stats
from sklearn.metrics import accuracy_score
from torch import nn
from torch.nn import functional as F

import normscope
from normscope.errors import UsageError
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.loaded_model import LoadedModel, Outputs, Provenance, Task
from normscope.pairs.ranks import Ranks
from normscope.runtime.progress import silent
from normscope.swaps import quality as measures
from normscope.swaps.drift.drift import drift
from normscope.swaps.pointwise import DyT
from normscope.swaps.quality import QualityMeter
from normscope.tools.heal.heal import heal

TINY = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
MASK, AROUND = 39, (37, 38)


def measured(task, module, batches, outputs):
    meter = QualityMeter(module, task, batches, outputs, silent)
    meter.add("original", module)
    return meter


def texts(lengths, seed=0, labels=None):
    """Return token ids of some texts, and a right-padded batch of them: ids from 1 to 36."""
    draw = torch.Generator().manual_seed(seed)
    rows = [torch.randint(1, 37, (length,), generator=draw) for length in lengths]
    ids, mask = torch.zeros(len(rows), max(lengths), dtype=torch.long), torch.zeros(len(rows), max(lengths)).long()
    for number, row in enumerate(rows):
        ids[number, : len(row)], mask[number, : len(row)] = row, 1
    samples = tuple(
        Sample(f"text {n}", n if labels is None else n // 2, n, label=labels and labels[n // 2])
        for n in range(len(rows))
    )
    return rows, Batch(kwargs={"input_ids": ids, "attention_mask": mask}, samples=samples, valid=mask.bool())


def made(model_class, config):
    torch.manual_seed(3)
    model = model_class(config).eval()
    with torch.no_grad():  # of fresh weights all tokens are alike, and any mistake would give the same number
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.ndim > 1 else 1)
    return model


def gpt2():
    config = transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    return made(transformers.GPT2LMHeadModel, config)


def bert(name="BertForMaskedLM", **changes):
    return made(getattr(transformers, name), transformers.BertConfig(**TINY, **changes))


def test_words_are_read_as_ctc_reads_them():
    network = normscope.load("demo_wav2vec2", limit=12, device="cpu")
    quality = measured(network.task, network.module, network.inputs, network.outputs).quality
    right = 0
    for batch in network.inputs:
        with torch.no_grad():
            frames = network.module(*batch.args)[0][0].argmax(-1).tolist()
        word = "".join("-|'ABCDEFGHIJKLMNOPQRSTUVWXYZ"[place] for place, _ in itertools.groupby(frames))
        right += word.replace("-", "") == batch.samples[0].label
    assert quality.scores["original"].value == right / 12 and 8 <= right < 12  # one of the first twelve is misread
    assert (quality.name, quality.over) == ("word accuracy", "12 words")


@pytest.mark.parametrize("in_pieces", [False, True])
def test_perplexity_is_that_of_transformers_own_loss(monkeypatch, in_pieces):
    model = gpt2()
    rows, batch = texts([7, 1, 12, 2])
    if in_pieces:
        monkeypatch.setattr(measures, "_AT_ONCE", 3 * 40)  # three positions at a time
    batches = [batch.take([0]), batch.take([3, 1, 2])] if in_pieces else [batch]
    losses = []
    with torch.no_grad():
        for row in rows:
            if len(row) > 1:
                losses += [float(model(row[None], labels=row[None]).loss)] * (len(row) - 1)
    quality = measured(Task("perplexity"), model, batches, Outputs("tokens")).quality
    # transformers computes the loss in float32.
    assert quality.scores["original"].value == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
    assert (quality.n, quality.over, quality.higher_is_better) == (6 + 11 + 1, "18 tokens of 3 texts", False)


def test_a_model_that_looks_ahead_has_no_perplexity():
    _, batch = texts([7, 9])
    meter = measured(Task("perplexity"), bert("BertLMHeadModel"), [batch], Outputs("tokens"))
    assert meter.quality is None and "looks at the tokens that it would have to predict" in meter.no_quality
    decoder = measured(Task("perplexity"), bert("BertLMHeadModel", is_decoder=True), [batch], Outputs("tokens"))
    assert decoder.quality.n == 6 + 8


@pytest.mark.parametrize("lengths", [(6, 9, 4), (100, 120, 90)])
def test_pseudo_perplexity_is_that_of_a_plain_loop(lengths):
    model = bert()
    rows, batch = texts(lengths)
    for number, row in enumerate(rows):
        row[0], row[-1] = AROUND
        batch.kwargs["input_ids"][number, : len(row)] = row
    surprises = []
    for row in rows:
        hidden = row.repeat(len(row), 1).fill_diagonal_(MASK)
        with torch.no_grad():
            logits = model(hidden).logits.diagonal().T.double()
        surprises += F.cross_entropy(logits, row, reduction="none")[1:-1].tolist()
    # At most 256, evenly among all.
    taken = surprises if len(surprises) <= 256 else [surprises[number * len(surprises) // 256] for number in range(256)]
    task = Task("pseudo-perplexity", mask_id=MASK, unmasked=frozenset(AROUND))
    quality = measured(task, model, [batch], Outputs("tokens")).quality
    # Padded rows sum in another order, in float32.
    assert quality.scores["original"].value == pytest.approx(math.exp(np.mean(taken)), rel=1e-5)
    of = "256 tokens, each masked alone, evenly among 304" if sum(lengths) > 256 else "13 tokens, each masked alone"
    assert (quality.n, quality.over) == (len(taken), of)


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_spearman_is_scipys_on_embeddings_by_hand(pooling):
    model = bert("BertModel")
    scores = [4.5, 0.0, 2.0, 2.0, 3.5]
    rows, batch = texts([3, 8, 5, 5, 9, 4, 6, 7, 3, 2], labels=scores)
    with torch.no_grad():
        alone = [model(row[None]).last_hidden_state[0].double() for row in rows]
    pooled = [{"mean": one.mean(0), "first": one[0], "last": one[-1]}[pooling].numpy() for one in alone]
    cosines = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(pooled[::2], pooled[1::2], strict=True)]
    # In pieces that divide a pair, as halved batches do.
    parts = [batch.take(range(3)), batch.take(range(3, 10))]
    quality = measured(Task("spearman", pooling=pooling), model, parts, Outputs("tensor")).quality
    assert quality.scores["original"].value == pytest.approx(stats.spearmanr(cosines, scores).statistic, abs=1e-12)
    assert quality.n == 5 and quality.over.startswith("5 pairs of sentences, ")


def pooled():
    return network_of(lambda self, input_ids, attention_mask: input_ids[:, :4].float())


@pytest.mark.parametrize(
    ("task", "batch", "reason"),
    [
        *((task, texts([5, 5, 6, 7], labels=[1.0, 2.0])[1], "gives (4, 4), which is not a vector for each")
          for task in (Task("perplexity"), Task("spearman"), Task("pseudo-perplexity", mask_id=MASK))),
        (Task("perplexity"), torch.zeros(2, 3), "no input_ids"),
        (Task("pseudo-perplexity", mask_id=MASK), torch.zeros(2, 3), "no input_ids"),
        (Task("spearman"), texts([3, 8], labels=[1.5])[1], "there are 1"),
    ],
)  # fmt: skip
def test_the_reason_is_reported_where_nothing_can_be_measured(task, batch, reason):
    network = (
        nn.Identity() if isinstance(batch, torch.Tensor) else pooled() if "vector" in reason else bert("BertModel")
    )
    meter = measured(task, network, [batch], Outputs("tensor" if task.measure == "spearman" else "tokens"))
    assert meter.quality is None and reason in meter.no_quality


def spoilt():
    return network_of(lambda self, x: torch.full_like(x, math.nan))


def test_a_perplexity_that_is_not_finite_is_infinite_and_none_in_json():
    _, batch = texts([7, 9])
    how = {"outputs": Outputs("tokens"), "quality": Task("perplexity")}
    report = drift(gpt2(), [batch], {"transformer.ln_f": spoilt()}, **how)
    assert report.quality.scores["swapped"].value == math.inf
    assert report.as_dict()["quality"]["scores"]["swapped"]["value"] is None


@pytest.fixture(scope="module")
def digits():
    return normscope.load("demo_vit", device="cpu")


def plain_logits(module, batches):
    with torch.no_grad():
        return torch.cat([module(batch.args[0]) for batch in batches]).double()


def test_top_1_is_the_accuracy_of_scikit_learn(digits):
    labels = [sample.label for batch in digits.inputs for sample in batch.samples]
    modules = {f"blocks.{n}.norm1": DyT(64, alpha=0.4) for n in range(8)}
    report = drift(digits, None, modules, one_at_a_time=False, cumulative=False)
    before = accuracy_score(labels, plain_logits(digits.module, digits.inputs).argmax(1).tolist())
    with normscope.Swap(digits.module, modules):
        after = accuracy_score(labels, plain_logits(digits.module, digits.inputs).argmax(1).tolist())
    quality = report.quality
    assert (quality.name, quality.n, quality.over, quality.higher_is_better) == (
        *("top-1 accuracy", 64, "64 labelled samples", True),
    )
    assert {name: score.value for name, score in quality.scores.items()} == {"original": before, "swapped": after}
    assert after < before and report.no_quality == ""
    # Wilson's interval by its formula; both are float64.
    z, p, n = stats.norm.ppf(0.975), after, 64
    middle = (p + z * z / 2 / n) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / 4 / n**2) / (1 + z * z / n)
    assert quality.scores["swapped"].interval == pytest.approx((middle - half, middle + half), rel=1e-9)
    document = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert document["quality"]["scores"]["swapped"]["value"] == after and document["no_quality"] == ""


def test_samples_that_share_a_source_get_no_interval_but_equal_names_in_two_data_sets_do():
    shared = tuple(Sample("one photograph", 0, n, label=n) for n in range(4))
    apart = tuple(Sample(f"{n % 2}.png", n % 2, n % 2, data="ab"[n // 2], label=n) for n in range(4))
    scores = []
    for samples in (shared, apart):
        batch = Batch((torch.eye(4),), samples=samples)
        scores.append(measured(Task("top-1"), nn.Identity(), [batch], Outputs("classes")).quality.scores["original"])
    wilson = stats.binomtest(4, 4).proportion_ci(0.95, method="wilson")
    assert (scores[0].value, scores[0].interval) == (1.0, None)
    assert scores[1].interval == pytest.approx((wilson.low, wilson.high))


def block(fits=99):
    """A norm and a layer of 4 channels; its memory ends with more samples than fit."""

    def forward(self, x):
        if len(x) > fits:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.head(self.norm(x))

    torch.manual_seed(0)
    return network_of(forward, norm=nn.LayerNorm(4), head=nn.Linear(4, 3))


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
    whole = measured(Task("top-1"), block(), [labelled()], Outputs("classes")).quality
    halved = measured(Task("top-1"), block(fits=3), [labelled()], Outputs("classes")).quality
    assert halved == whole and whole.n == 10


def test_answers_that_are_not_finite_are_wrong():
    report = drift(loaded(block()), None, {"norm": spoilt()})
    assert report.quality.scores["swapped"].value == 0 < report.quality.scores["original"].value


def test_a_quality_function_gets_the_network_in_eval_mode_before_and_after_the_swap():
    model = block().train()
    x = labelled().args[0]
    seen = []

    def brightness(module):
        seen.append((type(module.norm).__name__, module.training, torch.is_grad_enabled()))
        return module(x).mean()

    function = DyT(4)
    report = drift(model, [x], {"norm": function}, quality=brightness)
    assert seen == [("LayerNorm", False, False), ("PointwiseFunction", False, False)] and model.training
    with torch.no_grad():
        expected = {"original": float(model(x).mean()), "swapped": float(model.head(function(x)).mean())}
    assert {name: score.value for name, score in report.quality.scores.items()} == pytest.approx(expected)
    assert (report.quality.name, report.quality.n, report.quality.higher_is_better) == ("brightness", None, None)
    # It takes the place of what a loaded model's labels tell, too.
    assert drift(loaded(model), None, {"norm": function}, quality=lambda module: 7).quality.name == "quality"
    with pytest.raises(UsageError, match=r"quality= returned a str; it has to return a number\."):
        drift(model, [x], {"norm": function}, quality=lambda module: "good")


def test_drift_reports_why_there_is_no_quality():
    function = {"norm": DyT(4)}
    plain = drift(block(), [labelled()], function)
    assert plain.quality is None and "pass quality=" in plain.no_quality
    other = drift(loaded(block()), [labelled().args[0]], function)
    assert (other.quality, other.no_quality) == (None, "the samples have no labels")
    once = drift(loaded(block()), iter([labelled()]), function, cumulative=False)
    assert (once.quality, once.no_quality) == (None, "the batches can be iterated only once")


def test_all_ranks_get_the_measurements_of_the_first():
    report = drift(loaded(block()), None, {"norm": DyT(4)})
    meter = QualityMeter(block(), Task("top-1"), [], Outputs("classes"), silent)

    class Second(Ranks):
        def gather(self, message):
            assert message == [None, ""]
            document = report.as_dict()
            return [[document["quality"], ""], message]

    meter.share_with(Second(rank=1, size=2))
    assert meter.quality == report.quality and report.quality.scores["original"].interval is not None


def test_healing_reports_quality_before_and_after():
    network = loaded(block())
    swapped = copy.deepcopy(network.module)
    normscope.Swap(swapped, {"norm": DyT(4)})
    first = copy.deepcopy(swapped)
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(7))
    report = heal(network, swapped, list(x.split(4)), [labelled()], steps=40)
    labels = [sample.label for sample in labelled().samples]
    expected = {}
    for name, module in (("original", network.module), ("swapped", first), ("healed", swapped)):
        expected[name] = accuracy_score(labels, plain_logits(module, [labelled()]).argmax(1).tolist())
    assert {name: score.value for name, score in report.quality.scores.items()} == expected
    assert report.as_dict()["quality"]["scores"]["healed"]["value"] == expected["healed"]

    def weight(module):
        return module.head.weight.sum()

    own = heal(network, copy.deepcopy(first), list(x.split(4)), [labelled()], steps=4, quality=weight).quality
    assert own.scores["original"] == own.scores["swapped"] != own.scores["healed"]
    without = heal(network.module, copy.deepcopy(first), list(x.split(4)), [labelled()], steps=4)
    assert without.quality is None and "pass quality=" in without.no_quality
