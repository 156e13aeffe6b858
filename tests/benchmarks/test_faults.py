"""The fault matrix with the full numbers, and what it would say if something were wrong."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import faults as matrix
from faults import Faults, Outcome, is_clear, mutated, table
from mutations import FINE, REFUSED, SAME
from runs import differences

import normscope

KILLS, KEPT = 20, 10
MUTATIONS = 10_000


def can_mount():
    unshare = shutil.which("unshare")
    return unshare is not None and subprocess.run([unshare, "--mount", "true"], check=False).returncode == 0


needs_mounts = pytest.mark.skipif(not can_mount(), reason="a small disk is mounted, which needs the right to")
needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="ranks are found in /proc")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Faults(tmp_path_factory.mktemp("faults"), 4000)


def assert_right(outcome, tries, kept=None):
    """Every try ended with the right counts, and so many of them had something to go on from."""
    assert outcome.wrong == []
    assert outcome.tries == outcome.right >= tries
    assert kept is None or outcome.kept >= kept


@pytest.mark.faults
def test_kills_at_random_moments(runs):
    assert_right(runs.kills(KILLS, longest=10.0), KILLS, KEPT)


@pytest.mark.faults
def test_kills_while_checkpoints_are_written(runs):
    assert_right(runs.kills(5, longest=8.0, every="0"), 5)


@pytest.mark.faults
@needs_proc
@pytest.mark.parametrize(("ranks", "then"), [(2, 2), (2, 1), (3, 2)])
def test_a_rank_is_lost(runs, ranks, then):
    assert_right(runs.lost_ranks(ranks, then), 1, 1)


@pytest.mark.faults
@needs_proc
def test_a_rank_is_lost_and_torchrun_starts_all_anew(runs):
    assert_right(runs.restarted_ranks(2), 1, 1)


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_can_be_caught(runs, number):
    assert_right(runs.interrupted(number), 1, 1)


@pytest.mark.faults
def test_a_checkpoint_breaks_off(runs):
    outcome = runs.truncated_checkpoint()
    assert_right(outcome, 1, 1)
    assert outcome.refused == 1


@pytest.mark.faults
@needs_mounts
def test_the_disk_is_full(runs):
    outcome = runs.full_disk(room=80_000_000)
    assert_right(outcome, 1, 1)
    assert outcome.refused == 1


@pytest.mark.faults
def test_one_input_in_a_hundred_cannot_be_read(runs):
    assert_right(runs.corrupt_inputs(), 1)


@pytest.mark.faults
def test_nan_and_infinities(runs):
    assert_right(runs.nonfinite(), 1)


@pytest.mark.faults
@pytest.mark.parametrize("what", ["captures", "weights", "swaps"])
def test_mutated_files(what):
    outcome = mutated(what, getattr(matrix, f"mutated_{what}"), MUTATIONS)
    assert outcome.wrong == []
    assert outcome.tries == MUTATIONS == outcome.right + outcome.refused


# --- the matrix itself --------------------------------------------------------------------------------------------


def test_what_is_wrong_is_counted_apart_from_what_is_right():
    outcome = Outcome("a fault", kept=0)
    outcome.note([], 3)
    outcome.note(["other sums"], 2)
    assert (outcome.tries, outcome.right, outcome.wrong) == (5, 3, ["other sums"])
    assert table([outcome]).splitlines()[-1] == "| a fault | 5 | 0 | 3 |  | 1 |"
    found = {REFUSED: 7, SAME: 2, "a traceback": 1}
    assert set(found) - FINE == {"a traceback"}
    outcome = mutated("files", lambda number, seed: found, 10)
    assert (outcome.tries, outcome.right, outcome.refused, outcome.wrong) == (10, 2, 7, ["1 × a traceback"])


def test_a_traceback_is_no_clear_error():
    assert is_clear("Error: The disk is full.")
    assert not is_clear("Traceback (most recent call last):\nOSError: Error: The disk is full.")
    assert not is_clear("done")


@pytest.mark.slow
def test_captures_that_differ_are_told_apart():
    """Each comparison that every other test relies on can fail."""
    network = normscope.load("demo_vit", limit=6, batch_size=2)

    def captured(batches, **options):
        return normscope.capture(network.module, batches, layers="2", about=network.about, **options)

    batches = list(network.inputs)
    whole = captured(batches)
    (name, *_) = whole.stats
    assert differences(whole, captured(batches)) == []
    assert differences(whole, captured(batches[:-1]))[0] == "6 and 4 samples"
    assert differences(whole, captured([*batches[:-1], batches[0]]))[0] == f"{name}: pairs per bin"
    assert differences(whole, captured(batches, seed=1)) == [
        f"{site}: {sample}.{what}" for site in whole.stats for sample, whats in DRAWN.items() for what in whats
    ]
    for sums, difference in (("moments", 1e-9), ("channel_sums", 1e-9), ("density", 1), ("nonfinite_tokens", 1)):
        other = captured(batches)
        stats = other.stats[name]
        changed = getattr(stats, sums)
        changed = changed + difference * (changed.abs().max() if difference < 1 else 1)
        if sums in ("moments", "density"):
            stats.bins = stats.bins.replaced({sums: changed})
        else:
            setattr(stats, sums, changed)
        assert f"{name}: {sums}" in differences(whole, other)


# What the seed of the drawing samples changes of them.
DRAWN = {"tokens": ("key", "x", "y"), "largest": ("key",), "pairs": ("key", "x", "y")}
