"""Probe: the norms of a network at every N-th step of its training, on the same inputs, as a line of JSON each."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from normscope.curves.known import Curve
from normscope.errors import NormscopeError, UsageError, count
from normscope.fits.fit import curves_in
from normscope.inputs.batch import Batch, as_batches
from normscope.inputs.loaded_model import LoadedModel, module_of
from normscope.inputs.wrappers import class_of, named_modules, submodule
from normscope.norms.bound_inputs import unpacked
from normscope.norms.sites import Layers, select
from normscope.norms.trace import find_norms
from normscope.pairs.capture import captured
from normscope.pairs.captures import Capture
from normscope.pairs.ranks import Group, Ranks
from normscope.pairs.storage import save_capture
from normscope.runtime.files import check_writable
from normscope.runtime.network import restoring_random_states
from normscope.runtime.spread import tensor_parallel_group
from normscope.tools.probe.numbers import FORM, numbers_of
from normscope.tools.probe.timeline import StepRecord, TimelineHeader, TimelineSite, capture_name, load_timeline

if TYPE_CHECKING:
    from normscope.inputs.batch import Forward


class Probe:
    """Capture and fit the norms of a network while it trains, at every N-th step, on one fixed batch.

    Call :meth:`run` before training, for step 0, and :meth:`step` after each training step. Neither adds a hook to the
    training step or changes its numbers: the probe runs the network in eval mode, without gradients, on a copy of the
    batch, and restores training flags, buffers and random states. Gradients are left as they are. The probe runs a
    compiled network eagerly, which the file reports. It computes in the dtype of the weights, and under
    ``torch.autocast`` if it is called there; the file reports that too.

    Args:
        model: the network, also compiled, or wrapped for several processes.
        batch: inputs, as one entry of the batches of :func:`normscope.capture`: a tensor, a tuple of arguments, a dict
            of keyword arguments, or a :class:`normscope.Batch`. They are copied. With ``samples``, a loader of such
            entries.
        every: number of steps between two records.
        path: file of the timeline, JSONL; :func:`normscope.tools.probe.timeline.load_timeline` reads it. Records of an
            earlier run with the same sites, curves and inputs remain, up to the first step of this one.
        curves: to fit, see :func:`normscope.fit`.
        layers: the norm sites, see :func:`normscope.norms.sites.select`.
        samples: number of samples to read from a loader. Its generator, and those of torch, NumPy and Python, are
            restored; an iterator loses the entries that it yields.
        forward: runs the model on a batch, see :func:`normscope.capture`.
        keep: folder for the capture of each record, ``step-00000500.safetensors``; None to keep none.
        logger: of the caller: any object with ``log(metrics, step=step)``, such as a run of wandb or trackio, or
            TensorBoard's ``SummaryWriter``. It receives the numbers of each record under ``normscope/``, after the file
            is written. Its exceptions are not caught.
        group: the processes over which sums are added, see :func:`normscope.capture`. Ranks that pass the same batch
            divide it; otherwise each passes its share. All call the probe at the same steps and return the record;
            rank 0 writes and logs.
        about: ``model``, ``weights`` and ``data``, in words, for files and figures.

    Attributes:
        steps: number of training steps done.
        capture: of the last record; None before.

    Raises:
        UsageError: if an argument is invalid, or if the file is of another run.
        ModelError: if the network fails on the batch, or has no norm.

    >>> import normscope
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    >>> optimizer, x = torch.optim.SGD(model.parameters(), 0.1), torch.randn(64, 4)
    >>> probe = normscope.Probe(model, x, every=2, curves="tanh")
    >>> probe.run().step
    0
    >>> for _ in range(4):
    ...     loss = model(x).square().mean()
    ...     optimizer.zero_grad()
    ...     loss.backward()
    ...     optimizer.step()
    ...     if record := probe.step(loss=loss):
    ...         print(record.step, sorted(record.metrics())[:2])
    2 ['1/alpha/tanh', '1/amplitude/tanh']
    4 ['1/alpha/tanh', '1/amplitude/tanh']
    """

    def __init__(
        self,
        model: nn.Module | LoadedModel,
        batch: Any,
        *,
        every: int = 500,
        path: str | Path | None = None,
        curves: str | Curve | Sequence[str | Curve] = ("tanh", "isru"),
        layers: Layers = "all",
        samples: int | None = None,
        forward: Forward | None = None,
        keep: str | Path | None = None,
        logger: Any = None,
        group: Group = "world",
        about: Mapping[str, str] | None = None,
    ) -> None:
        for name, number in {"every": every, "samples": samples}.items():
            if number is not None and number < 1:
                raise UsageError(f"{name} is {number}; it is at least 1.")
        if logger is not None and not (hasattr(logger, "add_scalar") or hasattr(logger, "log")):
            raise UsageError(
                f"logger is of type {type(logger).__module__}.{type(logger).__name__}, which has neither "
                "log(dict, step=), as wandb and trackio have, nor add_scalar(tag, value, step), as TensorBoard's "
                "SummaryWriter has."
            )
        self.every, self.logger, self.steps = every, logger, 0
        self.capture: Capture | None = None
        self._path, self._keep = (None if name is None else Path(name) for name in (path, keep))
        self._curves = curves_in(curves, FORM)
        self._model, self._ranks = module_of(model), Ranks.of_group(group)
        peers = tensor_parallel_group(self._model)
        if peers is not None and group == "world":
            raise UsageError(
                f"Ranks run this {class_of(self._model).__name__} together on the same data. Pass group=mesh['dp'], "
                "the axis along which batches differ, or group=None if all ranks have the same."
            )
        self._writes = self._ranks.rank == 0 and (peers is None or dist.get_rank(peers) == 0)
        batches = _share(_read(self._model, batch, samples, forward), self._ranks)
        if not batches and self._ranks.size == 1:
            raise UsageError("The loader yields no batch.")
        self._batches = list(unpacked(self._model, batches)[1])
        report = find_norms(self._model, self._batches[0].first_sample()) if batches else None
        self._report = self._ranks.norms(report)
        self._sites = select(self._report.sites, layers)
        self._modules = {site.path: submodule(self._model, site.path) for site in self._sites}
        n_samples = count(sum(self._ranks.gather(sum(len(batch.samples) for batch in self._batches))), "sample")
        named = {"model": class_of(self._model).__name__, "weights": "in training", "data": n_samples, **(about or {})}
        self._about = named
        self._header = TimelineHeader(
            model=named["model"],
            weights=named["weights"],
            data=named["data"],
            curves=tuple(curve.name for curve in self._curves),
            sites=tuple(map(TimelineSite.of, self._sites)),
            captures=None if keep is None else os.path.relpath(keep, Path(path or "-").parent),
        )
        self._on_first_rank(self._check_files)

    def step(self, *, loss: float | Tensor | None = None, step: int | None = None) -> StepRecord | None:
        """Count one training step; at every N-th, return the record of :meth:`run`, otherwise None.

        Args:
            loss: of the training step, for the record.
            step: number of training steps done, in a resumed run; from then on the probe counts again.
        """
        self.steps = self.steps + 1 if step is None else step
        return None if self.steps % self.every else self.run(loss=loss)

    def run(self, *, loss: float | Tensor | None = None) -> StepRecord:
        """Return a record of the network as it is, and write and log it; before training, that of step 0.

        Raises:
            UsageError: if a norm was replaced since the probe was made, or if a file cannot be written.
            MemoryEndedError: if a single sample takes more memory than there is.
        """
        began = time.perf_counter()
        self._check_modules()
        self.capture = None  # so that there is no more than one at a time
        device = _device(self._model)
        self._batches = [batch.to(device, None) for batch in self._batches]  # the network may have moved
        dtype, modules = _dtype(self._model, device), list(self._model.modules())
        compiled = any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) for m in modules)
        self._header = replace(self._header, dtype=dtype, compiled=compiled)
        names, about = tuple(site.name for site in self._sites), {**self._about, "dtype": dtype}
        seen = captured(self._model, self._batches, layers=names, about=about, ranks=self._ranks, report=self._report)
        numbers = numbers_of(seen, self._sites, self._curves)
        loss = None if loss is None else float(torch.as_tensor(loss).detach())
        record = StepRecord(self.steps, time.time(), time.perf_counter() - began, numbers, loss, names)
        self.capture = seen
        self._on_first_rank(lambda: self._write(record, seen))
        if self.logger is not None and self._writes:
            self._log(record)
        return record

    def _log(self, record: StepRecord) -> None:
        metrics = {f"normscope/{name}": value for name, value in record.metrics().items()}
        if hasattr(self.logger, "add_scalar"):
            for name, value in metrics.items():
                self.logger.add_scalar(name, value, record.step)
        else:
            self.logger.log(metrics, step=record.step)

    def _on_first_rank(self, action: Callable[[], None]) -> None:
        """Run an action with files on rank 0; every rank of the group raises its error, or the others would wait."""
        error = ""
        if self._writes:
            try:
                action()
            except NormscopeError as refusal:
                error = str(refusal)
        if error := self._ranks.gather(error)[0]:
            raise UsageError(error)

    def _write(self, record: StepRecord, seen: Capture) -> None:
        if self._keep is not None:
            save_capture(seen, self._keep / capture_name(record.step))
        if (path := self._path) is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab", buffering=0) as file:
                # A line whole, in one call, so that a killed process leaves at most a part of the last one.
                line = (("" if file.tell() else self._header.line()) + record.line()).encode()
                if file.write(line) < len(line):
                    raise OSError("the disk is full")
        except OSError as error:
            raise UsageError(f"Cannot write {path}: {error.strerror or error}.") from error

    def _check_modules(self) -> None:
        modules = dict(named_modules(self._model))
        for path, module in self._modules.items():
            if modules.get(path) is not module:
                raise UsageError(
                    f"The module {path!r} was {'replaced' if path in modules else 'removed'} since the probe was made. "
                    "Make a new probe, with another path, after changing the network."
                )

    def _check_files(self) -> None:
        """Raise an error if no record can be written; cut off a part of a line that a killed run left."""
        if self._keep is not None:
            check_writable(self._keep / capture_name(0))
        if (path := self._path) is None:
            return
        check_writable(path)
        if not path.exists() or not path.stat().st_size:
            return
        before = load_timeline(path)
        for name in ("model", "data", "curves", "sites", "captures"):
            theirs, mine = getattr(before, name), getattr(self._header, name)
            if theirs != mine:
                difference = f"the {name} {_short(theirs)}, not {_short(mine)}"
                raise UsageError(f"{path} is of another run, with {difference}. Name another path.")
        with path.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


def _short(value: Any) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], TimelineSite):
        value = f"{count(len(value), 'site')} from {value[0].name} to {value[-1].name}"
    return f"{value!r:.100}"


def _device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _dtype(model: nn.Module, device: torch.device) -> str:
    """Describe the dtype of the weights, and autocast if it is on here."""
    dtypes = dict.fromkeys(str(parameter.dtype) for parameter in model.parameters())
    if torch.is_autocast_enabled(device.type):
        dtypes[f"autocast to {torch.get_autocast_dtype(device.type)}"] = None
    return ", ".join(dtypes).replace("torch.", "")


def _read(model: nn.Module, batch: Any, samples: int | None, forward: Forward | None) -> list[Batch]:
    """Return copies of a batch, or of the first samples of a loader."""
    given = (Tensor, Mapping, tuple, list, Batch)
    if samples is None and forward is None and isinstance(batch, Iterable) and not isinstance(batch, given):
        raise UsageError(
            f"batch is a {type(batch).__name__}; pass samples=16 to read the first 16 samples of a loader."
        )
    generator = getattr(batch, "generator", None)  # of a DataLoader
    state = generator and generator.get_state()
    batches: list[Batch] = []
    left, device = math.inf if samples is None else samples, _device(model)
    with restoring_random_states():
        for loaded in as_batches([batch] if samples is None else batch, model, forward):
            batches.append(loaded.first(int(min(left, len(loaded.samples)))).copied().to(device, None))
            left -= len(batches[-1].samples)
            if left <= 0:
                break
    if generator is not None:
        generator.set_state(state)
    return batches


def _share(batches: list[Batch], ranks: Ranks) -> list[Batch]:
    """Return this rank's share of batches that all ranks have passed alike; others are shares already."""
    samples = [[sample.data, sample.index] for batch in batches for sample in batch.samples]
    if ranks.size == 1 or any(theirs != samples for theirs in ranks.gather(samples)):
        return batches
    if any(len(batch.samples) < ranks.size or not batch.divisible for batch in batches):
        raise UsageError(
            f"All {ranks.size} ranks pass the same batch, which they cannot divide by samples "
            f"({count(len(batches[0].samples), 'sample')}). Pass each rank inputs of its own."
        )
    return [batch.take(range(ranks.rank, len(batch.samples), ranks.size)) for batch in batches]
