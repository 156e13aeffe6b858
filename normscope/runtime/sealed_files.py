"""Files that are verified when read: safetensors with a JSON header and a digest of both."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from normscope.errors import DataError, count
from normscope.runtime.files import whole_file, write_tensors

HEADER, DIGEST, _DEFLATED = "normscope", "sha256", "deflated"
_LONGEST_HEADER = 100_000_000  # bytes: safetensors refuses more
_LEAST_LIMIT, _LARGEST_RATIO = 2**28, 64  # decompressed: bytes of any file, and times the compressed ones
_DAMAGES = (LookupError, ValueError, TypeError, AttributeError, RuntimeError, ArithmeticError, BufferError, zlib.error)
_AGAIN = "write it again"


def write_checked(
    path: Path, header: Mapping[str, Any], tensors: Mapping[str, Tensor], *, deflated: bool = False
) -> None:
    """Write one file, whole or not at all.

    Args:
        path: of the file; what stood there stays until the new one is whole.
        header: as JSON takes it, with ``format`` (``normscope-KIND``) and ``version`` among it.
        tensors: by name, contiguous, on the CPU, no two in the same memory.
        deflated: whether to compress, without loss: worth its time for counts and sums, not for weights.

    Raises:
        UsageError: if it cannot be written there, for whatever reason the system gives.
    """
    kept, kinds = _deflated(tensors) if deflated else (tensors, {})
    text = json.dumps({**header, _DEFLATED: kinds} if kinds else header)
    # Under one key: safetensors writes several in any order, and equal captures would make different files.
    sealed = text[:-1] + _seal(digest(text, kept))
    with whole_file(path) as partial:
        write_tensors(kept, partial, {HEADER: sealed})


def read_checked(
    path: Path, form: str, versions: Collection[int], again: str = _AGAIN
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read what :func:`write_checked` wrote: header and tensors are those that were written, to the bit.

    Args:
        path: of the file.
        form: the ``format`` that its header has to name.
        versions: of which its header has to name one.
        again: what to do, which ends the sentence that refuses a file.

    Raises:
        DataError: if the file is missing, damaged, of another kind or of another version.
    """
    kind = form.removeprefix("normscope-")
    if path.is_dir():  # which the system explains by a missing device
        raise DataError(f"{path} is a folder, and no {kind}; {again}.")
    try:
        with safe_open(path, framework="pt") as file:
            sealed = (file.metadata() or {}).get(HEADER, "null")
            header = json.loads(sealed)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except SafetensorError as error:
        raise DataError(f"Cannot read the {kind} {path}: {_why_not(path)}; {again}.") from error
    except (OSError, ValueError, RecursionError, KeyError, AttributeError, RuntimeError) as error:
        raise DataError(f"Cannot read the {kind} {path}: {error}; {again}.") from error
    if not isinstance(header, dict) or header.get("format") != form:
        raise DataError(f"{path} is a safetensors file, but no {kind}; {again}.")
    if header.get("version") not in versions:
        raise DataError(
            f"{path} has {kind} format version {header.get('version')!r}; this normscope reads version "
            f"{' and '.join(map(str, versions))}; {again}."
        )
    seal = _seal(str(header.pop(DIGEST, "")))
    text = sealed.removesuffix(seal) + "}"
    if not sealed.endswith(seal) or seal != _seal(digest(text, tensors)):
        raise DataError(f"The {kind} {path} is damaged: it does not hold what was written (another sha256); {again}.")
    kinds = header.pop(_DEFLATED, {})
    try:
        sizes = [math.prod(shape) * getattr(torch, dtype).itemsize for dtype, shape in kinds.values()]
        if sum(sizes) > _LEAST_LIMIT + _LARGEST_RATIO * sum(tensors[name].nbytes for name in kinds):
            raise ValueError(f"its compressed tensors have {sum(sizes):,} bytes, more than a {kind} can have")
        return header, tensors | {name: _inflated(tensors[name], *kinds[name]) for name in kinds}
    except _DAMAGES as error:
        raise DataError(f"The {kind} {path} is damaged: {type(error).__name__}: {error}; {again}.") from error


def _deflated(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, tuple[str, list[int]]]]:
    """Return the tensors in less room, and dtype and shape of those that take less as bytes of zlib.

    Compressed are the first bytes of all elements, then all second ones, and so on: those of small counts and of
    numbers of alike size are nearly all the same.
    """
    kept, kinds = dict(tensors), {}
    for name, tensor in tensors.items():
        bytewise = tensor.reshape(-1, 1).view(torch.uint8).T.contiguous()
        small = zlib.compress(bytewise.numpy().data, level=1)  # higher ones gain a hundredth
        if len(small) < tensor.nbytes:
            kept[name] = torch.frombuffer(bytearray(small), dtype=torch.uint8)
            kinds[name] = (str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
    return kept, kinds


def _inflated(small: Tensor, dtype: str, shape: list[int]) -> Tensor:
    """Decompress a tensor of :func:`_deflated`; ValueError unless it has the bytes of its shape."""
    kind, inflating = getattr(torch, dtype), zlib.decompressobj()
    size = math.prod(shape) * kind.itemsize
    content = inflating.decompress(small.numpy().data, max(size, 1))
    if len(content) != size or inflating.decompress(inflating.unconsumed_tail, 1):
        raise ValueError(f"a compressed tensor does not have the {size:,} bytes of its shape {shape}")
    elements = np.frombuffer(content, np.uint8).reshape(kind.itemsize, -1).T.copy()
    return torch.from_numpy(elements).view(kind).view(shape)


def _why_not(path: Path) -> str:
    """Describe the damage of a file that safetensors refuses: usually it is truncated.

    It begins with the length of its header, 8 bytes, little-endian; the header says where each tensor's bytes end.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        begun = 8 + int.from_bytes(file.read(8), "little")
        if size >= 8 and begun > _LONGEST_HEADER:
            return "it is no safetensors file"
        if size < begun:
            least = f"its header alone takes {begun:,}" if size >= 8 else "the length of its header alone takes 8"
            return f"it is incomplete: it has {count(size, 'byte')}, and {least}"
        try:
            entries = json.loads(file.read(begun - 8))
            ends = [int(entry["data_offsets"][1]) for name, entry in entries.items() if name != "__metadata__"]
        except (ValueError, RecursionError, AttributeError, LookupError, TypeError):
            return "its header is damaged"
    promised = begun + max(ends, default=0)
    if size == promised:
        return "its header is damaged"
    damage = "is incomplete" if size < promised else "holds more than it should"
    return f"it {damage}: it has {count(size, 'byte')}, and its header promises {promised:,}"


def digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of a header's text and of every tensor's name, dtype, shape and bytes, in hexadecimal.

    Everything is preceded by its length in bytes, 8 of them, little-endian: first the text; then of each tensor, in the
    order of their names, ``[name, dtype, shape]`` as JSON, and the bytes as the file holds them. No tensor is copied.

    >>> digest("{}", {"n": torch.tensor(3)}) == digest("{}", {"n": torch.tensor([3])})
    False
    """
    sha256 = hashlib.sha256()
    _add(sha256, text.encode("utf-8", "surrogatepass"))
    for name in sorted(tensors):
        tensor = tensors[name]
        _add(sha256, json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        _add(sha256, tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha256.hexdigest()


def _seal(digest: str) -> str:
    """Return what ends the JSON of a header."""
    return f', "{DIGEST}": "{digest}"}}'


def _add(sha256: hashlib._Hash, data: bytes | memoryview) -> None:
    sha256.update(len(data).to_bytes(8, "little"))
    sha256.update(data)
