"""Diffusion transformers: DiT in diffusers' format, from anywhere, and the tiny one; others by their own pipelines."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import diffusers.models
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_utils import KarrasDiffusionSchedulers
from torch import nn

from normscope.errors import ModelError
from normscope.inputs.loaded_model import Inputs, LoadedModel, LoadOptions, Outputs, Provenance, Task, without_variances
from normscope.models.inputs.latents import NoisedLatents, read_latents
from normscope.models.inputs.trajectories import STEPS, LatentSpace, from_noise
from normscope.models.weights.checkpoints import embedded_module, load_file, read_embedded, ready, with_weights
from normscope.models.weights.repository import HubSilentError, Repository

GUIDANCE = 4.0  # DiTPipeline's default, and the largest that the paper shows samples for
TRAJECTORIES, DEMO_TRAJECTORIES = 4, 64
FEW_STEPS = 5  # of a full-size network's trajectory, where no timesteps are asked for that take more
CALIBRATION_TIMESTEPS = 10  # unless they are named

WEIGHTS = ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin")  # the latter without unpickling code

# As diffusers' scripts/convert_dit_to_diffusers.py made the published ones.
_DIT_XL: dict[str, Any] = {
    "num_attention_heads": 16,
    "attention_head_dim": 72,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 28,
    "attention_bias": True,
    "patch_size": 2,
    "activation_fn": "gelu-approximate",
    "num_embeds_ada_norm": 1000,
    "norm_type": "ada_norm_zero",
    "norm_elementwise_affine": False,
}
_PUBLISHED = {
    "facebook/DiT-XL-2-256": _DIT_XL | {"sample_size": 32},
    "facebook/DiT-XL-2-512": _DIT_XL | {"sample_size": 64},
}
_DIT_SCHEDULER: dict[str, Any] = {
    "num_train_timesteps": 1000,
    "beta_schedule": "linear",
    "beta_start": 1e-4,
    "beta_end": 0.02,
    "prediction_type": "epsilon",
    "clip_sample": False,
}
_PREDICTIONS = ("epsilon", "sample", "v_prediction")

_DITS = ("DiTTransformer2DModel", "Transformer2DModel")
_OTHERS = "Or write a function that returns it and batches for it, and name it as py:FILE:FACTORY."


@dataclass(frozen=True)
class _Default:
    """The trajectories of a network, unless told otherwise; see :func:`from_noise`."""

    guidance: float
    trajectories: int
    steps: tuple[int, ...] = (STEPS,)
    remark: str = ""


_DEMO = _Default(1.0, DEMO_TRAJECTORIES)


@dataclass(frozen=True)
class _Description:
    """The facts of a model that are known before its weights are.

    Attributes:
        config: of the transformer, as diffusers saves it.
        scheduler: of training.
        folder: of the transformer's files within its repository; empty, or with a slash at its end.
        remark: what the description of the inputs says of the scheduler.
    """

    config: dict[str, Any]
    scheduler: DDIMScheduler
    folder: str
    remark: str = ""


class _UnreadPackage(ModuleType):
    """A package whose modules can be imported one by one; its own code runs when something of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self.__spec__ is None or self.__spec__.loader is None:
            raise AttributeError(name)
        self.__class__ = ModuleType  # type: ignore[assignment]  # from here on it is as any other
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


@functools.cache
def dit_class() -> Any:
    """Import diffusers' DiT without the sixty other transformers of its package, which take longer than torch does.

    >>> dit_class().__name__
    'DiTTransformer2DModel'
    """
    name = "diffusers.models.transformers"
    spec = find_spec(name)
    if spec is not None and name not in sys.modules:
        sys.modules[name] = package = _UnreadPackage(name)
        for attribute, value in vars(module_from_spec(spec)).items():
            setattr(package, attribute, value)
        diffusers.models.transformers = package
    return importlib.import_module(f"{name}.dit_transformer_2d").DiTTransformer2DModel


def load_diffusers(name: str, architecture: str, options: LoadOptions) -> LoadedModel:
    """Load a diffusion transformer in diffusers' format.

    The default inputs of a class-conditional DiT are its own DDIM trajectories. Any other transformer runs on what its
    own pipeline gives it, see :class:`normscope.models.inputs.pipelines.PipelineCalls`, and takes the folder of all of
    that.

    ``architecture`` is a folder of a pipeline or of its transformer alone, or a repository of the hub with such a
    content. The configurations of DiT-XL/2 are known without a network.

    Raises:
        UsageError: if guidance or timesteps cannot be understood.
        ModelError: if there is no such model, if there is no way to feed it, or if its weights cannot be had or do
            not fit.
        DataError: if ``options.data`` is no file of latents that fit.
    """
    repository = Repository(architecture)
    components = repository.json("model_index.json") if repository.is_folder else None
    _, kind = (components or {}).get("transformer", (None, None))
    if components is not None and kind not in (None, *_DITS):
        from normscope.models.inputs.pipelines import load_pipeline

        return load_pipeline(name, Path(repository.name), components, options)
    description = _describe(name, repository)
    default = _Default(GUIDANCE, TRAJECTORIES, (FEW_STEPS, STEPS), description.remark)
    inputs = _inputs(description.config, description.scheduler, options, default)
    module, provenance = with_weights(
        name,
        options,
        build=lambda: _build(name, description.config),
        pretrained=lambda: _pretrained(name, repository, description),
    )
    return _loaded(name, module, inputs, provenance, options)


def load_demo_dit(name: str, architecture: str, options: LoadOptions) -> LoadedModel:
    """Load the embedded DiT, which makes digits of 8×8 pixels without an autoencoder.

    To learn from there are its trajectories from the next seed, at more timesteps.

    Raises:
        UsageError: if guidance or timesteps cannot be understood.
        ModelError: if a weights file does not fit.
        DataError: if ``options.data`` is no file of latents ``(n, 1, 8, 8)``, which are pixels from −1 to 1.
    """
    build, pretrained = embedded_module(
        architecture, "scikit-learn's digits", lambda facts: dit_class()(**facts["config"])
    )
    _, facts, _ = read_embedded(f"{architecture}.safetensors")
    inputs = _inputs(facts["config"], _scheduler(name, facts["scheduler"]), options, _DEMO)
    module, provenance = with_weights(name, options, build=build, pretrained=pretrained)
    loaded = _loaded(name, module, inputs, provenance, options)
    if options.data is None:
        timesteps = CALIBRATION_TIMESTEPS if options.timesteps is None else options.timesteps
        others = replace(options, seed=options.seed + 1, timesteps=timesteps)
        scheduler = _scheduler(name, facts["scheduler"])
        loaded.calibration = _inputs(facts["config"], scheduler, others, _DEMO)(module)
    return loaded


def _loaded(
    name: str, module: nn.Module, inputs: Callable[[nn.Module], Inputs], provenance: Provenance, options: LoadOptions
) -> LoadedModel:
    module, provenance = ready(module, provenance, options)
    own = inputs(module)
    task = Task(untold="the latents are of the network's own trajectories, of which no true noise is known")
    if isinstance(own, NoisedLatents):
        task = Task("denoising", truth=own.truth)
    return LoadedModel(name, module, own, provenance, Outputs("prediction", without_variances), task=task)


def _inputs(
    config: dict[str, Any], scheduler: DDIMScheduler, options: LoadOptions, default: _Default
) -> Callable[[nn.Module], Inputs]:
    """Return what makes the inputs of a module, having refused all that would fail once it is loaded."""
    defaults = inspect.signature(dit_class()).parameters
    channels, size, classes = (
        config.get(key, defaults[key].default) for key in ("in_channels", "sample_size", "num_embeds_ada_norm")
    )
    space = LatentSpace(channels, size, classes)
    if options.data is None:
        return from_noise(space, scheduler, options, **asdict(default))
    latents = read_latents(Path(options.data), space, scheduler, options)
    return lambda module: latents


def _describe(name: str, repository: Repository) -> _Description:
    if repository.name in _PUBLISHED and not repository.is_folder:
        return _Description(_PUBLISHED[repository.name], _scheduler(name, _DIT_SCHEDULER), "transformer/")
    try:
        pipeline = repository.json("model_index.json")
        folder = "" if pipeline is None else "transformer/"
        config = repository.json(f"{folder}config.json")
        scheduler = repository.json("scheduler/scheduler_config.json")
    except HubSilentError as error:
        raise ModelError(
            f"The configuration of {name} cannot be had: {error.reason}. Name a folder that save_pretrained of "
            "diffusers wrote, diffusers:DIR, or dit_xl, whose configuration is known."
        ) from error
    config = _of_a_dit(name, pipeline, config)
    if scheduler is None:
        return _Description(config, _scheduler(name, _DIT_SCHEDULER), folder, "with the noise schedule of DiT-XL/2")
    return _Description(config, _scheduler(name, scheduler), folder)


def _of_a_dit(name: str, pipeline: dict[str, Any] | None, config: dict[str, Any] | None) -> dict[str, Any]:
    """Return the transformer's configuration, having refused all but DiT by the class that it names."""
    if pipeline is not None and "transformer" not in pipeline:
        raise ModelError(f"{name} is a {pipeline.get('_class_name')}, which has no transformer.")
    if config is None:
        raise ModelError(f"{name} holds no transformer in the layout of diffusers: there is no config.json of one.")
    kind = config.get("_class_name")
    # Until diffusers 0.28 the second class was all transformers; the published DiT-XL/2 still say so.
    if kind not in _DITS or config.get("norm_type") != "ada_norm_zero":
        raise ModelError(
            f"The transformer of {name} is a {kind}. Those that are no DiT need the folder of their whole pipeline, "
            f"which feeds them: download it, and name it as diffusers:DIR. {_OTHERS}"
        )
    return config


def _scheduler(name: str, config: dict[str, Any]) -> DDIMScheduler:
    """Return a DDIM scheduler that has a configuration's betas and predictions, whichever scheduler it is of."""
    kind, predicts = config.get("_class_name", "DDIMScheduler"), config.get("prediction_type", "epsilon")
    known = [scheduler.name for scheduler in KarrasDiffusionSchedulers]
    if kind not in known or predicts not in _PREDICTIONS:
        raise ModelError(f"The scheduler of {name}, {kind} with predictions of {predicts}, has no DDIM steps.")
    try:
        scheduler: DDIMScheduler = DDIMScheduler.from_config(config)
    except Exception as error:  # diffusers passes on whatever torch and Python make of wrong values
        raise ModelError(f"The scheduler's configuration of {name} does not make a DDIMScheduler: {error}") from error
    return scheduler


def _build(name: str, config: dict[str, Any]) -> nn.Module:
    try:
        module: nn.Module = dit_class().from_config(config)
    except Exception as error:  # diffusers passes on whatever torch and Python make of wrong values
        raise ModelError(f"The configuration of {name} does not make a DiTTransformer2DModel: {error}") from error
    return module


def _pretrained(name: str, repository: Repository, description: _Description) -> tuple[nn.Module, Provenance]:
    repository.file("model_index.json")  # of its commit are all the others
    files = (repository.file(description.folder + filename) for filename in WEIGHTS)
    path = next((path for path in files if path is not None), None)
    if path is None:
        raise ModelError(
            f"{name} has neither {' nor '.join(description.folder + filename for filename in WEIGHTS)}. Name a file "
            "with --weights FILE, or take --weights random."
        )
    module = _build(name, description.config)
    with repository.damage_named(path):
        read = load_file(module, path, name)
    if repository.is_folder:
        return module, Provenance(read.kind, f"{repository.name}: {read.description}")
    return module, Provenance("pretrained", f"{repository.name}@{repository.commit[:12]}")
