"""Swaps of networks of transformers are judged by their logits, wherever a network comes from."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from networks import network_of

import normscope
from normscope.inputs.batch import Batch
from normscope.inputs.loaded_model import InferredOutputs
from normscope.swaps.replace import Swap, replacements

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
GPT2 = {"vocab_size": 40, "n_positions": 12, "n_embd": 16, "n_layer": 2, "n_head": 2, "eos_token_id": 0}
FACTORY = """
import torch, transformers

def network():
    torch.manual_seed(0)
    config = transformers.GPT2Config(**{config}, bos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).eval()
    return model, [{{"input_ids": ids}} for ids in torch.randint(40, (16, 12)).split(4)]
"""


def tokens(number=16):
    generator = torch.Generator().manual_seed(0)
    return list(torch.randint(40, (number, 12), generator=generator).split(4))


def gpt2(kind=transformers.GPT2LMHeadModel, **changes):
    torch.manual_seed(0)
    return kind(transformers.GPT2Config(**GPT2, bos_token_id=0, **changes)).eval()


def bert(kind, **changes):
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=40, max_position_embeddings=12, **SMALL, **changes)
    return getattr(transformers, kind)(config).eval()


def wrapped(model):
    """A network of one's own, which passes on what the model returns, its loss included."""
    return network_of(lambda self, ids: self.model(ids, labels=ids), "Mine", model=model)


def t5():
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    model = transformers.T5ForConditionalGeneration(config).eval()
    return network_of(lambda self, ids: self.model(input_ids=ids, decoder_input_ids=ids), model=model)


NETWORKS = {
    "language model": (gpt2, "tokens"),
    "in a module": (lambda: wrapped(gpt2()), "tokens"),
    "encoder–decoder": (t5, "tokens"),
    "masked": (lambda: bert("BertForMaskedLM"), "tokens"),
    "classes": (lambda: bert("BertForSequenceClassification", num_labels=3), "classes"),
    "classes of tokens": (lambda: bert("BertForTokenClassification", num_labels=3), "tokens"),
    "classes, in a module": (
        lambda: network_of(
            lambda self, ids: {"logits": self.model(ids).logits}, model=bert("BertForSequenceClassification")
        ),
        "classes",
    ),
    "regression": (lambda: bert("BertForSequenceClassification", num_labels=1), "tensor"),
    "several labels": (
        lambda: bert("BertForSequenceClassification", problem_type="multi_label_classification"),
        "tensor",
    ),
    "no head": (lambda: gpt2(transformers.GPT2Model), "tensor"),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_kind_of_outputs_is_that_of_the_results(name):
    make, kind = NETWORKS[name]
    model, (ids, *_) = make(), tokens()
    outputs = InferredOutputs(model)
    read = outputs.read(model(ids), Batch((ids,)))
    assert outputs.kind == kind and read.ndim >= 2 and len(read) == 4
    assert read.ndim == {"classes": 2, "tokens": 3}.get(kind, read.ndim)


@torch.no_grad()
def divergences(model, modules, batches):
    """KL of each sample, the mean over its positions, by torch's own function."""
    swapped = copy.deepcopy(model)
    Swap(swapped, copy.deepcopy(modules))
    results = []
    for ids in batches:
        p, q = (network(ids)["logits"].double().log_softmax(-1) for network in (model, swapped))
        results += F.kl_div(q, p, log_target=True, reduction="none").sum(-1).reshape(len(ids), -1).mean(-1).tolist()
    return torch.tensor(results)


def test_every_step_is_measured_by_the_logits():
    model, batches = wrapped(gpt2()), tokens(8)
    modules = replacements(model, "dyt", normscope.capture(model, batches), layers="0,2,4", init="paper")
    report = normscope.drift(model, batches, modules)
    kl = divergences(model, modules, batches)
    assert report.all.kl.p50 == pytest.approx(float(kl.quantile(0.5)), rel=1e-5)
    alone = {path: float(divergences(model, {path: modules[path]}, batches).quantile(0.5)) for path in modules}
    assert report.least_harmful(3) == sorted(alone, key=alone.get)
    choice = normscope.keep(model, batches, modules, number=1)
    left = {
        path: divergences(model, {other: modules[other] for other in modules if other != path}, batches).quantile(0.5)
        for path in modules
    }
    assert (choice.measure, choice.kept) == ("KL divergence", [min(left, key=left.get)])
    swapped = copy.deepcopy(model)
    Swap(swapped, modules)
    report = normscope.calibrate(model, swapped, batches, refit="norms")
    assert report.measure == "KL divergence" and "on 2 samples that decided, not held out" in repr(report)


def test_a_network_of_a_factory_has_the_perplexity_of_its_own_loss(tmp_path):
    (tmp_path / "mine.py").write_text(FACTORY.format(config=GPT2), encoding="utf-8")
    network = normscope.load(f"py:{tmp_path}/mine.py:network", device="cpu")
    modules = normscope.replacements(network, "dyt", normscope.capture(network), layers="final", init="paper")
    report = normscope.drift(network, replacements=modules, one_at_a_time=False, cumulative=False)
    assert report.all.kl is not None and report.all.answers == 16 * 12
    ids = torch.cat([batch.kwargs["input_ids"] for batch in network.inputs])
    with torch.no_grad():
        loss = float(network.module(ids, labels=ids).loss)
    assert report.quality.name == "perplexity"
    assert report.quality.scores["original"].value == pytest.approx(math.exp(loss), rel=1e-5)


def test_a_language_model_of_ones_own_takes_its_tokens_by_place():
    model, batches = gpt2(), tokens()
    modules = replacements(model, "dyt", normscope.capture(model, batches), layers="final", init="paper")
    report = normscope.drift(model, batches, modules, one_at_a_time=False, cumulative=False)
    with torch.no_grad():
        loss = float(model(torch.cat(batches), labels=torch.cat(batches)).loss)
    assert report.quality.scores["original"].value == pytest.approx(math.exp(loss), rel=1e-5)
