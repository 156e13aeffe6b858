"""What figures and tables read of a benchmark: they do not know the wing that makes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class SpeedRow(Protocol):
    """One timing, as :class:`normscope.Timing` holds it."""

    @property
    def variant(self) -> str:
        """What was timed."""

    @property
    def way(self) -> str:
        """``eager``, ``compile`` or ``fused``."""

    @property
    def scope(self) -> str:
        """``norm`` or ``model``."""

    @property
    def passes(self) -> str:
        """``forward`` or ``forward + backward``."""

    @property
    def dtype(self) -> str:
        """Of what was timed."""

    @property
    def timer(self) -> str:
        """How it was timed."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the input."""

    @property
    def sites(self) -> int:
        """How many norms it stands for."""

    @property
    def samples(self) -> tuple[float, ...]:
        """Seconds."""

    @property
    def median(self) -> float | None:
        """Of them; None where it did not run."""

    @property
    def p20(self) -> float | None:
        """Quantile 0.2."""

    @property
    def p80(self) -> float | None:
        """Quantile 0.8."""

    @property
    def gb_per_s(self) -> float | None:
        """Of a norm alone."""

    @property
    def share_of_copy(self) -> float | None:
        """Of a same-size copy's."""

    @property
    def ratio(self) -> float | None:
        """To the native norm's time."""

    @property
    def verdict(self) -> str:
        """What may be claimed."""

    @property
    def compile_seconds(self) -> float | None:
        """Of what is compiled."""

    @property
    def note(self) -> str:
        """What else is to be known."""


class SpeedReport(Protocol):
    """What :func:`normscope.bench` returned."""

    @property
    def about(self) -> dict[str, str]:
        """Model, weights and data."""

    @property
    def device(self) -> str:
        """In words."""

    @property
    def rows(self) -> Sequence[SpeedRow]:
        """Every timing."""

    @property
    def left_out(self) -> Sequence[str]:
        """Sentences."""
