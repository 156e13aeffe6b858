"""Accuracy, perplexity and rank correlation against scipy, transformers' own loss, and plain loops."""

import itertools
import math

import numpy as np
import pytest
import torch
import transformers
from scipy import stats
from torch import nn
from torch.nn import functional as F

import normscope
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.loaded_model import Outputs, Task
from normscope.runtime.progress import silent
from normscope.swaps.drift.drift import drift
from normscope.swaps.quality import measures
from normscope.swaps.quality.judge import Judge

TINY = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
MASK, AROUND = 39, (37, 38)


def judged(task, module, batches, outputs):
    judge = Judge(task, batches, outputs, silent)
    judge.add("original", module)
    return judge


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


def gpt2(**changes):
    torch.manual_seed(3)
    config = transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=64, **changes)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():  # of fresh weights all tokens are alike, and any mistake would give the same number
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.ndim > 1 else 1)
    return model


def bert(name="BertForMaskedLM", **changes):
    torch.manual_seed(4)
    model = getattr(transformers, name)(transformers.BertConfig(**TINY, **changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.ndim > 1 else 1)
    return model


def test_words_are_read_as_ctc_reads_them():
    network = normscope.load("demo_wav2vec2", limit=12, device="cpu")
    found = judged(network.task, network.module, network.inputs, network.outputs).quality
    right = 0
    for batch in network.inputs:
        with torch.no_grad():
            frames = network.module(*batch.args)[0][0].argmax(-1).tolist()
        word = "".join("-|'ABCDEFGHIJKLMNOPQRSTUVWXYZ"[place] for place, _ in itertools.groupby(frames))
        right += word.replace("-", "") == batch.samples[0].label
    assert found.scores["original"].value == right / 12 and 8 <= right < 12  # one of the first twelve is misread
    assert (found.name, found.over) == ("word accuracy", "12 words")


def test_perplexity_is_that_of_transformers_own_loss():
    model = gpt2()
    rows, batch = texts([7, 1, 12, 2])
    losses = []
    with torch.no_grad():
        for row in rows:
            if len(row) > 1:
                losses += [float(model(row[None], labels=row[None]).loss)] * (len(row) - 1)
    found = judged(Task("perplexity"), model, [batch], Outputs("tokens")).quality
    # transformers computes the loss in float32.
    assert found.scores["original"].value == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
    assert (found.n, found.over, found.higher_is_better) == (6 + 11 + 1, "18 tokens of 3 texts", False)


def test_perplexity_does_not_depend_on_batches_or_pieces(monkeypatch):
    model = gpt2()
    _, batch = texts([7, 9, 12, 4])
    whole = judged(Task("perplexity"), model, [batch], Outputs("tokens")).quality
    monkeypatch.setattr(measures, "_AT_ONCE", 3 * 40)  # three positions at a time
    parts = [batch.take([0]), batch.take([3, 1, 2])]
    pieces = judged(Task("perplexity"), model, parts, Outputs("tokens")).quality
    # Float32 matrices of other sizes sum in another order.
    assert pieces.scores["original"].value == pytest.approx(whole.scores["original"].value, rel=1e-5)


def test_a_model_that_looks_ahead_has_no_perplexity():
    _, batch = texts([7, 9])
    judge = judged(Task("perplexity"), bert("BertLMHeadModel"), [batch], Outputs("tokens"))
    assert judge.quality is None and "looks at the tokens that it would have to predict" in judge.untold
    decoder = judged(Task("perplexity"), bert("BertLMHeadModel", is_decoder=True), [batch], Outputs("tokens"))
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
    found = judged(task, model, [batch], Outputs("tokens")).quality
    # Padded rows sum in another order, in float32.
    assert found.scores["original"].value == pytest.approx(math.exp(np.mean(taken)), rel=1e-5)
    of = "256 tokens, each masked alone, evenly among 304" if sum(lengths) > 256 else "13 tokens, each masked alone"
    assert (found.n, found.over) == (len(taken), of)


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
    found = judged(Task("spearman", pooling=pooling), model, parts, Outputs("tensor")).quality
    assert found.scores["original"].value == pytest.approx(stats.spearmanr(cosines, scores).statistic, abs=1e-12)
    assert found.n == 5 and found.over.startswith("5 pairs of sentences, ")


def test_one_pair_has_no_rank_correlation():
    _, batch = texts([3, 8], labels=[1.5])
    judge = judged(Task("spearman"), bert("BertModel"), [batch], Outputs("tensor"))
    assert judge.quality is None and "there are 1" in judge.untold


def test_cross_entropy_of_half_precision_is_summed_in_float64():
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids = torch.arange(50) % 30
    wanted = F.cross_entropy(logits.double(), ids, reduction="sum")
    assert measures._surprise(logits, ids) == pytest.approx(float(wanted), rel=1e-12)


@pytest.mark.parametrize("task", [Task("perplexity"), Task("spearman"), Task("pseudo-perplexity", mask_id=MASK)])
def test_what_gives_tokens_no_vectors_of_their_own_is_not_judged(task):
    class Pooled(nn.Module):
        def forward(self, input_ids, attention_mask):
            return input_ids[:, :4].float()

    _, batch = texts([5, 5, 6, 7], labels=[1.0, 2.0])
    judge = judged(task, Pooled(), [batch], Outputs("tokens"))
    assert judge.quality is None and "the network gives (4, 4), which is not a vector for each" in judge.untold


@pytest.mark.parametrize("measure", ["perplexity", "pseudo-perplexity"])
def test_batches_without_token_ids_are_not_judged(measure):
    judge = judged(Task(measure, mask_id=MASK), nn.Identity(), [torch.zeros(2, 3)], Outputs("tokens"))
    assert judge.quality is None and "no input_ids" in judge.untold


class Spoilt(nn.Module):
    def forward(self, x):
        return torch.full_like(x, math.nan)


def test_a_perplexity_that_is_not_finite_is_infinite_and_none_in_json():
    _, batch = texts([7, 9])
    how = {"outputs": Outputs("tokens"), "quality": Task("perplexity")}
    report = drift(gpt2(), [batch], {"transformer.ln_f": Spoilt()}, **how)
    assert report.quality.scores["swapped"].value == math.inf
    assert report.as_dict()["quality"]["scores"]["swapped"]["value"] is None
