"""Inputs divided among ranks, and into a learned and a held-out part: each input in one part, exactly once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import normscope
from normscope.errors import DataError
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.chunks import ALL, LeftOut, RankSampler, first_and_chunks
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


@pytest.mark.parametrize("period", [2, 4, 8])
def test_periodic_data_are_held_out_evenly(period):
    """Multiples of four apart, one of two alternating kinds would be held out alone."""
    held = numbers_in(learned_and_held_out(batches_of([[number] for number in range(800)]))[1])
    counts = [sum(number % period == kind for number in held) for kind in range(period)]
    # Each count is binomial, of 200 or fewer trials; five standard deviations of it.
    assert counts == pytest.approx([200 / period] * period, abs=5 * (200 / period * (1 - 1 / period)) ** 0.5)


def test_the_division_does_not_depend_on_the_process():
    held = learned_and_held_out([torch.zeros(24, 1)])[1]
    assert numbers_in(held) == [0, 5, 9, 13, 18, 22]


@given(_of_batches.filter(lambda sources: sum(map(len, sources)) > 1))
@settings(max_examples=40)
def test_sources_stay_together_and_every_sample_is_in_one_part(sources):
    inputs, flat = batches_of(sources), [source for batch in sources for source in batch]
    parts = learned_and_held_out(inputs)
    learned, held = (numbers_in(part) for part in parts)
    assert sorted(learned + held) == list(range(len(flat)))
    assert (learned, held) == (sorted(learned), sorted(held)) and learned and held
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
    for batch in (batch for part in parts for batch in part):
        numbers = torch.tensor([sample.index for sample in batch.samples]).double()
        for tensor in (batch.args[0], batch.kwargs["mask"][:, 0], batch.kwargs["more"]["y"]):
            assert torch.equal(tensor, numbers)
        assert torch.equal(batch.kwargs["scale"], torch.ones(())) and batch.kwargs["name"] == "same"
        assert torch.equal(batch.valid, numbers[:, None] > 2)
        assert batch.part == f"timestep {[n for n, batch in enumerate(sources) for _ in batch][int(numbers[0])]}"


def test_plain_tensors_and_descriptions():
    learned, held = learned_and_held_out([torch.arange(5.0), {"x": torch.arange(5.0, 8.0)}])
    values = [
        [batch.args[0].tolist() if batch.args else batch.kwargs["x"].tolist() for batch in part]
        for part in (learned, held)
    ]
    assert values == [[[1.0, 2.0, 3.0, 4.0], [6.0, 7.0]], [[0.0], [5.0]]]
    assert learned.description == "inputs · 6 of 8 samples to learn from"
    assert held.description == "inputs · 2 of 8 samples held out"


def test_equal_names_in_two_data_sets_are_two_sources():
    inputs = [Batch((torch.zeros(1),), samples=(Sample("cat", 0, 0, data),)) for data in ("mine", "yours")]
    learned, held = learned_and_held_out(inputs)
    assert [batch.samples[0].data for part in (learned, held) for batch in part] == ["mine", "yours"]


@pytest.mark.parametrize(
    ("inputs", "error"),
    [
        (iter([torch.zeros(4, 8)]), r"The inputs can be iterated only once, .* pass a list of batches"),
        ((torch.zeros(4, 8) for _ in range(2)), "The inputs can be iterated only once"),
        ([], "The inputs are 0 samples; at least two are needed"),
        ([torch.zeros(1, 8)], "The inputs are 1 sample; at least two are needed, to learn and to measure."),
    ],
)
def test_refusals(inputs, error):
    with pytest.raises(DataError, match=error):
        learned_and_held_out(inputs)


@pytest.mark.parametrize("name", ["demo_vit", "demo_dit", "a list"])
def test_chunks_of_a_part_on_all_ranks_are_the_part(name):
    inputs = batches_of([[0, 1], [1, 2, 3], [4], [5, 0]]) if name == "a list" else normscope.load(name, limit=9).inputs
    for part in learned_and_held_out(inputs):
        chunks = [list(part.chunks(RankSampler(rank, 3))) for rank in range(3)]
        in_turn = [chunks[position % 3][position // 3] for position in range(sum(map(len, chunks)))]
        batches = [batch for chunk in in_turn for batch in chunk.batches]
        assert [batch.samples for batch in batches] == [batch.samples for batch in part]
        assert sum(len(batch.samples) for batch in batches) == part.n_samples
        n_inputs = 4 if name == "a list" else 9
        assert sorted(number for chunk in in_turn for number in chunk.numbers) == list(range(n_inputs))
        assert part.first_sample().samples == batches[0].samples[:1]


@pytest.mark.slow
def test_each_rank_walks_the_trajectories_of_a_part():
    learned, held = learned_and_held_out(normscope.load("demo_dit", limit=5, batch_size=2, device="cpu").inputs)
    for part, expected in ((learned, {1, 2, 3, 4}), (held, {0})):
        walked = [s.source_index for rank in range(2) for ends in part.ends(RankSampler(rank, 2)) for s in ends[0]]
        assert sorted(walked) == sorted(expected)
        assert {sample.source_index for samples, _ in part.ends() for sample in samples} == expected


def test_files_are_not_read_to_divide_them(tmp_path):
    for number in range(8):
        (tmp_path / f"{number}.png").write_bytes(b"damaged")
    inputs = normscope.load("demo_vit", data=tmp_path, device="cpu").inputs
    learned, held = learned_and_held_out(inputs)
    assert (learned.n_samples, held.n_samples, inputs.unreadable) == (6, 2, [])
    with pytest.raises(DataError, match="None of the 8 files tried"):
        held.first_sample()


def test_a_part_without_a_readable_file(tmp_path):
    for number in range(4):
        Image.new("L", (8, 8)).save(tmp_path / f"{number}.png")
    (tmp_path / "0.png").write_bytes(b"damaged")
    learned, held = learned_and_held_out(normscope.load("demo_vit", data=tmp_path, device="cpu").inputs)
    assert sum(len(batch.samples) for batch in learned) == learned.n_samples == 3
    assert [list(chunk.batches) for chunk in held.chunks(ALL)] == [[]]
    assert list(held.left_out.unreadable) == [0]
    with pytest.raises(DataError, match=r"No sample can be read of .* 1 of 4 samples held out\."):
        held.first_sample()


def test_omissions_of_a_part_are_those_of_all_inputs():
    inputs = normscope.load("demo_vit", limit=6, device="cpu").inputs
    learned, held = learned_and_held_out(inputs)
    learned.left_out = left_out = LeftOut(cut=3)
    assert inputs.left_out is held.left_out is left_out


NUMBERS = st.integers(0, 40)


@given(st.integers(1, 12), st.sets(st.integers(0, 11)), st.integers(1, 4))
def test_a_users_own_batches_are_an_input_each(number, captured, ranks):
    batches = [torch.full((2, 3), float(i)) for i in range(number)]
    found = []
    for rank in range(ranks):
        first, chunks = first_and_chunks(iter(batches), RankSampler(rank, ranks, captured))
        assert first.args[0].tolist() == [[0.0] * 3] and len(first.samples) == 1
        found += [(c.numbers, [b.args[0][0, 0].item() for b in c.batches]) for c in chunks]
    assert sorted(found) == [([i], [float(i)]) for i in range(number) if i not in captured]


def test_samples_are_numbered_through_all_ranks():
    batches = [torch.zeros(2, 3), torch.ones(1, 3), torch.ones(3, 3)]
    for ranks in (1, 2, 5):
        of_ranks = [first_and_chunks(batches, RankSampler(rank, ranks))[1] for rank in range(ranks)]
        samples = [s.index for chunks in of_ranks for c in chunks for b in c.batches for s in b.samples]
        assert sorted(samples) == list(range(6))
    assert first_and_chunks([], ALL)[0] is None


def test_captured_inputs_may_be_added_after_the_first_sample():
    """A checkpoint is read after the first sample, which determines the sites."""
    for batches in ([torch.zeros(1, 2)] * 4, normscope.load("demo_vit", limit=4, batch_size=1, device="cpu").inputs):
        captured = set()
        _, chunks = first_and_chunks(batches, RankSampler(0, 1, captured))
        captured |= {0, 2}
        assert [list(chunk.numbers) for chunk in chunks] == [[1], [3]]
