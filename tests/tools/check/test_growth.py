"""Sentences and verdicts about growth and spikes, on planted networks and on real ones."""

import pytest
import timm
import torch
from networks import network_of
from torch import nn

import normscope
from normscope.tools.check.evidence import Evidence
from normscope.tools.check.growth import growth, spikes

D, BLOCKS, SAMPLES = 32, 3, 4
INPUTS = torch.randn(SAMPLES, 10, D, generator=torch.Generator().manual_seed(0))
NORMS = [f"blocks.{number}.{half}" for number in range(BLOCKS) for half in ("norm1", "norm2")]


def network(written=(), factor=1.1):
    """A pre-norm network: behind norm n, ``written[n]`` is added at channel 5 of tokens 1 and 2, and x multiplied."""

    def forward(self, x):
        number = 0
        for block in self.blocks:
            for norm in (block.norm1, block.norm2):
                update = norm(x) * (factor - 1)
                update[:, 1:3, 5] += dict(written).get(number, 0.0)
                x, number = x + update, number + 1
        return self.norm(x)

    blocks = (network_of(None, norm1=nn.LayerNorm(D), norm2=nn.LayerNorm(D)) for _ in range(BLOCKS))
    return network_of(forward, blocks=nn.ModuleList(blocks), norm=nn.LayerNorm(D))


def answers(model, batches=None):
    seen = normscope.capture(model, [INPUTS] if batches is None else batches)
    evidence = Evidence(seen, model)
    return growth(evidence), spikes(evidence)


def test_a_network_without_spikes_or_growth_is_ok():
    grown, spiked = answers(network())
    assert (grown.verdict, spiked.verdict, spiked.sites) == ("ok", "ok", ())
    assert [row["site"] for row in grown.sites] == [*NORMS, "norm"]
    assert "in 0.norm1 to" in grown.sentence and "α" not in grown.sentence
    highest = max(grown.sites, key=lambda row: row["ratio"])
    assert spiked.site == highest["site"] and f", channel {highest['channel']}" in spiked.sentence
    assert spiked.sentence.startswith("no |x| exceeds 100 × the median")


def test_growth_names_the_sublayer_with_most_of_it():
    model = network(factor=2.0)
    with torch.no_grad():
        model.blocks[1].norm2.weight *= 30
    grown, _ = answers(model)
    assert grown.verdict == "note" and grown.site == NORMS[4]
    assert "by the FFN of blocks.1: each norm needs an α of its own" in grown.sentence


@pytest.mark.parametrize(
    ("written", "life"),
    [
        ({1: 200.0}, "born in 1.norm1 by the FFN of blocks.0"),
        ({2: 200.0}, "born in 1.norm2 by the attention of blocks.1"),
        ({0: 200.0, 3: -200.0}, "gone by the FFN of blocks.1"),
        ({0: 200.0}, "lasts to the end of the stream"),
        ({0: 5000.0, 3: -5000.0}, "massive from 0.norm2 to 1.norm2"),
    ],
)
def test_the_sentence_has_the_life_of_the_spike(written, life):
    _, spiked = answers(network(written))
    (row,) = spiked.sites
    assert spiked.verdict == "note" and spiked.site == row["peak"]
    assert life in spiked.sentence
    assert spiked.sentence.startswith(f"channel 5 at tokens 1 and 2 of all {SAMPLES} samples: ")
    assert row["gamma"] == 1


def test_a_channel_with_gamma_near_zero_only_sets_sigma():
    model = network({1: 200.0})
    with torch.no_grad():
        model.blocks[1].norm1.weight[5] = 1e-5
    _, spiked = answers(model)
    assert "in 1.norm1, γ of channel 5 is near 0: it only sets σ" in spiked.sentence
    (row,) = spikes(Evidence(normscope.capture(model, [INPUTS]))).sites  # which has no weights
    assert row["gamma"] is None


def test_of_post_norms_and_of_norms_beside_a_stream():
    def forward(self, x):
        return self.norm2(self.norm1(x + self.first(x)) + self.second(self.first(x)))

    parts = {"first": nn.Linear(D, D), "second": nn.Linear(D, D), "norm1": nn.LayerNorm(D), "norm2": nn.LayerNorm(D)}
    model = network_of(forward, **parts)
    with torch.no_grad():
        model.first.bias[5] = 400.0
    grown, spiked = answers(model)
    assert grown.verdict == "ok" and grown.sentence.endswith("post-norms normalize the stream itself")
    assert "born" not in spiked.sentence  # what writes it is known for pre-norms alone
    assert answers(timm.create_model("resnet10t").eval(), [torch.randn(1, 3, 32, 32)])[0].verdict == "omitted"
    grown, spiked = answers(nn.Sequential(nn.LayerNorm(D)))
    assert (grown.verdict, spiked.verdict) == ("omitted", "ok")
    assert answers(nn.Sequential(nn.LayerNorm(D)), [0 * INPUTS])[1].verdict == "omitted"
