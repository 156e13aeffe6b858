"""pointwise.py: a swapped network as plain PyTorch, for processes that have no normscope.

It is written, and never read: :func:`normscope.load_swapped` goes by swap.json alone. Whatever comes from a network,
from a user or from a file stands in it as a literal of ASCII signs or as part of a docstring, escaped.
"""

from __future__ import annotations

import ast
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from normscope.errors import count
from normscope.fits.curves.known import CURVES, FREE
from normscope.swaps.start import RMS_NORM
from normscope.swaps.store.record import SwappedSite, SwapRecord

_PUBLISHED = {
    "tanh": (
        "DyT",
        "Dynamic Tanh, arXiv 2503.10622: weight · tanh(alpha · x) + bias, there without a shift",
    ),
    "isru": ("DyISRU", "arXiv 2503.21708: weight · x / √(x² + C) + bias, with C = 1 / alpha²"),
    "erf": ("Derf", "Dynamic erf, arXiv 2512.10938: weight · erf(alpha · x + shift) + bias"),
}
_SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**", ast.UAdd: "+", ast.USub: "-"}
_CALLS = {
    **{
        name: f"torch.{name}"
        for name in (
            *("abs", "sign", "sqrt", "exp", "expm1", "log", "log1p", "sin", "cos", "tan", "sinh", "cosh", "tanh"),
            *("asinh", "atan", "arctan", "erf", "sigmoid", "minimum", "maximum"),
        )
    },
    "min": "torch.minimum",
    "max": "torch.maximum",
    "cbrt": "cbrt",
    "clip": "clip",
}
_ACTIVATIONS = ("drop", "act", "activation")  # children of timm's norms, and of BiT's, that run after the affine step

_HEADER = '''"""{what}, as plain PyTorch.

{origin}
With FOLDER, where this file lies, on Python's path:

    {example}

It is in eval mode, and has the dtypes of model.safetensors. normscope wrote this file, which is under the MIT License
and imports nothing of it; the weights are under the license that they had before.
"""

import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch._prims_common import suggest_memory_format
{imports}
WEIGHTS = Path(__file__).with_name("model.safetensors")
TIED = {tied}  # tensors that are others under another name


class PointwiseFunction(nn.Module):
    """weight · f(alpha · x + shift) + bias, elementwise; computed in float32 at least.

    alpha and shift are one number, (1,), or one a channel; weight and bias one a channel, or weight one number, (1,).
    """

    eps = math.nan  # unequal to all, so that nn.TransformerEncoderLayer does not take this for a LayerNorm

    def __init__(
        self, *shape, channel_axis=-1, per_channel=False, shift=False, affine=True, bias=True, activations=(),
        keeps="none"
    ):
        super().__init__()
        self.channel_axis, self.activations, self.keeps = channel_axis, activations, keeps
        self.alpha = nn.Parameter(torch.full(shape if per_channel else (1,), 0.5))
        self.shift = nn.Parameter(torch.zeros(self.alpha.shape)) if shift else None
        self.weight = nn.Parameter(torch.ones(shape if affine else (1,)))
        self.bias = nn.Parameter(torch.zeros(shape)) if bias else None

    def forward(self, x=None, **named):
        if x is None:  # some libraries call a norm with its input's name
            (x,) = named.values()
        if self.keeps != "all" and not x.is_contiguous():  # the strides that the norm returned
            kept = suggest_memory_format(x) if self.keeps == "channels_last" else torch.contiguous_format
            x = x.contiguous(memory_format=kept)
        inside = torch.promote_types(x.dtype, torch.float32)
        alpha, shift, weight, bias = (
            None if part is None else self.along_channels(part, x).to(inside)
            for part in (self.alpha, self.shift, self.weight, self.bias)
        )
        u = alpha * x.to(inside)
        if shift is not None:
            u = u + shift
        y = weight * self.f(u)
        if bias is not None:
            y = y + bias
        y = y.to(dtype_after(x, self.weight))
        for name in self.activations:
            y = getattr(self, name)(y)
        return y

    def along_channels(self, part, x):
        axis = self.channel_axis
        behind = (-axis if axis < 0 else x.ndim - axis) - 1  # axes of x after that of the channels
        return part if part.numel() == 1 else part.view(*part.shape, *[1] * behind)

    def f(self, u):
        raise NotImplementedError


def dtype_after(x, weight):
    """The dtype of x; but of a float32 x, that of a weight in half precision, as norms do."""
    is_half = weight is not None and weight.dtype in (torch.float16, torch.bfloat16)
    return weight.dtype if is_half and x.dtype == torch.float32 else x.dtype
'''
_CURVE = '''

class {name}(PointwiseFunction):
    """{text}."""

    def f(self, u):
        return {expression}
'''
_FORMULAS = """

def number(value):
    return torch.tensor(value, dtype=torch.float64)


def cbrt(x):
    return torch.sign(x) * x.abs().pow(1 / 3)


def clip(x, low, high):
    return torch.minimum(torch.maximum(x, low), high)
"""
_FREE = '''

class Lines(nn.Module):
    """A function as straight lines between points; beyond the first and the last point they go on."""

    def __init__(self, points):
        super().__init__()
        for name, size in (("at", points), ("mean", points), ("slopes", points + 1)):
            self.register_buffer(name, torch.zeros(size))

    def forward(self, u):
        at, mean, slopes = (part.to(u) for part in (self.at, self.mean, self.slopes))
        piece = torch.searchsorted(at, u.detach().contiguous())
        known = (piece - 1).clamp_min(0)
        return mean[known] + slopes[piece] * (u - at[known])

    def _apply(self, fn, recurse=True):
        """Go to another device, but never to half precision: neighbouring points would fall into one."""
        for name, part in self.named_buffers():
            setattr(self, name, part.to(fn(part).device))
        return self


class Free(PointwiseFunction):
    """f is E[y|x]: the mean of what the norm gave, for each x."""

    def __init__(self, *shape, points, **options):
        super().__init__(*shape, **options)
        self.table = Lines(points)

    def f(self, u):
        return self.table(u)
'''
_RMS = '''

class RMSNorm(nn.Module):
    """weight · x / √(mean of x² + eps) + bias over the channels, computed in float32 at least."""

    eps = math.nan  # unequal to all, so that nn.TransformerEncoderLayer does not take this for a LayerNorm

    def __init__(self, *shape, variance_epsilon, channel_axis=-1, affine=True, bias=True):
        super().__init__()
        self.shape, self.channel_axis, self.variance_epsilon = shape, channel_axis, variance_epsilon
        self.weight = nn.Parameter(torch.ones(shape)) if affine else None
        self.bias = nn.Parameter(torch.zeros(shape)) if bias else None

    def forward(self, x=None, **named):
        if x is None:  # some libraries call a norm with its input's name
            (x,) = named.values()
        inside = torch.promote_types(x.dtype, torch.float32)
        y = x.to(inside) if self.channel_axis == -1 else x.to(inside).movedim(self.channel_axis, -1)
        weight = None if self.weight is None else self.weight.to(inside)
        y = nn.functional.rms_norm(y, self.shape, weight, self.variance_epsilon)
        if self.bias is not None:
            y = y + self.bias.to(inside)
        y = y.to(dtype_after(x, self.weight))
        return y if self.channel_axis == -1 else y.movedim(-1, self.channel_axis)
'''
_FOOTER = '''

def modules():
    """What stands in the place of each norm, by the norm's path."""
    return {{
{sites}    }}


def put_in(network):
    """Put these modules, whose weights are not loaded yet, in the place of a network's norms; returns the network."""
    for path, module in modules().items():
        norm = network.get_submodule(path)
        for name in getattr(module, "activations", ()):
            module.add_module(name, norm.get_submodule(name))
        module.train(norm.training)
        for parent in list(network.modules()):
            for name, child in list(parent._modules.items()):
                if child is norm:
                    setattr(parent, name, module)
    return network


def swapped(network, weights=WEIGHTS):
    """Make the swapped network of one that has its norms; its own weights do not matter. Changes it, and returns it.

    Raises RuntimeError, or AttributeError, if it is of another architecture.
    """
    tensors = load_file(weights)
    tensors |= {{name: tensors[kept] for name, kept in TIED.items()}}
    put_in(network)
    for name, own in network.state_dict(keep_vars=True).items():
        if name in tensors:
            own.data = own.data.to(tensors[name].dtype)
    network.load_state_dict(tensors)
    return network.eval()
'''


def standalone(model: nn.Module, record: SwapRecord, tensors: Mapping[str, Tensor]) -> tuple[str, str | None]:
    """Return pointwise.py of a swapped network, and what config.json beside it holds, None where its library has none.

    Args:
        model: the network, with all that was swapped in.
        record: what was put where.
        tensors: of model.safetensors, by name.
    """
    origin = origin_of(model, record.model, free=any(site.curve == FREE for site in record.sites))
    classes, lines = _Classes(), []
    for site in record.sites:
        made = _made(site, classes.of(site.curve), tensors, model.get_submodule(site.name))
        lines.append(f"        {site.name!a}: {made},\n")
    norms = count(len(record.sites), "norm")
    what = f"{in_docstring(record.func)} in place of {norms} of {in_docstring(record.model)}"
    header = _HEADER.format(
        what=what,
        origin=_wrapped_origin(origin, record),
        example="\n    ".join(origin.example).replace("\n    \n", "\n\n"),
        imports=origin.imports,
        tied=ascii(dict(record.tied)),
    )
    return header + classes.text + _FOOTER.format(sites="".join(lines)) + origin.tail, origin.config


class _Classes:
    """The classes that the sites need, each once."""

    def __init__(self) -> None:
        self.text = ""
        self._names: dict[str, str] = {}

    def of(self, curve: str) -> str:
        """Return the class of a curve as swap.json names it, and write it if it is not there yet."""
        name = CURVES[curve].function_name if curve in CURVES else curve
        if name not in self._names:
            self._names[name], text = self._new(name)
            if "number(" in text and _FORMULAS not in self.text:
                self.text += _FORMULAS
            self.text += text
        return self._names[name]

    def _new(self, curve: str) -> tuple[str, str]:
        if curve == FREE:
            return "Free", _FREE
        if curve == RMS_NORM:
            return "RMSNorm", _RMS
        if curve in _PUBLISHED:
            name, text = _PUBLISHED[curve]
            return name, _CURVE.format(name=name, text=text, expression=CURVES[curve].expression)
        word, _, formula = curve.partition("=")
        name = f"{word[0].upper()}{word[1:]}Curve"
        name += "_" * sum(other.rstrip("_") == name for other in self._names.values())
        expression = _of_formula(formula) if formula else CURVES[curve].expression
        text = f"f(u) = {in_docstring(formula) if formula else CURVES[curve].formula}"
        return name, _CURVE.format(name=name, text=text, expression=expression)


def _made(site: SwappedSite, name: str, tensors: Mapping[str, Tensor], module: nn.Module) -> str:
    """The call that makes what stands at a site."""
    options: dict[str, object] = {}
    if site.channel_axis != -1:
        options["channel_axis"] = site.channel_axis
    if site.eps is not None:
        options["variance_epsilon"] = site.eps
    if site.curve == FREE:
        options["points"] = len(tensors[f"{site.name}.table.at"])
    options |= {"per_channel": True} if site.per_channel else {}
    options |= {"shift": True} if site.shift else {}
    options |= {} if site.elementwise_affine else {"affine": False}
    options |= {} if site.bias else {"bias": False}
    options |= {"activations": activations} if (activations := _activations(module, site)) else {}
    options |= {"keeps": keeps} if (keeps := getattr(module, "keeps", "none")) != "none" else {}
    arguments = [*map(str, site.normalized_shape), *(f"{key}={value!r}" for key, value in options.items())]
    return f"{name}({', '.join(arguments)})"


def _activations(module: nn.Module, site: SwappedSite) -> tuple[str, ...]:
    """Names of the children that run after a site's affine step."""
    there = dict(module.named_children()) if site.activated else {}
    return tuple(name for name in _ACTIVATIONS if name in there)


def _of_formula(formula: str) -> str:
    """Write a formula in u as an expression of torch's functions; it was parsed before, and holds nothing else.

    >>> _of_formula("u/(1+abs(u)**3)**(1/3)")
    '(u / ((number(1.0) + (torch.abs(u) ** number(3.0))) ** (number(1.0) / number(3.0))))'
    """
    return _term(ast.parse(formula, mode="eval").body)


def _term(node: ast.expr) -> str:
    match node:
        case ast.Name(id="u" | "x"):
            return "u"
        case ast.Name(id="pi" | "e" as name):
            return f"number(math.{name})"
        case ast.Constant(value=int() | float() as value):
            return f"number({float(value)!r})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _SIGNS:
            return f"({_term(left)} {_SIGNS[type(op)]} {_term(right)})"
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _SIGNS:
            return f"({_SIGNS[type(op)]}{_term(operand)})"
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _CALLS:
            return f"{_CALLS[name]}({', '.join(map(_term, arguments))})"
    raise ValueError(f"{ast.dump(node)} is no part of a formula")


def _wrapped_origin(origin: Origin, record: SwapRecord) -> str:
    return f"{origin.remark}\nIts weights were those of {in_docstring(record.weights)}."


_BUNDLES = ("wav2vec2_base", "wav2vec2_large", "wav2vec2_large_lv60k")  # normscope's names of torchaudio's bundles
_DEMO_VIT = "normscope.models.embedded.demo_vit"
_OF_OTHER_WEIGHTS = ("url", "file", "hf_hub_id", "hf_hub_filename", "source", "state_dict", "custom_load")
_TRANSFORMERS = """

class PointwiseConfig({config}):
    model_type = "{model_type}"  # so that transformers does not take the folder for one of a network with norms


class PointwiseModel({model}):
    config_class = PointwiseConfig
{tables}
    def __init__(self, config):
        super().__init__(config{options})
        put_in(self)


AutoConfig.register("{model_type}", PointwiseConfig)
AutoModel.register(PointwiseConfig, PointwiseModel)
"""


@dataclass(frozen=True)
class Origin:
    """Instructions to load a network as it was before its norms were swapped.

    Attributes:
        remark: for the head of the file, in a sentence.
        example: lines of Python, which need the folder's path and give ``network``.
        imports: lines that the tail needs.
        tail: code at the end of the file, which joins the library's own way of loading; else empty.
        config: content of config.json, where the library reads one.
    """

    remark: str
    example: Sequence[str]
    imports: str = ""
    tail: str = ""
    config: str | None = None


def origin_of(model: nn.Module, name: str, *, free: bool = False) -> Origin:
    """Tell how a network is made, from its class and what its library left on it.

    Args:
        model: the network.
        name: what :func:`normscope.load` took.
        free: whether a curve is a table, which half precision would spoil.

    >>> origin_of(nn.Sequential(nn.Linear(2, 2)), "mine").example[-1]
    'network = swapped(network)'
    """
    makers: dict[str, Callable[[Any], Origin | None]] = {
        "transformers": partial(_of_transformers, free=free),
        "timm": _of_timm,
        "diffusers": _of_diffusers,
    }
    library = type(model).__module__.partition(".")[0]
    origin = makers[library](model) if library in makers else None
    if library == "torchaudio":
        origin = _of_torchaudio(name)
    if type(model).__module__ == _DEMO_VIT:
        origin = _of_demo_vit(model)
    return origin or Origin(
        f"Make the {in_docstring(type(model).__name__)} as it was before the swap, with its norms and any weights.",
        ["from pointwise import swapped", "", "network = ...", "network = swapped(network)"],
    )


def in_docstring(text: str) -> str:
    r"""Escape what stands in a docstring between three double quotes: it can neither end it nor be code.

    >>> print(in_docstring("a" + '"' * 3 + chr(10) + "import os"))
    a\"\"\"\nimport os
    """
    return ascii(text)[1:-1].replace('"', '\\"')


def _is_public(model: type, library: str) -> bool:
    """True if a library exports a class at its top level under its own name."""
    name = model.__name__
    return name.isidentifier() and name in dir(sys.modules[library]) and not name.startswith("_")


def _of_transformers(model: Any, *, free: bool) -> Origin | None:
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string") or not (
        _is_public(type(model), "transformers") and _is_public(type(config), "transformers")
    ):
        return None
    kind = f"{config.model_type}_pointwise"
    facts = json.loads(config.to_json_string())
    for key in ("auto_map", "_name_or_path"):
        facts.pop(key, None)
    dtypes = [str(one.dtype).removeprefix("torch.") for one in model.parameters() if one.is_floating_point()]
    facts |= {"model_type": kind, "architectures": ["PointwiseModel"], **({"dtype": dtypes[0]} if dtypes else {})}
    own, its_config = type(model).__name__, type(config).__name__
    options = ", add_pooling_layer=False" if getattr(model, "pooler", model) is None else ""
    return Origin(
        f"{own} of transformers, with config.json beside this file.",
        [
            "import pointwise",
            "from transformers import AutoModel",
            "",
            'network = AutoModel.from_pretrained("FOLDER")  # by the class that importing pointwise has registered',
        ],
        f"from transformers import AutoConfig, AutoModel, {its_config}, {own}\n",
        _TRANSFORMERS.format(
            config=its_config,
            model=own,
            model_type=in_docstring(kind),
            tables='    _keep_in_fp32_modules_strict = {"table"}\n' if free else "",
            options=options,
        ),
        json.dumps(facts, indent=2) + "\n",
    )


def _of_timm(model: Any) -> Origin | None:
    known = dict(getattr(model, "pretrained_cfg", None) or {})
    architecture = known.pop("architecture", None)
    if not isinstance(architecture, str) or not hasattr(model, "num_classes"):
        return None
    kept = {key: value for key, value in known.items() if value is not None and key not in _OF_OTHER_WEIGHTS}
    arguments = {**getattr(model, "_model_args", {}), "num_classes": model.num_classes}
    facts = {
        "architecture": architecture,
        "num_classes": model.num_classes,
        "model_args": _plain(arguments),
        "pretrained_cfg": _plain(kept),
    }
    return Origin(
        f"{in_docstring(architecture)} of timm, with config.json beside this file.",
        [
            "import timm",
            "from pointwise import swapped",
            "",
            'network = swapped(timm.create_model("local-dir:FOLDER"))',
        ],
        config=json.dumps(facts, indent=2) + "\n",
    )


def _of_diffusers(model: Any) -> Origin | None:
    if not _is_public(type(model), "diffusers") or not hasattr(model, "to_json_string"):
        return None
    own, facts = type(model).__name__, json.loads(model.to_json_string())
    facts.pop("_name_or_path", None)
    return Origin(
        f"{own} of diffusers, with config.json beside this file.",
        [
            f"from diffusers import {own}",
            "from pointwise import swapped",
            "",
            f'network = swapped({own}.from_config({own}.load_config("FOLDER")))',
        ],
        config=json.dumps(facts, indent=2) + "\n",
    )


def _of_torchaudio(name: str) -> Origin | None:
    bundle = name.upper() if name in _BUNDLES else name.removeprefix("torchaudio:")
    if not bundle.isidentifier() or not bundle.isascii() or not (name in _BUNDLES or name.startswith("torchaudio:")):
        return None
    return Origin(
        f"The bundle {bundle} of torchaudio, which fetches its published weights, and these take their place.",
        [
            "import torchaudio",
            "from pointwise import swapped",
            "",
            f"network = swapped(torchaudio.pipelines.{bundle}.get_model())",
        ],
    )


def _of_demo_vit(model: Any) -> Origin:
    """Derive the arguments of timm's class, which gives the same bits."""
    patch, positions = model.patch_embed.proj.kernel_size[0], model.pos_embed.shape[1]
    facts = {
        "img_size": patch * math.isqrt(positions),
        "patch_size": patch,
        "in_chans": model.patch_embed.proj.in_channels,
        "num_classes": model.num_classes,
        "embed_dim": model.pos_embed.shape[2],
        "depth": len(model.blocks),
        "num_heads": model.blocks[0].attn.num_heads,
    }
    arguments = ", ".join(f"{key}={int(value)}" for key, value in facts.items())
    return Origin(
        "The VisionTransformer of timm gives the same bits as normscope's own of that name.",
        [
            "from pointwise import swapped",
            "from timm.models.vision_transformer import VisionTransformer",
            "",
            f"network = VisionTransformer({arguments},",
            '    init_values=1.0, class_token=False, global_pool="avg", fc_norm=False)',
            "network = swapped(network)",
        ],
    )


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Entries that JSON can represent."""

    def holds(value: Any) -> bool:
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            return False
        return True

    return {key: value for key, value in values.items() if holds(value)}
