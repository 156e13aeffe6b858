"""The models by name, and the function that loads each.

Nothing heavy is imported before a model is loaded: ``normscope models`` and shell completion read this table.
Another library needs a module beside this one whose ``load`` is a ``Loader``, and a row here. Its networks may have an
attribute ``remade_by``, an expression that makes them without normscope, which swapped folders quote.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from normscope.errors import DataError, ModelError, UsageError, first_line, unknown
from normscope.runtime.processes import Process

if TYPE_CHECKING:
    from normscope.inputs.loaded_model import LoadedModel, LoadOptions

    # From what outputs and errors call a model, its library's name for it, and which weights and inputs to load where.
    Loader = Callable[[str, str, LoadOptions], LoadedModel]

_MOST = 2**63 - 1  # of torch and of Python's own sequences


@dataclass(frozen=True)
class ModelEntry:
    """One line of ``normscope models``.

    Attributes:
        name: as the user types it; NAME in ``timm:NAME`` is any name that the library knows.
        family: of the network, or families separated by commas.
        description: one line.
        source: ``library:architecture`` of the weights; the library ``embedded`` is this package.
    """

    name: str
    family: str
    description: str
    source: str

    @property
    def embedded(self) -> bool:
        """True if weights and inputs are in this package."""
        return self.library == "embedded"

    @property
    def library(self) -> str:
        """Library that defines the architecture: ``embedded`` for this package, ``py`` for the user's own code."""
        return self.source.partition(":")[0]


_NAMED = (
    ModelEntry("demo_vit", "vision", "a tiny ViT trained on scikit-learn's 8×8 digits", "embedded:demo_vit"),
    ModelEntry("demo_wav2vec2", "speech", "a tiny wav2vec 2.0 trained on synthetic words", "embedded:demo_wav2vec2"),
    ModelEntry("demo_dit", "diffusion", "a tiny DiT trained on scikit-learn's 8×8 digits", "embedded:demo_dit"),
    ModelEntry(
        "vit_b16",
        "vision",
        "ViT-B/16 at 224×224, ImageNet-21k, then ImageNet-1k",
        "timm:vit_base_patch16_224.augreg2_in21k_ft_in1k",
    ),
    ModelEntry(
        "vit_l16",
        "vision",
        "ViT-L/16 at 224×224, ImageNet-21k, then ImageNet-1k",
        "timm:vit_large_patch16_224.augreg_in21k_ft_in1k",
    ),
    ModelEntry("convnext_b", "vision", "ConvNeXt-B at 224×224, ImageNet-1k", "timm:convnext_base.fb_in1k"),
    ModelEntry("convnext_l", "vision", "ConvNeXt-L at 224×224, ImageNet-1k", "timm:convnext_large.fb_in1k"),
    ModelEntry("mae_vit_b16", "vision", "ViT-B/16, a masked autoencoder's encoder", "timm:vit_base_patch16_224.mae"),
    ModelEntry("dino_vit_b16", "vision", "ViT-B/16, DINO", "timm:vit_base_patch16_224.dino"),
    ModelEntry("dinov2_small", "vision", "DINOv2 ViT-S/14 at 224×224", "transformers:facebook/dinov2-small"),
    ModelEntry("wav2vec2_base", "speech", "wav2vec 2.0 Base, LibriSpeech, post-norm", "torchaudio:WAV2VEC2_BASE"),
    ModelEntry("wav2vec2_large", "speech", "wav2vec 2.0 Large, LibriSpeech, post-norm", "torchaudio:WAV2VEC2_LARGE"),
    ModelEntry(
        "wav2vec2_large_lv60k", "speech", "wav2vec 2.0 Large, Libri-Light, pre-norm", "torchaudio:WAV2VEC2_LARGE_LV60K"
    ),
    ModelEntry(
        "smart_turn", "speech", "Whisper-tiny's encoder, for turn detection", "transformers:pipecat-ai/smart-turn-v3"
    ),
    ModelEntry("dit_xl", "diffusion", "DiT-XL/2 at 256×256, ImageNet-1k", "diffusers:facebook/DiT-XL-2-256"),
    ModelEntry("dit_xl_512", "diffusion", "DiT-XL/2 at 512×512, ImageNet-1k", "diffusers:facebook/DiT-XL-2-512"),
    ModelEntry(
        "minilm",
        "language",
        "all-MiniLM-L6-v2: BERT of 22 million weights, for sentences, post-norm",
        "transformers:sentence-transformers/all-MiniLM-L6-v2",
    ),
    ModelEntry("smollm2_135m", "language", "SmolLM2 for chats", "transformers:HuggingFaceTB/SmolLM2-135M-Instruct"),
    ModelEntry("gpt2", "language", "GPT-2 of 124 million weights", "transformers:openai-community/gpt2"),
    ModelEntry("llama_7b", "language", "LLaMA of 7 billion weights", "transformers:huggyllama/llama-7b"),
)
_PREFIXED = tuple(
    ModelEntry(name, family, description, source=name)
    for name, family, description in (
        ("timm:NAME", "vision", "any of timm, with or without .tag; hf-hub:OWNER/NAME of the hub"),
        ("torchaudio:BUNDLE", "speech", "a bundle of torchaudio that takes waveforms"),
        ("diffusers:REPO_OR_DIR", "diffusion", "a DiT, or a pipeline with a transformer"),
        ("transformers:REPO_OR_DIR", "language, vision, speech", "a model of transformers that reads, sees or hears"),
        ("py:FILE_OR_MODULE:FACTORY", "your own", "your function that returns a module and batches"),
    )
)
# Modules here that load the models of a library; each embedded model has one of its name.
_MODULES = {"timm": "vision", "torchaudio": "speech", "diffusers": "diffusion", "py": "custom"}
_REMEDIES = {
    "torchaudio": " Install torchaudio with the torch that it belongs to: pip install 'torch==2.11.*' "
    "'torchaudio==2.11.*'.",
    "transformers": " Install it: pip install 'transformers>=5.3'.",
}


def list_models() -> list[ModelEntry]:
    """Return every named model, then one entry for each library whose models go by ``library:NAME``.

    >>> [entry.name for entry in list_models() if entry.family == "diffusion"]
    ['demo_dit', 'dit_xl', 'dit_xl_512', 'diffusers:REPO_OR_DIR']
    """
    return [*_NAMED, *_PREFIXED]


def embedded_models() -> list[str]:
    """Return the names of the models whose weights and inputs are in this package.

    >>> embedded_models()
    ['demo_vit', 'demo_wav2vec2', 'demo_dit']
    """
    return [entry.name for entry in _NAMED if entry.embedded]


def loader_of(entry: ModelEntry) -> Loader:
    """Return the function that loads a model; ModelError if its library cannot be imported.

    >>> loader_of(find("demo_vit")).__module__
    'normscope.models.embedded.demo_vit'
    """
    module = f"embedded.{entry.name}" if entry.embedded else _MODULES.get(entry.library, entry.library)
    try:
        loader: Loader = importlib.import_module(f"normscope.models.{module}").load
    except Exception as error:  # ImportError, OSError, RuntimeError and AttributeError were seen
        raise failure(entry, error) from error
    return loader


def find(name: str) -> ModelEntry:
    """Return the entry of a model, which need not exist in its library; ModelError for any other name.

    >>> find("demo_vit").source
    'embedded:demo_vit'
    >>> find("timm:resnet18").name
    'timm:resnet18'
    """
    for entry in _NAMED:
        if name == entry.name:
            return entry
    library, _, architecture = name.partition(":")
    for entry in _PREFIXED:
        if architecture and entry.library == library:
            return dataclasses.replace(entry, name=name, source=name)

    if name and Path(name).is_dir():
        raise ModelError(
            f"{name!r} is a folder. Name the library of its model, transformers:{name} or diffusers:{name}; a folder "
            f"of `normscope swap` follows the name of its model, MODEL --weights {name}."
        )
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        names = [entry.name for entry in list_models()]
        if not difflib.get_close_matches(name, names):
            from normscope.models.vision import names_like  # imports timm and torch

            names += names_like(name)
        if "Did you mean" in (error := unknown("model", name, names)):
            raise ModelError(error)
    example = name or "OWNER/NAME"
    raise ModelError(
        f"There is no model {name!r}; `normscope models` lists the names. A model of the hub goes by its library: "
        f"transformers:{example}, diffusers:{example} or timm:hf-hub:{example}."
    )


def is_diffusion(name: str) -> bool:
    """Return True for the name of a diffusion model.

    >>> is_diffusion("demo_dit"), is_diffusion("diffusers:owner/name"), is_diffusion("vit_b16")
    (True, True, False)
    """
    names = [entry.name.partition(":")[0] for entry in list_models() if entry.family == "diffusion"]
    return name.partition(":")[0] in names


def check_diffusion(entry: ModelEntry, *, guidance: float | None, timesteps: str | int | None) -> None:
    """Raise UsageError if an option of diffusion models is passed for another one."""
    if entry.family != "diffusion" and (guidance is not None or timesteps is not None):
        given = "guidance" if guidance is not None else "timesteps"
        raise UsageError(f"{entry.name} is no diffusion model: {given} can have no effect on it.")


def check_numbers(limit: int | None, batch_size: int, seed: int, workers: int | None) -> None:
    ranges = (("limit", limit, 1), ("batch_size", batch_size, 1), ("workers", workers, 0), ("seed", seed, -_MOST - 1))
    for option, value, least in ranges:
        if value is not None and not least <= value <= _MOST:
            raise UsageError(f"{option} is {value}; it has to be between {least} and {_MOST}.")


def check_paths(weights: str | Path, data: str | Path | None) -> None:
    """Raise UsageError if a path is empty, DataError if there is no data."""
    for option, path in (("weights", weights), ("data", data)):
        if path == "":
            raise UsageError(f"{option} is an empty path. Name a file or a folder, or leave it out.")
    if data is not None and not Path(data).exists():
        raise DataError(f"There is no file or folder {str(data)!r} to read data from.")


def check_device_map(device_map: str | None, device: str) -> None:
    """Raise UsageError if a network cannot be spread like that, ModelError if accelerate is missing."""
    if device_map is None:
        return
    if device_map != "auto":
        raise UsageError(unknown("device map", device_map, ["auto"]))
    if device != "auto":
        raise UsageError(
            f"A device map decides where the network is: leave --device {device} or --device-map auto out."
        )
    if not Process.current().alone:
        raise UsageError("Several processes cannot spread a network over the same devices: leave --device-map out.")
    if importlib.util.find_spec("accelerate") is None:
        raise ModelError("--device-map auto needs accelerate. Install it: pip install 'accelerate>=1.2'.")


def failure(entry: ModelEntry, error: BaseException) -> ModelError:
    """Return the first cause of a library's error; transformers imports any torchaudio that is installed."""
    while error.__cause__ is not None:
        error = error.__cause__
    missing = [library for library in _REMEDIES if library in str(error).lower()]
    library = next(iter(missing), "torchaudio" if entry.family == "speech" else "")
    return ModelError(f"{entry.name} cannot be loaded: {first_line(error)}.{_REMEDIES.get(library, '')}")
