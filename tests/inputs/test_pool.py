"""Inputs to learn from in memory, and apart from them those that decide."""

import pytest
import torch

from normscope.errors import DataError
from normscope.inputs import pool
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.pool import Pool, kept_in_memory


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
    monkeypatch.setattr(pool, "MOST_BYTES", 3 * 8 * 4 * 4)  # three batches of float32
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
