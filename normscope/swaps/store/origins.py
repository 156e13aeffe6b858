"""How a network is made afresh by its own library, as far as the network itself tells: nothing is imported for it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

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
    """How to come by a network as it was before its norms were swapped.

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
    """Whether a library has a class under its name at its top, so that the name can be imported from there."""
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
    """Those entries that JSON holds."""

    def holds(value: Any) -> bool:
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            return False
        return True

    return {key: value for key, value in values.items() if holds(value)}
