"""What the processor that lies beside a model of transformers makes of images: its files read, no code of them run."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor, nn

from normscope.errors import DataError, ModelError
from normscope.inputs.batch import Batch
from normscope.inputs.loaded_model import Inputs, LoadOptions
from normscope.models.inputs.file_inputs import Prepared
from normscope.models.inputs.images import Preprocessing, image_inputs
from normscope.models.weights import downloads
from normscope.models.weights.repository import Repository, refuse_code

Automatic = Literal["AutoProcessor", "AutoImageProcessor", "AutoFeatureExtractor"]

_OWN = ("processor_config.json", "preprocessor_config.json")
# What a whole processor may hold besides; each is fetched, so that all come from one commit.
_BESIDES = (
    "tokenizer_config.json",
    "tokenizer.json",
    "special_tokens_map.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
_TEMPLATE = "chat_template.jinja"
_READS = {"AutoImageProcessor": "image", "AutoFeatureExtractor": "recording", "AutoProcessor": "image with a text"}


def has_processor(repository: Repository) -> bool:
    """Whether a folder or a repository says how images or recordings are to be made ready."""
    return any(repository.file(filename) is not None for filename in _OWN)


def load_processor(library: Any, name: str, repository: Repository, automatic: Automatic) -> Any:
    """Return the processor that lies beside a model, or the part of it that is asked for.

    Args:
        library: the module ``transformers``.
        name: what errors call the model.
        repository: where the processor's files lie.
        automatic: the class of transformers that finds the processor's own.

    Raises:
        HubSilentError: if the hub cannot be asked for it.
        ModelError: if there is none, it cannot be loaded, or it asks for code of its own.
    """
    whole = automatic == "AutoProcessor"
    if not has_processor(repository):
        raise ModelError(
            f"{repository.name!r} holds no {_OWN[1]} and no {_OWN[0]}, so that no {_READS[automatic]} can be made "
            f"ready for {name}. Save the processor beside the model: processor.save_pretrained(DIR)."
        )
    filenames = (*_OWN, *(_BESIDES if whole else ()))
    for filename in filenames:
        refuse_code(name, filename, repository.json(filename))
    paths = [repository.file(filename) for filename in (*filenames, *([_TEMPLATE] if whole else ()))]
    with repository.damage_named(*paths):
        try:
            return getattr(library, automatic).from_pretrained(
                repository.name, trust_remote_code=False, **repository.where()
            )
        except Exception as error:  # of any processor, and of what it imports
            raise ModelError(f"The processor of {name} cannot be loaded: {downloads.first_line(error)}.") from error


def arguments(made: Mapping[str, Any], module: nn.Module) -> dict[str, Tensor]:
    """Return what of a processor's output the network takes, by name."""
    taken = inspect.signature(module.forward).parameters
    return {name: value for name, value in made.items() if name in taken and isinstance(value, Tensor)}


def processed_images(processor: Any, module: nn.Module, config: Any, options: LoadOptions) -> Inputs:
    """Return the images at ``options.data``, or crops of the photograph, as an image processor makes them.

    Raises:
        DataError: if there is no image to be found.
    """
    remarks = []
    if getattr(processor, "do_pad", False) and getattr(processor, "pad_size", None):
        remarks.append("padded to squares, and what pads them counts")
    if hasattr(config, "mask_ratio"):
        remarks.append("no patch is masked")

    def prepared(image: Image.Image) -> Prepared:
        made = processor(images=image, return_tensors="pt")
        kwargs = arguments(made, module)
        mask = made.get("pixel_mask")
        if mask is not None and not bool(mask.all()):
            raise DataError("the model's processor pads it, and which tokens are padding cannot be told")
        if hasattr(config, "mask_ratio"):
            kwargs["noise"] = _in_order(kwargs["pixel_values"], config)
        return Prepared(Batch(kwargs=kwargs))

    return image_inputs(Preprocessing("RGB", prepared, tuple(remarks)), options)


def _in_order(pixels: Tensor, config: Any) -> Tensor:
    """Number the patches, by which a masked autoencoder sorts them: int64, as half a dtype would hold ties."""
    size = config.patch_size
    height, width = (size, size) if isinstance(size, int) else size
    patches = (pixels.shape[-2] // height) * (pixels.shape[-1] // width)
    return torch.arange(patches)[None]
