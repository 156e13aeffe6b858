"""Recording of a capture: hooks on the norms of a network add their pairs to the sums of each site."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import DataError, MemoryEndedError, count
from normscope.inputs.batch import Batch, Halving
from normscope.inputs.chunks import Done, LeftOut
from normscope.inputs.previews import preview_of
from normscope.pairs.captures import Capture, added, sums_of, versions
from normscope.pairs.kept_inputs import InputKeeper, Previews, first_inputs
from normscope.pairs.norms.kinds import NormKind, token_axes
from normscope.pairs.norms.recognition import check
from normscope.pairs.norms.sites import NormSite, SkippedNorm
from normscope.pairs.norms.trace import NormReport, input_of, with_input
from normscope.pairs.sums.sampling import Assignment, SourcesSeen
from normscope.pairs.sums.stats import PairStats
from normscope.pairs.sums.tokens import batch_axis, serves_all
from normscope.runtime.network import ForwardHook, KeptBuffers, heard_by, passes_by, run, with_weights_at_hand

Observer = Callable[[NormSite, Tensor, Tensor], None]
ForwardPreHook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


@dataclass
class Progress:
    """A capture under way, and the inputs that are in it.

    Attributes:
        capture: its parts contain the sums so far, one part without a name among them; the whole is summed in the end.
        first: least number of an input of each part, by which parts are ordered.
        done: inputs that are in the sums, or could not be read.
        left_out: inputs that reading omitted.
    """

    capture: Capture
    first: dict[str, int] = field(default_factory=dict)
    done: Done = field(default_factory=Done)
    left_out: LeftOut = field(default_factory=LeftOut)

    def part(self, name: str, number: int) -> Capture:
        """Return a part of the data, to which an input of this number belongs."""
        self.first[name] = min(number, self.first.get(name, number))
        empty = replace(self.capture, skipped=[], stats={}, parts={}, inputs=())
        return self.capture.parts.setdefault(name, empty)

    def merge(self, other: Progress) -> Progress:
        """Return the progress of both, whose inputs differ."""
        least = {name: min(number, other.first.get(name, number)) for name, number in self.first.items()}
        merged = Progress(added(self.capture, other.capture), {**other.first, **least})
        for progress in (self, other):
            merged.done.add(progress.done.numbers)
            merged.left_out.add(progress.left_out)
        return merged


@dataclass(frozen=True)
class Summing:
    """Options of summing, see :func:`normscope.capture`.

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
    observe: Observer | None = None


class Recorder:
    """Runs a network with hooks on its norms, and sums up their pairs.

    Attributes:
        progress: the sums so far.
        assignment: of sources to folds; a resumed capture keeps its own.
        lock: identifies the passes of this recorder; held while a hook sums.
    """

    def __init__(
        self,
        model: nn.Module,
        summing: Summing,
        report: NormReport,
        sites: list[NormSite],
        previews: Previews = preview_of,
    ) -> None:
        """Observe ``sites`` among the norms of a report; ``previews`` return what is displayed of a sample."""
        self.model, self.summing, self.report, self.sites = model, summing, report, sites
        self.progress = Progress(Capture({}, sites, [], {}, 0, summing.seed, {}))
        self.assignment: Assignment = "permuted"
        self.lock = threading.RLock()
        self._keeper = InputKeeper(summing.keep_inputs, previews)
        self._batch: Batch | None = None
        self._part = self.progress.capture
        self._padded = False
        self._tokens_so_far: dict[str, int] = {}
        self._position_axes: dict[str, int] = {}
        self._serving_all: set[str] = set()  # sites whose input has no axis of samples
        self._calls: Counter[str] = Counter()
        self._summed: Counter[str] = Counter()
        self._summing_at = ""
        self._nobodys = ""
        self._inputs: dict[tuple[str, int], list[Tensor]] = {}  # by norm and thread; of norms that change their own
        self._halving = Halving("taken")

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """Observe the norms of the sites in the block."""
        with contextlib.ExitStack() as hooks:
            for site in self.sites:
                hook = self._hook(site, self.report.kinds[site.name], self.report.shapes[site.name])
                norm = self.model.get_submodule(site.name)
                hook = with_weights_at_hand(norm, hook)
                if site.name in self.report.overwriting:
                    keep, hook = self._with_own_input(site.name, hook)
                    keep = heard_by(self.lock, keep)
                    hooks.callback(norm.register_forward_pre_hook(keep, with_kwargs=True).remove)
                hooks.callback(norm.register_forward_hook(heard_by(self.lock, hook), with_kwargs=True).remove)
            yield

    def run(self, batch: Batch, number: int = 0, heard: Callable[[nn.Module, Any], None] | None = None) -> None:
        """Run the network on a batch and sum up the pairs of its norms; in halves, and their halves, where memory ends.

        A norm that had summed up the whole batch when memory ended leaves out the halves: every pair counts once.

        Args:
            batch: of some inputs.
            number: of the first of them.
            heard: called with the network and its output, unless the batch ran in halves.

        Raises:
            MemoryEndedError: if memory ends at a single sample, at a batch that cannot be split without counting
                something twice, or while pairs are being summed.
            ModelError: if the network raises anything else.
        """
        self._part = self.progress.part(batch.part if self.summing.by_part else "", number)
        for piece, summed in self._halving.pieces(batch, Counter[str]()):
            if self._fits(piece, summed, heard if piece is batch else None):
                self._part.n_samples += len(piece.samples)
            else:
                self._halving.halve(piece, summed | self._calls)

    def captured(self, about: Mapping[str, str], skipped: list[SkippedNorm]) -> Capture:
        """Return everything that was recorded: the whole, and its parts."""
        if self.summing.sample is not None:
            sample = f"a sample of {count(self.summing.sample, 'token')} of each"
            about = {**about, "data": f"{about['data']} · {sample}", "sample": sample}
        progress, inputs = self.progress, first_inputs(self.progress.capture.inputs, self.summing.keep_inputs)
        parts = dict(sorted(progress.capture.parts.items(), key=lambda named: progress.first[named[0]]))
        for part in parts.values():
            for name in part.stats:  # one site after another, so that no second copy of all is made
                part.stats[name] = part.stats[name].to("cpu")
        stats = sums_of(self.sites, [part.stats for part in parts.values()])
        never = [site for site in self.sites if site.name not in stats]
        skipped = skipped + [
            SkippedNorm(site.name, site.kind, "called for the first sample alone, and never again") for site in never
        ]

        def finished(stats: dict[str, PairStats], n_samples: int, part: str = "") -> Capture:
            sites = [site for site in self.sites if site.name in stats]
            named = {"data": f"{about['data']} · {part}", "part": part} if part else {}
            kept = [each for each in inputs if part in ("", each.part)]
            return Capture(
                {**about, **named}, sites, skipped, stats, n_samples, self.summing.seed, versions(), inputs=kept
            )

        whole = finished(stats, sum(part.n_samples for part in parts.values()))
        named = {
            name: finished(part.stats, part.n_samples, name) for name, part in parts.items() if name and part.stats
        }
        return replace(whole, parts=named)

    def _fits(self, batch: Batch, summed: Counter[str], heard: Callable[[nn.Module, Any], None] | None = None) -> bool:
        """Run the batch; return False if memory ended, with the network's buffers as they were before."""
        buffers = KeptBuffers(self.model) if self.report.keeps_state else None
        with self._recording(batch, summed):
            try:
                output = run(self.model, batch)
            except MemoryEndedError as error:
                if self._summing_at:
                    raise MemoryEndedError(
                        f"Memory ended while the pairs of {self._summing_at} were summed up, so that its sums are "
                        "lost. Take smaller batches: --batch-size."
                    ) from error
                if self._nobodys:
                    raise MemoryEndedError(
                        f"Memory ended with {count(len(batch.samples), 'sample')} in a batch, which cannot be split: "
                        f"the tokens of {self._nobodys}, summed up by then, cannot be told apart by sample. Take "
                        "smaller batches: --batch-size."
                    ) from error
                if len(batch.samples) == 1 or not batch.divisible:
                    raise
                if buffers is not None:
                    buffers.put_back()
                return False
        if heard is not None:
            heard(self.model, output)
        return True

    @contextlib.contextmanager
    def _recording(self, batch: Batch, summed: Counter[str]) -> Iterator[None]:
        """Attribute the pairs of the block to the batch; whatever makes the batches may run the model too."""
        self._batch, self._tokens_so_far, self._calls, self._summed = batch, {}, Counter(), summed
        self._summing_at = self._nobodys = ""
        self._inputs.clear()  # a pass whose memory ended leaves one behind
        kept = self.progress.capture
        kept.inputs = self._keeper.begin(batch, kept.inputs)
        self._padded = batch.padded  # once a batch: a hook that asked would wait for the GPU at each norm
        try:
            with passes_by(self.lock):
                yield
        finally:
            self._batch = None

    def _with_own_input(self, name: str, hook: ForwardHook) -> tuple[ForwardPreHook, ForwardHook]:
        """Return a hook that keeps a copy of a norm's input, and another that runs ``hook`` with it."""

        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = input_of(args, kwargs)
            if x is not None and self._batch is not None:
                self._inputs.setdefault((name, threading.get_ident()), []).append(x.detach().clone())

        def with_it(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if inputs := self._inputs.get((name, threading.get_ident())):
                args, kwargs = with_input(args, kwargs, inputs.pop())
            hook(module, args, kwargs, output)

        return keep, with_it

    def _hook(self, site: NormSite, kind: NormKind, of_one_sample: torch.Size) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            if self._batch is None:
                return
            x = input_of(args, kwargs)
            if x is None:
                raise DataError(f"The norm {site.name} was called without a tensor.")
            samples = self._batch.samples
            axis = self._axis_of_samples(site.name, of_one_sample, x.shape)
            valid = self._valid_tokens(site, kind, module, x, axis)
            rows = kind.rows(module, x.detach(), axis or 0)
            first = self._tokens_so_far.get(site.name, 0)
            self._tokens_so_far[site.name] = first + len(rows) // (1 if axis is None else len(samples))
            if self._calls[site.name] < self._summed[site.name]:
                self._calls[site.name] += 1
                return
            if self.summing.verify:
                check(kind, site.name, module, x, output, batch_axis=axis or 0, valid=valid)
            if rows.device.type == "mps":  # which has no float64 to sum in
                rows, valid = rows.cpu(), None if valid is None else valid.cpu()
            eps = kind.eps_of(module, x.dtype)
            lines, stats = kind.lines(module, rows, eps), self._stats(site, rows.device)
            if self._keeper.running and axis is not None and kind.groups is None:
                sizes = [x.shape[place] for place in token_axes(x, kind.axes(module, x.ndim), axis)]
                self._keeper.add(site, rows, lines, sizes, valid)
            self._summing_at = site.name
            taken = stats.update(
                rows,
                lines,
                samples,
                first,
                kind.gamma(module, site.channels) if self.summing.by_gamma else None,
                groups=None if kind.groups is None else kind.groups(module),
                valid=valid,
                sample=self.summing.sample,
                divided=axis is not None,
            )
            self._calls[site.name] += 1
            if axis is None:
                self._nobodys = site.name
            if self.summing.observe is not None:
                y = lines.y(rows).float()
                self.summing.observe(site, *((rows, y) if taken is None else (rows[taken], y[taken])))
            self._summing_at = ""

        return hook

    def _stats(self, site: NormSite, device: torch.device) -> PairStats:
        stats = self._part.stats
        if site.name not in stats:
            stats[site.name] = PairStats.empty(
                site.channels,
                self.summing.seed,
                device,
                grouped=site.grouped,
                by_gamma=self.summing.by_gamma,
                per_channel=self.summing.per_channel,
                diagonal=self.summing.diagonal and site.has_diagonal,
            )
            stats[site.name].sources = SourcesSeen(assignment=self.assignment)
        if stats[site.name].channel_sums.device != device:  # read from a checkpoint
            stats[site.name] = stats[site.name].to(device)
        return stats[site.name]

    def _axis_of_samples(self, name: str, of_one_sample: torch.Size, shape: torch.Size) -> int | None:
        """Find the axis of samples; None where there is none, or it cannot be identified.

        Tokens of a norm without it belong to no sample and no fold, once for each batch.
        """
        assert self._batch is not None  # noqa: S101 - as the hooks do nothing without one
        n_samples = len(self._batch.samples)
        mask = self._batch.valid_at(name)
        positions = None if mask is None else mask.shape[1]
        axis = batch_axis(of_one_sample, shape, n_samples, positions)
        if n_samples == 1:
            return axis
        of_weights = name in self.report.of_weights and shape == of_one_sample
        if of_weights or (
            axis is None and serves_all(of_one_sample, shape, self.report.positions.get(name), positions)
        ):
            self._serving_all.add(name)
        return None if name in self._serving_all else axis

    def _valid_tokens(
        self, site: NormSite, kind: NormKind, module: nn.Module, x: Tensor, batch_axis: int | None
    ) -> Tensor | None:
        """Return the mask of rows that are data and not padding: bool ``(tokens,)``, or None for all."""
        valid = self._batch.valid_at(site.name) if self._padded and self._batch is not None else None
        if valid is None:
            return None
        if site.name in self.report.of_weights or site.name in self._serving_all:
            return None
        valid = valid.to(x.device)
        axes = [] if kind.groups else token_axes(x, kind.axes(module, x.ndim), batch_axis or 0)
        sizes = [x.shape[axis] for axis in axes]
        if sizes == [valid.numel()]:  # samples and positions in one axis
            return valid.flatten()
        if sizes == [len(valid)]:  # one token a sample, and no position
            return None
        along = [axis for axis, size in zip(axes[1:], sizes[1:], strict=True) if size == valid.shape[1]]
        if not along and len(valid) == 1 and sizes[:1] == [valid.shape[1]]:  # positions come first, then the one sample
            along = axes[:1]
        if len(along) == 1:
            self._position_axes[site.name] = along[0]
        if batch_axis is None or self._position_axes.get(site.name) not in along:
            raise DataError(
                f"At the norm {site.name} (input {tuple(x.shape)}) it cannot be told which tokens are padding, of "
                f"{valid.shape[1]} positions. Pass samples of one length, or one at a time (--batch-size 1), "
                f"or say it in the valid_within of a normscope.Batch: {{{site.name!r}: …}}."
            )
        shape = [
            size if axis in (batch_axis, self._position_axes[site.name]) else 1
            for axis, size in zip(axes, sizes, strict=True)
        ]
        return valid.view(shape).expand(sizes).flatten()
