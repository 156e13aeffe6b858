"""Padding is in no sum, whether and wherever a norm has axes of samples and positions; and the parts of the data."""

import numpy as np
import pytest
import torch
from networks import network_of, numbered_samples
from torch import nn

import normscope
from normscope.errors import DataError
from normscope.inputs.batch import Batch, Sample

LENGTHS = (5, 9, 3)
HEADS, HEAD_DIM = 4, 6
WIDTH = HEADS * HEAD_DIM


LAYOUTS = {
    "tokens": lambda norm, x, heads: norm(x),
    "flattened": lambda norm, x, heads: norm(x.flatten(0, 1)).view_as(x),
    "sequence first": lambda norm, x, heads: norm(x.transpose(0, 1)).transpose(0, 1),
    "pooled": lambda norm, x, heads: norm(x[:, 0]),
    "heads last": lambda norm, x, heads: norm(x.unflatten(-1, (heads, HEAD_DIM))),
    "heads first": lambda norm, x, heads: norm(x.unflatten(-1, (heads, HEAD_DIM)).transpose(1, 2)),
}


def encoder(layout: str, heads: int = HEADS) -> nn.Module:
    """One norm behind a layout, on tokens that do not look at one another."""
    norm = nn.LayerNorm(HEAD_DIM if "heads" in layout else WIDTH, eps=1e-3)
    return network_of(lambda self, x, attention_mask=None: LAYOUTS[layout](self.norm, x, heads), norm=norm)


def sequences(width: int = WIDTH) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [3 * torch.randn(1, length, width, generator=generator) + 1 for length in LENGTHS]


def padded(width: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.full((len(LENGTHS), max(LENGTHS), width), 1e3)
    valid = torch.zeros(x.shape[:2], dtype=torch.bool)
    for row, sequence in enumerate(sequences(width)):
        x[row, : sequence.shape[1]] = sequence[0]
        valid[row, : sequence.shape[1]] = True
    return x, valid


def assert_same_sums(stats, expected) -> None:
    assert (stats.n_pairs, stats.n_tokens) == (expected.n_pairs, expected.n_tokens)
    for name in ("moments", "density", "channel_sums", "token_offsets", "token_scales"):
        torch.testing.assert_close(getattr(stats, name), getattr(expected, name), rtol=1e-9, atol=1e-9)
    assert torch.equal(stats.channel_extremes, expected.channel_extremes)
    assert torch.equal(stats.largest.x, expected.largest.x)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_padded_batch_has_the_sums_of_its_samples_one_at_a_time(layout):
    model = encoder(layout)
    x, valid = padded()
    together = normscope.capture(model, [Batch((x,), {}, numbered_samples(3), valid=valid)])
    alone = normscope.capture(model, [Batch((s,), {}, numbered_samples(1, i)) for i, s in enumerate(sequences())])
    assert_same_sums(together.stats["norm"], alone.stats["norm"])
    positions = len(LENGTHS) if layout == "pooled" else sum(LENGTHS)
    assert together.stats["norm"].n_pairs == positions * WIDTH
    if layout != "pooled":
        assert float(together.stats["norm"].channel_extremes.abs().max()) < 1e3


REFUSED = {
    "values to be added": (
        lambda x, valid: {"x": x, "attention_mask": (1.0 - valid.float()) * -1e4},
        "holds other values than 0 and 1",
    ),
    "more positions than tokens": (
        lambda x, valid: Batch((x,), {}, numbered_samples(3), valid=torch.cat([valid, valid], 1)),
        r"of 18 positions\. Pass samples of one length, or one at a time",
    ),
}


@pytest.mark.parametrize(("entry", "words"), REFUSED.values(), ids=REFUSED)
def test_masks_of_other_values_or_lengths_are_refused(entry, words):
    with pytest.raises(DataError, match=words):
        normscope.capture(encoder("tokens"), [entry(*padded())])


@pytest.mark.parametrize("layout", ["heads last", "heads first"])
def test_as_many_heads_as_positions_are_refused(layout):
    heads = max(LENGTHS)
    x, valid = padded(heads * HEAD_DIM)
    batch = Batch((x,), {}, numbered_samples(3), valid=valid)
    with pytest.raises(DataError, match=r"norm \(input \(3, 9, 9, 6\)\) it cannot be told .* of 9 positions"):
        normscope.capture(encoder(layout, heads), [batch])
    whole = Batch((x,), {}, numbered_samples(3))
    assert normscope.capture(encoder(layout, heads), [whole]).stats["norm"].n_pairs == x.numel()


@pytest.mark.parametrize("layout", ["heads last", "heads first"])
def test_an_earlier_batch_tells_heads_from_positions(layout):
    x, valid = padded()
    batches = [
        Batch((x,), {}, numbered_samples(3), valid=valid),
        Batch((x[:, :HEADS],), {}, numbered_samples(3, 3), valid=valid[:, :HEADS]),
    ]
    seen = normscope.capture(encoder(layout), batches).stats["norm"]
    assert seen.n_pairs == (sum(LENGTHS) + int(valid[:, :HEADS].sum())) * WIDTH
    assert float(seen.channel_extremes.abs().max()) < 1e3


def halved(self, x, attention_mask):
    return self.norm(x[:, ::2])


@pytest.mark.parametrize(
    ("forward", "norm", "why"),
    [
        (halved, nn.LayerNorm(WIDTH), "no axis is as long as the mask, of 9 positions"),
        (lambda self, x, attention_mask: self.norm(x.mT), nn.GroupNorm(2, WIDTH), "its tokens extend over all, of 9"),
        (
            lambda self, x, attention_mask: self.norm(x.repeat(2, 1, 1)[:5]),
            nn.LayerNorm(WIDTH),
            "no axis counts the sam",
        ),
    ],
)
def test_a_refusal_names_the_reason_and_its_remedies_work(forward, norm, why):
    model = network_of(forward, norm=norm)
    x, valid = padded()
    inputs = {"x": x, "attention_mask": valid.long()}
    with pytest.raises(
        DataError, match=rf"norm \(input .*\) it cannot be told which tokens are padding: {why}"
    ) as error:
        normscope.capture(model, [inputs])
    alone = [{"x": s, "attention_mask": torch.ones(1, s.shape[1]).long()} for s in sequences()]
    assert normscope.capture(model, alone).stats["norm"].n_tokens
    if "valid_within" in str(error.value):
        all_data = Batch((), inputs, numbered_samples(3), valid=valid, valid_within={"norm": None})
        assert normscope.capture(model, [all_data]).stats["norm"].n_tokens
    if forward is halved:
        few = {"x": x[:2], "attention_mask": (torch.arange(9) < torch.tensor([[3], [2]])).long()}
        with pytest.raises(DataError, match="it cannot be told"):  # although as many positions are left as are data
            normscope.capture(model, [few])
        apart = Batch((), inputs, numbered_samples(3), valid=valid, valid_within={"norm": valid[:, ::2]})
        assert normscope.capture(model, [apart]).stats["norm"].n_tokens == int(valid[:, ::2].sum())


def unpadded(layout: str, padding: bool = False) -> nn.Module:
    """A network that normalizes the data alone, in one axis, as attention on sequences of varying length takes it."""

    def forward(self, x, attention_mask):
        keep = attention_mask.bool()
        tokens = x if padding else x[None][:, keep] if layout == "one row" else x[keep]
        heads = tokens.unflatten(-1, (HEADS, HEAD_DIM)) if "heads" in layout else tokens
        return self.norm(heads.transpose(0, 1) if layout == "heads first" and not padding else heads)

    return network_of(forward, norm=nn.LayerNorm(HEAD_DIM if "heads" in layout else WIDTH))


@pytest.mark.parametrize("layout", ["tokens", "one row", "heads last", "heads first"])
@pytest.mark.parametrize("lengths", [(5, 9, 3), (4, 4, 1), (1, 1, 1)])
def test_tokens_without_their_padding_are_all_data_of_their_samples(layout, lengths):
    x, _ = padded()
    mask = (torch.arange(9) < torch.tensor(lengths)[:, None]).long()
    batches = [
        Batch((x, mask), samples=numbered_samples(3)),
        Batch((x[1:2], mask[1:2]), samples=numbered_samples(1, 3)),
    ]
    seen = normscope.capture(unpadded(layout), batches, verify=True, keep_inputs=1).stats["norm"]
    same = normscope.capture(unpadded(layout, padding=True), batches).stats["norm"]
    assert_same_sums(seen, same)
    assert seen.n_pairs == (sum(lengths) + lengths[1]) * WIDTH
    assert seen.fold_by == "source"


def test_passes_of_the_batch_iterator_are_not_recorded():
    model = encoder("tokens")

    def sampler():
        x = sequences()[0]
        for step in range(3):
            yield Batch((x,), {}, numbered_samples(1, step))
            x = x + 0.1 * model(x)  # as a sampler's steps do

    seen = normscope.capture(model, sampler()).stats["norm"]
    assert seen.n_pairs == 3 * LENGTHS[0] * WIDTH


TEXT_LENGTHS = (9, 5, 9, 2, 7, 9, 3, 8)
TEXT_WIDTH = 16
TABLE = "encoder.LayerNorm"


def texts(lengths=TEXT_LENGTHS, first: int = 0) -> list[tuple[torch.Tensor, Sample]]:
    generator = torch.Generator().manual_seed(4)
    return [
        (torch.randint(1, 50, (length,), generator=generator), Sample(f"text {first + i}", first + i, first + i))
        for i, length in enumerate(lengths)
    ]


def batch_of(chosen, positions: int = max(TEXT_LENGTHS)) -> Batch:
    ids = torch.zeros(len(chosen), positions, dtype=torch.int64)
    for row, (text, _) in zip(ids, chosen, strict=True):
        row[: len(text)] = text
    mask = (ids > 0).long()
    return Batch((), {"input_ids": ids, "attention_mask": mask}, tuple(sample for _, sample in chosen))


def deberta(buckets: int = 6) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": TEXT_WIDTH, "intermediate_size": 32, "max_position_embeddings": 40}
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": buckets}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "norm_rel_ebd": "layer_norm", "share_att_key": True}
    config = transformers.DebertaV2Config(**sizes, **relative, **layers)
    torch.manual_seed(0)
    return transformers.DebertaV2Model(config).double().eval()


def test_a_padded_batch_of_deberta_has_the_sums_of_its_texts_one_at_a_time():
    model, chosen = deberta(), texts()
    together = normscope.capture(model, [batch_of(chosen)], verify=True)
    alone = normscope.capture(model, [batch_of([text], len(text[0])) for text in chosen])
    assert TABLE in together.stats and together.stats.keys() == alone.stats.keys()
    for name, stats in together.stats.items():
        times = len(chosen) if name == TABLE else 1  # the table is normed once for each batch
        assert stats.n_pairs * times == alone.stats[name].n_pairs
        # float64 throughout; attention sums in another order where there are other positions
        torch.testing.assert_close(
            stats.channel_sums * times, alone.stats[name].channel_sums, rtol=1e-9, atol=1e-9, msg=name
        )
    assert together.stats[TABLE].n_pairs == 12 * TEXT_WIDTH  # six relative positions to either side
    assert together.stats[TABLE].fold_by is None
    assert together.stats["embeddings.LayerNorm"].fold_by == "source"


@pytest.mark.parametrize(
    "sizes",
    [
        *([(8, 10), (1, 5), (7, 9)], [(1, 6), (8, 9)], [(1, 5), (1, 6), (4, 9)]),
        *([(8, 9), (2, 6)], [(1, 12)], [(1, 12), (2, 6)]),  # as many positions as rows: of one text, or of two together
    ],
)
def test_a_table_counts_once_for_batches_of_any_size_and_length(sizes):
    cut = [batch_of(texts([4 + i % (positions - 4) for i in range(number)]), positions) for number, positions in sizes]
    seen = normscope.capture(deberta(), cut).stats[TABLE]
    assert seen.n_pairs == len(sizes) * 12 * TEXT_WIDTH
    assert seen.fold_by is None


def positional(axes: int) -> nn.Module:
    """Positions that are normed before they are added to the tokens: made of a buffer, without an axis of samples."""

    def forward(self, input_ids, attention_mask):
        length = input_ids.shape[1]
        return self.last(self.words(input_ids) + self.norm(self.positions[..., :length, :].clone()))

    norms = {name: nn.LayerNorm(TEXT_WIDTH) for name in ("norm", "last")}
    network = network_of(forward, words=nn.Embedding(50, TEXT_WIDTH), **norms)
    network.register_buffer("positions", torch.randn(*(1,) * (axes - 2), 40, TEXT_WIDTH))
    return network


@pytest.mark.parametrize("axes", [2, 3])
def test_positions_that_serve_every_sample_all_count(axes):
    longer = texts(lengths=(12, 4, 4), first=8)
    seen = normscope.capture(positional(axes), [batch_of(texts()), batch_of(longer, 12)], verify=True)
    assert seen.stats["norm"].n_pairs == (9 + 12) * TEXT_WIDTH
    assert seen.stats["norm"].fold_by is None
    assert seen.stats["last"].n_pairs == (sum(TEXT_LENGTHS) + 20) * TEXT_WIDTH
    assert seen.stats["last"].fold_by == "source"


def test_learned_queries_beside_padded_text_all_count():
    def forward(self, input_ids, attention_mask):
        queries = self.norm(self.queries.expand(len(input_ids), -1, -1))
        return queries @ self.words(input_ids).mT

    parts = {"norm": nn.LayerNorm(TEXT_WIDTH), "words": nn.Embedding(50, TEXT_WIDTH)}
    model = network_of(forward, queries=nn.Parameter(torch.randn(1, 5, TEXT_WIDTH)), **parts)
    seen = normscope.capture(model, [batch_of(texts())]).stats["norm"]
    assert seen.n_pairs == len(TEXT_LENGTHS) * 5 * TEXT_WIDTH
    assert seen.fold_by == "source", "each sample has queries of its own"


def test_parts_sum_up_to_the_whole_and_survive_merges_and_choices():
    def forward(self, x):
        return self.second(self.first(x) * 2 + x)

    def batches(*numbers):
        x = {number: sequences()[number % 3] for number in numbers}
        return [Batch((x[i],), {}, numbered_samples(1, i), part=f"timestep {i % 2}") for i in numbers]

    model = network_of(forward, first=nn.LayerNorm(WIDTH), second=nn.RMSNorm(WIDTH))
    seen = normscope.capture(model, batches(0, 1, 2, 3), by_gamma=True, by_part=True)
    assert list(seen.parts) == ["timestep 0", "timestep 1"]
    assert {part.n_samples for part in seen.parts.values()} == {2} and seen.n_samples == 4
    for name, stats in seen.stats.items():
        first, second = (part.stats[name] for part in seen.parts.values())
        assert_same_sums(first.merge(second), stats)
        np.testing.assert_allclose(
            stats.gamma_moments.sum((0, 2)), (first.gamma_moments + second.gamma_moments).sum((0, 2)), rtol=1e-12
        )
    both = seen.merge(normscope.capture(model, batches(4, 6), by_gamma=True, by_part=True))
    assert (both.parts["timestep 0"].n_samples, both.parts["timestep 1"].n_samples) == (4, 2)
    pairs = {part: capture.stats["first"].n_pairs for part, capture in both.parts.items()}
    assert sum(pairs.values()) == both.stats["first"].n_pairs
    early, late = both.parts.values()
    assert "part" not in early.merge(late).about
    chosen = both.only("second")
    assert [list(part.stats) for part in chosen.parts.values()] == [["second"], ["second"]]
    whole = normscope.capture(model, batches(0, 1, 2, 3), by_gamma=True)  # nobody asked for parts
    assert not whole.parts and whole.n_samples == 4
    for name, stats in whole.stats.items():
        assert_same_sums(stats, seen.stats[name])
    with pytest.raises(DataError, match="Cannot merge a capture that keeps its parts, such as 'timestep 0', with one"):
        whole.merge(seen)


def test_parts_of_a_network_that_count_other_positions_have_masks_of_their_own():
    def forward(self, x, y):
        return self.decoder(y) + self.encoder(x).mean(1, keepdim=True)

    both = network_of(forward, encoder=nn.Sequential(nn.LayerNorm(4)), decoder=nn.Sequential(nn.LayerNorm(4)))
    x, y = torch.randn(2, 7, 4), torch.randn(2, 5, 4)
    spoken, written = torch.arange(7) < torch.tensor([[3], [6]]), torch.arange(5) < torch.tensor([[5], [2]])
    batch = Batch((x, y), samples=numbered_samples(2), valid=written, valid_within={"encoder": spoken})
    seen = normscope.capture(both, [batch])
    assert (seen.stats["encoder.0"].n_pairs, seen.stats["decoder.0"].n_pairs) == (9 * 4, 7 * 4)
    n, total = seen.stats["encoder.0"].moments.sum((0, 2))[:2]
    assert n == 9 * 4 and total == pytest.approx(float(x[spoken].double().sum()), rel=1e-12)
    assert batch.padded and torch.equal(batch.take([1]).valid_at("encoder.0"), spoken[1:])
    apart = normscope.capture(both, [batch.take([0]), batch.take([1])])
    for name, stats in apart.stats.items():
        ours, theirs = (sums.moments.sum((0, 2)) for sums in (stats, seen.stats[name]))
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)  # sums of float64 in another order
