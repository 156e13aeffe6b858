"""Which models there are, and which function loads each.

Nothing heavy is imported before a model is loaded: ``normscope models`` and shell completion read this table.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from normscope.errors import DataError, ModelError, UsageError, unknown

if TYPE_CHECKING:
    from normscope.models.base import LoadedModel, LoadOptions

    Loader = Callable[[str, str, LoadOptions], LoadedModel]

_LARGEST_INT = 2**63 - 1  # of torch and of Python's own sequences


@dataclass(frozen=True)
class ModelEntry:
    """One line of ``normscope models``.

    Attributes:
        name: what the user types; in a name like ``timm:NAME``, NAME stands for whatever the library knows.
        family: what kind of network it is.
        description: one line.
        source: ``library:architecture`` that the weights belong to.
        embedded: whether weights and inputs are in this package.
        loader: ``module:function``, called with the name, the architecture and the options.
    """

    name: str
    family: str
    description: str
    source: str
    embedded: bool
    loader: str


_NAMED = (
    ModelEntry(
        "demo_vit",
        "vision",
        "a tiny ViT trained on scikit-learn's 8×8 digits",
        "embedded:demo_vit",
        True,
        "normscope.models.vision:load_demo_vit",
    ),
    ModelEntry(
        "vit_b16",
        "vision",
        "ViT-B/16 at 224×224, ImageNet-21k, then ImageNet-1k",
        "timm:vit_base_patch16_224.augreg2_in21k_ft_in1k",
        False,
        "normscope.models.vision:load_timm",
    ),
)
_PREFIXED = (
    ModelEntry(
        "timm:NAME",
        "vision",
        "any architecture of timm, with or without .tag",
        "timm:NAME",
        False,
        "normscope.models.vision:load_timm",
    ),
)


def list_models() -> list[ModelEntry]:
    """Return every named model, then one entry for each library whose models go by ``library:NAME``.

    >>> [entry.name for entry in list_models()]
    ['demo_vit', 'vit_b16', 'timm:NAME']
    """
    return [*_NAMED, *_PREFIXED]


def embedded_models() -> list[str]:
    """Return the names of the models whose weights and inputs are in this package.

    >>> embedded_models()
    ['demo_vit']
    """
    return [entry.name for entry in _NAMED if entry.embedded]


def load(
    name: str,
    *,
    weights: str | Path = "pretrained",
    data: str | Path | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    seed: int = 0,
    device: str = "auto",
    dtype: str = "float32",
) -> LoadedModel:
    """Load a network and inputs for it.

    Args:
        name: a name of :func:`list_models`, or ``timm:NAME`` for any architecture of timm.
        weights: ``pretrained``; ``random`` for freshly initialized ones under ``seed``; or the path of a
            safetensors file or torch checkpoint that fits the model.
        data: an image file, or a folder that is read recursively; None for the model's own default inputs
            (held-out digits, or crops of the photograph that matplotlib ships).
        limit: take at most so many samples.
        batch_size: samples per batch.
        seed: of random weights and of the choice of crops. torch's global random state is left as it is.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or ``mps``.
        dtype: ``float32``, ``bfloat16`` or ``float16``, of weights and inputs.

    Raises:
        UsageError: if ``data`` is empty, or ``limit``, ``batch_size``, ``seed``, ``device`` or ``dtype`` cannot be
            understood.
        ModelError: if there is no such model, or its weights cannot be had or do not fit.
        DataError: if ``data`` is missing or holds no image.
        DeviceError: if the device is not there.

    >>> model = load("demo_vit", weights="random", limit=2, device="cpu")
    >>> model.about["weights"]
    'random weights, seed 0'
    >>> [batch.args[0].shape for batch in model.inputs]
    [torch.Size([2, 1, 8, 8])]
    """
    entry = find(name)
    _check_numbers(limit, batch_size, seed)
    if data == "":
        raise UsageError("data is an empty path. Name an image file or a folder, or leave it out.")
    if data is not None and not Path(data).exists():
        raise DataError(f"There is no file or folder {str(data)!r} to read images from.")

    from normscope.models.base import LoadOptions
    from normscope.models.devices import resolve_device, resolve_dtype

    options = LoadOptions(
        weights=weights,
        data=None if data is None else str(data),
        limit=limit,
        batch_size=batch_size,
        seed=seed,
        dtype=resolve_dtype(dtype),
        device=resolve_device(device),
    )
    module_name, _, function_name = entry.loader.partition(":")
    loader: Loader = getattr(importlib.import_module(module_name), function_name)
    _, _, architecture = entry.source.partition(":")
    return loader(name, architecture, options)


def find(name: str) -> ModelEntry:
    """Return the entry of a model; one of a library under the name it was asked for, known there or not.

    Raises:
        ModelError: if there is no such model and no such library.

    >>> find("demo_vit").source
    'embedded:demo_vit'
    >>> find("timm:resnet18").name
    'timm:resnet18'
    """
    for entry in _NAMED:
        if name == entry.name:
            return entry
    library, colon, architecture = name.partition(":")
    for entry in _PREFIXED:
        if colon and architecture and entry.name.startswith(f"{library}:"):
            return dataclasses.replace(entry, name=name, source=name)

    from normscope.models.vision import names_like

    raise ModelError(unknown("model", name, [*(entry.name for entry in list_models()), *names_like(name)]))


def _check_numbers(limit: int | None, batch_size: int, seed: int) -> None:
    for option, value in (("limit", limit), ("batch_size", batch_size)):
        if value is not None and value < 1:
            raise UsageError(f"{option} is {value}; it has to be 1 or more.")
        if value is not None and value > _LARGEST_INT:
            raise UsageError(f"{option} is {value}; it has to be {_LARGEST_INT} or less.")
    if not -_LARGEST_INT - 1 <= seed <= _LARGEST_INT:
        raise UsageError(f"seed is {seed}; it has to be between {-_LARGEST_INT - 1} and {_LARGEST_INT}.")
