"""Drift: how far a network's outputs move when something else takes the place of its norms."""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from normscope.batches import Batch, Sample, as_batches
from normscope.drifts import END, OUTPUT, Drift, DriftReport
from normscope.errors import DataError, ModelError, UsageError
from normscope.outputs import Outputs
from normscope.state import cuda_devices, left_as_found, run
from normscope.swaps.arrange import SiteLayout, output_by_sample
from normscope.swaps.distances import Distances, distances
from normscope.swaps.replace import Swap, module_at, uncompiled
from normscope.swaps.tally import Configuration, Tally

Ends = Callable[[], Iterable[tuple[Sequence[Sample], Tensor]]]
Progress = Callable[[int], object]
_Place = tuple[str, str]  # where it was measured, and the part of the data
_ANY = Outputs()


def drift(
    model: nn.Module,
    batches: Iterable[Any],
    replacements: Mapping[str, nn.Module],
    *,
    outputs: Outputs = _ANY,
    ends: Ends | None = None,
    func: str = "",
    init: str = "",
    one_at_a_time: bool = True,
    cumulative: bool = True,
    about: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> DriftReport:
    """Measure how far the outputs move with all sites swapped, with each alone, and with more and more of them.

    Each batch runs through the network as it is, and again for each of these, from the same state of torch's random
    numbers. The cumulative order is by the median that each site alone moves the output, the least first: a greedy
    search that tries every remaining site at each step would take n²/2 passes for n sites in place of 2n, and is not
    made. A network under ``torch.compile`` runs uncompiled. It is left as found, also after an exception.

    Args:
        model: the network, with its norms.
        batches: held-out inputs, as :func:`normscope.capture` takes them; each is taken while the network is as it
            was. A few numbers per input are kept. Gone through twice where ``cumulative``.
        replacements: what takes the place of which norm, by module path, as
            :func:`normscope.swaps.replace.replacements` makes it; all sites that are swapped at once.
        outputs: how to read what the network returns, and what it is.
        ends: yields the samples and latents ``(samples, …)`` at the end of trajectories, by the network as it is at
            the moment of each; they are compared with all sites swapped.
        func: what takes the norms' place, and
        init: with which start values: both stand in every row.
        one_at_a_time: whether each site is also swapped alone.
        cumulative: whether sites are also swapped one after the other.
        about: what the report says of itself: ``model``, ``weights``, ``data``.
        progress: called with a number of samples after each of the :func:`passes` that they run through.

    Returns:
        The report. Where batches name their ``part``, the output with all sites swapped is there for each part, too.

    Raises:
        DataError: if there is no batch, or if batches that are needed twice can be iterated only once.
        ModelError: if the network raises, has no such modules, or does not call what was swapped in.
        UsageError: if there is nothing to swap, or if a cumulative order is asked for without each site alone.

    >>> from normscope.swaps.pointwise import DyT
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    >>> report = drift(model, [torch.randn(16, 4)], {"1": DyT(8)}, func="dyt", init="paper")
    >>> report.all.inputs, 0 < report.all.relative_l2.p50 < 2
    (16, True)
    """
    if not replacements:
        raise UsageError("There is nothing to swap: the replacements name no module.")
    if cumulative and not one_at_a_time:
        raise UsageError("The cumulative order follows from each site alone: leave one_at_a_time on, or both off.")
    sites = list(replacements)
    if cumulative and len(sites) > 2 and iter(batches) is batches:
        raise DataError(
            "The batches can be iterated only once, and the cumulative order is known after the first time; pass a "
            "list of batches, or cumulative=False."
        )
    everything = Configuration("all", None, tuple(sites))
    alone = [Configuration("one", path, (path,)) for path in sites] if one_at_a_time else []
    passes = _Passes(uncompiled(model), batches, replacements, outputs, progress)
    found = passes.compared([everything, *alone])
    if ends is not None:
        found[everything][END, ""] = passes.compared_ends(ends)
    rows = _rows(found, func, init, sites)
    report = DriftReport(func, init, sites, rows, dict(about or {}))
    return replace(report, rows=[*rows, *_cumulative(passes, report)]) if cumulative else report


def passes(sites: int, *, one_at_a_time: bool = True, cumulative: bool = True) -> int:
    """Return how many times :func:`drift` runs each sample, trajectories aside: what a progress bar ends at.

    >>> passes(25), passes(25, one_at_a_time=False, cumulative=False)
    (51, 2)
    """
    more = sites - 2 + 1 if cumulative and sites > 2 else 0
    return 2 + (sites if one_at_a_time else 0) + more


def _rows(
    found: Mapping[Configuration, Mapping[_Place, Tally]], func: str, init: str, sites: Sequence[str]
) -> list[Drift]:
    order = {at: number for number, at in enumerate([OUTPUT, *sites, END])}
    return [
        tally.row(func, init, done, at, part)
        for done, places in found.items()
        for (at, part), tally in sorted(places.items(), key=lambda place: order[place[0][0]])
    ]


def _cumulative(passes: _Passes, report: DriftReport) -> list[Drift]:
    """Swap one site after the other; what the first alone and all together do is known already."""
    order = report.least_harmful(len(report.sites))
    first = next(row for row in report.by_site if row.site == order[0])
    last = replace(report.all, site=order[-1], frames=None)
    between = [Configuration("cumulative", order[number - 1], tuple(order[:number])) for number in range(2, len(order))]
    found = _rows(passes.compared(between), report.func, report.init, report.sites) if between else []
    known = [first, *found, last] if len(order) > 1 else [first]
    return [replace(row, swapped="cumulative") for row in known]


@dataclass(frozen=True)
class _Seen:
    """What one forward pass gave: the output, and what each site gave at each of its calls."""

    output: Tensor
    at_sites: Mapping[str, Sequence[Tensor]]


class _Passes:
    """The forward passes of the network with and without its norms."""

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        modules: Mapping[str, nn.Module],
        outputs: Outputs,
        progress: Progress | None,
    ) -> None:
        self.model, self.batches, self.modules = model, batches, modules
        self.outputs, self.progress, self.devices = outputs, progress, cuda_devices(model)
        self.layouts: dict[tuple[str, int], SiteLayout] = {}

    def compared(self, wanted: Sequence[Configuration]) -> dict[Configuration, dict[_Place, Tally]]:
        """Run every batch as it is and with each of the swaps, and compare."""
        found: dict[Configuration, dict[_Place, Tally]] = {done: defaultdict(Tally) for done in wanted}
        called: set[str] = set()
        with left_as_found(self.model):
            for batch in as_batches(self.batches):
                self._learn_layouts(batch)
                original = self._run(batch, self.modules)
                self._advance(batch)
                called.update(path for path, given in original.at_sites.items() if given)
                for done in wanted:
                    with self._swapped(done.paths):
                        swapped = self._run(batch, done.paths)
                    for path in done.paths:
                        _check_called(path, original, swapped)
                    self._compare(batch, done, original, swapped, found[done])
                    self._advance(batch)
        if not any(found[done] for done in wanted):
            raise DataError("There is no batch to run the model on.")
        if idle := [path for path in self.modules if path not in called]:
            raise ModelError(f"The network does not call {idle[0]!r} on these inputs, so that a swap there is none.")
        return found

    def compared_ends(self, ends: Ends) -> Tally:
        """Compare the ends of trajectories, some at a time: each comes while the network is as it has to be."""
        tally = Tally()
        with left_as_found(self.model), contextlib.ExitStack() as closing:
            original = iter(ends())
            with self._swapped(tuple(self.modules)):
                swapped = iter(ends())
            for running in (original, swapped):
                if isinstance(running, Generator):  # what it holds, a grad mode perhaps, must not outlive this
                    closing.callback(running.close)
            for samples, latents in original:
                with self._swapped(tuple(self.modules)):
                    _, other = next(swapped)
                whole = (len(samples), 1, -1)
                tally.add(distances(latents.reshape(whole), other.reshape(whole)))
        return tally

    @contextlib.contextmanager
    def _swapped(self, paths: Sequence[str]) -> Iterator[None]:
        with Swap(self.model, {path: self.modules[path] for path in paths}):
            yield

    def _advance(self, batch: Batch) -> None:
        if self.progress is not None:
            self.progress(len(batch.samples))

    def _run(self, batch: Batch, paths: Iterable[str]) -> _Seen:
        """Run one batch, of which the network may change a copy, and watch the modules at some paths."""
        lent = replace(batch, args=copy.deepcopy(batch.args), kwargs=copy.deepcopy(batch.kwargs))
        given: dict[str, list[Tensor]] = {path: [] for path in paths}
        with contextlib.ExitStack() as hooks, torch.random.fork_rng(self.devices):
            for path, kept in given.items():
                handle = module_at(self.model, path).register_forward_hook(_keeping(kept))
                hooks.callback(handle.remove)
            output = self.outputs.read(run(self.model, lent), batch)
        return _Seen(output, given)

    def _compare(
        self, batch: Batch, done: Configuration, original: _Seen, swapped: _Seen, places: dict[_Place, Tally]
    ) -> None:
        whole = done.swapped == "all"
        # Distances of single frames are many numbers per input: they are kept where all sites are swapped.
        kind = self.outputs.kind if whole or self.outputs.kind != "frames" else "tensor"
        _check_shape("The output", original.output, swapped.output)
        (own, valid), (other, _) = (
            output_by_sample(seen.output, batch, self.outputs.kind) for seen in (original, swapped)
        )
        found = distances(own, other, valid, kind)
        places[OUTPUT, ""].add(found)
        if whole and batch.part:
            places[OUTPUT, batch.part].add(found)
        for path in done.paths if whole else ():
            if original.at_sites[path]:
                places[path, ""].add(self._at_site(path, batch, original.at_sites[path], swapped.at_sites[path]))

    def _at_site(self, path: str, batch: Batch, original: Sequence[Tensor], swapped: Sequence[Tensor]) -> Distances:
        """Compare what a site gave, over all of its calls."""
        if len(original) != len(swapped):
            raise ModelError(
                f"The network calls {path!r} {len(original)} times, but {len(swapped)} times once swapped."
            )
        pairs = []
        for call, (own, other) in enumerate(zip(original, swapped, strict=True)):
            _check_shape(f"What {path!r} gives", own, other)
            layout = self.layouts.get((path, call), SiteLayout(path, None))
            pairs.append([layout.by_sample(one, batch) for one in (own, other)])
        if len(pairs) == 1:
            (own, valid), (other, _) = pairs[0]
            return distances(own, other, valid)
        own, other = (torch.cat([_flat(*pair[side]) for pair in pairs], dim=1)[:, None] for side in range(2))
        return distances(own, other)

    def _learn_layouts(self, batch: Batch) -> None:
        """Find out once how each site's output lies: with one sample alone the axis of samples is shorter."""
        if self.layouts or len(batch.samples) == 1:
            return
        for path, given in self._run(batch.first_sample(), self.modules).at_sites.items():
            for call, one in enumerate(given):
                self.layouts[path, call] = SiteLayout(path, one.shape)


def _keeping(kept: list[Tensor]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            kept.append(output.detach().clone())  # the network may go on to change it in place

    return hook


def _flat(arranged: Tensor, valid: Tensor | None) -> Tensor:
    """Return all that belongs to a sample in one row, with zeros in place of padding."""
    if valid is not None:
        arranged = arranged.where(valid[:, :, None].to(arranged.device), 0.0)
    return arranged.flatten(1)


def _check_called(path: str, original: _Seen, swapped: _Seen) -> None:
    if original.at_sites[path] and not swapped.at_sites[path]:
        raise ModelError(
            f"The network calls the norm {path!r}, but not the module that was put in its place: it reaches the norm "
            "in another way than by its path, and nothing would be swapped there. Leave it out with sites."
        )


def _check_shape(what: str, original: Tensor, swapped: Tensor) -> None:
    if original.shape != swapped.shape:
        raise ModelError(
            f"{what} is {tuple(original.shape)}, and {tuple(swapped.shape)} once norms are swapped: there is nothing "
            "to compare."
        )
