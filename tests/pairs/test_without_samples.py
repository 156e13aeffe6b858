"""Norms whose input has no axis of samples: nothing of theirs is padding, and their tokens are in no fold."""

import pytest
import torch
from torch import nn

import normscope
from normscope.inputs.batch import Batch, Sample

LENGTHS = (9, 5, 9, 2, 7, 9, 3, 8)
TABLE = "encoder.LayerNorm"
WIDTH = 16


def texts(lengths=LENGTHS, first: int = 0) -> list[tuple[torch.Tensor, Sample]]:
    generator = torch.Generator().manual_seed(4)
    return [
        (torch.randint(1, 50, (length,), generator=generator), Sample(f"text {first + i}", first + i, first + i))
        for i, length in enumerate(lengths)
    ]


def batch_of(chosen, positions: int = max(LENGTHS)) -> Batch:
    ids = torch.zeros(len(chosen), positions, dtype=torch.int64)
    for row, (text, _) in zip(ids, chosen, strict=True):
        row[: len(text)] = text
    mask = (ids > 0).long()
    return Batch((), {"input_ids": ids, "attention_mask": mask}, tuple(sample for _, sample in chosen))


def deberta(buckets: int = 6) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.DebertaV2Config(
        vocab_size=50,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        norm_rel_ebd="layer_norm",
        position_buckets=buckets,
        max_position_embeddings=40,
        share_att_key=True,
    )
    torch.manual_seed(0)
    return transformers.DebertaV2Model(config).double().eval()


def test_a_padded_batch_of_deberta_has_the_sums_of_its_texts_one_at_a_time():
    model, chosen = deberta(), texts()
    together = normscope.capture(model, [batch_of(chosen)], verify=True)
    alone = normscope.capture(model, [batch_of([one], len(one[0])) for one in chosen])
    assert TABLE in together.stats and together.stats.keys() == alone.stats.keys()
    for name, stats in together.stats.items():
        times = len(chosen) if name == TABLE else 1  # the table is normed once for each batch
        assert stats.n_pairs * times == alone.stats[name].n_pairs
        # float64 throughout; attention sums in another order where there are other positions
        torch.testing.assert_close(
            stats.channel_sums * times, alone.stats[name].channel_sums, rtol=1e-9, atol=1e-9, msg=name
        )
    assert together.stats[TABLE].n_pairs == 12 * WIDTH  # six relative positions to either side
    assert together.stats[TABLE].fold_by is None
    assert together.stats["embeddings.LayerNorm"].fold_by == "source"


@pytest.mark.parametrize("batches", [[8, 1, 7], [1, 8], [1, 1, 4]])
def test_batches_of_any_size_and_length(batches):
    texts_left = texts(lengths=[4 + i % 6 for i in range(sum(batches))])
    cut = []
    for size in batches:
        chosen, texts_left = texts_left[:size], texts_left[size:]
        cut.append(batch_of(chosen, max(len(text) for text, _ in chosen) + 1))
    seen = normscope.capture(deberta(), cut).stats[TABLE]
    assert seen.n_pairs == len(batches) * 12 * WIDTH
    assert seen.fold_by is None


@pytest.mark.parametrize("sizes", [[(8, 9), (2, 6)], [(1, 12)], [(1, 12), (2, 6)]])
def test_a_table_as_long_as_the_positions_is_no_text(sizes):
    """Twelve rows: as many as one text has positions, or two have together."""
    cut = [batch_of(texts(lengths=[4] * number), positions) for number, positions in sizes]
    seen = normscope.capture(deberta(), cut).stats[TABLE]
    assert seen.n_pairs == len(sizes) * 12 * WIDTH


class Positional(nn.Module):
    """Positions that are normed before they are added to the tokens: made of a buffer, without an axis of samples."""

    def __init__(self, axes: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.register_buffer("positions", torch.randn(*(1,) * (axes - 2), 40, WIDTH))
        self.words, self.norm, self.last = nn.Embedding(50, WIDTH), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, input_ids, attention_mask):
        length = input_ids.shape[1]
        return self.last(self.words(input_ids) + self.norm(self.positions[..., :length, :].clone()))


@pytest.mark.parametrize("axes", [2, 3])
def test_positions_that_serve_every_sample_all_count(axes):
    longer = texts(lengths=(12, 4, 4), first=8)
    seen = normscope.capture(Positional(axes), [batch_of(texts()), batch_of(longer, 12)], verify=True)
    assert seen.stats["norm"].n_pairs == (9 + 12) * WIDTH
    assert seen.stats["norm"].fold_by is None
    assert seen.stats["last"].n_pairs == (sum(LENGTHS) + 20) * WIDTH
    assert seen.stats["last"].fold_by == "source"


def test_learned_queries_beside_padded_text_all_count():
    class Queries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.queries, self.norm = nn.Parameter(torch.randn(1, 5, WIDTH)), nn.LayerNorm(WIDTH)
            self.words = nn.Embedding(50, WIDTH)

        def forward(self, input_ids, attention_mask):
            queries = self.norm(self.queries.expand(len(input_ids), -1, -1))
            return queries @ self.words(input_ids).mT

    seen = normscope.capture(Queries(), [batch_of(texts())]).stats["norm"]
    assert seen.n_pairs == len(LENGTHS) * 5 * WIDTH
    assert seen.fold_by == "source", "each sample has queries of its own"
