"""Forward passes of a network with and without its norms, and the distances between their outputs."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import DataError, MemoryEndedError, ModelError, count
from normscope.inputs.batch import Batch, Halving, Sample
from normscope.inputs.loaded_model import Outputs
from normscope.inputs.splits import LeftOut, Share, shared
from normscope.pairs.ranks import Ranks, agree_on_batches, check_alike, merge_left_out
from normscope.runtime.network import KeptBuffers, cuda_devices, left_as_found, memory_ended, run
from normscope.swaps.drift.copies import Copies
from normscope.swaps.drift.distances import Configuration, Distances, SiteLayout, Tallies, distances, output_by_sample
from normscope.swaps.drift.replay import Recording, Replay
from normscope.swaps.drift.reports import END, OUTPUT
from normscope.swaps.replace import Holders, Swap, module_at

Ends = Callable[..., Iterable[tuple[Sequence[Sample], Tensor]]]
_Entry = tuple[Configuration, str, str, Distances]  # which swap, where it was measured, and the part of the data


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
        """Those of the network with its norms."""
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


@dataclass(frozen=True)
class _PassesSeen:
    """What one forward pass gave: the output, and what each site gave at each of its calls."""

    output: Tensor
    at_sites: Mapping[str, Sequence[Tensor]]


class PairedPasses:
    """A network with and without its norms, over the inputs that ranks divide among them."""

    _buffers: KeptBuffers  # of the model, while it is lent

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        modules: Mapping[str, nn.Module],
        outputs: Outputs,
        ranks: Ranks,
        advance: Callable[[int], object],
        asked: Mapping[str, Any],
        refitted: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Keep what to run on what, see :func:`normscope.swaps.drift.drift.drift`.

        ``asked`` has to be so on all ranks. ``refitted`` is what other parameters are while sites are swapped, by name.
        """
        self.model, self.batches, self.modules = model, batches, modules
        self.outputs, self.ranks, self.asked = outputs, ranks, asked
        self._devices = cuda_devices(model)
        self._share = Share(ranks.rank, ranks.size)
        self._layouts: dict[tuple[str, int], SiteLayout] = {}
        self._called: set[str] = set()
        self._halving = Halving("compared")
        self._advance = _Advance(advance)
        self._holders, self._replay = Holders(model), Replay(model, modules)
        self._refitted = refitted
        if refitted:  # before the first site, too
            self._replay.possible = False
        self._verified = False
        norms = {id(module_at(model, path)) for path in modules}
        within = any(one.startswith(f"{other}.") for one in modules for other in modules)
        self._apart = len(norms) == len(modules) and not within
        self._copies = Copies(model, modules)

    def compared(self, wanted: Sequence[Configuration], ends: Ends | None = None) -> Tallies:
        """Run this rank's batches as they are and with each of the swaps, and compare.

        Args:
            wanted: the swaps; those that are cumulative last, each with the sites of the one before and one more.
            ends: of trajectories, compared with all sites swapped.

        Returns:
            What all ranks found.
        """
        tallies, left_out = Tallies(wanted), LeftOut()
        agree_on_batches(self.batches, self.ranks)
        with left_as_found(self.model) as self._buffers:
            first, chunks = shared(self.batches, self._share)
            check_alike(self.ranks, {**self.asked, "first sample": list(astuple(first.samples[0]))})
            self._learn_layouts(first)
            with self._replay.watching():
                for number, chunk in enumerate(chunks):
                    for place, batch in enumerate(chunk.batches):
                        for done, at, part, moved in self._in_pieces(batch, wanted):
                            tallies.add(done, at, part, moved, self._came(number, place))
                    left_out.add(chunk)
            if ends is not None:
                self._compare_ends(ends, tallies)
        if isinstance(getattr(self.batches, "left_out", None), LeftOut):
            self.batches.left_out = merge_left_out(left_out, self.ranks)  # type: ignore[attr-defined]
        tallies = tallies.gathered(self.ranks)
        if not tallies.at_output:
            raise DataError("There is no batch to run the model on.")
        called = {path for one in self.ranks.told(sorted(self._called)) for path in one}
        if idle := [path for path in self.modules if path not in called]:
            raise ModelError(f"The network does not call {idle[0]!r} on these inputs, so that a swap there is none.")
        return tallies

    def _came(self, chunk: int, batch: int) -> tuple[int, int]:
        """Number a chunk of this rank's share among those of all ranks."""
        return chunk * self._share.ranks + self._share.rank, batch

    def _in_pieces(self, batch: Batch, wanted: Sequence[Configuration]) -> Iterator[_Entry]:
        """Compare a batch; in halves, and halves of them, where memory ends.

        Raises:
            MemoryEndedError: if memory ends at a single sample, or at a batch that cannot be split.
        """
        for piece, _ in self._halving.pieces(batch, None):
            rows = self._fitting(piece, wanted)
            if rows is None:
                self._halving.halve(piece)
            else:
                yield from rows

    def _fitting(self, batch: Batch, wanted: Sequence[Configuration]) -> list[_Entry] | None:
        """Compare a batch with all of the swaps; None if memory ended at any of them."""
        whole = len(batch.samples) == 1 or not batch.divisible
        try:
            with self._advance.of(len(batch.samples)):
                return list(self._with_each(batch, wanted))
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
        return None

    def _with_each(self, batch: Batch, wanted: Sequence[Configuration]) -> Iterator[_Entry]:
        with self._replay.recorded() as before:
            original = self._run(batch, self.modules)
        self._advance()
        self._called.update(path for path, outputs in original.at_sites.items() if outputs)
        self._verify(batch, before)
        together = self._in_copies(batch, wanted, original)
        there: set[str] = set()
        with contextlib.ExitStack() as standing:
            for done in wanted:
                beside = together.get(done)
                if beside is None or not self._copies.verified:
                    adds_up = done.swapped == "cumulative" and self._apart
                    added = [path for path in done.paths if path not in there]
                    with contextlib.ExitStack() as alone:
                        (standing if adds_up else alone).enter_context(self.swapped(added))
                        swapped, recording = self._begun_at(added, batch, before, record=adds_up)
                    for path in added:
                        _check_called(path, original, swapped)
                    if adds_up:
                        before, there = recording, there.union(added)
                    if beside is None or not self._copies.verify(beside[1].output, swapped.output):
                        beside = original, swapped
                yield from self._distances(batch, done, *beside)
                self._advance()
        self._copies.verified = self._copies.verified or bool(together)

    def _in_copies(
        self, batch: Batch, wanted: Sequence[Configuration], original: _PassesSeen
    ) -> dict[Configuration, tuple[_PassesSeen, _PassesSeen]]:
        """Run what can be run in one pass: each of the swaps, beside the output that it is compared with."""
        some = [done for done in wanted if done.swapped != "all"]
        to_verify = not self._copies.verified  # by passes one by one, of which none builds on another
        if not (self._apart and self._replay.possible) or (to_verify and any(done.swapped != "one" for done in some)):
            return {}
        sets = [done.paths for done in some]
        pairs = self._copies.outputs(
            lambda own: self._run(own, []).output, batch, sets, original.output, original.at_sites
        )
        seen = [(_PassesSeen(before, {}), _PassesSeen(after, {})) for before, after in pairs]
        return dict(zip(some, seen, strict=True)) if self._replay.possible and seen else {}

    def _begun_at(
        self, sites: Sequence[str], batch: Batch, before: Recording, record: bool
    ) -> tuple[_PassesSeen, Recording]:
        """Run one batch from the first of some sites on, and in full if that turns out not to be the same."""
        replays = self._replay.possible
        with self._replay.begun_at(sites, before, record) as recording:
            seen = self._run(batch, sites)
        if replays and not self._replay.possible:
            seen = self._run(batch, sites)
        return seen, recording

    def _verify(self, batch: Batch, before: Recording) -> None:
        """Replay a pass from the middle of the network and run it in full, once: if they differ, no pass is replayed.

        Of changes past torch's own count of them, and of notes outside modules, nothing else tells.
        """
        if self._verified or not self._replay.possible:
            return
        self._verified = True
        ordered = sorted(before.entered, key=before.entered.__getitem__)
        for path in ordered[len(ordered) // 2 :][:1]:
            with self.swapped([path]):
                replayed, _ = self._begun_at([path], batch, before, record=False)
                in_full = self._run(batch, [])
            same = torch.equal(_bits(replayed.output), _bits(in_full.output))
            self._replay.possible = self._replay.possible and same

    def _compare_ends(self, ends: Ends, tallies: Tallies) -> None:
        """Compare the ends of trajectories, some at a time: each comes while the network is as it has to be."""
        everything = next(done for done in tallies.wanted if done.swapped == "all")
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

    def _run(self, batch: Batch, paths: Iterable[str]) -> _PassesSeen:
        """Run one batch from the buffers that the network was found with, and watch the modules at some paths."""
        self._buffers.put_back()
        at_sites: dict[str, list[Tensor]] = {path: [] for path in paths}
        with contextlib.ExitStack() as hooks, torch.random.fork_rng(self._devices):
            for path, kept in at_sites.items():
                handle = module_at(self.model, path).register_forward_hook(_keeping(kept))
                hooks.callback(handle.remove)
            with self._replay.drawing():
                output = self.outputs.read(run(self.model, batch), batch)
        return _PassesSeen(output.clone(), at_sites)  # it may be a buffer, which the next pass begins without

    def _distances(
        self, batch: Batch, done: Configuration, original: _PassesSeen, swapped: _PassesSeen
    ) -> Iterator[_Entry]:
        whole = done.swapped == "all"
        # Distances of single frames are many numbers per input: they are kept where all sites are swapped.
        kind = self.outputs.kind if whole or self.outputs.kind != "frames" else "tensor"
        _check_shape("The output", original.output, swapped.output)
        (before, valid), (after, _) = (
            output_by_sample(seen.output, batch, self.outputs.kind) for seen in (original, swapped)
        )
        moved = distances(before, after, valid, kind)
        yield done, OUTPUT, "", moved
        if whole and batch.part:
            yield done, OUTPUT, batch.part, moved
        for path in done.paths if whole else ():
            if original.at_sites[path]:
                yield done, path, "", self._at_site(path, batch, original.at_sites[path], swapped.at_sites[path])

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
            pairs.append([layout.by_sample(one, batch) for one in (before, after)])
        if len(pairs) == 1:
            (before, valid), (after, _) = pairs[0]
            return distances(before, after, valid)
        before, after = (torch.cat([_flat(*pair[side]) for pair in pairs], dim=1)[:, None] for side in range(2))
        return distances(before, after)

    def _learn_layouts(self, first: Batch) -> None:
        """Find the axis of samples in each site's output, once: it is shorter for a single sample."""
        if self._layouts:
            return
        for path, outputs in self._run(first, self.modules).at_sites.items():
            for call, one in enumerate(outputs):
                self._layouts[path, call] = SiteLayout(path, one.shape)


class _Advance:
    """Counts the samples of each pass once, also where memory ended and a batch is run again in pieces."""

    def __init__(self, advance: Callable[[int], object]) -> None:
        self._advance = advance
        self._samples = self._made = self._again = 0

    def __call__(self) -> None:
        self._made += self._samples
        again = min(self._samples, self._again)
        self._again -= again
        if self._samples > again:
            self._advance(self._samples - again)

    @contextlib.contextmanager
    def of(self, samples: int) -> Iterator[None]:
        """Report the block's passes over so many samples; after an exception they are run again, and count once."""
        self._samples, self._made = samples, 0
        try:
            yield
        except BaseException:
            self._again += self._made
            raise


def _keeping(kept: list[Tensor]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            kept.append(output.detach().clone())  # the network may go on to change it in place

    return hook


def _bits(tensor: Tensor) -> Tensor:
    """A NaN is the same as itself so."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _flat(arranged: Tensor, valid: Tensor | None) -> Tensor:
    """Return all that belongs to a sample in one row, with zeros in place of padding."""
    if valid is not None:
        arranged = arranged.where(valid[:, :, None].to(arranged.device), 0.0)
    return arranged.flatten(1)


def _check_called(path: str, original: _PassesSeen, swapped: _PassesSeen) -> None:
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
