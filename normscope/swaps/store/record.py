"""Record of a swapped folder, swap.json: every value is checked as it is read."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from normscope.curves.expressions import curve_from
from normscope.curves.known import CURVES, FREE, Curve
from normscope.errors import ModelError, UsageError, count, unknown
from normscope.runtime.records import converted
from normscope.swaps import standalone
from normscope.swaps.start import RMS_NORM

FORMAT = "normscope-swap"
FORMAT_VERSION = 3
RECORD, TENSORS = "swap.json", "model.safetensors"
FILES = (RECORD, TENSORS)
CODE, CONFIG = "pointwise.py", "config.json"
EXACT, FOLDED = "exact rmsnorm", "folded weights"  # functions of exact rewrites; the latter replaces no LayerNorm
REMOVED = "removed"  # in the place of a curve
# Files of transformers' tokenizers and processors; none of them contains code or a pickle.
PREPROCESSING = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "generation_config.json"),
)
ALSO = (CODE, CONFIG, *PREPROCESSING)  # for those who load the network without normscope, which reads none of them
_MOST_AXES = 8


@dataclass(frozen=True)
class SwappedSite:
    """Replacement of one norm, as stored; other fields are as of :class:`normscope.PointwiseFunction`."""

    name: str  # module path
    norm: str  # full class name of the replaced norm
    curve: str  # its name; NAME=FORMULA; ``free``, whose table is among the tensors; ``rmsnorm``
    normalized_shape: tuple[int, ...]
    channel_axis: int
    per_channel: bool  # each channel has its own α
    shift: bool
    elementwise_affine: bool
    bias: bool
    activated: bool  # an activation follows, as in the norm's class
    eps: float | None  # of ``rmsnorm``; otherwise None
    keeps: Literal["all", "channels_last", "to_channels_last", "none"] = "none"
    returns: str = "least"
    under_autocast: str = ""
    overwrites: tuple[str, ...] = ()
    ignores: tuple[str, ...] = ()


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
    centred: Mapping[str, int] = field(default_factory=dict)  # axes of means that are subtracted before modules
    kept: tuple[KeptNorm, ...] | None = None  # the norms that were chosen to be kept, the most valuable first
    example: str = ""  # a line of Python that makes the network without normscope, which never runs it

    @property
    def description(self) -> str:
        healed = f", healed in {count(self.healed, 'step')}" if self.healed else ""
        kept = f", {count(len(self.kept), 'norm')} kept" if self.kept else ""
        return f"{self.change}{kept}{healed}, of {self.weights}, sha256 {self.sha256[:12]}"

    @property
    def change(self) -> str:
        """The function, and the number of norms that it replaces."""
        return f"{self.func} in place of {count(len(self.sites), 'norm')}" if self.sites else self.func

    @property
    def library(self) -> str:
        """The library whose own classes load the folder, by ``example``; empty if the folder's code must help them."""
        return "" if "pointwise" in self.example else self.example.removeprefix("import ").partition(";")[0]

    def as_json(self) -> str:
        document = {"format": FORMAT, "version": FORMAT_VERSION, **asdict(self)}
        return json.dumps(sealed(document), indent=2, allow_nan=False) + "\n"


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document with the SHA-256 of all else in it, as JSON with sorted keys, under ``seal``."""
    content = {name: value for name, value in document.items() if name != "seal"}
    return {**content, "seal": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}


def read_record(folder: str | Path) -> SwapRecord:
    """Read the record of a saved swap, without its tensors; ModelError if there is none that this version reads."""
    folder, remedy = Path(folder), "`normscope swap MODEL -o DIR` writes one."
    path = folder / RECORD
    if not path.exists():
        raise ModelError(f"There is no swap in {folder}: no {RECORD}. {remedy}")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogateescape")  # fails for text that is no Unicode
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"Cannot read {path}: {error}.") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ModelError(f"{path} does not describe a swap; {remedy}")
    if document.get("version") != FORMAT_VERSION:
        raise ModelError(
            f"{folder} has swap format version {document.get('version')!r}; this normscope reads version "
            f"{FORMAT_VERSION}. Swap again, or use the normscope that wrote it."
        )
    if document.get("seal") != sealed(document)["seal"]:
        raise damaged(folder, f"{RECORD} was changed after it was written (its sha256 differs)")
    try:
        return _record(document)
    except ValueError as error:
        raise damaged(folder, str(error)) from error


def damaged(folder: Path, why: str) -> ModelError:
    return ModelError(f"The swap in {folder} is damaged: {why}.")


def curve_named(text: str) -> Curve:
    """Return a curve by the name or formula in swap.json; ValueError if there is none."""
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
        is_sound = min(shape, default=0) > 0 and math.prod(shape) < 2**63 and len(shape) <= _MOST_AXES
        if not is_sound or not -_MOST_AXES <= axis < _MOST_AXES:
            raise ValueError(f"{site.name} has the shape {shape} and channel axis {axis}")
        if not {site.returns, site.under_autocast or site.returns} <= standalone.RETURNS.keys():
            raise ValueError(f"the dtypes of {site.name} are by {site.returns!r:.60} and {site.under_autocast!r:.60}")
        if (site.eps is not None) != (site.curve == RMS_NORM) or (site.eps or 0) < 0:
            raise ValueError(f"the eps of {site.name} is {site.eps!r}, with {site.curve} there")
        if site.curve not in (FREE, RMS_NORM, REMOVED):
            curve_named(site.curve)
    if any("\0" in path or not -_MOST_AXES <= axis < 0 for path, axis in record.centred.items()):
        raise ValueError(f"it subtracts means over {dict(record.centred)}")
    if len({site.name for site in record.sites}) != len(record.sites) or not (record.sites or record.func == FOLDED):
        raise ValueError("it names a site twice, or none")
    return record
