"""Quality: how well a network does what it is for, before its norms are swapped and after."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from typing import Any

from torch import nn

from normscope.errors import UsageError
from normscope.inputs.entries import taken_once
from normscope.inputs.loaded_model import LoadedModel, Outputs, Task
from normscope.pairs.ranks import Ranks
from normscope.runtime.network import left_as_found
from normscope.runtime.progress import Progress
from normscope.swaps.drift.reports import Quality, Score
from normscope.swaps.quality.measures import MEASURES, Finding, Passes, UntoldError

QualityFunction = Callable[[nn.Module], float]


class Judge:
    """Measures how well one network after another does what it is for, on the same inputs.

    >>> import normscope
    >>> network = normscope.load("demo_vit", device="cpu")
    >>> judge = Judge.of(network, None, network.inputs, network.outputs, lambda stage, done, of: None)
    >>> judge.add("original", network.module)
    >>> judge.quality.name, judge.quality.scores["original"].value
    ('top-1 accuracy', 1.0)
    """

    def __init__(
        self, by: Task | QualityFunction, batches: Iterable[Any], outputs: Outputs, progress: Progress
    ) -> None:
        """Keep what to measure.

        Args:
            by: what the network is for; or a function of the user's, which takes it.
            batches: held-out inputs, which a function does not look at.
            outputs: how to read what the network returns.
            progress: called with the network and what was done of it.
        """
        self._by, self._batches, self._outputs, self._progress = by, batches, outputs, progress
        self.quality: Quality | None = None
        self.untold = by.untold if isinstance(by, Task) and by.measure is None else ""
        if not self.untold and isinstance(by, Task) and taken_once(batches):
            self.untold = "the batches can be iterated only once"

    @classmethod
    def of(
        cls,
        model: nn.Module | LoadedModel,
        by: QualityFunction | Task | None,
        batches: Iterable[Any],
        outputs: Outputs,
        progress: Progress,
    ) -> Judge:
        """Judge as the user says it, and otherwise by what a loaded model is for."""
        task = model.task if isinstance(model, LoadedModel) else Task()
        return cls(task if by is None else by, batches, outputs, progress)

    def add(self, name: str, model: nn.Module) -> None:
        """Measure a network, which is left as found; nothing where inputs do not tell how well it does.

        Raises:
            UsageError: if a function of the user's returns no number.
            ModelError: if the network raises.
            MemoryEndedError: if a single sample takes more memory than there is.
        """
        if self.untold:
            return
        with left_as_found(model) as buffers:
            if not isinstance(self._by, Task):
                found = Finding(_own_name(self._by), None, None, "", Score(_number(self._by(model))))
            else:
                assert self._by.measure is not None  # noqa: S101  # there would be a reason
                told = partial(self._progress, f"quality of the {name}")
                passes = Passes(model, self._batches, self._outputs, buffers, told)
                try:
                    found = MEASURES[self._by.measure](passes, self._by)
                except UntoldError as error:
                    self.quality, self.untold = None, str(error)
                    return
        scores = {} if self.quality is None else self.quality.scores
        self.quality = Quality(found.name, found.higher_is_better, found.n, found.over, {**scores, name: found.score})

    def settle(self, ranks: Ranks) -> None:
        """Let all ranks know what the first of them measured."""
        if ranks.size == 1:
            return
        quality, self.untold = ranks.told([self.quality and asdict(self.quality), self.untold])[0]
        if quality is not None:
            scores = {
                name: Score(own["value"], own["interval"] and tuple(own["interval"]))
                for name, own in quality.pop("scores").items()
            }
            self.quality = Quality(**quality, scores=scores)


def _own_name(function: QualityFunction) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return "quality" if name == "<lambda>" else name


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(
            f"The function passed as quality= returned a {type(value).__name__}; it has to return a number."
        ) from None
