"""Image models: every architecture of timm."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import timm
import timm.models
from timm.data.config import resolve_model_data_config
from timm.data.imagenet_info import ImageNetInfo, infer_imagenet_subset
from timm.data.transforms_factory import create_transform
from torch import nn

from normscope.errors import ModelError, unknown
from normscope.inputs.loaded_model import LoadedModel, LoadOptions, Outputs, Provenance, Task
from normscope.models.inputs.images import Preprocessing, image_inputs
from normscope.models.tasks import class_task
from normscope.models.weights.checkpoints import ready, with_weights

_OF_HUB = "hf-hub:"  # as timm writes it


def load_timm(name: str, architecture: str, options: LoadOptions) -> LoadedModel:
    """Load a model of timm, by its name there, with or without ``.tag``, or a repository, ``hf-hub:OWNER/NAME``.

    Raises:
        ModelError: if timm does not know it, or its weights cannot be had or do not fit.
        DataError: if there is no image at ``options.data``.
    """
    if architecture.startswith(_OF_HUB):
        architecture, pretrained = _of_repository(name, architecture.partition(":")[2])
    else:
        pretrained = partial(_pretrained, name, architecture, _pretrained_config(name, architecture))
    module, provenance = with_weights(
        name, options, build=lambda: timm.create_model(architecture), pretrained=pretrained
    )
    inputs = image_inputs(_timm_preprocessing(module), options)
    module, provenance = ready(module, provenance, options)
    outputs, task = _timm_outputs(module), Task(untold="the network has no classes that labels could be compared to")
    if outputs.kind == "classes":
        task = class_task(inputs, *_timm_classes(module))
    return LoadedModel(name, module, inputs, provenance, outputs, task=task)


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


def _pretrained(name: str, architecture: str, config: Any) -> tuple[nn.Module, Provenance]:
    from normscope.models.weights import repository

    if config is None or not config.has_weights:
        raise ModelError(
            f"timm has no pretrained weights for {name}. Name a file with --weights FILE, or take --weights random."
        )
    if not config.hf_hub_id:
        raise ModelError(
            f"The weights of {name} are not on a model hub but at {config.url}. Download that file and name it "
            "with --weights FILE."
        )
    path, commit = repository.fetch(config.hf_hub_id, repository.WEIGHTS)
    return _created(name, architecture, config.hf_hub_id, commit, path)


def _of_repository(name: str, repo: str) -> tuple[str, Callable[[], tuple[nn.Module, Provenance]]]:
    """Return timm's name for the network that a repository's config.json describes, and how to load its weights."""
    from normscope.models.weights.repository import Repository

    hub = Repository(repo)
    if hub.is_folder:
        raise ModelError(f"{name} names a folder, {repo!r}; {_OF_HUB}OWNER/NAME is a repository of the hub.")
    config = hub.json("config.json")
    known = (config or {}).get("architecture")
    if not isinstance(known, str):
        raise ModelError(f"{repo} holds no network of timm: it has no config.json that names an architecture.")
    if not timm.is_model(known):
        raise ModelError(f"{repo} is a {known!r}, which timm {timm.__version__} does not know.")
    architecture = f"{_OF_HUB}{repo}@{hub.commit}"

    def pretrained() -> tuple[nn.Module, Provenance]:
        return _created(name, architecture, repo, hub.commit, hub.weights()[0])

    return architecture, pretrained


def _created(name: str, architecture: str, repo: str, commit: str, path: Path) -> tuple[nn.Module, Provenance]:
    """Let timm make a network with the weights at ``path``, which were fetched from ``repo`` at ``commit``."""
    from normscope.models.weights import repository

    # The commit makes timm read the very file that was fetched; the name keeps it from looking for a pickle.
    source = {"hf_hub_id": f"{repo}@{commit}", "hf_hub_filename": repository.WEIGHTS, "url": None}
    with repository.damage_named(path):
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
    mode = "L" if channels == 1 else "RGB"
    return Preprocessing(mode, create_transform(**config), normalized_by=(config["mean"], config["std"]))


def _timm_outputs(module: Any) -> Outputs:
    """Return classification as the task of a network with a classifier.

    Feature extractors have no classes. An image tower of CLIP has a projection, whose width timm counts as classes:
    a multiple of 64, as no number of classes of timm's weights is.
    """
    return Outputs("classes" if module.num_classes % 64 else "tensor")


def _timm_classes(module: Any) -> tuple[int, Sequence[str]]:
    """Return how many classes there are, and their names, in order: its own, or those of the ImageNet of so many."""
    names: Sequence[str] = module.pretrained_cfg.get("label_names") or ()
    if not names and (subset := infer_imagenet_subset(module)):
        names = ImageNetInfo(subset).label_names()  # type: ignore[no-untyped-call]
    return module.num_classes, list(names)
