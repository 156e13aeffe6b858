"""Diffusion transformers: DiT in diffusers' format, from anywhere, and the tiny one; others by their own pipelines."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_utils import KarrasDiffusionSchedulers
from diffusers.utils.import_utils import is_accelerate_available
from torch import Tensor, nn

from normscope.errors import MemoryEndedError, ModelError, NormscopeError, UsageError, count, first_line
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.chunks import Chunk
from normscope.inputs.loaded_model import Inputs, LoadedModel, LoadOptions, Outputs, Provenance, Task, without_variances
from normscope.models.inputs.dataset import InputDataset, Item
from normscope.models.inputs.trajectories import (
    STEPS,
    LatentSpace,
    NoisedLatents,
    from_noise,
    listed,
    select_timesteps,
)
from normscope.models.weights.checkpoints import (
    cast,
    dtypes_by_name,
    dtypes_of_files,
    embedded_module,
    load_file,
    read_embedded,
    ready,
    with_dtypes,
    with_weights,
)
from normscope.models.weights.repository import Repository, refuse_code
from normscope.runtime.files import sha256_of
from normscope.runtime.network import memory_ended

GUIDANCE = 4.0  # DiTPipeline's default, and the largest that the paper shows samples for
TRAJECTORIES, DEMO_TRAJECTORIES = 4, 64
FEW_STEPS = 5  # of a full-size network's trajectory, unless the requested timesteps take more
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
OTHERWISE = "Write a function that returns the transformer and batches for it, and name it as py:FILE:FACTORY."

_DEMO: dict[str, Any] = {"guidance": 1.0, "trajectories": DEMO_TRAJECTORIES}  # of from_noise()


def load_diffusers(name: str, architecture: str, options: LoadOptions) -> LoadedModel:
    """Load a diffusion transformer from a folder or a repository of a pipeline, or of a transformer alone.

    The default inputs of a class-conditional DiT are its own DDIM trajectories. Any other transformer needs the folder
    of its whole pipeline, and runs on :class:`PipelineCalls`. The configurations of DiT-XL/2 are built in.
    """
    repository = Repository(architecture)
    components = repository.json("model_index.json") if repository.is_folder else None
    _, kind = (components or {}).get("transformer", (None, None))
    if components is not None and kind not in (None, *_DITS):
        return load_pipeline(name, Path(repository.name), components, options)
    config, scheduler, subfolder, remark = _describe(name, repository)
    default = {"guidance": GUIDANCE, "trajectories": TRAJECTORIES, "steps": (FEW_STEPS, STEPS), "remark": remark}
    inputs = _inputs(config, scheduler, options, default)
    module, provenance = with_weights(
        name,
        options,
        build=lambda: _build(name, DiTTransformer2DModel, config),
        pretrained=lambda: _pretrained(name, repository, config, subfolder),
    )
    return _loaded(name, module, inputs, provenance, options)


def load_demo_dit(name: str, architecture: str, options: LoadOptions) -> LoadedModel:
    """Load the embedded DiT, which makes digits of 8×8 pixels, from −1 to 1, without an autoencoder.

    To learn from there are its trajectories from the next seed, at more timesteps.
    """
    build, pretrained = embedded_module(
        architecture, "scikit-learn's digits", lambda facts: DiTTransformer2DModel(**facts["config"])
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
    inputs_of_module = inputs(module)
    task = Task(untold="the latents are of the network's own trajectories, of which no true noise is known")
    if isinstance(inputs_of_module, NoisedLatents):
        task = Task("denoising", truth=inputs_of_module.truth)
    return LoadedModel(name, module, inputs_of_module, provenance, Outputs("prediction", without_variances), task=task)


def _inputs(
    config: dict[str, Any], scheduler: DDIMScheduler, options: LoadOptions, default: Mapping[str, Any]
) -> Callable[[nn.Module], Inputs]:
    """Return a function from a module to its inputs, after all checks that need no module."""
    defaults = inspect.signature(DiTTransformer2DModel).parameters
    channels, size, classes = (
        config.get(key, defaults[key].default) for key in ("in_channels", "sample_size", "num_embeds_ada_norm")
    )
    space = LatentSpace(channels, size, classes)
    if options.data is None:
        return from_noise(space, scheduler, options, **default)
    latents = NoisedLatents(Path(options.data), space, scheduler, options)
    return lambda module: latents


def _describe(name: str, repository: Repository) -> tuple[dict[str, Any], DDIMScheduler, str, str]:
    """Return the transformer's configuration, its scheduler of training, the folder of its files, and a remark."""
    if repository.name in _PUBLISHED and not repository.is_folder:
        return _PUBLISHED[repository.name], _scheduler(name, _DIT_SCHEDULER), "transformer/", ""
    pipeline = repository.json("model_index.json")
    folder = "" if pipeline is None else "transformer/"
    config, scheduler = (repository.json(file) for file in (f"{folder}config.json", "scheduler/scheduler_config.json"))
    if pipeline is not None and "transformer" not in pipeline:
        raise ModelError(f"{name} is a {pipeline.get('_class_name')}, which has no transformer.")
    if config is None:
        raise ModelError(f"{name} holds no transformer in the layout of diffusers: there is no config.json of one.")
    kind = config.get("_class_name")
    # Until diffusers 0.28 the second class was all transformers; the published DiT-XL/2 still name it.
    if kind not in _DITS or config.get("norm_type") != "ada_norm_zero":
        raise ModelError(
            f"The transformer of {name} is a {kind}. Those that are no DiT need the folder of their whole pipeline, "
            f"which feeds them: download it, and name it as diffusers:DIR. {OTHERWISE}"
        )
    remark = "with the noise schedule of DiT-XL/2" if scheduler is None else ""
    return config, _scheduler(name, scheduler or _DIT_SCHEDULER), folder, remark


def _scheduler(name: str, config: dict[str, Any]) -> DDIMScheduler:
    """Return a DDIM scheduler with the betas and predictions of any scheduler's configuration."""
    kind, predicts = config.get("_class_name", "DDIMScheduler"), config.get("prediction_type", "epsilon")
    if kind not in KarrasDiffusionSchedulers.__members__ or predicts not in _PREDICTIONS:
        raise ModelError(f"The scheduler of {name}, {kind} with predictions of {predicts}, has no DDIM steps.")
    scheduler: DDIMScheduler = _build(name, DDIMScheduler, config)
    return scheduler


def _build(name: str, kind: Any, config: dict[str, Any]) -> Any:
    try:
        return kind.from_config(config)
    except Exception as error:  # of torch and of Python, at wrong values
        raise ModelError(f"The configuration of {name} does not make a {kind.__name__}: {error}") from error


def _pretrained(name: str, repository: Repository, config: dict[str, Any], folder: str) -> tuple[nn.Module, Provenance]:
    repository.file("model_index.json")  # of its commit are all the others
    files = (repository.file(folder + filename) for filename in WEIGHTS)
    path = next((path for path in files if path is not None), None)
    if path is None:
        raise ModelError(
            f"{name} has neither {' nor '.join(folder + filename for filename in WEIGHTS)}. Name a file "
            "with --weights FILE, or take --weights random."
        )
    module = _build(name, DiTTransformer2DModel, config)
    read = load_file(module, path, name)
    if repository.is_folder:
        return module, Provenance(read.kind, f"{repository.name}: {read.description}")
    return module, Provenance("pretrained", f"{repository.name}@{repository.commit[:12]}")


PROMPTS = (
    "a red bicycle leaning against a stone wall",
    "two herons in a shallow lake at dawn",
    "the workbench of a watchmaker, seen from above",
    "a mountain village under snow at night",
)


def _from_here() -> dict[str, bool]:
    """Arguments of ``from_pretrained``; diffusers loads classes with parts in float32 through accelerate alone."""
    return {"use_safetensors": True, "local_files_only": True, "low_cpu_mem_usage": _has_accelerate()}


def _has_accelerate() -> bool:
    return bool(is_accelerate_available())  # type: ignore[no-untyped-call]


class _EnoughError(Exception):
    """Ends a pipeline's sampling, when all calls have been seen that were to be seen."""


class PipelineCalls(InputDataset):
    """Calls of a pipeline to its transformer at some timesteps, as it samples for each prompt; kept in memory.

    Number of steps, size and, by default, guidance are the pipeline's own. Each prompt is a chunk.

    Attributes:
        pipeline: on the requested device, in the requested dtype.
        timesteps: rounded to integers, in the order of sampling.
    """

    in_memory = True

    def __init__(self, pipeline: Any, options: LoadOptions) -> None:
        """Encode the first prompt, which sets the pipeline's timesteps, and choose among them.

        Raises:
            UsageError: if guidance or timesteps do not apply.
            ModelError: if the pipeline does not sample from a prompt alone, or raises anything else.
            MemoryEndedError: if memory ends meanwhile.
        """
        super().__init__(len(PROMPTS), options, one_by_one=True)
        self.pipeline = pipeline
        self._kept: dict[int, list[Batch]] = {}
        name = type(pipeline).__name__
        if options.guidance is not None and not self._takes("guidance_scale"):
            raise UsageError(f"A {name} takes no guidance. Leave it out.")
        pipeline.set_progress_bar_config(disable=True)

        def stop(position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            raise _EnoughError

        self._sample(0, stop)
        steps = getattr(getattr(pipeline, "scheduler", None), "timesteps", None)
        if steps is None:
            raise ModelError(f"A {name} has no scheduler that tells its timesteps. {OTHERWISE}")
        self._visited = [round(float(timestep)) for timestep in steps]
        self.timesteps = select_timesteps(self._visited, options.timesteps)

    @property
    def description(self) -> str:
        guidance = "its own guidance" if self._options.guidance is None else f"guidance {self._options.guidance:g}"
        shuffled = ", shuffled" if self._options.shuffle else ""
        return (
            f"{type(self.pipeline).__name__} on {count(len(self.order), 'prompt')} in "
            f"{count(len(self._visited), 'step')} (seed {self._options.seed}, {guidance}{shuffled}), "
            f"{listed(self.timesteps)}"
        )

    def samples(self, number: int) -> list[Sample]:
        return [sample for batch in self.load(number) for sample in batch.samples]

    def __getitem__(self, number: int) -> Item:
        return Item(number, self.load(number))  # errors of the pipeline are raised

    def batches(self, items: Sequence[Item]) -> list[Batch]:
        return [batch for item in items for batch in item.content]

    def placed(self, chunk: Chunk) -> Chunk:
        return chunk  # the pipeline passes arguments in dtypes of its own

    def load(self, number: int) -> list[Batch]:
        """Return the calls at the timesteps as the pipeline samples for a prompt, up to the last timestep."""
        if number not in self._kept:
            calls: dict[int, list[Batch]] = {self._visited.index(timestep): [] for timestep in self.timesteps}

            def keep(position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                if position > max(calls):
                    raise _EnoughError
                if position in calls:
                    calls[position].append(self._batch(number, position, len(calls[position]), args, kwargs))

            self._sample(number, keep)
            self._kept[number] = [batch for of_step in calls.values() for batch in of_step]
        return self._kept[number]

    def _batch(self, number: int, position: int, call: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
        arguments = _named(self.pipeline.transformer, args, kwargs)
        latents = arguments["hidden_states"]
        index = ((number * len(self._visited) + position) * 8 + call) * 8
        data = f"{type(self.pipeline).__name__} from seed {self._options.seed}"
        samples = [Sample(f"prompt {number}", number, index + i, data) for i in range(len(latents))]
        copies = {key: value.clone() if isinstance(value, Tensor) else value for key, value in arguments.items()}
        return Batch(kwargs=copies, samples=tuple(samples), part=f"timestep {self._visited[position]}")

    def _sample(self, number: int, observe: Callable[[int, tuple[Any, ...], dict[str, Any]], None]) -> None:
        """Run the pipeline, and pass each call of its transformer to ``observe``, with the number of its step."""
        transformer: nn.Module = self.pipeline.transformer
        timesteps: list[float] = []

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            timestep = float(torch.as_tensor(_named(module, args, kwargs)["timestep"]).flatten()[0])
            if timesteps[-1:] != [timestep]:  # with guidance there may be two calls in a step
                timesteps.append(timestep)
            observe(len(timesteps) - 1, args, kwargs)

        guidance = self._options.guidance
        chosen: dict[str, Any] = {} if guidance is None else {"guidance_scale": guidance}
        if self._takes("clean_caption"):
            chosen["clean_caption"] = False  # our prompts are clean, and cleaning depends on what else is installed
        handle = transformer.register_forward_pre_hook(before, with_kwargs=True)
        try:
            self.pipeline(
                prompt=PROMPTS[number],
                generator=torch.Generator().manual_seed(self._options.seed + number),
                output_type="latent",
                **chosen,
            )
        except _EnoughError:
            pass
        except NormscopeError:
            raise
        except Exception as error:  # of any pipeline's checks, its encoders, its transformer, its scheduler
            raise self._failure(error, number) from error
        finally:
            handle.remove()

    def _failure(self, error: Exception, number: int) -> NormscopeError:
        name = type(self.pipeline).__name__
        if memory_ended(error):
            return MemoryEndedError(
                f"A {name} takes more memory as it samples than there is. Take another device, or a smaller --dtype."
            )
        what = f"A {name} does not sample from the prompt {PROMPTS[number]!r} alone"
        return ModelError(f"{what}: {first_line(error)}. {OTHERWISE}")

    def _takes(self, argument: str) -> bool:
        return argument in inspect.signature(self.pipeline.__call__).parameters


def load_pipeline(name: str, folder: Path, components: Mapping[str, Any], options: LoadOptions) -> LoadedModel:
    """Load a pipeline from a folder; its transformer is the model, and its own sampling makes the inputs.

    ``components`` is the content of its model_index.json.

    Raises:
        UsageError: if data are passed, or guidance or timesteps do not apply.
        ModelError: if the pipeline asks for code of its own, does not load, or takes other things than a prompt.
    """
    if options.data is not None:
        raise UsageError(f"{name} runs on its own sampling from prompts and reads no data. Leave data out.")
    refuse_code(name, "model_index.json", dict(components))
    foreign = [key for key, value in components.items() if isinstance(value, list) and not _known(value)]
    if foreign or not hasattr(diffusers, str(components.get("_class_name"))):
        what = foreign[0] if foreign else components.get("_class_name")
        raise ModelError(f"{name} asks for code that is not diffusers' own ({what}), and none such is run. {OTHERWISE}")
    kind = getattr(diffusers, components["transformer"][1])  # a name that _known() has seen in diffusers
    part = folder / "transformer"
    module, provenance = with_weights(
        name,
        options,
        build=lambda: _build(name, kind, kind.load_config(part)),
        pretrained=lambda: _pretrained_in(name, kind, folder, part),
    )
    try:
        # The class itself knows that its transformer is a component; DiffusionPipeline would load another over ours.
        of_class = getattr(diffusers, components["_class_name"])
        pipeline = of_class.from_pretrained(folder, transformer=module, **_from_here())
    except Exception as error:  # of any component
        raise _does_not_load(f"The pipeline of {name} does not load", error) from error
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline  # seconds, which no DiT needs

    if not isinstance(pipeline, DiffusionPipeline):
        raise ModelError(f"{name} is a {components['_class_name']}, which is no pipeline. {OTHERWISE}")
    for part_name, component in pipeline.components.items():
        if isinstance(component, nn.Module) and component is not module:
            if any(tensor.is_meta for tensor in component.parameters()):
                raise ModelError(f"The pipeline of {name} does not load: its {part_name} lacks weights.")
            cast(component, options.dtype, _in_float32(type(component)))
            nn.Module.to(component, options.device)
    module, provenance = ready(module, provenance, options, _in_float32(kind))
    inputs = PipelineCalls(pipeline, options)
    task = Task(untold="the latents are of the pipeline's own trajectories, of which no true noise is known")
    return LoadedModel(name, module, inputs, provenance, Outputs("prediction", without_variances), task=task)


def _known(component: list[Any]) -> bool:
    library, kind = component
    if library == "diffusers":
        return hasattr(diffusers, str(kind))
    return library in (None, "transformers") or hasattr(diffusers.pipelines, str(library))


def _in_float32(kind: Any) -> list[str]:
    """Name the parts that a class of diffusers keeps in float32 in any dtype."""
    if not (isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin)):
        return []
    named: list[str] | str | None = kind._keep_in_fp32_modules
    return [named] if isinstance(named, str) else named or []


def _does_not_load(what: str, error: Exception) -> ModelError:
    remedy = "" if _has_accelerate() else " It may need accelerate: pip install 'accelerate>=1.2'."
    return ModelError(f"{what}: {first_line(error)}.{remedy}")


def _pretrained_in(name: str, kind: Any, folder: Path, part: Path) -> tuple[nn.Module, Provenance]:
    try:
        module, report = kind.from_pretrained(part, output_loading_info=True, **_from_here())
    except Exception as error:  # of diffusers, of safetensors
        raise _does_not_load(f"The transformer's weights of {name} do not load", error) from error
    wrong = [key for keys in ("missing_keys", "unexpected_keys", "mismatched_keys") for key in report[keys]]
    if wrong:
        raise ModelError(f"The transformer's weights of {name} do not fit it: {', '.join(map(str, wrong[:3]))}.")
    files = sorted(part.glob("*.safetensors"))
    provenance = Provenance("file", f"{folder}: transformer (sha256 {sha256_of(files)[:12]})")
    return module, with_dtypes(provenance, dtypes_of_files(files), dtypes_by_name(module.named_parameters()))


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by the parameters of the forward method."""
    return dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
