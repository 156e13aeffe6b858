"""Recording of a capture: hooks on the norms of a network add their pairs to the sums of each site."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import DataError, MemoryEndedError, count
from normscope.inputs.batch import Batch, Halving
from normscope.inputs.chunks import LeftOut
from normscope.inputs.previews import preview_of
from normscope.inputs.wrappers import submodule
from normscope.norms.functional import Adder, ExpectedCalls
from normscope.norms.kinds import NormKind, token_axes
from normscope.norms.sites import NormSite, PointwiseParameters, SkippedNorm
from normscope.norms.trace import NOT_CALLED, NormReport, input_of, with_input
from normscope.norms.verification import check
from normscope.pairs.captures import Capture, added, sums_of, versions, without_first
from normscope.pairs.kept_inputs import InputKeeper, Previews, first_inputs
from normscope.pairs.positions import layouts, positions_along, refuse_skipping
from normscope.pairs.sums.stats import PairStats
from normscope.pairs.sums.tokens import Positions, batch_axis, serves_all
from normscope.runtime.network import KeptBuffers, PassHooks, run
from normscope.runtime.spread import at_hand, whole

Observer = Callable[[NormSite, Tensor, Tensor], None]
ForwardPreHook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
ForwardHook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]


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
    done: set[int] = field(default_factory=set)
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
            merged.done.update(progress.done)
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
    skip: int = 0
    observe: Observer | None = None


@dataclass
class _Pass:
    """A batch that runs through the network, and the calls of its norms so far, by site."""

    batch: Batch
    summed: Counter[str]  # calls that are in the sums since an earlier pass, whose memory ended
    padded: bool  # once a pass, as every hook that asked would wait for the GPU
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
        summing: Summing,
        report: NormReport,
        sites: list[NormSite],
        previews: Previews = preview_of,
    ) -> None:
        """Observe ``sites`` among the norms of a report; ``previews`` return what is displayed of a sample."""
        self.model, self.summing, self.report, self.sites = model, summing, report, sites
        self.progress = Progress(Capture({}, sites, [], {}, 0, summing.seed, {}, skip=summing.skip))
        self.hooks = PassHooks()
        self._keeper = InputKeeper(summing.keep_inputs, previews)
        self._halving = Halving("taken")
        self._part = self.progress.capture
        self._pass: _Pass | None = None
        self._position_axes: dict[str, int] = {}
        self._layouts = layouts(report)
        if summing.skip:
            refuse_skipping([(site.name, self._layouts[site.name]) for site in sites])
        self._serving_all: set[str] = set()  # sites whose input has no axis of samples
        self._pointwise: dict[str, PointwiseParameters | None] = {}  # now, which may be long after the report
        adders = {site.name: self.hooks.limited(self._adder(site)) for site in sites if site.is_call}
        self._functions = ExpectedCalls(report.norm_modules, report.sequences, adders, self.hooks)

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """Observe the norms of the sites in the block, and note those that only later samples call."""
        with contextlib.ExitStack() as hooks:
            for idle in self.report.skipped:
                if idle.reason == NOT_CALLED:
                    norm, hook = submodule(self.model, idle.name), self.hooks.limited(self._late(idle))
                    hooks.callback(norm.register_forward_pre_hook(hook).remove)
            for site in self.sites:
                if site.is_call:
                    continue
                norm, hook = submodule(self.model, site.name), self._hook(site)
                if site.name in self.report.overwriting:
                    keep, hook = self._with_own_input(site.name, hook)
                    keep = self.hooks.limited(keep)
                    hooks.callback(norm.register_forward_pre_hook(keep, with_kwargs=True).remove)
                hooks.callback(norm.register_forward_hook(self.hooks.limited(hook), with_kwargs=True).remove)
            hooks.enter_context(self._functions.following(self.model))
            yield

    def run(self, batch: Batch, number: int = 0) -> None:
        """Run the network on a batch and sum up the pairs of its norms; in halves, and their halves, where memory ends.

        A norm that had summed up the whole batch when memory ended leaves out the halves: every pair counts once.

        Args:
            batch: of some inputs.
            number: of the first of them.

        Raises:
            MemoryEndedError: if memory ends at a single sample, at a batch that cannot be split without counting
                something twice, or while pairs are being summed.
            ModelError: if the network raises anything else.
        """
        self._part = self.progress.part(batch.part if self.summing.by_part else "", number)
        for piece, summed in self._halving.pieces(batch, Counter[str]()):
            under_way = _Pass(piece, summed, piece.padded)
            if self._fits(under_way):
                self._part.n_samples += len(piece.samples)
            else:
                self._halving.halve(piece, summed | under_way.calls)

    def captured(self, about: Mapping[str, str]) -> Capture:
        """Return everything that was recorded: the whole, and its parts."""
        if self.summing.sample is not None:
            sample = f"a sample of {count(self.summing.sample, 'token')} of each"
            about = {**about, "data": f"{about['data']} · {sample}", "sample": sample}
        if skip := self.summing.skip:
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
        inputs, installed = first_inputs(recorded.inputs, self.summing.keep_inputs), versions(self.model)

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

    def _fits(self, under_way: _Pass) -> bool:
        """Run a batch; return False if memory ended, with the network's buffers as they were before."""
        batch, kept = under_way.batch, self.progress.capture
        buffers = KeptBuffers(self.model) if self.report.keeps_state else None
        kept.inputs = self._keeper.begin(batch, kept.inputs)
        self._pass = under_way
        try:
            with self.hooks.running(), self._functions:
                run(self.model, batch)
        except MemoryEndedError as error:
            if under_way.summing_at:
                raise MemoryEndedError(
                    f"Memory ended while the pairs of {under_way.summing_at} were summed up, so that its sums are "
                    "lost. Take smaller batches: --batch-size."
                ) from error
            if under_way.inseparable:
                raise MemoryEndedError(
                    f"Memory ended with {count(len(batch.samples), 'sample')} in a batch, which cannot be split: the "
                    f"tokens of {under_way.inseparable}, summed up by then, cannot be told apart by sample. Take "
                    "smaller batches: --batch-size."
                ) from error
            if len(batch.samples) == 1 or not batch.divisible:
                raise
            if buffers is not None:
                buffers.put_back()
            return False
        finally:
            self._pass = None  # whatever makes the batches may run the model too
        return True

    def _late(self, norm: SkippedNorm) -> Callable[..., None]:
        late = replace(norm, reason="not called by the first sample, only by later ones")

        def hook(*_: Any) -> None:
            skipped = self.progress.capture.skipped
            if late not in skipped:
                skipped.append(late)

        return hook

    def _with_own_input(self, name: str, hook: ForwardHook) -> tuple[ForwardPreHook, ForwardHook]:
        """Return a hook that keeps a copy of a norm's input, and another that runs ``hook`` with it."""

        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = input_of(args, kwargs)
            if x is not None and self._pass is not None:
                self._pass.inputs.setdefault((name, threading.get_ident()), []).append(x.detach().clone())

        def with_it(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if self._pass is not None and (inputs := self._pass.inputs.get((name, threading.get_ident()))):
                args, kwargs = with_input(args, kwargs, inputs.pop())
            hook(module, args, kwargs, output)

        return keep, with_it

    def _hook(self, site: NormSite) -> ForwardHook:
        add = self._adder(site)

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            if (x := input_of(args, kwargs)) is None:
                raise DataError(f"The norm {site.name} was called without a tensor.")
            if not self._functions.called_by_norm:
                add(module, x, output)

        return hook

    def _adder(self, site: NormSite) -> Adder:
        """Return a function that adds the pairs of one call of a site: of its module, its input and its output."""
        by_gamma, sample = self.summing.by_gamma, self.summing.sample

        def add(module: nn.Module, x: Tensor, output: Tensor) -> None:
            if self._pass is not None:
                with at_hand(module, (x,)) as ((brought,), _):
                    add_whole(self._pass, module, brought, whole(output, like=x))

        def add_whole(under_way: _Pass, module: nn.Module, x: Tensor, output: Tensor) -> None:
            kind, of_one_sample = self.report.kinds[site.name], self.report.shapes[site.name]
            if kind.channels(module, x) != site.channels:
                raise DataError(
                    f"The norm {site.name} (input {tuple(x.shape)}) has {kind.channels(module, x)} channels, but "
                    f"{site.channels} with the first sample; sums are of one number of channels. Capture inputs of one "
                    "size at a time."
                )
            samples, mask = under_way.batch.samples, under_way.batch.valid_at(site.path)
            axis = self._axis_of_samples(site.name, of_one_sample, x.shape, len(samples), mask)
            valid = None
            if mask is not None and under_way.padded:
                if (packed := self._packed_axis(site, kind, module, x, axis, mask)) is not None:
                    x, output, axis = _padded(x, packed, mask), _padded(output, packed, mask), 0
                valid = self._valid_tokens(site, kind, module, x, axis, mask)
                if valid is not None and kind.heads and kind.groups:
                    valid = valid.repeat_interleave(kind.groups(module))
            rows = kind.rows(module, x.detach(), axis or 0)
            first = under_way.tokens[site.name]
            under_way.tokens[site.name] += len(rows) // (1 if axis is None else len(samples))
            if under_way.calls[site.name] < under_way.summed[site.name]:
                under_way.calls[site.name] += 1
                return
            if self.summing.verify:
                check(kind, site.name, module, x, output, batch_axis=axis or 0, valid=valid)
            if rows.device.type == "mps":  # which has no float64 to sum in
                rows, valid = rows.cpu(), None if valid is None else valid.cpu()
            places = self._places(site.name, x.shape, axis, valid, rows.device)
            if places is not None and self.summing.skip:
                behind = places.of_tokens >= self.summing.skip
                valid = behind if valid is None else behind & valid
            if site.pointwise and site.name not in self._pointwise:
                self._pointwise[site.name] = kind.pointwise(module)
            lines, stats = kind.lines(module, rows, kind.eps_of(module, x.dtype)), self._stats(site, rows.device)
            if self._keeper.running and axis is not None and kind.groups is None:
                sizes = [x.shape[place] for place in token_axes(x, kind.axes(module, x.ndim), axis)]
                self._keeper.add(site, rows, lines, sizes, valid)
            under_way.summing_at = site.name
            drawn = stats.update(
                rows,
                lines,
                samples,
                first,
                kind.gamma(module, site.channels) if by_gamma else None,
                groups=None if kind.groups is None else kind.groups(module),
                valid=valid,
                sample=sample,
                divided=axis is not None,
                positions=places,
            )
            under_way.calls[site.name] += 1
            if axis is None:
                under_way.inseparable = site.name
            if self.summing.observe is not None:
                y = lines.y(rows).float()
                self.summing.observe(site, *((rows, y) if drawn is None else (rows[drawn], y[drawn])))
            under_way.summing_at = ""

        return add

    def _stats(self, site: NormSite, device: torch.device) -> PairStats:
        """Return the sums of a site in the part of the data under way, on a device."""
        stats = self._part.stats.get(site.name)
        if stats is None:
            stats = PairStats.empty(
                site.channels,
                self.summing.seed,
                device,
                grouped=site.grouped,
                by_gamma=self.summing.by_gamma,
                per_channel=self.summing.per_channel or site.channels_differ,
                diagonal=self.summing.diagonal and site.has_diagonal,
            )
        elif stats.channel_sums.device != device:  # read from a checkpoint
            stats = stats.to(device)
        self._part.stats[site.name] = stats
        return stats

    def _axis_of_samples(
        self, name: str, of_one_sample: torch.Size, shape: torch.Size, n_samples: int, mask: Tensor | None
    ) -> int | None:
        """Find the axis of samples; None where there is none, or it cannot be identified.

        Tokens of a norm without it belong to no sample and no fold, once for each batch.
        """
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

    def _packed_axis(
        self, site: NormSite, kind: NormKind, module: nn.Module, x: Tensor, batch_axis: int | None, valid: Tensor
    ) -> int | None:
        """Return the axis of the data of all samples, where the network took the padding out; None elsewhere."""
        axes = token_axes(x, kind.axes(module, x.ndim))
        sizes = [x.shape[axis] for axis in axes]
        in_place = (
            valid.numel() in sizes or sizes == [len(valid)] or (batch_axis is not None and valid.shape[1] in sizes)
        )
        channels_last = max(axes, default=0) < len(axes)
        if in_place or not channels_last or site.name in self.report.of_weights or site.name in self._serving_all:
            return None
        n_data = int(valid.sum())
        packed = [axis for axis in axes if x.shape[axis] == n_data and (batch_axis in (None, axis) or len(valid) == 1)]
        return packed[0] if len(packed) == 1 or (packed and len(valid) == 1) else None

    def _places(
        self, name: str, shape: torch.Size, batch_axis: int | None, valid: Tensor | None, device: torch.device
    ) -> Positions | None:
        """Return the positions of the tokens in their samples; None where no axis numbers them."""
        layout, n_samples = self._layouts[name], len(self._pass.batch.samples) if self._pass else 0
        if not isinstance(layout, str) and len(shape) == len(self.report.shapes[name]):
            axes, place = layout
            sizes = tuple(shape[axis] for axis in axes)
            if sizes[0] == n_samples and batch_axis in ((0, axes[0]) if n_samples == 1 else axes[:1]):
                of_tokens = positions_along(sizes, place, device, valid)
                return Positions(of_tokens, self.summing.skip, math.prod(sizes) // max(sizes[place], 1))
        if self.summing.skip:
            refuse_skipping([(name, f"its input {tuple(shape)} has no axes of samples and of positions")])
        return None

    def _valid_tokens(
        self, site: NormSite, kind: NormKind, module: nn.Module, x: Tensor, batch_axis: int | None, valid: Tensor
    ) -> Tensor | None:
        """Return the mask of rows that are data, of a mask of positions: bool ``(tokens,)``, or None for all."""
        if site.name in self.report.of_weights or site.name in self._serving_all:
            return None
        valid = valid.to(x.device)
        axes = [] if kind.over_positions else token_axes(x, kind.axes(module, x.ndim), batch_axis or 0)
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
        positions = self._position_axes.get(site.name)
        if batch_axis is None or positions not in along:
            why = "no axis is as long as the mask" if not along else "several axes are as long as the mask"
            why = "no axis counts the samples" if along and batch_axis is None else why
            remedy = f", or say it in the valid_within of a normscope.Batch: {{{site.path!r}: …}}, None for data alone"
            if kind.groups:
                why, remedy = "its tokens extend over all", ""
            raise DataError(
                f"At the norm {site.name} (input {tuple(x.shape)}) it cannot be told which tokens are padding: {why}, "
                f"of {valid.shape[1]} positions. Pass samples of one length, or one at a time, without padding "
                f"(--batch-size 1){remedy}."
            )
        shape = [size if axis in (batch_axis, positions) else 1 for axis, size in zip(axes, sizes, strict=True)]
        return valid.view(shape).expand(sizes).flatten()


def _padded(x: Tensor, packed: int, mask: Tensor) -> Tensor:
    """Return tokens of a packed axis at their positions, ``(samples, positions, …)``, with zeros for padding."""
    x, mask = x.movedim(packed, 0), mask.to(x.device)
    padded = x.new_zeros(*mask.shape, *x.shape[1:])
    padded[mask] = x
    return padded
