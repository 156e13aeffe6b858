"""Devices and dtypes: what the options mean to torch, and networks that are spread over several devices."""

from __future__ import annotations

import logging
import re
import tempfile
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import psutil
import torch
from torch import nn

from normscope.errors import DeviceError, MemoryEndedError, ModelError, UsageError, unknown
from normscope.inputs.loaded_model import LoadOptions
from normscope.runtime.processes import Process

logger = logging.getLogger(__name__)

LARGE = 10**9  # parameters, from which on weights keep their stored dtype by default
DTYPES = ("float32", "bfloat16", "float16")
KEEP = "keep"
_ROWS = (nn.ModuleList, nn.Sequential)
_NAMED = "_no_split_modules"
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def resolve_device(spec: str) -> torch.device:
    """Return the device of ``auto`` (CUDA, else MPS, else the CPU), ``cpu``, ``cuda``, ``cuda:N`` or ``mps``.

    Each process started by torchrun gets its own GPU, numbered by its local rank.

    Raises:
        UsageError: if ``spec`` is none of these, or one GPU for several processes.
        DeviceError: if this machine has no such device, or none for this process.

    >>> resolve_device("cpu")
    device(type='cpu')
    """
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", spec):
        raise UsageError(f"There is no device {spec!r}. A device is auto, cpu, cuda, cuda:N or mps.")
    process, device = Process.current(), spec
    if ":" in spec and process.local_rank:
        raise UsageError(f"Several processes cannot share {spec}: --device cuda gives each a GPU of its own.")
    if spec == "auto":
        device = "mps" if torch.backends.mps.is_available() else "cpu"
    if (spec == "auto" and torch.cuda.is_available()) or (spec == "cuda" and not process.alone):
        device = f"cuda:{process.local_rank}"
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
        remedy = "auto or cpu" if process.alone else "cpu, or start at most one process per GPU"
        raise DeviceError(f"The device {device!r} is not available: {reason}. Take --device {remedy}.") from error
    return torch.device(device)


def resolve_dtype(name: str) -> torch.dtype | None:
    """Return the floating-point type of a name, which may be abbreviated: fp32, bf16 or fp16; None for ``keep``.

    Raises:
        UsageError: if there is no such type.

    >>> resolve_dtype("bf16")
    torch.bfloat16
    """
    if name == KEEP:
        return None
    whole = _SHORT.get(name, name)
    if whole not in DTYPES:
        raise UsageError(unknown("dtype", name, [*DTYPES, *_SHORT, KEEP]))
    dtype: torch.dtype = getattr(torch, whole)
    return dtype


def check_room(name: str, parameters: int, size: int, options: LoadOptions) -> None:
    """Report large weights before they are read; MemoryEndedError if the device has fewer free bytes than ``size``."""
    device = options.device
    dtype = "their stored dtype" if options.dtype is None else str(options.dtype).removeprefix("torch.")
    footprint = f"{size / 1e9:.3g} GB in {dtype}"
    if parameters >= LARGE:
        logger.warning("%s: its %.3g billion parameters take %s.", name, parameters / 1e9, footprint)
    if options.device_map is not None:  # accelerate divides the room there is
        return
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    if size > free:
        raise MemoryEndedError(
            f"The weights of {name} take {footprint}, and {device} has {free / 1e9:.3g} GB free. Take --dtype bfloat16 "
            "or --device-map auto."
        )


def spread(module: nn.Module, device: torch.device, room: Mapping[int | str, int] | None = None) -> nn.Module:
    """Spread a network from the CPU as accelerate finds room for it, in place; its repeated blocks stay whole.

    ``device`` is that of the inputs; ``room`` has the bytes to use of each GPU (its number) and of ``cpu``, by default
    all that are free. ModelError if memory has no room for any part of it.
    """
    import accelerate

    whole = blocks(module)
    folder = tempfile.TemporaryDirectory(prefix="normscope-", ignore_cleanup_errors=True)
    with quiet():
        memory = accelerate.utils.get_balanced_memory(module, room, no_split_module_classes=whole)
        where = accelerate.infer_auto_device_map(module, memory, no_split_module_classes=whole)
        devices = set(where.values())
        if devices == {"disk"}:
            raise ModelError(
                f"Not even one block of this {type(module).__name__} fits into memory; nothing runs on the disk alone."
            )
        accelerate.dispatch_model(
            module,
            where,
            offload_dir=folder.name,
            # A block may read the weights of what it holds past its modules, as attention does, unless its library is
            # made for accelerate.
            preload_module_classes=None if hasattr(module, _NAMED) else whole,
            skip_keys=getattr(module, "_skip_keys_device_placement", None),
            # One device that is not the inputs': without hooks nothing would move them there.
            force_hooks=len(devices) == 1 and torch.empty(0, device=next(iter(devices))).device != device,
        )
    weakref.finalize(module, folder.cleanup)  # with the network
    return module


def blocks(module: nn.Module) -> list[str]:
    """Name the classes of residual blocks, which stay whole: as the network declares them, or else those in a row.

    >>> blocks(nn.Sequential(nn.Sequential(nn.Bilinear(2, 2, 2), nn.Bilinear(2, 2, 2)), nn.Identity()))
    ['Bilinear', 'Identity']
    """
    children = (child for module in module.modules() if isinstance(module, _ROWS) for child in module)
    in_rows = {type(child).__name__ for child in children if not isinstance(child, _ROWS)}
    return sorted(getattr(module, _NAMED, None) or in_rows)


def device_names(module: nn.Module) -> list[str]:
    """Name the devices of a network: GPUs first, then memory and disk if accelerate keeps parts there.

    >>> device_names(nn.Linear(1, 1))
    ['cpu']
    """
    maps = [vars(child)["hf_device_map"] for child in module.modules() if "hf_device_map" in vars(child)]
    if not maps:
        return [str(tensor.device) for tensor in [*module.parameters(), *module.buffers()][:1]]
    names = {f"cuda:{where}" if isinstance(where, int) else str(where) for parts in maps for where in parts.values()}
    return sorted(names, key=lambda name: (name in ("cpu", "disk"), name))


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings of libraries that load weights: normscope reports the placement and the dtypes."""
    accelerate = logging.getLogger("accelerate")
    with ExitStack() as restored, warnings.catch_warnings(action="ignore"):
        restored.callback(accelerate.setLevel, accelerate.level)
        accelerate.setLevel(logging.ERROR)
        yield
