"""Callbacks: real trainings by transformers' Trainer, Lightning and accelerate, with a probe and without."""

import logging
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from networks import PreNorm, same, values_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from normscope.errors import UsageError
from normscope.tools.probe.callbacks import lightning_callback, trainer_callback
from normscope.tools.probe.probe import Probe
from normscope.tools.probe.timeline import load_timeline

STEPS, ACCUMULATED, EVERY = 6, 2, 2
RESUMED = 4  # the step of the checkpoint that a second training goes on from


def data(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * STEPS * ACCUMULATED, 8, generator=generator)
    return TensorDataset(x, torch.randint(7, (len(x),), generator=generator))


def network():
    """Norms, and a dropout that reads torch's generator at every step."""
    return nn.Sequential(PreNorm(depth=2, width=8, classes=16), nn.Dropout(0.2), nn.Linear(16, 7))


def assert_records(path, losses, *, before):
    """Step 0 has the numbers of the network ``before`` its first update and no loss, the others their losses."""
    timeline = load_timeline(path)
    assert timeline.steps.tolist() == [0, 2, 4, 6]
    assert timeline.losses[1:].tolist() == losses and math.isnan(timeline.losses[0])
    for name, values in before.numbers.items():
        np.testing.assert_allclose(timeline.numbers[name][0], np.array(values, float), rtol=1e-5)
    return [site.name for site in timeline.sites]


@pytest.mark.slow
def test_the_trainer_of_transformers_trains_the_same_weights(tmp_path):
    transformers = pytest.importorskip("transformers")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(64, (2 * STEPS * ACCUMULATED, 12), generator=generator)
    batch = {"input_ids": tokens[:4], "attention_mask": torch.ones(4, 12, dtype=torch.long)}

    def network():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                attention_dropout=0.1,
            )
        )  # fmt: skip

    def trained(callbacks, **options):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "trainer"), max_steps=STEPS, per_device_train_batch_size=2, logging_steps=1,
            gradient_accumulation_steps=ACCUMULATED, report_to=[], use_cpu=True, disable_tqdm=True,
            save_strategy="steps", save_steps=RESUMED,
        )  # fmt: skip
        examples = [{"input_ids": row, "labels": row} for row in tokens]
        trainer = transformers.Trainer(network(), arguments, train_dataset=examples, callbacks=callbacks)
        trainer.train(**options)
        return values_of(trainer.model), {e["step"]: e["loss"] for e in trainer.state.log_history if "loss" in e}

    path = tmp_path / "run.jsonl"
    callback = trainer_callback(batch, every=EVERY, path=path)
    with_probe, logged = trained([callback])
    without, logged_without = trained([])
    assert same(with_probe, without)
    assert logged == logged_without and callback.probe.steps == STEPS
    losses, before = [logged[step - 1] for step in (2, 4, 6)], Probe(network(), batch).run()
    assert assert_records(path, losses, before=before)[-1] == "model.norm"
    checkpoint = str(tmp_path / "trainer" / f"checkpoint-{RESUMED}")
    trained([trainer_callback(batch, every=EVERY, path=path)], resume_from_checkpoint=checkpoint)
    assert_records(path, losses, before=before)


@pytest.mark.slow
@pytest.mark.parametrize("package", ["pytorch_lightning", "lightning.pytorch"])
def test_lightning_trains_the_same_weights(package, tmp_path, monkeypatch):
    lightning = pytest.importorskip(package)
    monkeypatch.delitem(sys.modules, ({"pytorch_lightning", "lightning.pytorch"} - {package}).pop(), raising=False)
    logging.getLogger(package).setLevel(logging.ERROR)
    examples = data()

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.network, self.losses = network(), []

        def forward(self, x):
            return self.network(x)

        def training_step(self, batch):
            x, labels = batch
            loss = nn.functional.cross_entropy(self(x), labels)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-2)

    def trained(callbacks, *, steps=STEPS, resume=None):
        module = Classifier()
        trainer = lightning.Trainer(
            max_steps=steps, accumulate_grad_batches=ACCUMULATED, callbacks=callbacks, accelerator="cpu", logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(
            module, DataLoader(examples, batch_size=4), ckpt_path=resume, **({"weights_only": False} if resume else {})
        )
        trainer.save_checkpoint(tmp_path / f"{steps}.ckpt")
        return values_of(module), module.losses

    path, batch = tmp_path / "run.jsonl", examples.tensors[0][:16]
    with_probe, losses = trained([lightning_callback(batch, every=EVERY, path=path)])
    without, losses_without = trained([])
    assert same(with_probe, without)
    assert losses == losses_without
    # Of the last accumulated batch; Lightning halves and the callback doubles it, both exactly; a line has 17 digits.
    of_records, before = losses[2 * ACCUMULATED - 1 :: 2 * ACCUMULATED], Probe(Classifier(), batch).run()
    assert assert_records(path, of_records, before=before) == ["network.0.norms.0", "network.0.norms.1"]
    trained([], steps=RESUMED)
    trained([lightning_callback(batch, every=EVERY, path=path)], resume=tmp_path / f"{RESUMED}.ckpt")
    assert load_timeline(path).steps.tolist() == [0, 2, 4, 6]


@pytest.mark.slow
def test_a_loop_of_accelerate_takes_the_unwrapped_model(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    path, examples = tmp_path / "run.jsonl", data()

    def trained(probed):
        torch.manual_seed(0)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(examples, batch_size=4))
        unwrapped, batch = accelerator.unwrap_model(model), examples.tensors[0][:16]
        probe = Probe(unwrapped, batch, every=EVERY, path=path) if probed else None
        losses = []
        for x, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if probe and accelerator.sync_gradients:
                probe.step(loss=loss)
        return values_of(unwrapped), losses

    with_probe, losses = trained(True)
    without, losses_without = trained(False)
    assert same(with_probe, without)
    assert losses == losses_without
    timeline = load_timeline(path)
    assert timeline.steps.tolist() == [2, 4, 6]
    assert timeline.losses.tolist() == losses[2 * ACCUMULATED - 1 :: 2 * ACCUMULATED]


@pytest.mark.slow
def test_neither_library_is_imported_before_a_callback_is_made():
    code = (
        "import sys, normscope.tools.probe.callbacks as callbacks\n"
        "assert not {'transformers', 'lightning', 'pytorch_lightning', 'matplotlib'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_lightning_the_error_names_both_packages(monkeypatch):
    for name in ("pytorch_lightning", "lightning.pytorch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(UsageError, match="import lightning or pytorch_lightning first"):
        lightning_callback(torch.zeros(1, 8))
