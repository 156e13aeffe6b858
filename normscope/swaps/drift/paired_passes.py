"""Forward passes of a network with and without its norms, and the distances between their outputs over all ranks."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import DataError, MemoryEndedError, ModelError
from normscope.inputs.batch import Batch, Halving, Sample
from normscope.inputs.chunks import LeftOut, RankSampler, first_and_chunks
from normscope.inputs.loaded_model import Outputs
from normscope.pairs.ranks import ALONE, Ranks, check_alike, merge_left_out
from normscope.runtime.network import SavedBuffers, cuda_devices, memory_for, restoring, run
from normscope.runtime.spread import whole
from normscope.swaps.distances import Distances, SiteLayout, distances, output_by_sample
from normscope.swaps.replace import Swap, outputs_at
from normscope.swaps.reports import END, OUTPUT, Drift, Quantiles, Swapped

Ends = Callable[..., Iterable[tuple[Sequence[Sample], Tensor]]]
_FOR_ALL = ("left_out", "frames")  # columns of distances that do not have one element per compared sample
_Seen = tuple[Tensor, Mapping[str, Sequence[Tensor]]]  # outputs of the network, and of each site at each of its calls
_Key = tuple[int, str, str]  # number of the configuration, where it was measured, and the part of the data
_Columns = dict[str, Tensor]  # by name in Distances


@dataclass(frozen=True)
class Configuration:
    """Sites that are swapped together.

    ``swapped`` and ``site`` are as in :class:`normscope.swaps.reports.Drift`; ``paths`` are all swapped sites.
    """

    swapped: Swapped
    site: str | None
    paths: tuple[str, ...]


_Entry = tuple[Configuration, str, str, Distances]  # the swap, where it was measured, and the part of the data


@dataclass
class Tallies:
    """Distances of several configurations, batch after batch.

    Results do not depend on how ranks divide the batches: quantiles ignore order, and sums use ``math.fsum``.
    """

    configurations: Sequence[Configuration]  # in the order of their rows
    _batches: dict[_Key, list[tuple[tuple[int, int], _Columns]]] = field(default_factory=dict)  # with their numbers

    def add(self, configuration: Configuration, at: str, part: str, moved: Distances, number: tuple[int, int]) -> None:
        """Add the distances of a batch; ``number`` is that of its chunk among all ranks, and of the batch in it."""
        columns = {
            name: values if name in _FOR_ALL else values[~moved.left_out]
            for name, values in vars(moved).items()
            if values is not None
        }
        key = self.configurations.index(configuration), at, part
        self._batches.setdefault(key, []).append((number, columns))

    def gathered(self, ranks: Ranks) -> Tallies:
        """Merge the tallies of all ranks; every rank calls it, also one without a batch."""
        if ranks.size == 1:
            return self
        mine = [
            (key, self._first(key), {name: values.tolist() for name, values in self._columns(key).items()})
            for key in self._batches
        ]
        merged = Tallies(self.configurations)
        for key, number, lists in itertools.chain.from_iterable(ranks.gather(mine)):
            columns = {name: torch.tensor(values, dtype=torch.float64) for name, values in lists.items()}
            merged._batches.setdefault(tuple(key), []).append((tuple(number), columns))
        return merged

    def rows(self, sites: Sequence[str]) -> list[Drift]:
        """Return quantiles and shares: by configuration, by place in the order of the sites, by part as they came."""
        order = {at: number for number, at in enumerate([OUTPUT, *sites, END])}
        keys = sorted(self._batches, key=lambda key: (key[0], order[key[1]], key[2] != "", self._first(key)))
        return [self._row(*key) for key in keys]

    def _first(self, key: _Key) -> tuple[int, int]:
        return min(number for number, _ in self._batches[key])

    def _columns(self, key: _Key) -> _Columns:
        batches = [columns for _, columns in self._batches[key]]
        return {name: torch.cat([columns[name] for columns in batches]).double() for name in batches[0]}

    def _row(self, number: int, at: str, part: str) -> Drift:
        columns = {name: values.tolist() for name, values in self._columns((number, at, part)).items()}
        answers = math.fsum(columns["answers"]) if "answers" in columns else None
        optional: dict[str, Any] = {}
        if answers:
            shares = [name for name in ("top1", "top5", "top5_overlap") if name in columns]
            optional = {name: math.fsum(columns[name]) / answers for name in shares}
            optional["kl"] = Quantiles.of(columns["kl"])
        if "frames" in columns:
            optional["frames"] = Quantiles.of(columns["frames"])
        configuration = self.configurations[number]
        return Drift(
            *("", ""),  # of the curve and the start values, which drift() adds
            configuration.swapped,
            configuration.site,
            len(configuration.paths),
            at,
            part,
            inputs=len(columns["relative_l2"]),
            nonfinite=int(sum(columns["nonfinite"])),
            left_out=int(sum(columns["left_out"])),
            relative_l2=Quantiles.of(columns["relative_l2"]),
            cosine=Quantiles.of(columns["cosine"]),
            answers=None if answers is None else int(answers),
            **optional,
        )


class KeptEnds:
    """Ends of trajectories for several drifts of one network, which run the unswapped network once.

    >>> ends = KeptEnds(lambda: iter([((), torch.zeros(2))]))
    >>> list(ends.original()), list(ends.original())
    ([((), tensor([0., 0.]))], [((), tensor([0., 0.]))])
    """

    def __init__(self, ends: Ends) -> None:
        self._ends = ends
        self._kept: list[tuple[Sequence[Sample], Tensor]] | None = None

    def __call__(self, *sampler: RankSampler) -> Iterable[tuple[Sequence[Sample], Tensor]]:
        """Run the network as it is at the moment of each end."""
        return self._ends(*sampler)

    def original(self, *sampler: RankSampler) -> Iterator[tuple[Sequence[Sample], Tensor]]:
        """Ends of the unswapped network, kept from the first time."""
        if self._kept is not None:
            yield from self._kept
            return
        kept = []
        for samples, latents in self._ends(*sampler):
            kept.append((samples, latents.clone()))
            yield samples, latents
        self._kept = kept


@dataclass
class PairedPasses:
    """A network with and without its norms, over the inputs that ranks divide among them."""

    model: nn.Module
    batches: Iterable[Any]
    modules: Mapping[str, nn.Module]  # replacements by path
    outputs: Outputs
    ranks: Ranks = ALONE
    advance: Callable[[int], object] = lambda samples: None  # called with the number of samples of each pass
    settings: Mapping[str, Any] = field(default_factory=dict)  # values that must agree on all ranks
    refitted: Mapping[str, Tensor] | None = None  # values of other parameters while sites are swapped, by name
    chosen: Container[tuple[str, int]] | None = None  # data set and index, for swaps of some sites; None for all

    def __post_init__(self) -> None:
        self._sampler = RankSampler(self.ranks.rank, self.ranks.size)
        self._devices = cuda_devices(self.model)
        self._layouts: dict[tuple[str, int], SiteLayout] = {}
        self._called: set[str] = set()
        self._halving = Halving("compared")
        self._buffers: SavedBuffers  # of the model, during compared()

    def compared(self, configurations: Sequence[Configuration], ends: Ends | None = None) -> list[Drift]:
        """Run this rank's batches as they are and with each of the swaps; ends are compared with all sites swapped.

        Returns:
            Distances over all ranks, by swap, by place in the order of the modules, and by part of the data; without
            names of curve and init.
        """
        tallies, left_out = Tallies(configurations), LeftOut()
        complete, partial = ([c for c in configurations if (c.swapped == "all") is whole] for whole in (True, False))
        with restoring(self.model) as self._buffers:
            first, chunks = first_and_chunks(self.batches, self._sampler)
            if first is None:
                raise DataError("There is no batch to run the model on.")
            check_alike(self.ranks, {**self.settings, "first sample": list(astuple(first.samples[0]))})
            if complete and not self._layouts:  # the axis of samples is shorter for a single sample
                for path, outputs in self._run(first, self.modules)[1].items():
                    self._layouts |= {(path, n): SiteLayout(path, output.shape) for n, output in enumerate(outputs)}
            # Chunks are numbered among those of all ranks.
            for number, chunk in zip(itertools.count(self.ranks.rank, self.ranks.size), chunks, strict=False):
                for number_in_chunk, batch in enumerate(chunk.batches):
                    for samples, swaps in ((batch, complete), (self._few(batch), partial)):
                        for entry in self._in_pieces(samples, swaps) if samples and swaps else ():
                            tallies.add(*entry, (number, number_in_chunk))
                left_out.add(chunk)
            if ends is not None:
                self._compare_ends(ends, tallies)
        if isinstance(getattr(self.batches, "left_out", None), LeftOut):
            self.batches.left_out = merge_left_out(left_out, self.ranks)  # type: ignore[attr-defined]
        rows = tallies.gathered(self.ranks).rows(list(self.modules))
        if not any(row.at == OUTPUT for row in rows):
            raise DataError("There is no batch to run the model on.")
        called = {path for paths in self.ranks.gather(sorted(self._called)) for path in paths}
        if idle := [path for path in self.modules if path not in called]:
            raise ModelError(f"The network does not call {idle[0]!r} on these inputs, so swapping it has no effect.")
        return rows

    def _few(self, batch: Batch) -> Batch | None:
        """Return the chosen samples of a batch; the whole batch if it cannot be divided."""
        if self.chosen is None:
            return batch
        rows = [row for row, sample in enumerate(batch.samples) if (sample.data, sample.index) in self.chosen]
        if not rows:
            return None
        return batch if len(rows) == len(batch.samples) or not batch.divisible else batch.take(rows)

    def _in_pieces(self, batch: Batch, configurations: Sequence[Configuration]) -> Iterator[_Entry]:
        """Compare a batch; in halves, and halves of them, where memory ends."""
        for piece, _ in self._halving.pieces(batch, None):
            try:
                with memory_for("outputs were compared"):
                    entries = list(self._with_each(piece, configurations))
            except MemoryEndedError:
                if len(piece.samples) == 1 or not piece.divisible:
                    raise
                self._halving.halve(piece)
            else:
                yield from entries

    def _with_each(self, batch: Batch, configurations: Sequence[Configuration]) -> Iterator[_Entry]:
        """Compare a batch with each of the swaps."""
        original = self._run(batch, self.modules)
        self.advance(len(batch.samples))
        self._called.update(path for path, outputs in original[1].items() if outputs)
        for configuration in configurations:
            with self.swapped(configuration.paths):
                swapped = self._run(batch, configuration.paths)
            for path in configuration.paths:
                if original[1][path] and not swapped[1][path]:
                    raise ModelError(
                        f"The network calls the norm {path!r}, but not the module in its place, as it does not reach "
                        "the norm by its path; exclude it with layers."
                    )
            yield from self._distances(batch, configuration, original, swapped)
            self.advance(len(batch.samples))

    def _compare_ends(self, ends: Ends, tallies: Tallies) -> None:
        """Compare the ends of trajectories, each computed while norms or swaps are in place."""
        everything = next(c for c in tallies.configurations if c.swapped == "all")
        sampler = () if self.ranks.size == 1 else (self._sampler,)
        with contextlib.ExitStack() as closing:
            self._buffers.restore()
            original = iter((ends.original if isinstance(ends, KeptEnds) else ends)(*sampler))
            with self.swapped(everything.paths):
                self._buffers.restore()
                swapped = iter(ends(*sampler))
            for running in (original, swapped):
                if isinstance(running, Generator):  # its context, such as a grad mode, must not outlive this one
                    closing.callback(running.close)
            for number in itertools.count(self.ranks.rank, self.ranks.size):
                self._buffers.restore()
                end = next(original, None)
                if end is None:
                    break
                with self.swapped(everything.paths):
                    self._buffers.restore()
                    _, swapped_latents = next(swapped)
                samples, latents = end
                shape = (len(samples), 1, -1)
                moved = distances(latents.reshape(shape), swapped_latents.reshape(shape))
                tallies.add(everything, END, "", moved, (number, 0))

    @contextlib.contextmanager
    def swapped(self, paths: Sequence[str]) -> Iterator[None]:
        """Swap some sites in the block."""
        with Swap(self.model, {path: self.modules[path] for path in paths}, self.refitted):
            yield

    def _run(self, batch: Batch, paths: Iterable[str]) -> _Seen:
        """Run one batch from the original buffers; return the outputs of the network and of modules at some paths."""
        self._buffers.restore()
        with outputs_at(self.model, paths) as at_sites, torch.random.fork_rng(self._devices):
            output = whole(self.outputs.read(run(self.model, batch), batch))
        return output.clone(), at_sites  # it may be a buffer, which the next pass restores

    def _distances(
        self, batch: Batch, configuration: Configuration, original: _Seen, swapped: _Seen
    ) -> Iterator[_Entry]:
        complete = configuration.swapped == "all"
        # Frames are many numbers per input, which are kept only for all sites.
        kind = self.outputs.kind if complete or self.outputs.kind != "frames" else "tensor"
        _check_shape("The output", original[0], swapped[0])
        (before, valid), (after, _) = (
            output_by_sample(output, batch, self.outputs.kind) for output, _ in (original, swapped)
        )
        moved = distances(before, after, valid, kind)
        yield configuration, OUTPUT, "", moved
        if complete and batch.part:
            yield configuration, OUTPUT, batch.part, moved
        for path in configuration.paths if complete else ():
            if original[1][path]:
                yield configuration, path, "", self._at_site(path, batch, original[1][path], swapped[1][path])

    def _at_site(self, path: str, batch: Batch, original: Sequence[Tensor], swapped: Sequence[Tensor]) -> Distances:
        """Compare the outputs of a site, over all of its calls."""
        if len(original) != len(swapped):
            raise ModelError(
                f"The network calls {path!r} {len(original)} times, but {len(swapped)} times once swapped."
            )
        pairs = []
        for call, (before, after) in enumerate(zip(original, swapped, strict=True)):
            _check_shape(f"The output of {path!r}", before, after)
            layout = self._layouts.get((path, call), SiteLayout(path, None))
            pairs.append([layout.by_sample(output, batch) for output in (before, after)])
        if len(pairs) == 1:
            (before, valid), (after, _) = pairs[0]
            return distances(before, after, valid)

        def flat(arranged: Tensor, valid: Tensor | None) -> Tensor:
            """Return one row for each sample, with zeros in place of padding."""
            padded = arranged if valid is None else arranged.where(valid[:, :, None].to(arranged.device), 0.0)
            return padded.flatten(1)

        before, after = (torch.cat([flat(*pair[side]) for pair in pairs], dim=1)[:, None] for side in range(2))
        return distances(before, after)


def _check_shape(subject: str, original: Tensor, swapped: Tensor) -> None:
    if original.shape != swapped.shape:
        raise ModelError(f"{subject} is {tuple(original.shape)}, but {tuple(swapped.shape)} once norms are swapped.")
