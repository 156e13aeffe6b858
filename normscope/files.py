"""Files that appear whole or not at all, under names that hold nothing dangerous."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from normscope.errors import UsageError


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path`` that takes its place once the block ends without an exception.

    Raises:
        UsageError: if the file cannot be written there, for whatever reason the system gives.
    """
    partial = None
    try:
        if path.is_dir():
            raise UsageError(f"Cannot write {path}: it is a folder. Name a file.")
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=path.suffix, dir=path.parent)
        os.close(handle)
        partial = Path(name)
        yield partial
        partial.chmod(0o666 & ~_umask())
        partial.replace(path)
        partial = None
    except OSError as error:
        raise UsageError(f"Cannot write {path}: {error.strerror or error}.") from error
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)


def file_stem(name: str) -> str:
    """Turn a model's or a site's name into one part of a file name.

    >>> file_stem("timm:vit_tiny_patch16_224"), file_stem("../../etc/passwd")
    ('timm-vit_tiny_patch16_224', 'etc-passwd')
    """
    stem = re.sub(r"[^A-Za-z0-9._]+", "-", name)
    return re.sub(r"^[-.]+|[-.]+$", "", re.sub(r"\.{2,}", "-", stem))[:120] or "unnamed"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
