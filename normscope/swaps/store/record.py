"""Texts of a swapped folder: swap.json, read with every value checked, and pointwise.py and config.json, only written.

pointwise.py is :mod:`normscope.swaps.standalone` between instructions for the network and the functions of its curves.
It contains texts of a network, a user or a file only as ASCII literals or, escaped, in its docstring.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from normscope.curves.expressions import curve_from
from normscope.curves.known import CURVES, FREE, Curve
from normscope.errors import ModelError, UsageError, count, unknown
from normscope.runtime.records import converted, is_shape
from normscope.swaps import standalone
from normscope.swaps.start import RMS_NORM

FORMAT = "normscope-swap"
FORMAT_VERSION = 2
RECORD, TENSORS = "swap.json", "model.safetensors"
FILES = (RECORD, TENSORS)
CODE, CONFIG = "pointwise.py", "config.json"
EXACT, FOLDED = "exact rmsnorm", "folded weights"  # functions of exact rewrites; the latter replaces no norm
# Files of transformers' tokenizers and processors; none of them contains code or a pickle.
PREPROCESSING = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "generation_config.json"),
)
ALSO = (CODE, CONFIG, *PREPROCESSING)  # for those who load the network without normscope, which reads none of them
_MOST_AXES = 8
_REMOVED = re.compile(r"(few|random):\d+|frozen|rmsnorm centred")  # functions that normscope wrote before

_HEAD = '''"""{what}, as plain PyTorch.

{remark}
Its weights were those of {weights}.
With FOLDER, where this file lies, on Python's path:

    {example}

It is in eval mode, and has the dtypes of model.safetensors. normscope wrote this file, which is under the MIT License
and imports nothing of it; the weights are under the license that they had before.
"""
'''
_REGISTERED = """
import transformers  # noqa: E402

register(transformers)
"""
_BUNDLES = ("wav2vec2_base", "wav2vec2_large", "wav2vec2_large_lv60k")  # normscope's names of torchaudio's bundles
_DEMO_VIT = "normscope.models.embedded.demo_vit"
_OTHER_WEIGHTS = ("url", "file", "hf_hub_id", "hf_hub_filename", "source", "state_dict", "custom_load")
# Names of a formula in torch; any name that is not here is torch's own.
_IN_TORCH = {"u": "u", "x": "u", "pi": "number(math.pi)", "e": "number(math.e)", "cbrt": "cbrt", "clip": "clip"}
_IN_TORCH |= {"min": "torch.minimum", "max": "torch.maximum"}
# A sentence, lines to import, lines that make the network, and the content of config.json.
_Origin = tuple[str, list[str], list[str], dict[str, Any] | None]


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
    keeps: str = "none"
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
    kept: tuple[KeptNorm, ...] | None = None  # the norms that were chosen to be kept, the most valuable first

    @property
    def description(self) -> str:
        healed = f", healed in {count(self.healed, 'step')}" if self.healed else ""
        kept = f", {count(len(self.kept), 'norm')} kept" if self.kept else ""
        return f"{self.place}{kept}{healed}, of {self.weights}, sha256 {self.sha256[:12]}"

    @property
    def place(self) -> str:
        """The function, and the number of norms that it replaces."""
        return f"{self.func} in place of {count(len(self.sites), 'norm')}" if self.sites else self.func

    def as_json(self) -> str:
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
    folder, remedy = Path(folder), "`normscope swap MODEL -o DIR` writes one."
    path = folder / RECORD
    if not path.exists():
        raise ModelError(f"There is no swap in {folder}: no {RECORD}. {remedy}")
    if not path.is_file():  # a pipe or a device may have no end
        raise ModelError(f"{path} is no regular file; {remedy}")
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
        return _record(document, folder)
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


def _record(document: Mapping[str, Any], folder: Path) -> SwapRecord:
    record = converted(SwapRecord, document, "swap")
    for site in record.sites:
        names = (site.name, site.norm, site.curve, record.model)
        if not all(names) or "\0" in "".join(names):
            raise ValueError(f"a name of {site.name!r:.60} is empty or contains a zero")
        if _REMOVED.fullmatch(site.curve):
            raise ModelError(
                f"The swap in {folder} has {site.curve} in place of {site.name}, which this normscope no longer reads; "
                "swap again, or use the normscope that wrote it."
            )
        shape, axis = site.normalized_shape, site.channel_axis
        if not is_shape(shape) or len(shape) > _MOST_AXES or not -_MOST_AXES <= axis < _MOST_AXES:
            raise ValueError(f"{site.name} has the shape {shape} and channel axis {axis}")
        if site.keeps not in ("all", "channels_last", "to_channels_last", "none"):
            raise ValueError(f"the keeps of {site.name} is {site.keeps!r:.60}")
        if not {site.returns, site.under_autocast or site.returns} <= standalone.RETURNS.keys():
            raise ValueError(f"the dtypes of {site.name} are by {site.returns!r:.60} and {site.under_autocast!r:.60}")
        if (site.eps is not None) != (site.curve == RMS_NORM) or (site.eps or 0) < 0:
            raise ValueError(f"the eps of {site.name} is {site.eps!r}, with {site.curve} there")
        if site.curve not in (FREE, RMS_NORM):
            curve_named(site.curve)
    if len({site.name for site in record.sites}) != len(record.sites) or not (record.sites or record.func == FOLDED):
        raise ValueError("it names a site twice, or none")
    return record


def export(model: nn.Module, record: SwapRecord) -> dict[str, str]:
    """Return the content of pointwise.py, and of config.json where the network's library reads one, by file name."""
    remark, imported, network, config = _origin_of(model, record)
    by_transformers = config is not None and "pointwise" in config
    by_swapped = ["from pointwise import swapped"] if any("swapped(" in line for line in network) else []
    lines = [*(["import pointwise"] if by_transformers else by_swapped), *imported]
    head = _HEAD.format(
        what=f"{in_docstring(record.place)} of {in_docstring(record.model)}",
        remark=remark,
        weights=in_docstring(record.weights),
        example="\n    ".join(lines) + "\n\n    " + "\n    ".join(network),
    )
    body = Path(standalone.__file__).read_text(encoding="utf-8").partition('"""\n')[2]
    names = dict.fromkeys(site.curve for site in record.sites if site.curve not in (FREE, RMS_NORM))
    formulas = {name: CURVES[name].expression if name in CURVES else in_torch(name.partition("=")[2]) for name in names}
    functions = "".join(f"CURVES[{name!a}] = lambda u: {formula}\n" for name, formula in formulas.items())
    code = head + body + ("\n\n" + functions if functions else "") + (_REGISTERED if by_transformers else "")
    files = {"pointwise.py": code}
    return files if config is None else files | {"config.json": json.dumps(config, indent=2) + "\n"}


def in_docstring(text: str) -> str:
    r"""Escape what stands in a docstring between three double quotes: it can neither end it nor be code.

    >>> print(in_docstring("a" + '"' * 3 + chr(10) + "import os"))
    a\"\"\"\nimport os
    """
    return ascii(text)[1:-1].replace('"', '\\"')


class _InTorch(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(_IN_TORCH.get(node.id, f"torch.{node.id}"))

    def visit_Constant(self, node: ast.Constant) -> ast.Name:
        return ast.Name(f"number({float(node.value)!r})")  # type: ignore[arg-type]


def in_torch(formula: str) -> str:
    """Write a formula in u as an expression of torch's functions.

    Raises:
        UsageError: if it is anything but a formula.

    >>> in_torch("u/(1+abs(u)**3)**(1/3)")
    'u / (number(1.0) + torch.abs(u) ** number(3.0)) ** (number(1.0) / number(3.0))'
    """
    curve_from(f"f={formula}")
    return ast.unparse(_InTorch().visit(ast.parse(formula, mode="eval")))


def _origin_of(model: nn.Module, record: SwapRecord) -> _Origin:
    """Describe how a network is made, by its class, its library's records on it and the name that load() took."""
    library, name = type(model).__module__.partition(".")[0], record.model
    of_transformers = _of_transformers if record.sites else _of_plain_transformers
    origins = {"transformers": of_transformers, "timm": _of_timm, "diffusers": _of_diffusers}
    if type(model).__module__ == _DEMO_VIT:
        return _of_demo_vit(model)
    origin = _of_torchaudio(name) if library == "torchaudio" else origins.get(library, lambda model: None)(model)
    remark = f"Make the {in_docstring(type(model).__name__)} as it was before the swap, with its norms and any weights."
    return origin or (remark, [], ["network = ...", "network = swapped(network)"], None)


def _is_public(model: object, library: str) -> bool:
    """True if a library exports an object's class at its top level under its own name."""
    name = type(model).__name__
    return name.isidentifier() and name in dir(sys.modules[library]) and not name.startswith("_")


def _of_transformers(model: Any) -> _Origin | None:
    config: Any = getattr(model, "config", None)
    if not (hasattr(config, "to_json_string") and all(_is_public(part, "transformers") for part in (model, config))):
        return None
    facts = json.loads(config.to_json_string())
    for key in ("auto_map", "_name_or_path"):
        facts.pop(key, None)
    dtypes = [str(part.dtype).removeprefix("torch.") for part in model.parameters() if part.is_floating_point()]
    kind, class_name = f"{config.model_type}_pointwise", type(model).__name__
    facts |= {"model_type": kind, "architectures": ["PointwiseModel"], **({"dtype": dtypes[0]} if dtypes else {})}
    options = {"add_pooling_layer": False} if getattr(model, "pooler", model) is None else {}
    facts["pointwise"] = {"model": class_name, "config": type(config).__name__, "options": options}
    return (
        f"{class_name} of transformers, with config.json beside this file.",
        ["from transformers import AutoModel"],
        ['network = AutoModel.from_pretrained("FOLDER")  # by the class that importing pointwise has registered'],
        facts,
    )


def _of_plain_transformers(model: Any) -> _Origin | None:
    """Describe a network of transformers that has its own classes, and other weights than before."""
    if (origin := _of_transformers(model)) is None:
        return None
    remark, facts = origin[0], dict(origin[3] or {})
    names = facts.pop("pointwise")
    facts |= {"model_type": model.config.model_type, "architectures": [names["model"]]}
    options = "".join(f", {option}={value}" for option, value in names["options"].items())
    load = f'network = {names["model"]}.from_pretrained("FOLDER"{options})'
    return remark, [f"from transformers import {names['model']}"], [load], facts


def _of_timm(model: Any) -> _Origin | None:
    weights = dict(getattr(model, "pretrained_cfg", None) or {})
    architecture = weights.pop("architecture", None)
    if not isinstance(architecture, str) or not hasattr(model, "num_classes"):
        return None
    kept = {key: value for key, value in weights.items() if value is not None and key not in _OTHER_WEIGHTS}
    arguments, classes = getattr(model, "_model_args", {}), {"num_classes": model.num_classes}
    facts = {"architecture": architecture, **classes, "model_args": _plain({**arguments, **classes})}
    facts["pretrained_cfg"] = _plain(kept)
    remark = f"{in_docstring(architecture)} of timm, with config.json beside this file."
    return remark, ["import timm"], ['network = swapped(timm.create_model("local-dir:FOLDER"))'], facts


def _of_diffusers(model: Any) -> _Origin | None:
    if not _is_public(model, "diffusers") or not hasattr(model, "to_json_string"):
        return None
    name, facts = type(model).__name__, json.loads(model.to_json_string())
    facts.pop("_name_or_path", None)
    return (
        f"{name} of diffusers, with config.json beside this file.",
        [f"from diffusers import {name}"],
        [f'network = swapped({name}.from_config({name}.load_config("FOLDER")))'],
        facts,
    )


def _of_torchaudio(name: str) -> _Origin | None:
    bundle = name.upper() if name in _BUNDLES else name.removeprefix("torchaudio:")
    if not bundle.isidentifier() or not bundle.isascii() or not (name in _BUNDLES or name.startswith("torchaudio:")):
        return None
    remark = f"The bundle {bundle} of torchaudio, which fetches its published weights, and these take their place."
    return remark, ["import torchaudio"], [f"network = swapped(torchaudio.pipelines.{bundle}.get_model())"], None


def _of_demo_vit(model: Any) -> _Origin:
    arguments = model.arguments | {"class_token": False, "global_pool": "avg", "fc_norm": False}
    return (
        "The VisionTransformer of timm gives the same bits as normscope's own of that name.",
        ["from timm.models.vision_transformer import VisionTransformer"],
        [f"network = swapped(VisionTransformer(**{arguments}))"],
        None,
    )


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that JSON can represent."""
    plain = {}
    for key, value in values.items():
        with contextlib.suppress(TypeError, ValueError):
            json.dumps(value)
            plain[key] = value
    return plain
