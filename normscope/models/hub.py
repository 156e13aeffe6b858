"""Weights from the Hugging Face hub, or within seconds the reason why not.

huggingface_hub's own downloads retry for most of a minute where nothing answers, so the hub is asked one short
question first. HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE and HF_HUB_ETAG_TIMEOUT mean what they mean to huggingface_hub,
which reads them when it is imported; without the last, the question has three seconds.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, OfflineModeIsEnabled

from normscope.errors import ModelError
from normscope.models import answers

logger = logging.getLogger(__name__)


def fetch(repo: str, filename: str) -> str:
    """Bring ``filename`` of ``repo`` into huggingface_hub's cache and return the commit it belongs to.

    Where the hub does not answer, the copy that is in the cache is taken, and a warning says so.

    Raises:
        UnusableCacheError: if the cache cannot take it.
        ModelError: if it is neither on the hub nor in the cache.
    """
    cached = try_to_load_from_cache(repo, filename)
    failure = _ask_for(repo, filename)
    if failure is None:
        try:
            path = hf_hub_download(repo, filename)
        except Exception as error:  # of huggingface_hub, of its HTTP library, of the disk
            answers.check_cache(error, Path(constants.HF_HUB_CACHE), _cache_variable())
            raise ModelError(
                f"The download of {filename} from {repo} broke off: {answers.first_line(error)}. {answers.ways_on()}"
            ) from error
    elif isinstance(cached, str):
        path = cached
        if not isinstance(failure, OfflineModeIsEnabled):
            logger.warning("%s is taken from the cache: %s.", repo, reason(failure, filename))
    else:
        raise ModelError(
            f"The weights of {repo} cannot be had: {reason(failure, filename)}. {answers.ways_on()}"
        ) from failure
    return Path(path).parents[filename.count("/")].name  # …/snapshots/<commit>/<filename>


def _ask_for(repo: str, filename: str) -> Exception | None:
    """Ask the hub for the file's metadata; return what went wrong."""
    deadline = _deadline()

    def question() -> None:
        metadata = get_hf_file_metadata(hf_hub_url(repo, filename), timeout=deadline)
        if not metadata.commit_hash:
            raise NotAHubError

    return answers.ask(question, deadline)


def _deadline() -> float:
    return constants.HF_HUB_ETAG_TIMEOUT if os.environ.get("HF_HUB_ETAG_TIMEOUT") else answers.DEADLINE


def _cache_variable() -> str:
    """Name the variable that says where the cache is: HF_HOME, unless another one overrules it."""
    return next((name for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE") if os.environ.get(name)), "HF_HOME")


class NotAHubError(Exception):
    """The answer is not one of a model hub: a captive portal's page, or a mistyped HF_ENDPOINT."""


def reason(error: Exception, filename: str) -> str:
    """Say in one clause why the hub does not give ``filename``."""
    host = urlsplit(constants.ENDPOINT).netloc or constants.ENDPOINT
    match error:
        case OfflineModeIsEnabled():
            return f"HF_HUB_OFFLINE is set, and the cache in {constants.HF_HUB_CACHE} does not hold them"
        case NotAHubError():
            return f"what answers at {host} is no model hub (HF_ENDPOINT is {constants.ENDPOINT})"
        case EntryNotFoundError():
            return f"there is no {filename} on {host}, and other formats, which can run code, are not fetched"
        case HfHubHTTPError():
            return answers.reason_of_status(error.response.status_code, host)
    return answers.reason(error, host, f"{_deadline():g} s (HF_HUB_ETAG_TIMEOUT sets how long it is waited for)")


@contextmanager
def damage_named(cached: Iterable[Path]) -> Iterator[None]:
    """Load what files of the cache hold in the block; where it fails, say which of them to remove.

    A file of the cache is called by the hash that the hub gives for it. Where it is not (a file system without links,
    another kind of server), it cannot be told whether it holds what the hub gave.

    Args:
        cached: files as :func:`huggingface_hub.try_to_load_from_cache` names them.

    Raises:
        ModelError: that of the block, with a sentence for each file that is damaged, or may be.
    """
    try:
        yield
    except ModelError as error:
        damaged = list(filter(None, map(_damage, cached)))
        if not damaged:
            raise
        raise ModelError(" ".join([str(error).removesuffix(".") + ".", *damaged])) from error.__cause__


def _damage(path: Path) -> str:
    """Say that a file in the cache is damaged, and what to remove; empty if it holds what the hub gave."""
    blob = path.parent / path.readlink() if path.is_symlink() else path
    blob = Path(os.path.normpath(blob))  # and no further: it may be a link into a store that caches share
    intact = _is_intact(blob)
    if intact:
        return ""
    what = "may be damaged: if it is, remove" if intact is None else "is damaged: remove"
    files = " and ".join(dict.fromkeys([repr(str(blob)), repr(str(blob.resolve()))]))
    return f"The file {str(path)!r} in the hub's cache {what} {files}, and the next run fetches it again."


def _is_intact(blob: Path) -> bool | None:
    """Return whether a file's content has the hash that it is called by: git's, or SHA-256; None if by neither."""
    name = blob.name
    if not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", name):
        return None
    try:
        digest = hashlib.sha256() if len(name) == 64 else hashlib.sha1(b"blob %d\0" % blob.stat().st_size)  # noqa: S324
        with blob.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError:  # of a disk that gives no more of it
        return False
    return digest.hexdigest() == name
