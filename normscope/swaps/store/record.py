"""Record of a saved swap, swap.json, read with every value checked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from normscope.errors import ModelError, UsageError, count, unknown
from normscope.fits.curves.expressions import curve_from
from normscope.fits.curves.known import CURVES, FREE, Curve
from normscope.runtime.records import converted, is_shape
from normscope.swaps.start import RMS_NORM

FORMAT = "normscope-swap"
FORMAT_VERSION = 2
RECORD, TENSORS = "swap.json", "model.safetensors"
FILES = (RECORD, TENSORS)
CODE, CONFIG = "pointwise.py", "config.json"
ALSO = (CODE, CONFIG)  # for those who load the network without normscope, which reads neither
_MOST_AXES = 8


@dataclass(frozen=True)
class SwappedSite:
    """Replacement of one norm, as stored; other fields are as of :class:`normscope.PointwiseFunction`."""

    name: str  # module path
    norm: str  # full class name of the replaced norm
    curve: str  # its name; NAME=FORMULA; ``free``, whose table is among the tensors; or ``rmsnorm``
    normalized_shape: tuple[int, ...]
    channel_axis: int
    per_channel: bool  # each channel has its own α
    shift: bool
    elementwise_affine: bool
    bias: bool
    activated: bool  # an activation follows, as in the norm's class
    eps: float | None  # of ``rmsnorm``; otherwise None
    keeps: str = "none"


@dataclass(frozen=True)
class KeptNorm:
    """A norm that was not replaced, with the median output error if it is swapped or kept.

    The norms before it in the list are kept for both errors, which are None if not finite.
    """

    name: str
    swapped: float | None
    kept: float | None


@dataclass(frozen=True)
class SwapRecord:
    """Record of a swap: its replacements, its network and the data it was fitted to."""

    model: str  # the name that :func:`normscope.load` takes
    weights: str  # the resolved checkpoint and revision of the network before the swap
    data: str  # from which the start values were learned
    func: str  # the requested curve, ``free``, ``best`` or ``rmsnorm``
    init: str | None  # the swap initialization
    healed: int | None  # number of healing steps
    sha256: str  # of the file of tensors
    versions: Mapping[str, str]  # of Python and the libraries
    tied: Mapping[str, str]  # second names of tensors, which are written once
    sites: tuple[SwappedSite, ...]
    kept: tuple[KeptNorm, ...] | None = None  # the norms that were chosen to be kept, the most valuable first

    @property
    def description(self) -> str:
        """Summary in a few words."""
        healed = f", healed in {count(self.healed, 'step')}" if self.healed else ""
        place = f"{self.func} in place of {count(len(self.sites), 'norm')}"
        kept = f", {count(len(self.kept), 'norm')} kept" if self.kept else ""
        return f"{place}{kept}{healed}, of {self.weights}, sha256 {self.sha256[:12]}"

    def as_json(self) -> str:
        """Return the content of swap.json."""
        document = {"format": FORMAT, "version": FORMAT_VERSION, **asdict(self)}
        return json.dumps(sealed(document), indent=2, allow_nan=False) + "\n"


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document with the SHA-256 of all else in it, as JSON with sorted keys, under ``seal``."""
    content = {name: value for name, value in document.items() if name != "seal"}
    return {**content, "seal": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}


def read_record(folder: str | Path) -> SwapRecord:
    """Read the record of a saved swap, without its tensors.

    Raises:
        ModelError: if there is none, or it is damaged, of another kind or of another format version.
    """
    folder = Path(folder)
    if (folder / RECORD).exists() and not (folder / RECORD).is_file():  # a pipe or a device may have no end
        raise ModelError(f"{folder / RECORD} is no regular file; `normscope swap MODEL -o DIR` writes one.")
    try:
        document = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogateescape")  # fails on what no name holds
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ModelError(
            f"There is no swap in {folder}: no {RECORD}. `normscope swap MODEL -o DIR` writes one."
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"Cannot read {folder / RECORD}: {error}.") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ModelError(f"{folder / RECORD} is no swap's; `normscope swap MODEL -o DIR` writes one.")
    if document.get("version") != FORMAT_VERSION:
        raise ModelError(
            f"{folder} has swap format version {document.get('version')!r}; this normscope reads version "
            f"{FORMAT_VERSION}. Swap again, or use the normscope that wrote it."
        )
    if document.get("seal") != sealed(document)["seal"]:
        raise damaged(folder, f"{RECORD} does not hold what was written (another sha256)")
    try:
        return _record(document)
    except ValueError as error:
        raise damaged(folder, str(error)) from error


def damaged(folder: Path, why: str) -> ModelError:
    return ModelError(f"The swap in {folder} is damaged: {why}.")


def curve_named(text: str) -> Curve:
    """Return a curve by the name or formula in swap.json.

    Raises:
        ValueError: if there is none.
    """
    if "=" in text:
        try:
            return curve_from(text)
        except UsageError as error:
            raise ValueError(str(error).rstrip(".")) from error
    if text not in CURVES:
        raise ValueError(unknown("curve", text, [*CURVES, FREE, RMS_NORM]).rstrip(".?"))
    return CURVES[text]


def _record(document: Mapping[str, Any]) -> SwapRecord:
    record = converted(SwapRecord, document, "swap")
    for site in record.sites:
        names = (site.name, site.norm, site.curve, record.model)
        if not all(names) or "\0" in "".join(names):
            raise ValueError(f"a name of {site.name!r:.60} is empty or contains a zero")
        shape, axis = site.normalized_shape, site.channel_axis
        if not is_shape(shape) or len(shape) > _MOST_AXES or not -_MOST_AXES <= axis < _MOST_AXES:
            raise ValueError(f"{site.name} has the shape {shape} and channel axis {axis}")
        if site.keeps not in ("all", "channels_last", "none"):
            raise ValueError(f"the keeps of {site.name} is {site.keeps!r:.60}")
        if (site.eps is not None) != (site.curve == RMS_NORM) or (site.eps or 0) < 0:
            raise ValueError(f"the eps of {site.name} is {site.eps!r}, with {site.curve} there")
        if site.curve not in (FREE, RMS_NORM):
            curve_named(site.curve)
    if len({site.name for site in record.sites}) != len(record.sites) or not record.sites:
        raise ValueError("it names a site twice, or none")
    return record
