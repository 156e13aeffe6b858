"""Chunks and shares of inputs: whatever the processes, each input once, in the same batches."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loads import options_with
from PIL import Image

from normscope.errors import DataError, UsageError
from normscope.inputs.batch import Sample
from normscope.inputs.chunks import ALL, Done, LeftOut, Share
from normscope.models.inputs.images import image_inputs
from normscope.models.inputs.numbered_inputs import InMemory, number_of_workers


def image_files(root, transform, **changes):
    return image_inputs(transform, options_with(data=str(root), **changes))


def numbers_as_inputs(n, **changes):
    tensors = [torch.tensor([float(number)]) for number in range(n)]
    samples = [Sample(f"number {number}", number, number) for number in range(n)]
    return InMemory(tensors, samples, f"{n} numbers", options_with(**changes))


def to_pixels(image):
    return torch.from_numpy(np.asarray(image).copy()).movedim(-1, 0).float()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make 300 images of 4×4 pixels that tell them apart, of which three cannot be read: 1 %."""
    folder = tmp_path_factory.mktemp("images")
    for number in range(300):
        Image.new("RGB", (4, 4), (number % 256, number // 256, 7)).save(folder / f"{number:03}.png")
    for number in (0, 41, 299):
        path = folder / f"{number:03}.png"
        path.write_bytes(path.read_bytes()[:40])
    return folder


def numbers_in(batch):
    pixels = batch.args[0][:, :2, 0, 0]
    return (pixels[:, 0] + 256 * pixels[:, 1]).int().tolist()


def contents(inputs, share=ALL):
    """List everything that a share's chunks hold, in values that compare."""
    listed = []
    for chunk in inputs.chunks(share):
        batches = [(batch.samples, batch.part, [tensor.tolist() for tensor in batch.args]) for batch in chunk.batches]
        listed.append((list(chunk.numbers), batches, chunk.unreadable, chunk.cut))
    return listed


_some = st.integers(1, 40)


@given(
    n=_some,
    batch_size=st.integers(1, 9),
    ranks=st.integers(1, 12),
    done=st.sets(st.integers(0, 39)),
    limit=st.none() | st.integers(1, 50),
    shuffle=st.booleans(),
    seed=st.integers(-5, 5),
)
@settings(deadline=None)
def test_the_shares_are_every_input_that_is_left_once_in_the_same_batches(
    n, batch_size, ranks, done, limit, shuffle, seed
):
    inputs, taken = numbers_as_inputs(n, batch_size=batch_size, limit=limit, shuffle=shuffle, seed=seed), Done()
    taken.add(done)
    shares = [contents(inputs, Share(rank, ranks, taken)) for rank in range(ranks)]
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist() if shuffle else list(range(n))
    left = [number for number in order[:limit] if number not in done]
    in_turn = [shares[position % ranks][position // ranks] for position in range(-(-len(left) // batch_size))]
    assert sum(map(len, shares)) == len(in_turn)
    assert [number for chunk in in_turn for number in chunk[0]] == left
    assert [len(chunk[0]) for chunk in in_turn[:-1]] == [batch_size] * (len(in_turn) - 1)
    assert in_turn == contents(inputs, Share(0, 1, done))
    for numbers, ((samples, _, (values,)),), _, _ in in_turn:
        assert [sample.index for sample in samples] == [int(value) for (value,) in values] == numbers
    assert inputs.n_samples == min(n, limit or n)
    assert [sample.index for sample in inputs.known_samples()] == order[:limit]
    assert inputs.first_sample().samples[0].index == order[0]


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
def test_workers_read_the_same_and_leave_the_random_state_alone(folder, workers, shuffle):
    def inputs(**changes):
        return image_files(folder, to_pixels, batch_size=7, limit=50, shuffle=shuffle, **changes)

    expected, ours = inputs(), inputs(workers=workers)
    before = torch.get_rng_state()
    assert contents(ours) == contents(expected)
    assert torch.equal(torch.get_rng_state(), before)
    assert ours.unreadable == expected.unreadable
    assert [batch.samples for batch in ours] == [batch.samples for batch in expected]
    assert contents(ours, Share(1, 3, {3, 4})) == contents(expected, Share(1, 3, {3, 4}))


@pytest.mark.parametrize("ranks", [1, 3])
def test_of_a_folder_with_damaged_images_all_others_come(folder, ranks):
    inputs, together, seen, chunks = image_files(folder, to_pixels, batch_size=16), LeftOut(), [], {}
    for rank in range(ranks):
        for chunk in inputs.chunks(Share(rank, ranks)):
            assert len(chunk.batches) == 1
            chunks[chunk.numbers[0]] = numbers_in(chunk.batches[0])
            seen += chunks[chunk.numbers[0]]
        together.add(inputs.left_out)
    assert sorted(seen) == [number for number in range(300) if number not in (0, 41, 299)]
    assert {len(numbers) for numbers in chunks.values()} == {15, 16, 11}, "a chunk is fixed by its numbers"
    assert sorted(together.unreadable) == [0, 41, 299]
    inputs.left_out = together
    assert [line.partition(":")[0] for line in inputs.unreadable] == ["000.png", "041.png", "299.png"]
    assert inputs.description == f"{folder}: 300 images (3 unreadable)"
    assert numbers_in(inputs.first_sample()) == [1], "the first that can be read"
    assert inputs.unreadable == together.lines, "looking for the first leaves the account alone"


def test_a_chunk_that_cannot_be_read_has_no_batch(folder):
    inputs = image_files(folder, to_pixels, batch_size=1, limit=2)
    first, second = inputs.chunks(ALL)
    assert (list(first.batches), list(first.unreadable)) == ([], [0])
    assert numbers_in(second.batches[0]) == [1]
    alone = image_files(folder, to_pixels, limit=1)
    for read in (alone.first_sample, lambda: list(alone)):
        with pytest.raises(DataError, match=r"None of the 1 file tried at .* The first is 000\.png: "):
            read()
    assert list(alone.chunks(Share(1, 2))) == [], "an empty share is no error"


def test_descriptions_say_what_was_drawn(folder):
    for changes, description in (
        ({"limit": 20, "shuffle": True, "seed": 3}, "20 of 300 images, drawn with seed 3"),
        ({"shuffle": True}, "300 images, shuffled with seed 0"),
        ({"limit": 20}, "the first 20 of 300 images"),
    ):
        assert image_files(folder, to_pixels, **changes).description == f"{folder}: {description}"
    assert numbers_as_inputs(9, limit=4, shuffle=True).description == "4 of 9 numbers, drawn with seed 0"


@pytest.mark.parametrize(
    ("asked", "chunks", "device", "local", "expected"),
    [
        (None, 100, "cpu", "1", 0),
        (3, 100, "cpu", "1", 3),
        (3, 2, "cpu", "1", 2),
        (0, 100, "cuda", "1", 0),
        (None, 100, "cuda", "1", 8),
        (None, 100, "cuda", "4", 3),
        (None, 100, "cuda", "99", 1),
        (None, 2, "cuda", "1", 2),
    ],
)
def test_how_many_workers(monkeypatch, asked, chunks, device, local, expected):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(14)))
    assert number_of_workers(options_with(workers=asked, device=torch.device(device)), chunks) == expected


def test_workers_where_there_is_no_fork(monkeypatch):
    monkeypatch.setattr("multiprocessing.get_all_start_methods", lambda: ["spawn"])
    assert number_of_workers(options_with(device=torch.device("cuda")), 10) == 0
    with pytest.raises(UsageError, match="workers is 2, and this system cannot fork"):
        number_of_workers(options_with(workers=2), 10)


@pytest.mark.slow
def test_a_worker_that_is_killed_is_a_sentence_and_none_is_left(folder):
    def kill(image):
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(DataError, match=r"A process that reads inputs has ended before its work: DataLoader worker"):
        list(image_files(folder, kill, workers=1))


SLOWLY = """
import signal, sys, time
import torch
from normscope.inputs.loaded_model import LoadOptions
from normscope.models.inputs.images import image_inputs

def slowly(image):
    time.sleep(0.02)
    return torch.zeros(1)

if sys.argv[2:]:
    signal.signal(int(sys.argv[2]), lambda *_: print("noted", flush=True))
options = LoadOptions("random", sys.argv[1], 60, 3, 0, torch.device("cpu"), torch.float32, workers=2)
try:
    for batch in image_inputs(slowly, options):
        print("read", flush=True)
except KeyboardInterrupt:
    print("stopped")
"""


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("handled", [None, signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_is_the_main_ones_affair(folder, handled):
    arguments = [] if handled is None else [str(int(handled))]
    running = subprocess.Popen(
        [sys.executable, "-c", SLOWLY, str(folder), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert running.stdout.readline() == "read\n"
    os.killpg(running.pid, handled or signal.SIGINT)  # as a terminal does, or a batch system
    said, complained = running.communicate(timeout=30)
    assert (running.returncode, complained) == (0, "")
    if handled is None:
        assert said.endswith("stopped\n")
    else:
        assert sorted(said.split()) == ["noted", *["read"] * 19], "the workers go on, and only one takes note"
