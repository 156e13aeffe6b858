"""Diffusion transformers: DiT in diffusers' format, from anywhere, and the tiny one; others by their own pipelines."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_utils import KarrasDiffusionSchedulers
from diffusers.utils.import_utils import is_accelerate_available
from torch import Tensor, nn

from normscope.errors import MemoryEndedError, ModelError, UsageError, count, first_few, first_line
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.chunks import Chunk
from normscope.inputs.loaded_model import Inputs, LoadedModel, LoadOptions, Outputs, Provenance, Task, without_variances
from normscope.models.inputs.dataset import InputDataset, Item
from normscope.models.inputs.trajectories import (
    STEPS,
    LatentSpace,
    NoisedLatents,
    Trajectories,
    listed,
    select_timesteps,
)
from normscope.models.weights import checkpoints
from normscope.models.weights.devices import quiet
from normscope.models.weights.repository import Repository, refuse_code
from normscope.runtime.files import sha256_of
from normscope.runtime.network import memory_ended

GUIDANCE = 4.0  # DiTPipeline's default, and the largest that the paper shows samples for
TRAJECTORIES = 4
FEW_STEPS = 5  # of a full-size network's trajectory, unless the requested timesteps take more

WEIGHTS = ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin")  # the latter without unpickling code

# The defaults of diffusers' classes are DiT-XL/2's, except for these.
_PUBLISHED: dict[str, dict[str, Any]] = {
    "facebook/DiT-XL-2-256": {"out_channels": 8, "sample_size": 32},
    "facebook/DiT-XL-2-512": {"out_channels": 8, "sample_size": 64},
}
_DIT_SCHEDULER: dict[str, Any] = {"clip_sample": False}
_FROM_HERE = {"use_safetensors": True, "local_files_only": True}  # arguments of from_pretrained
_PREDICTIONS = ("epsilon", "sample", "v_prediction")

_DITS = ("DiTTransformer2DModel", "Transformer2DModel")
OTHERWISE = "Write a function that returns the transformer and batches for it, and name it as py:FILE:FACTORY."

PROMPTS = (
    "a red bicycle leaning against a stone wall",
    "two herons in a shallow lake at dawn",
    "the workbench of a watchmaker, seen from above",
    "a mountain village under snow at night",
)


def load(name: str, architecture: str, options: LoadOptions) -> LoadedModel:
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
    inputs = dit_inputs(config, scheduler, options, **default)
    module, provenance = checkpoints.with_weights(
        name,
        options,
        build=lambda: _build(name, DiTTransformer2DModel, config),
        pretrained=lambda: _pretrained(name, repository, config, subfolder),
    )
    module, provenance = checkpoints.ready(module, provenance, options)
    return loaded_model(name, module, inputs, provenance)


def loaded_model(
    name: str, module: nn.Module, inputs: Inputs, provenance: Provenance, calibration: Inputs | None = None
) -> LoadedModel:
    """Return a transformer and its inputs; trajectories among them get the module that makes them."""
    for trajectories in (inputs, calibration):
        if isinstance(trajectories, Trajectories):
            trajectories.module = module
    task = Task(unmeasured="the latents are of the model's own trajectories, of which no true noise is known")
    if isinstance(inputs, NoisedLatents):
        task = Task("denoising", truth=inputs.truth)
    outputs = Outputs("prediction", without_variances)
    return LoadedModel(name, module, inputs, provenance, outputs, calibration, task=task)


def dit_inputs(config: dict[str, Any], scheduler: DDIMScheduler, options: LoadOptions, **default: Any) -> Inputs:
    """Return the latents of a file, or trajectories without their module; ``default`` as in :class:`Trajectories`."""
    defaults = inspect.signature(DiTTransformer2DModel).parameters
    channels, size, classes = (
        config.get(key, defaults[key].default) for key in ("in_channels", "sample_size", "num_embeds_ada_norm")
    )
    space = LatentSpace(channels, size, classes)
    if options.data is None:
        return Trajectories(space, scheduler, options, **default)
    return NoisedLatents(Path(options.data), space, scheduler, options)


def _describe(name: str, repository: Repository) -> tuple[dict[str, Any], DDIMScheduler, str, str]:
    """Return the transformer's configuration, its scheduler of training, the folder of its files, and a remark."""
    if repository.name in _PUBLISHED and not repository.is_folder:
        return _PUBLISHED[repository.name], scheduler_of(name, _DIT_SCHEDULER), "transformer/", ""
    pipeline = repository.json("model_index.json")
    folder = "" if pipeline is None else "transformer/"
    config, scheduler = (repository.json(file) for file in (f"{folder}config.json", "scheduler/scheduler_config.json"))
    if pipeline is not None and "transformer" not in pipeline:
        raise ModelError(f"{name} is a {pipeline.get('_class_name')}, which has no transformer.")
    if config is None:
        raise ModelError(f"{name} contains no transformer in the layout of diffusers: there is no config.json of one.")
    kind = config.get("_class_name")
    # Until diffusers 0.28 the second class was all transformers; the published DiT-XL/2 still name it.
    if kind not in _DITS or config.get("norm_type") != "ada_norm_zero":
        raise ModelError(
            f"The transformer of {name} is a {kind}. Those that are no DiT need the folder of their whole pipeline, "
            f"which feeds them: download it, and name it as diffusers:DIR. {OTHERWISE}"
        )
    remark = "with the noise schedule of DiT-XL/2" if scheduler is None else ""
    return config, scheduler_of(name, scheduler or _DIT_SCHEDULER), folder, remark


def scheduler_of(name: str, config: dict[str, Any]) -> DDIMScheduler:
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
    provenance = checkpoints.load_file(module, path, name)
    if repository.is_folder:
        return module, Provenance(provenance.kind, f"{repository.name}: {provenance.description}")
    return module, repository.provenance([path])


class _EnoughError(Exception):
    """Ends a pipeline's sampling, when all calls have been seen that were to be seen."""


class PipelineCalls(InputDataset):
    """Calls of a pipeline to its transformer at some timesteps, as it samples for each prompt; kept in memory.

    Number of steps, size and, by default, guidance are the pipeline's own. Each prompt is a chunk.

    Attributes:
        pipeline: on the requested device, in the requested dtype.
        timesteps: rounded to integers, in the order of sampling.
    """

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
        self._sample(0, [])
        steps = getattr(getattr(pipeline, "scheduler", None), "timesteps", None)
        if steps is None:
            raise ModelError(f"A {name} has no scheduler with timesteps. {OTHERWISE}")
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
        """Return the calls at the timesteps as the pipeline samples for a prompt."""
        if number not in self._kept:
            calls = self._sample(number, [self._visited.index(timestep) for timestep in self.timesteps])
            steps = [step for step, _ in calls]
            self._kept[number] = [
                self._batch(number, step, steps[:index].count(step), arguments)
                for index, (step, arguments) in enumerate(calls)
            ]
        return self._kept[number]

    def _batch(self, number: int, step: int, call: int, arguments: dict[str, Any]) -> Batch:
        index = ((number * len(self._visited) + step) * 8 + call) * 8
        data = f"{type(self.pipeline).__name__} from seed {self._options.seed}"
        latents = arguments["hidden_states"]
        samples = tuple(Sample(f"prompt {number}", number, index + i, data) for i in range(len(latents)))
        return Batch(kwargs=arguments, samples=samples, part=f"timestep {self._visited[step]}")

    def _sample(self, number: int, steps: Sequence[int]) -> list[tuple[int, dict[str, Any]]]:
        """Run the pipeline up to the last of some steps; return the transformer's calls at them, by their arguments."""
        timesteps: list[float] = []
        calls: list[tuple[int, dict[str, Any]]] = []

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            arguments = inspect.signature(module.forward).bind(*args, **kwargs).arguments
            timestep = float(torch.as_tensor(arguments["timestep"]).flatten()[0])
            if timesteps[-1:] != [timestep]:  # with guidance there may be two calls in a step
                timesteps.append(timestep)
            step = len(timesteps) - 1
            if step > max(steps, default=-1):
                raise _EnoughError
            if step in steps:
                copies = {key: x.clone() if isinstance(x, Tensor) else x for key, x in arguments.items()}
                calls.append((step, copies))

        guidance = self._options.guidance
        chosen: dict[str, Any] = {} if guidance is None else {"guidance_scale": guidance}
        if self._takes("clean_caption"):
            chosen["clean_caption"] = False  # our prompts are clean, and cleaning depends on what else is installed
        name, prompt = type(self.pipeline).__name__, PROMPTS[number]
        generator = torch.Generator().manual_seed(self._options.seed + number)
        handle = self.pipeline.transformer.register_forward_pre_hook(before, with_kwargs=True)
        try:
            self.pipeline(prompt=prompt, generator=generator, output_type="latent", **chosen)
        except _EnoughError:
            pass
        except Exception as error:  # of any pipeline's checks, its encoders, its transformer, its scheduler
            if memory_ended(error):
                raise MemoryEndedError(
                    f"A {name} takes more memory as it samples than there is. Take another device, or a smaller "
                    "--dtype."
                ) from error
            problem = f"A {name} does not sample from the prompt {prompt!r} alone"
            raise ModelError(f"{problem}: {first_line(error)}. {OTHERWISE}") from error
        finally:
            handle.remove()
        return calls

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
        code = foreign[0] if foreign else components.get("_class_name")
        raise ModelError(f"{name} asks for code that is not diffusers' own ({code}), and none such is run. {OTHERWISE}")
    kind = getattr(diffusers, components["transformer"][1])  # a name that _known() has seen in diffusers
    subfolder = folder / "transformer"
    module, provenance = checkpoints.with_weights(
        name,
        options,
        build=lambda: _build(name, kind, kind.load_config(subfolder)),
        pretrained=lambda: read_transformer(name, kind, subfolder, options.dtype),
    )
    try:
        # The class itself knows that its transformer is a component; DiffusionPipeline would load another over ours.
        loader = getattr(diffusers, components["_class_name"])
        with quiet():
            pipeline = loader.from_pretrained(folder, transformer=module, torch_dtype=options.dtype, **_FROM_HERE)
        for component in pipeline.components.values():
            if isinstance(component, nn.Module) and component is not module:
                nn.Module.to(component, options.device)
    except Exception as error:  # of any component
        raise _does_not_load(f"The pipeline of {name} does not load", error) from error
    if options.weights == "pretrained":  # in the dtypes of its class, some of whose parts may stay in float32
        module = checkpoints.placed(module, options)
    else:
        module, provenance = checkpoints.ready(module, provenance, options, kind._keep_in_fp32_modules or ())
    return loaded_model(name, module, PipelineCalls(pipeline, options), provenance)


def _known(component: list[Any]) -> bool:
    library, kind = component
    if library == "diffusers":
        return hasattr(diffusers, str(kind))
    return library in (None, "transformers") or hasattr(diffusers.pipelines, str(library))


def _does_not_load(problem: str, error: Exception) -> ModelError:
    installed = bool(is_accelerate_available())  # type: ignore[no-untyped-call]
    remedy = "" if installed else " It may need accelerate: pip install 'accelerate>=1.2'."
    return ModelError(f"{problem}: {first_line(error)}.{remedy}")


def read_transformer(name: str, kind: Any, folder: Path, dtype: torch.dtype | None) -> tuple[nn.Module, Provenance]:
    """Load the transformer of a pipeline's folder; ModelError if the weights do not fit it."""
    try:
        with quiet():
            module, report = kind.from_pretrained(folder, torch_dtype=dtype, output_loading_info=True, **_FROM_HERE)
    except Exception as error:  # of diffusers, of safetensors
        raise _does_not_load(f"The transformer's weights of {name} do not load", error) from error
    wrong = [key for keys in ("missing_keys", "unexpected_keys", "mismatched_keys") for key in report[keys]]
    if wrong:
        raise ModelError(f"The transformer's weights of {name} do not fit it: {first_few(wrong)}.")
    files = sorted(folder.glob("*.safetensors"))
    provenance = Provenance("file", f"{folder.parent}: transformer (sha256 {sha256_of(files)[:12]})")
    before, after = checkpoints.dtypes_of_files(files), checkpoints.dtypes_of(module.state_dict())
    return module, checkpoints.with_conversion(provenance, before, after)
