"""Diffusion transformers that read prompts: what a pipeline of diffusers gives to its own as it samples."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from diffusers.utils.import_utils import is_accelerate_available
from torch import Tensor, nn

from normscope.errors import MemoryEndedError, ModelError, NormscopeError, UsageError, count
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.loaded_model import LoadedModel, LoadOptions, Outputs, Provenance, Task, without_variances
from normscope.inputs.splits import Chunk
from normscope.models.inputs.numbered_inputs import NumberedInputs
from normscope.models.inputs.trajectories import listed, select_timesteps
from normscope.models.weights import downloads
from normscope.models.weights.checkpoints import cast, converted, dtypes_by_name, dtypes_of_files, ready, with_weights
from normscope.models.weights.repository import refuse_code
from normscope.runtime.files import sha256_of
from normscope.runtime.network import memory_ended

PROMPTS = (
    "a red bicycle leaning against a stone wall",
    "two herons in a shallow lake at dawn",
    "the workbench of a watchmaker, seen from above",
    "a mountain village under snow at night",
)
_FROM_HERE = {"use_safetensors": True, "local_files_only": True}
OTHERWISE = "Write a function that returns the transformer and batches for it, and name it as py:FILE:FACTORY."


class _EnoughError(Exception):
    """Ends a pipeline's sampling, when all calls have been seen that were to be seen."""


class PipelineCalls(NumberedInputs):
    """The calls that a pipeline makes to its transformer, at some timesteps, as it samples for each prompt.

    Everything is as the pipeline has it by default: number of steps, guidance unless given, size. Calls are kept. Each
    prompt is a chunk of its own, whatever ``batch_size`` is set to.

    Attributes:
        pipeline: on the asked-for device, in the asked-for dtype.
        timesteps: rounded to integers, in the order of sampling.
    """

    def __init__(self, pipeline: Any, options: LoadOptions) -> None:
        """Encode the first prompt, which sets the pipeline's timesteps, and choose among them.

        Args:
            pipeline: see the attributes.
            options: those that say which prompts are taken, ``seed``, ``guidance`` and ``timesteps`` are read.

        Raises:
            UsageError: if guidance or timesteps do not apply.
            ModelError: if the pipeline does not sample from a prompt alone, or raises anything else.
            MemoryEndedError: if memory ends meanwhile.
        """
        super().__init__(len(PROMPTS), options, one_by_one=True)
        self.pipeline = pipeline
        self._kept: dict[int, dict[int, list[Batch]]] = {}
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
        """Say which pipeline sampled for how many prompts, and at which timesteps its calls are taken."""
        guidance = "its own guidance" if self._options.guidance is None else f"guidance {self._options.guidance:g}"
        shuffled = ", shuffled" if self._options.shuffle else ""
        return (
            f"{type(self.pipeline).__name__} on {count(len(self.order), 'prompt')} in "
            f"{count(len(self._visited), 'step')} (seed {self._options.seed}, {guidance}{shuffled}), "
            f"{listed(self.timesteps)}"
        )

    @property
    def n_samples(self) -> int:
        """Number of samples: those of one call at each timestep for each prompt, as the first shows them."""
        calls = self._calls(self.order[0], self.timesteps[0])
        return sum(len(batch.samples) for batch in calls) * len(self.timesteps) * len(self.order)

    def _made(self, plan: Iterator[list[int]]) -> Iterator[Chunk]:
        return (Chunk(numbers, self._at_timesteps(*numbers)) for numbers in plan)

    def _at_timesteps(self, number: int) -> Iterator[Batch]:
        for timestep in self.timesteps:
            yield from self._calls(number, timestep)

    def _calls(self, number: int, timestep: int) -> list[Batch]:
        """Return the calls at a timestep; the first that is asked for takes no step beyond it."""
        kept = self._kept.setdefault(number, {})
        if timestep not in kept:
            kept.update(self._seen(number, until=self.timesteps[-1] if kept else timestep))
        return kept[timestep]

    def _seen(self, number: int, until: int) -> dict[int, list[Batch]]:
        wanted = {self._visited.index(timestep): timestep for timestep in self.timesteps if timestep >= until}
        seen: dict[int, list[Batch]] = {timestep: [] for timestep in wanted.values()}

        def keep(position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if position > max(wanted):
                raise _EnoughError
            if position in wanted:
                calls = seen[wanted[position]]
                calls.append(self._batch(number, position, len(calls), args, kwargs))

        self._sample(number, keep)
        return seen

    def _batch(self, number: int, position: int, call: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
        arguments = _named(self.pipeline.transformer, args, kwargs)
        latents = arguments["hidden_states"]
        index = ((number * len(self._visited) + position) * 8 + call) * 8
        data = f"{type(self.pipeline).__name__} from seed {self._options.seed}"
        samples = [Sample(f"prompt {number}", number, index + i, data) for i in range(len(latents))]
        copies = {key: value.clone() if isinstance(value, Tensor) else value for key, value in arguments.items()}
        return Batch(kwargs=copies, samples=tuple(samples), part=f"timestep {self._visited[position]}")

    def _sample(self, number: int, observe: Callable[[int, tuple[Any, ...], dict[str, Any]], None]) -> None:
        """Run the pipeline, and tell ``observe`` of each call of its transformer and at which step it is.

        Raises:
            ModelError: if the pipeline raises anything.
            MemoryEndedError: if memory ends meanwhile.
        """
        transformer: nn.Module = self.pipeline.transformer
        timesteps: list[float] = []

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            timestep = float(torch.as_tensor(_named(module, args, kwargs)["timestep"]).flatten()[0])
            if timesteps[-1:] != [timestep]:  # with guidance there may be two calls in a step
                timesteps.append(timestep)
            observe(len(timesteps) - 1, args, kwargs)

        chosen: dict[str, Any] = {}
        if self._options.guidance is not None:
            chosen["guidance_scale"] = self._options.guidance
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
            raise self._failure(error, number, len(timesteps)) from error
        finally:
            handle.remove()

    def _failure(self, error: Exception, number: int, step: int) -> NormscopeError:
        """Say what a pipeline raised as it sampled for a prompt, and at which step: the first is 1, 0 is before it."""
        name = type(self.pipeline).__name__
        if memory_ended(error):
            return MemoryEndedError(
                f"A {name} takes more memory as it samples than there is. Take another device, or a smaller --dtype."
            )
        if not step:
            return ModelError(
                f"A {name} does not sample from a prompt alone: {downloads.first_line(error)}. {OTHERWISE}"
            )
        return ModelError(
            f"A {name} raised an error in step {step} of sampling for the prompt {PROMPTS[number]!r}: "
            f"{downloads.first_line(error)}. {OTHERWISE}"
        )

    def _takes(self, argument: str) -> bool:
        return argument in inspect.signature(self.pipeline.__call__).parameters


def load_pipeline(name: str, folder: Path, components: Mapping[str, Any], options: LoadOptions) -> LoadedModel:
    """Load a pipeline from a folder; its transformer is the model, and its own sampling makes the inputs.

    Args:
        name: what outputs and errors call it.
        folder: that ``save_pretrained`` of the pipeline wrote.
        components: what its model_index.json holds.
        options: which weights the transformer has, and where to put the pipeline.

    Raises:
        UsageError: if data are given, or guidance or timesteps do not apply.
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
        name, options, build=lambda: _built(name, kind, part), pretrained=lambda: _pretrained(name, kind, folder, part)
    )
    others = [_kind(value) for key, value in components.items() if key != "transformer" and isinstance(value, list)]
    by_accelerate = _by_accelerate(name, others)
    try:
        # The class itself knows that its transformer is a component; DiffusionPipeline would load another over ours.
        pipeline = getattr(diffusers, components["_class_name"]).from_pretrained(
            folder, transformer=module, low_cpu_mem_usage=by_accelerate, **_FROM_HERE
        )
    except Exception as error:  # of any component
        raise ModelError(f"The pipeline of {name} does not load: {downloads.first_line(error)}.") from error
    if not isinstance(pipeline, DiffusionPipeline):
        raise ModelError(f"{name} is a {components['_class_name']}, which is no pipeline. {OTHERWISE}")
    for part_name, component in pipeline.components.items():
        if isinstance(component, nn.Module) and component is not module:
            if any(tensor.is_meta for tensor in component.parameters()):
                raise ModelError(f"The pipeline of {name} does not load: its {part_name} lacks weights.")
            cast(component, options.dtype, _in_float32(type(component)) or ())
            nn.Module.to(component, options.device)
    module, provenance = ready(module, provenance, options, _in_float32(kind) or ())
    inputs = PipelineCalls(pipeline, options)
    task = Task(untold="the latents are of the pipeline's own trajectories, of which no true noise is known")
    return LoadedModel(name, module, inputs, provenance, Outputs("prediction", without_variances), task=task)


def _known(component: list[Any]) -> bool:
    library, kind = component
    if library == "diffusers":
        return hasattr(diffusers, str(kind))
    return library in (None, "transformers") or hasattr(diffusers.pipelines, str(library))


def _kind(component: list[Any]) -> Any:
    library, kind = component
    return getattr(diffusers, str(kind)) if library == "diffusers" else None


def _in_float32(kind: Any) -> list[str] | None:
    """Name the parts that a class of diffusers keeps in float32 in any dtype; None of one that does not speak of it."""
    if not (isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin)):
        return None
    named: list[str] | str | None = kind._keep_in_fp32_modules
    return [named] if isinstance(named, str) else named


def _by_accelerate(name: str, kinds: Iterable[Any]) -> bool:
    """Tell whether to load through accelerate, as diffusers insists on for classes that keep parts in float32.

    Raises:
        ModelError: if it is not installed then.
    """
    keeping = next((kind for kind in kinds if _in_float32(kind) is not None), None)  # an empty list counts too
    if keeping is not None and not is_accelerate_available():  # type: ignore[no-untyped-call]
        raise ModelError(
            f"The {keeping.__name__} of {name} keeps parts in float32, and diffusers loads such a class through "
            "accelerate alone, which is not installed. Install it: pip install 'normscope[accelerate]'."
        )
    return keeping is not None


def _built(name: str, kind: Any, folder: Path) -> nn.Module:
    try:
        module: nn.Module = kind.from_config(kind.load_config(folder))
    except Exception as error:  # of any configuration's checks
        raise ModelError(f"The transformer of {name} cannot be made: {downloads.first_line(error)}.") from error
    return module


def _pretrained(name: str, kind: Any, folder: Path, part: Path) -> tuple[nn.Module, Provenance]:
    by_accelerate = _by_accelerate(name, [kind])
    try:
        module, report = kind.from_pretrained(
            part, output_loading_info=True, low_cpu_mem_usage=by_accelerate, **_FROM_HERE
        )
    except Exception as error:  # of diffusers, of safetensors
        raise ModelError(f"The transformer's weights of {name} do not load: {downloads.first_line(error)}.") from error
    wrong = [key for keys in ("missing_keys", "unexpected_keys", "mismatched_keys") for key in report[keys]]
    if wrong:
        raise ModelError(f"The transformer's weights of {name} do not fit it: {', '.join(map(str, wrong[:3]))}.")
    files = sorted(part.glob("*.safetensors"))
    provenance = Provenance("file", f"{folder}: transformer (sha256 {sha256_of(files)[:12]})")
    return module, converted(provenance, dtypes_of_files(files), dtypes_by_name(module.named_parameters()))


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by the names that the forward method gives them."""
    return dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
