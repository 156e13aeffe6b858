"""Forward passes of a network with and without its norms, and the distances between their outputs."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import DataError, MemoryEndedError, ModelError, count
from normscope.inputs.batch import Batch, Halving, Sample
from normscope.inputs.chunks import LeftOut, Share, shared
from normscope.inputs.loaded_model import Outputs
from normscope.pairs.ranks import ALONE, Ranks, agree_on_batches, check_alike, merge_left_out
from normscope.runtime.network import KeptBuffers, cuda_devices, left_as_found, memory_ended, run
from normscope.swaps.distances import Configuration, Distances, SiteLayout, Tallies, distances, output_by_sample
from normscope.swaps.replace import Holders, Swap, module_at
from normscope.swaps.reports import END, OUTPUT

Ends = Callable[..., Iterable[tuple[Sequence[Sample], Tensor]]]
_Entry = tuple[Configuration, str, str, Distances]  # the swap, where it was measured, and the part of the data
_Seen = tuple[Tensor, Mapping[str, Sequence[Tensor]]]  # outputs of the network, and of each site at each of its calls


_MOST_KEPT = 32 * 2**20  # bytes of ends; of more, all are walked again


class KeptEnds:
    """Ends of trajectories for several drifts of one network: those of the network as it is are walked once, and kept.

    >>> ends = KeptEnds(lambda: iter([((), torch.zeros(2))]))
    >>> list(ends.original()), list(ends.original())
    ([((), tensor([0., 0.]))], [((), tensor([0., 0.]))])
    """

    def __init__(self, ends: Ends) -> None:
        """Keep how they are walked; the network, with its norms, has to stay as it is from drift to drift."""
        self._walk = ends
        self._kept: list[tuple[Sequence[Sample], Tensor]] | None = None

    def __call__(self, *share: Share) -> Iterable[tuple[Sequence[Sample], Tensor]]:
        """Walk to them, with the network as it is at the moment of each."""
        return self._walk(*share)

    def original(self, *share: Share) -> Iterator[tuple[Sequence[Sample], Tensor]]:
        """Ends of the unswapped network, cached after the first walk."""
        if self._kept is not None:
            yield from self._kept
            return
        seen, nbytes = [], 0
        for samples, latents in self._walk(*share):
            nbytes += latents.nbytes
            if nbytes <= _MOST_KEPT:
                seen.append((samples, latents.clone()))
            yield samples, latents
        if nbytes <= _MOST_KEPT:
            self._kept = seen


class PairedPasses:
    """A network with and without its norms, over the inputs that ranks divide among them."""

    _buffers: KeptBuffers  # of the model, while it is lent

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        modules: Mapping[str, nn.Module],
        outputs: Outputs,
        ranks: Ranks = ALONE,
        advance: Callable[[int], object] = lambda samples: None,
        asked: Mapping[str, Any] | None = None,
        refitted: Mapping[str, Tensor] | None = None,
        chosen: Container[tuple[str, int]] | None = None,
    ) -> None:
        """Prepare the passes of :func:`normscope.swaps.drift.drift.drift`, whose arguments these are.

        ``advance`` is called with the number of samples of each pass, ``asked`` must agree on all ranks, and
        ``refitted`` has values of other parameters while sites are swapped, by name; ``chosen`` names the samples, by
        data set and index, for swaps of some of the sites, None for all.
        """
        self.model, self.batches, self.modules = model, batches, modules
        self.outputs, self.ranks, self.asked = outputs, ranks, asked or {}
        self._devices = cuda_devices(model)
        self._share = Share(ranks.rank, ranks.size)
        self._layouts: dict[tuple[str, int], SiteLayout] = {}
        self._called: set[str] = set()
        self._halving = Halving("compared")
        self._advance = advance
        self._holders, self._refitted, self._chosen = Holders(model), refitted, chosen

    def compared(self, configurations: Sequence[Configuration], ends: Ends | None = None) -> Tallies:
        """Run this rank's batches as they are and with each of the swaps, and compare.

        Args:
            configurations: the swaps.
            ends: of trajectories, compared with all sites swapped.

        Returns:
            The tallies of all ranks.
        """
        tallies, left_out = Tallies(configurations), LeftOut()
        rounds = [[done for done in configurations if (done.swapped == "all") is whole] for whole in (True, False)]
        agree_on_batches(self.batches, self.ranks)
        with left_as_found(self.model) as self._buffers:
            first, chunks = shared(self.batches, self._share)
            check_alike(self.ranks, {**self.asked, "first sample": list(astuple(first.samples[0]))})
            if rounds[0]:
                self._learn_layouts(first)
            for number, chunk in enumerate(chunks):
                for place, batch in enumerate(chunk.batches):
                    came = self._came(number, place)
                    some = self._some(batch)
                    for part, swaps in zip((batch, some), rounds, strict=True):
                        for done, at, of_part, moved in self._in_pieces(part, swaps) if part and swaps else ():
                            tallies.add(done, at, of_part, moved, came)
                left_out.add(chunk)
            if ends is not None:
                self._compare_ends(ends, tallies)
        if isinstance(getattr(self.batches, "left_out", None), LeftOut):
            self.batches.left_out = merge_left_out(left_out, self.ranks)  # type: ignore[attr-defined]
        tallies = tallies.gathered(self.ranks)
        if not tallies.at_output:
            raise DataError("There is no batch to run the model on.")
        called = {path for paths in self.ranks.told(sorted(self._called)) for path in paths}
        if idle := [path for path in self.modules if path not in called]:
            raise ModelError(f"The network does not call {idle[0]!r} on these inputs, so that a swap there is none.")
        return tallies

    def _came(self, chunk: int, batch: int) -> tuple[int, int]:
        """Number a chunk of this rank's share among those of all ranks."""
        return chunk * self._share.ranks + self._share.rank, batch

    def _some(self, batch: Batch) -> Batch | None:
        """Return the chosen samples of a batch; the whole batch if it cannot be divided."""
        if self._chosen is None:
            return batch
        rows = [row for row, sample in enumerate(batch.samples) if (sample.data, sample.index) in self._chosen]
        if not rows:
            return None
        return batch if len(rows) == len(batch.samples) or not batch.divisible else batch.take(rows)

    def _in_pieces(self, batch: Batch, configurations: Sequence[Configuration]) -> Iterator[_Entry]:
        """Compare a batch; in halves, and halves of them, where memory ends.

        Raises:
            MemoryEndedError: if memory ends at a single sample, or at a batch that cannot be split.
        """
        for piece, _ in self._halving.pieces(batch, None):
            rows = self._fitting(piece, configurations)
            if rows is None:
                self._halving.halve(piece)
            else:
                yield from rows

    def _fitting(self, batch: Batch, configurations: Sequence[Configuration]) -> list[_Entry] | None:
        """Compare a batch with all of the swaps; None if memory ended at any of them."""
        whole = len(batch.samples) == 1 or not batch.divisible
        passed: list[int] = []  # samples of each pass; counted out again where the batch has to run in pieces
        try:
            return list(self._with_each(batch, configurations, passed))
        except MemoryEndedError:
            if whole:
                raise
        except (RuntimeError, MemoryError) as error:
            if not memory_ended(error):
                raise
            if whole:
                raise MemoryEndedError(
                    f"To compare what the network gives of {count(len(batch.samples), 'sample')} takes more memory "
                    "than there is. Take another device, or a smaller --dtype."
                ) from error
        self._advance(-sum(passed))
        return None

    def _with_each(self, batch: Batch, configurations: Sequence[Configuration], passed: list[int]) -> Iterator[_Entry]:
        def count_pass() -> None:
            passed.append(len(batch.samples))
            self._advance(passed[-1])

        original = self._run(batch, self.modules)
        count_pass()
        self._called.update(path for path, outputs in original[1].items() if outputs)
        for done in configurations:
            with self.swapped(done.paths):
                swapped = self._run(batch, done.paths)
            for path in done.paths:
                if original[1][path] and not swapped[1][path]:
                    raise ModelError(
                        f"The network calls the norm {path!r}, but not the module that was put in its place: it "
                        "reaches the norm in another way than by its path, and nothing would be swapped there. Leave "
                        "it out with sites."
                    )
            yield from self._distances(batch, done, original, swapped)
            count_pass()

    def _compare_ends(self, ends: Ends, tallies: Tallies) -> None:
        """Compare the ends of trajectories, some at a time: each comes while the network is as it has to be."""
        everything = next(done for done in tallies.configurations if done.swapped == "all")
        share = () if self.ranks.size == 1 else (self._share,)
        as_it_is = ends.original if isinstance(ends, KeptEnds) else ends
        with contextlib.ExitStack() as closing:
            self._buffers.put_back()
            original = iter(as_it_is(*share))
            with self.swapped(everything.paths):
                self._buffers.put_back()
                swapped = iter(ends(*share))
            for running in (original, swapped):
                if isinstance(running, Generator):  # what it holds, a grad mode perhaps, must not outlive this
                    closing.callback(running.close)
            for number in itertools.count():
                self._buffers.put_back()
                end = next(original, None)
                if end is None:
                    break
                with self.swapped(everything.paths):
                    self._buffers.put_back()
                    _, other = next(swapped)
                samples, latents = end
                whole = (len(samples), 1, -1)
                moved = distances(latents.reshape(whole), other.reshape(whole))
                tallies.add(everything, END, "", moved, self._came(number, 0))

    @contextlib.contextmanager
    def swapped(self, paths: Sequence[str]) -> Iterator[None]:
        """Swap some sites meanwhile."""
        with Swap(self.model, {path: self.modules[path] for path in paths}, self._holders, self._refitted):
            yield

    def _run(self, batch: Batch, paths: Iterable[str]) -> _Seen:
        """Run one batch from the buffers that the network was found with, and watch the modules at some paths."""
        self._buffers.put_back()
        at_sites: dict[str, list[Tensor]] = {path: [] for path in paths}
        with contextlib.ExitStack() as hooks, torch.random.fork_rng(self._devices):
            for path, kept in at_sites.items():
                handle = (module := module_at(self.model, path)).register_forward_hook(_keeping(module, kept))
                hooks.callback(handle.remove)
            output = self.outputs.read(run(self.model, batch), batch)
        return output.clone(), at_sites  # it may be a buffer, which the next pass begins without

    def _distances(self, batch: Batch, done: Configuration, original: _Seen, swapped: _Seen) -> Iterator[_Entry]:
        whole = done.swapped == "all"
        # Distances of single frames are many numbers per input: they are kept where all sites are swapped.
        kind = self.outputs.kind if whole or self.outputs.kind != "frames" else "tensor"
        _check_shape("The output", original[0], swapped[0])
        (before, valid), (after, _) = (
            output_by_sample(output, batch, self.outputs.kind) for output, _ in (original, swapped)
        )
        moved = distances(before, after, valid, kind)
        yield done, OUTPUT, "", moved
        if whole and batch.part:
            yield done, OUTPUT, batch.part, moved
        for path in done.paths if whole else ():
            if original[1][path]:
                yield done, path, "", self._at_site(path, batch, original[1][path], swapped[1][path])

    def _at_site(self, path: str, batch: Batch, original: Sequence[Tensor], swapped: Sequence[Tensor]) -> Distances:
        """Compare the outputs of a site, over all of its calls."""
        if len(original) != len(swapped):
            raise ModelError(
                f"The network calls {path!r} {len(original)} times, but {len(swapped)} times once swapped."
            )
        pairs = []
        for call, (before, after) in enumerate(zip(original, swapped, strict=True)):
            _check_shape(f"What {path!r} gives", before, after)
            layout = self._layouts.get((path, call), SiteLayout(path, None))
            pairs.append([layout.by_sample(output, batch) for output in (before, after)])
        if len(pairs) == 1:
            (before, valid), (after, _) = pairs[0]
            return distances(before, after, valid)
        before, after = (torch.cat([_flat(*pair[side]) for pair in pairs], dim=1)[:, None] for side in range(2))
        return distances(before, after)

    def _learn_layouts(self, first: Batch) -> None:
        """Find the axis of samples in each site's output, once: it is shorter for a single sample."""
        if self._layouts:
            return
        for path, outputs in self._run(first, self.modules)[1].items():
            for call, output in enumerate(outputs):
                self._layouts[path, call] = SiteLayout(path, output.shape)


def _keeping(watched: nn.Module, kept: list[Tensor]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if module is watched and isinstance(output, Tensor):  # a norm shares its hooks with what replaces it
            kept.append(output.detach().clone())  # the network may go on to change it in place

    return hook


def _flat(arranged: Tensor, valid: Tensor | None) -> Tensor:
    """Return all that belongs to a sample in one row, with zeros in place of padding."""
    if valid is not None:
        arranged = arranged.where(valid[:, :, None].to(arranged.device), 0.0)
    return arranged.flatten(1)


def _check_shape(what: str, original: Tensor, swapped: Tensor) -> None:
    if original.shape != swapped.shape:
        raise ModelError(
            f"{what} is {tuple(original.shape)}, and {tuple(swapped.shape)} once norms are swapped: there is nothing "
            "to compare."
        )
