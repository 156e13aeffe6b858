"""Images, images with texts, and recordings, prepared by a model's processor; code that comes with it does not run."""

from __future__ import annotations

import bisect
import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor, nn

from normscope.errors import DataError, ModelError, count
from normscope.inputs.batch import Batch
from normscope.inputs.loaded_model import Inputs, LoadOptions
from normscope.inputs.previews import Normalized
from normscope.models.inputs.audio import SUFFIXES, AudioFormat, read, utterances
from normscope.models.inputs.dataset import Content, Files, InMemory, text_beside
from normscope.models.inputs.images import crops_of_photographs, image_inputs, read_image, suffixes
from normscope.models.inputs.text import LONGEST, check_tokens, lines_of_page, words_of
from normscope.models.weights.repository import Repository, refuse_code

Automatic = Literal["AutoProcessor", "AutoImageProcessor", "AutoFeatureExtractor"]

_CONFIGS = ("processor_config.json", "preprocessor_config.json")
# Further files of a whole processor; each is fetched, so that all come from one commit.
_FURTHER = (
    "tokenizer_config.json",
    "tokenizer.json",
    "special_tokens_map.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
_TEMPLATE = "chat_template.jinja"
_LENGTHS = "_get_feat_extract_output_lengths"  # a network's function from samples to frames
_READS = {"AutoImageProcessor": "image", "AutoFeatureExtractor": "recording", "AutoProcessor": "image with a text"}


def has_processor(repository: Repository) -> bool:
    """True if a folder or a repository contains the configuration of a processor."""
    return any(repository.file(filename) is not None for filename in _CONFIGS)


def load_processor(library: Any, name: str, repository: Repository, automatic: Automatic) -> Any:
    """Return the processor beside a model, or a part of it, by the class ``automatic`` of transformers.

    ModelError if there is none, it cannot be loaded, or it asks for code of its own.
    """
    whole = automatic == "AutoProcessor"
    if not has_processor(repository):
        raise ModelError(
            f"{repository.name!r} contains no {_CONFIGS[1]} and no {_CONFIGS[0]}, so that no {_READS[automatic]} can "
            f"be made ready for {name}. Save the processor beside the model: processor.save_pretrained(DIR)."
        )
    filenames = (*_CONFIGS, *(_FURTHER if whole else ()))
    for filename in filenames:
        refuse_code(name, filename, repository.json(filename))
    if whole:
        repository.file(_TEMPLATE)
    return repository.read_by(getattr(library, automatic), f"The processor of {name} cannot be loaded")


def arguments(processed: Mapping[str, Any], module: nn.Module) -> dict[str, Tensor]:
    """Return what of a processor's output the network takes, by name."""
    taken = inspect.signature(module.forward).parameters
    tensors = {name: value for name, value in processed.items() if name in taken and isinstance(value, Tensor)}
    if "pixel_attention_mask" in tensors and tensors["pixel_values"].ndim == 3:  # a row of patches, padded behind
        patches = int(tensors["pixel_attention_mask"].sum())
        tensors |= {name: tensors[name][:, :patches] for name in ("pixel_values", "pixel_attention_mask")}
    return tensors


def masks(config: Any) -> bool:
    """True if a network without a head masks patches at random, as in its training."""
    return bool(config.model_type == "vit_mae")


def processed_images(processor: Any, config: Any, module: nn.Module, options: LoadOptions) -> Inputs:
    """Return the images at ``options.data``, or crops of photographs, as an image processor makes them."""
    pads = getattr(processor, "do_pad", False) and getattr(processor, "pad_size", None)
    remarks = ("padded to squares, and what pads them counts",) if pads else ()

    def prepared(image: Image.Image) -> Batch:
        processed = processor(images=image, return_tensors="pt")
        kwargs = arguments(processed, module)
        mask = processed.get("pixel_mask")
        if mask is not None and not bool(mask.all()):
            raise DataError("the model's processor pads it, and does not mark which tokens are padding")
        if masks(config):
            # A masked autoencoder sorts patches by this noise: integers, as half precision has ties.
            size = config.patch_size
            sides = (size, size) if isinstance(size, int) else size
            rows, columns = (n // side for n, side in zip(kwargs["pixel_values"].shape[-2:], sides, strict=True))
            kwargs["noise"] = torch.arange(rows * columns)[None]
        return Batch(kwargs=kwargs)

    return image_inputs(prepared, options, remarks=remarks, normalized_by=_normalized_by(processor))


def _normalized_by(processor: Any) -> Normalized | None:
    """Return the mean and standard deviation of pixels from 0 to 1; None where the processor makes no such pixels."""
    rescales = getattr(processor, "do_rescale", False) and abs(getattr(processor, "rescale_factor", 0) * 255 - 1) < 1e-6
    if not rescales:
        return None
    if not getattr(processor, "do_normalize", False):
        return (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    return tuple(processor.image_mean), tuple(processor.image_std)


def images_with_texts(processor: Any, config: Any, module: nn.Module, options: LoadOptions) -> Inputs:
    """Return images with texts for a network that encodes them separately: CLIP, SigLIP.

    Texts are cut at what the network reads. Only where it was trained on padded texts are they padded, and the padding
    is no data.
    """
    text_config = config.get_text_config()
    tokenizer = processor.tokenizer
    longest = min(LONGEST, text_config.max_position_embeddings, tokenizer.model_max_length)
    padding = "max_length" if "siglip" in config.model_type else False  # as the library's own pipeline has it
    tokenizing = {"padding": padding, "truncation": True, "max_length": longest}
    text_encoder = next(
        (name for name, node in module.named_modules() if type(getattr(node, "config", None)) is type(text_config)), ""
    )

    def prepared(image: Image.Image, text: str) -> Content:
        kwargs = arguments(processor(images=image, text=[text], return_tensors="pt", **tokenizing), module)
        check_tokens(kwargs["input_ids"].flatten().tolist(), text_config.vocab_size)
        mask = tokenizer([text], return_tensors="pt", return_attention_mask=True, **tokenizing)["attention_mask"].bool()
        if bool(mask.all()):
            kwargs.pop("attention_mask", None)
        within = {} if bool(mask.all()) else {text_encoder: mask}
        cut = len(tokenizer(text, verbose=False)["input_ids"]) > longest
        return Batch(kwargs=kwargs, valid_within=within), cut

    return _pairs(prepared, processor, options, cut_to=f"{longest} tokens")


def prompts(processor: Any, config: Any, module: nn.Module, options: LoadOptions) -> Inputs:
    """Return images with texts as one prompt, for a network that reads an image as tokens among others: LLaVA, Qwen-VL.

    The prompt is what the processor's chat template makes of one image and one text, or the image's token before the
    text where there is no template. One prompt a batch: images may be of as many tokens as they have patches.
    """
    tokenizer = processor.tokenizer
    token = getattr(processor, "image_token", None) or getattr(tokenizer, "image_token", None)

    def prompt(text: str) -> str:
        if getattr(processor, "chat_template", None):
            content = [{"type": "image"}, {"type": "text", "text": text}]
            messages = [{"role": "user", "content": content}]
            return str(processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        return f"{token}\n{text}" if token else text

    def prepared(image: Image.Image, text: str) -> Content:
        tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        cut = len(tokens) > LONGEST
        prompted = prompt(tokenizer.decode(tokens[:LONGEST]) if cut else text)
        kwargs = arguments(processor(images=[image], text=[prompted], return_tensors="pt"), module)
        check_tokens(kwargs["input_ids"].flatten().tolist(), config.get_text_config().vocab_size)
        return Batch(kwargs=kwargs | {"use_cache": False}), cut

    return _pairs(prepared, processor, options, cut_to=f"{LONGEST} tokens", one_by_one=True)


def _pairs(
    prepared: Callable[[Image.Image, str], Content], processor: Any, options: LoadOptions, **described: Any
) -> Inputs:
    """Return the images at ``options.data``, each with the text file of its name; or crops with lines of the page.

    ``described`` are keyword arguments of :class:`InputDataset`.
    """
    described["normalized_by"] = _normalized_by(getattr(processor, "image_processor", None))
    described["words"] = partial(words_of, processor.tokenizer)
    if options.data is None:
        crops, samples, total = crops_of_photographs("RGB", options)
        pairs = list(map(prepared, crops, lines_of_page(len(crops))))
        return InMemory(pairs, samples, f"{total}, each with a line of normscope's page", options, **described)

    def read_pair(path: Path) -> Content:
        text = text_beside(path)
        if not text:
            raise DataError(f"there is no text in {path.with_suffix('.txt').name} beside it")
        return prepared(read_image(path, "RGB"), text)

    described["remarks"] = ("each with the text in NAME.txt",)
    return Files("image", suffixes(), read_pair, options, beside=".txt", **described)


def processed_recordings(
    extractor: Any, tokenizer: Any, config: Any, module: nn.Module, options: LoadOptions
) -> Inputs:
    """Return the recordings at ``options.data``, or the synthetic utterances, as a feature extractor makes them.

    One recording a batch: padding would enter the statistics of norms along time. A decoder reads the text file of the
    same name; ``tokenizer`` is None if the network has no decoder.
    """
    processor = RecordingProcessor(extractor, tokenizer, module, config)
    audio_format, has_decoder = processor.audio_format, tokenizer is not None
    silence = (f"silence in front, up to {processor.longest}, counts",) if processor.pads_in_front else ()
    described: dict[str, Any] = {
        "one_by_one": True,
        "cut_to": processor.longest,
        "words": partial(words_of, tokenizer) if has_decoder else None,
    }
    if options.data is None:
        samples, waveforms, transcripts, total = utterances(audio_format)
        of = ", ".join((total, *(("each with its transcript",) if has_decoder else ()), *silence))
        return InMemory(list(map(processor, waveforms, transcripts)), samples, of, options, **described)
    return Files(
        "recording",
        SUFFIXES,
        lambda path: processor(read(path, audio_format), text_beside(path) if has_decoder else None),
        options,
        beside=".txt" if has_decoder else "",
        remarks=(("the decoder reads NAME.txt, or without one the start alone",) if has_decoder else ()) + silence,
        **described,
    )


@dataclass(frozen=True)
class RecordingProcessor:
    """Conversion of recordings to batches of one, by a feature extractor and the tokenizer of a decoder, if any."""

    extractor: Any
    tokenizer: Any
    module: Any
    config: Any

    @property
    def audio_format(self) -> AudioFormat:
        """Return the rate of the recordings, and the fewest samples that make one frame."""
        rate = self.extractor.sampling_rate
        if self.module.main_input_name != "input_values" or not hasattr(self.module, _LENGTHS):
            return AudioFormat(rate, shortest=1)
        return AudioFormat(rate, shortest=1 + bisect.bisect_left(range(1, rate), 1, key=self._n_frames))

    @property
    def longest(self) -> str:
        """Describe the part of a long recording that reaches the network; empty for all of it."""
        if self._has_patches:
            return count(self.extractor.max_length, "frame")
        samples = getattr(self.extractor, "n_samples", None)
        return f"{samples / self.extractor.sampling_rate:g} s" if samples else ""

    @property
    def pads_in_front(self) -> bool:
        """True if silence precedes the end of a recording, as in Smart Turn's training: all of it is data."""
        return hasattr(self.extractor, "n_samples") and self.extractor.padding_side == "left"

    def __call__(self, waveform: Tensor, transcript: str | None) -> Content:
        """Process one recording, float32 ``(samples,)``; without a transcript a decoder reads its start alone."""
        features = self._extracted(self.extractor, waveform)
        without_mask = {name: value for name, value in features.items() if name != "attention_mask"}
        kwargs: dict[str, Any] = {**arguments(without_mask, self.module)}
        mask = features.get("attention_mask")
        cut = len(waveform) > getattr(self.extractor, "n_samples", len(waveform))
        valid = None
        if self._has_patches:
            valid, cut = self._valid_patches(waveform)
        elif mask is not None and not bool(mask.all()):
            valid = self._valid_frames(mask)
            if self.tokenizer is None and "attention_mask" in inspect.signature(self.module.forward).parameters:
                kwargs["attention_mask"] = mask
        if self.tokenizer is None:
            return Batch(kwargs=kwargs, valid=valid), cut
        kwargs |= {"decoder_input_ids": self._decoder_ids(transcript), "use_cache": False}
        encoder = self.module.get_encoder()
        path = next(name for name, child in self.module.named_modules() if child is encoder)
        return Batch(kwargs=kwargs, valid_within={} if valid is None else {path: valid}), cut

    def _extracted(self, extractor: Any, waveform: Tensor) -> Any:
        options = {"sampling_rate": extractor.sampling_rate, "return_tensors": "pt", "return_attention_mask": True}
        if self.pads_in_front:
            end = waveform[-extractor.n_samples :]
            waveform = nn.functional.pad(end, (extractor.n_samples - len(end), 0))
            options["do_normalize"] = getattr(extractor, "do_normalize", False)
        return extractor(waveform.numpy(), **options)

    def _n_frames(self, length: int) -> int:
        return int(getattr(self.module, _LENGTHS)(torch.tensor(length)))

    def _valid_frames(self, mask: Tensor) -> Tensor:
        """Mark the network's frames that are data: it has fewer than the extractor, by its own function."""
        if not hasattr(self.module, _LENGTHS):
            return mask.bool()
        return torch.arange(self._n_frames(mask.shape[1]))[None] < self._n_frames(int(mask.sum()))

    @property
    def _has_patches(self) -> bool:
        """True for patches of a spectrogram of fixed length, as of AST, whose extractor returns no mask."""
        return hasattr(self.config, "time_stride") and hasattr(self.extractor, "max_length")

    def _valid_patches(self, waveform: Tensor) -> tuple[Tensor, bool]:
        """Mark the tokens that see part of the recording, bool ``(1, tokens)``, and report truncation."""
        longer = copy.copy(self.extractor)
        longer.max_length += 1
        rows = self._extracted(longer, waveform)["input_values"][0]
        silence = torch.zeros(1, dtype=rows.dtype)
        padding = longer.normalize(silence.numpy()).item() if longer.do_normalize else 0.0
        length = int((rows != padding).any(1).nonzero().max()) + 1
        network = getattr(self.module, self.module.base_model_prefix, self.module)
        n_mel, n_time = network.embeddings.get_shape(self.config)
        data = torch.arange(n_time) * self.config.time_stride < length
        n_special = network.embeddings.position_embeddings.shape[1] - n_mel * n_time
        valid = torch.cat([torch.ones(n_special, dtype=torch.bool), data.repeat(n_mel)])
        return valid[None], length > self.extractor.max_length

    def _decoder_ids(self, transcript: str | None) -> Tensor:
        """Return what the decoder reads, int64 ``(1, tokens)``: its start, then the transcript without its end."""
        start = self.config.decoder_start_token_id
        tokens = self.tokenizer(transcript or "", verbose=False)["input_ids"]
        tokens = [start, *(tokens[1:] if tokens[:1] == [start] else tokens)]
        if len(tokens) > 1 and tokens[-1] == self.tokenizer.eos_token_id:
            tokens.pop()
        longest = getattr(self.config, "max_target_positions", len(tokens))
        if len(tokens) > longest:
            raise DataError(f"its transcript has {len(tokens):,} tokens, and the model writes {longest:,} at most")
        check_tokens(tokens, self.config.vocab_size, "its transcript")
        return torch.tensor([tokens])
