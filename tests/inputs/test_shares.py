"""Inputs divided among processes: every input is taken exactly once, whatever was taken before and by how many."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normscope.errors import DataError
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.loaded_model import LoadOptions
from normscope.inputs.splits import ALL, Chunk, Done, LeftOut, Share, shared
from normscope.models.inputs.file_inputs import TensorInputs

NUMBERS = st.integers(0, 40)
TAKEN = st.sets(NUMBERS)
CPU, FLOAT = torch.device("cpu"), torch.float32


def digits(number, **options):
    """Make inputs whose tensors are their own numbers, numbered as they lie."""
    samples = [Sample(f"{i}", i, i, "numbers") for i in range(number)]
    tensors = [torch.tensor([float(i)]) for i in range(number)]
    given = {"limit": None, "batch_size": 8, "seed": 0, **options}
    return TensorInputs(tensors, samples, "numbers", LoadOptions("random", None, device=CPU, dtype=FLOAT, **given))


def numbers_and_values(chunks):
    """Take chunks; of each, the inputs' numbers beside what its batches hold."""
    return [(list(c.numbers), [x for batch in c.batches for x in batch.args[0].flatten().tolist()]) for c in chunks]


@given(st.lists(NUMBERS, unique=True), TAKEN, st.integers(1, 7))
def test_shares_divide_what_is_left_in_its_order(order, taken, ranks):
    left = [number for number in order if number not in taken]
    shares = [Share(rank, ranks, taken) for rank in range(ranks)]
    parts = [list(share.of(share.left(order))) for share in shares]
    assert [parts[i % ranks][i // ranks] for i in range(len(left))] == left
    assert sum(map(len, parts)) == len(left)


@given(
    number=st.integers(1, 30),
    taken=st.sets(st.integers(0, 29)),
    ranks=st.integers(1, 6),
    batch_size=st.integers(1, 7),
    shuffle=st.booleans(),
    limit=st.none() | st.integers(1, 30),
)
def test_chunks_are_the_same_whatever_the_number_of_processes(number, taken, ranks, batch_size, shuffle, limit):
    def chunks(rank, size):
        inputs = digits(number, batch_size=batch_size, shuffle=shuffle, limit=limit, workers=0)
        return numbers_and_values(inputs.chunks(Share(rank, size, done)))

    done = Done()
    done.add(taken)
    alone, parts = chunks(0, 1), [chunks(rank, ranks) for rank in range(ranks)]
    assert [parts[i % ranks][i // ranks] for i in range(len(alone))] == alone
    assert sum(map(len, parts)) == len(alone)
    assert all(numbers == values for numbers, values in alone)  # the numbers are the inputs' own, shuffled or not
    assert all(len(numbers) == batch_size for numbers, _ in alone[:-1])
    everyone = sorted(n for numbers, _ in alone for n in numbers)
    assert len(set(everyone)) == len(everyone) and not taken.intersection(everyone)
    if limit is None:
        assert everyone == sorted(set(range(number)) - taken)


@given(st.integers(1, 12), st.sets(st.integers(0, 11)), st.integers(1, 4))
def test_a_users_own_batches_are_an_input_each(number, taken, ranks):
    batches = [torch.full((2, 3), float(i)) for i in range(number)]
    found = []
    for rank in range(ranks):
        first, chunks = shared(iter(batches), Share(rank, ranks, taken))
        assert first.args[0].tolist() == [[0.0] * 3] and len(first.samples) == 1
        found += [(c.numbers, [b.args[0][0, 0].item() for b in c.batches]) for c in chunks]
    assert sorted(found) == [([i], [float(i)]) for i in range(number) if i not in taken]


def test_samples_are_numbered_through_all_shares():
    batches = [torch.zeros(2, 3), torch.ones(1, 3), torch.ones(3, 3)]
    for ranks in (1, 2, 5):
        shares = [shared(batches, Share(rank, ranks))[1] for rank in range(ranks)]
        samples = [s.index for chunks in shares for c in chunks for b in c.batches for s in b.samples]
        assert sorted(samples) == list(range(6))


def test_what_is_taken_may_become_known_after_the_first_sample():
    """As a checkpoint's inputs do: the sites are known from the first sample, and the sums' sites from the sites."""
    for batches in ([torch.zeros(1, 2)] * 4, digits(4, batch_size=1)):
        done = Done()
        _, chunks = shared(batches, Share(0, 1, done))
        done.add([0, 2])
        assert [list(chunk.numbers) for chunk in chunks] == [[1], [3]]


def test_no_batch_is_no_first_sample():
    with pytest.raises(DataError, match="There is no batch to run the model on"):
        shared([], ALL)


def test_batches_of_inputs_are_whatever_as_batches_takes():
    class Own:
        def first_sample(self):
            return Batch((torch.zeros(1, 2),), samples=(Sample("a", 0, 0),))

        def chunks(self, share):
            return share.of([Chunk([7], [torch.zeros(3, 2)])])

    (chunk,) = shared(Own(), ALL)[1]
    assert chunk.numbers == [7] and [len(batch.samples) for batch in chunk.batches] == [3]


@given(st.lists(st.lists(NUMBERS)), NUMBERS)
def test_done_is_a_set_of_numbers(added, asked):
    done, expected = Done(), set()
    for numbers in added:
        done.add(numbers)
        expected |= set(numbers)
    assert len(done) == len(expected)
    assert list(done.numbers) == sorted(expected)
    assert (asked in done) == (asked in expected)
    again = Done(done.flags)
    assert (list(again.numbers), again.flags) == (sorted(expected), done.flags)
    assert len(done.flags) == max(expected, default=-1) + 1
    again.add([99])
    assert 99 not in done
    assert "1" not in done and 1.5 not in done


@given(st.lists(st.tuples(NUMBERS, st.integers(0, 3)), unique_by=lambda one: one[0]), st.integers(1, 4))
def test_what_was_left_out_is_the_same_in_any_division(entries, ranks):
    def left_out(own):
        found = LeftOut()
        for number, cut in own:
            found.add(Chunk([number], [], {number: f"{number}.png: broken"}, cut))
        return found

    whole, merged = left_out(entries), LeftOut()
    for rank in reversed(range(ranks)):
        merged.add(left_out(entries[rank::ranks]))
    assert merged == whole
    assert whole.cut == sum(cut for _, cut in entries)
    assert merged.lines == [f"{number}.png: broken" for number in sorted(number for number, _ in entries)]
