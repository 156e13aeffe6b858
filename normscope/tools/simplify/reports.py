"""Report of exact rewrites, and its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from normscope.errors import count
from normscope.runtime.records import Record
from normscope.show.tables.table import Column, TextTable, names, number, table_of, words
from normscope.swaps.reports import AboutNetwork


@dataclass(frozen=True)
class SimplifiedNorm(Record):
    """Exact rewrites of one norm.

    Attributes:
        site: path of the norm.
        kind: its name in the table of norms.
        blocked: reason why no RMSNorm has taken its place, or empty.
        folded: ``γ``, ``γ and β`` or empty: parameters that the linear layers behind the norm contain now.
        unfolded: reason why none was folded, or empty.
        change: relative L2 of the norm's output in float64, before γ and β moved; None if it could not be compared.
        removed: relative L2 of the network's output in float64 without the norm, by eps alone; None if it is there.
    """

    site: str
    kind: str
    blocked: str
    folded: str
    unfolded: str
    change: float | None = None
    removed: float | None = None

    _properties: ClassVar[tuple[str, ...]] = ("exact",)

    @property
    def exact(self) -> bool:
        """True if an RMSNorm has taken the place of the LayerNorm."""
        return not self.blocked and self.removed is None


@dataclass(frozen=True, repr=False)
class SimplifyReport(AboutNetwork):
    """Rewrites of a network that change nothing but rounding.

    Attributes:
        norms: all norms, in the order of calls, and then those that cannot be observed.
        float64: relative L2 of the output in float64, at most 1e-9, before norms were removed.
        in_dtype: relative L2 of the output in ``dtype``, in which the network was rewritten.
        dtype: of the network's first parameter.
        samples: number of inputs that were compared.
        subtractions: paths of the modules before which the mean over channels is subtracted from a residual stream.
        untied: paths of linear layers that no longer share an embedding's weight.
        dropout: number of dropout layers, with which training would change the outputs of centred parameters.
        about: ``model``, ``weights`` and ``data`` in words, if known.
    """

    norms: Sequence[SimplifiedNorm]
    float64: float
    in_dtype: float
    dtype: str
    samples: int
    subtractions: tuple[str, ...] = ()
    untied: tuple[str, ...] = ()
    dropout: int = 0
    about: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        exact = f"{len(self.exact)} of {count(len(self.norms), 'norm')} exact"
        return f"SimplifyReport: {exact}, output changed by {self.in_dtype:.0e} in {self.dtype}"

    @property
    def exact(self) -> list[SimplifiedNorm]:
        """The norms that are RMSNorms now and were LayerNorms."""
        return [norm for norm in self.norms if norm.exact]

    @property
    def removed(self) -> list[SimplifiedNorm]:
        """The norms that are gone, as their output is normalized again behind linear layers."""
        return [norm for norm in self.norms if norm.removed is not None]

    @property
    def folded(self) -> list[SimplifiedNorm]:
        """The norms whose parameters the layers behind them contain now."""
        return [norm for norm in self.norms if norm.folded]


def simplify_table(report: SimplifyReport) -> TextTable:
    """Make a table with one line per norm: its exact rewrites, or the reasons against them."""
    columns: list[Column[SimplifiedNorm]] = [
        names("site", lambda norm: norm.site),
        words("kind", lambda norm: norm.kind, 2),
        names("RMSNorm", lambda norm: "removed" if norm.removed is not None else norm.blocked or "exact"),
        names("folded", lambda norm: norm.folded or norm.unfolded),
        Column("change", lambda norm: number(norm.change, ".1e"), drop=1),
    ]
    return table_of(report.norms, columns, caption=[f"on {count(report.samples, 'sample')}"], about="simplify")
