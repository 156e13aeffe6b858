"""Passes with and without norms where every swap is calibrated by itself, on other inputs, before it is measured."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from normscope.errors import UsageError, unknown
from normscope.inputs.loaded_model import LoadedModel, Outputs
from normscope.inputs.pool import kept_in_memory
from normscope.inputs.splits import divided
from normscope.pairs.norms.streams import unpacked
from normscope.pairs.ranks import ALONE, Ranks
from normscope.runtime.progress import Progress, StageProgress, is_one_step
from normscope.swaps.calibrate.calibrate import REFITS
from normscope.swaps.drift.distances import Configuration, Tallies
from normscope.swaps.drift.paired_passes import Ends, PairedPasses
from normscope.swaps.drift.reports import DriftCalibration
from normscope.swaps.pointwise import PointwiseFunction
from normscope.swaps.replace import Calibration, calibrated


def calibrations(sites: int, *, one_at_a_time: bool = True, cumulative: bool = True) -> int:
    """Return how many sites :func:`drift` calibrates, those of all rows counted: what a progress bar ends at.

    >>> calibrations(4), calibrations(4, one_at_a_time=False, cumulative=False)  # 4, four times 1, 2 and 3
    (13, 4)
    """
    return sites + (sites if one_at_a_time else 0) + (sum(range(2, sites)) if cumulative else 0)


class CalibratedPasses:
    """A network with and without its norms, each swap calibrated by itself before it is measured.

    Attributes:
        calibration: what the rows so far were calibrated on; that of all sites comes first.
    """

    calibration: DriftCalibration | None = None
    _everything: PairedPasses

    def __init__(
        self,
        network: nn.Module,
        batches: Iterable[Any],
        modules: Mapping[str, nn.Module],
        outputs: Outputs,
        ranks: Ranks,
        learn: Iterable[Any] | None,
        refit: str,
        *,
        progress: Progress,
        stage: str,
        of: int,
    ) -> None:
        """Keep what to swap and to measure, and as much of the inputs to learn from as memory has room for.

        See :func:`normscope.swaps.drift.drift.drift`; ``of`` is how many sites all rows have, see :func:`calibrations`.
        """
        _check(modules, refit, ranks)
        self._network, self._batches, self._modules, self._outputs = network, batches, modules, outputs
        self._data = str(getattr(learn, "description", None) or "")
        self._learn, self._left_out = kept_in_memory(unpacked(network, learn)[1])
        self._refit, self._progress = refit, progress
        self._counter = StageProgress(progress, stage, of)

    def compared(self, wanted: Sequence[Configuration], ends: Ends | None = None) -> Tallies:
        """Calibrate each of some swaps and compare, as :meth:`PairedPasses.compared` does.

        Args:
            wanted: the swaps; the first call has that of all sites first.
            ends: of trajectories, compared with all sites swapped.
        """
        tallies = Tallies(wanted)
        for number, done in enumerate(wanted):
            found = self._calibrated(done)
            passes = PairedPasses(
                self._network, self._batches, found.modules, self._outputs, ALONE, _unheard, {}, found.refitted
            )
            whole = done.swapped == "all"
            if whole:
                self._everything = passes
            tallies.take(number, passes.compared([done], ends if whole else None))
        return tallies

    @contextlib.contextmanager
    def swapped(self, paths: Sequence[str]) -> Iterator[None]:
        """Swap all sites meanwhile, as they were calibrated together."""
        with self._everything.swapped(paths):
            yield

    def _calibrated(self, done: Configuration) -> Calibration:
        sites, reached = len(done.paths), 0

        def told(stage: str, at: int, of: int | None) -> None:
            nonlocal reached
            if is_one_step(stage):
                if self.calibration is None:  # later ones take no more memory than that of all sites
                    self._progress(stage, at, of)
                return
            now = math.floor(sites * at / (of or at or 1))
            self._counter.add(now - reached)
            reached = now

        modules = {path: self._modules[path] for path in done.paths}
        found = calibrated(self._network, modules, self._learn, outputs=self._outputs, refit=self._refit, progress=told)
        report, before = found.report, self.calibration
        if before is None:
            before = DriftCalibration(
                self._data,
                self._refit,
                report.n_learned,
                report.n_judged,
                self._left_out + report.left_out,
                0,
                report.left,
            )
        self.calibration = replace(before, restored=before.restored + report.restored)
        return found


def to_learn_from(
    model: nn.Module | LoadedModel, learn: Iterable[Any] | None, batches: Iterable[Any] | None
) -> tuple[Iterable[Any], Iterable[Any] | None]:
    """What calibration learns from, and what the drift is measured on."""
    if learn is None and isinstance(model, LoadedModel):
        if model.calibration is not None:
            learn = model.calibration
        elif batches is None:
            learn, batches = divided(model.inputs)
    if learn is None:
        raise UsageError(
            "init='calibrated' learns from other inputs than the drift is measured on: pass learn=, batches as "
            "normscope.capture takes them."
        )
    if learn is batches:
        raise UsageError("The drift is measured on other inputs than calibration learns from; both are the same here.")
    return learn, batches


def _check(modules: Mapping[str, nn.Module], refit: str, ranks: Ranks) -> None:
    if refit not in REFITS:
        raise UsageError(unknown("refit", refit, REFITS))
    for path, module in modules.items():
        if not isinstance(module, PointwiseFunction):
            raise UsageError(
                f"What takes the place of {path} is a {type(module).__name__}: point-wise functions alone are "
                "calibrated."
            )
    if ranks.size > 1:
        raise UsageError(f"Calibration runs in one process, and {ranks.size} measure this drift.")


def _unheard(number: int) -> None:
    """Count nothing: sites are counted, and not the samples that they are measured on."""
