"""Files and folders that appear whole or not at all, under harmless names."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from normscope.errors import UsageError

_STEERING = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
CHECKPOINT = ".checkpoint"  # suffix of the folder that an unfinished capture keeps beside its file


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces ``path``, or the target of a link, if the block ends without an exception.

    Raises:
        UsageError: if the system cannot write the file there.
    """
    with _reporting(path):
        target = _target(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _folder_beside(target) as aside:
            partial = aside / target.name
            yield partial
            _settle(partial)
            partial.replace(target)


def check_writable(path: Path) -> None:
    """Raise the UsageError of :func:`whole_file` before the work; leave nothing behind."""
    with _reporting(path):
        _check(_target(path))


@contextlib.contextmanager
def whole_folder(path: Path, files: Collection[str], also: Collection[str] = ()) -> Iterator[Path]:
    """Yield a temporary folder that replaces ``path``, or the target of a link, if the block ends without an exception.

    A previous folder is removed only if it is empty, or contains all of ``files`` and nothing but them and ``also``,
    names of optional files. The bytecode that Python keeps of an imported file does not count.

    Raises:
        UsageError: if it cannot be written there, or if other files would be lost.
    """
    with _reporting(path):
        target = _target_folder(path, files, also)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _folder_beside(target) as aside:
            partial, old = aside / "new", aside / "old"
            partial.mkdir()
            yield partial
            for file in partial.iterdir():
                _settle(file)
            try:
                if target.exists():
                    target.rename(old)
                partial.rename(target)
            finally:
                if old.exists() and not target.exists():  # also after an interruption
                    old.rename(target)


def check_folder_writable(path: Path, files: Collection[str], also: Collection[str] = ()) -> None:
    """Raise the UsageError of :func:`whole_folder` before the work; leave nothing behind."""
    with _reporting(path):
        _check(_target_folder(path, files, also))


def _check(target: Path) -> None:
    # A missing folder is not created, as another process might rely on it and lose it again.
    above = next(folder for folder in target.parents if folder.exists())
    with _folder_beside(above / target.name):
        pass


@contextlib.contextmanager
def _reporting(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"Cannot write {path}: {error.strerror or error}.") from error


@contextlib.contextmanager
def _folder_beside(target: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(
        prefix=f".{target.name}.", dir=target.parent, ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


def _settle(file: Path) -> None:
    """Set the usual permissions, and wait for the disk, as some file systems report errors only then."""
    mask = os.umask(0)  # which can only be read by setting it
    os.umask(mask)
    file.chmod(0o666 & ~mask)
    descriptor = os.open(file, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _target_folder(path: Path, files: Collection[str], also: Collection[str]) -> Path:
    """Follow symbolic links to the folder to be replaced; refuse a folder with other files."""
    target = Path(os.path.realpath(path))
    try:
        ours = {entry.name for entry in target.iterdir() if entry.name in {*files, *also} and not entry.is_dir()}
        # Some of the files without the rest are not ours, such as a downloaded model.safetensors.
        whole = ours.issuperset(files)
        replaced = {*(ours if whole else ()), "__pycache__"}
        unexpected = sorted(entry.name for entry in target.iterdir() if entry.name not in replaced)
    except FileNotFoundError:
        return target
    except NotADirectoryError:
        raise UsageError(f"Cannot write {path}: it is a file. Name a folder.") from None
    if target == Path.cwd() or target == target.parent:
        description = "folder that this runs in" if target == Path.cwd() else "root of the file system"
        raise UsageError(f"Cannot write {path}: it is the {description}. Name a new folder in it.")
    if unexpected:
        raise UsageError(
            f"Cannot write {path}: the folder exists, and {unexpected[0]} in it would be lost. Move it away, or name "
            "another folder."
        )
    return target


def _target(path: Path) -> Path:
    """Follow symbolic links to the file to be replaced; refuse anything else."""
    target = Path(os.path.realpath(path))  # in some versions Path.resolve raises no OSError on a loop
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return target
    if stat.S_ISDIR(mode):
        raise UsageError(f"Cannot write {path}: it is a folder. Name a file.")
    if not stat.S_ISREG(mode):
        # Replacing it would remove a device, a pipe or a socket in use.
        raise UsageError(f"Cannot write {path}: it exists, and is no regular file. Name a file.")
    return target


def visible(text: str) -> str:
    r"""Escape characters of file and module names that would steer a terminal or reverse text.

    These are control characters, separators of lines and paragraphs, marks of bidirectional text, and halves of
    surrogate pairs (bytes that are no UTF-8).

    >>> print(visible("a\nb \x1b[2J \u202egnp.exe"))
    a\nb \x1b[2J \u202egnp.exe
    """
    return _STEERING.sub(lambda sign: ascii(sign[0])[1:-1], text)


def sha256_of(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def file_stem(name: str) -> str:
    """Turn a model's or a site's name into one part of a file name.

    >>> file_stem("timm:vit_tiny_patch16_224"), file_stem("../../etc/passwd")
    ('timm-vit_tiny_patch16_224', 'etc-passwd')
    """
    stem = re.sub(r"[^A-Za-z0-9._]+", "-", name)
    return re.sub(r"^[-.]+|[-.]+$", "", re.sub(r"\.{2,}", "-", stem))[:120] or "unnamed"
