"""Folders of tiny networks with random weights, of every class of transformers that reads text."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

VOCABULARY = 320
SPECIAL = 260  # ids from here on are no bytes: what stands for images and the like must not be text
MOST_PARAMETERS = 100_000_000
HEADS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM")
ENDS = ("eos_token_id", "bos_token_id", "decoder_start_token_id")
# What no general rule makes smaller, or what has to be said before such a model reads text.
OWN = {
    "lilt": {"hidden_size": 48},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": (8, 24), "axial_pos_shape": (16, 64)},
    "xmod": {"default_language": "en_XX"},
}


@dataclass(frozen=True)
class Sizes:
    """How large a network is made; where its class wants them otherwise, the next are tried.

    Attributes:
        width: of the residual stream.
        head: width of an attention head.
        key_heads: heads of keys and values, of 4 heads.
        layers: of the encoder, of the decoder.
        all: whether sizes are also named where the class's own default is None.
    """

    width: int = 32
    head: int = 8
    key_heads: int = 2
    layers: int = 4
    all: bool = False

    @property
    def rules(self) -> dict[str, int]:
        """What an integer of a configuration becomes whose name the pattern is found in; the first one counts."""
        return {
            r"vocab_size(_per_layer_input)?$": VOCABULARY,
            r"num_kv_shared_layers$": 0,
            r"(key_value|kv|kv_n)_heads$": self.key_heads,
            r"head_dim|head_size|dim_head|d_head$|^d_kv$|kv_channels|rotary_dim": self.head,
            r"(^|_)(n_)?layers?$|^num_blocks$": self.layers,
            r"(^|_)n?heads?$": 4,
            r"_rank$": 8,
            r"intermediate_size|ffn_dim|^d_?ff$|dim_ff$|ffn_hidden_size|feed_forward_size|d_inner|^attention_hidden_": (
                2 * self.width
            ),
            r"hidden_size|d_model|n_embd|(^|_)dim$|emb(ed|edding)?_(dim|size)$|hidden_dim": self.width,
            r"experts_per_tok|moe_top_?k$|moe_k$|n_groups?$|topk_group$|num_expert_group$|_dense(_layers|_replace)$": 1,
            r"experts$|expert_num$": 4,
            r"position_embeddings|n_positions|n_ctx|max_seq_len$|max_source_positions": 600,
        }


LEFT = re.compile(r"per_attn|nextn|adapter|laurel|window_layers|cross_attention_layers")


def sizes() -> Iterator[Sizes]:
    """Yield what is tried, in order."""
    shapes = ((32, 8, 2), (32, 8, 4), (32, 16, 4), (64, 16, 4), (128, 32, 4), (256, 64, 4), (512, 128, 4))
    for layers in (4, 8):
        for every in (False, True):
            yield from (Sizes(*shape, layers, every) for shape in shapes)


def text_classes() -> list[str]:
    """Name the classes with a head of a language model; of model types without one, the network itself."""
    import transformers

    automatic = transformers.models.auto.modeling_auto
    with_head = {
        model_type: found
        for head in HEADS
        for model_type, found in getattr(automatic, f"MODEL_FOR_{head}_MAPPING_NAMES").items()
    }
    classes = {
        name
        for head in HEADS
        for found in getattr(automatic, f"MODEL_FOR_{head}_MAPPING_NAMES").values()
        for name in _several(found)
    }
    for model_type, found in automatic.MODEL_MAPPING_NAMES.items():
        name = _several(found)[0]
        if model_type not in with_head and _reads_text(getattr(transformers, name, None)):
            classes.add(name)
    return sorted(classes)


def _several(found: str | Sequence[str]) -> Sequence[str]:
    return [found] if isinstance(found, str) else found


def _reads_text(network: Any) -> bool:
    return (
        network is not None
        and network.main_input_name == "input_ids"
        and network.input_modalities
        in (
            "text",
            ("text",),
        )
    )


def save(name: str, folder: str) -> tuple[str, int]:
    """Save a tiny network of a class of transformers that runs on text, and a tokenizer.

    Returns:
        Its model type, and its number of parameters.

    Raises:
        ValueError: if none of the configurations that are tried makes one; with what was wrong with the first.
    """
    import transformers

    transformers.utils.logging.set_verbosity(transformers.utils.logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    network_class = getattr(transformers, name)
    first = None
    for tried in sizes():
        try:
            network = made(network_class, tried)
        except Exception as error:  # of any class's checks of its configuration, and of its forward pass
            first = first or error
            continue
        network.save_pretrained(folder)
        byte_tokenizer(transformers).save_pretrained(folder)
        return network.config.model_type, sum(parameter.numel() for parameter in network.parameters())
    where = " ".join(str(first).split())
    raise ValueError(f"{type(first).__name__}: {where[:200]}")


def made(network_class: Any, tried: Sizes) -> Any:
    """Make a network that has read a text; raise whatever its class raises."""
    default = network_class.config_class()
    changes = smaller(default, tried, {}) | OWN.get(default.model_type, {})
    config = network_class.config_class(**changes)
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in network_class(config).parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"it has {parameters:,} parameters when made as small as the rules make it")
    torch.manual_seed(0)
    network = network_class._from_config(config).eval()
    ids = torch.randint(2, 250, (1, 512))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if config.is_encoder_decoder:
        given |= {"decoder_input_ids": ids, "decoder_attention_mask": torch.ones_like(ids)}
    parameters = inspect.signature(network.forward).parameters.values()
    if any(one.kind is one.VAR_KEYWORD or one.name == "use_cache" for one in parameters):
        given["use_cache"] = False
    with torch.no_grad():
        network(**given)
    return network


def smaller(config: Any, tried: Sizes, ids: dict[str, int]) -> dict[str, Any]:
    """Return what to change in a configuration, and in those within it.

    Args:
        config: as its class makes it.
        tried: how large it gets.
        ids: of tokens that stand for images and the like; added to.
    """
    values: Mapping[str, Any] = config.to_dict()
    layers = next((values[key] for key in ("num_hidden_layers", "num_layers", "n_layer") if values.get(key)), None)
    changes: dict[str, Any] = {}
    for key, value in values.items():
        number = isinstance(value, int) and not isinstance(value, bool)
        if key in config.sub_configs:
            if (part := getattr(config, key)) is not None:
                changes[key] = smaller(part, tried, ids)
        elif key == "pad_token_id":
            changes[key] = 0 if number or tried.all else value
        elif key in ENDS:
            changes[key] = value and 1
        elif number and re.search(r"_token_id$|_(token_)?index$", key):
            changes[key] = ids.setdefault(key, SPECIAL + len(ids))
        elif isinstance(value, list) and layers and len(value) == layers:
            changes[key] = of_every_kind(value, tried.layers)
        elif not LEFT.search(key) and ((number and value > 0) or (tried.all and value is None)):
            size = next((size for pattern, size in tried.rules.items() if re.search(pattern, key)), None)
            changes |= {} if size is None else {key: size}
    return changes


def of_every_kind(values: list[Any], number: int) -> list[Any]:
    """Return so many in their order, of every kind one if possible.

    >>> of_every_kind(["a", "a", "a", "b", "a"], 2)
    ['a', 'b']
    """
    first = [i for i, value in enumerate(values) if value not in values[:i]][:number]
    rest = [i for i in range(len(values)) if i not in first][: number - len(first)]
    return [values[i] for i in sorted(first + rest)]


def byte_tokenizer(library: Any) -> Any:
    """Make a tokenizer whose tokens are bytes, with an end-of-sequence token behind each text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({token: number for number, token in enumerate(["<pad>", "</s>", *alphabet])}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return library.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>")  # noqa: S106
