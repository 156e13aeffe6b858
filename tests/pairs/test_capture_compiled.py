"""Networks that torch runs in other ways than module by module: compiled as a whole or in parts, and fused."""

import pytest
import torch
from captures import observed
from networks import inputs_of, network_of, numbered_samples, sums_of
from torch import nn

import normscope
from normscope.inputs.batch import Batch


def network_of_blocks():
    torch.manual_seed(0)
    first, second = (
        network_of(lambda self, x: x + self.dense(self.norm1(x)), norm1=nn.LayerNorm(8), dense=nn.Linear(8, 8))
        for _ in range(2)
    )
    return network_of(
        lambda self, x: self.last(self.second(self.first(x))), first=first, second=second, last=nn.LayerNorm(8)
    )


class Compiler:
    """A backend of torch.compile that counts the graphs it is given, and those that run; it takes no time."""

    def __init__(self) -> None:
        self.graphs = self.runs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1

        def run(*args):
            self.runs += 1
            return graph.forward(*args)

        return run


def whole_in_place(network, compiler):
    network.compile(backend=compiler)


def block_in_place(network, compiler):
    network.first.compile(backend=compiler)


def block(network, compiler):
    network.first = torch.compile(network.first, backend=compiler)


def norm(network, compiler):
    network.first.norm1 = torch.compile(network.first.norm1, backend=compiler)


WAYS = (whole_in_place, block_in_place, block, norm)


@pytest.fixture
def batch():
    torch._dynamo.reset()
    yield torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))
    torch._dynamo.reset()


@pytest.mark.parametrize("ran_before", [False, True])
@pytest.mark.parametrize("compiled", WAYS, ids=lambda way: way.__name__)
def test_compiled_parts_are_seen_as_in_an_uncompiled_copy(batch, compiled, ran_before):
    network, compiler = network_of_blocks(), Compiler()
    compiled(network, compiler)
    if ran_before:  # by code that holds no hook
        network.eval()
        with torch.no_grad():
            network(batch)
    before = compiler.graphs, compiler.runs
    seen, plain = normscope.capture(network, [batch], verify=True), normscope.capture(network_of_blocks(), [batch])
    assert (compiler.graphs, compiler.runs) == before
    assert [site.name for site in seen.sites] == ["first.norm1", "second.norm1", "last"] and not seen.skipped
    assert all(torch.equal(seen.stats[name].moments, stats.moments) for name, stats in plain.stats.items())
    assert [site.placement for site in seen.sites] == [site.placement for site in plain.sites]
    chosen = normscope.capture(network, [batch], layers="first.norm1")
    assert list(chosen.stats) == ["first.norm1"]
    with torch.no_grad():
        network(batch)
    assert compiler.runs > before[1], "afterwards the network runs as it was compiled"


def test_a_padded_encoder_counts_data_only():
    """Against each text by itself, as long as it is, in float64; what layers get there, no mask has touched."""
    torch.manual_seed(0)
    lengths, d = [5, 3, 4], 8
    layer = nn.TransformerEncoderLayer(d, 2, 16, batch_first=True)
    network = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(d), enable_nested_tensor=True).eval()
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.randn(len(lengths), max(lengths), d)
    padding = torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]
    batch = Batch((x,), {"src_key_padding_mask": padding}, numbered_samples(3), valid=~padding)
    seen, raw = observed(network, [batch], verify=True)
    exact = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(d), enable_nested_tensor=False).double()
    exact.load_state_dict(network.state_dict())
    exact.eval()
    texts = [x[i : i + 1, :length].double() for i, length in enumerate(lengths)]
    assert len(seen.stats) == 5
    for name, calls in inputs_of(exact, seen.stats, texts).items():
        tokens = torch.cat([call[0] for call in calls])
        centred = tokens - tokens.mean(-1, keepdim=True)
        y = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        stats = seen.stats[name]
        assert stats.n_pairs == sum(lengths) * d
        # The network ran in float32: a few roundings of 6e-8 a layer, on |y| of at most √(d−1).
        torch.testing.assert_close(raw[name][1], y, rtol=0, atol=1e-5)
        torch.testing.assert_close(stats.moments.sum((0, 2)), sums_of(tokens, y), rtol=1e-5, atol=1e-4)
