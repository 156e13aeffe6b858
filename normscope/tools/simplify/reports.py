"""Report of exact rewrites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from normscope.errors import count
from normscope.runtime.records import Record
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
    """

    site: str
    kind: str
    blocked: str
    folded: str
    unfolded: str
    change: float | None = None

    _properties: ClassVar[tuple[str, ...]] = ("exact",)

    @property
    def exact(self) -> bool:
        """True if an RMSNorm has taken the place of the LayerNorm."""
        return not self.blocked


@dataclass(frozen=True, repr=False)
class SimplifyReport(AboutNetwork):
    """Rewrites of a network that change nothing but rounding.

    Attributes:
        norms: all norms, in the order of calls, and then those that cannot be observed.
        float64: relative L2 of the output in float64, at most 1e-9.
        own: relative L2 of the output in ``dtype``, in which the network was rewritten.
        dtype: of the network's first parameter.
        samples: number of inputs that were compared.
        untied: paths of linear layers that no longer share an embedding's weight.
        training: True if the network is in training mode; the comparison is in eval mode.
        dropout: number of dropout layers, with which training would change the outputs of centred parameters.
        about: ``model``, ``weights`` and ``data`` in words, if known.
    """

    norms: Sequence[SimplifiedNorm]
    float64: float
    own: float
    dtype: str
    samples: int
    untied: tuple[str, ...] = ()
    training: bool = False
    dropout: int = 0
    about: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        exact = f"{len(self.exact)} of {count(len(self.norms), 'norm')} exact"
        return f"SimplifyReport: {exact}, output changed by {self.own:.0e} in {self.dtype}"

    @property
    def exact(self) -> list[SimplifiedNorm]:
        """The norms that are RMSNorms now and were LayerNorms."""
        return [norm for norm in self.norms if norm.exact]

    @property
    def folded(self) -> list[SimplifiedNorm]:
        """The norms whose parameters the layers behind them contain now."""
        return [norm for norm in self.norms if norm.folded]
