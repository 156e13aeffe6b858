"""Arrays as JSON: base64 of their little-endian bytes."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np


def packed(values: Any, kind: str) -> dict[str, str]:
    """Encode an array, flat: a numpy dtype without byte order, and base64 of its little-endian bytes.

    >>> packed([1.0, 2.0], "f4")
    {'kind': 'f4', 'bytes': 'AACAPwAAAEA='}
    """
    array = np.ascontiguousarray(values, f"<{kind}")
    return {"kind": kind, "bytes": base64.b64encode(array.tobytes()).decode("ascii")}


def packed_scaled(floats: Any) -> dict[str, Any]:
    """Encode floats as multiples of a 32,767th of the largest one, in 16 bits."""
    values = np.asarray(floats, np.float64)
    scale = float(np.abs(values).max(initial=1e-30)) / 32767
    return packed(np.round(values / scale), "i2") | {"scale": scale}
