"""Models of transformers that read, see or hear, without running code that comes with the weights."""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normscope.errors import ModelError, NormscopeError, UsageError, first_few, first_line
from normscope.inputs.batch import Batch
from normscope.inputs.loaded_model import Inputs, Kind, LoadedModel, LoadOptions, Outputs, Provenance, Task
from normscope.models.inputs.images import class_task, suffixes
from normscope.models.inputs.processors import (
    has_processor,
    images_with_texts,
    load_processor,
    masks,
    processed_images,
    processed_recordings,
    prompts,
)
from normscope.models.inputs.text import SentencePairs, Texts, Tokenization, load_tokenizer, pairs_or_texts
from normscope.models.weights.checkpoints import (
    dtypes_by_name,
    dtypes_of_files,
    placed,
    provenance_of_file,
    read_state_dict,
    with_dtypes,
    with_weights,
)
from normscope.models.weights.devices import LARGE, check_room, offload_folder, quiet
from normscope.models.weights.repository import NotFetchedError, Repository, refuse_code

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

# The outputs of a head, and the library's tasks for which it is.
HEADS: dict[Kind, tuple[str, ...]] = {
    "tokens": (*_READING, *_SEEING_AND_READING, "SPEECH_SEQ_2_SEQ"),
    "classes": ("IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION"),
    "frames": ("CTC",),
}
_PIXELS = {"pixel_values", "pixel_attention_mask", "spatial_shapes"}  # which a processor makes
_WAVES = ("input_values", "input_features")  # what recordings are called, as waveforms and as spectra


def is_for(library: Any, kind: str, tasks: Iterable[str]) -> bool:
    """True if a class of transformers, by its name, is for one of the library's tasks."""
    automatic = library.models.auto.modeling_auto
    for task in tasks:
        for names in getattr(automatic, f"MODEL_FOR_{task}_MAPPING_NAMES", {}).values():
            if kind in (names if isinstance(names, (tuple, list)) else (names,)):
                return True
    return False


def has_head(library: Any, kind: str) -> bool:
    """True if a class of transformers, by its name, has a head whose output can be read."""
    return any(is_for(library, kind, tasks) for tasks in HEADS.values())


def taken_by(library: Any, name: str, repository: Repository, kind: Any, data: str | None) -> Takes:
    """Return the kind of inputs of ``kind``, a class of transformers; ModelError if there is none for it.

    A network for texts and images gets texts alone if ``data`` has no images, or the repository no processor.
    """
    modalities = {kind.input_modalities} if isinstance(kind.input_modalities, str) else {*kind.input_modalities}
    parameters = [p for p in inspect.signature(kind.forward).parameters.values() if p.kind is not p.VAR_KEYWORD]
    names = {p.name for p in parameters}
    needed = {p.name for p in parameters if p.default is p.empty} - {"self"}
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
    takes = " and ".join([f"{main} ({' and '.join(sorted(modalities))})", *sorted(needed - {main} - _PIXELS)])
    raise ModelError(
        f"{name} is a {kind.__name__}, which takes {takes}: texts, images, recordings, or images with texts are not "
        "enough. Make it and its inputs in a function of yours, and name that: py:FILE:FACTORY."
    )


def _may_hold_images(data: str | None) -> bool:
    """True if the user's data contain an image; without any data there is the photograph."""
    if data is None:
        return True
    path = Path(data)
    return any(file.suffix.lower() in suffixes() for file in ([path] if path.is_file() else path.rglob("*")))


def _writes(network: Any) -> bool:
    """True if a network, or its class, has a decoder beside its audio encoder."""
    return "decoder_input_ids" in inspect.signature(network.forward).parameters


def readers_of(
    library: Any, name: str, repository: Repository, kind: Any, takes: Takes, tokenizer: Callable[[], Any]
) -> tuple[Any, Any]:
    """Return the processor and the tokenizer that make inputs of data, each None if unneeded; load them first."""
    processor = partial(load_processor, library, name, repository)
    match takes:
        case "texts":
            return None, tokenizer()
        case "images":
            return processor("AutoImageProcessor"), None
        case "recordings":
            return processor("AutoFeatureExtractor"), tokenizer() if _writes(kind) else None
        case _:
            tokenizer()  # which reports better what is wrong with it
            return processor("AutoProcessor"), None


def inputs_of(
    library: Any, takes: Takes, processor: Any, tokenizer: Any, module: nn.Module, config: Any, options: LoadOptions
) -> Inputs:
    """Return the inputs of a network, as its own processor or tokenizer makes them of data."""
    match takes:
        case "texts":
            embeds = not has_head(library, type(module).__name__)
            return (pairs_or_texts if embeds else Texts)(Tokenization(module, config, tokenizer), options)
        case "images":
            return processed_images(processor, module, config, options)
        case "recordings":
            return processed_recordings(processor, tokenizer, module, config, options)
        case "images with texts":
            return images_with_texts(processor, module, config, options)
        case "prompts":
            return prompts(processor, module, config, options)


def both_embeddings(result: Any, batch: Batch) -> Tensor:
    """Return the embeddings of each image and its text, ``(samples, 2 · features)``; ModelError if there are none.

    >>> both_embeddings({"image_embeds": torch.zeros(3, 8), "text_embeds": torch.ones(3, 8)}, Batch()).shape
    torch.Size([3, 16])
    """
    if not {"image_embeds", "text_embeds"} <= {*result}:
        raise ModelError(f"The model returned {', '.join(result)}, and no embeddings of images and texts to compare.")
    return torch.cat([result["image_embeds"], result["text_embeds"]], dim=-1)


def outputs_of(library: Any, module: nn.Module, takes: Takes) -> Outputs:
    """Return the reader of the outputs: by the head, if it is a supported one."""
    if takes == "images with texts":
        return Outputs("tensor", both_embeddings)
    for outputs, tasks in HEADS.items():
        if is_for(library, type(module).__name__, tasks):
            return Outputs(outputs)
    of_frames = takes == "recordings" and hasattr(module, "_get_feat_extract_output_lengths") and not _writes(module)
    return Outputs("frames" if of_frames else "tensor")


logger = logging.getLogger(__name__)

_OF_PROMPTS = ("sam", "sam_hq")  # whose vision encoder is a model by itself, and needs no points or boxes
_BUILT_IN: dict[str, tuple[str, dict[str, Any]]] = {
    "openai-community/gpt2": ("gpt2", {"architectures": ["GPT2LMHeadModel"]}),
    "huggyllama/llama-7b": (
        "llama",
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "pad_token_id": 0,
            "tie_word_embeddings": False,
        },
    ),
}


def load_transformers(name: str, architecture: str, options: LoadOptions) -> LoadedModel:
    """Load a model of transformers, from a folder or a repository of the hub.

    The head is that of the configuration if it outputs tokens, classes or frames, and left out otherwise; SAM is
    reduced to its vision encoder. An encoder–decoder reads the same text on both sides. Weights are made in the
    requested dtype, except for the few tensors that transformers keeps in float32.
    """
    try:
        library: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ModelError(
            f"{name} is a model of transformers, which cannot be imported ({first_line(error)}). "
            "Install it: pip install 'transformers>=5.3'."
        ) from error
    folder = Path(architecture).expanduser()
    repository = Repository(str(folder) if folder.exists() else architecture)
    with _quiet(library):
        config = _config(library, name, repository, options)
        options, quantized = _as_stored(name, config, options)
        kind, config = _kind(library, name, config)
        takes = taken_by(library, name, repository, kind, options.data)
        read_tokenizer = partial(_tokenizer, library, name, repository, options)
        processor, tokenizer = readers_of(library, name, repository, kind, takes, read_tokenizer)
        network = _Network(library, name, kind, config, options, quantized).sized(repository)
        options = network.options
        if options.weights in ("pretrained", "random"):
            module, provenance = with_weights(
                name, options, build=network.fresh, pretrained=lambda: network.of(repository), on_gpu=True
            )
        else:  # transformers makes the module around the weights: there is no fresh one to fill
            module, provenance = network.of_file(Path(options.weights))
    try:
        inputs = inputs_of(library, takes, processor, tokenizer, module, config, options)
    except NormscopeError:
        raise
    except Exception as error:  # of any processor, at what is run by default
        raise ModelError(
            f"What lies beside {name} makes no inputs for it: {first_line(error)}. Name data with --data, or "
            "another folder."
        ) from error
    if not hasattr(module, "hf_device_map"):  # spread while it was read
        module = placed(module, options)
    outputs = outputs_of(library, module, takes)
    task = task_of(library, module, tokenizer, repository, inputs, outputs)
    return LoadedModel(name, module.eval(), inputs, provenance, outputs, family=FAMILIES[takes], task=task)


@contextmanager
def _quiet(library: Any) -> Iterator[None]:
    """Keep transformers' own reports and progress bars from the terminal: what matters in them is raised."""
    reports = library.utils.logging
    verbosity, bars = reports.get_verbosity(), reports.is_progress_bar_enabled()
    reports.set_verbosity(reports.CRITICAL)
    reports.disable_progress_bar()
    try:
        yield
    finally:
        reports.set_verbosity(verbosity)
        if bars:
            reports.enable_progress_bar()


def _config(library: Any, name: str, repository: Repository, options: LoadOptions) -> Any:
    if _built_in(repository) and options.weights != "pretrained":
        model_type, facts = _BUILT_IN[repository.name]
        return library.AutoConfig.for_model(model_type, **facts)
    content = repository.json("config.json")
    if content is None:
        raise ModelError(f"{repository.name!r} holds no config.json, and so no model of transformers.")
    if "auto_map" in content and content.get("model_type") in library.CONFIG_MAPPING:
        kind = content["model_type"]
        logger.warning("%s comes with code of its own, which is not run: transformers has %s itself.", name, kind)
        content = {key: value for key, value in content.items() if key != "auto_map"}
    refuse_code(name, "config.json", content)
    try:
        return library.AutoConfig.from_pretrained(repository.name, trust_remote_code=False, **repository.where())
    except Exception as error:  # of any configuration's checks
        what = f"transformers {library.__version__} cannot make a model of {name}'s config.json"
        raise repository.failure(what, error) from error


def _built_in(repository: Repository) -> bool:
    return repository.name in _BUILT_IN and not repository.is_folder


def _tokenizer(library: Any, name: str, repository: Repository, options: LoadOptions) -> Any:
    """Return the tokenizer; None for bytes where it cannot be had and the weights are random anyway."""
    try:
        return load_tokenizer(library, name, repository)
    except NotFetchedError:
        if _built_in(repository) and options.weights == "random":
            return None
        raise


def _as_stored(name: str, config: Any, options: LoadOptions) -> tuple[LoadOptions, str]:
    """Keep the dtype of quantized weights, and return their format; it is empty for others.

    Random weights and those of a file are not quantized, whatever the configuration says.
    """
    stored = getattr(config, "quantization_config", None)
    if not stored or options.weights != "pretrained":
        config.quantization_config = None
        return options, ""
    bits = 4 if stored.get("load_in_4bit") else 8 if stored.get("load_in_8bit") else stored.get("bits")
    of_torchao = stored.get("quant_type") or {}
    detail = of_torchao["default"]["_type"] if "default" in of_torchao else f"{bits}-bit" if bits else ""
    quantized = f"{stored.get('quant_method', 'bitsandbytes')} {detail}".strip()
    if options.dtype is not None and not options.default_dtype:
        raise UsageError(
            f"{name} is quantized by {quantized} and cannot be converted: leave --dtype out, or take "
            "the checkpoint that it was made from."
        )
    return replace(options, dtype=None), quantized


def _kind(library: Any, name: str, config: Any) -> tuple[Any, Any]:
    """Choose the class, with the head that the configuration names or without any, and its configuration."""
    named = (config.architectures or [""])[0]
    if has_head(library, named):
        return getattr(library, named), config
    try:
        mapped = library.models.auto.modeling_auto.MODEL_MAPPING[type(config)]
    except KeyError as error:
        raise ModelError(f"transformers {library.__version__} has no model for {type(config).__name__}.") from error
    classes = mapped if isinstance(mapped, (tuple, list)) else (mapped,)
    kind = next((each for each in classes if each.__name__ == named), classes[0])
    if named.endswith(("Encoder", "EncoderModel")):  # of an encoder–decoder, saved alone
        encoder = getattr(sys.modules[kind.__module__], named, None)
        kind = encoder if inspect.isclass(encoder) and issubclass(encoder, library.PreTrainedModel) else kind
    if config.model_type in _OF_PROMPTS:
        return _kind(library, name, config.vision_config)
    if masks(config):
        logger.warning("%s: its mask is left out (mask_ratio %g), and every patch is seen.", name, config.mask_ratio)
        config.mask_ratio = 0.0
    return kind, config


@dataclass(frozen=True)
class _Network:
    """A class of transformers and the configuration to make it with."""

    library: Any
    name: str
    kind: Any
    config: Any
    options: LoadOptions
    quantized: str = ""  # format of the weights

    def sized(self, repository: Repository) -> _Network:
        """Keep the stored dtype of large weights by default; report their size, and refuse them without room."""
        options = self.options
        with torch.device("meta"):
            draft = self.kind(copy.deepcopy(self.config), **self._without_pooler())
        parameters = sum(tensor.numel() for tensor in draft.parameters())
        if options.default_dtype and parameters >= LARGE:
            options = replace(options, dtype=None)
        stored = repository.weights() if options.dtype is None and options.weights == "pretrained" else []
        size = sum(file.stat().st_size for file in stored)  # less than its dtype's, where weights are quantized
        size = size or parameters * (options.dtype or self.config.dtype or torch.float32).itemsize
        check_room(self.name, parameters, size, options)
        return replace(self, options=options)

    def fresh(self) -> nn.Module:
        dtype = {} if self.options.dtype is None else {"dtype": self.options.dtype}
        module: nn.Module = self.kind._from_config(self.config, **dtype, **self._without_pooler())
        return module

    def of(self, repository: Repository) -> tuple[nn.Module, Provenance]:
        """Load the weights of a folder or a repository: the network's own, unless this class has no place for them."""
        files = repository.weights()
        of = f"{repository.name}{f', quantized by {self.quantized},' if self.quantized else ''}"
        what = f"The model of {of}"
        if self.options.device_map is None:
            # Libraries of quantized weights would choose a device themselves.
            place: dict[str, Any] = {"device_map": {"": self.options.device}} if self.quantized else {}
            module, report = self._loaded(repository, what, **repository.where(), **place)
        else:  # each part is read into its place, and the whole is nowhere
            with quiet(), offload_folder() as (folder, kept_by):
                spread = {"device_map": self.options.device_map, "offload_folder": folder}
                module, report = self._loaded(repository, what, **repository.where(), **spread)
                kept_by(module)
        if left_out := sorted(report["unexpected_keys"]):
            logger.warning("%s: %s has no place for %s.", self.name, self.kind.__name__, first_few(left_out))
        _check(report | {"unexpected_keys": []}, f"The weights of {of} do not fit {self.kind.__name__}")
        provenance = repository.provenance(files)
        if self.quantized:
            return module, replace(provenance, description=f"{provenance.description}, quantized by {self.quantized}")
        return module, _with_dtypes(provenance, dtypes_of_files(files), module)

    def of_file(self, path: Path) -> tuple[nn.Module, Provenance]:
        """Load the weights of a file, which has to hold those of this class and no others, except for a head's."""
        state_dict = read_state_dict(path)
        module, report = self._loaded(None, f"The weights file {str(path)!r}", state_dict=dict(state_dict))
        left_over = _left_over(report["unexpected_keys"], module, self.config)
        _check(
            report | {"unexpected_keys": left_over},
            f"The weights file {str(path)!r} does not fit {self.name}",
            _not_floating(state_dict, module),
        )
        return module, _with_dtypes(provenance_of_file(path), dtypes_by_name(state_dict.items()), module)

    def _loaded(self, source: Repository | None, what: str, **arguments: Any) -> tuple[nn.Module, dict[str, Any]]:
        """Return the module, and transformers' report on what did not fit."""
        try:
            module, report = self.kind.from_pretrained(
                None if source is None else source.name,
                config=self.config,
                dtype=self.options.dtype or "auto",  # that of the weights
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # the report names them, and they are refused
                output_loading_info=True,
                **self._without_pooler(),
                **arguments,
            )
        except Exception as error:  # of safetensors, of torch, of any model's own conversion
            what += f" does not load with transformers {self.library.__version__}"
            if self.quantized:  # most formats have a library of their own
                what += " (install what it names, or take the checkpoint that it was made from)"
            raise (source.failure(what, error) if source else ModelError(f"{what}: {first_line(error)}.")) from error
        return module, report

    def _without_pooler(self) -> dict[str, bool]:
        """Leave the pooling layer out where another class was saved than is loaded: not all of them have one."""
        takes_it = "add_pooling_layer" in inspect.signature(self.kind.__init__).parameters
        saved = self.config.architectures or []
        return {"add_pooling_layer": False} if takes_it and self.kind.__name__ not in saved else {}


def _with_dtypes(provenance: Provenance, dtypes: Mapping[str, torch.dtype], module: Any) -> Provenance:
    """Report converted dtypes; a network with a head has a prefix before the names of its parameters."""
    prefix = f"{module.base_model_prefix}."
    before, after = (
        {name.removeprefix(prefix): dtype for name, dtype in named.items()}
        for named in (dtypes, dtypes_by_name(module.named_parameters()))
    )
    return with_dtypes(provenance, before, after)


def _check(report: Mapping[str, Any], misfit: str, wrong: list[str] | None = None) -> None:
    """Refuse weights with missing, unexpected or misshapen tensors, which transformers reports."""
    misfits = list(wrong or [])
    misfits += [f"{key} is missing" for key in sorted(report["missing_keys"])]
    misfits += [f"{key} is not in the model" for key in sorted(report["unexpected_keys"])]
    misfits += [
        f"{key} is {tuple(shape)} and should be {tuple(expected)}"
        for key, shape, expected in sorted(report["mismatched_keys"])
    ]
    if misfits:
        raise ModelError(f"{misfit}: {first_few(misfits)}.")


def _left_over(keys: Iterable[str], module: Any, config: Any) -> list[str]:
    """Return the keys that belong nowhere; where a head was left out on purpose, those of a head do."""
    if type(module).__name__ in (config.architectures or []):
        return list(keys)
    parts = {name for name, _ in module.named_children()}
    return [key for key in keys if key.removeprefix(f"{module.base_model_prefix}.").partition(".")[0] in parts]


def _not_floating(state_dict: Mapping[str, Tensor], module: Any) -> list[str]:
    """Name tensors that are whole numbers, quantized for example, where the model's are not."""
    prefix = f"{module.base_model_prefix}."
    floating = {key.removeprefix(prefix) for key, value in module.state_dict().items() if value.is_floating_point()}
    return [
        f"{key} is {str(value.dtype).removeprefix('torch.')}"
        for key, value in state_dict.items()
        if not value.is_floating_point() and key.removeprefix(prefix) in floating
    ]


def task_of(
    library: Any, module: Any, tokenizer: Any, repository: Repository, inputs: Inputs, outputs: Outputs
) -> Task:
    """Return the task of a network, by its head; ``tokenizer`` is None where bytes are its tokens."""
    if module.main_input_name != "input_ids" or module.input_modalities not in ("text", ("text",)):
        if outputs.kind != "classes" or module.main_input_name != "pixel_values":
            return Task(untold="no labels are known of what it sees or hears (in Python, pass quality=)")
        names = module.config.id2label
        return class_task(inputs, module.config.num_labels, [names[number] for number in sorted(names)])
    automatic, kind = library.models.auto.modeling_auto, type(module).__name__
    if module.config.is_encoder_decoder:
        return Task(untold="an encoder–decoder is given the same text on both sides, where nothing is left to predict")
    if kind in automatic.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values():
        mask_id = getattr(tokenizer, "mask_token_id", None)
        if mask_id is None:
            return Task(untold="the tokenizer has no mask token to hide words behind")
        between = frozenset(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
        return Task("pseudo-perplexity", mask_id=mask_id, unmasked=between)
    if kind in automatic.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return Task("perplexity")
    if not isinstance(inputs, SentencePairs):
        return Task(
            untold="embeddings are judged by pairs of sentences, and there are none (name a .tsv or .csv file of "
            "sentence1, sentence2, score)"
        )
    return _embedding_task(repository)


_POOLINGS: dict[str, Literal["mean", "first", "last"]] = {
    "mean": "mean",
    "pooling_mode_mean_tokens": "mean",
    "cls": "first",
    "pooling_mode_cls_token": "first",
    "lasttoken": "last",
    "pooling_mode_lasttoken": "last",
}


def _embedding_task(repository: Repository) -> Task:
    """Return the pooling that sentence-transformers saved; the mean by default."""
    if repository.file("2_Dense/config.json") is not None:
        return Task(untold="its embeddings pass through a Dense layer of sentence-transformers, which is not run here")
    config = repository.json("1_Pooling/config.json") or {"pooling_mode": "mean"}
    chosen = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    mode = config.get("pooling_mode") or " and ".join(chosen)  # one word lately, a switch for each mode before
    if mode not in _POOLINGS:
        return Task(untold=f"its embeddings are pooled by {mode or 'nothing'}, which is not known here")
    return Task("spearman", pooling=_POOLINGS[mode])
