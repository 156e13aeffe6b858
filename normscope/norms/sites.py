"""Norm sites: a record of each, and their selection by index, name, depth or placement."""

from __future__ import annotations

import fnmatch
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from normscope.errors import UsageError, unknown
from normscope.runtime.records import Record

PLACEMENTS = ("pre-norm", "post-norm", "qk", "final")
_CALL = re.compile(r":\w+_norm\.\d+$")  # of a function, behind the path of a module


@dataclass(frozen=True)
class PointwiseParameters:
    """Parameters of a point-wise function in place of a norm, weight · f(αx + s) + bias.

    Attributes:
        curve: name of f, as :func:`normscope.curve_of` takes it; ``free`` for a table of values.
        alpha: α: one number, or one per channel.
        shift: s, likewise; ``(0.0,)`` for a function without s.
        weight: one number, or one per channel.
    """

    curve: str
    alpha: tuple[float, ...]
    shift: tuple[float, ...]
    weight: tuple[float, ...]


@dataclass(frozen=True)
class NormSite:
    """One normalization of a network: a norm module, a call of a norm function, or a point-wise function.

    Attributes:
        index: its number in the order of first calls.
        name: its module path; of a function, the path of the module whose forward calls it, the function and the
            number of the call there: ``blocks.3.attn:rms_norm.0``. In place of a path, ``(model)`` is the network's own
            forward, and ``(forward)`` what runs outside of all modules, such as a method passed as ``forward``.
        kind: its name in the table of norms.
        normalized_shape: sizes of the axes that share one statistic, at the first call.
        channel_axis: the axis or axes of the norm's input that number the channels.
        channels: number of channels.
        eps: added under the root.
        affine: whether it has a weight or a bias of its own.
        placement: ``pre-norm``, ``post-norm``, ``qk``, ``final``, or None for a norm beside the residual stream.
        calls: number of calls in one forward pass.
        tokens_per_sample: number of vectors that it normalizes for one sample, over all calls.
        centred: whether it subtracts the token's mean.
        bounded: whether the statistics are the token's own, so that √d bounds |y|; of a point-wise function, whether 1
            does.
        grouped: whether a token is a group of channels over all positions; its size may differ from input to input.
        form: key of the token's form in :data:`normscope.norms.formulas.FORMS`; None for running statistics and
            for a formula that the user registered.
        pointwise: parameters of a point-wise function; None for a norm.
        called_with: arguments beside its input that change its output, such as ``scale=2.0``; empty without them.
    """

    index: int
    name: str
    kind: str
    normalized_shape: tuple[int, ...]
    channel_axis: int | tuple[int, ...]
    channels: int
    eps: float
    affine: bool
    placement: str | None
    calls: int
    tokens_per_sample: int
    centred: bool
    bounded: bool = True
    grouped: bool = False
    form: str | None = None
    pointwise: PointwiseParameters | None = None
    called_with: str = ""

    @property
    def path(self) -> str:
        """Path of the module, or of the module whose forward calls the function; empty for the network itself."""
        path = _CALL.sub("", self.name)
        return "" if path in ("(model)", "(forward)") else path

    @property
    def is_call(self) -> bool:
        """True for a call of a norm function, False for a module."""
        return _CALL.search(self.name) is not None

    @property
    def replaceable(self) -> bool:
        """True for norm modules, which a swap can replace, unless their calls have other arguments that matter."""
        return not self.is_call and self.pointwise is None and not self.called_with

    @property
    def d(self) -> int:
        """Number of elements of one token; of a grouped norm, at its first call."""
        return torch.Size(self.normalized_shape).numel()

    @property
    def has_diagonal(self) -> bool:
        """True if the diagonal of its Jacobian has a closed form per token, as its sums require."""
        return self.form is not None and not self.grouped and self.d > 1

    @property
    def channels_differ(self) -> bool:
        """True for a point-wise function with one α per channel, whose pairs show f channel by channel alone."""
        return self.pointwise is not None and len(self.pointwise.alpha) > 1

    @property
    def bound(self) -> float:
        """Largest possible |y|: √(d−1) with centring, √d without, 1 of a bounded point-wise function, else infinite."""
        if not self.bounded:
            return math.inf
        return math.sqrt(self.d - self.centred) if self.pointwise is None else 1.0


@dataclass(frozen=True)
class SkippedNorm(Record):
    """A normalization that cannot be observed, and the reason."""

    name: str
    kind: str
    reason: str


_NAMED_IN_AN_ERROR = 30

Layers = str | int | Sequence[int | str] | None
_FEW = 4  # sites of a figure

_NUMBER = r"(?<![^.])\d+(?![^.])"  # a whole part of a module path


def kind_of_site(name: str) -> str:
    """Return the kind of a site: its module path with ``*`` in place of numbers.

    >>> kind_of_site("blocks.11.norm1"), kind_of_site("blocks.11:rms_norm.0")
    ('blocks.*.norm1', 'blocks.*:rms_norm.0')
    """
    path = _CALL.sub("", name)
    return re.sub(_NUMBER, "*", path) + name[len(path) :]


# Applied in this order to a kind of site.
_ABBREVIATIONS = (
    (r"(?i)(?<!\*)\.(layer_?)?norm$", ""),  # downsample.norm, output.LayerNorm
    (r"(?i)(?<=\w)_?layer_?norm$|\blayer_?norm_(?=\w)", ""),  # final_layer_norm, layernorm_before
    (r"(?i)\blayer_?norm$", "norm"),
    (r":(\w+)_norm(?=\.\d+$)", r":\1"),  # attn:rms_norm.0
    (r"attention(\.output)?", "attn"),
    (r"\boutput\b", "out"),
)


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Return a short name of each site, unique among them: its numbers, and the fewest words that identify its kind.

    >>> bert = ["encoder.layer.3.attention.output.LayerNorm", "encoder.layer.4.output.LayerNorm"]
    >>> list(short_names(bert).values())
    ['3.attn', '4.out']
    >>> list(short_names(["blocks.0.norm1", "blocks.0.norm2", "norm"]).values())
    ['0.norm1', '0.norm2', 'norm']
    >>> list(short_names(["h.0:rms_norm.0", "h.0.attn:rms_norm.0", "h.0.attn:rms_norm.1"]).values())
    ['0:rms.0', '0.attn:rms.0', '0.attn:rms.1']
    """
    kinds = {name: kind_of_site(name) for name in names}
    paths = [_words(kind) for kind in kinds.values()]
    columns = zip(*(path[:-1] for path in paths), strict=False)
    n_shared = sum(1 for _ in itertools.takewhile(lambda column: set(column) == {column[0]} - {"*"}, columns))
    parts = {".".join(path): path[n_shared:] for path in paths}
    short: dict[str, str] = {}
    for n_words in range(1, max(map(len, paths), default=0) + 1):
        choices = {kind: set(_abbreviations(path, n_words)) for kind, path in parts.items()}
        uses = Counter(itertools.chain.from_iterable(choices.values()))
        for kind in parts.keys() - short.keys():
            if unique := [choice for choice in choices[kind] if uses[choice] == 1]:
                short[kind] = min(unique, key=lambda choice: (len(choice), choice))
    return {name: _numbered(short.get(kind, kind), name) for name, kind in kinds.items()}


def _words(kind: str) -> list[str]:
    return re.split(r"\.(?!\d+$)", kind)  # the number of a call belongs to the last word


def _abbreviations(path: Sequence[str], n_words: int) -> Iterator[str]:
    """Yield the path, abbreviated, with all its numbers, its last word and ``n_words`` − 1 of the words before."""
    text = ".".join(path)
    for pattern, replacement in _ABBREVIATIONS:
        text = re.sub(pattern, replacement, text)
    words = _words(text)
    indices = [n for n, word in enumerate(words) if word != "*"][:-1]
    for before in itertools.combinations(indices, n_words - 1):
        dropped = set(indices) - set(before)
        yield ".".join(word for n, word in enumerate(words) if n not in dropped)


def _numbered(kind: str, name: str) -> str:
    numbers = iter(re.findall(_NUMBER, _CALL.sub("", name)))
    return re.sub(r"\*", lambda _: next(numbers, "*"), kind)  # a module may be named *


def is_number(layers: str) -> bool:
    """True if layers are a lone number of sites, which :func:`select` spreads over the depth.

    >>> is_number("4"), is_number("4-4")
    (True, False)
    """
    return re.fullmatch(r"\s*-?\d+\s*", layers) is not None


def select(sites: Sequence[NormSite], layers: Layers = "all") -> list[NormSite]:
    """Pick norm sites.

    Args:
        sites: of :func:`normscope.norms.trace.find_norms`.
        layers: ``"all"``; a number of sites: the first, the last, and the rest evenly over the depth, alternating
            between the kinds of norm in a block (:func:`kind_of_site`); None for four, or all of fewer; or, as a list
            or separated by commas, indices, ranges (``4-11``, both ends included), module paths, globs, placements
            (``pre-norm``, ``final``) and kinds of norm (``LayerNorm``). ``[8]`` and ``"8-8"`` are site 8.

    Returns:
        The sites in the order of their first calls, each once.

    Raises:
        UsageError: if an entry names no site, or if there are fewer sites than the number.

    >>> names = [f"blocks.{i // 2}.norm{i % 2 + 1}" for i in range(8)] + ["norm"]
    >>> rest = ("LayerNorm", (8,), -1, 8, 1e-6, True, None, 1, 1, True)
    >>> sites = [NormSite(i, name, *rest) for i, name in enumerate(names)]
    >>> [site.name for site in select(sites, 3)]
    ['blocks.0.norm1', 'blocks.1.norm2', 'norm']
    >>> [site.index for site in select(sites, "0,4-5,blocks.3.*")]
    [0, 4, 5, 6, 7]
    >>> len(select(sites, "LayerNorm"))
    9
    """
    if isinstance(layers, str) and is_number(layers):
        layers = int(layers)
    if layers is None:
        layers = min(_FEW, len(sites))
    if isinstance(layers, int):
        return _along_depth(sites, layers)
    entries = [entry.strip() for entry in (layers.split(",") if isinstance(layers, str) else map(str, layers))]
    chosen = {index for entry in entries if entry for index in _matching(sites, entry)}
    if not chosen:
        raise UsageError(f"The layers {layers!r} name no norm site; for example: all, 4, '0,8,24', '4-11', '*.norm1'.")
    return [site for site in sites if site.index in chosen]


def _along_depth(sites: Sequence[NormSite], count: int) -> list[NormSite]:
    """Take the first site, the last, and one near each even step between them: of the kind taken least so far.

    Sites alternate in most networks (norm1, norm2, norm1 …), so that equal steps might meet a single kind.
    """
    if count < 1:
        hint = "" if count else " The norm site with the number 0 is '0-0', and [0] in Python."
        raise UsageError(f"The number of layers must be at least 1, not {count}.{hint}")
    if count > len(sites):
        raise UsageError(f"The number of layers is {count}, but there are {len(sites)} norm sites; 'all' takes all.")
    kinds = [(kind_of_site(site.name), site.kind) for site in sites]
    if count == 1:
        return [sites[(len(sites) - 1) // 2]]
    step = (len(sites) - 1) / (count - 1)
    taken, chosen = Counter([kinds[0], kinds[-1]]), [0]
    for number in range(1, count - 1):
        near = range(math.ceil((number - 0.5) * step), math.ceil((number + 0.5) * step))
        last = kinds[chosen[-1]]
        site = min(near, key=lambda n: (taken[kinds[n]], kinds[n] == last, abs(n - number * step)))
        taken[kinds[site]] += 1
        chosen.append(site)
    return [sites[n] for n in [*chosen, -1]]


def _matching(sites: Sequence[NormSite], text: str) -> list[int]:
    names = {site.name: site.index for site in sites}
    numbers = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if text == "all":
        return list(names.values())
    if text in names:
        return [names[text]]
    if numbers:
        first, last, indices = int(numbers[1]), int(numbers[2] or numbers[1]), list(names.values())
        if first > last or not {first, last} <= set(indices):
            dense = indices == list(range(indices[0], indices[-1] + 1))
            numbered = f"{indices[0]} to {indices[-1]}" if dense else ", ".join(map(str, indices))
            raise UsageError(f"There are no layers {text}: the norm sites are numbered {numbered}.")
        return [index for index in indices if first <= index <= last]
    if text in PLACEMENTS and not any(site.placement == text for site in sites):
        placements = sorted({site.placement for site in sites if site.placement})
        raise UsageError(f"No norm here is {text}; there are {', '.join(placements) or 'none with a placement'}.")
    if text.startswith("least:"):
        raise UsageError(f"{text} is for `normscope swap` and `swap-bench`, which then swap the least harmful norms.")
    matches = [site.index for site in sites if text in (site.placement, site.kind)]
    matches = matches or [index for name, index in names.items() if fnmatch.fnmatchcase(name, text)]
    if not matches:
        error = unknown("norm site", text, [*names, *dict.fromkeys(site.kind for site in sites)])
        if len(names) > _NAMED_IN_AN_ERROR and "Did you mean" not in error:
            error = f"There is no norm site {text!r} among {len(names)}; `normscope layers` lists them."
        raise UsageError(error)
    return matches
