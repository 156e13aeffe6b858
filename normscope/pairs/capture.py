"""capture(): hooks in, every pair of every norm into its sums, hooks out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from normscope.errors import UsageError
from normscope.inputs.batch import Batch
from normscope.inputs.chunks import Done, LeftOut, Share, shared
from normscope.inputs.loaded_model import LoadedModel
from normscope.inputs.previews import preview_of
from normscope.pairs.captures import Capture
from normscope.pairs.norms.sites import Layers, SkippedNorm, select
from normscope.pairs.norms.streams import unpacked
from normscope.pairs.norms.trace import NOT_CALLED, find_norms
from normscope.pairs.ranks import ALONE, Checkpoints, Ranks, agree_on_batches, check_alike, merge_seen
from normscope.pairs.recorder import Recorder, Summing
from normscope.runtime.network import captured_once, heard_by, left_as_found, memory_for
from normscope.runtime.progress import Progress, StageProgress, reporting, silent

if TYPE_CHECKING:
    from normscope.inputs.batch import Forward

_ALL = Summing()


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
    forward: Forward | None = None,
    progress: Progress = silent,
) -> Capture:
    """Run ``model`` over ``batches`` and sum up the input and the output before the affine step of its norms.

    The model is put into eval mode and run without gradients, on copies of the batches. Its training flags, buffers,
    dtype, device, the grad mode and torch's RNG state are left as found, and no hook stays, also after an exception or
    Ctrl-C.

    Args:
        model: what :func:`normscope.load` returned; or any module on any device.
        batches: tensors, tuples of arguments, dicts of keyword arguments, or :class:`normscope.Batch`; on the model's
            device and in its dtype, samples along axis 0. Labels beside them, as a DataLoader gives them, are left out,
            and a list of images is taken one by one, see :func:`normscope.inputs.batch.as_batches`. Taken one at a
            time: any iterable, of any length; one that runs the model itself, as a sampler does, may do so, and nothing
            of that is recorded. Positions that a Batch marks as padding are in no sum, nor those that a mask among the
            arguments marks, where its tokens are normalized. A norm whose input has no axis of samples has no padding:
            all its tokens are, once for each batch; they are no sample's, and the site has no folds.
            None for a loaded model's own inputs.
        layers: which norm sites, see :func:`normscope.pairs.norms.sites.select`.
        about: what the capture says of itself: ``model``, ``weights``, ``data``. Files and figures print it. Batches
            that have a ``description`` say themselves what they were, once they have all been taken; the network says
            its ``dtype``, or those that it has parameters of. A loaded model says all of it.
        seed: of the drawing samples.
        sample: at each call of a norm take only so many tokens of each sample, drawn uniformly, for the impatient;
            None for all. The capture's ``data`` says so.
        verify: recompute every norm's true output from our y, its weight and its bias, and fail where they differ.
        by_gamma: also keep the sums with every pair weighted by the square of its channel's weight γ.
        per_channel: also keep the sums of each channel, on a coarser grid; d · 17 kB a site.
        diagonal: also keep the sums of the diagonal of the norm's Jacobian, ∂y_i/∂x_i, which
            :func:`normscope.gradient` takes; at sites where it is known in closed form.
        by_part: also keep the sums of each part of the data by itself, in :attr:`Capture.parts`, where batches name the
            ``part`` that they belong to: a diffusion model's timesteps. Each part takes the memory of a whole.
        keep_inputs: of so many inputs, those of least number, keep what people can look at (a thumbnail, the envelope
            of the waveform, the text) and mean, σ and the sizes of the elements of every token at every norm, in
            :attr:`Capture.inputs`: :func:`normscope.report` shows them. Of a diffusion model so many at each timestep.
            Batches that have a method ``preview(batch, place)`` say themselves what a sample shows: a
            :class:`normscope.Preview`, or None.
        forward: runs the model on an entry of ``batches``, whatever that is: ``lambda model, batch: model(batch.x)``.
        progress: called with ``"samples"``, how many have run, and how many there are: None where nothing tells.

    Returns:
        A :class:`Capture` on the CPU, whose size does not depend on the number of batches.

    Raises:
        DataError: if there is no batch, or if it is not known which tokens a mask is for, or where they are at a norm.
        ModelError: if the model raises, if it calls no norm that normscope knows, or if verification fails.
        UsageError: if ``layers`` names no site, ``sample`` no token, or ``keep_inputs`` no number of inputs; or if a
            module comes without batches.
        MemoryEndedError: if a single sample takes more memory than there is; larger batches are split.

    >>> import normscope, torch
    >>> capture(normscope.load("demo_vit", limit=4), layers="norm").stats["norm"].n_pairs
    4096
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    >>> capture(model, [torch.randn(16, 4), torch.randn(16, 4)], seed=0).stats["1"].n_pairs
    256
    """
    summing = Summing(seed, sample, verify, by_gamma, per_channel, diagonal, by_part, keep_inputs)
    return captured(model, batches, summing, layers=layers, about=about, forward=forward, progress=progress)


def captured(
    model: nn.Module | LoadedModel,
    batches: Iterable[Any] | None = None,
    summing: Summing = _ALL,
    *,
    layers: Layers = "all",
    about: Mapping[str, str] | None = None,
    forward: Forward | None = None,
    progress: Progress = silent,
    ranks: Ranks = ALONE,
    checkpoints: Checkpoints | None = None,
) -> Capture:
    """Capture as :func:`capture` does, with what commands need besides; every rank gets the whole.

    ``ranks``, which :func:`normscope.pairs.ranks.joined` gives, divide the batches among them; progress counts those
    of all as far as each can tell. ``checkpoints`` keep how far the capture is, and are gone on from.

    Raises:
        UsageError: if a checkpoint is of another capture; and whatever :func:`capture` raises.
        StoppedError: if the checkpoints were told to stop.
    """
    if summing.sample is not None and summing.sample < 1:
        raise UsageError(
            f"sample is {summing.sample}: it is a number of tokens, at least 1; without it, all are taken."
        )
    if summing.keep_inputs < 0:
        raise UsageError(f"keep_inputs is {summing.keep_inputs}: it is a number of inputs, 0 to keep none.")
    model, batches, about, _ = unpacked(model, batches, about, forward=forward)
    agree_on_batches(batches, ranks)
    taken = Done()  # by runs before this one: known once the sites are, and before the first chunk is asked for
    first, chunks = shared(batches, Share(ranks.rank, ranks.size, taken))
    model = getattr(model, "_orig_mod", model)
    dtype = " and ".join(dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in model.parameters()))
    unsaid = {"model": type(model).__name__, "weights": "not named", "data": "not named", "dtype": dtype or "not named"}
    about = {**unsaid, **about}
    with captured_once(model):
        report = find_norms(model, first)
        sites = select(report.sites, layers)
        recorder = Recorder(model, summing, report, sites, getattr(batches, "preview", preview_of))
        settings = _settings(recorder, batches, first, about)
        check_alike(ranks, settings)
        if checkpoints is not None:
            taken.add(Done(checkpoints.begin(recorder, ranks, settings)).numbers)
        idle = {norm.name: norm for norm in report.skipped if norm.reason == NOT_CALLED}
        told = StageProgress(progress, "samples", getattr(batches, "n_samples", None), ranks.size)
        with (
            left_as_found(model),
            recorder.hooked(),
            _watched(recorder, idle),
            memory_for("inputs were made ready"),
            reporting(progress),
        ):
            for chunk in chunks:
                for batch in chunk.batches:
                    recorder.run(batch, chunk.numbers[0], chunk.heard)
                    told.add(len(batch.samples))
                recorder.seen.done.add(chunk.numbers)
                recorder.seen.left_out.add(chunk)
                if checkpoints is not None:
                    checkpoints.after_chunk(recorder, ranks)
    if checkpoints is not None:
        checkpoints.after_share(recorder, ranks)
    with contextlib.nullcontext() if checkpoints is None else checkpoints.kept_if_lost(recorder, ranks):
        merge_seen(recorder, ranks)
    if isinstance(getattr(batches, "left_out", None), LeftOut):
        batches.left_out = recorder.seen.left_out
    late = recorder.seen.late
    return recorder.captured({**about, **_described(batches)}, [late.get(norm.name, norm) for norm in report.skipped])


def _settings(recorder: Recorder, batches: Iterable[Any], first: Batch, about: Mapping[str, str]) -> dict[str, Any]:
    """Say what is captured of what: what ranks have to agree in, and what a checkpoint is of."""
    kept = ("seed", "sample", "by_gamma", "per_channel", "diagonal", "by_part", "keep_inputs")
    summing = {name: getattr(recorder.summing, name) for name in kept}
    return {
        "model": about["model"],
        "weights": about["weights"],
        "data": _described(batches).get("data", about["data"]),
        "first sample": list(astuple(first.samples[0])),
        "number of samples": getattr(batches, "n_samples", None),
        "dtype": about["dtype"],
        **summing,
        "layers": [site.name for site in recorder.sites],
    }


@contextlib.contextmanager
def _watched(recorder: Recorder, idle: Mapping[str, SkippedNorm]) -> Iterator[None]:
    """Notice norms that the first sample did not call and a later one does: they are skipped for another reason."""

    def noticed(norm: SkippedNorm) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            recorder.seen.late[norm.name] = replace(norm, reason="not called by the first sample, only by later ones")

        return hook

    with contextlib.ExitStack() as hooks:
        for name, norm in idle.items():
            hook = heard_by(recorder.lock, noticed(norm))
            hooks.callback(recorder.model.get_submodule(name).register_forward_pre_hook(hook).remove)
        yield


def _described(batches: object) -> dict[str, str]:
    description = getattr(batches, "description", None)
    return {} if description is None else {"data": str(description)}
