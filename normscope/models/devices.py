"""From ``--device`` and ``--dtype`` to what torch calls them."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import warnings
from typing import TYPE_CHECKING

from normscope.errors import DeviceError, UsageError, count, unknown
from normscope.processes import Place

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16")
_LEAST_DRIVERS = {"11": 450, "12": 525, "13": 580}  # of NVIDIA on Linux, for each version of CUDA
_SECONDS_TO_ANSWER = 10.0  # for nvidia-smi, which takes some where it wakes up many GPUs, and waits on where one hangs
KEEP = "keep"
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def resolve_device(spec: str) -> torch.device:
    """Return the device that ``spec`` names, once sure that it is there.

    Of several processes that torchrun started, each has a GPU of its own: that of its number on this machine. Where
    there is an NVIDIA GPU that torch cannot use, ``auto`` says so in a warning, once.

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
    if spec == "auto" and present[0] == "cpu" and not _hidden() and (reason := _why_no_cuda()):
        _warn_of_the_cpu(reason)
    if not place.alone and (spec.startswith("cuda") or spec == "auto") and "cuda:0" in present:
        return torch.device(_own_gpu(spec, present, place))
    if spec == "auto":
        return torch.device(present[0])
    if spec not in present and f"{spec}:0" not in present:
        raise _no_device(spec, present)
    return torch.device(spec)


def _own_gpu(spec: str, present: list[str], place: Place) -> str:
    """Name the GPU of one of several processes; nccl refuses two on one."""
    gpus = [name for name in present if name.startswith("cuda")]
    if ":" in spec and spec in gpus:
        if place.local_rank:
            raise UsageError(f"Several processes cannot share {spec}: --device cuda gives each a GPU of its own.")
        return spec
    if ":" in spec:
        raise _no_device(spec, present)
    if place.local_rank >= len(gpus):
        raise DeviceError(
            f"There {'is' if len(gpus) == 1 else 'are'} {count(len(gpus), 'GPU')} on this machine and none for its "
            f"process number {place.local_rank + 1}: start at most --nproc-per-node={len(gpus)}, or take --device cpu."
        )
    return gpus[place.local_rank]


def _present_devices() -> list[str]:
    """Name the devices of this machine, the fastest first."""
    import torch

    # GPUs are counted by NVIDIA's library, which sees those too that torch has no driver for.
    cuda = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if cuda and not torch.cuda.is_available():
        cuda = []
    mps = ["mps"] if torch.backends.mps.is_available() else []
    return [*cuda, *mps, "cpu"]


def _no_device(spec: str, present: list[str]) -> DeviceError:
    said = f"There is no device {spec!r} on this machine. There are: {', '.join(present)}."
    if not spec.startswith("cuda") or "cuda:0" in present:
        return DeviceError(said)
    if _hidden():
        hidden = f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} hides every GPU from torch: unset it."
        return DeviceError(f"{said} {hidden}" if _driver() else said)
    return DeviceError(f"{said} {reason}" if (reason := _why_no_cuda()) else said)


def _hidden() -> bool:
    """Whether the user hides all GPUs."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")


def _why_no_cuda() -> str:
    """Say, where there is a driver of NVIDIA, why torch cannot use it and what to do; nothing where there is none."""
    import torch

    driver, cuda = _driver(), torch.version.cuda
    if not driver:
        return ""
    if cuda is None:
        return (
            f"nvidia-smi reports an NVIDIA driver, {driver}, but torch {torch.__version__} is built without CUDA: "
            "install one that is built with it (pytorch.org/get-started)."
        )
    begun = (
        f"nvidia-smi reports the NVIDIA driver {driver}, with which torch {torch.__version__}, built for CUDA {cuda}"
    )
    needed = _LEAST_DRIVERS.get(cuda.partition(".")[0])
    if needed is None or int(driver.partition(".")[0]) >= needed:
        return f"{begun}, finds no GPU: python -c 'import torch; torch.cuda.init()' says why."
    return (
        f"{begun}, cannot run: update the driver to {needed} or later, or install a torch of the same version that is "
        "built for an older CUDA (pytorch.org/get-started)."
    )


@functools.cache
def _driver() -> str:
    """Return the version of NVIDIA's driver as nvidia-smi reports it; nothing where it does not."""
    if not (command := shutil.which("nvidia-smi")):
        return ""
    ask = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=_SECONDS_TO_ANSWER)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return ""
    found = re.match(r"\d+(\.\d+)*", done.stdout.strip())
    return found.group() if found and done.returncode == 0 else ""


@functools.cache
def _warn_of_the_cpu(reason: str) -> None:
    warnings.warn(f"{reason} Until then everything runs on the CPU; --device cpu says so too.", stacklevel=3)


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
