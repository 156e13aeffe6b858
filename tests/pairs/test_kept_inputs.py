"""Inputs that a capture keeps: their tokens against what a hook of our own saw, in whichever way the capture ran."""

import dataclasses

import pytest
import torch
from timm.layers import LayerNorm2d
from torch import nn

import normscope
from normscope.errors import DataError, NormscopeError, UsageError
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.chunks import Chunk, LeftOut
from normscope.pairs.capture import captured
from normscope.pairs.checkpoints import Checkpoints
from normscope.pairs.kept_inputs import SIZE_GRID, KeptTokens, first_inputs, sizes_of
from normscope.pairs.recorder import CaptureOptions
from normscope.runtime.checked_files import read_checked, write_checked

CLOSE = {"rtol": 1e-6, "atol": 1e-6}  # float32 of a float64 number
NORMS = ("first", "shared", "positions_first", "channels_first", "windows", "heads")


class Network(nn.Module):
    """A patch embedding, and norms whose tokens lie in every way: one is called twice, one takes groups."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.first, self.shared, self.positions_first = (nn.LayerNorm(8) for _ in range(3))
        self.windows, self.heads = nn.LayerNorm(8), nn.LayerNorm(4)
        self.channels_first = LayerNorm2d(8, eps=1e-5)
        self.groups = nn.GroupNorm(2, 8)

    def forward(self, x):
        x = self.patches(x)  # (samples, 8, 4, 6)
        x = self.channels_first(x) + self.groups(x)
        tokens = self.first(x.permute(0, 2, 3, 1)).flatten(1, 2)  # normalized as (samples, 4, 6, 8)
        tokens = self.shared(tokens) + self.shared(2 * tokens + 1)
        tokens = self.positions_first(tokens.transpose(0, 1)).transpose(0, 1)
        tokens = self.windows(tokens.reshape(len(x) * 4, 6, 8)).reshape(len(x), 24, 8)
        heads = tokens.reshape(len(x), 24, 2, 4).transpose(1, 2)
        return self.heads(heads)


def pictures(numbers):
    return torch.stack([torch.rand(3, 16, 24, generator=torch.Generator().manual_seed(n)) * (n + 1) for n in numbers])


class Pictures:
    """Numbered pictures in any order and chunks, as the package's own inputs are."""

    description = "pictures"

    def __init__(self, order=range(7), batch_size=3):
        self.order, self.batch_size, self.left_out, self.n_samples = order, batch_size, LeftOut(), len(order)

    def chunks(self, sampler):
        for numbers in sampler.groups(self.order, self.batch_size):
            yield Chunk(numbers, [self.batch(numbers)])

    def first_sample(self):
        return self.batch([self.order[0]])

    def batch(self, numbers):
        samples = tuple(Sample(f"picture {n}", n, n, "pictures") for n in numbers)
        return Batch((pictures(numbers),), samples=samples)


def lines_seen(number):
    """Mean, √(variance + eps) and x of every token at every norm, from hooks of our own on one picture alone."""
    model, seen = Network().double().eval(), {}

    def hook(name):
        def record(module, args):
            x = args[0].detach()
            x = x.movedim(1, -1) if name == "channels_first" else x
            seen.setdefault(name, []).append(x.reshape(-1, x.shape[-1]))

        return record

    for name in NORMS:
        model.get_submodule(name).register_forward_pre_hook(hook(name))
    model(pictures([number]).double())
    return {name: torch.cat(rows) for name, rows in seen.items()}


def assert_tokens_of(kept, number):
    assert set(kept.tokens) == set(NORMS)
    for name, x in lines_seen(number).items():
        tokens = kept.tokens[name]
        torch.testing.assert_close(tokens.shift.double(), x.mean(1), rtol=0, atol=1e-5)  # of a float32 network
        torch.testing.assert_close(tokens.sigma.double(), (x.var(1, correction=0) + 1e-5).sqrt(), rtol=1e-5, atol=1e-6)
        assert (tokens.sizes.sum(1) == x.shape[1]).all()


@pytest.mark.parametrize("batch_size", [1, 3])
def test_every_token_has_its_line_in_every_layout(batch_size):
    seen = normscope.capture(Network(), Pictures(batch_size=batch_size), keep_inputs=2)
    assert [kept.name for kept in seen.inputs] == ["picture 0, sample 0", "picture 1, sample 1"]
    for number, kept in enumerate(seen.inputs):
        assert_tokens_of(kept, number)
        assert kept.preview.pixels.shape == (16, 24, 3)
    shapes = {name: tokens.shape for name, tokens in seen.inputs[0].tokens.items()}
    assert shapes == {
        **{"channels_first": (4, 6), "first": (4, 6), "shared": (2, 24), "positions_first": (24,)},
        **{"windows": (4, 6), "heads": (2, 24)},
    }


def test_kept_inputs_do_not_change_the_sums():
    plain, kept = (normscope.capture(Network(), Pictures(), keep_inputs=number) for number in (0, 2))
    assert plain.inputs == []
    for name, stats in plain.stats.items():
        assert torch.equal(stats.moments, kept.stats[name].moments) and torch.equal(
            stats.tokens.key, kept.stats[name].tokens.key
        )


@pytest.mark.parametrize("batch_size", [2, 7])
def test_the_lowest_numbered_inputs_are_kept_in_any_order(batch_size):
    seen = normscope.capture(Network(), Pictures([5, 2, 6, 0, 4, 1, 3], batch_size), keep_inputs=3)
    assert [kept.sample.index for kept in seen.inputs] == [0, 1, 2]
    for kept in seen.inputs:
        assert_tokens_of(kept, kept.sample.index)


def test_inputs_of_batches_split_for_memory_are_kept_once():
    model = Network()

    def at_most_two(module, args):
        if len(args[0]) > 8:  # four windows of each of two pictures
            raise torch.OutOfMemoryError("CUDA out of memory.")

    model.windows.register_forward_pre_hook(at_most_two)
    seen = normscope.capture(model, Pictures(batch_size=7), keep_inputs=4)
    assert [kept.sample.index for kept in seen.inputs] == [0, 1, 2, 3]
    for kept in seen.inputs:
        assert_tokens_of(kept, kept.sample.index)


def test_padding_has_no_line():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4))
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]])
    valid = torch.tensor([[True] * 4, [True, True, False, False]])
    batch = Batch((ids,), samples=(Sample("a", 0, 0), Sample("b", 1, 1)), valid=valid)
    short = normscope.capture(model, [batch], keep_inputs=2).inputs[1]
    assert short.preview.words == ("#5", "#6", "#0", "#0")
    tokens = short.tokens["1"]
    assert tokens.sigma.isnan().tolist() == tokens.shift.isnan().tolist() == [False, False, True, True]
    torch.testing.assert_close(tokens.shift[:2], model[0].weight[[5, 6]].mean(1), **CLOSE)


def test_every_timestep_of_a_diffusion_model_is_kept():
    seen = normscope.capture(
        normscope.load("demo_dit", limit=3, timesteps="980,660"), layers=2, keep_inputs=2, by_part=True
    )
    parts = ["timestep 980", "timestep 660"]
    assert [kept.part for kept in seen.inputs] == [part for part in parts for _ in range(2)]
    assert [kept.sample.source for kept in seen.inputs[:2]] == ["trajectory 0", "trajectory 1"]
    for part in parts:
        assert [kept.part for kept in seen.parts[part].inputs] == [part] * 2
    guided = normscope.capture(
        normscope.load("demo_dit", limit=2, guidance=2, timesteps="980,"), layers=2, keep_inputs=2
    )
    assert [kept.sample.source for kept in guided.inputs[:2]] == ["trajectory 0", "trajectory 1"]


def test_inputs_without_a_preview_are_not_kept():
    assert normscope.capture(nn.Sequential(nn.LayerNorm(16)), [torch.randn(4, 16)], keep_inputs=2).inputs == []
    with pytest.raises(UsageError, match=r"keep_inputs is -1: it is a number of inputs, 0 to keep none\."):
        normscope.capture(Network(), Pictures(), keep_inputs=-1)


@pytest.fixture(scope="module")
def seen():
    return normscope.capture(Network(), Pictures(), keep_inputs=2)


def same(inputs, expected):
    assert [dataclasses.asdict(kept.sample) for kept in inputs] == [
        dataclasses.asdict(kept.sample) for kept in expected
    ]
    for mine, theirs in zip(inputs, expected, strict=True):
        for name in ("size", "along_width", "length", "words", "note"):
            assert getattr(mine.preview, name) == getattr(theirs.preview, name)
        assert torch.equal(mine.preview.pixels, theirs.preview.pixels)
        assert mine.part == theirs.part and set(mine.tokens) == set(theirs.tokens)
        for name, tokens in mine.tokens.items():
            assert tokens.shape == theirs.tokens[name].shape
            for field in ("shift", "sigma", "sizes"):
                torch.testing.assert_close(getattr(tokens, field), getattr(theirs.tokens[name], field), **CLOSE)


def test_a_file_contains_kept_inputs(seen, tmp_path):
    loaded = normscope.load_capture(normscope.save_capture(seen, tmp_path / "seen.safetensors"))
    same(loaded.inputs, seen.inputs)
    assert set(loaded.only("first").inputs[0].tokens) == {"first"}
    plain = dataclasses.replace(seen, inputs=[])
    path = normscope.save_capture(plain, tmp_path / "plain.safetensors")
    header, _ = read_checked(path, "normscope-capture", 9, "")
    assert "inputs" not in header


@pytest.mark.parametrize(
    "change",
    [
        lambda header, tensors: header["inputs"][0]["sample"].update(index="first"),
        lambda header, tensors: header["inputs"][0].update(words=[1]),
        lambda header, tensors: header["inputs"][0].update(size=[16]),
        lambda header, tensors: header["inputs"][0].update(size=[2**40, 2**40]),
        lambda header, tensors: header["inputs"][0]["tokens"].update({"99": [4, 6]}),
        lambda header, tensors: tensors.update({"input/0.pixels": torch.zeros(2, 2, 4, dtype=torch.uint8)}),
        lambda header, tensors: tensors.update({"input/0.envelope": torch.zeros(3, 2)}),
        lambda header, tensors: tensors.pop("input/1/2.sigma"),
    ],
)
def test_a_damaged_file_is_refused(seen, tmp_path, change):
    path = normscope.save_capture(seen, tmp_path / "seen.safetensors")
    header, tensors = read_checked(path, "normscope-capture", 9)
    change(header, tensors)
    write_checked(path, header, tensors)
    with pytest.raises(DataError, match=r"seen\.safetensors is damaged"):
        normscope.load_capture(path)


def test_merged_captures_have_the_inputs_of_both():
    first, second = (normscope.capture(Network(), Pictures(order), keep_inputs=1) for order in (range(3), range(3, 6)))
    assert [kept.sample.index for kept in normscope.merge_captures([first, second]).inputs] == [0, 3]


def test_a_resumed_capture_keeps_the_same_inputs(tmp_path, seen):
    left = iter([False, True, False, False, False])
    summing = CaptureOptions(keep_inputs=2)
    order = [4, 1, 5, 0, 2, 3, 6]
    folder = tmp_path / "kept"
    with pytest.raises(NormscopeError, match="Stopped"):
        captured(Network(), Pictures(order), summing, checkpoints=Checkpoints(folder, 0, False, lambda: next(left)))
    gone_on = captured(Network(), Pictures(order), summing, checkpoints=Checkpoints(folder, 1e9, True))
    same(gone_on.inputs, seen.inputs)
    with pytest.raises(NormscopeError, match="keep_inputs is 2, not 1"):
        captured(Network(), Pictures(order), CaptureOptions(keep_inputs=1), checkpoints=Checkpoints(folder, 1e9, True))


def test_the_tail_is_counted_from_an_edge_of_the_grid():
    x = torch.randn(50, 300, generator=torch.Generator().manual_seed(0)).exp()
    x[0] = 0
    x[1, 0] = torch.inf
    tokens = KeptTokens((50,), torch.zeros(50), torch.ones(50), sizes_of(x))
    edges = SIZE_GRID.edges()
    for beyond in (1e-9, 0.013, 0.7, 2.1, 900.0, 1e9):
        edge, tail = tokens.tail(beyond)
        assert edge in edges.tolist() and tail.tolist() == (x >= edge).double().mean(1).float().tolist()
        assert abs(edge - beyond) <= 0.125 * beyond or edge in (2.0**SIZE_GRID.low, 2.0**SIZE_GRID.high)


def test_first_inputs_are_selected_per_part_and_data_set(seen):
    first, second = seen.inputs
    noisy = dataclasses.replace(second, part="timestep 5")
    elsewhere = dataclasses.replace(second, sample=dataclasses.replace(second.sample, data="other pictures"))
    kept = first_inputs([second, noisy, first, elsewhere, first], 1)
    assert [(kept.part, kept.sample.data, kept.sample.index) for kept in kept] == [
        ("", "pictures", 0),
        ("timestep 5", "pictures", 1),
        ("", "other pictures", 1),
    ]
