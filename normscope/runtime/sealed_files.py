"""Files that are verified when read: safetensors with a JSON header and a digest of both."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from normscope.errors import DataError
from normscope.runtime.files import whole_file, write_tensors

HEADER, DIGEST, _DEFLATED = "normscope", "sha256", "deflated"
_LEAST_LIMIT, _LARGEST_RATIO = 2**28, 64  # decompressed: bytes of any file, and times the compressed ones
_DAMAGES = (LookupError, ValueError, TypeError, AttributeError, RuntimeError, ArithmeticError, BufferError, zlib.error)
_AGAIN = "write it again"


def write_checked(
    path: Path, header: Mapping[str, Any], tensors: Mapping[str, Tensor], *, deflated: bool = False
) -> None:
    """Write one file, whole or not at all.

    Args:
        path: the file; a previous one stays until the new one is whole.
        header: JSON with ``format`` (``normscope-KIND``) and ``version``.
        tensors: by name, contiguous, on the CPU, no two in the same memory.
        deflated: compress without loss: worth its time for counts and sums, not for weights.

    Raises:
        UsageError: if the system cannot write it there.
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
    """Read header and tensors as :func:`write_checked` wrote them, to the bit.

    ``form`` is the ``format`` of the header, and ``again`` the advice that ends each error message. DataError if the
    file is missing, damaged, of another kind or of another version.
    """
    kind = form.removeprefix("normscope-")
    if path.is_dir():  # which the system explains by a missing device
        raise DataError(f"{path} is a folder, and no {kind}; {again}.")
    try:
        with safe_open(path, framework="pt") as file:
            sealed = (file.metadata() or {}).get(HEADER, "null")
            header = json.loads(sealed)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError, ValueError, RecursionError, KeyError, AttributeError, RuntimeError) as error:
        no_tensors = isinstance(error, SafetensorError)
        reason = f"it is incomplete, damaged, or no safetensors file ({error})" if no_tensors else error
        raise DataError(f"Cannot read the {kind} {path}: {reason}; {again}.") from error
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
    with refusing_damage(path, form, again):
        sizes = [math.prod(shape) * getattr(torch, dtype).itemsize for dtype, shape in kinds.values()]
        if sum(sizes) > _LEAST_LIMIT + _LARGEST_RATIO * sum(tensors[name].nbytes for name in kinds):
            raise ValueError(f"its compressed tensors have {sum(sizes):,} bytes, more than a {kind} can have")
        tensors |= {name: _inflated(tensors[name], *kinds[name]) for name in kinds}
    return header, tensors


@contextlib.contextmanager
def refusing_damage(path: Path, form: str, again: str = _AGAIN) -> Iterator[None]:
    """Raise DataError, naming the file, for whatever its content makes the block raise."""
    try:
        yield
    except _DAMAGES as error:
        kind = form.removeprefix("normscope-")
        raise DataError(f"The {kind} {path} is damaged: {type(error).__name__}: {error}; {again}.") from error


def _deflated(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, tuple[str, list[int]]]]:
    """Compress tensors that become smaller; return all, and dtype and shape of the compressed.

    The first bytes of all elements come first, then all second bytes, and so on: for small counts and numbers of
    similar size these are nearly all the same.
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


def digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of a header's text and of every tensor's name, dtype, shape and bytes, in hexadecimal.

    Each part is preceded by its length in 8 bytes, little-endian: first the text; then, for each tensor in the order of
    names, ``[name, dtype, shape]`` as JSON, and the bytes of the file. No tensor is copied.

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
