"""Names and initializations of what replaces norms, read by Python, the command line and figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from normscope.norms.sites import NormSite

PAPER_ALPHA = 0.5  # arXiv 2503.10622, section 5, of all but language models; Derf's too (arXiv 2512.10938)


@dataclass(frozen=True)
class Init:
    """Source of A, α and s, by default a fit of the network's pairs.

    Attributes:
        help: description in the command line's help.
        dashes: of figures.
        constants: A, α and s of a site, which take the place of a fit.
        theory: True if A and α follow from the norm, so that a capture is needed, but nothing is fitted.
        calibrated: True if the fitted functions are calibrated.
    """

    help: str
    dashes: Any
    constants: Callable[[NormSite], tuple[float, float, float]] | None = None
    theory: bool = False
    calibrated: bool = False

    @property
    def fits(self) -> bool:
        """True if curves are fitted."""
        return self.constants is None and not self.theory


CALIBRATED = "calibrated"
INITS = {
    "fit": Init("this network's own fits", "-"),
    "theory": Init("A and α in theory", (0, (4, 1.5)), theory=True),
    "paper": Init(f"A = 1 and α = {PAPER_ALPHA}", (0, (1, 1.2)), lambda site: (1.0, PAPER_ALPHA, 0.0)),
    CALIBRATED: Init(
        "from fit, all that follows without training, in the linear layers beside the norms too",
        (0, (6, 1.2)),
        calibrated=True,
    ),
}
_PUBLISHED = {"dyt": "DyT", "dyisru": "DyISRU", "derf": "Derf"}


def published_name(func: str) -> str:
    """Return the name of a requested function in tables and figures: as its paper writes it, if that was the request.

    >>> published_name("dyt"), published_name("tanh"), published_name("dyt, after heal")
    ('DyT', 'tanh', 'DyT, after heal')
    """
    name, comma, remark = func.partition(",")
    return _PUBLISHED.get(name.lower(), name) + comma + remark
