"""Timers are told apart from the machine by clocks of our own, or hold to a sleep that is known."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normscope.swaps.bench import timing
from normscope.swaps.bench.timing import (
    blocks,
    flushed,
    in_turns,
    replayed,
    sets_beyond_cache,
    spread,
    warmed,
)


@given(st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=40))
def test_quantiles_are_numpys(samples):
    found = spread(samples)
    # The same sums of two in float64: one unit in the last place between n/2 and a lerp.
    assert found.median == pytest.approx(np.quantile(samples, 0.5), rel=1e-15)
    assert found.p20 == np.quantile(samples, 0.2, method="lower")
    assert found.p80 == np.quantile(samples, 0.8, method="higher")


def test_blocks_time_a_call_and_not_a_block():
    # A sleep never ends early, and a block of these lasts no thousand times as long, whatever else the machine does.
    samples = blocks(lambda: time.sleep(0.004))
    assert samples and all(0.004 <= sample < 4 for sample in samples)


def test_turns_begin_with_another_each_round():
    order = []

    def sampler(name):
        return lambda: [float(len(order)) if order.append(name) is None else 0.0]

    samples = in_turns({name: sampler(name) for name in "abc"}, at_least=4, at_most=4)
    assert "".join(order) == "abcbcacababc"
    assert list(samples) == ["a", "b", "c"]
    assert samples["a"] == [1.0, 6.0, 8.0, 10.0]


@pytest.mark.parametrize(
    ("until", "rounds"),
    [(0.0, 2), (25.0, 2), (30.0, 3), (39.0, 3), (1000.0, 6)],
)
def test_no_round_begins_that_would_end_too_late(until, rounds):
    at = [0.0]

    def ten_seconds():
        at[0] += 10
        return [10.0]

    samples = in_turns({"a": ten_seconds}, at_least=2, at_most=6, until=until, now=lambda: at[0])
    assert len(samples["a"]) == rounds


@given(st.integers(1, 10**10), st.integers(1, 10**8))
def test_buffers_are_beyond_four_caches_and_no_more_than_it_takes(nbytes, cache):
    number = sets_beyond_cache(nbytes, cache)
    assert number >= 4 and number * nbytes > 4 * cache
    assert number == 4 or (number - 1) * nbytes <= 4 * cache


def test_do_bench_takes_as_long_as_it_is_told(monkeypatch):
    testing = pytest.importorskip("triton.testing", reason="Triton is made for Linux alone")
    told = []
    monkeypatch.setattr(testing, "do_bench", lambda run, **how: told.append(how) or [2.0, 1.0])
    assert flushed(lambda: None) == flushed(lambda: None, 20) == [2e-3, 1e-3]
    assert told == [{"warmup": warmup, "rep": rep, "return_mode": "all"} for warmup, rep in ((25, 100), (5, 20))]


def test_a_cold_start_is_in_no_time_and_the_device_is_waited_for(monkeypatch):
    """A first pass of two seconds, later ones of 10 ms that are over only once the device is waited for."""
    at, passes, unfinished = [0.0], iter([2.0, 0.01]), [0.0]

    def run():
        unfinished[0] = next(passes)
        return "done"

    def synchronize(device):
        at[0] += unfinished[0]
        unfinished[0] = 0.0

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert warmed(run, torch.device("cuda"), lambda: at[0]) == ("done", pytest.approx(0.01))


class Stream:
    """A stand-in for CUDA's streams, graphs and events, which records what is captured and replayed."""

    current, capturing, fails, replays = ["default"], False, False, 0

    def __init__(self, name="aside", capture=False):
        self.name, self.capture = name, capture

    def __enter__(self):
        self.before, Stream.current[0] = Stream.current[0], self.name
        Stream.capturing = self.capture

    def __exit__(self, *raised):
        Stream.capturing = False
        if self.capture and Stream.fails:  # torch.cuda.graph stays on its stream then
            raise RuntimeError("operation failed due to a previous error during capture")
        Stream.current[0] = self.before

    def wait_stream(self, stream):
        pass

    def replay(self):
        Stream.replays += 1

    def record(self):
        pass

    def elapsed_time(self, end):
        return 420.0  # milliseconds


@pytest.fixture
def cuda(monkeypatch):
    monkeypatch.setattr(Stream, "fails", False)
    monkeypatch.setattr(Stream, "replays", 0)
    for name, stand_in in {
        "Stream": Stream,
        "stream": lambda stream: Stream(stream.name),
        "current_stream": Stream,
        "CUDAGraph": Stream,
        "graph": lambda graph, stream: Stream(stream.name, capture=True),
        "Event": lambda enable_timing: Stream(),
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(timing.torch.cuda, name, stand_in)
    return Stream


def test_a_replay_goes_round_the_buffers(cuda):
    captured = []

    def run(buffers):
        if cuda.capturing:
            captured.append((buffers, cuda.current[0]))

    assert replayed(run, list("abcdefg"), 5) == [pytest.approx(0.42 / 203)] * 5 and cuda.replays == 6
    assert len(captured) == 203  # the least multiple of 7 from 200 on: each set is used as often
    assert "".join(buffers for buffers, _ in captured[:8]) == "abcdefga"
    captured.clear()
    assert replayed(run, list("ab"), 1, calls=3, stream=Stream("own")) == [0.42 / 4]
    assert captured == [(buffers, "own") for buffers in "abab"]


def test_a_capture_that_fails_leaves_the_stream_as_it_was(cuda, monkeypatch):
    monkeypatch.setattr(cuda, "fails", True)
    with pytest.raises(RuntimeError, match="previous error"):
        replayed(lambda buffers: None, "abcd")
    assert cuda.current == ["default"]
