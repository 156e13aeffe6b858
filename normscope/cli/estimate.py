"""How long a command takes in all: told in its first seconds, and then now and again how much is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from normscope.runtime.progress import is_one_step

if TYPE_CHECKING:
    from torch import nn

    from normscope.inputs.batch import Batch

_LONG_SECONDS = 20.0  # from here on it is said how long something will take
_EARLY_SECONDS = 3.0  # before which nothing is said
_PACE_SECONDS = 0.5  # that a stage's pace is taken from, at least
_SECONDS_BETWEEN_LINES = 30.0
_SLOW_PASS_SECONDS = 0.2  # a sample that takes this long fills the device: a batch takes as many times as long


class Estimate:
    """The time that is left of a command: of the stage under way, of those it announced, and of further models.

    A stage takes as long as the command expects of it until its own pace is known. Its first step tells no pace, as it
    may compile something.

    >>> clock = iter([0.0, 2.0, 3.0, 4.0])
    >>> estimate = Estimate(clock.__next__)
    >>> estimate.expect({"blocks": 60.0})
    >>> for done in (0, 1, 2):
    ...     estimate.told("samples", done, 10)
    >>> estimate.in_all, estimate.still  # 8 more samples of a second each, and the blocks
    ('about 72 s in all', 'about 68 s left')
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Begin to count; ``now`` gives seconds."""
        self._now = now
        self._begun = self._at = self._first_model = now()
        self._ahead: dict[str, float | None] = {}
        self._place, self._models = 1, 1
        self._done = 0
        self._of: int | None = None
        self._paced: tuple[float, int] | None = None  # when the first step of the stage was done, and which it was
        self._expected: float | None = None
        self._enter("", 0)

    def model(self, place: int, of: int) -> None:
        """Count for the model of this place, from 1, from here on; what was announced for the one before is void."""
        self._at = self._now()
        if place == 1:
            self._first_model = self._at
        self._place, self._models = place, of
        self._ahead.clear()
        self._enter("", 0)

    def expect(self, seconds: Mapping[str, float | None]) -> None:
        """Announce stages, in their order, with the seconds that each will take; None where nothing tells."""
        self._ahead |= seconds

    def told(self, stage: str, done: int, of: int | None) -> None:
        """Take what :data:`normscope.runtime.progress.Progress` is told."""
        self._at = self._now()
        if stage != self._stage or done < self._done:
            self._enter(stage, done)
        self._done, self._of = done, of
        if self._paced is None and done > self._first:
            self._paced = (self._at, done)

    def _enter(self, stage: str, done: int) -> None:
        self._stage, self._entered, self._first, self._done = stage, self._at, done, done
        self._of = self._paced = self._expected = None
        while stage in self._ahead:  # what was announced before it is over, or was left out
            self._expected = self._ahead.pop(next(iter(self._ahead)))

    @property
    def seconds(self) -> float:
        """Seconds since the command began."""
        return self._at - self._begun

    @property
    def seconds_of_stage(self) -> float:
        """Seconds since the stage under way began."""
        return self._at - self._entered

    @property
    def in_all(self) -> str:
        """The whole time in words; nothing where it is short, or where nothing tells."""
        return self._in_words("in all", self.seconds)

    @property
    def still(self) -> str:
        """The time that is left in words; nothing where the whole is short, or where nothing tells."""
        return self._in_words("left", 0.0)

    @property
    def waits(self) -> bool:
        """Whether nothing tells yet how long the stage under way takes, but soon may."""
        return self._left_of_stage() is None and self.seconds_of_stage <= _LONG_SECONDS

    def _in_words(self, what: str, before: float) -> str:
        parts = [self._left_of_stage(), *self._ahead.values()]
        known = sum(part for part in parts if part is not None)
        others = self._models - self._place
        left = known + others * (self._at - self._first_model + known) / self._place
        if not known or self.seconds + left <= _LONG_SECONDS:
            return ""
        about = "at least" if None in parts else "about"
        condition = f", if {_following(others)} as long" if others else ""
        return f"{about} {in_minutes(before + left)} {what}{condition}"

    def _left_of_stage(self) -> float | None:
        """Seconds; None where nothing tells."""
        if not self._stage or self._done == self._of:
            return 0.0
        if self._of is not None and self._paced is not None:
            since, step = self._paced
            if self._done > step and self._at - since >= _PACE_SECONDS:
                return (self._at - since) / (self._done - step) * (self._of - self._done)
        return None if self._expected is None else max(0.0, self._expected - self.seconds_of_stage)


def _following(models: int) -> str:
    return "the model after this one takes" if models == 1 else f"the {models} models after this one take"


def in_minutes(seconds: float) -> str:
    """Say a time in seconds, minutes or hours, whichever it is best read in."""
    return (
        f"{seconds:.0f} s"
        if seconds < 2 * 60
        else f"{seconds / 60:.0f} min"
        if seconds < 2 * 3600
        else f"{seconds / 3600:.1f} h"
    )


class ProgressLines:
    """Progress in lines: how long the command will take, if that is long, and every half a minute how much is left.

    What is one long step (a stage whose name ends in …) is said when it begins.

    >>> clock = iter([0.0, 0.0, 2.0, 4.0, 20.0, 40.0])
    >>> told = ProgressLines(print, Estimate(clock.__next__))
    >>> for done in (0, 2, 4, 20, 40):
    ...     told("samples", done, 100)
    samples: 4 of 100, about 100 s in all
    samples: 40 of 100, about 60 s left
    """

    def __init__(self, say: Callable[[str], None], estimate: Estimate) -> None:
        """Begin to listen; ``say`` prints a line."""
        self._say, self.estimate = say, estimate
        self._spoken: float | None = None  # when, in seconds since the command began
        self._steps: set[str] = set()

    def __call__(self, stage: str, done: int, of: int | None, counted_as: str = "") -> None:
        """Take what :data:`normscope.runtime.progress.Progress` is told; it may count as an announced stage."""
        if is_one_step(stage):
            if stage not in self._steps:
                self._say(stage)
            self._steps.add(stage)
            return
        estimate = self.estimate
        estimate.told(counted_as or stage, done, None if counted_as else of)
        early = self._spoken is None
        since = estimate.seconds - (self._spoken or 0.0)
        if done == of or estimate.waits or since < (_EARLY_SECONDS if early else _SECONDS_BETWEEN_LINES):
            return
        ends = estimate.in_all if early else estimate.still
        if not ends and (of is not None or estimate.seconds_of_stage <= _LONG_SECONDS):
            return
        counts = "" if counted_as else f"{done:,}{'' if of is None else f' of {of:,}'}"
        self._say(f"{stage}: {', '.join(filter(None, (counts, ends)))}")
        self._spoken = estimate.seconds


def seconds_of_a_pass(model: nn.Module, sample: Batch, samples: int) -> float:
    """Time the network on a batch of so many samples, all like one, without learning anything; it is left as found.

    >>> import normscope
    >>> network = normscope.load("demo_vit", device="cpu")
    >>> 0 < seconds_of_a_pass(network.module, network.inputs.first_sample(), 8) < 10
    True
    """
    from normscope.inputs.batch import joined
    from normscope.runtime.network import left_as_found, run
    from normscope.swaps.bench.timing import once

    with left_as_found(model):
        (one,) = once(lambda: run(model, sample))
        batches = joined([sample] * samples)
        if one > _SLOW_PASS_SECONDS or len(batches) > 1:
            return samples * one
        (seconds,) = once(lambda: run(model, batches[0]))
    return seconds
