"""Timelines: numbers of every site at many steps of a training run, as one line of JSON per step."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normscope.errors import DataError
from normscope.norms.sites import Layers, NormSite, select
from normscope.runtime.files import visible
from normscope.runtime.records import Record, Tabled, as_json, converted

Array = NDArray[np.float64]

FORMAT = 1
_DIGITS = 6  # significant, of the numbers in a file

CURVE_METRICS = {  # of each curve y ≈ A·f(αx + s), as r2/tanh
    "r2": "R² over all pairs",
    "amplitude": "A; none, like α and s, where the pairs do not identify them",
    "alpha": "α, in units of 1/x",
    "shift": "s",
    "slope": "slope of the curve at x = 0, A·α·f′(s)",
    "at_zero": "value of the curve at x = 0",
    "beyond": "share of pairs beyond the bend, |αx + s| > 1",
}
SITE_METRICS = {
    "low": "0.5th percentile of x over all pairs",
    "high": "99.5th percentile of x",
    "largest": "largest |x|",
    "channel": "channel of the largest |x|",
    "massive": "number of channels with massive activations: |x| > 100 and |x| > 1000 × the median",
}
NORM_METRICS = {
    "sigma": "median of the tokens' σ",
    "spread": "95th percentile of σ over the 5th",
    "offset": "median of the tokens' |μ|/σ",
}
POINTWISE_METRICS = {  # numbers of its own α and s; the median over channels
    "module_alpha": "α of a point-wise function",
    "module_slope": "its slope at x = 0",
    "beyond_1": "share of pairs with |αx + s| > 1",
    "beyond_2": "share of pairs with |αx + s| > 2",
    "beyond_3": "share of pairs with |αx + s| > 3",
    "inverse_std": "1/std(x), in the unit of α",
}


@dataclass(frozen=True)
class TimelineSite:
    """One site of a timeline: as of :class:`normscope.norms.sites.NormSite`, ``curve`` of a point-wise one."""

    name: str
    kind: str
    placement: str | None
    channels: int
    curve: str | None = None

    @classmethod
    def of(cls, site: NormSite) -> TimelineSite:
        curve = site.pointwise.curve if site.pointwise else None
        return cls(site.name, site.kind, site.placement, site.channels, curve)


@dataclass(frozen=True)
class StepRecord(Record):
    """Numbers of all sites at one step.

    Attributes:
        step: number of training steps done.
        time: seconds since 1970, when the numbers were ready.
        seconds: that the probe took.
        numbers: of each metric, one number per site; None where it does not apply or is not finite. Metrics of curves
            are named as ``alpha/tanh``.
        loss: of the training step, if it was passed.
        sites: names of the sites.
    """

    step: int
    time: float
    seconds: float
    numbers: dict[str, list[float | None]]
    loss: float | None = None
    sites: tuple[str, ...] = ()

    def metrics(self) -> dict[str, float]:
        """Return all numbers as one flat dict, named as ``blocks.0.norm1/alpha/tanh``; without those that are None."""
        flat = {
            f"{site}/{name}": float(value)
            for name, values in self.numbers.items()
            for site, value in zip(self.sites, values, strict=True)
            if value is not None
        }
        return flat | ({} if self.loss is None else {"loss": self.loss})

    def line(self) -> str:
        """Return the record as one line of JSON, without the names of the sites."""
        numbers = {name: [_rounded(value) for value in values] for name, values in self.numbers.items()}
        document = {"step": self.step, "time": round(self.time, 3), "seconds": _rounded(self.seconds)}
        loss = {} if self.loss is None else {"loss": self.loss if math.isfinite(self.loss) else None}
        return json.dumps(document | loss | {"numbers": numbers}, separators=(",", ":"), allow_nan=False) + "\n"


def _rounded(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.{_DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 10**_DIGITS else short


@dataclass(frozen=True, repr=False)
class TimelineHeader:
    """First line of a timeline's file: what the run is of.

    Attributes:
        model, weights, data: as of a capture; data is the probe's batch.
        curves: names of the fitted curves.
        sites: the sites, in the order of first calls.
        captures: folder of the captures of every step, as seen from the file's; None if the probe kept none.
        dtype: of the probe's passes, ``float32``, or ``float32, autocast to bfloat16``.
        compiled: True if the network was compiled for training; the probe's passes ran eagerly.
    """

    model: str
    weights: str
    data: str
    curves: tuple[str, ...]
    sites: tuple[TimelineSite, ...]
    captures: str | None = None
    dtype: str = "not named"
    compiled: bool = False

    @property
    def about(self) -> dict[str, str]:
        """Model, weights and data, as of a capture."""
        return {"model": self.model, "weights": self.weights, "data": self.data}

    def line(self) -> str:
        """Return the header as one line of JSON."""
        return json.dumps({"normscope_timeline": FORMAT, **as_json(self)}, separators=(",", ":")) + "\n"


@dataclass(frozen=True, repr=False)
class Timeline(TimelineHeader, Tabled):
    """A training run: what it is of, and its numbers at every record, in ascending order of steps; NaN for none.

    Attributes:
        steps: numbers of training steps done, int64 ``(records,)``.
        times, seconds, losses: of each record, see :class:`StepRecord`, float64 ``(records,)``.
        numbers: of each metric, float64 ``(records, sites)``.
        file: that it was read from.
    """

    steps: NDArray[np.int64] = field(kw_only=True)
    times: Array = field(kw_only=True)
    seconds: Array = field(kw_only=True)
    losses: Array = field(kw_only=True)
    numbers: dict[str, Array] = field(kw_only=True)
    file: str = ""

    @classmethod
    def of(cls, header: TimelineHeader, records: Sequence[StepRecord], file: str = "") -> Timeline:
        """Join the header and the records of a run, at least one."""
        missing = [None] * len(header.sites)
        names = dict.fromkeys(name for record in records for name in record.numbers)
        return cls(
            **vars(header),
            steps=np.array([record.step for record in records], np.int64),
            times=np.array([record.time for record in records], np.float64),
            seconds=np.array([record.seconds for record in records], np.float64),
            losses=np.array([record.loss for record in records], np.float64),
            numbers={name: np.array([r.numbers.get(name, missing) for r in records], np.float64) for name in names},
            file=file,
        )

    @property
    def ends(self) -> list[int]:
        """Numbers of the first and the last record."""
        return sorted({0, len(self.steps) - 1})

    def values(self, metric: str) -> Array:
        """Return a metric at every record and site, float64 ``(records, sites)``; NaN if the run lacks it."""
        return self.numbers.get(metric, np.full((len(self.steps), len(self.sites)), np.nan))

    def only(self, layers: Layers) -> Timeline:
        """Return the timeline of some sites, named or numbered as for :func:`normscope.capture`.

        Raises:
            UsageError: if a part names no site.
        """
        numbered: list[Any] = [
            SimpleNamespace(index=number, name=site.name, kind=site.kind, placement=site.placement)
            for number, site in enumerate(self.sites)
        ]
        columns = [site.index for site in select(numbered, layers)]
        sites = tuple(self.sites[column] for column in columns)
        return replace(self, sites=sites, numbers={name: values[:, columns] for name, values in self.numbers.items()})

    def capture_of(self, record: int) -> Path | None:
        """Return the file of a record's capture; None if there is none."""
        path = Path(self.file).parent / (self.captures or "") / capture_name(self.steps[record])
        return path if self.captures is not None and path.is_file() else None

    def rows(self, records: Iterable[int]) -> Iterator[dict[str, Any]]:
        """Yield the rows of a CSV file: all numbers of a record at a site, by the names of metrics."""
        for record in records:
            step = {"step": int(self.steps[record]), "time": self.times[record], "seconds": self.seconds[record]}
            for index, site in enumerate(self.sites):
                about = {"loss": self.losses[record], "site": site.name, "kind": site.kind, "placement": site.placement}
                numbers = {name: values[record, index] for name, values in self.numbers.items()}
                yield as_json({**step, **about, **numbers})


def capture_name(step: int) -> str:
    """Return the name of a step's capture in the folder of captures."""
    return f"step-{step:08d}.safetensors"


def load_timeline(path: str | Path) -> Timeline:
    """Load the file of a :class:`normscope.Probe`, up to its last whole line.

    A run that was resumed from an earlier step replaces the records from there on.

    Raises:
        DataError: if it cannot be read, is malformed before its last line, or contains no record.
    """
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror or error}.") from error
    header: TimelineHeader | None = None
    records: list[StepRecord] = []
    for number, line in enumerate(text.split(b"\n")[:-1], 1):  # a killed process may leave a part of a line
        try:
            if header is None or line.startswith(b'{"normscope_timeline"'):
                header = _header(line, header)
            else:
                record = _record(line, header)
                while records and records[-1].step >= record.step:
                    records.pop()
                records.append(record)
        except ValueError as error:
            raise DataError(f"{path} is no timeline of normscope: line {number}: {visible(str(error))}.") from None
    if header is None or not records:
        raise DataError(f"{path} is no timeline of normscope: it contains no record.")
    return Timeline.of(header, records, str(path))


def _header(line: bytes, before: TimelineHeader | None) -> TimelineHeader:
    """Read a header; a resumed run has the same again."""
    document = json.loads(line)
    if not isinstance(document, Mapping) or "normscope_timeline" not in document:
        raise ValueError("the header is missing")
    if document["normscope_timeline"] != FORMAT:
        raise ValueError(f"it has format {document['normscope_timeline']!r}, and this version reads {FORMAT}")
    header = converted(TimelineHeader, document, "header")
    if before and (header.sites, header.curves) != (before.sites, before.curves):
        raise ValueError("another run, with other sites or curves, begins")
    return header


def _record(line: bytes, header: TimelineHeader) -> StepRecord:
    import msgspec

    record = msgspec.json.decode(line, type=StepRecord)
    for name, values in record.numbers.items():
        if len(values) != len(header.sites):
            raise ValueError(f"{name} has {len(values)} numbers for {len(header.sites)} sites")
    return record
