"""Images, and images with texts, prepared by a model's processor; code that comes with it is not run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor, nn

from normscope.errors import DataError, ModelError
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.loaded_model import Inputs, LoadOptions
from normscope.inputs.previews import Normalized
from normscope.models.inputs.images import Preprocessing, crops_of_photograph, image_inputs, read_image, suffixes
from normscope.models.inputs.numbered_inputs import FileKind, Prepared, files_or, text_beside
from normscope.models.inputs.text import LONGEST, check_tokens, lines_of_page, words_of
from normscope.models.weights import downloads
from normscope.models.weights.repository import Repository, damage_named, refuse_code

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
    """True if a folder or a repository contains the configuration of a processor."""
    return any(repository.file(filename) is not None for filename in _OWN)


def load_processor(library: Any, name: str, repository: Repository, automatic: Automatic) -> Any:
    """Return the processor beside a model, or a part of it, found by the class ``automatic`` of transformers.

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
    with damage_named(*paths):
        try:
            return getattr(library, automatic).from_pretrained(
                repository.name, trust_remote_code=False, **repository.where()
            )
        except Exception as error:  # of any processor, and of what it imports
            raise ModelError(f"The processor of {name} cannot be loaded: {downloads.first_line(error)}.") from error


def arguments(made: Mapping[str, Any], module: nn.Module) -> dict[str, Tensor]:
    """Return what of a processor's output the network takes, by name."""
    taken = inspect.signature(module.forward).parameters
    found = {name: value for name, value in made.items() if name in taken and isinstance(value, Tensor)}
    if "pixel_attention_mask" in found and found["pixel_values"].ndim == 3:  # a row of patches, padded behind
        patches = int(found["pixel_attention_mask"].sum())
        found |= {name: found[name][:, :patches] for name in ("pixel_values", "pixel_attention_mask")}
    return found


def masks(config: Any) -> bool:
    """True if a network without a head masks patches at random, as in its training."""
    masked: bool = config.model_type == "vit_mae"
    return masked


def processed_images(processor: Any, module: nn.Module, config: Any, options: LoadOptions) -> Inputs:
    """Return the images at ``options.data``, or crops of the photograph, as an image processor makes them.

    Raises:
        DataError: if there is no image to be found.
    """
    pads = getattr(processor, "do_pad", False) and getattr(processor, "pad_size", None)
    remarks = ("padded to squares, and what pads them counts",) if pads else ()

    def prepared(image: Image.Image) -> Prepared:
        made = processor(images=image, return_tensors="pt")
        kwargs = arguments(made, module)
        mask = made.get("pixel_mask")
        if mask is not None and not bool(mask.all()):
            raise DataError("the model's processor pads it, and which tokens are padding cannot be told")
        if masks(config):
            kwargs["noise"] = _in_order(kwargs["pixel_values"], config)
        return Prepared(Batch(kwargs=kwargs))

    return image_inputs(Preprocessing("RGB", prepared, remarks, _normalized_by(processor)), options)


def _normalized_by(processor: Any) -> Normalized | None:
    """Return the mean and standard deviation of pixels from 0 to 1; None where the processor makes no such pixels."""
    rescales = getattr(processor, "do_rescale", False) and abs(getattr(processor, "rescale_factor", 0) * 255 - 1) < 1e-6
    if not rescales:
        return None
    if not getattr(processor, "do_normalize", False):
        return (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    return tuple(processor.image_mean), tuple(processor.image_std)


def _in_order(pixels: Tensor, config: Any) -> Tensor:
    """Number the patches, by which a masked autoencoder sorts them: int64, as half a dtype would hold ties."""
    size = config.patch_size
    height, width = (size, size) if isinstance(size, int) else size
    patches = (pixels.shape[-2] // height) * (pixels.shape[-1] // width)
    return torch.arange(patches)[None]


def images_with_texts(processor: Any, module: nn.Module, config: Any, options: LoadOptions) -> Inputs:
    """Return images with texts for a network that looks at both apart: CLIP, SigLIP.

    Texts are cut at what the network reads. Only where it was trained on padded texts are they padded, and the padding
    is no data.

    Raises:
        DataError: if there is no image to be found.
    """
    text_config = config.get_text_config()
    tokenizer = processor.tokenizer
    longest = min(LONGEST, text_config.max_position_embeddings, tokenizer.model_max_length)
    padding = "max_length" if "siglip" in config.model_type else False  # as the library's own pipeline has it
    given = {"padding": padding, "truncation": True, "max_length": longest}
    reading = next(
        (name for name, part in module.named_modules() if type(getattr(part, "config", None)) is type(text_config)), ""
    )

    def prepared(image: Image.Image, text: str) -> Prepared:
        kwargs = arguments(processor(images=image, text=[text], return_tensors="pt", **given), module)
        check_tokens(kwargs["input_ids"].flatten().tolist(), text_config.vocab_size)
        mask = tokenizer([text], return_tensors="pt", return_attention_mask=True, **given)["attention_mask"].bool()
        if bool(mask.all()):
            kwargs.pop("attention_mask", None)
        within = {} if bool(mask.all()) else {reading: mask}
        cut = len(tokenizer(text, verbose=False)["input_ids"]) > longest
        return Prepared(Batch(kwargs=kwargs, valid_within=within), cut)

    return _pairs(prepared, processor, options, cut_to=f"{longest} tokens")


def prompts(processor: Any, module: nn.Module, config: Any, options: LoadOptions) -> Inputs:
    """Return images with texts as one prompt, for a network that reads an image as tokens among others: LLaVA, Qwen-VL.

    The prompt is what the processor's chat template makes of one image and one text, or the image's token before the
    text where there is no template. One prompt a batch: images may be of as many tokens as they have patches.

    Raises:
        DataError: if there is no image to be found.
    """
    tokenizer = processor.tokenizer
    token = getattr(processor, "image_token", None) or getattr(tokenizer, "image_token", None)

    def prompt(text: str) -> str:
        if getattr(processor, "chat_template", None):
            content = [{"type": "image"}, {"type": "text", "text": text}]
            whole: str = processor.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
            )
            return whole
        return f"{token}\n{text}" if token else text

    def prepared(image: Image.Image, text: str) -> Prepared:
        tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        cut = len(tokens) > LONGEST
        asked = prompt(tokenizer.decode(tokens[:LONGEST]) if cut else text)
        kwargs = arguments(processor(images=[image], text=[asked], return_tensors="pt"), module)
        check_tokens(kwargs["input_ids"].flatten().tolist(), config.get_text_config().vocab_size)
        return Prepared(Batch(kwargs=kwargs | {"use_cache": False}), cut)

    return _pairs(prepared, processor, options, cut_to=f"{LONGEST} tokens", one_by_one=True)


def _pairs(
    prepared: Callable[[Image.Image, str], Prepared],
    processor: Any,
    options: LoadOptions,
    *,
    cut_to: str,
    one_by_one: bool = False,
) -> Inputs:
    """Return the images at ``options.data``, each with the text file of its name; or crops with lines of the page."""

    def with_lines() -> tuple[list[Prepared], list[Sample], str]:
        crops, samples, total = crops_of_photograph("RGB", options)
        made = [prepared(*pair) for pair in zip(crops, lines_of_page(len(crops)), strict=True)]
        return made, samples, f"{total}, each with a line of normscope's page"

    def read(path: Path) -> Prepared:
        text = text_beside(path)
        if not text:
            raise DataError(f"there is no text in {path.with_suffix('.txt').name} beside it")
        return prepared(read_image(path, "RGB"), text)

    return files_or(
        with_lines,
        FileKind("image", suffixes(), read, cut_to, ".txt", remarks=("each with the text in NAME.txt",)),
        options,
        one_by_one=one_by_one,
        normalized_by=_normalized_by(getattr(processor, "image_processor", None)),
        words=partial(words_of, processor.tokenizer),
    )
