"""Loading without normscope: a line of Python for the network's library, and the config.json that the library reads."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

_OTHER_WEIGHTS = ("url", "file", "hf_hub_id", "hf_hub_filename", "source", "state_dict", "custom_load")
_Example = tuple[str, dict[str, Any] | None]


def example_of(model: nn.Module, replaced: bool) -> _Example:
    """Return a line of Python that makes a network from its folder, and the content of config.json if there is one.

    A network's attribute ``remade_by`` is an expression of its library that makes it, with any weights.

    Args:
        model: the network.
        replaced: norms were replaced, so that the library's own classes do not fit.
    """
    library, example = type(model).__module__.partition(".")[0], None
    if isinstance(expression := getattr(model, "remade_by", None), str):
        return _swapped(expression, expression.partition(".")[0]), None
    if library == "transformers":
        example = _transformers_example(model, replaced)
    elif library == "timm":
        example = _timm_example(model, replaced)
    elif library == "diffusers":
        example = _diffusers_example(model)
    return example or (f"{_swapped('network')}  # network: as it was before the swap, with any weights", None)


def _swapped(network: str, library: str = "") -> str:
    imports = f"import {library}; " if library else ""
    return f"{imports}from pointwise import swapped; network = swapped({network})"


def _is_public(model: object, library: str) -> bool:
    """True if a library exports an object's class at its top level under its own name."""
    name = type(model).__name__
    return name.isidentifier() and name in dir(sys.modules[library]) and not name.startswith("_")


def _transformers_example(model: Any, replaced: bool) -> _Example | None:
    config: Any = getattr(model, "config", None)
    if not (hasattr(config, "to_json_string") and all(_is_public(used, "transformers") for used in (model, config))):
        return None
    name, facts = type(model).__name__, json.loads(config.to_json_string())
    for key in ("auto_map", "_name_or_path"):
        facts.pop(key, None)
    facts |= {"architectures": [name], "dtype": str(model.dtype).removeprefix("torch.")}
    options = {"add_pooling_layer": False} if getattr(model, "pooler", model) is None else {}
    if not replaced:
        arguments = "".join(f", {option}={value}" for option, value in options.items())
        return f'import transformers; network = transformers.{name}.from_pretrained("FOLDER"{arguments})', facts
    facts |= {"model_type": f"{config.model_type}_pointwise", "architectures": ["PointwiseModel"]}
    facts["pointwise"] = {"model": name, "config": type(config).__name__, "options": options}
    registered = "import pointwise, transformers; pointwise.register(transformers)"
    return f'{registered}; network = transformers.AutoModel.from_pretrained("FOLDER")', facts


def _timm_example(model: Any, replaced: bool) -> _Example | None:
    weights = dict(getattr(model, "pretrained_cfg", None) or {})
    architecture = weights.pop("architecture", None)
    if not isinstance(architecture, str) or not hasattr(model, "num_classes"):
        return None
    kept = {key: value for key, value in weights.items() if value is not None and key not in _OTHER_WEIGHTS}
    arguments, classes = getattr(model, "_model_args", {}), {"num_classes": model.num_classes}
    facts = {"architecture": architecture, **classes, "model_args": _plain({**arguments, **classes})}
    facts["pretrained_cfg"] = _plain(kept)
    if not replaced:
        return 'import timm; network = timm.create_model("local-dir:FOLDER", pretrained=True)', facts
    return _swapped('timm.create_model("local-dir:FOLDER")', "timm"), facts


def _diffusers_example(model: Any) -> _Example | None:
    if not _is_public(model, "diffusers") or not hasattr(model, "to_json_string"):
        return None
    name, facts = f"diffusers.{type(model).__name__}", json.loads(model.to_json_string())
    facts.pop("_name_or_path", None)
    return _swapped(f'{name}.from_config({name}.load_config("FOLDER"))', "diffusers"), facts


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that JSON can represent."""
    plain = {}
    for key, value in values.items():
        with contextlib.suppress(TypeError, ValueError):
            json.dumps(value)
            plain[key] = value
    return plain
