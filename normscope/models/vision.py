"""Image models: every architecture of timm."""

from __future__ import annotations

import difflib
from typing import Any

import timm
import timm.models
from timm.data.config import resolve_model_data_config
from timm.data.imagenet_info import ImageNetInfo, infer_imagenet_subset
from timm.data.transforms_factory import create_transform
from torch import nn

from normscope.errors import ModelError, unknown
from normscope.inputs.loaded_model import LoadedModel, LoadOptions, Outputs, Provenance, Task
from normscope.models.inputs.dataset import InputDataset
from normscope.models.inputs.images import class_task, image_inputs
from normscope.models.weights.checkpoints import ready, with_weights
from normscope.models.weights.repository import Repository

_HUB = "hf-hub:"  # as timm writes it


def load(name: str, architecture: str, options: LoadOptions) -> LoadedModel:
    """Load a model of timm, by its name there, with or without ``.tag``, or a repository, ``hf-hub:OWNER/NAME``."""
    architecture = timm.models.get_deprecated_models().get(architecture) or architecture  # if timm has renamed it
    hub = config = None
    if architecture.startswith(_HUB):
        hub = _repository(name, architecture.removeprefix(_HUB))
        architecture = f"{_HUB}{hub.name}@{hub.commit}"
    else:
        config = _pretrained_config(name, architecture)
    module, provenance = with_weights(
        name,
        options,
        build=lambda: timm.create_model(architecture),
        pretrained=lambda: _pretrained(name, architecture, hub or _published(name, config)),
    )
    inputs = _timm_inputs(module, options)
    module, provenance = ready(module, provenance, options)
    network: Any = module
    if network.num_classes % 64:
        names = network.pretrained_cfg.get("label_names") or ()
        if not names and (subset := infer_imagenet_subset(network)):
            names = ImageNetInfo(subset).label_names()  # type: ignore[no-untyped-call]
        outputs, task = Outputs("classes"), class_task(inputs, network.num_classes, list(names))
    else:  # no classes, or the projection of a CLIP tower, whose width timm counts as classes
        outputs, task = Outputs(), Task(unmeasured="the network has no classes that labels could be compared to")
    return LoadedModel(name, module, inputs, provenance, outputs, task=task)


def names_like(name: str) -> list[str]:
    """Return names ``timm:…`` close to a mistyped one."""
    if timm.is_model(name):
        return [f"timm:{name}"]
    return difflib.get_close_matches(name, [f"timm:{model}" for model in timm.list_models()])


def _pretrained_config(name: str, architecture: str) -> Any:
    """Return timm's PretrainedCfg of an architecture; None if it has no weights."""
    family, _, _ = architecture.partition(".")
    if not timm.is_model(family):
        if near := names_like(name):
            raise ModelError(unknown("model", name, near))
        raise ModelError(f"There is no model {name!r}. timm.list_models() names the architectures of timm.")
    try:
        return timm.get_pretrained_cfg(architecture)
    except RuntimeError as error:
        tags = [f"timm:{model}" for model in (family, *timm.list_pretrained(f"{family}.*"))]
        raise ModelError(unknown("model", name, tags)) from error


def _published(name: str, config: Any) -> Repository:
    """Return the repository of an architecture's weights; ModelError if there is none."""
    if config is None or not config.has_weights:
        raise ModelError(
            f"timm has no pretrained weights for {name}. Name a file with --weights FILE, or take --weights random."
        )
    if not config.hf_hub_id:
        raise ModelError(
            f"The weights of {name} are not on a model hub but at {config.url}. Download that file and name it "
            "with --weights FILE."
        )
    return Repository(config.hf_hub_id)


def _repository(name: str, repo: str) -> Repository:
    """Return a repository of the hub whose config.json describes a network of timm; ModelError for any other."""
    hub = Repository(repo)
    family = (hub.json("config.json") or {}).get("architecture")
    if not timm.is_model(str(family)):
        raise ModelError(
            f"{name} is no network of timm {timm.__version__}: its config.json names {family!r} as the architecture."
        )
    return hub


def _pretrained(name: str, architecture: str, hub: Repository) -> tuple[nn.Module, Provenance]:
    """Let timm make a network with the weights of a repository of the hub."""
    (path, *_) = hub.weights()
    # The commit makes timm read the very file that was fetched; the name keeps it from looking for a pickle.
    source = {"hf_hub_id": f"{hub.name}@{hub.commit}", "hf_hub_filename": path.name, "url": None}
    try:
        module = timm.create_model(architecture, pretrained=True, pretrained_cfg_overlay=source)
    except Exception as error:  # of safetensors, of torch, of the conversion that timm has for the family
        problem = f"The weights of {name} from {hub.name} at {hub.commit[:12]} do not load with timm {timm.__version__}"
        raise hub.failure(problem, error) from error
    return module, hub.provenance([path])


def _timm_inputs(module: nn.Module, options: LoadOptions) -> InputDataset:
    config = resolve_model_data_config(module)  # type: ignore[no-untyped-call]
    channels = config["input_size"][0]
    mode = "L" if channels == 1 else "RGB"
    normalized_by = config["mean"], config["std"]
    return image_inputs(create_transform(**config), options, mode=mode, normalized_by=normalized_by)
