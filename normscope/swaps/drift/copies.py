"""One pass over several copies of a small batch, in each of which other sites are swapped."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from normscope.inputs.batch import Batch
from normscope.runtime.network import run
from normscope.swaps.drift.replay import can_be_watched
from normscope.swaps.replace import module_at

# A pass over less spends its time between the operations; one over more in them, and copies of it save nothing.
_ELEMENTS_TOGETHER = 2**18  # of a site's output, on average over sites, with all copies
_LEAST_COPIES = 5  # passes that begin at their first swapped site take half as long each
# The order of sums depends on the size of a batch: in float32 that moves outputs by about 1e-6 of their length, and
# more where no norm is left to shrink an error. What the samples of a batch do to one another moves them by far more.
_ALIKE = 1e-4
_DTYPES = (torch.float32, torch.float64)

_Run = Callable[[Batch], Tensor]


class Copies:
    """Runs copies of a batch as one batch; a site is the norm in some of the copies, and its replacement in others.

    So the passes over a tiny network, which is faster than the code around it, become one. What they give is what
    passes one by one give, but for the rounding of sums in another order: the first batch is run both ways, and what is
    not alike there never runs so again. Beside the copies with swapped sites runs one without, of every batch: it has
    to be what the network gives of the batch alone, and it is what the others are compared with. A network that decides
    anything by values, or in which a part would not take a larger batch, runs one by one.

    Attributes:
        possible: whether the network runs so; False from the first sign on that it cannot.
        verified: whether what it gives so has been compared with passes one by one.
    """

    def __init__(self, model: nn.Module, replacements: Mapping[str, nn.Module]) -> None:
        """Keep what stands at the sites, and what takes its place."""
        self._model = model
        self._norms = {path: module_at(model, path) for path in replacements}
        self._replacements = replacements
        self.possible = all(map(can_be_watched, self._norms.values()))
        self.verified = False

    def outputs(
        self,
        passed: _Run,
        batch: Batch,
        swapped: Sequence[Collection[str]],
        original: Tensor,
        at_sites: Mapping[str, Sequence[Tensor]],
    ) -> list[tuple[Tensor, Tensor]]:
        """Run a batch once for each set of sites, as many of them in one pass as are faster so.

        Args:
            passed: passes a batch through the network as it stands, and reads its output.
            batch: the one.
            swapped: paths of the sites that are swapped, set by set.
            original: the output of the batch alone, with no site swapped.
            at_sites: likewise of each site, at each of its calls.

        Returns:
            For each set the output with no site swapped, of the same pass, and that with these; an empty list if they
            cannot run together, or are no slower one by one.
        """
        room = self._room(batch, len(swapped), at_sites)
        pairs: list[tuple[Tensor, Tensor]] = []
        try:
            if room and not self.verified and _decides(self._model, batch):
                raise _ApartError
            for first in range(0, len(swapped), room) if room else ():
                sites = swapped[first : first + room]
                before, *others = self._passed_once(passed, batch, [(), *sites], at_sites)
                if not alike(before, original):
                    raise _ApartError
                pairs += [(before, after) for after in others]
        except Exception:  # of a network that takes no batch of this size: passes one by one tell if it is at fault
            self.possible = False
            return []
        return pairs

    def _room(self, batch: Batch, wanted: int, at_sites: Mapping[str, Sequence[Tensor]]) -> int:
        """How many of the sets run together, where sites give this of the batch; 0 if each had better run alone."""
        outputs = [output for called in at_sites.values() for output in called]
        plain = batch.divisible and all(output.dtype in _DTYPES for output in outputs)
        elements = sum(output.numel() for output in outputs)
        if not (self.possible and plain and elements):
            return 0
        copies = min(wanted + 1, _ELEMENTS_TOGETHER * len(outputs) // elements)
        return copies - 1 if copies >= _LEAST_COPIES else 0

    def _passed_once(
        self, passed: _Run, batch: Batch, swapped: Sequence[Collection[str]], at_sites: Mapping[str, Sequence[Tensor]]
    ) -> list[Tensor]:
        """Run one copy of a batch for each set of sites; copies follow one another."""
        copies = batch.take([*range(len(batch.samples))] * len(swapped))
        with self._standing(swapped, at_sites):
            output = passed(copies)
        if not output.ndim or len(output) != len(copies.samples):
            raise _ApartError
        return list(output.chunk(len(swapped)))

    def verify(self, together: Tensor, one_by_one: Tensor) -> bool:
        """Whether a pass of its own gives what its copy gave; if not, nothing runs together from here on."""
        self.possible = self.possible and alike(together, one_by_one)
        return self.possible

    @contextlib.contextmanager
    def _standing(self, swapped: Sequence[Collection[str]], at_sites: Mapping[str, Sequence[Tensor]]) -> Iterator[None]:
        """Let each site compute, in each copy, what is asked for there; as often as it does in the batch alone."""
        before = {path: vars(norm).get("forward") for path, norm in self._norms.items()}
        sites: list[_Site] = []
        try:
            for path, norm in self._norms.items():
                replacement = self._replacements[path].train(norm.training)
                copies = [number for number, paths in enumerate(swapped) if path in paths]
                shapes = [output.shape for output in at_sites.get(path, ())]
                sites.append(_Site(norm.forward, replacement, copies, len(swapped), shapes))
                vars(norm)["forward"] = sites[-1]
            yield
        finally:
            for path, norm in self._norms.items():
                vars(norm).pop("forward", None)
                if before[path] is not None:
                    vars(norm)["forward"] = before[path]
        if any(site.calls != len(site.shapes) for site in sites):
            raise _ApartError


class _ApartError(Exception):
    """A network's copies cannot run together."""


class _Site:
    """A norm in some copies, and its replacement in the others."""

    def __init__(
        self,
        norm: Callable[..., Any],
        replacement: nn.Module,
        copies: Sequence[int],
        number: int,
        shapes: Sequence[torch.Size],
    ) -> None:
        """Keep in which of so many ``copies`` it is the replacement, and what it gives of one copy, call by call."""
        self._norm, self._replacement, self._number = norm, replacement, number
        self._runs = list(_runs(copies))
        self.shapes, self.calls = shapes, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) + len(kwargs) != 1 or self.calls >= len(self.shapes):
            raise _ApartError
        (given,) = (*args, *kwargs.values())
        alone = self.shapes[self.calls]
        axis = _axis_of_copies(alone, given.shape, self._number)
        self.calls += 1
        parts = []
        for first, length in self._runs:
            part = given.narrow(axis, first * alone[axis], length * alone[axis])
            parts.append(self._replacement(part) if args else self._replacement(**dict.fromkeys(kwargs, part)))
        output = self._norm(*args, **kwargs)
        for (first, length), part in zip(self._runs, parts, strict=True):
            output.narrow(axis, first * alone[axis], length * alone[axis]).copy_(part)
        return output


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and the length of each run of consecutive numbers.

    >>> list(_runs([1, 4, 5, 6]))
    [(1, 1), (4, 3)]
    """
    for _, places in itertools.groupby(enumerate(numbers), lambda place: place[1] - place[0]):
        consecutive = [number for _, number in places]
        yield consecutive[0], len(consecutive)


def _axis_of_copies(alone: torch.Size, together: torch.Size, number: int) -> int:
    """The one axis that is so many times as long.

    >>> _axis_of_copies(torch.Size([7, 2, 8]), torch.Size([7, 6, 8]), 3)
    1
    """
    longer = [axis for axis, lengths in enumerate(zip(alone, together, strict=True)) if lengths[0] != lengths[1]]
    if len(longer) != 1 or together[longer[0]] != number * alone[longer[0]]:
        raise _ApartError
    return longer[0]


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether two outputs differ by the rounding of their sums alone; values that are not finite are never alike.

    >>> alike(torch.ones(3), torch.ones(3) + 1e-6), alike(torch.ones(3), torch.ones(3) + 1e-3)
    (True, False)
    """
    if one.shape != other.shape:
        return False
    difference = torch.linalg.vector_norm(one.double() - other.double())
    return bool(difference <= _ALIKE * torch.linalg.vector_norm(other.double()))


class _Decisions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether values leave tensors, or decide on shapes: then one copy may decide for all."""

    seen: bool = False
    _tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or any(tag in func.tags for tag in self._tags)
        return func(*args, **(kwargs or {}))


def _decides(model: nn.Module, batch: Batch) -> bool:
    """Whether a network decides anything by the values that pass through it."""
    decisions = _Decisions()  # type: ignore[no-untyped-call]
    with decisions:
        run(model, batch)
    return decisions.seen
