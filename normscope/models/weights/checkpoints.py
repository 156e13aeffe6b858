"""Weights: pretrained, random, or of a file, which is read without executing anything in it and has to fit exactly."""

from __future__ import annotations

import hashlib
import json
import pickle
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from normscope.errors import DataError, ModelError, first_few
from normscope.inputs.loaded_model import LoadOptions, Provenance
from normscope.runtime.files import sha256_of

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def dtypes_by_name(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in tensors if tensor.is_floating_point()}


def dtypes_of_files(paths: Iterable[Path]) -> dict[str, torch.dtype]:
    """Return the dtype of each floating-point tensor of safetensors files by name, without reading values."""
    dtypes: dict[str, torch.dtype] = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            by_name = {name: _DTYPES.get(file.get_slice(name).get_dtype()) for name in file.keys()}  # noqa: SIM118
            dtypes |= {name: dtype for name, dtype in by_name.items() if dtype is not None}
    return dtypes


def with_dtypes(
    provenance: Provenance, before: Mapping[str, torch.dtype], after: Mapping[str, torch.dtype]
) -> Provenance:
    """Add conversions of the weights' dtypes, by name before and after, to a provenance.

    >>> before = {"0.weight": torch.bfloat16, "1.weight": torch.float32}
    >>> with_dtypes(Provenance.random(0), before, dict.fromkeys(before, torch.float32)).description
    'random weights, seed 0, converted from bfloat16 to float32'
    """
    changed = [name for name in before if name in after and before[name] != after[name]]
    if not changed:
        return provenance
    old, new = (" and ".join(sorted({_dtype(dtypes[name]) for name in changed})) for dtypes in (before, after))
    return replace(provenance, description=f"{provenance.description}, converted from {old} to {new}")


def load_file(module: nn.Module, path: Path, name: str) -> Provenance:
    """Load the state dict in ``path`` into ``module``.

    A state dict may lie under ``state_dict``, ``model`` or their EMA versions. One whose keys are not the model's own
    goes through the conversion that timm has for that family of models.

    Weights are converted to the dtypes of ``module``, which is half loaded if an error is raised.

    Raises:
        ModelError: if ``path`` is neither a safetensors file nor a torch checkpoint, or does not contain exactly the
            weights of ``module``; ``name`` is the model's in the message.
    """
    state_dict = read_state_dict(path)
    if state_dict.keys() != module.state_dict().keys():
        state_dict = _by_timm(state_dict, module)
    misfits = _misfits(state_dict, module)
    if not misfits:
        # Not our own comparison of keys: modules may fill in what older versions of them did not save.
        result = module.load_state_dict(state_dict, strict=False)
        misfits = [f"{key} is missing" for key in result.missing_keys]
        misfits += [f"{key} is not in the model" for key in result.unexpected_keys]
    if misfits:
        raise ModelError(f"The weights file {str(path)!r} does not fit {name}: {first_few(misfits)}.")
    after = dtypes_by_name(module.named_parameters())
    return with_dtypes(provenance_of_file(path), dtypes_by_name(state_dict.items()), after)


def provenance_of_file(path: Path) -> Provenance:
    return Provenance("file", f"file {path.name} (sha256 {sha256_of([path])[:12]})")


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file or torch checkpoint, without unpickling code; ModelError, DataError."""
    if path.is_dir():
        raise ModelError(f"The weights {str(path)!r} are a folder. Name the checkpoint file in it.")
    if not path.is_file():
        raise DataError(
            f"There is no weights file {str(path)!r}. --weights takes pretrained, random, or the path of a file."
        )
    import timm.models  # a second or two, only where a file is read

    try:
        state_dict = timm.models.load_state_dict(str(path), weights_only=True)
    except Exception as error:  # pickle, zipfile, torch and safetensors each have their own
        if isinstance(error.__cause__ or error, pickle.UnpicklingError):
            raise ModelError(
                f"The weights file {str(path)!r} is damaged, or holds Python objects besides tensors. Those would "
                "have to be unpickled, which can run any code; save the model's state_dict() alone, best as "
                "safetensors."
            ) from error
        kind = "safetensors file" if path.suffix == ".safetensors" else "torch checkpoint"
        raise ModelError(
            f"The weights file {str(path)!r} cannot be read: it is no {kind}, or a damaged one "
            f"({type(error).__name__})."
        ) from error
    if not state_dict or not all(isinstance(value, Tensor) for value in state_dict.values()):
        raise ModelError(f"The weights file {str(path)!r} holds no state dict: a dict of tensors by name.")
    return dict(state_dict)


def _by_timm(state_dict: dict[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """Convert a checkpoint in the format of a model's first publication as timm does; others stay as they are."""
    convert: Any = getattr(sys.modules[type(module).__module__], "checkpoint_filter_fn", None)
    if convert is None:
        return state_dict
    try:
        return dict(convert(dict(state_dict), module))
    except Exception:  # it met keys that no format of this family has: the caller names them
        return state_dict


def _misfits(state_dict: dict[str, Tensor], module: nn.Module) -> list[str]:
    """Describe tensors of another shape, and integers in place of floats, which torch would copy."""
    misfits = []
    expected = module.state_dict()
    for key in [key for key in state_dict if key in expected]:
        value, target = state_dict[key], expected[key]
        if value.shape != target.shape:
            misfits.append(f"{key} is {tuple(value.shape)} and should be {tuple(target.shape)}")
        elif target.is_floating_point() and not value.is_floating_point():  # quantized, or a mask
            misfits.append(f"{key} is {_dtype(value.dtype)} and should be {_dtype(target.dtype)}")
    return misfits


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def with_weights(
    name: str,
    options: LoadOptions,
    *,
    build: Callable[[], nn.Module],
    pretrained: Callable[[], tuple[nn.Module, Provenance]],
    from_file: Callable[[nn.Module, Path, str], Provenance] = load_file,
    on_gpu: bool = False,
) -> tuple[nn.Module, Provenance]:
    """Make the module with the weights that ``options.weights`` asks for.

    ``build`` makes it with fresh weights, ``pretrained`` with the published ones, and ``from_file`` loads a file's into
    a fresh module. With ``on_gpu``, random weights are drawn there if a GPU is requested: billions take minutes on the
    CPU, whose numbers differ.
    """
    with seeded(options.seed):
        match options.weights:
            case "pretrained":
                return pretrained()
            case "random" if on_gpu and options.device.type == "cuda" and options.device_map is None:
                gpu = options.device
                with torch.cuda.device(gpu), torch.random.fork_rng([torch.cuda.current_device()]), gpu:
                    torch.cuda.manual_seed(options.seed)
                    return build(), Provenance.random(options.seed, on="GPU")
            case "random":
                return build(), Provenance.random(options.seed)
            case file:
                module = build()
                return module, from_file(module, Path(file), name)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Initialize parameters, which happens on the CPU, under ``seed``; leave the random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the GPUs too
        yield


def ready(
    module: nn.Module, provenance: Provenance, options: LoadOptions, in_float32: Sequence[str] = ()
) -> tuple[nn.Module, Provenance]:
    """Put a module into eval mode, in the requested dtype and onto the requested devices; note conversions."""
    before = dtypes_by_name(module.named_parameters())
    cast(module.eval(), options.dtype, in_float32)
    provenance = with_dtypes(provenance, before, dtypes_by_name(module.named_parameters()))
    return placed(module, options), provenance


def cast(module: nn.Module, dtype: torch.dtype | None, in_float32: Collection[str] = ()) -> None:
    """Convert the floating-point numbers of a module to a dtype, in place; None converts nothing.

    Weights of modules or tensors named in ``in_float32``, at any depth, become float32; their buffers stay.

    >>> module = nn.ModuleDict({"norm1": nn.Linear(1, 1), "ff": nn.Linear(1, 1)})
    >>> cast(module, torch.bfloat16, ["norm1"])
    >>> module["norm1"].weight.dtype, module["ff"].weight.dtype
    (torch.float32, torch.bfloat16)
    """
    if dtype is None:
        return
    if not in_float32:
        # Not diffusers' own to(), which warns of an empty list of modules that should stay in float32.
        nn.Module.to(module, dtype)
        return
    for path, part in module.named_modules():
        for name, tensor in [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]:
            stays = not set(in_float32).isdisjoint([*path.split("."), name])
            if not tensor.is_floating_point():
                continue
            if isinstance(tensor, nn.Parameter):
                tensor.data = tensor.data.to(torch.float32 if stays else dtype)
            elif not stays:
                setattr(part, name, tensor.to(dtype))


def placed(module: nn.Module, options: LoadOptions) -> nn.Module:
    """Put a module onto the requested device, or spread it over several."""
    if options.device_map is None:
        return nn.Module.to(module, options.device)
    from normscope.models.weights.devices import spread

    return spread(module, options.device)


def read_embedded(filename: str) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    """Return the tensors of a safetensors file of this package, the facts in its header, and its SHA-256.

    >>> tensors, facts, digest = read_embedded("demo_vit.safetensors")
    >>> facts["config"]["depth"]
    8
    """
    with as_file(files("normscope.models") / "embedded" / filename) as path:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
            return tensors, json.loads(file.metadata()["normscope"]), digest


def embedded_module(
    architecture: str,
    trained_on: str,
    build: Callable[[dict[str, Any]], nn.Module],
    within: Callable[[nn.Module], Any] = lambda module: module,
) -> tuple[Callable[[], nn.Module], Callable[[], tuple[nn.Module, Provenance]]]:
    """Return ``build`` and ``pretrained`` of :func:`with_weights` for the weights in ``ARCHITECTURE.safetensors``.

    ``build`` makes the module from the facts in the file's header; ``within`` returns the part with the weights.
    """
    weights, facts, digest = read_embedded(f"{architecture}.safetensors")

    def pretrained() -> tuple[nn.Module, Provenance]:
        module = build(facts)
        within(module).load_state_dict(weights)
        description = f"embedded {architecture} (trained on {trained_on}, sha256 {digest[:12]})"
        return module, Provenance("embedded", description)

    return lambda: build(facts), pretrained
