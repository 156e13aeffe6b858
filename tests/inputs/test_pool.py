"""Inputs to learn from in memory, and apart from them those that decide."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normscope.errors import DataError
from normscope.inputs import held_out
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.held_out import Pool, by_length, evenly, kept_in_memory

MOST = 48


def batches(number, size=8):
    return [
        Batch(
            (torch.full((size, 4), float(n)),),
            samples=tuple(Sample(f"{i}", i, i) for i in range(n * size, (n + 1) * size)),
        )
        for n in range(number)
    ]


def sources(part):
    return [sample.source for batch in part for sample in batch.samples]


def test_what_decides_is_learned_from_by_nothing():
    divided = Pool.of(batches(32))
    learned, judged = set(sources(divided.learned)), set(sources(divided.judged))
    assert not learned & judged and len(learned) + len(judged) == 256


def test_no_more_decide_than_are_needed():
    divided = Pool.of(batches(100))  # 800 sources: 200 of them are more than it takes
    assert len(sources(divided.judged)) == 50 and len(sources(divided.learned)) == 750


def test_what_does_not_fit_into_memory_is_left_out_and_counted(monkeypatch):
    monkeypatch.setattr(held_out, "MOST_BYTES", 3 * 8 * 4 * 4)  # three batches of float32
    kept, left_out = kept_in_memory(batches(5))
    assert len(kept) == 3 and left_out == 16 and Pool.of(batches(5)).left_out == 16


def test_the_digest_is_of_the_values_and_of_what_decides():
    one, same = Pool.of(batches(8)), Pool.of(batches(8))
    assert one.digest == same.digest
    assert one.digest != Pool.of(batches(7)).digest
    assert one.digest != Pool(one.learned[1:], [one.learned[0], *one.judged], 0).digest


def test_nothing_to_learn_from_is_refused():
    with pytest.raises(DataError, match="no batch to learn from"):
        Pool.of([])


def texts(lengths, **own):
    """Padded to the left and to the right in turn."""
    longest = max(lengths)
    begins = torch.tensor([(longest - length) * (number % 2) for number, length in enumerate(lengths)])[:, None]
    place = torch.arange(longest)
    valid = (place >= begins) & (place < begins + torch.tensor(lengths)[:, None])
    ids = torch.randn(len(lengths), longest)
    samples = tuple(Sample(f"{n}", n, n) for n in range(len(lengths)))
    return Batch((ids,), {"attention_mask": valid.long(), **own}, samples, valid=valid)


@given(st.lists(st.integers(1, 90), min_size=1, max_size=9))
def test_padded_texts_are_divided_by_length_and_none_of_them_is_lost(lengths):
    batch = texts(lengths)
    parts = by_length(batch, 3)
    assert max(len(part.samples) for part in parts) <= 3
    found = {}
    for part in parts:
        assert part.valid.any(0).all() and part.args[0].shape == part.valid.shape
        assert torch.equal(part.kwargs["attention_mask"], part.valid.long())
        found |= {
            s.index: x[valid].tolist() for s, x, valid in zip(part.samples, part.args[0], part.valid, strict=True)
        }
    assert found == {n: x[valid].tolist() for n, (x, valid) in enumerate(zip(batch.args[0], batch.valid, strict=True))}
    assert sum(part.valid.numel() for part in parts) <= batch.valid.numel()


@pytest.mark.parametrize("other", [{"pixels": torch.zeros(4, 3, 2)}, {"more": [torch.zeros(4, 5)]}])
def test_what_may_count_other_positions_is_not_divided(other):
    batch = texts([1, 5, 2, 3], **other)
    assert by_length(batch, 8) == [batch]
    full = replace(texts([4, 4]), valid=None)
    assert by_length(full, 8) == [full]


def test_a_pool_by_length_has_the_same_samples_on_the_same_side():
    given_batches = []
    for first in range(0, 32, 4):
        samples = tuple(Sample(f"{n}", n, n) for n in range(first, first + 4))
        given_batches.append(replace(texts([5, 90, 7, 60]), samples=samples))
    whole = Pool.of(given_batches)
    divided = whole.by_length()
    assert len(divided.learned) == 2 * len(whole.learned)
    for parts, batches_of_all in ((divided.learned, whole.learned), (divided.judged, whole.judged)):
        assert sorted(sources(parts), key=int) == sorted(sources(batches_of_all), key=int)


@pytest.mark.parametrize(("size", "number"), [(16, 20), (4, 100), (48, 1), (100, 3)])
def test_the_few_come_from_every_length(size, number):
    """Files of texts are sorted by length, so that whole batches would be of a few lengths."""
    sorted_by_length = [
        Batch((torch.full((size, 3), float(n)),), samples=tuple(Sample(f"{n} {i}", n, i) for i in range(size)))
        for n in range(number)
    ]
    few, total = evenly(sorted_by_length, MOST), size * number
    taken = sum(len(batch.samples) for batch in few)
    assert min(MOST / 2, total) < taken <= MOST or taken == total
    lengths = {float(value) for batch in few for value in batch.args[0][:, 0]}
    assert len(lengths) >= min(number, MOST / 2)
    for batch in few:
        assert [float(value) for value in batch.args[0][:, 0]] == [float(s.source.split()[0]) for s in batch.samples]


def test_what_cannot_be_divided_is_taken_whole():
    whole = [Batch((object(),), samples=tuple(Sample(f"{n} {i}", n, i) for i in range(4))) for n in range(60)]
    few = evenly(whole, MOST)
    assert all(any(one is batch for batch in whole) for one in few) and len(few) == 12
