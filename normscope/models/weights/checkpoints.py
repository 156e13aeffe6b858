"""Weights: pretrained, random, or of a file, which is read without executing anything in it and has to fit exactly."""

from __future__ import annotations

import hashlib
import json
import pickle
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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
from normscope.models.weights.devices import spread
from normscope.runtime.files import sha256_of

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def dtypes_of(state_dict: Mapping[str, Any]) -> set[torch.dtype]:
    """Return the floating-point types of a state dict, which may contain other objects beside tensors."""
    return {value.dtype for value in state_dict.values() if isinstance(value, Tensor) and value.is_floating_point()}


def dtypes_of_files(paths: Iterable[Path]) -> set[torch.dtype]:
    """Return the floating-point types of safetensors files, without reading values."""
    codes: set[str] = set()
    for path in paths:
        with safe_open(path, framework="pt") as file:
            codes |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 (not a mapping)
    return {_DTYPES[code] for code in codes & _DTYPES.keys()}


def with_conversion(provenance: Provenance, before: set[torch.dtype], after: set[torch.dtype]) -> Provenance:
    """Add a conversion of the weights from some floating-point types to others to a provenance.

    >>> with_conversion(Provenance.random(0), {torch.bfloat16}, {torch.float32}).description
    'random weights, seed 0, converted from bfloat16 to float32'
    """
    if before == after or not before:
        return provenance
    changed = before - after or before, after - before or after
    old, new = (" and ".join(sorted(map(_name, dtypes))) for dtypes in changed)
    return replace(provenance, description=f"{provenance.description}, converted from {old} to {new}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def load_file(module: nn.Module, path: Path, name: str) -> Provenance:
    """Load the state dict in ``path``, see :func:`read_state_dict`, into ``module``, see :func:`load_state_dict`."""
    return load_state_dict(module, read_state_dict(path), path, name)


def load_state_dict(module: nn.Module, state_dict: dict[str, Tensor], path: Path, name: str) -> Provenance:
    """Load the state dict of a file; one with other keys goes through the conversion that timm has for the family.

    Weights are converted to the dtypes of ``module``, which is half loaded if an error is raised.

    Raises:
        ModelError: if these are not exactly the weights of ``module``; ``name`` is the model's in the message.
    """
    expected = module.state_dict()
    if state_dict.keys() != expected.keys():
        state_dict = _by_timm(state_dict, module)
    misfits = [
        f"{key} is {tuple(value.shape)} and should be {tuple(expected[key].shape)}"
        for key, value in state_dict.items()
        if key in expected and value.shape != expected[key].shape
    ] + not_floating(state_dict, expected)
    if not misfits:
        # Not our own comparison of keys: modules may fill in what older versions of them did not save.
        result = module.load_state_dict(state_dict, strict=False)
        misfits = [f"{key} is missing" for key in result.missing_keys]
        misfits += [f"{key} is not in the model" for key in result.unexpected_keys]
    if misfits:
        raise ModelError(f"The weights file {str(path)!r} does not fit {name}: {first_few(misfits)}.")
    return with_conversion(provenance_of_file(path), dtypes_of(state_dict), dtypes_of(expected))


def not_floating(state_dict: Mapping[str, Tensor], expected: Mapping[str, Tensor], prefix: str = "") -> list[str]:
    """Describe integers, quantized weights for example, in place of floats: torch would copy them.

    Keys are compared without ``prefix``.
    """
    dtypes = {key.removeprefix(prefix): value.dtype for key, value in expected.items() if value.is_floating_point()}
    return [
        f"{key} is {_name(value.dtype)} and should be {_name(dtypes[key.removeprefix(prefix)])}"
        for key, value in state_dict.items()
        if key.removeprefix(prefix) in dtypes and not value.is_floating_point()
    ]


def provenance_of_file(path: Path) -> Provenance:
    return Provenance("file", f"file {path.name} (sha256 {sha256_of([path])[:12]})")


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file or torch checkpoint, without unpickling code.

    A checkpoint may have them under ``state_dict``, ``model`` or their EMA versions.

    Raises:
        ModelError, DataError: if there is no file, or it contains anything but tensors by name.
    """
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
                f"The weights file {str(path)!r} is damaged, no file of weights, or contains Python objects besides "
                "tensors, and unpickling these can run any code. Save the model's state_dict() alone, best as "
                "safetensors."
            ) from error
        kind = "safetensors file" if path.suffix == ".safetensors" else "torch checkpoint"
        raise ModelError(
            f"The weights file {str(path)!r} cannot be read: it is no {kind}, or a damaged one "
            f"({type(error).__name__})."
        ) from error
    if not state_dict or not all(isinstance(value, Tensor) for value in state_dict.values()):
        raise ModelError(f"The weights file {str(path)!r} contains no state dict: a dict of tensors by name.")
    return dict(state_dict)


def _by_timm(state_dict: dict[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """Convert a checkpoint in the format of a model's first publication as timm does; others stay as they are."""
    convert: Any = getattr(sys.modules[type(module).__module__], "checkpoint_filter_fn", None)
    try:
        return state_dict if convert is None else dict(convert(dict(state_dict), module))
    except Exception:  # it met keys that no format of this family has: the caller names them
        return state_dict


def with_weights(
    name: str,
    options: LoadOptions,
    *,
    build: Callable[[], nn.Module],
    pretrained: Callable[[], tuple[nn.Module, Provenance]],
    from_file: Callable[[nn.Module, Path, str], Provenance] = load_file,
) -> tuple[nn.Module, Provenance]:
    """Make the module with the weights that ``options.weights`` asks for.

    ``build`` makes it with fresh weights, ``pretrained`` with the published ones, and ``from_file`` loads a file's into
    a fresh module.
    """
    with seeded(options.seed):
        match options.weights:
            case "pretrained":
                return pretrained()
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
    module: nn.Module, provenance: Provenance, options: LoadOptions, float32_parts: Collection[str] = ()
) -> tuple[nn.Module, Provenance]:
    """Put a module into eval mode, in the requested dtype and onto the requested devices; note a conversion.

    If a class of diffusers keeps parts of some names in float32, at any depth, its buffers keep their dtypes too.
    """
    before = dtypes_of(dict(module.named_parameters()))
    if options.dtype is not None and float32_parts:
        for name, parameter in module.named_parameters():
            stays = not set(float32_parts).isdisjoint(name.split("."))
            parameter.data = parameter.data.to(torch.float32 if stays else options.dtype)
    elif options.dtype is not None:
        nn.Module.to(module, options.dtype)  # diffusers' own to() warns
    return placed(module, options), with_conversion(provenance, before, dtypes_of(dict(module.named_parameters())))


def placed(module: nn.Module, options: LoadOptions) -> nn.Module:
    """Put a module into eval mode and onto the requested device, or spread it over several."""
    module.eval()
    if options.device_map is None:
        return nn.Module.to(module, options.device)
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


def load_embedded(
    name: str,
    options: LoadOptions,
    build: Callable[[dict[str, Any]], nn.Module],
    *,
    trained_on: str,
    within: Callable[[nn.Module], Any] = lambda module: module,
    from_file: Callable[[nn.Module, Path, str], Provenance] = load_file,
) -> tuple[nn.Module, Provenance, dict[str, Any]]:
    """Make an embedded network with the requested weights, ready to run; also return the facts in its file's header.

    ``build`` makes the module from these facts; ``within`` returns the part whose weights are in ``NAME.safetensors``.
    """
    weights, facts, digest = read_embedded(f"{name}.safetensors")

    def pretrained() -> tuple[nn.Module, Provenance]:
        module = build(facts)
        within(module).load_state_dict(weights)
        return module, Provenance("embedded", f"embedded {name} (trained on {trained_on}, sha256 {digest[:12]})")

    module, provenance = with_weights(
        name, options, build=lambda: build(facts), pretrained=pretrained, from_file=from_file
    )
    return *ready(module, provenance, options), facts
