"""Callbacks: a probe within transformers' Trainer or Lightning's, whose libraries are imported on the first call."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from torch import nn

from normscope.errors import UsageError
from normscope.tools.probe.probe import Probe


def trainer_callback(batch: Any, **options: Any) -> Any:
    """Make a callback for :class:`transformers.Trainer` that probes its model before and after its optimizer steps.

    The loss of a record is the one that the Trainer logged last, a mean over its ``logging_steps``.

    Args:
        batch: as of :class:`normscope.Probe`; usually a dict of keyword arguments of the model.
        options: the others of :class:`normscope.Probe`: ``every``, ``path``, ``logger``, …

    Returns:
        A ``transformers.TrainerCallback``; its ``probe`` is the :class:`normscope.Probe` of the last training.

    ``Trainer(model, …, callbacks=[trainer_callback(batch, every=100, path="run.jsonl")])``
    """
    transformers = importlib.import_module("transformers")

    class TrainerProbe(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
        probe: Probe

        def on_train_begin(self, args: Any, state: Any, control: Any, **trained: Any) -> None:
            self.probe = Probe(trained["model"], batch, **options)
            if not state.global_step:  # otherwise resumed: the file has that record
                self.probe.run()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            losses = (entry["loss"] for entry in reversed(state.log_history) if "loss" in entry)
            self.probe.step(loss=next(losses, None), step=state.global_step)

    return TrainerProbe()


def lightning_callback(batch: Any, model: nn.Module | None = None, **options: Any) -> Any:
    """Make a callback for Lightning's Trainer, of ``lightning`` or ``pytorch_lightning``, that probes as well.

    Args:
        batch: as of :class:`normscope.Probe`, which runs the model's ``forward`` on it.
        model: the network, for a LightningModule without ``forward``; by default the LightningModule itself.
        options: the others of :class:`normscope.Probe`: ``every``, ``path``, ``logger``, …

    Returns:
        A ``Callback`` of Lightning; its ``probe`` is the :class:`normscope.Probe` of the last training.

    Raises:
        UsageError: if neither of the two packages has been imported.

    ``Trainer(callbacks=[lightning_callback(batch, every=100, path="run.jsonl")])``
    """
    package = sys.modules.get("lightning.pytorch", sys.modules.get("pytorch_lightning"))
    if package is None:
        raise UsageError("lightning_callback needs Lightning: import lightning or pytorch_lightning first.")

    class LightningProbe(package.Callback):  # type: ignore[name-defined,misc]
        probe: Probe
        last_step = 0

        def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
            self.probe, self.last_step = Probe(model or pl_module, batch, **options), trainer.global_step
            if not self.last_step:  # otherwise resumed: the file has that record
                self.probe.run()

        def on_train_batch_end(self, trainer: Any, pl_module: nn.Module, outputs: Any, *_: Any) -> None:
            if trainer.global_step == self.last_step:  # gradients are being accumulated
                return
            self.last_step = trainer.global_step
            loss = outputs.get("loss") if isinstance(outputs, dict) else None  # divided by the number of accumulations
            self.probe.step(loss=None if loss is None else loss * trainer.accumulate_grad_batches, step=self.last_step)

    return LightningProbe()
