"""Inputs in memory: those to learn from, those to judge by, and batches of samples of one length."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import numbered_batches, numbered_samples

from normscope.errors import DataError
from normscope.inputs import held_out
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.held_out import Pool, by_length, kept_in_memory, subsampled

MOST = 48


def batches(number):
    return numbered_batches(number, lambda generator, size: torch.randn(size, 4, generator=generator))


def sources(part):
    return [sample.source for batch in part for sample in batch.samples]


@pytest.mark.parametrize(("number", "n_judged"), [(32, 64), (100, 50)])  # of 800 sources, a fourth of a fourth
def test_learned_and_judged_sources_differ(number, n_judged):
    pool = Pool.of(batches(number))
    learned, judged = set(sources(pool.learned)), set(sources(pool.validation))
    assert not learned & judged and len(learned | judged) == 8 * number and len(judged) == n_judged


def test_samples_beyond_the_memory_limit_are_omitted_and_counted(monkeypatch):
    monkeypatch.setattr(held_out, "MOST_BYTES", 3 * 8 * 4 * 4)  # three batches of float32
    kept, left_out = kept_in_memory(batches(5))
    assert len(kept) == 3 and left_out == 16 and Pool.of(batches(5)).left_out == 16


def test_the_digest_depends_on_values_and_on_the_division():
    one, same = Pool.of(batches(8)), Pool.of(batches(8))
    assert one.digest == same.digest
    assert one.digest != Pool.of(batches(7)).digest
    assert one.digest != Pool(one.learned[1:], [one.learned[0], *one.validation], 0).digest


def test_a_pool_without_a_batch_is_refused():
    with pytest.raises(DataError, match="no batch to learn from"):
        Pool.of([])


def texts(lengths, **more):
    """Padded to the left and to the right in turn."""
    longest = max(lengths)
    begins = torch.tensor([(longest - length) * (number % 2) for number, length in enumerate(lengths)])[:, None]
    place = torch.arange(longest)
    valid = (place >= begins) & (place < begins + torch.tensor(lengths)[:, None])
    ids = torch.randn(len(lengths), longest)
    return Batch((ids,), {"attention_mask": valid.long(), **more}, numbered_samples(len(lengths)), valid=valid)


@given(st.lists(st.integers(1, 90), min_size=1, max_size=9))
@settings(max_examples=30)
def test_batches_by_length_contain_every_text_once(lengths):
    batch = texts(lengths)
    parts = by_length(batch, 3)
    assert max(len(part.samples) for part in parts) <= 3
    contents = {}
    for part in parts:
        assert part.valid.any(0).all() and part.args[0].shape == part.valid.shape
        assert torch.equal(part.kwargs["attention_mask"], part.valid.long())
        contents |= {
            s.index: x[valid].tolist() for s, x, valid in zip(part.samples, part.args[0], part.valid, strict=True)
        }
    assert contents == {
        n: x[valid].tolist() for n, (x, valid) in enumerate(zip(batch.args[0], batch.valid, strict=True))
    }
    assert sum(part.valid.numel() for part in parts) <= batch.valid.numel()


@pytest.mark.parametrize("other", [{"pixels": torch.zeros(4, 3, 2)}, {"more": [torch.zeros(4, 5)]}])
def test_tensors_of_other_positions_are_not_divided_by_length(other):
    batch = texts([1, 5, 2, 3], **other)
    assert by_length(batch, 8) == [batch]
    full = replace(texts([4, 4]), valid=None)
    assert by_length(full, 8) == [full]


@pytest.mark.parametrize(("size", "number"), [(16, 20), (4, 100), (48, 1), (100, 3)])
def test_few_samples_come_from_every_length(size, number):
    """Files of texts are sorted by length, so that whole batches would be of a few lengths."""
    sorted_by_length = [
        Batch((torch.full((size, 3), float(n)),), samples=tuple(Sample(f"{n} {i}", n, i) for i in range(size)))
        for n in range(number)
    ]
    few, total = subsampled(sorted_by_length, MOST), size * number
    taken = sum(len(batch.samples) for batch in few)
    assert min(MOST / 2, total) < taken <= MOST or taken == total
    lengths = {float(value) for batch in few for value in batch.args[0][:, 0]}
    assert len(lengths) >= min(number, MOST / 2)
    for batch in few:
        assert [float(value) for value in batch.args[0][:, 0]] == [float(s.source.split()[0]) for s in batch.samples]


def test_indivisible_batches_are_selected_whole():
    whole = [Batch((object(),), samples=tuple(Sample(f"{n} {i}", n, i) for i in range(4))) for n in range(60)]
    few = subsampled(whole, MOST)
    assert all(any(one is batch for batch in whole) for one in few) and len(few) == 12
