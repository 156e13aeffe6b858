"""Files of a swapped folder for processes without normscope: pointwise.py and config.json.

pointwise.py is :mod:`normscope.swaps.standalone` between instructions for the network and the functions of its curves.
It is written, and never read. Texts of a network, a user or a file are in it as ASCII literals or, escaped, in its
docstring.
"""

from __future__ import annotations

import ast
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from normscope.errors import count
from normscope.fits.curves.expressions import curve_from
from normscope.fits.curves.known import CURVES, FREE
from normscope.swaps import standalone
from normscope.swaps.start import RMS_NORM
from normscope.swaps.store.record import SwapRecord

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
# A sentence, lines to import, the expression that makes the network, and the content of config.json.
_Origin = tuple[str, list[str], str, dict[str, Any] | None]


def export(model: nn.Module, record: SwapRecord) -> dict[str, str]:
    """Return the content of pointwise.py, and of config.json where the network's library reads one, by file name."""
    remark, imports, network, config = _origin_of(model, record.model)
    by_transformers = config is not None and "pointwise" in config
    lines = [
        *(["import pointwise"] if by_transformers else ["from pointwise import swapped"]),
        *imports,
        "",
        network,
    ]
    head = _HEAD.format(
        what=f"{in_docstring(record.func)} in place of {count(len(record.sites), 'norm')} of "
        f"{in_docstring(record.model)}",
        remark=remark,
        weights=in_docstring(record.weights),
        example="\n    ".join(lines).replace("\n    \n", "\n\n"),
    )
    body = Path(standalone.__file__).read_text(encoding="utf-8").partition('"""\n')[2]
    names = dict.fromkeys(site.curve for site in record.sites if site.curve not in (FREE, RMS_NORM))
    functions = "".join(f"CURVES[{name!a}] = lambda u: {_expression(name)}\n" for name in names)
    code = head + body + ("\n\n" + functions if functions else "") + (_REGISTERED if by_transformers else "")
    files = {"pointwise.py": code}
    return files if config is None else files | {"config.json": json.dumps(config, indent=2) + "\n"}


def in_docstring(text: str) -> str:
    r"""Escape what stands in a docstring between three double quotes: it can neither end it nor be code.

    >>> print(in_docstring("a" + '"' * 3 + chr(10) + "import os"))
    a\"\"\"\nimport os
    """
    return ascii(text)[1:-1].replace('"', '\\"')


def _expression(curve: str) -> str:
    return CURVES[curve].expression or "" if curve in CURVES else in_torch(curve.partition("=")[2])


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


def _origin_of(model: nn.Module, name: str) -> _Origin:
    """Describe how a network is made, by its class, its library's records on it and the name that load() took."""
    library = type(model).__module__.partition(".")[0]
    makers = {"transformers": _of_transformers, "timm": _of_timm, "diffusers": _of_diffusers}
    origin = makers[library](model) if library in makers else None
    if library == "torchaudio":
        origin = _of_torchaudio(name)
    if type(model).__module__ == _DEMO_VIT:
        origin = _of_demo_vit(model)
    remark = f"Make the {in_docstring(type(model).__name__)} as it was before the swap, with its norms and any weights."
    return origin or (remark, [], "network = ...\nnetwork = swapped(network)".replace("\n", "\n    "), None)


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
        'network = AutoModel.from_pretrained("FOLDER")  # by the class that importing pointwise has registered',
        facts,
    )


def _of_timm(model: Any) -> _Origin | None:
    weights = dict(getattr(model, "pretrained_cfg", None) or {})
    architecture = weights.pop("architecture", None)
    if not isinstance(architecture, str) or not hasattr(model, "num_classes"):
        return None
    kept = {key: value for key, value in weights.items() if value is not None and key not in _OTHER_WEIGHTS}
    arguments = {**getattr(model, "_model_args", {}), "num_classes": model.num_classes}
    facts = {
        "architecture": architecture,
        "num_classes": model.num_classes,
        "model_args": _plain(arguments),
        "pretrained_cfg": _plain(kept),
    }
    remark = f"{in_docstring(architecture)} of timm, with config.json beside this file."
    return remark, ["import timm"], 'network = swapped(timm.create_model("local-dir:FOLDER"))', facts


def _of_diffusers(model: Any) -> _Origin | None:
    if not _is_public(model, "diffusers") or not hasattr(model, "to_json_string"):
        return None
    name, facts = type(model).__name__, json.loads(model.to_json_string())
    facts.pop("_name_or_path", None)
    return (
        f"{name} of diffusers, with config.json beside this file.",
        [f"from diffusers import {name}"],
        f'network = swapped({name}.from_config({name}.load_config("FOLDER")))',
        facts,
    )


def _of_torchaudio(name: str) -> _Origin | None:
    bundle = name.upper() if name in _BUNDLES else name.removeprefix("torchaudio:")
    if not bundle.isidentifier() or not bundle.isascii() or not (name in _BUNDLES or name.startswith("torchaudio:")):
        return None
    remark = f"The bundle {bundle} of torchaudio, which fetches its published weights, and these take their place."
    return remark, ["import torchaudio"], f"network = swapped(torchaudio.pipelines.{bundle}.get_model())", None


def _of_demo_vit(model: Any) -> _Origin:
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
    return (
        "The VisionTransformer of timm gives the same bits as normscope's own of that name.",
        ["from timm.models.vision_transformer import VisionTransformer"],
        f"network = VisionTransformer({arguments},\n"
        '        init_values=1.0, class_token=False, global_pool="avg", fc_norm=False)\n'
        "    network = swapped(network)",
        None,
    )


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that JSON can represent."""
    plain = {}
    for key, value in values.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            continue
        plain[key] = value
    return plain
