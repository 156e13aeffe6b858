"""Arrays as text of a JSON document, which the page reads as typed arrays."""

from __future__ import annotations

import base64
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Packed: TypeAlias = dict[str, str]

_LARGEST_HALF = 6e4  # float16 ends at 65,504
_KINDS = {"f8": "<f8", "f4": "<f4", "f2": "<f2", "u1": "|u1", "u2": "<u2", "i4": "<i4"}


def packed(values: Any, kind: str) -> Packed:
    """Write an array down, flat, as its kind of number and base64 of its bytes, little-endian.

    Args:
        values: what numpy makes an array of.
        kind: ``f8``, ``f4`` or ``f2`` for floats, ``u1`` or ``u2`` for counts, ``i4`` for integers.

    >>> packed([1.0, 2.0], "f4")
    {'kind': 'f4', 'bytes': 'AACAPwAAAEA='}
    """
    array = np.ascontiguousarray(values, _KINDS[kind])
    return {"kind": kind, "bytes": base64.b64encode(array.tobytes()).decode("ascii")}


def packed_halves(values: NDArray[np.floating[Any]]) -> Packed:
    """Write floats down to eleven bits, or to 24 where one of them is too large for that.

    >>> packed_halves(np.array([1.0]))["kind"], packed_halves(np.array([1e5]))["kind"]
    ('f2', 'f4')
    """
    return packed(values, "f2" if np.abs(values).max(initial=0) < _LARGEST_HALF else "f4")


def unpacked(array: Packed) -> NDArray[Any]:
    """Read back what :func:`packed` wrote down.

    >>> unpacked(packed([1, 65535], "u2")).tolist()
    [1, 65535]
    """
    return np.frombuffer(base64.b64decode(array["bytes"]), _KINDS[array["kind"]])
