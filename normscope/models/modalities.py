"""On what a class of transformers is run, what makes that of data, and how what it gives is read."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normscope.errors import ModelError
from normscope.inputs.batch import Batch
from normscope.inputs.loaded_model import Inputs, Kind, LoadOptions, Outputs
from normscope.models.inputs.images import suffixes
from normscope.models.inputs.processors import (
    has_processor,
    images_with_texts,
    load_processor,
    processed_images,
    prompts,
)
from normscope.models.inputs.sentence_pairs import pairs_or_texts
from normscope.models.inputs.text import text_inputs
from normscope.models.inputs.tokenizer import reading_of
from normscope.models.weights.repository import Repository

Takes = Literal["texts", "images", "recordings", "images with texts", "prompts"]

FAMILIES: dict[Takes, str] = {
    "texts": "language",
    "images": "vision",
    "recordings": "speech",
    "images with texts": "vision",
    "prompts": "language",
}
_READING = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM")
_SEEING_AND_READING = ("IMAGE_TEXT_TO_TEXT",)

# What a head gives, and for which of the library's tasks it is.
HEADS: dict[Kind, tuple[str, ...]] = {
    "tokens": (*_READING, *_SEEING_AND_READING, "SPEECH_SEQ_2_SEQ"),
    "classes": ("IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION"),
    "frames": ("CTC",),
}
_PIXELS = {"pixel_values", "pixel_attention_mask", "spatial_shapes"}  # all of which a processor gives
_WAVES = ("input_values", "input_features")  # what recordings are called, as waveforms and as spectra


def is_for(library: Any, kind: str, tasks: Iterable[str]) -> bool:
    """Return whether a class of transformers, by its name, is for one of the library's tasks."""
    automatic = library.models.auto.modeling_auto
    for task in tasks:
        for names in getattr(automatic, f"MODEL_FOR_{task}_MAPPING_NAMES", {}).values():
            if kind in (names if isinstance(names, (tuple, list)) else (names,)):
                return True
    return False


def has_head(library: Any, kind: str) -> bool:
    """Return whether a class of transformers, by its name, ends in what can be read."""
    return any(is_for(library, kind, tasks) for tasks in HEADS.values())


def taken_by(library: Any, name: str, repository: Repository, kind: Any, data: str | None) -> Takes:
    """Say on what a class of transformers is run.

    Args:
        library: the module ``transformers``.
        name: what errors call the model.
        repository: where the files of processors lie.
        kind: the class.
        data: path of the user's own. What reads texts and sees images is run on texts alone, where there are no images,
            or where it lies there without a processor.

    Raises:
        ModelError: if that is not to be had here.
        ImportError: if torchaudio is missing, which reads recordings.
    """
    modalities = {kind.input_modalities} if isinstance(kind.input_modalities, str) else {*kind.input_modalities}
    parameters = [one for one in inspect.signature(kind.forward).parameters.values() if one.kind is not one.VAR_KEYWORD]
    names = {one.name for one in parameters}
    needed = {one.name for one in parameters if one.default is one.empty} - {"self"}
    main = kind.main_input_name
    reads = main == "input_ids" and (modalities == {"text"} or is_for(library, kind.__name__, _READING))
    if main == "input_ids" and "image" in modalities and is_for(library, kind.__name__, _SEEING_AND_READING):
        alone = not _may_hold_images(data) or (reads and not has_processor(repository))
        return "texts" if alone else "prompts"
    if reads:
        return "texts"
    if modalities == {"image", "text"} and is_for(library, kind.__name__, ("ZERO_SHOT_IMAGE_CLASSIFICATION",)):
        return "images with texts"
    videos = library.models.auto.modeling_auto.MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES
    if main == "pixel_values" and modalities == {"image"} and needed <= _PIXELS:
        if kind.config_class.model_type not in videos:
            return "images"
        modalities = {"video"}
    if main in _WAVES and "audio" in modalities and needed <= {main} and "input_ids" not in names:
        import torchaudio  # noqa: F401 - reads recordings, and is missed before weights are loaded

        return "recordings"
    wanted = " and ".join([f"{main} ({' and '.join(sorted(modalities))})", *sorted(needed - {main} - _PIXELS)])
    raise ModelError(
        f"{name} is a {kind.__name__}, which takes {wanted}: texts, images, recordings, or images with texts are not "
        "enough. Make it and its inputs in a function of yours, and name that: py:FILE:FACTORY."
    )


def _may_hold_images(data: str | None) -> bool:
    """Whether there is an image among the user's own data; without any data there is the photograph."""
    if data is None:
        return True
    path = Path(data)
    return any(file.suffix.lower() in suffixes() for file in ([path] if path.is_file() else path.rglob("*")))


def _writes(network: Any) -> bool:
    """Whether a network, or its class, has a decoder beside what it hears with."""
    return "decoder_input_ids" in inspect.signature(network.forward).parameters


def readers_of(
    library: Any, name: str, repository: Repository, kind: Any, takes: Takes, tokenizer: Callable[[], Any]
) -> tuple[Any, ...]:
    """Return what makes inputs of data: a tokenizer, a processor, or both.

    Args:
        library: the module ``transformers``.
        name: what errors call the model.
        repository: where the files of processors lie.
        kind: the class.
        takes: on what it is run.
        tokenizer: loads it.

    Raises:
        ModelError: if something is missing, damaged, or asks for code of its own.
    """
    match takes:
        case "texts":
            return (tokenizer(),)
        case "images":
            return (load_processor(library, name, repository, "AutoImageProcessor"),)
        case "recordings":
            extractor = load_processor(library, name, repository, "AutoFeatureExtractor")
            return extractor, tokenizer() if _writes(kind) else None
        case "images with texts" | "prompts":
            tokenizer()  # which has sentences for what may be wrong with it
            return (load_processor(library, name, repository, "AutoProcessor"),)


def inputs_of(
    library: Any, takes: Takes, readers: tuple[Any, ...], module: nn.Module, config: Any, options: LoadOptions
) -> Inputs:
    """Return the inputs of a network, as its own ``readers`` make them of data.

    Raises:
        DataError: if there is nothing at ``options.data`` that the network takes.
    """
    match takes:
        case "texts":
            reading = reading_of(module, config, *readers)
            if has_head(library, type(module).__name__):
                return text_inputs(reading, options)
            return pairs_or_texts(reading, options)  # of which embeddings are made
        case "images":
            (processor,) = readers
            return processed_images(processor, module, config, options)
        case "recordings":
            from normscope.models.inputs.features import heard_inputs  # which needs torchaudio

            extractor, tokenizer = readers
            return heard_inputs(extractor, tokenizer, module, config, options)
        case "images with texts":
            (processor,) = readers
            return images_with_texts(processor, module, config, options)
        case "prompts":
            (processor,) = readers
            return prompts(processor, module, config, options)


def both_embeddings(result: Any, batch: Batch) -> Tensor:
    """Return what a network that looks at images and texts apart makes of each pair: ``(samples, 2 · features)``.

    Raises:
        ModelError: if it returned no such embeddings.

    >>> both_embeddings({"image_embeds": torch.zeros(3, 8), "text_embeds": torch.ones(3, 8)}, Batch()).shape
    torch.Size([3, 16])
    """
    if not {"image_embeds", "text_embeds"} <= {*result}:
        raise ModelError(f"The model returned {', '.join(result)}, and no embeddings of images and texts to compare.")
    return torch.cat([result["image_embeds"], result["text_embeds"]], dim=-1)


def outputs_of(library: Any, module: nn.Module, takes: Takes) -> Outputs:
    """Say how outputs are read: by the head, if it is one of those that are known."""
    if takes == "images with texts":
        return Outputs("tensor", both_embeddings)
    for outputs, tasks in HEADS.items():
        if is_for(library, type(module).__name__, tasks):
            return Outputs(outputs)
    of_frames = takes == "recordings" and hasattr(module, "_get_feat_extract_output_lengths") and not _writes(module)
    return Outputs("frames" if of_frames else "tensor")
