"""Loggers: numbers, read back by TensorBoard and wandb."""

import math
from types import SimpleNamespace

import pytest
import torch
from networks import PreNorm

from normscope.tools.probe.probe import Probe
from normscope.tools.probe.timeline import load_timeline


def probe_of(logger, **options):
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 1, 32)[:, None]
    return Probe(PreNorm(), x, every=2, logger=logger, **options)


def probed(logger, **options):
    """Return the records of two steps out of four."""
    probe = probe_of(logger, **options)
    return list(filter(None, (probe.step(loss=1.5) for _ in range(4))))


def under(record):
    return {f"normscope/{name}": value for name, value in record.metrics().items()}


def test_any_object_with_log_receives_numbers_with_their_step():
    calls = []
    records = probed(SimpleNamespace(log=lambda numbers, step: calls.append((step, numbers))))
    assert [step for step, _ in calls] == [2, 4]
    assert [numbers for _, numbers in calls] == [under(record) for record in records]
    assert calls[0][1]["normscope/loss"] == 1.5
    assert all(isinstance(value, float) and math.isfinite(value) for _, numbers in calls for value in numbers.values())
    assert calls[0][1].keys() == calls[1][1].keys()


def test_the_file_is_whole_if_the_logger_raises(tmp_path):
    def log(numbers, step):
        raise ConnectionError("no route to the logger")

    path = tmp_path / "run.jsonl"
    with pytest.raises(ConnectionError, match="no route"):
        probed(SimpleNamespace(log=log), path=path)
    assert load_timeline(path).steps.tolist() == [2]


@pytest.mark.slow
def test_tensorboard_reads_every_number(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        records = probed(writer)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == set(under(records[0]))
    for name in under(records[0]):
        scalars = events.Scalars(name)
        assert [scalar.step for scalar in scalars] == [2, 4]
        # TensorBoard keeps float32.
        assert [scalar.value for scalar in scalars] == pytest.approx([under(each)[name] for each in records], rel=1e-6)


@pytest.mark.slow
def test_wandb_keeps_every_number(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=tmp_path) as run:
        records = probed(run)
        summary = dict(run.summary)
    assert {name: summary[name] for name in under(records[-1])} == pytest.approx(under(records[-1]))
    assert summary["_step"] == 4
