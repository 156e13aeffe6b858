"""Inputs divided among processes, and into what is learned from and held out: every input in one part, exactly once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import normscope
from normscope.errors import DataError
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.chunks import ALL, Chunk, Done, LeftOut, Share, shared
from normscope.inputs.held_out import learned_and_held_out

_of_batches = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5), min_size=1, max_size=5)


def batches_of(sources):
    """Make batches whose entries are the numbers of their samples, each with the source that is given."""
    made, number = [], 0
    for part, of_batch in enumerate(sources):
        numbers = range(number, number + len(of_batch))
        samples = [Sample(f"photo {s}", s, i) for s, i in zip(of_batch, numbers, strict=True)]
        x = torch.tensor(list(numbers)).double()
        kwargs = {"mask": x[:, None], "more": {"y": x}, "scale": torch.ones(()), "name": "same"}
        made.append(Batch((x,), kwargs, tuple(samples), x[:, None] > 2, f"timestep {part}"))
        number += len(of_batch)
    return made


def numbers_in(part):
    return [sample.index for batch in part for sample in batch.samples]


def assert_one_of_each_four(held, every):
    """Of each four, in the order in which they come, one is held out; of fewer than four the last."""
    blocks = [set(every[first : first + 4]) for first in range(0, len(every), 4)]
    whole = [len(block & held) for block in blocks if len(block) == 4]
    assert len(held) == max(1, len(whole))
    assert whole == [1] * len(whole) if whole else held == {every[-1]}


@pytest.mark.parametrize("period", [2, 3, 4, 8])
def test_of_sources_of_periodic_kinds_all_kinds_are_held_out(period):
    """Multiples of four apart, one of two alternating kinds would be held out alone."""
    held = numbers_in(learned_and_held_out(batches_of([[number] for number in range(800)]))[1])
    counts = [sum(number % period == kind for number in held) for kind in range(period)]
    # Each count is binomial, of 200 or fewer trials; five standard deviations of it.
    assert counts == pytest.approx([200 / period] * period, abs=5 * (200 / period * (1 - 1 / period)) ** 0.5)


def test_the_division_is_the_same_in_every_process():
    held = learned_and_held_out([torch.zeros(24, 1)])[1]
    assert numbers_in(held) == [0, 5, 9, 13, 18, 22]


@given(_of_batches)
def test_sources_stay_together_and_every_sample_is_in_one_part(sources):
    inputs, flat = batches_of(sources), [source for batch in sources for source in batch]
    if len(flat) < 2:
        with pytest.raises(
            DataError, match=r"The inputs hold 1 sample; to learn from some and hold others out takes two"
        ):
            learned_and_held_out(inputs)
        return
    parts = learned_and_held_out(inputs)
    learned, held = (numbers_in(part) for part in parts)
    assert sorted(learned + held) == list(range(len(flat)))
    assert (learned, held) == (sorted(learned), sorted(held))
    assert learned
    assert held
    assert [part.n_samples for part in parts] == [len(learned), len(held)]
    first_seen = list(dict.fromkeys(flat))
    if len(first_seen) > 1:
        apart = {flat[number] for number in held}
        assert not apart & {flat[number] for number in learned}
        assert_one_of_each_four(apart, first_seen)
        assert {part.by for part in parts} == {"source"}
    else:
        assert_one_of_each_four(set(held), range(len(flat)))
        assert {part.by for part in parts} == {"sample"}
        assert all(part.description.endswith(", all of one source") for part in parts)
    again = learned_and_held_out(inputs)
    assert [numbers_in(part) for part in again] == [numbers_in(part) for part in parts] == [learned, held]


@given(_of_batches.filter(lambda sources: sum(map(len, sources)) > 1))
def test_all_of_a_batch_is_cut_alike(sources):
    for part in learned_and_held_out(batches_of(sources)):
        for batch in part:
            numbers = torch.tensor([sample.index for sample in batch.samples]).double()
            assert torch.equal(batch.args[0], numbers)
            assert torch.equal(batch.kwargs["mask"], numbers[:, None])
            assert torch.equal(batch.kwargs["more"]["y"], numbers)
            assert torch.equal(batch.kwargs["scale"], torch.ones(()))
            assert batch.kwargs["name"] == "same"
            assert torch.equal(batch.valid, numbers[:, None] > 2)
            assert batch.part == f"timestep {[n for n, own in enumerate(sources) for _ in own][int(numbers[0])]}"


def test_plain_tensors_and_descriptions():
    learned, held = learned_and_held_out([torch.arange(5.0), {"x": torch.arange(5.0, 8.0)}])
    values = [
        [batch.args[0].tolist() if batch.args else batch.kwargs["x"].tolist() for batch in part]
        for part in (learned, held)
    ]
    assert values == [[[1.0, 2.0, 3.0, 4.0], [6.0, 7.0]], [[0.0], [5.0]]]
    assert learned.description == "inputs · 6 of 8 samples to learn from"
    assert held.description == "inputs · 2 of 8 samples held out"


def test_one_name_in_two_data_sets_is_two_sources():
    inputs = [Batch((torch.zeros(1),), samples=(Sample("cat", 0, 0, data),)) for data in ("mine", "yours")]
    learned, held = learned_and_held_out(inputs)
    assert [batch.samples[0].data for part in (learned, held) for batch in part] == ["mine", "yours"]


def test_what_cannot_be_iterated_again_is_refused():
    with pytest.raises(DataError, match=r"The inputs can be iterated only once, .* pass a list of batches"):
        learned_and_held_out(iter([torch.zeros(4, 8)]))
    with pytest.raises(DataError, match="The inputs can be iterated only once"):
        learned_and_held_out(torch.zeros(4, 8) for _ in range(2))
    with pytest.raises(DataError, match="The inputs hold 0 samples; to learn from some"):
        learned_and_held_out([])


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", ["demo_vit", "demo_wav2vec2", "demo_dit", "a list"])
def test_the_shares_of_a_part_are_the_part(name, ranks):
    inputs = batches_of([[0, 1], [1, 2, 3], [4], [5, 0]]) if name == "a list" else normscope.load(name, limit=9).inputs
    for part in learned_and_held_out(inputs):
        shares = [list(part.chunks(Share(rank, ranks))) for rank in range(ranks)]
        in_turn = [shares[position % ranks][position // ranks] for position in range(sum(map(len, shares)))]
        batches = [batch for chunk in in_turn for batch in chunk.batches]
        assert [batch.samples for batch in batches] == [batch.samples for batch in part]
        assert sum(len(batch.samples) for batch in batches) == part.n_samples
        n_inputs = 4 if name == "a list" else 9
        assert sorted(number for chunk in in_turn for number in chunk.numbers) == list(range(n_inputs))
        assert part.first_sample().samples == batches[0].samples[:1]


@pytest.mark.slow
def test_a_part_walks_its_own_trajectories_of_a_share():
    learned, held = learned_and_held_out(normscope.load("demo_dit", limit=5, batch_size=2, device="cpu").inputs)
    for part, expected in ((learned, {1, 2, 3, 4}), (held, {0})):
        walked = [
            sample.source_index for rank in range(2) for samples, _ in part.ends(Share(rank, 2)) for sample in samples
        ]
        assert sorted(walked) == sorted(expected)
        assert {sample.source_index for samples, _ in part.ends() for sample in samples} == expected


def test_samples_that_are_known_are_not_read(tmp_path):
    for number in range(8):
        (tmp_path / f"{number}.png").write_bytes(b"damaged")
    inputs = normscope.load("demo_vit", data=tmp_path, device="cpu").inputs
    learned, held = learned_and_held_out(inputs)
    assert (learned.n_samples, held.n_samples, inputs.unreadable) == (6, 2, [])
    with pytest.raises(DataError, match="None of the 8 files tried"):
        held.first_sample()


def test_a_part_of_which_nothing_can_be_read(tmp_path):
    for number in range(4):
        Image.new("L", (8, 8)).save(tmp_path / f"{number}.png")
    (tmp_path / "0.png").write_bytes(b"damaged")
    learned, held = learned_and_held_out(normscope.load("demo_vit", data=tmp_path, device="cpu").inputs)
    assert sum(len(batch.samples) for batch in learned) == learned.n_samples == 3
    assert [list(chunk.batches) for chunk in held.chunks(ALL)] == [[]]
    assert list(held.left_out.unreadable) == [0]
    with pytest.raises(DataError, match=r"No sample can be read of .* 1 of 4 samples held out\."):
        held.first_sample()


def test_what_a_part_passes_on():
    inputs = normscope.load("demo_vit", limit=6, device="cpu").inputs
    learned, held = learned_and_held_out(inputs)
    assert held.batch_size == inputs.batch_size
    learned.left_out = told = LeftOut(cut=3)
    assert inputs.left_out is held.left_out is told
    of_a_list, _ = learned_and_held_out([torch.zeros(2, 8), torch.zeros(1, 8)])
    assert (of_a_list.batch_size, of_a_list.left_out) == (1, LeftOut())


NUMBERS = st.integers(0, 40)

TAKEN = st.sets(NUMBERS)


@given(st.lists(NUMBERS, unique=True), TAKEN, st.integers(1, 7))
def test_shares_divide_what_is_left_in_its_order(order, taken, ranks):
    left = [number for number in order if number not in taken]
    shares = [Share(rank, ranks, taken) for rank in range(ranks)]
    parts = [list(share.of(share.left(order))) for share in shares]
    assert [parts[i % ranks][i // ranks] for i in range(len(left))] == left
    assert sum(map(len, parts)) == len(left)


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
    for batches in ([torch.zeros(1, 2)] * 4, normscope.load("demo_vit", limit=4, batch_size=1, device="cpu").inputs):
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
