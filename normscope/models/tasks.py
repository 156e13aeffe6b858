"""Tasks of loaded networks: classes from the names of folders, tokens from a head, embeddings from a pooling."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from normscope.errors import first_few
from normscope.inputs.loaded_model import Inputs, Outputs, Task
from normscope.models.inputs.numbered_inputs import Files, name_in
from normscope.models.inputs.text import SentencePairs
from normscope.models.weights.repository import Repository

_WORDNET_ID = re.compile(r"n\d{8}")
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)


def class_task(inputs: Inputs, number: int, names: Sequence[str] = ()) -> Task:
    """Label images by the sub-folders that they lie in, where it is certain which class each of these means.

    That is so where all sub-folders are named like classes of the network, or by the numbers of classes, counted from
    0; or where they are WordNet ids, as many as there are classes, which ImageNet sorts.

    Args:
        inputs: of the network; the samples of files get their labels here.
        number: of classes.
        names: of the classes, in order, where they are known.

    Returns:
        Top-1; or why there are no labels.
    """
    if not isinstance(inputs, Files):
        return Task(
            untold="the crops of the photograph have no labels (name a folder with a sub-folder for each class)"
        )
    places = [Path(name_in(inputs.root, path)).parts for path in inputs.paths]
    if any(len(parts) < 2 for parts in places):
        return Task(untold=f"not every image at {str(inputs.root)!r} lies in a sub-folder that would name its class")
    folders = sorted({parts[0] for parts in places})
    classes = _numbered(folders, number, names)
    if classes is None:
        return Task(
            untold=f"it cannot be told which of the {number:,} classes the sub-folders {first_few(folders)} of "
            f"{str(inputs.root)!r} mean (name them by number, from 0)"
        )
    inputs.classes = classes
    return Task("top-1")


def _numbered(folders: Sequence[str], number: int, names: Sequence[str]) -> dict[str, int] | None:
    """Return the class of each folder; None where it would be a guess."""
    known = {name: index for index, name in enumerate(names)}
    if len(known) == len(names) == number and all(folder in known for folder in folders):
        return {folder: known[folder] for folder in folders}
    if all(_NUMBER.fullmatch(folder) and int(folder) < number for folder in folders):
        return {folder: int(folder) for folder in folders}
    if len(folders) == number and all(map(_WORDNET_ID.fullmatch, folders)):
        return {folder: index for index, folder in enumerate(folders)}
    return None


def transformers_task(
    library: Any, module: Any, tokenizer: Any, repository: Repository, inputs: Inputs, outputs: Outputs
) -> Task:
    """Return the task of a model of transformers: texts by :func:`language_task`, images by the names of their folders.

    ``tokenizer`` is None for a network that does more than read.
    """
    if module.main_input_name == "input_ids" and module.input_modalities in ("text", ("text",)):
        return language_task(library, module, tokenizer, repository, inputs)
    if outputs.kind == "classes" and module.main_input_name == "pixel_values":
        names = module.config.id2label
        return class_task(inputs, module.config.num_labels, [names[number] for number in sorted(names)])
    return Task(untold="no labels are known of what it sees or hears (in Python, pass quality=)")


def language_task(library: Any, module: Any, tokenizer: Any, repository: Repository, inputs: Inputs) -> Task:
    """Return the task of a model of transformers that reads text; ``tokenizer`` is None where bytes are its tokens."""
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
    """Read how sentence-transformers makes one embedding of those of tokens; their mean where nothing says it."""
    if repository.file("2_Dense/config.json") is not None:
        return Task(untold="its embeddings pass through a Dense layer of sentence-transformers, which is not run here")
    config = repository.json("1_Pooling/config.json") or {"pooling_mode": "mean"}
    chosen = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    mode = config.get("pooling_mode") or " and ".join(chosen)  # one word lately, a switch for each mode before
    if mode not in _POOLINGS:
        return Task(untold=f"its embeddings are pooled by {mode or 'nothing'}, which is not known here")
    return Task("spearman", pooling=_POOLINGS[mode])
