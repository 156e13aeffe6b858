"""Models of transformers that read, see or hear, without running code that comes with the weights."""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
import sys
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from normscope.errors import ModelError, NormscopeError, UsageError, first_few, first_line
from normscope.inputs.loaded_model import Inputs, Kind, LoadedModel, LoadOptions, Outputs, Provenance, Task
from normscope.models.inputs import processors
from normscope.models.inputs.images import class_task, suffixes
from normscope.models.inputs.text import SentencePairs, Texts, Tokenization, load_tokenizer, pairs_or_texts
from normscope.models.weights import checkpoints
from normscope.models.weights.devices import LARGE, check_room, quiet
from normscope.models.weights.repository import NotFetchedError, Repository, refuse_code

transformers: Any = importlib.import_module("transformers")  # whose types take mypy minutes
automatic: Any = importlib.import_module("transformers.models.auto.modeling_auto")
logger = logging.getLogger(__name__)

InputKind = Literal["texts", "images", "recordings", "images with texts", "prompts"]
FAMILIES: dict[InputKind, str] = {
    "texts": "language",
    "images": "vision",
    "recordings": "speech",
    "images with texts": "vision",
    "prompts": "language",
}
_TEXT = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM")
_IMAGE_AND_TEXT = ("IMAGE_TEXT_TO_TEXT",)
# The outputs of a head, and the library's tasks for which it is.
HEADS: dict[Kind, tuple[str, ...]] = {
    "tokens": (*_TEXT, *_IMAGE_AND_TEXT, "SPEECH_SEQ_2_SEQ"),
    "classes": ("IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION"),
    "frames": ("CTC",),
}
_PROMPTED = ("sam", "sam_hq")  # whose vision encoder is a model by itself, and needs no points or boxes
# The defaults of GPT2Config and LlamaConfig are those of these networks, except for what is here.
_BUILT_IN: dict[str, tuple[str, dict[str, Any]]] = {
    "openai-community/gpt2": ("gpt2", {"architectures": ["GPT2LMHeadModel"]}),
    "huggyllama/llama-7b": ("llama", {"architectures": ["LlamaForCausalLM"], "pad_token_id": 0}),
}
_POOLINGS: dict[str, Literal["mean", "first", "last"]] = {
    "mean": "mean",
    "pooling_mode_mean_tokens": "mean",
    "cls": "first",
    "pooling_mode_cls_token": "first",
    "lasttoken": "last",
    "pooling_mode_lasttoken": "last",
}


def load(name: str, architecture: str, options: LoadOptions) -> LoadedModel:
    """Load a model of transformers, from a folder or a repository of the hub.

    The head is that of the configuration if it outputs tokens, classes or frames, and left out otherwise; SAM is
    reduced to its vision encoder. An encoder–decoder reads the same text on both sides. Weights are made in the
    requested dtype, except for the few tensors that transformers keeps in float32.
    """
    folder = Path(architecture).expanduser()
    repository = Repository(str(folder) if folder.exists() else architecture)
    with _quiet():
        config = _config(name, repository, options)
        options, quantized = _stored_format(name, config, options)
        kind, config = _kind(name, config)
        input_kind = input_kind_of(name, repository, kind, options.data)
        tokenizer, inputs_of = _preprocessing(name, repository, kind, input_kind, config, options)
        network = _Network(name, kind, config, options, quantized).sized(repository)
        options = network.options
        with checkpoints.seeded(options.seed):
            match options.weights:
                case "pretrained":
                    module, provenance = network.of(repository)
                case "random":
                    module, provenance = network.fresh()
                case file:
                    module, provenance = network.from_file(Path(file))
    try:
        inputs = inputs_of(module, options)
    except NormscopeError:
        raise
    except Exception as error:  # of any processor, at what is run by default
        raise ModelError(
            f"What lies beside {name} makes no inputs for it: {first_line(error)}. Name data with --data, or "
            "another folder."
        ) from error
    if not hasattr(module, "hf_device_map"):  # spread while it was read
        module = checkpoints.placed(module, options)
    outputs = outputs_of(module, input_kind)
    task = task_of(module, tokenizer, repository, inputs, outputs)
    return LoadedModel(name, module.eval(), inputs, provenance, outputs, family=FAMILIES[input_kind], task=task)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' own reports and progress bars from the terminal: what matters in them is raised."""
    reports = transformers.utils.logging
    with ExitStack() as restored:
        restored.callback(reports.set_verbosity, reports.get_verbosity())
        if reports.is_progress_bar_enabled():
            restored.callback(reports.enable_progress_bar)
        reports.set_verbosity(reports.CRITICAL)
        reports.disable_progress_bar()
        yield


def _built_in(repository: Repository) -> bool:
    return repository.name in _BUILT_IN and not repository.is_folder


def _config(name: str, repository: Repository, options: LoadOptions) -> Any:
    if _built_in(repository) and options.weights != "pretrained":
        model_type, facts = _BUILT_IN[repository.name]
        return transformers.AutoConfig.for_model(model_type, **facts)
    content = repository.json("config.json")
    if content is None:
        raise ModelError(f"{repository.name!r} contains no config.json, and so no model of transformers.")
    if "auto_map" in content and content.get("model_type") in transformers.CONFIG_MAPPING:
        kind = content["model_type"]
        logger.warning("%s comes with code of its own, which is not run: transformers has %s itself.", name, kind)
        content = {key: value for key, value in content.items() if key != "auto_map"}
    refuse_code(name, "config.json", content)
    problem = f"transformers {transformers.__version__} cannot make a model of {name}'s config.json"
    return repository.read_by(transformers.AutoConfig, problem)


def _stored_format(name: str, config: Any, options: LoadOptions) -> tuple[LoadOptions, str]:
    """Keep the dtype of quantized weights, and return their format; it is empty for others.

    Random weights and those of a file are not quantized, whatever the configuration says.
    """
    stored = getattr(config, "quantization_config", None)
    if not stored or options.weights != "pretrained":
        config.quantization_config = None
        return options, ""
    bits = 4 if stored.get("load_in_4bit") else 8 if stored.get("load_in_8bit") else stored.get("bits")
    torchao_type = stored.get("quant_type") or {}
    detail = torchao_type["default"]["_type"] if "default" in torchao_type else f"{bits}-bit" if bits else ""
    quantized = f"{stored.get('quant_method', 'bitsandbytes')} {detail}".strip()
    if options.dtype is not None and not options.default_dtype:
        raise UsageError(
            f"{name} is quantized by {quantized} and cannot be converted: leave --dtype out, or take "
            "the checkpoint that it was made from."
        )
    return replace(options, dtype=None), quantized


def _kind(name: str, config: Any) -> tuple[Any, Any]:
    """Choose the class, with the head that the configuration names or without any, and its configuration."""
    named = (config.architectures or [""])[0]
    if head_of(named):
        return getattr(transformers, named), config
    try:
        mapped = automatic.MODEL_MAPPING[type(config)]
    except KeyError as error:
        raise ModelError(
            f"transformers {transformers.__version__} has no model for {type(config).__name__}."
        ) from error
    classes = mapped if isinstance(mapped, (tuple, list)) else (mapped,)
    kind = next((cls for cls in classes if cls.__name__ == named), classes[0])
    if named.endswith(("Encoder", "EncoderModel")):  # of an encoder–decoder, saved alone
        encoder = getattr(sys.modules[kind.__module__], named, None)
        kind = encoder if inspect.isclass(encoder) and issubclass(encoder, transformers.PreTrainedModel) else kind
    if config.model_type in _PROMPTED:
        return _kind(name, config.vision_config)
    if processors.masks(config):
        logger.warning("%s: its mask is left out (mask_ratio %g), and every patch is seen.", name, config.mask_ratio)
        config.mask_ratio = 0.0
    return kind, config


def is_for(kind: str, tasks: Collection[str]) -> bool:
    """True if a class of transformers, by its name, is for one of the library's tasks."""
    mappings = [getattr(automatic, f"MODEL_FOR_{task}_MAPPING_NAMES", {}) for task in tasks]
    names = [names for mapping in mappings for names in mapping.values()]  # of one class, or of several
    return any(kind == name if isinstance(name, str) else kind in name for name in names)


def head_of(kind: str) -> Kind | None:
    """Return the outputs of the head of a class of transformers, by its name; None without a supported head."""
    return next((outputs for outputs, tasks in HEADS.items() if is_for(kind, tasks)), None)


def input_kind_of(name: str, repository: Repository, kind: Any, data: str | None) -> InputKind:
    """Return the kind of inputs of ``kind``, a class of transformers; ModelError if there is none for it.

    A network for texts and images gets texts alone if ``data`` has no images, or the repository no processor.
    """
    modalities = {kind.input_modalities} if isinstance(kind.input_modalities, str) else {*kind.input_modalities}
    reads = modalities == {"text"} or is_for(kind.__name__, _TEXT)
    match kind.main_input_name:
        case "input_ids" if "image" in modalities and is_for(kind.__name__, _IMAGE_AND_TEXT):
            path = Path(data or "")  # without data there is the photograph
            files = [path] if path.is_file() else path.rglob("*")
            images = data is None or any(file.suffix.lower() in suffixes() for file in files)
            return "prompts" if images and (not reads or processors.has_processor(repository)) else "texts"
        case "input_ids" if reads:
            return "texts"
        case _ if modalities == {"image", "text"} and is_for(kind.__name__, ("ZERO_SHOT_IMAGE_CLASSIFICATION",)):
            return "images with texts"
        case "pixel_values" if modalities == {"image"}:
            return "images"
        case "input_values" | "input_features" if "audio" in modalities:
            return "recordings"
    raise ModelError(
        f"{name} is a {kind.__name__}, which takes {kind.main_input_name} ({' and '.join(sorted(modalities))}): texts, "
        "images, recordings, or images with texts are not enough. Make it and its inputs in a function of yours, and "
        "name that: py:FILE:FACTORY."
    )


def _has_decoder(network: Any) -> bool:
    """True if a network, or its class, has a decoder beside its audio encoder."""
    return "decoder_input_ids" in inspect.signature(network.forward).parameters


def _preprocessing(
    name: str, repository: Repository, kind: Any, input_kind: InputKind, config: Any, options: LoadOptions
) -> tuple[Any, Callable[[nn.Module, LoadOptions], Inputs]]:
    """Load the tokenizer and the processor; return the tokenizer, and a function from the network to its inputs.

    The tokenizer is None if unneeded, and for bytes where it cannot be had and the weights are random anyway.
    """

    def read_tokenizer() -> Any:
        try:
            return load_tokenizer(transformers, name, repository)
        except NotFetchedError:
            if _built_in(repository) and options.weights == "random":
                return None
            raise

    processor = partial(processors.load_processor, transformers, name, repository)
    match input_kind:
        case "texts":
            tokenizer, make = read_tokenizer(), Texts if head_of(kind.__name__) else pairs_or_texts
            return tokenizer, lambda module, options: make(Tokenization(module, config, tokenizer), options)
        case "images":
            images = processor("AutoImageProcessor")
            return None, partial(processors.processed_images, images, config)
        case "recordings":
            importlib.import_module("torchaudio")  # reads recordings: if it is missing, fail before weights are loaded
            extractor, tokenizer = processor("AutoFeatureExtractor"), read_tokenizer() if _has_decoder(kind) else None
            return tokenizer, partial(processors.processed_recordings, extractor, tokenizer, config)
    tokenizer = read_tokenizer()  # its errors are clearer than the processor's
    both = processor("AutoProcessor")
    pairs = processors.images_with_texts if input_kind == "images with texts" else processors.prompts
    return tokenizer, partial(pairs, both, config)


@dataclass(frozen=True)
class _Network:
    """A class of transformers and the configuration to make it with."""

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

    def fresh(self) -> tuple[nn.Module, Provenance]:
        """Draw random weights, on a GPU if one is requested: billions take minutes on the CPU, whose numbers differ."""
        options = self.options
        dtype = {} if options.dtype is None else {"dtype": options.dtype}
        make = partial(self.kind._from_config, self.config, **dtype, **self._without_pooler())
        if options.device.type != "cuda" or options.device_map is not None:
            return make(), Provenance.random(options.seed)
        with torch.cuda.device(options.device), torch.random.fork_rng([torch.cuda.current_device()]), options.device:
            torch.cuda.manual_seed(options.seed)
            return make(), Provenance.random(options.seed, on="GPU")

    def of(self, repository: Repository) -> tuple[nn.Module, Provenance]:
        """Load the weights of a folder or a repository: the network's own, unless this class has no place for them."""
        files, where = repository.weights(), repository.where()
        source = f"{repository.name}{f', quantized by {self.quantized},' if self.quantized else ''}"
        folder = None
        if self.options.device_map is not None:  # each part is read into its place, and the whole is nowhere
            folder = tempfile.TemporaryDirectory(prefix="normscope-", ignore_cleanup_errors=True)
            where |= {"device_map": self.options.device_map, "offload_folder": folder.name}
        elif self.quantized:  # libraries of quantized weights would choose a device themselves
            where["device_map"] = {"": self.options.device}
        with quiet():
            module, report = self._loaded(repository, f"The model of {source}", **where)
        if folder is not None:
            weakref.finalize(module, folder.cleanup)
        if left_out := sorted(report["unexpected_keys"]):
            logger.warning("%s: %s has no place for %s.", self.name, self.kind.__name__, first_few(left_out))
        _check(report | {"unexpected_keys": []}, f"The weights of {source} do not fit {self.kind.__name__}")
        provenance = repository.provenance(files)
        if self.quantized:
            return module, replace(provenance, description=f"{provenance.description}, quantized by {self.quantized}")
        before, after = checkpoints.dtypes_of_files(files), checkpoints.dtypes_of(module.state_dict())
        return module, checkpoints.with_conversion(provenance, before, after)

    def from_file(self, path: Path) -> tuple[nn.Module, Provenance]:
        """Load the weights of a file, which has to hold those of this class and no others, except for a head's."""
        weights = checkpoints.read_state_dict(path)
        module, report = self._loaded(None, f"The weights file {str(path)!r}", state_dict=dict(weights))
        state, prefix = module.state_dict(), f"{module.base_model_prefix}."
        if self.kind.__name__ not in (self.config.architectures or []):  # a head was left out on purpose
            parts = {name for name, _ in module.named_children()}
            unexpected = [key for key in report["unexpected_keys"] if key.removeprefix(prefix).split(".")[0] in parts]
            report |= {"unexpected_keys": unexpected}
        misfit = f"The weights file {str(path)!r} does not fit {self.name}"
        _check(report, misfit, checkpoints.not_floating(weights, state, prefix))
        before, after = checkpoints.dtypes_of(weights), checkpoints.dtypes_of(state)
        return module, checkpoints.with_conversion(checkpoints.provenance_of_file(path), before, after)

    def _loaded(self, source: Repository | None, text: str, **arguments: Any) -> tuple[Any, dict[str, Any]]:
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
            text += f" does not load with transformers {transformers.__version__}"
            if self.quantized:  # most formats have a library of their own
                text += " (install what it names, or take the checkpoint that it was made from)"
            raise (source.failure(text, error) if source else ModelError(f"{text}: {first_line(error)}.")) from error
        return module, report

    def _without_pooler(self) -> dict[str, bool]:
        """Leave the pooling layer out where another class was saved than is loaded: not all of them have one."""
        takes_it = "add_pooling_layer" in inspect.signature(self.kind.__init__).parameters
        saved = self.config.architectures or []
        return {"add_pooling_layer": False} if takes_it and self.kind.__name__ not in saved else {}


def _check(report: Mapping[str, Any], misfit: str, wrong: Iterable[str] = ()) -> None:
    """Refuse weights with missing, unexpected or misshapen tensors, which transformers reports."""
    misfits = [
        *wrong,
        *(f"{key} is missing" for key in sorted(report["missing_keys"])),
        *(f"{key} is not in the model" for key in sorted(report["unexpected_keys"])),
        *(f"{key} is {tuple(old)} and should be {tuple(new)}" for key, old, new in sorted(report["mismatched_keys"])),
    ]
    if misfits:
        raise ModelError(f"{misfit}: {first_few(misfits)}.")


def outputs_of(module: nn.Module, input_kind: InputKind) -> Outputs:
    """Return the reader of the outputs: by the head, if it is a supported one."""
    if input_kind == "images with texts":  # embeddings of each image and its text: (samples, 2 · features)
        return Outputs("tensor", lambda result, batch: torch.cat([result["image_embeds"], result["text_embeds"]], -1))
    if head := head_of(type(module).__name__):
        return Outputs(head)
    frames = hasattr(module, "_get_feat_extract_output_lengths") and not _has_decoder(module)
    return Outputs("frames" if input_kind == "recordings" and frames else "tensor")


def task_of(module: Any, tokenizer: Any, repository: Repository, inputs: Inputs, outputs: Outputs) -> Task:
    """Return the task of a network, by its head; ``tokenizer`` is None where bytes are its tokens."""
    if module.main_input_name != "input_ids" or module.input_modalities not in ("text", ("text",)):
        if outputs.kind != "classes" or module.main_input_name != "pixel_values":
            return Task(unmeasured="no labels are known of what it sees or hears (in Python, pass quality=)")
        names = module.config.id2label
        return class_task(inputs, module.config.num_labels, [names[number] for number in sorted(names)])
    kind = type(module).__name__
    if module.config.is_encoder_decoder:
        return Task(
            unmeasured="an encoder–decoder is given the same text on both sides, where nothing is left to predict"
        )
    if is_for(kind, ("MASKED_LM",)):
        mask_id = getattr(tokenizer, "mask_token_id", None)
        if mask_id is None:
            return Task(unmeasured="the tokenizer has no mask token to hide words behind")
        between = frozenset(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
        return Task("pseudo-perplexity", mask_id=mask_id, unmasked=between)
    if is_for(kind, ("CAUSAL_LM",)):
        return Task("perplexity")
    if not isinstance(inputs, SentencePairs):
        return Task(
            unmeasured="embeddings are judged by pairs of sentences, and there are none (name a .tsv or .csv file of "
            "sentence1, sentence2, score)"
        )
    return _embedding_task(repository)


def _embedding_task(repository: Repository) -> Task:
    """Return the pooling that sentence-transformers saved; the mean by default."""
    if repository.file("2_Dense/config.json") is not None:
        return Task(
            unmeasured="its embeddings pass through a Dense layer of sentence-transformers, which is not run here"
        )
    config = repository.json("1_Pooling/config.json") or {"pooling_mode": "mean"}
    chosen = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    mode = config.get("pooling_mode") or " and ".join(chosen)  # one word lately, a switch for each mode before
    if mode not in _POOLINGS:
        return Task(unmeasured=f"its embeddings are pooled by {mode or 'nothing'}, which is not known here")
    return Task("spearman", pooling=_POOLINGS[mode])
