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
    once,
    repeated,
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


def test_of_three_samples_the_interval_is_all():
    assert (spread([5.0, 1.0, 2.0]).p20, spread([5.0, 1.0, 2.0]).p80) == (1.0, 5.0)


def test_blocks_time_a_call_and_not_a_block():
    # A sleep never ends early, and a block of these lasts no thousand times as long, whatever else the machine does.
    samples = blocks(lambda: time.sleep(0.004))
    assert samples and all(0.004 <= sample < 4 for sample in samples)


def test_blocks_run_on_all_threads():
    seen = []
    blocks(lambda: seen.append(torch.get_num_threads()))
    assert set(seen) == {torch.get_num_threads()}


def test_once_calls_once_and_repeated_so_often():
    calls = []
    clock = iter([10.0, 12.5, 20.0, 24.0]).__next__
    assert once(lambda: calls.append(1), clock) == [2.5]
    assert len(calls) == 1
    assert repeated(lambda: calls.append(1), 3, clock) == 4.0
    assert len(calls) == 4


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


def test_nothing_to_sample_takes_no_round():
    assert in_turns({}, at_least=2, at_most=2) == {}


@given(st.integers(1, 10**10), st.integers(1, 10**8))
def test_buffers_are_beyond_four_caches_and_no_more_than_it_takes(nbytes, cache):
    number = sets_beyond_cache(nbytes, cache)
    assert number >= 4 and number * nbytes > 4 * cache
    assert number == 4 or (number - 1) * nbytes <= 4 * cache


def test_a_replay_goes_round_the_buffers_and_keeps_what_it_returns(monkeypatch):
    """Without CUDA, on a stand-in for its streams, graphs and events: which calls are captured, and how they count."""
    state, streams = {"capturing": False, "replays": 0}, []

    class Context:
        def __init__(self, *args, **kwargs):
            self.graph = bool(args) and args[0] == "graph"
            if self.graph:
                streams.append(kwargs["stream"])

        def __enter__(self):
            state["capturing"] = self.graph

        def __exit__(self, *raised):
            state["capturing"] = False

        def wait_stream(self, stream):
            pass

    class Graph(str):
        __slots__ = ()

        def replay(self):
            state["replays"] += 1

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            pass

        def elapsed_time(self, end):
            return 420.0  # milliseconds

    for name, stand_in in {
        "Stream": Context,
        "stream": lambda stream: Context(),
        "current_stream": Context,
        "CUDAGraph": lambda: Graph("graph"),
        "graph": Context,
        "Event": Event,
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(timing.torch.cuda, name, stand_in)
    captured = []
    samples = replayed(lambda buffers: captured.append(buffers) if state["capturing"] else None, list("abcdefg"), 5)
    assert len(captured) == 203  # the least multiple of 7 from 200 on: each set is used as often
    assert "".join(captured[:8]) == "abcdefga"
    assert samples == [pytest.approx(0.42 / 203)] * 5 and state["replays"] == 6
    captured.clear()
    own = Context()
    assert replayed(lambda buffers: captured.append(buffers), list("ab"), 1, calls=3, stream=own) == [0.42 / 4]
    assert captured == list("ab" + "abab")  # both once before anything is captured
    assert streams[0] is not own and streams[1] is own


def test_a_capture_that_fails_leaves_the_stream_as_it_was(monkeypatch):
    """torch.cuda.graph stays on the stream that it captures on where ending the capture raises."""
    current = ["default"]

    class OnStream:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            self.before, current[0] = current[0], self.stream.name

        def __exit__(self, *raised):
            current[0] = self.before

    class Stream:
        name = "aside"

        def wait_stream(self, stream):
            pass

    class Capture(OnStream):
        def __init__(self, graph, stream):
            super().__init__(stream)

        def __exit__(self, *raised):
            raise RuntimeError("operation failed due to a previous error during capture")

    stand_ins = {"Stream": Stream, "current_stream": Stream, "stream": OnStream, "CUDAGraph": object, "graph": Capture}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(timing.torch.cuda, name, stand_in)
    with pytest.raises(RuntimeError, match="previous error"):
        replayed(lambda buffers: None, "abcd")
    assert current == ["default"]


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
