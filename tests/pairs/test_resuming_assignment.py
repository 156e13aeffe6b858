"""Captures of before folds were permuted in blocks of eight: they keep their folds, and merge with others to none."""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from networks import OneNorm
from torch import nn

import normscope
from normscope.pairs import ranks, storage
from normscope.pairs.capture import captured
from normscope.pairs.ranks import Checkpoints
from normscope.pairs.recorder import Recorder
from normscope.runtime.sealed_files import read_checked, write_checked

sys.path.append(str(Path(__file__).parent))
from test_resuming import of_version_4

SOURCES, D = 21, 16
MIXED = "folds of two assignments, so no intervals and no ceiling"


def network():
    return OneNorm(nn.LayerNorm(D, elementwise_affine=False))


def batch(number, data="words"):
    """One source of ``number + 1`` tokens, so that the counts of a fold tell its sources."""
    x = 3 * torch.randn(1, number + 1, D, generator=torch.Generator().manual_seed(number))
    return normscope.Batch((x,), samples=(normscope.Sample(f"word {number}", number, number, data),))


def without_assignment(header):
    """The header as it was before: with no assignment in it."""
    text = json.dumps(header)
    assert ', "assignment": "' in text
    for site in [*header.get("sites", []), *(site for part in header["parts"] for site in part["sites"])]:
        del site["sources"]["assignment"]
    return header


def as_before(monkeypatch):
    """Let recorders assign sources to folds as they did, by their number modulo eight."""
    begin = Recorder.__init__

    def begin_as_before(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        self.assignment = "modulo"

    monkeypatch.setattr(Recorder, "__init__", begin_as_before)


@pytest.fixture
def older(tmp_path):
    """A file of version 5, as normscope wrote it before."""
    with pytest.MonkeyPatch.context() as patch:
        as_before(patch)
        seen = normscope.capture(network(), [batch(number) for number in range(SOURCES)])
    path = normscope.save_capture(seen, tmp_path / "older.safetensors")
    header, tensors = read_checked(path, storage.FORMAT, (7,))
    write_checked(path, {**without_assignment(header), "version": 5}, tensors, deflated=True)
    return path


def tokens_by_number(sources, data="words"):
    """Tokens in each fold where the fold is the source's number modulo eight, from where its data set begins."""
    begin = hashlib.blake2b(data.encode(), digest_size=1).digest()[0]
    tokens = np.zeros(8)
    for number in sources:
        tokens[(begin + number) % 8] += number + 1
    return tokens


def test_a_capture_of_before_keeps_its_folds_and_intervals(older):
    seen = normscope.load_capture(older)
    stats = seen.stats["norm"]
    assert (stats.moments[:, 0].sum(1) / D).tolist() == tokens_by_number(range(SOURCES)).tolist()
    assert stats.fold_by == "source"
    [fit] = normscope.fit(seen, "tanh")
    assert fit.intervals["alpha"] and fit.r2_ceiling is not None
    again = normscope.load_capture(normscope.save_capture(seen, older.with_name("again.safetensors")))
    assert again.stats["norm"].sources == stats.sources and torch.equal(again.stats["norm"].moments, stats.moments)
    doubled = stats.merge(stats)
    assert doubled.fold_by == "source" and doubled.sources.assignment == "modulo"


def test_a_merge_of_two_assignments_has_no_intervals_and_says_so(older):
    old = normscope.load_capture(older)
    new = [normscope.capture(network(), [batch(n, data) for n in range(9)], about={"data": data}) for data in "ab"]
    for merged in (old.merge(new[0]).merge(new[1]), new[0].merge(new[1].merge(old))):
        assert merged.about["data"].endswith(f" · {MIXED}") and merged.about["data"].count(MIXED) == 1
        [fit] = normscope.fit(merged, "tanh")
        assert (fit.folds, fit.r2_cv, fit.r2_ceiling, dict(fit.intervals)) == (None, None, None, {})
        assert MIXED in fit.as_dict()["data"]
        assert merged.stats["norm"].n_tokens == sum(range(1, SOURCES + 1)) + 2 * sum(range(1, 10))
    assert MIXED not in new[0].merge(new[1]).about["data"]


def test_a_resumed_capture_keeps_the_assignment_that_it_began_with(tmp_path, monkeypatch):
    inputs = [batch(number) for number in range(SOURCES)]
    left = iter([False] * 6 + [True])
    with monkeypatch.context() as patch, pytest.raises(normscope.errors.StoppedError):
        as_before(patch)
        captured(network(), inputs, checkpoints=Checkpoints(tmp_path, 1e9, stopping=lambda: next(left)))
    [path] = tmp_path.iterdir()
    header, tensors = read_checked(path, ranks.FORMAT, (5,))
    write_checked(path, of_version_4(without_assignment(header), 3), tensors)
    seen = captured(network(), inputs, checkpoints=Checkpoints(tmp_path, 1e9, resume=True))
    assert (seen.stats["norm"].moments[:, 0].sum(1) / D).tolist() == tokens_by_number(range(SOURCES)).tolist()
    assert seen.stats["norm"].fold_by == "source"
    anew = normscope.capture(network(), inputs)
    assert (anew.stats["norm"].moments[:, 0].sum(1) / D).tolist() != tokens_by_number(range(SOURCES)).tolist()


def test_of_folds_assigned_otherwise_the_same_inputs_are_not_compared_fold_by_fold(older):
    old, new = normscope.load_capture(older), normscope.capture(network(), [batch(n) for n in range(SOURCES)])
    for other, paired in ((old, True), (new, False)):
        rows = normscope.compare([old, other])
        ratios = [row.alpha for row in rows if row.alpha]
        assert ratios and all(ratio.paired == paired for ratio in ratios)
