"""From ``--device`` and ``--dtype`` to what torch calls them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from normscope.errors import DeviceError, UsageError, count, unknown
from normscope.processes import Place

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16")
KEEP = "keep"
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def resolve_device(spec: str) -> torch.device:
    """Return the device that ``spec`` names, once sure that it is there.

    Of several processes that torchrun started, each has a GPU of its own: that of its number on this machine.

    Args:
        spec: ``auto`` (CUDA, else MPS, else the CPU), ``cpu``, ``cuda``, ``cuda:N`` or ``mps``.

    Raises:
        UsageError: if ``spec`` is none of these, or one GPU for several processes.
        DeviceError: if this machine has no such device, or none for this process.

    >>> resolve_device("cpu")
    device(type='cpu')
    """
    import torch

    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", spec):
        raise UsageError(f"There is no device {spec!r}. A device is auto, cpu, cuda, cuda:N or mps.")
    present, place = _present_devices(), Place.from_environment()
    if not place.alone and (spec.startswith("cuda") or spec == "auto") and "cuda:0" in present:
        return torch.device(_own_gpu(spec, present, place))
    if spec == "auto":
        return torch.device(present[0])
    if spec not in present and f"{spec}:0" not in present:
        raise DeviceError(f"There is no device {spec!r} on this machine. There are: {', '.join(present)}.")
    return torch.device(spec)


def _own_gpu(spec: str, present: list[str], place: Place) -> str:
    """Name the GPU of one of several processes; nccl refuses two on one."""
    gpus = [name for name in present if name.startswith("cuda")]
    if ":" in spec and spec in gpus:
        if place.local_rank:
            raise UsageError(f"Several processes cannot share {spec}: --device cuda gives each a GPU of its own.")
        return spec
    if ":" in spec:
        raise DeviceError(f"There is no device {spec!r} on this machine. There are: {', '.join(present)}.")
    if place.local_rank >= len(gpus):
        raise DeviceError(
            f"There {'is' if len(gpus) == 1 else 'are'} {count(len(gpus), 'GPU')} on this machine and none for its "
            f"process number {place.local_rank + 1}: start at most --nproc-per-node={len(gpus)}, or take --device cpu."
        )
    return gpus[place.local_rank]


def _present_devices() -> list[str]:
    """Name the devices of this machine, the fastest first."""
    import torch

    cuda = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    mps = ["mps"] if torch.backends.mps.is_available() else []
    return [*cuda, *mps, "cpu"]


def dtype_name(name: str) -> str:
    """Return the whole name of a floating-point type, as outputs print it.

    Raises:
        UsageError: if ``name`` is not one of float32, bfloat16, float16, or fp32, bf16, fp16 for short.

    >>> dtype_name("bf16")
    'bfloat16'
    """
    whole = _SHORT.get(name, name)
    if whole not in DTYPES:
        raise UsageError(unknown("dtype", name, [*DTYPES, *_SHORT, KEEP]))
    return whole


def resolve_dtype(name: str) -> torch.dtype | None:
    """Return the floating-point type called ``name``, see :func:`dtype_name`; None for ``keep``.

    Raises:
        UsageError: if there is no such type.

    >>> resolve_dtype("bfloat16")
    torch.bfloat16
    """
    import torch

    if name == KEEP:
        return None
    dtype: torch.dtype = getattr(torch, dtype_name(name))
    return dtype
