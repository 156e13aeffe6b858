"""The steps that every family goes through: pretrained weights, random ones, or those of a file; then the device."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from normscope.models.base import LoadOptions, Provenance
from normscope.models.checkpoints import load_file
from normscope.models.conversions import converted, dtypes_by_name


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

    Args:
        name: what error messages call the model.
        options: ``weights`` and ``seed`` are read.
        build: makes the module with fresh weights.
        pretrained: makes it with the published ones, and says which they are.
        from_file: loads a file's weights into a fresh module.
        on_gpu: draw random weights on the GPU that they are for, if they are for one. There are networks whose
            billions of numbers take minutes on a CPU. A GPU draws others under the same seed.

    Raises:
        ModelError: if the weights cannot be had or do not fit.
    """
    with seeded(options.seed):
        match options.weights:
            case "pretrained":
                return pretrained()
            case "random" if on_gpu and options.device.type == "cuda" and options.device_map is None:
                with drawn_on(options.device, options.seed):
                    return build(), Provenance.random(options.seed, on="GPU")
            case "random":
                return build(), Provenance.random(options.seed)
            case file:
                module = build()
                return module, from_file(module, Path(file), name)


@contextmanager
def drawn_on(device: torch.device, seed: int) -> Iterator[None]:
    """Make a network on a GPU, and draw its weights there under ``seed``; leave the GPU's random state as it was."""
    with torch.cuda.device(device), torch.random.fork_rng([torch.cuda.current_device()]), device:
        torch.cuda.manual_seed(seed)
        yield


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Initialize parameters, which happens on the CPU, under ``seed``; leave the random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the GPUs too
        yield


def ready(
    module: nn.Module, provenance: Provenance, options: LoadOptions, in_float32: Sequence[str] = ()
) -> tuple[nn.Module, Provenance]:
    """Put a module into eval mode, and in the asked-for dtype onto the asked-for device, or spread it over several.

    Args:
        module: on the CPU.
        provenance: of its weights; what is returned also says from which dtypes to which they were converted.
        options: dtype, device and device map are read.
        in_float32: names of parts whose weights are float32 in any dtype, see :func:`cast`.
    """
    before = dtypes_by_name(module.named_parameters())
    cast(module.eval(), options.dtype, in_float32)
    provenance = converted(provenance, before, dtypes_by_name(module.named_parameters()))
    return placed(module, options), provenance


def cast(module: nn.Module, dtype: torch.dtype | None, in_float32: Collection[str] = ()) -> None:
    """Convert the floating-point numbers of a module to a dtype, in place; None converts nothing.

    Args:
        module: any.
        dtype: of all weights and buffers but those of the following.
        in_float32: names of modules or tensors, at any depth, whose weights get float32, and whose buffers stay.

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
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point():
            stays = not set(in_float32).isdisjoint(name.split("."))
            parameter.data = parameter.data.to(torch.float32 if stays else dtype)
    for path, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_floating_point() and set(in_float32).isdisjoint([*path.split("."), name]):
                setattr(part, name, buffer.to(dtype))


def placed(module: nn.Module, options: LoadOptions) -> nn.Module:
    """Put a module onto the asked-for device, or spread it over several."""
    if options.device_map is None:
        return nn.Module.to(module, options.device)
    from normscope.models.spreading import spread

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
    architecture: str, trained_on: str, build: Callable[[dict[str, Any]], nn.Module]
) -> tuple[Callable[[], nn.Module], Callable[[], tuple[nn.Module, Provenance]]]:
    """Return the two functions that :func:`with_weights` takes, for a network whose weights are in this package.

    Args:
        architecture: its name; its weights lie in ``ARCHITECTURE.safetensors``, constructor arguments in the header.
        trained_on: the training data, in words.
        build: from the facts in the header to the module.
    """
    weights, facts, digest = read_embedded(f"{architecture}.safetensors")

    def pretrained() -> tuple[nn.Module, Provenance]:
        module = build(facts)
        module.load_state_dict(weights)
        return module, Provenance(
            "embedded", f"embedded {architecture} (trained on {trained_on}, sha256 {digest[:12]})"
        )

    return lambda: build(facts), pretrained
