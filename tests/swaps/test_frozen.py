"""One σ per norm site, and per first position, against sums by numpy and decoders of transformers."""

import numpy as np
import pytest
import torch
from networks import OneNorm, numbered_batches
from torch import nn

import normscope
from normscope.errors import ModelError

WIDTH, LENGTH, EPS = 12, 7, 1e-5
SCALE = torch.tensor([40.0, 1.0, 0.1, 1.2, 1.0, 1.0, 1.0])[:, None]  # of positions


def sequences(generator, size):
    """Tokens of which those at positions 0 and 2 have another scale, and whose means differ."""
    x = torch.randn(size, LENGTH, WIDTH, generator=generator) + torch.randn(size, LENGTH, 1, generator=generator)
    return x * SCALE * torch.randn(size, LENGTH, 1, generator=generator).div(4).exp()


BATCHES = numbered_batches(12, sequences)
X = torch.cat([batch.args[0] for batch in BATCHES])


def layer_norm(kind=nn.LayerNorm):
    torch.manual_seed(0)
    norm = kind(WIDTH, eps=EPS)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm.eval()


def least_squares(x, gamma, centred=True):
    """Return σ of some tokens that leaves the least squared error of γ(x − μ)/σ, by numpy's solver."""
    x = x.reshape(-1, WIDTH).double().numpy()
    away = x - x.mean(1, keepdims=True) * centred
    y = away / np.sqrt((away**2).mean(1, keepdims=True) + EPS)
    weight = gamma.detach().double().numpy()
    return 1 / np.linalg.lstsq((away * weight).reshape(-1, 1), (y * weight).ravel(), rcond=None)[0][0]


@pytest.mark.parametrize(("kind", "centred"), [(nn.LayerNorm, True), (nn.RMSNorm, False)])
def test_the_constants_and_the_output_are_those_of_least_squares(kind, centred):
    model = OneNorm(layer_norm(kind)).eval()
    norm = model.norm
    (fit,) = normscope.fit_scale(model, BATCHES, "frozen")
    rest = least_squares(X[:, [1, 3, 4, 5, 6]], norm.weight, centred)
    first, third = (least_squares(X[:, [n]], norm.weight, centred) for n in (0, 2))
    np.testing.assert_allclose(fit.sigma, [first, rest, third, rest, rest], rtol=1e-6)  # of float32 inputs
    x = X[:3].double()
    sigma = torch.tensor([first, rest, third] + 4 * [rest], dtype=torch.float64)[:, None]
    y = (x - x.mean(-1, keepdim=True) * centred) / sigma * norm.weight.double()
    y = y + norm.bias.double() if centred else y
    with normscope.swap(model, "frozen", [fit]), torch.no_grad():
        assert repr(model.norm).startswith("FrozenNorm")
        torch.testing.assert_close(model(X[:3]).double(), y, rtol=1e-5, atol=1e-5)
        # A token alone in its call has no position.
        alone = (x[:, :1] - x[:, :1].mean(-1, keepdim=True) * centred) / rest * norm.weight.double()
        alone = alone + norm.bias.double() if centred else alone
        torch.testing.assert_close(model(X[:3, :1]).double(), alone, rtol=1e-5, atol=1e-4)
        half = model.bfloat16()(X[:3].bfloat16())  # whose constants stay in float32
        torch.testing.assert_close(half.double(), y, rtol=0.05, atol=0.05)


class Turned(nn.Module):
    """A norm whose input is a permutation of that of the network."""

    def __init__(self, norm, *axes):
        super().__init__()
        self.norm, self.axes = norm, axes

    def forward(self, x):
        return self.norm(x.permute(self.axes) if self.axes else x.unflatten(1, (-1, 1)))


@pytest.mark.parametrize("axes", [(1, 0, 2), ()], ids=["positions first", "two axes of positions"])
def test_tokens_without_an_axis_of_positions_share_one_constant(axes):
    model = Turned(layer_norm(), *axes).eval()
    (fit,) = normscope.fit_scale(model, BATCHES, "frozen")
    np.testing.assert_allclose(fit.sigma, 5 * [least_squares(X, model.norm.weight)], rtol=1e-6)


def test_padding_is_in_no_constant():
    model = OneNorm(layer_norm()).eval()
    valid = torch.arange(LENGTH) < 5
    padded = [
        normscope.Batch(
            (batch.args[0].where(valid[:, None], 1e4),),
            samples=batch.samples,
            valid=valid.expand(len(batch.samples), -1),
        )
        for batch in numbered_batches(12, sequences)
    ]
    (fit,) = normscope.fit_scale(model, padded, "frozen")
    np.testing.assert_allclose(fit.sigma[-1], least_squares(X[:, [1, 3, 4]], model.norm.weight), rtol=1e-6)


def test_a_norm_without_output_gets_a_finite_constant():
    model = OneNorm(layer_norm()).eval()
    nn.init.zeros_(model.norm.weight)
    (fit,) = normscope.fit_scale(model, BATCHES, "frozen")
    assert fit.sigma == (1.0,) * 5


def test_grouped_norms_are_refused():
    model = nn.Sequential(nn.GroupNorm(4, WIDTH)).eval()
    with pytest.raises(ModelError, match="A fit of σ cannot take the place of 0: it is a GroupNorm"):
        normscope.fit_scale(model, [batch.args[0].mT for batch in BATCHES], "frozen")


def decoder(family):
    """A pre-norm decoder whose first token is enormous from the first block on, as those of large ones are."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if family == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, n_positions=16))
        model.transformer.wpe.weight.data[0, 5] = 3000.0
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes))
        model.model.embed_tokens.weight.data[0, 5] = 3000.0  # of the token that all texts begin with
    return model.eval()


def texts():
    ids = torch.randint(1, 50, (24, 12), generator=torch.Generator().manual_seed(0))
    ids[:, 0] = 0
    return ids


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_an_enormous_first_token_needs_its_own_constant(family):
    model = decoder(family)
    learned, held_out = texts().split(16)
    fits = normscope.fit_scale(model, [{"input_ids": part} for part in learned.split(4)], "frozen")
    assert all(fit.sigma[0] > 100 * fit.sigma[-1] == 100 * fit.sigma[1] for fit in fits)

    def loss(sigma_of):
        modules = normscope.replacements(model, "frozen", fits)
        for fit in fits:
            modules[fit.norm.name].predictor.sigma.copy_(torch.tensor(sigma_of(fit)))
        with normscope.Swap(model, modules), torch.no_grad():
            logits = model(input_ids=held_out, use_cache=False).logits.double()
        change = (logits - truth).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1)
        return float(change.median())

    with torch.no_grad():
        truth = model(input_ids=held_out, use_cache=False).logits.double()
    own, shared = loss(lambda fit: fit.sigma), loss(lambda fit: 5 * fit.sigma[-1:])
    assert own < 0.5 and shared > 100 * own
