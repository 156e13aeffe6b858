"""Spikes that an attention or an FFN of a small pre-norm transformer is made to write, and to remove again."""

import json

import numpy as np
import pytest
import torch
from networks import inputs_of, network_of
from torch import nn

import normscope
from normscope.fits.spikes import stream_of

D, TOKENS, SAMPLES, BLOCKS = 32, 12, 6, 4
CHANNEL, POSITION = 5, 3
INPUTS = torch.randn(SAMPLES, TOKENS, D, generator=torch.Generator().manual_seed(0))


class Sublayer(nn.Module):
    """Attention without weights, or a linear layer; and a bias at one channel of one position."""

    def __init__(self, mixes):
        super().__init__()
        self.mixes, self.linear = mixes, nn.Linear(D, D)
        nn.init.normal_(self.linear.weight, std=0.02, generator=torch.Generator().manual_seed(1))
        self.size, self.position, self.channel = 0.0, POSITION, CHANNEL

    def forward(self, x):
        x = nn.functional.scaled_dot_product_attention(x, x, x) if self.mixes else x
        planted = torch.zeros(x.shape[1:])
        planted[self.position, self.channel] = self.size
        return self.linear(x) + planted


def block(norm=nn.LayerNorm):
    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))

    return network_of(forward, norm1=norm(D), attn=Sublayer(True), norm2=norm(D), mlp=Sublayer(False))


def transformer(*planted, norm=nn.LayerNorm):
    """A network whose sublayers write: the number of a block, ``attn`` or ``mlp``, and attributes of the sublayer."""
    network = network_of(
        lambda self, x: self.norm(self.blocks(x)),
        blocks=nn.Sequential(*(block(norm) for _ in range(BLOCKS))),
        norm=norm(D),
    )
    for number, name, values in planted:
        for attribute, value in values.items():
            setattr(getattr(network.blocks[number], name), attribute, value)
    return network.eval()


def stream(network, **options):
    return stream_of(normscope.capture(network, list(INPUTS.split(2)), **options))


NORMS = [f"blocks.{number}.norm{half}" for number in range(BLOCKS) for half in (1, 2)] + ["norm"]
WRITERS = [f"{name} of blocks.{number}" for number in range(BLOCKS) for name in ("attention", "FFN")]


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize(("born", "removed"), [(0, 3), (1, 6), (2, 5), (3, None), (6, 7)])
def test_birth_end_writer_channel_and_position_are_those_of_the_bias(norm, born, removed):
    """Sublayer n writes between norms n and n + 1."""
    ends = [(born, 300.0)] if removed is None else [(born, 300.0), (removed, -300.0)]
    planted = [(number // 2, ("attn", "mlp")[number % 2], {"size": size}) for number, size in ends]
    (spike,) = stream(transformer(*planted, norm=norm)).spikes
    last = NORMS[-1] if removed is None else NORMS[removed]
    assert (spike.site, spike.last) == (NORMS[born + 1], last)
    assert (spike.written_by, spike.removed_by) == (WRITERS[born], None if removed is None else WRITERS[removed])
    assert (spike.channel, spike.positions, spike.massive) == (CHANNEL, ((POSITION, SAMPLES),), None)
    assert spike.largest == pytest.approx(300, abs=10) and spike.cosine > 0.99
    assert spike.before < 10 and (spike.after is None if removed is None else spike.after < 20)


def test_numbers_are_those_of_the_norms_inputs():
    network = transformer((1, "attn", {"size": 3000.0}))
    seen = stream(network)
    assert [norm.site for norm in seen.norms] == NORMS and seen.placement == "pre-norm"
    assert [norm.written_by for norm in seen.norms] == [None, *WRITERS]
    for norm in seen.norms:
        (x,) = inputs_of(network, [norm.site], [INPUTS])[norm.site]
        magnitudes = x.abs().double().numpy()
        assert norm.median == pytest.approx(np.median(magnitudes), rel=0.01)
        assert norm.largest == pytest.approx(magnitudes.max()) and norm.ratio == norm.largest / norm.median
        assert norm.channel == np.unravel_index(magnitudes.argmax(), x.shape)[-1]
        assert norm.sigma == pytest.approx(np.median(x.double().numpy().std(-1)), rel=0.1)
        assert norm.massive == (NORMS.index(norm.site) > 2)
    (spike,) = seen.spikes
    assert spike.massive == ("blocks.1.norm2", "norm")
    assert json.loads(json.dumps(seen.as_dict(), allow_nan=False))["spikes"][0]["written_by"] == "attention of blocks.1"


def test_a_larger_spike_on_top_of_another_is_a_spike_of_its_own():
    first, second = stream(
        transformer((0, "mlp", {"size": 150.0}), (2, "attn", {"size": 9000.0, "position": 7, "channel": 1}))
    ).spikes
    assert (first.site, first.last, first.channel) == ("blocks.1.norm1", "blocks.2.norm1", CHANNEL)
    assert (second.site, second.last, second.channel) == ("blocks.2.norm2", "norm", 1)
    assert second.positions[0] == (7, SAMPLES) and second.written_by == "attention of blocks.2"
    assert second.before < 10  # of its own channel


def test_a_spike_of_the_inputs_is_written_by_no_sublayer():
    x = INPUTS.clone()
    x[:, 0, 9] = 500
    (spike,) = stream_of(normscope.capture(transformer(), [x])).spikes
    assert (spike.site, spike.last, spike.before, spike.written_by) == ("blocks.0.norm1", "norm", None, None)


def test_the_writer_is_not_known_behind_a_norm_that_was_not_captured():
    network = transformer((1, "attn", {"size": 300.0}))
    layers = [name for name in NORMS if name != "blocks.1.norm1"]
    (spike,) = stream(network, layers=layers).spikes
    assert (spike.site, spike.before, spike.written_by) == ("blocks.1.norm2", None, None)
    sites = stream(network, layers=NORMS[2:5]).norms
    assert [norm.written_by for norm in sites] == [None, "attention of blocks.1", "FFN of blocks.1"]


@pytest.mark.parametrize(
    ("block", "norms", "of"),
    [
        ("{}", ("norm1", "norm2"), "{}"),
        ("encoder_layer_{}", ("ln_1", "ln_2"), "encoder_layer_{}"),  # torchvision
        ("{}", ("layer.0.norm", "layer.1.norm"), "{}.layer.{half}"),  # T5
        ("{}", ("norm", "norm"), None),  # one norm a block
        ("{}", ("norm1", "norm2", "norm3"), None),
    ],
)
def test_sublayers_are_named_by_the_order_of_norms_in_a_block(block, norms, of):
    def forward(self, x):
        for _, norm in self.norms:
            x = x + 0.1 * norm(x)
        return self.last(x)

    network = network_of(forward, last=nn.LayerNorm(D), norms=[])
    for number in range(2):
        for half, name in enumerate(dict.fromkeys(norms)):
            path = f"{block.format(number)}.{name}"
            owner = network
            for part in path.split(".")[:-1]:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = getattr(owner, part)
            owner.add_module(name.rpartition(".")[2], nn.LayerNorm(D))
            network.norms.append((half, network.get_submodule(path)))
    writers = [norm.written_by for norm in stream(network).norms]
    if of is None:
        assert set(writers) == {None}
    else:
        expected = [
            f"{name} of {of.format(number, half=half)}"
            for number in range(2)
            for half, name in enumerate(("attention", "FFN"))
        ]
        assert writers == [None, *expected]


def test_parallel_sublayers_are_not_told_apart():
    def forward(self, x):
        return x + self.attn(self.norm1(x)) + self.mlp(self.norm2(x))

    blocks = [
        network_of(forward, norm1=nn.LayerNorm(D), attn=Sublayer(True), norm2=nn.LayerNorm(D), mlp=Sublayer(False))
        for _ in range(3)
    ]
    blocks[1].attn.size = 300.0
    seen = stream(
        network_of(lambda self, x: self.norm(self.blocks(x)), blocks=nn.Sequential(*blocks), norm=nn.LayerNorm(D))
    )
    assert [norm.site for norm in seen.norms] == ["blocks.0.norm1", "blocks.1.norm1", "blocks.2.norm1", "norm"]
    (spike,) = seen.spikes
    assert (spike.site, spike.last, spike.written_by) == ("blocks.2.norm1", "norm", None) and spike.before < 20


def test_each_post_norm_has_spikes_of_its_own_and_no_writer():
    def forward(self, x):
        x = self.norm1(x + self.attn(x))
        return self.norm2(x + self.mlp(x))

    blocks = [
        network_of(forward, norm1=nn.LayerNorm(D), attn=Sublayer(True), norm2=nn.LayerNorm(D), mlp=Sublayer(False))
        for _ in range(3)
    ]
    for each in blocks[:2]:
        each.mlp.size = 300.0
    seen = stream(nn.Sequential(*blocks))
    assert seen.placement == "post-norm" and len(seen.norms) == 6
    assert [(spike.site, spike.last) for spike in seen.spikes] == [(f"{n}.norm2", f"{n}.norm2") for n in (0, 1)]
    assert all(spike.written_by is spike.removed_by is spike.before is None for spike in seen.spikes)


@pytest.mark.parametrize("x", [torch.zeros(4, 3, D), INPUTS], ids=["zero", "no spike"])
def test_norms_beside_a_stream_have_no_writers(x):
    """Of a network without a residual stream; norms of zeros are left out."""
    seen = stream_of(
        normscope.capture(nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D, bias=False), nn.LayerNorm(D)), [x])
    )
    assert seen.placement is None and seen.spikes == ()
    assert [norm.written_by for norm in seen.norms] == ([None, None] if x.any() else [])
