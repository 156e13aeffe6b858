"""What GPU there is, and the state that it is in: nothing of it is ever changed."""

from __future__ import annotations

import csv
import io
import subprocess
from typing import Any

from common import machine

_STATE = (
    *("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.memory"),
    *("power.draw", "power.limit", "temperature.gpu"),
)


def with_gpu(rehearsal: bool) -> dict[str, Any]:
    """Say what this machine and its GPU are.

    Raises:
        SystemExit: with a sentence, if there is no GPU that the kernels are for, and this is no rehearsal.
    """
    if rehearsal:
        return {**machine(), "gpu": "none: a rehearsal on the CPU"}
    import torch  # here, because each part's process imports this file, and not every part needs it

    if not torch.cuda.is_available() or torch.version.hip is not None:
        raise SystemExit(
            "There is no NVIDIA GPU here. Run this where there is one; python benchmarks/gpu.py --rehearse --results "
            "FOLDER shows, on the CPU, that all of it runs."
        )
    own = torch.cuda.get_device_properties(0)
    return {
        **machine(),
        "gpu": own.name,
        "compute_capability": f"{own.major}.{own.minor}",
        "multiprocessors": own.multi_processor_count,
        "gpu_memory_gb": round(own.total_memory / 1e9, 1),
        "l2_cache_mb": round(own.L2_cache_size / 1e6, 1),
        "driver": _asked("driver_version").get("driver_version", "unknown"),
        "cuda": torch.version.cuda,
    }


def state() -> dict[str, str]:
    """Say how fast the first GPU runs, what it draws and how warm it is, as nvidia-smi has it; empty without it."""
    return _asked(*_STATE)


def _asked(*fields: str) -> dict[str, str]:
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    rows = list(csv.reader(io.StringIO(told), skipinitialspace=True))
    return dict(zip(fields, rows[0], strict=False)) if rows else {}
