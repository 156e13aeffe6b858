"""One mean subtraction for a residual stream that a nonlinear function starts, and norms that are normalized again."""

import copy
import subprocess
import sys

import pytest
import timm
import torch
import transformers
from command_line import invoke
from networks import State, loaded_from, network_of, save_llama
from torch import nn

import normscope
from normscope.errors import ModelError
from normscope.swaps.store.record import EXACT, FOLDED, read_record
from normscope.swaps.store.store import restored, save_swapped

D = 16


def values(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def filled(network):
    """A network in float64 and eval mode with random weights, γ and β among them; its streams have a mean."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            scale = 0.3 if parameter.ndim > 1 else 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + 0.2)
    return network.double().eval()


class Block(nn.Module):
    def __init__(self, width=D):
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(width), nn.Linear(width, 24), nn.Linear(24, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, h, offset=None):
        h = h + self.scale * self.out(self.mix(self.norm(h)).tanh())
        return h if offset is None else h + offset


def stem(self, x):
    return self.drop(nn.functional.gelu(self.first(x)) + self.positions[: x.shape[1]])


def plain(self, x):
    return self.head(self.last(self.b(self.a(stem(self, x)))))


def with_stem(forward=plain, **parts):
    parts = {
        "first": nn.Linear(8, D),
        "a": Block(),
        "b": Block(),
        "last": nn.LayerNorm(D),
        "head": nn.Linear(D, 5),
        **parts,
    }
    network = network_of(forward, drop=nn.Dropout(0.1), **parts)
    network.positions = nn.Parameter(torch.zeros(64, D))
    return filled(network)


def change(network, original, *args):
    with torch.no_grad():
        before = original(*args)
        return float((network(*args) - before).norm() / before.norm())


def by_keyword(self, x):
    return self.head(self.last(self.b(h=self.a(h=stem(self, x)))))


def read_before_the_entry(self, x):
    h = stem(self, x)
    return self.head(self.last(self.b(self.a(h + self.mix(h).relu())))) + h[..., :5]


def read_between_the_blocks(self, x):
    h = self.a(stem(self, x))
    return self.head(self.last(self.b(h))) + h[..., :5]


def of_inputs(self, x):
    return self.head(self.last(self.b(self.a(x.tile(2) + self.positions[: x.shape[1]]))))


def behind_a_norm(self, x):
    return self.head(self.last(self.b(self.a(self.before(stem(self, x))))))


def two_streams(self, x):
    """The first one is read by the second through a linear layer, as by cross-attention."""
    context = self.between(self.b(self.a(stem(self, x))))
    return self.head(self.last(self.d(self.c(x.tile(2).tanh(), self.mix(context)))))


STREAMS = [
    (plain, {}, ("a",), 3),
    (by_keyword, {}, ("a",), 3),
    (read_before_the_entry, {"mix": nn.Linear(D, D)}, ("a",), 3),
    (read_between_the_blocks, {}, ("b",), 2),
    (of_inputs, {"first": nn.Identity()}, ("a",), 3),
    (behind_a_norm, {"before": nn.LayerNorm(D)}, ("a",), 3),
    (two_streams, {"c": Block(), "d": Block(), "between": nn.LayerNorm(D), "mix": nn.Linear(D, D)}, ("a", "c"), 6),
]


@pytest.mark.parametrize(
    ("forward", "parts", "before", "exact"), STREAMS, ids=lambda value: getattr(value, "__name__", "")
)
def test_one_mean_is_subtracted_where_a_stream_enters_its_blocks(forward, parts, before, exact):
    network = with_stem(forward, **copy.deepcopy(parts))
    original = copy.deepcopy(network)
    report = normscope.simplify(network, [values(2, 5, 8)])
    assert (sorted(report.subtractions), len(report.exact)) == (list(before), exact)
    assert report.float64 <= 1e-12 and all(norm.change <= 1e-12 for norm in report.norms)
    for shape in ((1, 1), (3, 7), (2, 20)):
        assert change(network, original, 3 * values(*shape, 8, seed=shape[1])) <= 1e-12


def test_the_norms_read_the_original_stream_without_its_mean():
    network, streams = with_stem(), []
    original = copy.deepcopy(network)
    normscope.simplify(network, [values(2, 5, 8)])
    for each in (original, network):
        for module in (each.a.norm, each.b.norm, each.last):
            module.register_forward_pre_hook(lambda _, args: streams.append(args[0].detach()))
        each(values(2, 5, 8))
    for before, after in zip(streams[:3], streams[3:], strict=True):
        assert float(before.mean(-1).abs().max()) > 0.1
        torch.testing.assert_close(after, before - before.mean(-1, keepdim=True), rtol=0, atol=1e-13)
    assert torch.equal(network.positions, original.positions) and torch.equal(
        network.first.weight, original.first.weight
    )


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
def test_other_dtypes_change_by_their_rounding(dtype, most):
    network = with_stem().to(dtype)
    original = copy.deepcopy(network)
    report = normscope.simplify(network, [values(2, 5, 8).to(dtype)])
    assert len(report.exact) == 3 and report.float64 < 1e-14 and 1e-9 < report.in_dtype < most
    assert change(network, original, values(3, 9, 8, seed=3).to(dtype)) < most


def read_behind_the_blocks(self, x):
    h = self.b(self.a(stem(self, x)))
    return self.head(self.last(h)) + h[..., :5]


def returned(self, x):
    h = self.a(stem(self, x))
    return self.head(self.last(self.b(h))), h


def written_on_the_way(self, x):
    return self.head(self.last(self.b(self.a(stem(self, x)) + x.tile(2).relu()).relu()))


def called_twice(self, x):
    return self.head(self.last(self.a(self.a(stem(self, x)))))


def without_blocks(self, x):
    return self.head(self.last(self.a(self.b(stem(self, x)))))


class PostNormBlock(Block):
    def forward(self, h):
        return self.norm(h + self.scale * self.out(self.mix(h).tanh()))


NO_BLOCKS = {"a": nn.Identity(), "b": nn.Identity()}
STAY = [
    (read_behind_the_blocks, {}, "gelu of the network writes to its stream"),
    (returned, {}, "gelu of the network writes to its stream"),
    (written_on_the_way, {}, "relu of the network writes to its stream"),
    (called_twice, {"b": nn.Identity()}, "gelu of the network writes to its stream"),
    (plain, {"a": PostNormBlock(), "b": PostNormBlock()}, "the norm a.norm writes to its stream"),
    (without_blocks, NO_BLOCKS, "gelu of the network writes to its stream"),
]


@pytest.mark.parametrize(("forward", "parts", "reason"), STAY, ids=lambda value: getattr(value, "__name__", ""))
def test_norms_stay_where_one_subtraction_is_not_enough(forward, parts, reason):
    network = with_stem(forward, **parts)
    report = normscope.simplify(network, [values(2, 5, 8)])
    assert not report.exact and not report.subtractions
    assert reason in [norm.blocked for norm in report.norms]


def test_a_refused_network_has_no_subtraction():
    """It computes something else in float32, which depends on a weight that is centred."""

    def forward(self, x):
        y = plain(self, x)
        return y if x.dtype == torch.float64 else y + 100 * self.b.out.weight.mean()

    network = with_stem(forward).float()
    state = State(network)
    with pytest.raises(ModelError, match=r"in torch\.float32\. The network stays as it was"):
        normscope.simplify(network, [values(2, 5, 8).float()])
    state.assert_same(network)


def test_a_saved_subtraction_is_restored_with_and_without_normscope(tmp_path):
    network, x = with_stem(), values(2, 5, 8)
    normscope.simplify(network, [x])
    folder = save_swapped(network, tmp_path / "exact", func=EXACT)
    expected = network(x)
    restored(fresh := with_stem(), folder)
    for again in (fresh, loaded_from(folder).swapped(with_stem())):
        assert torch.equal(again(x), expected)
    assert (read_record(folder).centred, read_record(folder).library) == ({"a": -1}, "")
    del (network := with_stem()).a
    with pytest.raises(ModelError, match="centres what enters a, which Network lacks"):
        restored(network, folder)


def whisper(kind):
    sizes = {f"{part}_{size}": 2 for part in ("encoder", "decoder") for size in ("layers", "attention_heads")}
    sizes |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "d_model": D, "num_mel_bins": 8, "vocab_size": 40}
    config = transformers.WhisperConfig(**sizes, max_source_positions=10, max_target_positions=12, pad_token_id=0)
    config.decoder_start_token_id = config.bos_token_id = config.eos_token_id = 1
    torch.manual_seed(0)
    if kind == "encoder":
        return filled(transformers.models.whisper.modeling_whisper.WhisperEncoder(config))
    return filled(transformers.WhisperForConditionalGeneration(config))


@pytest.mark.parametrize(
    ("kind", "exact", "before"),
    [("encoder", 5, ["layers.0"]), pytest.param("both", 12, ["model.encoder.layers.0"], marks=pytest.mark.slow)],
)
def test_whisper_is_exact_behind_its_stem(kind, exact, before):
    """Of the decoder, whose embeddings are linear, nothing is subtracted."""
    network, batch = whisper(kind), {"input_features": values(2, 8, 20)}
    if kind == "both":
        batch["decoder_input_ids"] = torch.arange(12).reshape(2, 6)
    original = copy.deepcopy(network)
    report = normscope.simplify(network, [batch])
    assert (len(report.norms), len(report.exact), list(report.subtractions)) == (exact, exact, before)
    with torch.no_grad():
        pairs = zip(network(**batch).to_tuple()[:1], original(**batch).to_tuple()[:1], strict=True)
    assert all((y - before).norm() <= 1e-12 * before.norm() for y, before in pairs)


def normalized_twice(self, x):
    y = self.norm(self.first(x))
    q, k = self.q_norm(self.q(y).unflatten(-1, (2, 8))), self.k_norm(self.k(y))
    return self.head(q.flatten(-2) * k) + (self.v(y) if self.reads else 0)


@pytest.mark.parametrize(
    ("norm", "bias", "reads", "eps", "removed"),
    [
        (nn.RMSNorm, False, False, 1e-6, True),
        (nn.LayerNorm, False, False, 1e-6, True),
        (nn.RMSNorm, True, False, 1e-6, False),
        (nn.RMSNorm, False, True, 1e-6, False),
        (nn.RMSNorm, False, False, 1e-2, False),
    ],
)
def test_a_norm_is_removed_if_norms_alone_follow(norm, bias, reads, eps, removed, tmp_path):
    def make():
        parts = {
            "first": nn.Linear(8, D),
            "norm": norm(D),
            "q": nn.Linear(D, D, bias=bias),
            "k": nn.Linear(D, D, bias=False),
        }
        parts |= {"q_norm": nn.RMSNorm(8, eps=eps), "k_norm": nn.RMSNorm(D, eps=eps), "v": nn.Linear(D, 5)}
        network = network_of(normalized_twice, **parts, head=nn.Linear(D, 5))
        network.reads = reads
        if not reads:
            del network.v
            network.v = None
        network = filled(network)
        for parameter in [network.norm.bias] if norm is nn.LayerNorm else []:
            parameter.data.zero_()
        return network

    network, x = make(), values(2, 5, 8)
    original = copy.deepcopy(network)
    report = normscope.simplify(network, [x])
    first = report.norms[0]
    assert ([first] == report.removed) == removed and report.float64 < 1e-14
    if removed:
        assert 1e-9 < first.removed <= 1e-5
        assert change(network, original, x) == pytest.approx(first.removed, rel=1e-3)
        assert change(network, original, values(3, 4, 8, seed=4)) < 1e-5
        folder = save_swapped(network, tmp_path / "exact", func=EXACT if report.exact else FOLDED)
        assert torch.equal(loaded_from(folder).swapped(make())(x), network(x))
        fresh = make()
        restored(fresh, folder)
        assert torch.equal(fresh(x), network(x))
    else:
        assert change(network, original, x) < 1e-13


@pytest.mark.slow
def test_gemma_4_needs_no_norm_before_attention():
    """It normalizes queries, keys and values."""
    config = transformers.Gemma4TextConfig(
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8, "vocab_size": 40},
        **{"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "initializer_range": 0.3},
    )
    torch.manual_seed(0)
    network, batch = (
        transformers.Gemma4ForCausalLM(config).eval(),
        {"input_ids": torch.arange(20).reshape(2, 10) * 7 % 40},
    )
    report = normscope.simplify(network, [batch])
    assert [norm.site for norm in report.removed] == [f"model.layers.{n}.input_layernorm" for n in range(2)]
    assert all(norm.removed < 1e-6 for norm in report.removed)


WITHOUT_NORMSCOPE = """
import sys
sys.modules["normscope"] = None  # its import fails
sys.path.insert(0, sys.argv[1])
exec(sys.argv[2])
import torch
torch.save([part.detach() for part in network.eval().state_dict().values()], sys.argv[3])
"""


def loads_without_normscope(line, folder, result, on_path=False):
    """Run a line in a new process without normscope; the tensors of its network, or None if it fails."""
    arguments = [str(folder) if on_path else "", line, str(result)]
    run = subprocess.run(
        [sys.executable, "-P", "-c", WITHOUT_NORMSCOPE, *arguments], capture_output=True, cwd=folder.parent
    )
    return torch.load(result) if run.returncode == 0 else None


@pytest.mark.slow
def test_the_last_line_tells_whether_stock_transformers_loads_the_folder(tmp_path):
    save_llama(tmp_path / "llama")
    done = invoke(
        f"simplify transformers:{tmp_path}/llama --data {tmp_path}/llama/lines.txt --device cpu -o exact", cwd=tmp_path
    )
    said, _, line = done.stdout.splitlines()[-1].partition(": ")
    assert said == "Stock transformers loads exact"
    assert loads_without_normscope(line, tmp_path / "exact", tmp_path / "tensors") is not None


@pytest.mark.slow
def test_stock_timm_loads_a_folder_of_folded_weights(tmp_path):
    sizes = {"img_size": 32, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 5}
    network = timm.create_model("vit_tiny_patch16_224", norm_layer="rmsnorm", **sizes).eval()
    report = normscope.simplify(network, [values(2, 3, 32, 32).float()])
    assert len(report.folded) == 3
    record = read_record(folder := save_swapped(network, tmp_path / "exact", func=FOLDED))
    loaded = loads_without_normscope(record.example.replace("FOLDER", str(folder)), folder, tmp_path / "tensors")
    assert record.library == "timm" and all(map(torch.equal, loaded, network.state_dict().values()))


@pytest.mark.slow
@pytest.mark.parametrize("library", ["transformers", "timm"])
def test_stock_classes_do_not_load_other_norms(library, tmp_path):
    if library == "timm":
        sizes = {"img_size": 32, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 5}
        network, x = timm.create_model("vit_tiny_patch16_224", **sizes).eval(), values(2, 3, 32, 32).float()
        stock = 'import timm; network = timm.create_model("local-dir:FOLDER", pretrained=True)'
    else:
        network, x = (
            whisper("both").model,
            {"input_features": values(2, 8, 20), "decoder_input_ids": torch.ones(2, 4).long()},
        )
        stock = 'import transformers; network = transformers.WhisperModel.from_pretrained("FOLDER")'
    report = normscope.simplify(network, [x])
    record = read_record(folder := save_swapped(network, tmp_path / "exact", func=EXACT))
    assert report.exact and record.library == "" and bool(report.subtractions) == (library == "transformers")
    stock, example = (line.replace("FOLDER", str(folder)) for line in (stock, record.example))
    loaded = loads_without_normscope(stock, folder, tmp_path / "stock")
    assert loaded is None or len(loaded) != len(network.state_dict())
    loaded = loads_without_normscope(example, folder, tmp_path / "tensors", on_path=True)
    assert all(map(torch.equal, loaded, network.state_dict().values()))
