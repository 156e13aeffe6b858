"""From a name to a network and its inputs, as published or with point-wise functions in place of norms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from normscope.errors import ModelError, UsageError
from normscope.inputs.loaded_model import LoadedModel, LoadOptions, Provenance
from normscope.models import registry
from normscope.models.weights.devices import DTYPES, KEEP, resolve_device, resolve_dtype
from normscope.swaps.store.record import RECORD, SwapRecord, read_record

_CODE = "py"


def load(
    name: str | Path,
    *,
    weights: str | Path = "pretrained",
    data: str | Path | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    seed: int = 0,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype | None = None,
    guidance: float | None = None,
    timesteps: str | int | None = None,
    workers: int | None = None,
    shuffle: bool = False,
    device_map: str | None = None,
) -> LoadedModel:
    """Load a network and inputs for it.

    Args:
        name: a name of ``normscope models``, where ``library:NAME`` is any name that the library knows.
            ``py:FILE_OR_MODULE:FACTORY`` runs code of yours.
        weights: ``pretrained``; ``random`` for fresh ones under ``seed``; the path of a safetensors file or torch
            checkpoint that fits; or a folder written by :func:`normscope.save_swapped` or ``normscope swap``, whose
            point-wise functions then replace norms.
        data: a file, or a folder that is read recursively: images (labelled by sub-folders of classes), recordings or
            text, as the model takes; images with texts beside them (NAME.jpg and NAME.txt); a file of latents; for
            embeddings of texts a ``.tsv`` or ``.csv`` file of pairs of sentences with scores. None for default inputs.
        limit: number of samples at most; of trajectories for a diffusion model.
        batch_size: samples per batch, at most; batches are halved where memory ends. Recordings, and prompts with an
            image, are taken one at a time.
        seed: of random weights and of the choice of default inputs; torch's global random state is unaffected.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or ``mps``, or a :class:`torch.device`.
        dtype: of weights and inputs: ``float32``, ``bfloat16`` or ``float16``, ``fp32``, ``bf16`` or ``fp16`` for
            short, or a :class:`torch.dtype`. ``keep`` converts no weights, and no inputs of a dtype that some weights
            have; others get that of the first weights. By default float32; ``keep`` for a network of your own, and for
            one of transformers that is quantized or has a billion parameters.
        guidance: scale of a diffusion model's classifier-free guidance, 1 for none; None for the model's own.
        timesteps: of a diffusion model: a number of timesteps evenly along its trajectory (``4``), or a list of them
            (``"980,500,0"``, ``"980,"``).
        workers: processes that read inputs; 0 for this one alone, None for as many as suit the device.
        shuffle: take the inputs in a random order under ``seed``, before ``limit``.
        device_map: ``auto`` to spread a network that one device has no room for over the GPUs, the CPU's memory and
            the disk, through accelerate. It can be captured and swapped, but not calibrated or timed.

    Raises:
        UsageError: if an argument cannot be understood, or does not apply to the model.
        ModelError: if there is no such model, its weights cannot be had or do not fit, or a library is missing.
        DataError: if ``data`` is missing or contains nothing that the model takes.
        DeviceError: if there is no such device.
        MemoryEndedError: if the device has no room for the weights.

    >>> model = load("demo_vit", weights="random", limit=2, device="cpu")
    >>> model.about["weights"]
    'random weights, seed 0'
    >>> [batch.args[0].shape for batch in model.inputs]
    [torch.Size([2, 1, 8, 8])]
    """
    given: dict[str, Any] = {key: value for key, value in locals().items() if key != "name"}
    if not isinstance(name, (str, Path)):
        raise UsageError(
            f"normscope.load takes the name of a model, not a {type(name).__name__}. Pass a module of yours and its "
            "batches to normscope.capture, or name a function that returns both: py:FILE:FACTORY."
        )
    name = str(name)
    if isinstance(batch_size, str):
        raise UsageError(f"batch_size is {batch_size!r}; it has to be a number.")
    device = str(device)
    record = _swap_in(weights)
    if record is not None:
        _check_model(name, record, Path(weights))
        if device_map is not None:
            raise UsageError(f"{weights} is a swap, which needs its network on one device: leave device_map out.")
    entry = registry.find(name)
    registry.check_numbers(limit, batch_size, seed, workers)
    registry.check_paths(weights, data)
    registry.check_diffusion(entry, guidance=guidance, timesteps=timesteps)
    registry.check_device_map(device_map, device)

    # A swap brings its own weights: make others at no cost, except where a factory makes them.
    unread = "pretrained" if entry.library == _CODE else "random"
    default = KEEP if entry.library == _CODE else DTYPES[0]
    given |= {
        "weights": weights if record is None else unread,
        "data": None if data is None else str(data),
        "dtype": resolve_dtype(str(default if dtype is None else dtype).removeprefix("torch.")),
        "default_dtype": dtype is None,
        "device": resolve_device(device),
    }
    options = LoadOptions(**given)
    try:
        network = registry.loader_of(entry)(name, entry.source.partition(":")[2], options)
    except (ImportError, OSError, RuntimeError) as error:  # of a library, or of what it imports
        raise registry.failure(entry, error) from error
    return network if record is None else _restored(network, Path(weights))


def load_swapped(folder: str | Path, **options: Any) -> LoadedModel:
    """Load a network that :func:`normscope.save_swapped` or ``normscope swap`` wrote, and inputs for it.

    No code of the folder runs. A network of your own is loaded by its name,
    ``normscope.load("py:FILE:FACTORY", weights=folder)``.

    Args:
        folder: of the swap.
        **options: those of :func:`normscope.load`, except ``weights``; ``dtype`` need not be the saved one.

    Raises:
        ModelError: if there is no swap, it is damaged, or it is of a network of your own; and as
            :func:`normscope.load`.

    >>> import normscope, tempfile
    >>> network = normscope.load("demo_vit", limit=8, device="cpu")
    >>> seen = normscope.capture(network, layers=1)
    >>> _ = normscope.swap(network, "dyt", seen)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = normscope.save_swapped(network.module, folder, network.about)
    ...     load_swapped(folder, device="cpu").name
    'demo_vit'
    """
    name = read_record(folder).model
    if name.partition(":")[0] == _CODE:
        raise ModelError(
            f"The swap in {folder} is of {name}, whose code runs only where you name it: "
            f"normscope.load({name!r}, weights={str(folder)!r})."
        )
    return load(name, weights=folder, **options)


def _swap_in(weights: str | Path) -> SwapRecord | None:
    """Read the record of a folder of a swap; None if the weights are no swap."""
    if weights in ("pretrained", "random") or not Path(weights).is_dir():
        return None
    return read_record(weights) if (Path(weights) / RECORD).exists() else None


def _check_model(name: str, record: SwapRecord, folder: Path) -> None:
    """Refuse a swap of another model; a file or a folder may have moved."""
    (library, _, place), (of_swap, _, swapped) = (
        registry.find(each).source.partition(":") for each in (name, record.model)
    )
    movable = library == _CODE or Path(place).exists()
    same = Path(place).name == Path(swapped).name if movable else place == swapped
    if library != of_swap or not same:
        raise ModelError(f"The swap in {folder} is of {record.model}, not of {name}.")


def _restored(network: LoadedModel, folder: Path) -> LoadedModel:
    from normscope.swaps.store.store import restored  # a quarter of a second, and most networks are as published

    record = restored(network.module, folder)
    # Random weights stay random in a swap.
    kind: Literal["random", "file"] = "random" if "random weights" in record.weights else "file"
    return replace(network, provenance=Provenance(kind, f"swap {folder.resolve().name} ({record.description})"))
