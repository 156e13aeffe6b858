"""Image models: every architecture of timm, and the tiny ViT that is embedded in this package."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import timm
import timm.models
import torch
from PIL import Image
from safetensors import safe_open
from timm.data.config import resolve_model_data_config
from timm.data.transforms_factory import create_transform
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from normscope.batches import Sample
from normscope.errors import ModelError, unknown
from normscope.models.base import Inputs, LoadedModel, LoadOptions, Provenance
from normscope.models.checkpoints import load_file
from normscope.models.inputs import Preprocessing, TensorInputs, image_inputs

HUB_FILE = "model.safetensors"


def load_timm(name: str, architecture: str, options: LoadOptions) -> LoadedModel:
    """Load a model of timm.

    Args:
        name: what outputs and errors call it.
        architecture: timm's name for it, with or without ``.tag``.
        options: which weights and inputs, and where to put them.

    Raises:
        ModelError: if timm does not know it, or its weights cannot be had or do not fit.
        DataError: if there is no image at ``options.data``.
    """
    config = _pretrained_config(name, architecture)
    module, provenance = _with_weights(
        name,
        options,
        build=lambda: timm.create_model(architecture),
        pretrained=lambda: _pretrained(name, architecture, config),
    )
    inputs = image_inputs(_timm_preprocessing(module), options)
    return LoadedModel(name, _ready(module, options), inputs, provenance)


def names_like(name: str) -> list[str]:
    """Return the names ``timm:…`` that a user who typed ``name`` may have meant."""
    if timm.is_model(name):
        return [f"timm:{name}"]
    return difflib.get_close_matches(name, [f"timm:{known}" for known in timm.list_models()])


def _pretrained_config(name: str, architecture: str) -> Any:
    """Return what timm knows of the architecture's weights: a PretrainedCfg, or None if there are none."""
    family, _, _ = architecture.partition(".")
    renamed = timm.models.get_deprecated_models()
    if family in renamed:
        now = f"renamed it to {renamed[family]!r}: use 'timm:{renamed[family]}'" if renamed[family] else "dropped it"
        raise ModelError(f"There is no model {name!r} any more. timm {now}.")
    if not timm.is_model(family):
        near = names_like(name)
        if near:
            raise ModelError(unknown("model", name, near))
        raise ModelError(f"There is no model {name!r}. timm.list_models() names the architectures of timm.")
    try:
        return timm.get_pretrained_cfg(architecture)
    except RuntimeError as error:
        tags = [f"timm:{known}" for known in (family, *timm.list_pretrained(f"{family}.*"))]
        raise ModelError(unknown("model", name, tags)) from error


def _with_weights(
    name: str,
    options: LoadOptions,
    *,
    build: Callable[[], nn.Module],
    pretrained: Callable[[], tuple[nn.Module, Provenance]],
) -> tuple[nn.Module, Provenance]:
    with _seeded(options.seed):
        match options.weights:
            case "pretrained":
                return pretrained()
            case "random":
                return build(), Provenance.random(options.seed)
            case file:
                module = build()
                return module, load_file(module, Path(file), name)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Initialize parameters, which happens on the CPU, under ``seed``; leave the random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the GPUs too
        yield


def _pretrained(name: str, architecture: str, config: Any) -> tuple[nn.Module, Provenance]:
    from normscope.models import hub

    if config is None or not config.has_weights:
        raise ModelError(
            f"timm has no pretrained weights for {name}. Name a file with --weights FILE, or take --weights random."
        )
    if not config.hf_hub_id:
        raise ModelError(
            f"The weights of {name} are not on a model hub but at {config.url}. Download that file and name it "
            "with --weights FILE."
        )
    repo = config.hf_hub_id
    commit = hub.fetch(repo, HUB_FILE)
    # The commit makes timm read the very file that was fetched; the name keeps it from looking for a pickle.
    source = {"hf_hub_id": f"{repo}@{commit}", "hf_hub_filename": HUB_FILE, "url": None}
    try:
        module = timm.create_model(architecture, pretrained=True, pretrained_cfg_overlay=source)
    except Exception as error:  # of safetensors, of torch, of the conversion that timm has for the family
        raise ModelError(
            f"The weights of {name} from {repo} at {commit[:12]} do not load with timm {timm.__version__}: {error}"
        ) from error
    return module, Provenance("pretrained", f"{repo}@{commit[:12]}")


def _timm_preprocessing(module: nn.Module) -> Preprocessing:
    config = resolve_model_data_config(module)  # type: ignore[no-untyped-call]
    channels = config["input_size"][0]
    return Preprocessing("L" if channels == 1 else "RGB", create_transform(**config))


def _ready(module: nn.Module, options: LoadOptions) -> nn.Module:
    return module.eval().to(options.device, options.dtype)


def load_demo_vit(name: str, architecture: str, options: LoadOptions) -> LoadedModel:
    """Load the embedded ViT; its default inputs are digits that were held out from its training.

    Raises:
        ModelError: if a weights file does not fit.
        DataError: if there is no image at ``options.data``.
    """
    weights, facts, digest = _embedded(f"{architecture}.safetensors")

    def build() -> nn.Module:
        return VisionTransformer(**facts["config"])

    def pretrained() -> tuple[nn.Module, Provenance]:
        module = build()
        module.load_state_dict(weights)
        description = f"embedded {architecture} (trained on scikit-learn's digits, sha256 {digest[:12]})"
        return module, Provenance("embedded", description)

    module, provenance = _with_weights(name, options, build=build, pretrained=pretrained)
    return LoadedModel(name, _ready(module, options), _digit_inputs(options), provenance)


def _embedded(filename: str) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    """Return the tensors of an embedded file, the facts in its header, and its SHA-256."""
    with as_file(files("normscope.models") / "embedded" / filename) as path:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
            return tensors, json.loads(file.metadata()["normscope"]), digest


def _digit_inputs(options: LoadOptions) -> Inputs:
    digits, pixels_to_input, _ = _embedded("demo_vit_digits.safetensors")
    scale, offset = pixels_to_input["scale"], pixels_to_input["offset"]

    def transform(image: Image.Image) -> Tensor:
        """Average a greyscale image over 8×8 boxes, as the digits were made; white is 16."""
        grey = bytearray(image.resize((8, 8), Image.Resampling.BOX).tobytes())
        pixels = torch.frombuffer(grey, dtype=torch.uint8).view(1, 8, 8) * (16 / 255)
        result: Tensor = pixels * scale + offset
        return result

    if options.data is not None:
        return image_inputs(Preprocessing("L", transform), options)
    images = digits["images"].float()[: options.limit, None] * scale + offset  # (n,8,8) -> (n,1,8,8)
    total = len(digits["images"])
    return TensorInputs(
        images,
        [Sample(f"digit {i}", source_index=i, index=i, data="demo_vit") for i in range(len(images))],
        f"the first {len(images)} of {total} held-out digits" if len(images) < total else f"{total} held-out digits",
        options,
    )
