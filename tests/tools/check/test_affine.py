"""Answers about the mean and γ against `simplify`, which proves its rewrites, and against chosen weights."""

import numpy as np
import pytest
import timm
import torch
import transformers
from networks import PostNorm, PreNorm, evidence_of, network_of
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import normscope
from normscope.tools.check.affine import gamma, mean
from normscope.tools.check.evidence import Evidence

X = [torch.randn(16, 8, generator=torch.Generator().manual_seed(n)) + 0.5 for n in range(2)]
IMAGES = [torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(n)) for n in range(2)]


def vit():
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2)


def with_a_wrapped_block():
    network = vit()
    network.blocks[0] = checkpoint_wrapper(network.blocks[0])
    return network


def with_a_function():
    """A norm module behind a norm that is called as a function."""
    torch.manual_seed(0)
    parts = {"first": nn.Linear(8, 8), "norm": nn.LayerNorm(8), "head": nn.Linear(8, 3)}
    return network_of(lambda net, x: net.head(net.norm(net.first(nn.functional.layer_norm(x, (8,))))), **parts)


@pytest.mark.parametrize(
    "make, batches",
    [
        (vit, IMAGES),
        (lambda: nn.DataParallel(vit()), IMAGES),
        (with_a_wrapped_block, IMAGES),
        (lambda: PreNorm(), X),
        (lambda: PostNorm(8), X),
        (lambda: nn.Sequential(nn.LayerNorm(8)), X),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.LayerNorm(8)), X),
        (with_a_function, X),
    ],
)
def test_what_is_exact_and_what_folds_is_what_simplify_proves(make, batches):
    network = make().eval()
    evidence = evidence_of(network, batches)
    report = {"mean": mean(evidence), "γ": gamma(evidence)}
    proved = {norm.site: norm for norm in normscope.simplify(network, batches).norms}
    for row in report["mean"].sites:
        assert not row["exact"] or proved[row["site"]].exact  # never more than simplify proves
    exact = sum(norm.exact for norm in proved.values())
    assert sum(bool(row["exact"]) for row in report["mean"].sites) == exact
    folded = {site for site, norm in proved.items() if norm.folded}
    assert {row["site"] for row in report["γ"].sites if row["folds_into"]} == folded
    assert f"drops it exactly at {exact} of" in report["mean"].sentence
    assert (report["mean"].verdict == "ok") == (exact == len(report["mean"].sites))


def test_the_cost_of_the_mean_is_that_of_rmsnorm():
    answer = mean(evidence_of(nn.Sequential(nn.LayerNorm(8)), X))
    x = torch.cat(X).double().numpy()
    y = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    without = x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5)
    # |μ|/σ is counted in eighths of an octave.
    assert answer.sites[0]["change_without"] == pytest.approx(((y - without) ** 2).sum() / (y**2).sum(), rel=0.1)
    assert answer.verdict == "note" and answer.site == "0"
    assert mean(evidence_of(nn.Sequential(nn.RMSNorm(8)), X)).verdict == "omitted"


def test_a_capture_answers_what_needs_no_weights():
    evidence = Evidence(normscope.capture(PreNorm(), X))
    assert [question(evidence).verdict for question in (mean, gamma)] == ["note", "omitted"]
    assert {row["exact"] for row in mean(evidence).sites} == {None}


def with_gamma(*gammas):
    network = nn.Sequential(*(nn.RMSNorm(8) for _ in gammas))
    with torch.no_grad():
        for norm, gamma in zip(network, gammas, strict=True):
            norm.weight.copy_(torch.tensor(gamma))
    return network


PLAIN = [0.9, 1.1, 1.2, 0.8, 1.0, 1.1, 0.9, 1.0]
CENTRED = [0.2, -0.1, 0.3, -0.2, 0.1, -0.3, 0.2, -0.1]


@pytest.mark.parametrize(
    "gammas, verdict, words, site",
    [
        ([PLAIN], "ok", "differs most at 0, 0.8 to 1.2", "0"),
        ([PLAIN, [1e-5, *PLAIN[1:]]], "note", "8 channels it shuts 1 off", "1"),
        ([PLAIN, [50.0, 60.0, *PLAIN[2:]]], "note", "amplifies 2", "1"),
        ([[1.0] * 8, PLAIN], "note", "it is 1 or 0 in all channels at 0: untrained", "1"),
        ([[0.0] * 8, PLAIN], "note", "it is 1 or 0 in all channels at 0: untrained", "1"),
        ([CENTRED, CENTRED, PLAIN], "problem", "γ is centred on 0 at 0, 1, and the module does not add 1", "0"),
        ([CENTRED, PLAIN, PLAIN], "ok", "differs most at 0", "0"),  # as the first norm of SmolLM2
    ],
)
def test_gamma(gammas, verdict, words, site):
    answer = gamma(evidence_of(with_gamma(*gammas), X))
    assert (answer.verdict, answer.site) == (verdict, site)
    assert words in answer.sentence


def test_a_module_that_adds_1_is_no_mistake():
    config = transformers.GemmaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    network = transformers.GemmaModel(config).eval()
    for part in network.modules():
        if type(part).__name__ == "GemmaRMSNorm":
            nn.init.normal_(part.weight, std=0.2)
    answer = gamma(evidence_of(network, [torch.randint(0, 50, (2, 6))]))
    assert (
        answer.verdict == "ok"
        and "the module adds 1 to the stored weight at 0.input, 0.post_attn, norm" in answer.sentence
    )
    assert {row["folds_into"] for row in answer.sites} == {None}  # simplify leaves such modules
    assert all(row["adds_1"] and 0.2 < row["smallest"] < 1 < row["largest"] for row in answer.sites)


def test_without_a_data_flow_simplify_is_named():
    evidence = evidence_of(PreNorm().bfloat16(), [x.bfloat16() for x in X])
    assert all("`normscope simplify` finds" in question(evidence).sentence for question in (mean, gamma))
