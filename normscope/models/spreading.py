"""Networks that one device has no room for: accelerate spreads them over the GPUs, the CPU's memory and the disk.

What accelerate keeps elsewhere it brings to a GPU, or to the CPU, when a module runs, and takes away again afterwards.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from normscope.errors import ModelError

_ROWS = (nn.ModuleList, nn.Sequential)
_NAMED = "_no_split_modules"
_LAST = ("cpu", "disk")


def spread(module: nn.Module, device: torch.device, room: Mapping[int | str, int] | None = None) -> nn.Module:
    """Spread a network as accelerate finds room for it, in place; its repeated blocks stay whole.

    Args:
        module: in its dtype, on the CPU.
        device: where its inputs are.
        room: how many bytes to use of each GPU (its number) and of ``cpu``; None for what is free.

    Raises:
        ModelError: if memory has no room for any part of it, or the disk none for the rest.
    """
    import accelerate

    whole = blocks(module)
    with quiet():
        memory = accelerate.utils.get_balanced_memory(module, room, no_split_module_classes=whole)
        where = accelerate.infer_auto_device_map(module, memory, no_split_module_classes=whole)
    devices = set(where.values())
    if devices == {"disk"}:
        raise ModelError(
            f"Not even one block of this {type(module).__name__} fits into memory; nothing runs on the disk alone."
        )
    # One device that is not the inputs': without hooks nothing would move them there.
    elsewhere = len(devices) == 1 and torch.empty(0, device=next(iter(devices))).device != device
    try:
        with quiet(), offload_folder() as (folder, kept_by):
            accelerate.dispatch_model(
                module,
                where,
                offload_dir=folder,
                # A block may read the weights of what it holds past its modules, as attention does, unless its
                # library is made for accelerate.
                preload_module_classes=None if hasattr(module, _NAMED) else whole,
                skip_keys=getattr(module, "_skip_keys_device_placement", None),
                force_hooks=elsewhere,
            )
            kept_by(module)
    except OSError as error:
        raise ModelError(
            f"The disk has no room for what memory does not hold ({error.strerror or error}); TMPDIR names a folder "
            "on another one."
        ) from error
    return module


def blocks(module: nn.Module) -> list[str]:
    """Name the classes whose modules are not to be divided, as they add to their own input.

    Those that the network itself names, as transformers' and diffusers' do; otherwise whatever stands in a row.

    >>> blocks(nn.Sequential(nn.Sequential(nn.Bilinear(2, 2, 2), nn.Bilinear(2, 2, 2)), nn.Identity()))
    ['Bilinear', 'Identity']
    """
    if named := getattr(module, _NAMED, None):
        return sorted(named)
    children = (child for part in module.modules() if isinstance(part, _ROWS) for child in part)
    return sorted({type(child).__name__ for child in children if not isinstance(child, _ROWS)})


@contextmanager
def offload_folder() -> Iterator[tuple[str, Callable[[nn.Module], None]]]:
    """Make a folder for what goes to the disk, removed with the network that keeps it, or at once where none does.

    It is gone, at the latest, when Python ends.
    """
    folder = tempfile.TemporaryDirectory(prefix="normscope-", ignore_cleanup_errors=True)
    owners: list[Any] = []
    try:
        yield folder.name, lambda module: owners.append(weakref.finalize(module, folder.cleanup))
    finally:
        if not owners:
            folder.cleanup()


def places(module: nn.Module) -> list[str]:
    """Name the devices that a network is on: GPUs first, then memory and disk where accelerate keeps parts of it.

    >>> places(nn.Linear(1, 1))
    ['cpu']
    """
    maps = [vars(part)["hf_device_map"] for part in module.modules() if "hf_device_map" in vars(part)]
    if not maps:
        return [str(tensor.device) for tensor in [*module.parameters(), *module.buffers()][:1]]
    found = {f"cuda:{place}" if isinstance(place, int) else str(place) for own in maps for place in own.values()}
    return sorted(found, key=lambda place: (place in _LAST, place))


@contextmanager
def quiet() -> Iterator[None]:
    """Keep accelerate's warnings from the terminal: what is where is said by normscope."""
    logger: Any = logging.getLogger("accelerate")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
