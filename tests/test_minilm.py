"""A pretrained network, all-MiniLM-L6-v2, through all that people come for; scripts/fetch_pretrained.py brings it."""

import numpy as np
import pytest
import torch
from captures import observed
from scipy.optimize import curve_fit

import normscope
from normscope.inputs.held_out import Pool
from normscope.models.weights.repository import copy_of

REPOSITORY = "sentence-transformers/all-MiniLM-L6-v2"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not copy_of(REPOSITORY).is_dir(), reason="scripts/fetch_pretrained.py minilm has not been run"),
]


@pytest.fixture(scope="module")
def seen():
    return normscope.capture(normscope.load("minilm", device="cpu"), verify=True)


@pytest.fixture(scope="module")
def raw_pairs():
    """All x and y of each site, ``(tokens, d)``, by its name."""
    return observed(normscope.load("minilm", device="cpu"))[1]


def test_pairs_match_transformers(raw_pairs, seen):
    """The hidden states that transformers returns are the outputs of every second norm, after the affine step."""
    import transformers

    bert = transformers.BertModel.from_pretrained(copy_of(REPOSITORY), local_files_only=True).eval()
    network = normscope.load("minilm", device="cpu")
    rows = []
    with torch.no_grad():
        for batch in network.inputs:
            states = bert(**batch.kwargs, output_hidden_states=True).hidden_states
            rows.append(torch.stack([state[batch.valid] for state in states]))
    states = torch.cat(rows, 1).numpy()  # (7, tokens, 384)
    outputs = [site for site in seen.sites if ".attention." not in site.name]
    assert len(outputs) == len(states) == 7
    for site, state in zip(outputs, states, strict=True):
        norm = bert.get_submodule(site.name)
        y = raw_pairs[site.name][1].numpy()
        ours = y * norm.weight.detach().numpy() + norm.bias.detach().numpy()
        np.testing.assert_allclose(ours, state, rtol=1e-4, atol=1e-4)  # float32, through other batches' roundings


def test_tanh_matches_scipy_on_raw_pairs(raw_pairs, seen):
    for fit in normscope.fit(seen.only("0,12"), "tanh"):
        x, y = (values.numpy().ravel() for values in raw_pairs[fit.site])
        start = (np.abs(y).max(), 0.3, 0.0)
        (amplitude, alpha, shift), _ = curve_fit(lambda x, a, b, s: a * np.tanh(b * x + s), x, y, start)
        left = ((y - amplitude * np.tanh(alpha * x + shift)) ** 2).sum()
        # The sums of two points a bin of 1/64 octave stand for its pairs: a relative error of about 1e-6.
        assert fit.alpha == pytest.approx(abs(alpha), rel=1e-4)
        assert fit.amplitude == pytest.approx(abs(amplitude), rel=1e-4)
        assert fit.r2 == pytest.approx(1 - left / ((y - y.mean()) ** 2).sum(), abs=1e-6)


def test_rmsnorm_costs_less_than_dyt(tmp_path):
    (tmp_path / "page.txt").write_text("A norm divides each token by its size.\nLarge values stay in bounds.\n" * 8)
    network = normscope.load("minilm", data=tmp_path / "page.txt", device="cpu", limit=8)
    seen = normscope.capture(network, by_gamma=True)
    dyt, rmsnorm = (
        normscope.drift(network, replacements=normscope.replacements(network, curve, seen)).all.relative_l2.p50
        for curve in ("dyt", "rmsnorm")
    )
    assert 0.2 < dyt < 1.5 and rmsnorm < dyt  # a norm that still rescales each token costs less


def test_three_channels_set_the_scale_of_the_last_norm_and_produce_no_output():
    """Against hooks on the norm itself, and numpy's least squares."""
    network = normscope.load("minilm", device="cpu")
    name = "encoder.layer.5.output.LayerNorm"
    card = normscope.norm_cards(normscope.capture(network, layers=name), network)[0]
    norm = network.module.get_submodule(name)
    inputs, parts, pool = [], [], Pool.of(network.inputs)
    hook = norm.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    with torch.no_grad():
        for part in (pool.learned, pool.validation):
            rows = []
            for batch in part:
                network.module(**batch.kwargs)
                rows.append(inputs.pop()[batch.valid])
            parts.append(torch.cat(rows).double().numpy())
    hook.remove()
    gamma, x = norm.weight.detach().double().numpy(), np.concatenate(parts)
    sigma = np.sqrt(x.var(1) + norm.eps)
    y = (x - x.mean(1, keepdims=True)) / sigma[:, None]
    of_x, of_y, of_output = (
        100 * each / each.sum() for each in ((x**2).sum(0), (y**2).sum(0), ((gamma * y) ** 2).sum(0))
    )
    leading = card.tails.channels
    assert [each.channel for each in leading] == np.argsort(-of_x)[:4].tolist()
    assert [each.channel for each in leading[:3]] == [223, 319, 127]
    for each in leading:
        n = each.channel
        np.testing.assert_allclose(
            [100 * each.share, 100 * each.of_y, 100 * each.of_output, each.gamma],
            [of_x[n], of_y[n], of_output[n], gamma[n] / np.median(np.abs(gamma))],
            atol=1e-3,
        )
    assert all(abs(each.gamma) < 0.005 and each.of_output < 1e-4 < 0.2 < each.share for each in leading[:3])
    r2 = []
    for k in (1, 2, 4, 8):
        chosen = list(card.scale.channels[:k])
        learned, held_out = (np.column_stack([np.ones(len(x)), x[:, chosen], x[:, chosen] ** 2]) for x in parts)
        square, truth = (x.var(1) + norm.eps for x in parts)
        left = truth - held_out @ np.linalg.lstsq(learned, square, rcond=None)[0]
        r2.append(1 - (left**2).sum() / ((truth - truth.mean()) ** 2).sum())
    np.testing.assert_allclose([card.scale.r2[k - 1] for k in (1, 2, 4, 8)], r2, atol=1e-4)
    assert r2[0] > 0.98 and r2[1] > 0.99 and r2[2] > 0.999
    assert card.tails.cosine > 0.99 and card.tails.elements < 0.01  # massive tokens have about the same sparse y
