"""Running code of the user's own: a factory of a network, and the batches that it returned."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normscope.batches import Batch, as_batches
from normscope.errors import DataError, ModelError, NormscopeError, UsageError, count
from normscope.models.base import LoadOptions
from normscope.models.numbered import drawn
from normscope.shares import ALL, Chunk, LeftOut, Share

_IMPORTLIB = (importlib.__file__, "<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")
_END = object()


@dataclass
class UserCode:
    """What runs the user's code: its own random numbers, its prints on stderr, sentences for what it raises.

    Attributes:
        name: what errors call the model.
        file: where the user's code begins.
        random_state: torch's on the CPU, where the user's code left it.
    """

    name: str
    file: str
    random_state: Tensor

    @contextmanager
    def running(self, what: str, kind: type[NormscopeError] = ModelError) -> Iterator[None]:
        """Run the block as the user's code; what it raises becomes an error of ``kind`` that says so of ``what``."""
        with torch.random.fork_rng(devices=[]), redirect_stdout(sys.stderr):  # stdout is for results
            torch.default_generator.set_state(self.random_state)
            try:
                yield
            except (Exception, SystemExit) as error:
                said = error.msg if isinstance(error, SyntaxError) else str(error)
                line = said.strip().partition("\n")[0].rstrip(".")
                message = f"{type(error).__name__}: {line}" if line else type(error).__name__
                raise kind(f"{what} raised {message}{self._place(error)}.") from error
            finally:
                self.random_state = torch.default_generator.get_state()

    def over(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Iterate with the random numbers that follow the factory's own, the same ones each time."""
        code = replace(self)
        what = f"The batches of {self.name}"
        with code.running(what, DataError):
            entries = iter(batches)
        while True:
            with code.running(what, DataError):
                entry = next(entries, _END)
            if entry is _END:
                return
            yield entry

    def _place(self, error: BaseException) -> str:
        """Name the last line of the user's own file that was at work, or the last one of what it called."""
        if isinstance(error, SyntaxError):
            return f" ({error.filename}, line {error.lineno})"
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(frame.filename)]
        own = [frame for frame in frames if frame.filename == self.file]
        return "".join(f" ({frame.filename}, line {frame.lineno})" for frame in (own or frames)[-1:])


class FactoryBatches:
    """The batches that a factory returned, on the model's device and in dtypes that it has; each is an input.

    Attributes:
        batch_size: 1: setting it has no effect, as the factory decides how large its batches are.
        left_out: empty: what goes wrong in the user's code is raised.
    """

    def __init__(
        self, name: str, batches: Iterable[Any], code: UserCode, options: LoadOptions, kept: Sequence[torch.dtype] = ()
    ) -> None:
        """Look at the first batch; a list is counted.

        Args:
            name: what errors call the model.
            batches: as the factory returned them.
            code: what runs the factory's code.
            options: limit, order, device and dtype.
            kept: without a dtype in the options, those in which tensors stay; others get the first of them.

        Raises:
            UsageError: if batches are to be shuffled that can only be taken in their own order.
            DataError: if there is none, or it is no batch.
        """
        self.batch_size, self.left_out = 1, LeftOut()
        self._name, self._batches, self._code, self._options, self._kept = name, batches, code, options, kept
        if options.shuffle and not isinstance(batches, list):
            raise UsageError(f"{name} returned batches that can be taken only in their order: to shuffle takes a list.")
        sizes = [len(batch.samples) for batch in as_batches(batches)] if isinstance(batches, list) else None
        self._sizes = None if sizes is None else [sizes[i] for i in self._order(len(sizes))]
        self._once = code.over(batches) if isinstance(batches, Iterator) else None
        self._first = _END if self._once is None else next(self._once, _END)
        self._beyond_first = False
        self.first_sample()

    @property
    def description(self) -> str:
        """Say whose batches they are, and whether only some of their samples were taken, or in another order."""
        limit, seed, shuffled = self._options.limit, self._options.seed, self._options.shuffle
        batches = f"batches of {self._name}"
        if limit is None or (self._sizes is not None and sum(self._sizes) <= limit):
            return f"{batches}, shuffled with seed {seed}" if shuffled else batches
        if shuffled:
            return f"{count(limit, 'sample')} of the {batches}, drawn with seed {seed}"
        return f"the first {limit} samples of the {batches}"

    @property
    def n_samples(self) -> int | None:
        """How many samples there are at most; None where only iterating would tell."""
        total = None if self._sizes is None else sum(self._sizes)
        return min((number for number in (total, self._options.limit) if number is not None), default=None)

    @property
    def n_inputs(self) -> int | None:
        """How many batches are taken; None where only iterating would tell."""
        if self._sizes is None or self._options.limit is None:
            return None if self._sizes is None else len(self._sizes)
        before = accumulate(self._sizes, initial=0)
        return sum(seen < self._options.limit for seen, _ in zip(before, self._sizes, strict=False))

    @property
    def unreadable(self) -> list[str]:
        """Name what could not be read: nothing."""
        return self.left_out.lines

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches, the last one cut where the limit falls into it.

        Raises:
            DataError: if one is no batch, the user's code raises, or an iterator is to be taken a second time.
        """
        for chunk in self.chunks(ALL):
            yield from chunk.batches

    def chunks(self, share: Share) -> Iterator[Chunk]:
        """Yield each batch of a share as a chunk; those of the others are gone through, as only the factory can skip.

        Raises:
            DataError: see above.
        """
        self.left_out = LeftOut()
        left = ((number, batch) for number, batch in self._taken() if number not in share.done)
        for number, batch in share.of(left):
            yield Chunk([number], [self._placed(batch)])

    def first_sample(self) -> Batch:
        """Return the first sample of the first batch.

        Raises:
            DataError: if there is none, it is no batch, or the user's code raises.
        """
        for _, batch in self._taken():
            return self._placed(batch.first_sample())
        raise DataError(f"{self._name} returned no batch to run its module on.")

    def _placed(self, batch: Batch) -> Batch:
        dtype = next(iter(self._kept), self._options.dtype)
        return batch.to(self._options.device, dtype, self._kept)

    def _taken(self) -> Iterator[tuple[int, Batch]]:
        """Yield the batches with their numbers, up to the limit."""
        left = self._options.limit
        for number, batch in self._in_order():
            yield number, batch if left is None else batch.first(left)
            if left is not None:
                left -= len(batch.samples)
                if left <= 0:
                    return

    def _in_order(self) -> Iterable[tuple[int, Batch]]:
        numbered = enumerate(as_batches(self._entries()))
        if not self._options.shuffle:
            return numbered
        batches = list(numbered)
        return [batches[number] for number in self._order(len(batches))]

    def _order(self, number: int) -> Sequence[int]:
        return drawn(number, replace(self._options, limit=None))  # which counts samples, and not batches

    def _entries(self) -> Iterator[Any]:
        if self._once is None:
            yield from self._code.over(self._batches)
            return
        if self._first is not _END:
            yield self._first
        if self._beyond_first:
            raise DataError(
                f"The batches of {self._name} are an iterator, which can be taken only once, and are asked for again. "
                "Return a list, or an object whose __iter__ starts anew."
            )
        for entry in self._once:
            self._beyond_first = True
            yield entry


def _is_ours(filename: str) -> bool:
    return filename in _IMPORTLIB or Path(filename).parent == Path(__file__).parent
