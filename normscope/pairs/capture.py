"""capture(): run a network with hooks on its norms, and sum up their pairs."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from torch import nn

from normscope.inputs.chunks import InputSet, LeftOut, RankSampler, first_and_chunks
from normscope.inputs.loaded_model import LoadedModel
from normscope.inputs.previews import preview_of
from normscope.inputs.wrappers import class_of
from normscope.norms.bound_inputs import unpacked
from normscope.norms.sites import Layers, select
from normscope.norms.trace import NormReport, find_norms
from normscope.pairs.captures import Capture, joined_names
from normscope.pairs.checkpoints import Checkpoints, merge_progress
from normscope.pairs.ranks import ALONE, Ranks, check_alike
from normscope.pairs.recorder import CaptureOptions, Recorder
from normscope.runtime.network import memory_for, restoring, uncompiled
from normscope.runtime.progress import Progress, StageProgress, reporting, silent

if TYPE_CHECKING:
    from normscope.inputs.batch import Forward
    from normscope.pairs.ranks import Group

_ALL = CaptureOptions()


def capture(
    model: nn.Module | LoadedModel,
    batches: Iterable[Any] | None = None,
    *,
    layers: Layers = "all",
    about: Mapping[str, str] | None = None,
    seed: int = 0,
    sample: int | None = None,
    verify: bool = False,
    by_gamma: bool = False,
    per_channel: bool = False,
    diagonal: bool = False,
    by_part: bool = False,
    keep_inputs: int = 0,
    skip: int = 0,
    forward: Forward | None = None,
    group: Group = "world",
    progress: Progress = silent,
) -> Capture:
    """Run ``model`` over ``batches`` and sum up the input of its norms and their output before the affine step.

    The model runs in eval mode and without gradients, on copies of the batches. Its training flags, buffers, dtype,
    device, the grad mode and torch's RNG state are restored and all hooks removed, also after an exception or Ctrl-C.

    Args:
        model: a model of :func:`normscope.load`; or any module on any device.
        batches: any iterable, taken one at a time, of tensors, tuples of arguments, dicts of keyword arguments, or
            :class:`normscope.Batch`; on the model's device and in its dtype, samples along axis 0. Labels, as a
            DataLoader returns them, are omitted, and a list of images is taken one by one, see
            :func:`normscope.inputs.batch.as_batches`. Passes that the iterable itself runs, as a sampler does, are not
            recorded. Positions that a Batch, or a mask or lengths among the arguments, mark as padding are in no sum,
            where their tokens are normalized; samples of other lengths run apart. All tokens of a norm whose input has
            no axis of samples count, once for each batch; they belong to no sample, and the site has no folds. None for
            a loaded model's own inputs.
        layers: the norm sites, see :func:`normscope.norms.sites.select`.
        about: description of the capture, for files and figures: ``model``, ``weights``, ``data``. A loaded model has
            its own; batches may have a ``description``, and ``dtype`` is read from the parameters.
        seed: of the drawing samples.
        sample: number of tokens of each sample to draw uniformly at each call of a norm, for a quick look; None for
            all. The capture's ``data`` mentions it.
        verify: recompute every norm's true output from y, its weight and its bias, and fail where they differ.
        by_gamma: also keep the sums with every pair weighted by the square of its channel's weight γ.
        per_channel: also keep the sums of each channel, on a coarser grid; d · 17 kB a site.
        diagonal: also keep the sums of the diagonal of the norm's Jacobian, ∂y_i/∂x_i, which
            :func:`normscope.gradient` needs; at sites where it is known in closed form.
        by_part: also keep the sums of each part of the data, in :attr:`Capture.parts`, where batches name their
            ``part``: a diffusion model's timesteps. Each part takes the memory of a whole.
        keep_inputs: number of inputs, those of least number, to keep in :attr:`Capture.inputs` for
            :func:`normscope.report`: a preview (thumbnail, envelope of the waveform, text) and mean, σ and element
            sizes of every token at every norm. Of a diffusion model, at each timestep. Batches may have a method
            ``preview(batch, place)``, which returns a :class:`normscope.inputs.previews.Preview` or None.
        skip: number of first positions of each sample that are in no sum, after padding on the left: an attention sink,
            the class token and the registers of a vision transformer. A position is the index of a token along the
            axis that numbers the tokens of a sample at that norm, which may be shorter than the sequence, as behind a
            merging of patches. Norms without such an axis are refused.
        forward: runs the model on any entry of ``batches``: ``lambda model, batch: model(batch.x)``.
        group: the processes over which sums are added, in a script that has initialized torch.distributed: each rank
            calls with its own batches, perhaps none, and every rank returns the whole. A process group or a DeviceMesh
            of one axis; by default all ranks. None for this rank alone. Under tensor parallelism, ranks with the same
            data count once: pass the axis of the data, ``mesh["dp"]``, or None if there is no such axis.
        progress: called with ``"samples"``, the number done, and the total, None if unknown.

    Returns:
        A :class:`Capture` on the CPU, whose size does not depend on the number of batches. Several ranks return what
        :func:`normscope.merge_captures` makes of their captures.

    Raises:
        DataError: if no rank has a batch, if the tokens of a mask, or their place at a norm, cannot be identified, if
            ranks captured the same input, or with different options, or if ``skip`` leaves no token at a norm.
        ModelError: if the model raises, if it calls no norm that normscope knows, if verification fails, or if ranks
            have shards of a norm's channels.
        UsageError: if ``layers`` names no site, if ``sample``, ``keep_inputs`` or ``skip`` is too small, if a token
            of one of the norms is not one position of one sample, for ``skip``, or if a module comes without batches.
        MemoryEndedError: if a single sample takes more memory than there is; larger batches are split.
        RankLostError: if another rank of the group does not call within the group's timeout, or ends.

    >>> import normscope, torch
    >>> capture(normscope.load("demo_vit", limit=4), layers="norm").stats["norm"].n_pairs
    4096
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    >>> capture(model, [torch.randn(16, 4), torch.randn(16, 4)], seed=0).stats["1"].n_pairs
    256
    """
    options = CaptureOptions(seed, sample, verify, by_gamma, per_channel, diagonal, by_part, keep_inputs, skip)
    ranks = Ranks.of_group(group)
    return captured(
        model, batches, options, layers=layers, about=about, forward=forward, progress=progress, ranks=ranks
    )


def captured(
    model: nn.Module | LoadedModel,
    batches: Iterable[Any] | None = None,
    options: CaptureOptions = _ALL,
    *,
    layers: Layers = "all",
    about: Mapping[str, str] | None = None,
    forward: Forward | None = None,
    progress: Progress = silent,
    ranks: Ranks = ALONE,
    checkpoints: Checkpoints | None = None,
    report: NormReport | None = None,
) -> Capture:
    """Capture as :func:`capture` does, with the options of commands; every rank returns the whole.

    ``ranks``, see :func:`normscope.pairs.ranks.process_group`, divide the batches, unless each has its own; progress
    counts the samples of all as far as each can tell. ``checkpoints`` save the progress of the capture, which resumes
    from them. ``report`` is that of an earlier call of :func:`find_norms`, whose pass is then not repeated.

    Raises:
        UsageError: if a checkpoint is of another capture; and all errors of :func:`capture`.
        StoppedError: if the checkpoints were asked to stop.
    """
    model, batches, about, _ = unpacked(model, batches, about, forward=forward)
    captured_inputs = InputSet()  # of earlier runs: filled once the sites are known, before the first chunk is read
    sharing = ALONE if ranks.own_batches else ranks
    first, chunks = first_and_chunks(batches, RankSampler(sharing.rank, sharing.size, captured_inputs))
    model = uncompiled(model)
    dtype = " and ".join(dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in model.parameters()))
    unnamed = dict.fromkeys(("weights", "data", "dtype"), "not named")
    about = {"model": class_of(model).__name__, **unnamed, **({"dtype": dtype} if dtype else {}), **about}

    def described() -> str:
        """Return the description of the inputs, which may change while they are read."""
        return str(getattr(batches, "description", None) or about["data"])

    report = ranks.norms(find_norms(model, first) if report is None and first else report)
    sites, previews = select(report.sites, layers), getattr(batches, "preview", preview_of)
    recorder = Recorder(model, options, report, sites, previews)
    settings: dict[str, Any] = {name: about[name] for name in ("model", "weights", "dtype")}
    settings |= {name: value for name, value in vars(options).items() if name not in ("verify", "observe")}
    settings["layers"] = [site.name for site in sites]
    if first is not None and not ranks.own_batches:
        settings["data"], settings["number of samples"] = described(), getattr(batches, "n_samples", None)
        settings["first sample"] = list(astuple(first.samples[0]))
    check_alike(ranks, settings)
    if checkpoints is not None:
        recorder.progress = checkpoints.begin(recorder.progress, ranks, settings)
        for flags in ranks.gather_bytes(recorder.progress.processed.flags):
            captured_inputs.update(InputSet(flags))
    samples = StageProgress(progress, "samples", getattr(batches, "n_samples", None), sharing.size)
    with restoring(model), recorder.hooked(), memory_for("inputs were made ready"), reporting(progress):
        for chunk in chunks:
            for batch in chunk.batches:
                recorder.run(batch, chunk.numbers[0])
                samples.add(len(batch.samples))
            recorder.progress.processed.update(chunk.numbers)
            recorder.progress.left_out.add(chunk)
            if checkpoints is not None:
                checkpoints.after_chunk()
    if checkpoints is not None and ranks.size > 1:  # waiting for other ranks may take long, or one of them be lost
        checkpoints.keep()
    recorder.progress = merge_progress(recorder.progress, ranks)
    if isinstance(getattr(batches, "left_out", None), LeftOut) and not ranks.own_batches:
        batches.left_out = recorder.progress.left_out
    data = functools.reduce(joined_names, ranks.gather(described()))
    return recorder.result({**about, "data": data})
