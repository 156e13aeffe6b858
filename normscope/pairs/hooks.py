"""capture(): hooks in, every pair of every norm into its sums, hooks out."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from normscope.batches import Batch, as_batches
from normscope.errors import DataError, UsageError, count
from normscope.pairs.captures import Capture, versions
from normscope.pairs.kinds import NormKind
from normscope.pairs.layouts import batch_axis, token_axes
from normscope.pairs.selection import Layers, select
from normscope.pairs.sites import NormSite, SkippedNorm
from normscope.pairs.spread import with_weights_at_hand
from normscope.pairs.state import left_as_found, run
from normscope.pairs.stats import PairStats
from normscope.pairs.trace import NOT_CALLED, NormReport, find_norms, input_of
from normscope.pairs.verify import check

Observer = Callable[[NormSite, Tensor, Tensor], None]


def capture(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    layers: Layers = "all",
    about: Mapping[str, str] | None = None,
    seed: int = 0,
    sample: int | None = None,
    verify: bool = False,
    by_gamma: bool = False,
    per_channel: bool = False,
    observe: Observer | None = None,
) -> Capture:
    """Run ``model`` over ``batches`` and sum up the input and the output before the affine step of its norms.

    The model is put into eval mode and run without gradients. Its training flags, dtype, device, the grad mode and
    torch's RNG state are left as found, and no hook stays, also after an exception or Ctrl-C.

    Args:
        model: any module on any device.
        batches: tensors, tuples of arguments, dicts of keyword arguments, or :class:`normscope.Batch`; on the model's
            device and in its dtype, samples along axis 0. Taken one at a time: any iterable, of any length; one that
            runs the model itself, as a sampler does, may do so, and nothing of that is recorded. Positions that a
            Batch, or an ``attention_mask``, marks as padding are in no sum.
        layers: which norm sites, see :func:`normscope.pairs.selection.select`.
        about: what the capture says of itself: ``model``, ``weights``, ``data``. Files and figures print it. Batches
            that have a ``description`` say themselves what they were, once they have all been taken.
        seed: of the drawing samples.
        sample: at each call of a norm take only so many tokens of each sample, drawn uniformly, for the impatient;
            None for all. The capture's ``data`` says so.
        verify: recompute every norm's true output from our y, its weight and its bias, and fail where they differ.
        by_gamma: also keep the sums with every pair weighted by the square of its channel's weight γ.
        per_channel: also keep the sums of each channel, on a coarser grid; d · 17 kB a site.
        observe: called with (site, x rows, y rows), each ``(tokens, d)``, for every call of every site.

    Returns:
        A :class:`Capture` on the CPU, whose size does not depend on the number of batches. Where batches name the
        ``part`` that they belong to, each part is also kept by itself, in :attr:`Capture.parts`.

    Raises:
        DataError: if there is no batch, or if it cannot be told which tokens of a norm are padding.
        ModelError: if the model raises, if it calls no norm that normscope knows, or if verification fails.
        UsageError: if ``layers`` names no site, or ``sample`` no token.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    >>> seen = capture(model, [torch.randn(16, 4), torch.randn(16, 4)], seed=0)
    >>> seen.stats["1"].n_pairs
    256
    """
    if sample is not None and sample < 1:
        raise UsageError(f"sample is {sample}: it is a number of tokens, at least 1; without it, all are taken.")
    stream = as_batches(batches)
    first = next(stream, None)
    if first is None:
        raise DataError("There is no batch to run the model on.")
    report = find_norms(model, first.first_sample())
    sites = select(report.sites, layers)
    model = getattr(model, "_orig_mod", model)
    recorder = _Recorder(seed, sample, verify, by_gamma, per_channel, observe)
    idle = {norm.name: norm for norm in report.skipped if norm.reason == NOT_CALLED}
    with left_as_found(model), recorder.hooked(model, sites, report), _watched(model, idle) as late:
        for batch in itertools.chain([first], stream):
            with recorder.recording(batch):
                run(model, batch)
    return recorder.captured(
        {
            "model": type(model).__name__,
            "weights": "not named",
            "data": "not named",
            **(about or {}),
            **_described(batches),
        },
        sites,
        [late.get(norm.name, norm) for norm in report.skipped],
    )


@contextlib.contextmanager
def _watched(model: nn.Module, idle: Mapping[str, SkippedNorm]) -> Iterator[dict[str, SkippedNorm]]:
    """Notice norms that the first sample did not call and a later one does: they are skipped for another reason."""
    late: dict[str, SkippedNorm] = {}

    def noticed(norm: SkippedNorm) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            late[norm.name] = replace(norm, reason="not called by the first sample, only by later ones")

        return hook

    with contextlib.ExitStack() as hooks:
        for name, norm in idle.items():
            hooks.callback(model.get_submodule(name).register_forward_pre_hook(noticed(norm)).remove)
        yield late


def _described(batches: object) -> dict[str, str]:
    description = getattr(batches, "description", None)
    return {} if description is None else {"data": str(description)}


class _Recorder:
    """The hooks' side of a capture: which batch is running, and the sums of each site, for each part of the data."""

    def __init__(
        self,
        seed: int,
        sample: int | None,
        verify: bool,
        by_gamma: bool,
        per_channel: bool,
        observe: Observer | None,
    ) -> None:
        self.seed, self.sample, self.verify, self.observe = seed, sample, verify, observe
        self.by_gamma, self.per_channel = by_gamma, per_channel
        self.stats: dict[str, dict[str, PairStats]] = {}
        self.n_samples: Counter[str] = Counter()
        self.batch: Batch | None = None
        self.padded = False
        self.tokens_so_far: dict[str, int] = {}
        self.position_axes: dict[str, int] = {}

    @contextlib.contextmanager
    def recording(self, batch: Batch) -> Iterator[None]:
        """Take what the norms do meanwhile for the batch's; whatever makes the batches may run the model too."""
        self.batch, self.tokens_so_far = batch, {}
        # Whether all of a mask on a GPU is valid would have to be waited for.
        self.padded = batch.valid is not None and (batch.valid.is_cuda or not bool(batch.valid.all()))
        yield
        self.batch = None
        self.n_samples[batch.part] += len(batch.samples)

    @contextlib.contextmanager
    def hooked(self, model: nn.Module, sites: list[NormSite], report: NormReport) -> Iterator[None]:
        with contextlib.ExitStack() as hooks:
            for site in sites:
                hook = self._hook(site, report.kinds[site.name], report.shapes[site.name])
                norm = model.get_submodule(site.name)
                handle = norm.register_forward_hook(with_weights_at_hand(norm, hook), with_kwargs=True)
                hooks.callback(handle.remove)
            yield

    def captured(self, about: Mapping[str, str], sites: list[NormSite], skipped: list[SkippedNorm]) -> Capture:
        """Return everything that was recorded: the whole, and its parts."""
        if self.sample is not None:
            sample = f"a sample of {count(self.sample, 'token')} of each"
            about = {**about, "data": f"{about['data']} · {sample}", "sample": sample}
        called = {name for stats in self.stats.values() for name in stats}
        missed = [site for site in sites if site.name not in called]
        skipped = skipped + [
            SkippedNorm(site.name, site.kind, "called for the first sample alone, and never again") for site in missed
        ]

        def of(stats: dict[str, PairStats], n_samples: int, part: str = "") -> Capture:
            own = [site for site in sites if site.name in stats]
            named = {"data": f"{about['data']} · {part}", "part": part} if part else {}
            return Capture({**about, **named}, own, skipped, stats, n_samples, self.seed, versions())

        parts = {part: {name: own.cpu() for name, own in stats.items()} for part, stats in self.stats.items()}
        of_parts = {site.name: [stats[site.name] for stats in parts.values() if site.name in stats] for site in sites}
        whole = {name: functools.reduce(PairStats.merge, stats) for name, stats in of_parts.items() if stats}
        named = {part: of(stats, self.n_samples[part], part) for part, stats in parts.items() if part}
        return replace(of(whole, self.n_samples.total()), parts=named)

    def _hook(self, site: NormSite, kind: NormKind, of_one_sample: torch.Size) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            if self.batch is None:
                return
            x = input_of(args, kwargs)
            if x is None:
                raise DataError(f"The norm {site.name} was called without a tensor.")
            if self.verify:
                check(kind, site.name, module, x, output)
            samples = self.batch.samples
            positions = None if self.batch.valid is None else self.batch.valid.shape[1]
            axis = batch_axis(of_one_sample, x.shape, len(samples), positions)
            valid = self._valid_tokens(site, kind, module, x, axis)
            rows = kind.rows(module, x.detach(), axis or 0)
            if rows.device.type == "mps":  # which has no float64 to sum in
                rows, valid = rows.cpu(), None if valid is None else valid.cpu()
            eps = kind.eps_of(module, x.dtype)
            stats, first = self._stats(site, rows.device), self.tokens_so_far.get(site.name, 0)
            taken = stats.update(
                rows,
                kind.lines(module, rows, eps),
                samples if axis is not None else (),
                first,
                kind.gamma(module, site.channels) if self.by_gamma else None,
                groups=None if kind.groups is None else kind.groups(module),
                valid=valid,
                sample=self.sample,
            )
            self.tokens_so_far[site.name] = first + len(rows) // len(samples)
            if self.observe is not None:
                y, _ = kind.normalize(module, rows.float(), eps)
                self.observe(site, *((rows, y) if taken is None else (rows[taken], y[taken])))

        return hook

    def _stats(self, site: NormSite, device: torch.device) -> PairStats:
        part = self.stats.setdefault(self.batch.part if self.batch else "", {})
        if site.name not in part:
            part[site.name] = PairStats.empty(
                site.channels,
                self.seed,
                device,
                grouped=site.grouped,
                by_gamma=self.by_gamma,
                per_channel=self.per_channel,
            )
        return part[site.name]

    def _valid_tokens(
        self, site: NormSite, kind: NormKind, module: nn.Module, x: Tensor, batch_axis: int | None
    ) -> Tensor | None:
        """Tell which rows are data and not padding: bool ``(tokens,)``, or None for all."""
        if not self.padded or self.batch is None or self.batch.valid is None:
            return None
        valid = self.batch.valid.to(x.device)
        axes = [] if kind.groups else token_axes(x, kind.axes(module, x.ndim), batch_axis or 0)
        sizes = [x.shape[axis] for axis in axes]
        if sizes == [valid.numel()]:  # samples and positions in one axis
            return valid.flatten()
        if sizes == [len(valid)]:  # one token a sample, and no position
            return None
        along = [axis for axis, size in zip(axes[1:], sizes[1:], strict=True) if size == valid.shape[1]]
        if len(along) == 1:
            self.position_axes[site.name] = along[0]
        if batch_axis is None or self.position_axes.get(site.name) not in along:
            raise DataError(
                f"At the norm {site.name} (input {tuple(x.shape)}) it cannot be told which tokens are padding, of "
                f"{valid.shape[1]} positions. Pass samples of one length, or one at a time (--batch-size 1)."
            )
        shape = [
            size if axis in (batch_axis, self.position_axes[site.name]) else 1
            for axis, size in zip(axes, sizes, strict=True)
        ]
        return valid.view(shape).expand(sizes).flatten()
