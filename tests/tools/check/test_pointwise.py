"""Point-wise functions: starts against numpy on the fits, published α₀ against the paper's table."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from networks import PreNorm, evidence_of
from torch import nn

import normscope
from normscope.norms.sites import kind_of_site
from normscope.tools.check.evidence import Evidence
from normscope.tools.check.pointwise import pointwise

DOCS = Path(normscope.__file__).parents[1] / "docs"
X = [torch.randn(64, 8, generator=torch.Generator().manual_seed(n)) for n in range(2)]
SMALL = {"vocab_size": 50, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def test_starts_are_medians_over_the_sites_of_a_kind_that_bend():
    seen = normscope.capture(normscope.load("demo_vit", limit=8))
    answer = pointwise(Evidence(seen))
    fits = [fit for fit in normscope.fit(seen, "tanh", shift=False) if fit.identified]
    for row in answer.sites:
        kind = [fit for fit in fits if kind_of_site(fit.site) == kind_of_site(row["site"])]
        assert row["alpha"] == pytest.approx(np.exp(np.median(np.log([fit.alpha for fit in kind]))), rel=1e-12)
        assert row["amplitude"] == pytest.approx(np.median([fit.amplitude for fit in kind]), rel=1e-12)
        assert (row["published_alpha"], row["published_for"]) == (0.5, "all but language models")
    with_shift = {fit.site: fit.r2 for fit in normscope.fit(seen, "tanh")}
    assert {row["site"]: row["r2"] for row in answer.sites} == with_shift
    keep = {site for site, r2 in with_shift.items() if r2 < 0.9}
    assert keep and {row["site"] for row in answer.sites if row["keep"]} == keep
    assert f"below 0.9, {len(keep)} norms should rather stay" in answer.sentence
    assert answer.site == min(with_shift, key=with_shift.get)


def test_straight_sites_have_no_start_of_their_own():
    line = torch.linspace(-1, 1, 8) + 1e-3 * X[0]  # tokens of equal σ: y is a line
    [row] = pointwise(Evidence(normscope.capture(nn.Sequential(nn.LayerNorm(8)), [line[:32], line[32:]]))).sites
    assert row["straight"] and row["alpha"] is None and row["r2"] > 0.99


def test_a_sink_is_named_as_the_reason():
    x = torch.randn(64, 6, 8, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.9, 1.1, 6)[:, None]
    x[:, 0, 3] = torch.linspace(40, 80, 64)
    x[:, 0, 5] = -x[:, 0, 3]
    answer = pointwise(Evidence(normscope.capture(nn.Sequential(nn.LayerNorm(8)), [x[:32], x[32:]])))
    [row] = answer.sites
    assert (
        row["r2_without_sink"]
        == normscope.fit(normscope.capture(nn.Sequential(nn.LayerNorm(8)), [x]))[0].sink.r2_without
    )
    assert ("one position alone is the reason" in answer.sentence) == (row["r2"] < 0.9 <= row["r2_without_sink"])


# As the paper's tables of α₀ for LLaMA print them: width, attention, other; and widths between, whose nearest counts.
TABLE = {1024: (1.0, 1.0), 2048: (1.0, 0.5), 4096: (0.8, 0.2), 5120: (0.6, 0.15), 8192: (0.2, 0.05)}
NEAREST = {768: 1024, 1500: 2048, 3072: 4096, 6656: 8192}


class Block(nn.Module):
    """Attention and a feed-forward part, each behind a norm."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second, self.last = (nn.RMSNorm(width) for _ in range(3))

    def forward(self, x):
        y = self.first(x)
        x = x + nn.functional.scaled_dot_product_attention(y, y, y)
        return self.last(x + self.second(x).tanh())


@pytest.mark.parametrize("width", [*TABLE, *NEAREST])
def test_published_values_are_those_of_the_paper_for_the_nearest_width(width):
    batches = [torch.randn(1, 3, width, generator=torch.Generator().manual_seed(n)) for n in range(2)]
    rows = pointwise(evidence_of(Block(width), batches, family="language")).sites
    nearest = NEAREST.get(width, width)
    for row, feeds in zip(rows, ("attention", "other", "other"), strict=True):
        assert row["feeds"] == feeds
        assert row["published_alpha"] == TABLE[nearest][feeds == "other"]
        assert row["published_for"] == f"LLaMA of width {nearest}, {feeds}"


def test_a_language_models_capture_does_not_show_what_its_norms_feed():
    seen = normscope.capture(Block(64), [torch.randn(2, 3, 64)], about={"family": "language"})
    assert {row["published_alpha"] for row in pointwise(Evidence(seen)).sites} == {None}


def test_what_the_norms_of_bert_feed():
    network = transformers.BertModel(transformers.BertConfig(hidden_size=16, **SMALL), add_pooling_layer=False)
    ids = [torch.randint(0, 50, (4, 7), generator=torch.Generator().manual_seed(n)) for n in range(2)]
    rows = pointwise(evidence_of(network.eval(), ids, family="language")).sites
    feeds = {row["site"]: row["feeds"] for row in rows}
    attention = {"embeddings.LayerNorm", "encoder.layer.0.output.LayerNorm"}
    assert {site for site, what in feeds.items() if what == "attention"} == attention and len(feeds) == 5


def test_the_expectation_is_what_the_docs_measured():
    measured = "".join((DOCS / f"{page}.md").read_text(encoding="utf-8") for page in ("papers", "swaps"))
    sentence = pointwise(Evidence(normscope.capture(PreNorm(), X))).sentence
    numbers = re.findall(r"\d+\.\d\d", sentence[sentence.index("without training") :])
    assert numbers == ["0.75", "9.23", "0.47", "0.38"]
    assert all(re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", measured) for number in numbers)


def test_point_wise_functions_are_left_out():
    network = nn.Sequential(normscope.DyT(8), nn.LayerNorm(8))
    assert [row["site"] for row in pointwise(evidence_of(network, X)).sites] == ["1"]
