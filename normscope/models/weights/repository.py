"""Repositories of the Hugging Face hub at one commit, and folders: the files of a model."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import (
    _CACHED_NO_EXIST,
    constants,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    try_to_load_from_cache,
)
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, OfflineModeIsEnabled

from normscope.errors import ModelError
from normscope.inputs.loaded_model import Provenance
from normscope.models.weights import downloads
from normscope.runtime.files import sha256_of

logger = logging.getLogger(__name__)


def fetch(repo: str, filename: str) -> tuple[Path, str]:
    """Bring ``filename`` of ``repo`` into huggingface_hub's cache; return where it is and the commit it belongs to.

    Without an answer of the hub, it returns the copy in the cache, with a warning.

    Raises:
        ModelError: if it is neither on the hub nor in the cache, or the cache cannot take it.
    """
    cached = try_to_load_from_cache(repo, filename)
    failure = _ask_for(repo, filename)
    if failure is None:
        try:
            path = hf_hub_download(repo, filename)
        except Exception as error:  # of huggingface_hub, of its HTTP library, of the disk
            remedy = f"HF_HOME, or HF_HUB_CACHE, sets another folder. {downloads.ways_on()}"
            what, folder = f"{filename} from {repo}", Path(constants.HF_HUB_CACHE)
            raise ModelError(downloads.broken_off(what, folder, error, remedy)) from error
    elif isinstance(cached, str):
        path = cached
        if not isinstance(failure, OfflineModeIsEnabled):
            logger.warning("%s is taken from the cache: %s.", repo, reason(failure, filename))
    else:
        raise ModelError(
            f"The weights of {repo} cannot be had: {reason(failure, filename)}. {downloads.ways_on()}"
        ) from failure
    return Path(path), Path(path).parents[filename.count("/")].name  # …/snapshots/<commit>/<filename>


def _ask_for(repo: str, filename: str) -> Exception | None:
    """Ask the hub for the file's metadata; return what went wrong."""
    deadline = _deadline()

    def question() -> None:
        metadata = get_hf_file_metadata(hf_hub_url(repo, filename), timeout=deadline)
        if not metadata.commit_hash:
            raise downloads.NotAHubError

    return downloads.ask(question, deadline)


def _deadline() -> float:
    return constants.HF_HUB_ETAG_TIMEOUT if os.environ.get("HF_HUB_ETAG_TIMEOUT") else downloads.DEADLINE


def reason(error: Exception, filename: str) -> str:
    """Explain in one clause why the hub does not provide ``filename``."""
    host = urlsplit(constants.ENDPOINT).netloc or constants.ENDPOINT
    match error:
        case OfflineModeIsEnabled():
            return f"HF_HUB_OFFLINE is set, and the cache in {constants.HF_HUB_CACHE} does not hold them"
        case downloads.NotAHubError():
            return f"what answers at {host} is no model hub (HF_ENDPOINT is {constants.ENDPOINT})"
        case EntryNotFoundError():
            return f"there is no {filename} on {host}, and other formats, which can run code, are not fetched"
    return downloads.reason(error, host, f"{_deadline():g} s (HF_HUB_ETAG_TIMEOUT sets how long it is waited for)")


@contextmanager
def damage_named(*paths: Path | None) -> Iterator[None]:
    """Load files in the block; where that raises a ModelError, add which files of the hub's cache are damaged.

    A file in the cache is a link to a blob, which may be a link into a store that caches share.
    """
    try:
        yield
    except ModelError as error:
        cached = [path for path in paths if path is not None and path.is_relative_to(constants.HF_HUB_CACHE)]
        links = [path.parent / path.readlink() if path.is_symlink() else path for path in cached]
        blobs = [Path(os.path.normpath(link)) for link in links]
        damaged = [repr(str(file)) for blob in blobs if not _is_intact(blob) for file in (blob, blob.resolve())]
        if not damaged:
            raise
        raise ModelError(
            f"{str(error).removesuffix('.')}. The hub's cache may be damaged: remove "
            f"{' and '.join(dict.fromkeys(damaged))}, and the next run fetches it again."
        ) from error.__cause__


def _is_intact(blob: Path) -> bool:
    """True if a file's content has the hash in its name: git's, or SHA-256."""
    if not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", blob.name):
        return False
    try:
        if len(blob.name) == 64:
            return sha256_of([blob]) == blob.name
        content = blob.read_bytes()  # git's hash is that of small files
    except OSError:
        return False
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == blob.name  # noqa: S324


WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"  # names the files of weights that are in several

# Repositories that scripts/ fetch from elsewhere, where the hub cannot be reached: the SHA-256 of the hub's weights.
COPIES = {
    "sentence-transformers/all-MiniLM-L6-v2": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
}

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class HubSilentError(ModelError):
    """A file is neither on the hub nor in the cache, or the hub cannot be asked.

    Attributes:
        reason: why, in one clause.
    """

    def __init__(self, sentence: str, reason: str) -> None:
        """Keep the reason beside the sentence that says it."""
        super().__init__(sentence)
        self.reason = reason


def copy_of(repo: str) -> Path:
    """Return the folder of a copy of one of :data:`COPIES`, which need not be there: below XDG_CACHE_HOME."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "normscope", repo.replace("/", "--"))


@dataclass
class Repository:
    """A folder, or a repository of the hub, whose files are fetched one by one, all of one commit.

    Attributes:
        name: path of the folder, or OWNER/NAME on the hub.
        commit: of the files that were fetched so far; empty for a folder.
        copied: OWNER/NAME on the hub of what the folder is a copy of; empty for any other.
    """

    name: str
    commit: str = field(default="", init=False)
    copied: str = field(default="", init=False)

    def __post_init__(self) -> None:
        """Identify a folder, a repository or its copy; ModelError if it is none of them."""
        if self.is_folder:
            return
        if self.name in COPIES and copy_of(self.name).is_dir():
            self.copied, self.name = self.name, str(copy_of(self.name))
            return
        if Path(self.name).exists():
            raise ModelError(f"{self.name!r} is a file. Name the folder that it is in, or a repository of the hub.")
        try:
            hf_hub_url(self.name, WEIGHTS)  # which asks nobody, but checks the name
        except HFValidationError as error:
            raise ModelError(
                f"There is no folder {self.name!r}, and no repository of the hub can be called so: name a folder "
                "that exists, or OWNER/NAME."
            ) from error

    @property
    def is_folder(self) -> bool:
        """True if the files are in a folder of this machine."""
        return Path(self.name).is_dir()

    def file(self, filename: str) -> Path | None:
        """Return the path of a file, fetched first if need be, or None if there is no such file.

        Raises:
            HubSilentError: if the hub cannot be asked.
            ModelError: if the hub has come to a new commit since the first file.
        """
        if self.is_folder:
            path = Path(self.name, filename)
            return path if path.is_file() else None
        cached = try_to_load_from_cache(self.name, filename, revision=self.commit) if self.commit else None
        if cached is _CACHED_NO_EXIST:
            return None
        # Files of one commit do not change: those in the cache need no hub.
        return Path(cached) if isinstance(cached, str) else self._fetch(filename)

    def json(self, filename: str) -> dict[str, Any] | None:
        """Return what a JSON file holds, or None if there is no such file; ModelError if it is damaged."""
        path = self.file(filename)
        if path is None:
            return None
        with damage_named(path):
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ModelError(f"The file {filename} of {self.name} is no JSON: {error}.") from error
            if not isinstance(content, dict):
                raise ModelError(f"The file {filename} of {self.name} holds no JSON object.")
        return content

    def weights(self) -> list[Path]:
        """Return the safetensors files that hold the weights.

        Raises:
            ModelError: if there are none, or the hub cannot be asked.
        """
        if whole := self.file(WEIGHTS):
            return [whole]
        index = self.json(INDEX)
        if index is None:
            raise ModelError(self._no_weights())
        try:
            parts = sorted(set(index["weight_map"].values()))
            files = {part: self.file(part) for part in parts}
        except (KeyError, AttributeError, TypeError, HFValidationError) as error:
            raise ModelError(f"The file {INDEX} of {self.name} does not name files of weights.") from error
        missing = [part for part, path in files.items() if path is None]
        if missing or not parts:
            raise ModelError(f"{self.name} lacks weights that its {INDEX} names: {', '.join(missing[:3]) or 'none'}.")
        return [path for path in files.values() if path is not None]

    def provenance(self, files: Iterable[Path]) -> Provenance:
        """Describe the origin of the weights in some of its files.

        Raises:
            ModelError: if they are those of a copy, and not what the hub has.
        """
        if not self.is_folder:
            return Provenance("pretrained", f"{self.name}@{self.commit[:12]}")
        digest = sha256_of(files)
        if not self.copied:
            return Provenance("file", f"folder {Path(self.name).resolve().name} (sha256 {digest[:12]})")
        if digest != COPIES[self.copied]:
            raise ModelError(
                f"The copy of {self.copied} in {self.name} does not hold the weights that the hub has (another "
                "sha256). Remove that folder, and fetch it again."
            )
        return Provenance("pretrained", f"{self.copied} (sha256 {digest[:12]})")

    def where(self) -> dict[str, Any]:
        """Return the keyword arguments that make ``from_pretrained`` read these very files, and ask no hub."""
        return {"local_files_only": True, **({"revision": self.commit} if self.commit else {})}

    def _fetch(self, filename: str) -> Path | None:
        try:
            path, commit = fetch(self.name, filename)
        except ModelError as error:
            cause = error.__cause__
            if not isinstance(cause, EntryNotFoundError):
                why = reason(cause, filename) if isinstance(cause, Exception) else str(error)
                elsewhere = " normscope's scripts/fetch_minilm.py gets the same from the package registry."
                raise HubSilentError(f"{error}{elsewhere if self.name in COPIES else ''}", why) from cause
            if self.commit:  # huggingface_hub notes in its cache that the file is not there
                with suppress(Exception):
                    hf_hub_download(self.name, filename, revision=self.commit)
            return None
        if commit != (self.commit or commit):
            raise ModelError(
                f"{self.name} has changed on the hub while it was fetched, from {self.commit[:12]} to {commit[:12]}. "
                "Start again."
            )
        self.commit = commit
        return path

    def _no_weights(self) -> str:
        pickled = sorted(path for kind in _PICKLES for path in Path(self.name).glob(kind)) if self.is_folder else []
        if pickled:
            return (
                f"The folder {self.name!r} holds its weights only as {pickled[0].name}, and there is no {WEIGHTS}. "
                f"Name that file with --weights {pickled[0]}: it is then read without unpickling any code."
            )
        kind = "The folder" if self.is_folder else "The repository"
        return (
            f"{kind} {self.name!r} holds neither {WEIGHTS} nor {INDEX}; other formats, which can run code, are not "
            "taken. Name a file with --weights FILE, or take --weights random."
        )


def refuse_code(name: str, filename: str, content: Any) -> None:
    """Refuse what names a class of its own, or a kernel on the hub: both are code."""
    for key, value in _items(content):
        names_kernel = key.strip("_").split("_internal")[0].endswith("_implementation") and "/" in str(value)
        if key == "auto_map" or names_kernel:
            raise ModelError(
                f"{name} asks for code that comes with its weights ({key} in {filename}), and no such code is run. "
                "Load it in a function of yours, which may trust it, and name that: py:FILE:FACTORY."
            )


def _items(content: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of nested JSON."""
    nested = content if isinstance(content, list) else []
    if isinstance(content, dict):
        yield from content.items()
        nested = list(content.values())
    for value in nested:
        yield from _items(value)
