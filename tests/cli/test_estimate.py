"""How long a command takes: what is said of it, by a clock of the test's own and by real processes."""

import os
import re
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normscope.cli.estimate import Estimate, ProgressLines, seconds_of_a_pass
from normscope.inputs.batch import Batch, Sample


class Clock:
    """A clock that stands until it is set."""

    def __init__(self):
        self.at = 0.0

    def __call__(self):
        return self.at


class Told:
    """A command's progress by a clock, and what is said of it, with when."""

    def __init__(self):
        self.clock, self.said = Clock(), []
        self.estimate = Estimate(self.clock)
        self.lines = ProgressLines(lambda line: self.said.append((self.clock.at, line)), self.estimate)

    def stage(self, name, number, seconds, first=0.0, **how):
        """A stage of so many steps of so many seconds each; the first takes longer by ``first``."""
        self.lines(name, 0, number, **how)
        for done in range(1, number + 1):
            self.clock.at += seconds + first * (done == 1)
            self.lines(name, done, number, **how)


def lines_of(calls, seconds):
    told = Told()
    for call, told.clock.at in zip(calls, seconds, strict=True):
        told.lines(*call)
    return [line for _, line in told.said]


def test_a_long_stage_says_in_its_first_seconds_how_long_it_takes_and_then_how_far_it_is():
    calls = [("end to end", done, 1000) for done in range(0, 1001, 10)]
    assert lines_of(calls, range(101)) == [
        "end to end: 30 of 1,000, about 100 s in all",
        "end to end: 330 of 1,000, about 67 s left",
        "end to end: 630 of 1,000, about 37 s left",
        "end to end: 930 of 1,000, about 7 s left",
    ]


def test_what_is_over_soon_says_nothing():
    assert lines_of([("samples", done, 20) for done in range(21)], [0.9 * n for n in range(21)]) == []


def test_the_first_step_and_what_was_done_before_a_stage_began_tell_no_pace():
    first = [("samples", done, 100) for done in (0, 10, 20)]  # the first step may compile something
    assert lines_of(first, [0, 20, 25]) == ["samples: 20 of 100, about 65 s in all"]
    resumed = [("blocks", done, 100) for done in (50, 60, 70)]
    assert lines_of(resumed, [0, 5, 10]) == ["blocks: 70 of 100, about 25 s in all"]
    assert lines_of([("samples", 10 * n, None) for n in range(4)], [0, 15, 30, 70]) == ["samples: 20", "samples: 30"]


def seconds_in(line):
    number, unit = re.search(r"(?:about|at least) ([\d.]+) (s|min|h)", line).groups()
    return float(number) * {"s": 1, "min": 60, "h": 3600}[unit]


@given(st.floats(0.6, 1.7), st.floats(0.6, 1.7), st.floats(2.0, 5.0))
def test_announced_stages_count_from_the_first_seconds_on(of_blocks, of_whole, scale):
    """As in a healing: a capture, sites of which nothing is announced, and two stages announced about right."""
    told = Told()
    told.clock.at = 1.0
    told.estimate.expect({"blocks": of_blocks * 20 * scale, "whole": of_whole * 180 * scale})
    told.stage("samples", 360, 0.014 * scale, first=7.0)
    told.clock.at += scale
    told.stage("sites", 17, 0.8 * scale)
    told.stage("blocks", 170, 20 / 170 * scale)
    told.stage("whole", 1530, 180 / 1530 * scale)
    total = told.clock.at
    (first, line), *rest = told.said
    assert first < 10.0 and line.startswith("samples: ") and line.endswith(" in all")
    assert total / 2 < seconds_in(line) < 2 * total
    for (before, _), (at, left) in zip(told.said, rest, strict=False):
        assert left.endswith(" left") and 30 <= at - before < 40
        assert (total - at) / 2 - 1 < seconds_in(left) < 2 * (total - at) + 1


def test_what_nothing_tells_is_left_out_and_the_rest_is_a_least():
    told = Told()
    told.estimate.expect({"drift": 40.0, "timing": None})
    told.stage("samples", 100, 0.1)
    told.stage("drift", 100, 0.4)
    assert [line for _, line in told.said] == [
        "samples: 30 of 100, at least 50 s in all",
        "drift: 58 of 100, at least 17 s left",
    ]


def test_a_stage_that_was_left_out_counts_no_more():
    told = Told()
    told.estimate.expect({"blocks": 500.0, "whole": 50.0})
    told.stage("whole", 100, 0.5)
    assert told.said[0][1] == "whole: 6 of 100, about 50 s in all"


def test_a_block_without_a_pace_counts_as_the_stage_that_was_announced():
    told = Told()
    told.estimate.expect({"timing": 30.0})
    for told.clock.at, part in ((0.0, "eager"), (8.0, "compiled"), (20.0, "whole network")):
        told.lines(part, 0, 1, counted_as="timing")
    assert [line for _, line in told.said] == ["compiled: about 30 s in all"]
    assert told.estimate.still == "about 10 s left"


def test_models_that_follow_count_as_those_before_and_that_is_said():
    told = Told()
    for place in (1, 2, 3):
        told.estimate.model(place, 3)
        told.stage("samples", 100, 0.35)
        told.clock.at += 10  # fits and figures
    assert [line for _, line in told.said] == [
        "samples: 9 of 100, about 105 s in all, if the 2 models after this one take as long",
        "samples: 95 of 100, about 72 s left, if the 2 models after this one take as long",
        "samples: 53 of 100, about 56 s left, if the model after this one takes as long",
        "samples: 11 of 100, about 31 s left",
        "samples: 97 of 100, about 1 s left",
    ]


def test_a_long_step_is_said_when_it_begins_and_once_and_tells_no_pace():
    told = Told()
    told.lines("samples", 0, 100)
    for done in (0, 1, 0, 1):
        told.lines("compiling …", done, 1)
        told.clock.at += 4
    told.stage("samples", 100, 0.1)
    assert [line for _, line in told.said] == ["compiling …", "samples: 6 of 100, about 26 s in all"]


def test_a_slow_network_is_timed_by_one_sample_and_a_fast_one_by_a_batch():
    import torch

    class Network(torch.nn.Module):
        def __init__(self, seconds):
            super().__init__()
            self.seconds, self.sizes = seconds, []

        def forward(self, x):
            self.sizes.append(len(x))
            time.sleep(self.seconds)
            return x

    sample = Batch((torch.zeros(1, 3),), samples=(Sample("a", 0, 0),))
    slow, fast = Network(0.25), Network(0.01)
    assert 2.0 <= seconds_of_a_pass(slow, sample, 8) < 4.0 and slow.sizes == [1]
    assert 0.01 <= seconds_of_a_pass(fast, sample, 8) < 0.2 and fast.sizes == [1, 8]


HASTY = """
import normscope.cli.estimate as estimate
estimate._LONG_SECONDS, estimate._EARLY_SECONDS = 2.0, 1.0
from normscope.__main__ import main
main()
"""


@pytest.mark.slow
def test_a_healing_says_what_it_compiles_and_early_how_long_it_takes(tmp_path):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "numba"), "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)}

    def run(*arguments):
        begun = time.monotonic()
        command = [sys.executable, "-c", HASTY, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stderr.splitlines(), time.monotonic() - begun

    quickly = ("--limit", "160", "--steps", "40", "--sites", "final", "--device", "cpu")
    said, took = run("heal", "demo_vit", *quickly, "-o", "healed")
    compiling = "compiling loops for this CPU (once on this machine, a few seconds) …"
    (estimated,) = [line for line in said if " in all" in line]
    assert said.count(compiling) == 1 and said.index(compiling) < said.index(estimated)
    assert estimated.startswith("samples: ") and took / 3 < seconds_in(estimated) < 3 * took, (estimated, took)
    again, _ = run("capture", "demo_vit", "--limit", "2", "--device", "cpu", "-o", "seen.safetensors")
    assert compiling not in again
