"""Safetensors files with a JSON header and CRC32 checksums, verified when read."""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from normscope.errors import DataError
from normscope.runtime.files import whole_file

HEADER, _CHECKSUMS = "normscope", "crc32"
_DAMAGES = (LookupError, ValueError, TypeError, AttributeError, RuntimeError, ArithmeticError, BufferError)
_AGAIN = "write it again"


def write_checked(path: Path, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write one file, whole or not at all; UsageError if the system cannot write it there.

    ``header`` is JSON with ``format`` (``normscope-KIND``) and ``version``. Tensors are contiguous, on the CPU, and no
    two in the same memory.
    """
    text = _as_text({**header, _CHECKSUMS: _checksums(header, tensors)})
    # Under one key: safetensors writes several in any order, and equal captures would make different files.
    with whole_file(path) as partial:
        write_tensors(tensors, partial, {HEADER: text})


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write one safetensors file, in a block of :func:`whole_file` or :func:`whole_folder`.

    Raises:
        OSError: if the system refuses; safetensors itself raises another error.
    """
    try:
        save_file(dict(tensors), path, metadata=dict(metadata))
    except SafetensorError as error:
        named = re.search(r"\(os error (\d+)\)", str(error))
        raise (OSError(int(named[1]), os.strerror(int(named[1]))) if named else OSError(str(error))) from error


def read_checked(path: Path, form: str, version: int, again: str = _AGAIN) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read header and tensors as :func:`write_checked` wrote them, to the bit.

    ``form`` is the ``format`` of the header, and ``again`` the advice that ends each error message. DataError if the
    file is missing, damaged, of another kind or of another version.
    """
    kind = form.removeprefix("normscope-")
    if path.is_dir():  # which the system explains by a missing device
        raise DataError(f"{path} is a folder, and no {kind}; {again}.")
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get(HEADER, "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError, ValueError, RecursionError, KeyError, AttributeError, RuntimeError) as error:
        no_tensors = isinstance(error, SafetensorError)
        reason = f"it is incomplete, damaged, or no safetensors file ({error})" if no_tensors else error
        raise DataError(f"Cannot read the {kind} {path}: {reason}; {again}.") from error
    if not isinstance(header, dict) or header.get("format") != form:
        raise DataError(f"{path} is a safetensors file, but no {kind}; {again}.")
    if header.get("version") != version:
        raise DataError(
            f"{path} has {kind} format version {header.get('version')!r}; this normscope reads version {version}; "
            f"{again}."
        )
    with refusing_damage(path, form, again):
        written = header.pop(_CHECKSUMS)
        present = _checksums(header, tensors)
        if differing := [name for name in {**written, **present} if written.get(name) != present.get(name)]:
            raise ValueError(f"another CRC32 of {differing[0] or 'the header'}")
    return header, tensors


@contextlib.contextmanager
def refusing_damage(path: Path, form: str, again: str = _AGAIN) -> Iterator[None]:
    """Raise DataError, naming the file, for whatever its content makes the block raise."""
    try:
        yield
    except _DAMAGES as error:
        kind = form.removeprefix("normscope-")
        raise DataError(f"The {kind} {path} is damaged: {type(error).__name__}: {error}; {again}.") from error


def _checksums(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the CRC32 of the bytes of each tensor, and under the empty name of the header's JSON."""
    data = {name: tensors[name].reshape(-1).view(torch.uint8).numpy().data for name in sorted(tensors)}
    return {"": zlib.crc32(_as_text(header).encode()), **{name: zlib.crc32(bits) for name, bits in data.items()}}


def _as_text(header: Mapping[str, Any]) -> str:
    return json.dumps(header, default=methodcaller("item"))  # numbers of NumPy and torch as Python's
