"""Datasets read by any number of ranks and workers: each input once, in the same batches."""

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
from normscope.inputs.chunks import ALL, LeftOut, RankSampler
from normscope.models.inputs.dataset import InMemory, number_of_workers
from normscope.models.inputs.images import image_inputs

DAMAGED = (0, 41, 59)


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
    """Make 60 images of one colour each, of which three cannot be read."""
    folder = tmp_path_factory.mktemp("images")
    for number in range(60):
        Image.new("RGB", (4, 4), (number, 0, 7)).save(folder / f"{number:02}.png")
    for number in DAMAGED:
        path = folder / f"{number:02}.png"
        path.write_bytes(path.read_bytes()[:40])
    return folder


def numbers_in(batch):
    return batch.args[0][:, 0, 0, 0].int().tolist()


def contents(inputs, sampler=ALL):
    """List everything that a rank's chunks contain, in values that compare."""
    listed = []
    for chunk in inputs.chunks(sampler):
        batches = [(batch.samples, batch.part, [tensor.tolist() for tensor in batch.args]) for batch in chunk.batches]
        listed.append((list(chunk.numbers), batches, chunk.unreadable, chunk.cut))
    return listed


@given(
    n=st.integers(1, 40),
    batch_size=st.integers(1, 9),
    ranks=st.integers(1, 12),
    captured=st.sets(st.integers(0, 39)),
    limit=st.none() | st.integers(1, 50),
    shuffle=st.booleans(),
    seed=st.integers(-5, 5),
)
@settings(deadline=None, max_examples=50)
def test_ranks_read_each_remaining_input_once_in_the_same_batches(n, batch_size, ranks, captured, limit, shuffle, seed):
    inputs = numbers_as_inputs(n, batch_size=batch_size, limit=limit, shuffle=shuffle, seed=seed)
    by_rank = [contents(inputs, RankSampler(rank, ranks, captured)) for rank in range(ranks)]
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist() if shuffle else list(range(n))
    remaining = [number for number in order[:limit] if number not in captured]
    in_turn = [by_rank[i % ranks][i // ranks] for i in range(-(-len(remaining) // batch_size))]
    assert sum(map(len, by_rank)) == len(in_turn)
    assert [number for chunk in in_turn for number in chunk[0]] == remaining
    assert [len(chunk[0]) for chunk in in_turn[:-1]] == [batch_size] * (len(in_turn) - 1)
    assert in_turn == contents(inputs, RankSampler(0, 1, captured))
    for numbers, ((samples, _, (values,)),), _, _ in in_turn:
        assert [sample.index for sample in samples] == [int(value) for (value,) in values] == numbers
    assert inputs.n_samples == min(n, limit or n)
    assert [sample.index for sample in inputs.known_samples()] == order[:limit]
    assert inputs.first_sample().samples[0].index == order[0]


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
def test_workers_read_the_same_and_keep_the_random_state(folder, workers, shuffle):
    def inputs(**changes):
        return image_files(folder, to_pixels, batch_size=7, limit=50, shuffle=shuffle, **changes)

    expected, ours = inputs(), inputs(workers=workers)
    before = torch.get_rng_state()
    assert contents(ours) == contents(expected)
    assert torch.equal(torch.get_rng_state(), before)
    assert ours.unreadable == expected.unreadable
    assert [batch.samples for batch in ours] == [batch.samples for batch in expected]
    assert contents(ours, RankSampler(1, 3, {3, 4})) == contents(expected, RankSampler(1, 3, {3, 4}))


def test_ranks_omit_damaged_images_and_read_all_others(folder):
    inputs, together, chunks = image_files(folder, to_pixels, batch_size=16), LeftOut(), []
    for rank in range(3):
        for chunk in inputs.chunks(RankSampler(rank, 3)):
            chunks.append(numbers_in(chunk.batches[0]))
        together.add(inputs.left_out)
    assert sorted(number for chunk in chunks for number in chunk) == [
        number for number in range(60) if number not in DAMAGED
    ]
    assert sorted(map(len, chunks)) == [11, 15, 15, 16], "a chunk is determined by its numbers"
    inputs.left_out = together
    assert [line.partition(":")[0] for line in inputs.unreadable] == ["00.png", "41.png", "59.png"]
    assert inputs.description == f"{folder}: 60 images (3 unreadable)"
    assert numbers_in(inputs.first_sample()) == [1], "the first readable one"
    assert inputs.unreadable == together.lines, "the first sample does not change the omissions"


def test_an_unreadable_chunk_has_no_batch(folder):
    first, second = image_files(folder, to_pixels, batch_size=1, limit=2).chunks(ALL)
    assert (list(first.batches), list(first.unreadable)) == ([], [0])
    assert numbers_in(second.batches[0]) == [1]
    alone = image_files(folder, to_pixels, limit=1)
    for read in (alone.first_sample, lambda: list(alone)):
        with pytest.raises(DataError, match=r"None of the 1 file tried at .* can be read as an image\. The first is"):
            read()
    assert list(alone.chunks(RankSampler(1, 2))) == [], "a rank without inputs is no error"


def test_descriptions_contain_the_selection(folder):
    for changes, description in (
        ({"limit": 20, "shuffle": True, "seed": 3}, "20 of 60 images, drawn with seed 3"),
        ({"shuffle": True}, "60 images, shuffled with seed 0"),
        ({"limit": 20}, "the first 20 of 60 images"),
    ):
        assert image_files(folder, to_pixels, **changes).description == f"{folder}: {description}"
    assert numbers_as_inputs(9, limit=4, shuffle=True).description == "4 of 9 numbers, drawn with seed 0"


@pytest.mark.parametrize(
    ("asked", "chunks", "device", "local", "expected"),
    [
        (None, 100, "cpu", "1", 0),
        (3, 2, "cpu", "1", 2),
        (0, 100, "cuda", "1", 0),
        (None, 100, "cuda", "1", 8),
        (None, 100, "cuda", "4", 3),
        (None, 100, "cuda", "99", 1),
        (None, 2, "cuda", "1", 2),
    ],
)
def test_number_of_workers(monkeypatch, asked, chunks, device, local, expected):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(14)))
    assert number_of_workers(options_with(workers=asked, device=torch.device(device)), chunks) == expected


def test_workers_on_a_system_without_fork(monkeypatch):
    monkeypatch.setattr("multiprocessing.get_all_start_methods", lambda: ["spawn"])
    assert number_of_workers(options_with(device=torch.device("cuda")), 10) == 0
    with pytest.raises(UsageError, match="workers is 2, and this system cannot fork"):
        number_of_workers(options_with(workers=2), 10)


@pytest.mark.slow
def test_a_killed_worker_is_one_error(folder):
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
def test_workers_ignore_signals_to_all_processes(folder, handled):
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
    out, err = running.communicate(timeout=30)
    assert (running.returncode, err) == (0, "")
    if handled is None:
        assert out.endswith("stopped\n")
    else:
        assert sorted(out.split()) == ["noted", *["read"] * 19], "the workers go on, and only one takes note"
