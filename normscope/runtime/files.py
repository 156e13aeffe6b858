"""Files that appear whole or not at all, under safe names; sealed ones hold a digest that reading verifies."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from normscope.errors import DataError, UsageError, count

if TYPE_CHECKING:
    from torch import Tensor


_STEERING = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
CHECKPOINT = ".checkpoint"  # how the name of a folder ends that an unfinished capture keeps beside its file


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path that takes the place of ``path`` once the block ends without an exception.

    Where ``path`` is a symbolic link, what it points at is replaced, and the link stays.

    Raises:
        UsageError: if the file cannot be written there, for whatever reason the system gives.
    """
    partial = None
    try:
        target = _target(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=target.suffix, dir=target.parent)
        os.close(handle)
        partial = Path(name)
        yield partial
        partial.chmod(0o666 & ~umask())
        _settle(partial)
        partial.replace(target)
        partial = None
    except OSError as error:
        raise _cannot_write(path, error) from error
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Refuse what :func:`whole_file` would refuse, before the work that is to be written; leaves nothing behind.

    Raises:
        UsageError: if the file cannot be written there, for whatever reason the system gives.
    """
    try:
        target = _target(path)
        # A folder that is missing is not made: another process that just found it could lose it again.
        folder = next(folder for folder in target.parents if folder.exists())
        with tempfile.NamedTemporaryFile(prefix=f".{target.name}.", suffix=target.suffix, dir=folder):
            pass
    except OSError as error:
        raise _cannot_write(path, error) from error


@contextlib.contextmanager
def whole_folder(path: Path, files: Collection[str]) -> Iterator[Path]:
    """Yield a temporary folder that takes the place of ``path`` once the block ends without an exception.

    What stood there is removed only where it held all such files and nothing else, or nothing; a symbolic link stays,
    and what it points at is replaced.

    Args:
        path: the folder.
        files: names of the files that the block writes.

    Raises:
        UsageError: if it cannot be written there, or if something else would have to go.
    """
    partial = None
    try:
        target = _target_folder(path, files)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        yield partial
        partial.chmod(0o777 & ~umask())
        for file in partial.iterdir():
            file.chmod(0o666 & ~umask())
            _settle(file)
        _put_in_place(partial, target)
        partial = None
    except OSError as error:
        raise _cannot_write(path, error) from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def check_folder_writable(path: Path, files: Collection[str]) -> None:
    """Refuse what :func:`whole_folder` would refuse, before the work that is to be written; leaves nothing behind.

    Raises:
        UsageError: if it cannot be written there, or if something else would have to go.
    """
    try:
        target = _target_folder(path, files)
        above = next(folder for folder in target.parents if folder.exists())
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=above):
            pass
    except OSError as error:
        raise _cannot_write(path, error) from error


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write one safetensors file, in a block of :func:`whole_file` or :func:`whole_folder`.

    Raises:
        OSError: if the system refuses, which safetensors tells with an error of its own that is no OSError.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, metadata=dict(metadata))
    except SafetensorError as error:
        named = re.search(r"\(os error (\d+)\)", str(error))
        raise (OSError(int(named[1]), os.strerror(int(named[1]))) if named else OSError(str(error))) from error


def _settle(file: Path) -> None:
    """Wait until the file is on the disk: some file systems say only then that there is no room for it."""
    descriptor = os.open(file, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _target_folder(path: Path, files: Collection[str]) -> Path:
    """Follow symbolic links to the folder that is to be replaced, and refuse one that holds anything else."""
    target = Path(os.path.realpath(path))
    try:
        own = {entry.name for entry in target.iterdir() if entry.name in files and not entry.is_dir()}
        # Some of the files without the others are somebody else's: a model.safetensors that was downloaded.
        others = sorted(entry.name for entry in target.iterdir() if entry.name not in own or len(own) < len(files))
    except FileNotFoundError:
        return target
    except NotADirectoryError:
        raise UsageError(f"Cannot write {path}: it is a file. Name a folder.") from None
    if target == Path.cwd() or target == target.parent:
        raise UsageError(f"Cannot write {path}: it is the folder that this runs in. Name a new one in it.")
    if others:
        raise UsageError(
            f"Cannot write {path}: the folder exists, and {others[0]} in it would be lost. Move it away, or name "
            "another folder."
        )
    return target


def _put_in_place(partial: Path, target: Path) -> None:
    """Rename a folder to where another may be, which comes back if that fails."""
    if not target.exists():
        partial.rename(target)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    old = aside / "old"
    try:
        target.rename(old)
        partial.rename(target)
    finally:
        if old.exists() and not target.exists():  # whatever came between, an interruption too
            old.rename(target)
        shutil.rmtree(aside, ignore_errors=True)


def _target(path: Path) -> Path:
    """Follow symbolic links to the file that is to be replaced, and refuse whatever is none."""
    target = Path(os.path.realpath(path))  # Path.resolve raises an error of no system's on a loop, in some versions
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return target
    if stat.S_ISDIR(mode):
        raise UsageError(f"Cannot write {path}: it is a folder. Name a file.")
    if not stat.S_ISREG(mode):
        # Taking its place would remove a device, a pipe or a socket that somebody else uses.
        raise UsageError(f"Cannot write {path}: it exists, and is no regular file. Name a file.")
    return target


def _cannot_write(path: Path, error: OSError) -> UsageError:
    return UsageError(f"Cannot write {path}: {error.strerror or error}.")


def visible(text: str) -> str:
    r"""Write out what would steer a terminal or turn the order of letters, as names of files and modules may hold it.

    Those are the control characters, among them line feeds, the separators of lines and paragraphs, the marks,
    embeddings, overrides and isolates of bidirectional text, and halves of surrogate pairs (bytes that are no UTF-8).

    >>> print(visible("a\nb \x1b[2J \u202egnp.exe"))
    a\nb \x1b[2J \u202egnp.exe
    """
    return _STEERING.sub(lambda sign: ascii(sign[0])[1:-1], text)


def file_stem(name: str) -> str:
    """Turn a model's or a site's name into one part of a file name.

    >>> file_stem("timm:vit_tiny_patch16_224"), file_stem("../../etc/passwd")
    ('timm-vit_tiny_patch16_224', 'etc-passwd')
    """
    stem = re.sub(r"[^A-Za-z0-9._]+", "-", name)
    return re.sub(r"^[-.]+|[-.]+$", "", re.sub(r"\.{2,}", "-", stem))[:120] or "unnamed"


def umask() -> int:
    """Return what this process takes from the modes of new files, which nothing but setting it tells."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


HEADER, DIGEST = "normscope", "sha256"
_LONGEST_HEADER = 100_000_000  # bytes: safetensors refuses more
_AGAIN = "write it again"


def write_checked(path: Path, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write one file, whole or not at all.

    Args:
        path: of the file; what stood there stays until the new one is whole.
        header: as JSON takes it, with ``format`` (``normscope-KIND``) and ``version`` among it.
        tensors: by name, contiguous, on the CPU, no two in the same memory.

    Raises:
        UsageError: if it cannot be written there, for whatever reason the system gives.
    """
    text = json.dumps(header)
    # Under one key: safetensors writes several in any order, and the same capture would be other files.
    sealed = text[:-1] + _seal(digest(text, tensors))
    with whole_file(path) as partial:
        write_tensors(tensors, partial, {HEADER: sealed})


def read_checked(path: Path, form: str, version: int, again: str = _AGAIN) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read what :func:`write_checked` wrote: header and tensors are those that were written, to the bit.

    Args:
        path: of the file.
        form: the ``format`` that its header has to name.
        version: that its header has to name.
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
    if header.get("version") != version:
        raise DataError(
            f"{path} has {kind} format version {header.get('version')!r}; this normscope reads version {version}; "
            f"{again}."
        )
    seal = _seal(str(header.pop(DIGEST, "")))
    text = sealed.removesuffix(seal) + "}"
    if not sealed.endswith(seal) or seal != _seal(digest(text, tensors)):
        raise DataError(f"The {kind} {path} is damaged: it does not hold what was written (another sha256); {again}.")
    return header, tensors


def _why_not(path: Path) -> str:
    """Say what is wrong with a file that safetensors refuses: mostly it is not all there.

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
            ends = [int(own["data_offsets"][1]) for name, own in entries.items() if name != "__metadata__"]
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
    found = hashlib.sha256()
    _add(found, text.encode("utf-8", "surrogatepass"))
    for name in sorted(tensors):
        tensor = tensors[name]
        _add(found, json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        _add(found, tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _seal(digest: str) -> str:
    """Return what ends the JSON of a header."""
    return f', "{DIGEST}": "{digest}"}}'


def _add(found: hashlib._Hash, data: bytes | memoryview) -> None:
    found.update(len(data).to_bytes(8, "little"))
    found.update(data)
