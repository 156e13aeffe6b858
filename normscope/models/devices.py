"""From ``--device`` and ``--dtype`` to what torch calls them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from normscope.errors import DeviceError, UsageError, unknown

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16")


def resolve_device(spec: str) -> torch.device:
    """Return the device that ``spec`` names, once sure that it is there.

    Args:
        spec: ``auto`` (CUDA, else MPS, else the CPU), ``cpu``, ``cuda``, ``cuda:N`` or ``mps``.

    Raises:
        UsageError: if ``spec`` is none of these.
        DeviceError: if this machine has no such device.

    >>> resolve_device("cpu")
    device(type='cpu')
    """
    import torch

    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", spec):
        raise UsageError(f"There is no device {spec!r}. A device is auto, cpu, cuda, cuda:N or mps.")
    present = _present_devices()
    if spec == "auto":
        return torch.device(present[0])
    if spec not in present and f"{spec}:0" not in present:
        raise DeviceError(f"There is no device {spec!r} on this machine. There are: {', '.join(present)}.")
    return torch.device(spec)


def _present_devices() -> list[str]:
    """Name the devices of this machine, the fastest first."""
    import torch

    cuda = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    mps = ["mps"] if torch.backends.mps.is_available() else []
    return [*cuda, *mps, "cpu"]


def resolve_dtype(name: str) -> torch.dtype:
    """Return the floating-point type called ``name``.

    Raises:
        UsageError: if ``name`` is not one of float32, bfloat16, float16.

    >>> resolve_dtype("bfloat16")
    torch.bfloat16
    """
    import torch

    if name not in DTYPES:
        raise UsageError(unknown("dtype", name, DTYPES))
    dtype: torch.dtype = getattr(torch, name)
    return dtype
