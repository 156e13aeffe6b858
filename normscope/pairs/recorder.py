"""Recording of a capture: hooks on the norms of a network add their pairs to the sums of each site."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import DataError, MemoryEndedError, UsageError, count
from normscope.inputs.batch import Batch, Halving
from normscope.inputs.previews import preview_of
from normscope.inputs.wrappers import submodule
from normscope.norms.functional import ExpectedCalls
from normscope.norms.kinds import token_axes
from normscope.norms.recognition import input_of
from normscope.norms.sites import NormSite, PointwiseParameters, SkippedNorm
from normscope.norms.trace import NOT_CALLED, NormReport
from normscope.norms.verification import check
from normscope.pairs.captures import Capture, sums_of, versions, without_first
from normscope.pairs.checkpoints import CaptureProgress
from normscope.pairs.kept_inputs import InputKeeper, Previews, first_inputs
from normscope.pairs.sums.stats import PairStats
from normscope.pairs.token_axes import TokenAxes, padded
from normscope.runtime.network import PassHooks, SavedBuffers, run
from normscope.runtime.spread import gathered, whole

Observer = Callable[[NormSite, Tensor, Tensor], None]


@dataclass(frozen=True)
class CaptureOptions:
    """Options of a capture, see :func:`normscope.capture`.

    Attributes:
        observe: called with (site, x rows, y rows), each ``(tokens, d)``, for every call of every site.
    """

    seed: int = 0
    sample: int | None = None
    verify: bool = False
    by_gamma: bool = False
    per_channel: bool = False
    diagonal: bool = False
    by_part: bool = False
    keep_inputs: int = 0
    skip: int = 0
    observe: Observer | None = None

    def __post_init__(self) -> None:
        """Refuse options that mean nothing; UsageError."""
        if self.sample is not None and not _at_least(1, self.sample):
            raise UsageError(
                f"sample is {self.sample!r}: it is a number of tokens, at least 1; without it, all are taken."
            )
        if not _at_least(0, self.keep_inputs):
            raise UsageError(f"keep_inputs is {self.keep_inputs!r}: it is a number of inputs, 0 to keep none.")
        if not _at_least(0, self.skip):
            raise UsageError(f"skip is {self.skip!r}: it is a number of positions, 0 to leave none out.")


def _at_least(least: int, number: object) -> bool:
    return isinstance(number, Integral) and int(number) >= least


@dataclass
class _Pass:
    """A batch that runs through the network, and the calls of its norms so far, by site."""

    batch: Batch
    summed: Counter[str]  # calls already summed in an earlier attempt that ran out of memory
    padded: bool  # computed once per pass: Batch.padded synchronizes with the GPU
    calls: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)  # of one sample
    summing_at: str = ""
    inseparable: str = ""  # a site whose tokens are in the sums and belong to no sample
    inputs: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)  # also by thread; that norms overwrite


class Recorder:
    """Runs a network with hooks on its norms, and sums up their pairs.

    Attributes:
        progress: the sums so far.
        hooks: those of the norms, which sum one at a time.
    """

    def __init__(
        self,
        model: nn.Module,
        options: CaptureOptions,
        report: NormReport,
        sites: list[NormSite],
        previews: Previews = preview_of,
    ) -> None:
        """Observe ``sites`` among the norms of a report; ``previews`` return what is displayed of a sample."""
        self.model, self.options, self.report, self.sites = model, options, report, sites
        self.progress = CaptureProgress(Capture({}, sites, [], {}, 0, options.seed, {}, skip=options.skip))
        self.hooks = PassHooks()
        self._keeper = InputKeeper(options.keep_inputs, previews)
        self._halving = Halving("taken")
        self._part = self.progress.capture
        self._pass: _Pass | None = None
        self._axes = TokenAxes(report)
        if options.skip:
            self._axes.refuse_skipping(sites)
        self._pointwise: dict[str, PointwiseParameters | None] = {}  # now, which may be long after the report
        adders = {site.name: self.hooks.limited(partial(self._add, site)) for site in sites if site.is_call}
        self._functions = ExpectedCalls(report.norm_modules, report.sequences, adders, self.hooks)

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """Observe the norms of the sites in the block, and note those that only later samples call."""
        with contextlib.ExitStack() as hooks:
            for idle in self.report.skipped:
                if idle.reason == NOT_CALLED:
                    hook = self.hooks.limited(partial(self._note_late, idle))
                    hooks.callback(submodule(self.model, idle.name).register_forward_pre_hook(hook).remove)
            for site in self.sites:
                if site.is_call:
                    continue
                norm = submodule(self.model, site.name)
                if site.name in self.report.overwriting:
                    hook = self.hooks.limited(partial(self._keep_input, site))
                    hooks.callback(norm.register_forward_pre_hook(hook, with_kwargs=True).remove)
                hook = self.hooks.limited(partial(self._record, site))
                hooks.callback(norm.register_forward_hook(hook, with_kwargs=True).remove)
            hooks.enter_context(self._functions.following(self.model))
            yield

    def run(self, batch: Batch, number: int = 0) -> None:
        """Run the network on a batch and sum up the pairs of its norms; in halves, and their halves, where memory ends.

        A norm that had summed up the whole batch when memory ended leaves out the halves: every pair counts once.
        ``number`` is that of the first input in the batch.

        Raises:
            MemoryEndedError: if memory ends at a single sample, at a batch that cannot be split without counting
                something twice, or while pairs are being summed.
            ModelError: if the network raises anything else.
        """
        self._part = self.progress.part(batch.part if self.options.by_part else "", number)
        capture = self.progress.capture
        for piece, summed in self._halving.pieces(batch, Counter[str]()):
            buffers = SavedBuffers(self.model) if self.report.keeps_state else None
            capture.inputs = self._keeper.begin(piece, capture.inputs)
            self._pass = current = _Pass(piece, summed, piece.padded)
            try:
                with self.hooks.running(), self._functions:
                    run(self.model, piece)
                self._part.n_samples += len(piece.samples)
            except MemoryEndedError as error:
                _check_divisible(current, error)
                if buffers is not None:
                    buffers.restore()
                self._halving.halve(piece, summed | current.calls)
            finally:
                self._pass = None  # the batch iterator may call the model itself: those calls are ignored

    def result(self, about: Mapping[str, str]) -> Capture:
        """Return everything that was recorded: the whole, and its parts."""
        if self.options.sample is not None:
            sample = f"a sample of {count(self.options.sample, 'token')} of each"
            about = {**about, "data": f"{about['data']} · {sample}", "sample": sample}
        if skip := self.options.skip:
            about = {**about, "data": f"{about['data']} · {without_first(skip)}"}
        recorded, first = self.progress.capture, self.progress.first
        parts = dict(sorted(recorded.parts.items(), key=lambda named: first[named[0]]))
        for part in parts.values():
            for name in part.stats:  # one site after another, so that no second copy of all is made
                part.stats[name] = part.stats[name].to("cpu")
        stats = sums_of(self.sites, [part.stats for part in parts.values()])
        empty = [name for name, sums in stats.items() if not sums.n_tokens + int(sums.nonfinite_tokens)]
        if skip and empty:
            few = f"no sample has more than {count(skip, 'position')} there"
            raise DataError(f"No token is left at {empty[0]}: {few}. Leave out fewer, or choose other layers.")
        late = {norm.name: norm for norm in recorded.skipped}
        skipped = [late.get(norm.name, norm) for norm in self.report.skipped] + [
            SkippedNorm(site.name, site.kind, "called for the first sample alone, and never again")
            for site in self.sites
            if site.name not in stats
        ]
        inputs, installed = first_inputs(recorded.inputs, self.options.keep_inputs), versions(self.model)

        def finished(capture: Capture, part: str = "") -> Capture:
            named = {"data": f"{about['data']} · {part}", "part": part} if part else {}
            return replace(
                capture,
                about={**about, **named},
                sites=[
                    replace(site, pointwise=self._pointwise.get(site.name, site.pointwise))
                    for site in self.sites
                    if site.name in capture.stats
                ],
                skipped=skipped,
                versions=installed,
                inputs=[kept for kept in inputs if part in ("", kept.part)],
            )

        n_samples = sum(part.n_samples for part in parts.values())
        parts = {name: finished(part, name) for name, part in parts.items() if name and part.stats}
        return finished(replace(recorded, stats=stats, n_samples=n_samples, parts=parts))

    def _note_late(self, idle: SkippedNorm, *_: Any) -> None:
        late = replace(idle, reason="not called by the first sample, only by later ones")
        if late not in self.progress.capture.skipped:
            self.progress.capture.skipped.append(late)

    def _keep_input(self, site: NormSite, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep a copy of the input of a norm that overwrites it."""
        x = input_of(args, kwargs)
        if x is not None and self._pass is not None:
            self._pass.inputs.setdefault((site.name, threading.get_ident()), []).append(x.detach().clone())

    def _record(
        self, site: NormSite, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        if self._pass is not None and (kept := self._pass.inputs.get((site.name, threading.get_ident()))):
            x: Tensor | None = kept.pop()
        else:
            x = input_of(args, kwargs)
        if x is None:
            raise DataError(f"The norm {site.name} was called without a tensor.")
        if not self._functions.frames[-2].in_norm:
            self._add(site, module, x, output)

    def _add(self, site: NormSite, module: nn.Module, x: Tensor, output: Tensor) -> None:
        """Add the pairs of one call of a site."""
        if self._pass is not None:
            # Otherwise FunctionWatch would receive each operation here, which takes a tenth of a capture.
            with torch._C.DisableTorchFunction(), gathered(module, (x,)) as ((rows,), _):
                self._sum(self._pass, site, module, rows, whole(output, like=x))

    def _sum(self, current: _Pass, site: NormSite, module: nn.Module, x: Tensor, output: Tensor) -> None:
        kind, name, samples = self.report.kinds[site.name], site.name, current.batch.samples
        if kind.channels(module, x) != site.channels:
            raise DataError(
                f"The norm {name} (input {tuple(x.shape)}) has {kind.channels(module, x)} channels, but "
                f"{site.channels} with the first sample; sums are of one number of channels. Capture inputs of one "
                "size at a time."
            )
        mask, valid = current.batch.valid_at(site.path), None
        axis = self._axes.sample_axis(name, x.shape, len(samples), mask)
        if mask is not None and current.padded:
            if (packed := self._axes.packed(site, kind, module, x, axis, mask)) is not None:
                x, output, axis = padded(x, packed, mask), padded(output, packed, mask), 0
            valid = self._axes.valid_tokens(site, kind, module, x, axis, mask)
            if valid is not None and kind.heads and kind.groups:
                valid = valid.repeat_interleave(kind.groups(module))
        rows = kind.rows(module, x.detach(), axis or 0)
        first_token = current.tokens[name]
        current.tokens[name] += len(rows) // (1 if axis is None else len(samples))
        if current.calls[name] < current.summed[name]:
            current.calls[name] += 1
            return
        if self.options.verify:
            check(kind, name, module, x, output, batch_axis=axis or 0, valid=valid)
        if rows.device.type == "mps":  # which has no float64 to sum in
            rows, valid = rows.cpu(), None if valid is None else valid.cpu()
        data = rows.new_ones(len(rows), dtype=torch.bool) if valid is None else valid
        positions = self._axes.positions(name, x.shape, axis, len(samples), data, self.options.skip)
        if positions is not None and self.options.skip:
            valid = data & (positions.numbers >= self.options.skip)
        if site.pointwise and name not in self._pointwise:
            self._pointwise[name] = kind.pointwise(module)
        lines, stats = kind.lines(module, rows, kind.eps_of(module, x.dtype)), self._stats(site, rows.device)
        if self._keeper.running and axis is not None and kind.groups is None:
            sizes = [x.shape[token_axis] for token_axis in token_axes(x, kind.axes(module, x.ndim), axis)]
            self._keeper.add(site, rows, lines, sizes, valid)
        current.summing_at = name
        drawn = stats.update(
            rows,
            lines,
            samples,
            first_token,
            kind.gamma(module, site.channels) if self.options.by_gamma else None,
            groups=None if kind.groups is None else kind.groups(module),
            valid=valid,
            sample=self.options.sample,
            divided=axis is not None,
            positions=positions,
        )
        current.calls[name] += 1
        if axis is None:
            current.inseparable = name
        if self.options.observe is not None:
            y = lines.y(rows).float()
            self.options.observe(site, *((rows, y) if drawn is None else (rows[drawn], y[drawn])))
        current.summing_at = ""

    def _stats(self, site: NormSite, device: torch.device) -> PairStats:
        """Return the sums of a site in the part of the data under way, on a device."""
        stats = self._part.stats.get(site.name)
        if stats is None:
            stats = PairStats.empty(
                site.channels,
                self.options.seed,
                device,
                grouped=site.grouped,
                by_gamma=self.options.by_gamma,
                per_channel=self.options.per_channel or site.channels_differ,
                diagonal=self.options.diagonal and site.has_diagonal,
            )
        elif stats.channel_sums.device != device:  # read from a checkpoint
            stats = stats.to(device)
        self._part.stats[site.name] = stats
        return stats


def _check_divisible(failed: _Pass, error: MemoryEndedError) -> None:
    """Raise MemoryEndedError if halves of a batch, whose memory ended, would count something twice or not at all."""
    if failed.summing_at:
        raise MemoryEndedError(
            f"Memory ended while the pairs of {failed.summing_at} were summed up, so that its sums are lost. Take "
            "smaller batches: --batch-size."
        ) from error
    if failed.inseparable:
        raise MemoryEndedError(
            f"Memory ended with {count(len(failed.batch.samples), 'sample')} in a batch, which cannot be split: the "
            f"tokens of {failed.inseparable}, summed up by then, cannot be told apart by sample. Take smaller batches: "
            "--batch-size."
        ) from error
    if len(failed.batch.samples) == 1 or not failed.batch.divisible:
        raise error
