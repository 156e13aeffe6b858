"""From texts to the token ids that a model of transformers takes: its tokenizer, or bytes where there is none."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from normscope.errors import DataError, ModelError
from normscope.models.inputs.text import LONGEST, Reading
from normscope.models.weights import downloads
from normscope.models.weights.repository import HubSilentError, Repository, refuse_code

_FILES = ("tokenizer_config.json", "special_tokens_map.json", "tokenizer.json")

Tokenize = Callable[[str], tuple[list[int], bool]]


def load_tokenizer(library: Any, name: str, repository: Repository, weights: str) -> Any:
    """Return the tokenizer that lies beside a model.

    Args:
        library: the module ``transformers``.
        name: what errors call the model.
        repository: where the tokenizer's files lie.
        weights: ``pretrained``, ``random`` or a file's path: where the hub is silent, that decides what else there is.

    Raises:
        HubSilentError: if the hub cannot be asked for it.
        ModelError: if there is none, or it asks for code of its own.
    """
    try:
        paths = [repository.file(filename) for filename in _FILES]
    except HubSilentError as error:
        if weights == "pretrained":
            raise
        raise HubSilentError(
            f"The tokenizer of {name} cannot be had: {error.reason}. Name a folder that holds config.json and "
            "tokenizer.json: transformers:DIR.",
            error.reason,
        ) from error
    if paths[-1] is None:
        raise ModelError(f"{repository.name!r} holds no tokenizer.json, so that no text can be read for {name}.")
    refuse_code(name, "tokenizer_config.json", repository.json("tokenizer_config.json"))
    with repository.damage_named(*paths):
        try:
            return library.AutoTokenizer.from_pretrained(repository.name, trust_remote_code=False, **repository.where())
        except Exception as error:  # of tokenizers, of transformers
            raise ModelError(f"The tokenizer of {name} cannot be loaded: {downloads.first_line(error)}.") from error


def reading_of(module: Any, config: Any, tokenizer: Any) -> Reading:
    """Say how a model of transformers reads texts; with their UTF-8 bytes as tokens where ``tokenizer`` is None."""
    vocabulary = _vocabulary(module)
    longest = min(LONGEST, _positions(module, config), getattr(tokenizer, "model_max_length", LONGEST))
    pad_id = getattr(tokenizer, "pad_token_id", None)
    remarks = ["UTF-8 bytes as tokens, for want of its tokenizer"] if tokenizer is None else []
    if config.is_encoder_decoder:
        remarks.append("the decoder reads the same text")
    window = getattr(config, "attention_window", 1)
    return Reading(
        _checked(_bytes(longest) if tokenizer is None else _tokens(tokenizer, longest), vocabulary),
        _keywords(module, config),
        longest=longest,
        pad_id=pad_id if pad_id is not None and (vocabulary is None or pad_id < vocabulary) else 0,
        multiple=max(window) if isinstance(window, list) else window,
        remarks=tuple(remarks),
        words=_byte_words if tokenizer is None else partial(words_of, tokenizer),
    )


def words_of(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return what each token id stands for by itself, as the tokenizer writes it."""
    return [str(tokenizer.decode([token])) for token in ids]


def _byte_words(ids: Sequence[int]) -> list[str]:
    """Return each byte as its letter, or where it is no ASCII letter by itself as its number."""
    return [chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}" for byte in ids]


def _vocabulary(module: Any) -> int | None:
    """Return how many tokens the model has embeddings for; None where it has no table of them: CANINE hashes."""
    try:
        embeddings = module.get_input_embeddings()
    except NotImplementedError:
        return None
    size: int = embeddings.weight.shape[0]
    return size


def _positions(module: nn.Module, config: Any) -> int:
    """Return how many tokens the model takes at most."""
    text = config.get_text_config()
    limits = [value for value in (getattr(text, "max_position_embeddings", None),) if value and value > 0]
    for name, part in module.named_modules():
        if name.endswith("position_embeddings") and getattr(part, "padding_idx", None) is not None:
            limits.append(len(part.weight) - part.padding_idx - 1)  # RoBERTa counts positions from there
    return min(limits, default=LONGEST)


def _tokens(tokenizer: Any, longest: int) -> Tokenize:
    def tokenize(text: str) -> tuple[list[int], bool]:
        if not tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]:
            raise DataError("the tokenizer leaves nothing of it")
        whole = tokenizer(text, verbose=False)["input_ids"]
        if len(whole) <= longest:
            return whole, False
        return tokenizer(text, truncation=True, max_length=longest)["input_ids"], True

    return tokenize


def _bytes(longest: int) -> Tokenize:
    def tokenize(text: str) -> tuple[list[int], bool]:
        content = text.encode()
        return list(content[:longest]), len(content) > longest

    return tokenize


def _checked(tokenize: Tokenize, vocabulary: int | None) -> Tokenize:
    """Refuse tokens that the model has no embedding for, which a GPU would answer with an assertion."""
    if vocabulary is None:
        return tokenize

    def checked(text: str) -> tuple[list[int], bool]:
        tokens, cut = tokenize(text)
        if max(tokens) >= vocabulary:
            raise DataError(f"the tokenizer makes token {max(tokens)} of it, and the model knows {vocabulary}")
        return tokens, cut

    return checked


def _keywords(module: nn.Module, config: Any) -> Callable[[Tensor, Tensor], dict[str, Any]]:
    parameters = inspect.signature(module.forward).parameters
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    no_cache = {"use_cache": False} if anything or "use_cache" in parameters else {}

    def keywords(ids: Tensor, mask: Tensor) -> dict[str, Any]:
        given = {"input_ids": ids, "attention_mask": mask, **no_cache}
        if config.is_encoder_decoder:
            given |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
        return given

    return keywords
