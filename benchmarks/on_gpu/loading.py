"""Whole networks with random weights on the GPU, and what keeps it busy: nothing is downloaded, no library is needed
that only reads photographs or recordings.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from on_gpu.parts import Setting
from torch import nn

import normscope
from normscope import Batch, Sample
from normscope.inputs.loaded_model import Outputs
from normscope.models.weights.checkpoints import seeded
from normscope.swaps.bench.bench import of_tokens

WEIGHTS = "random weights"
_WAVEFORM = 47_455  # samples: the longest of normscope's synthetic utterances
_TINY_SPEECH = {
    "extractor_mode": "group_norm",
    "extractor_conv_layer_config": [(16, 10, 5), (16, 3, 2)],
    "extractor_conv_bias": False,
    "encoder_embed_dim": 16,
    "encoder_projection_dropout": 0.0,
    "encoder_pos_conv_kernel": 8,
    "encoder_pos_conv_groups": 2,
    "encoder_num_layers": 1,
    "encoder_num_heads": 2,
    "encoder_attention_dropout": 0.0,
    "encoder_ff_interm_features": 32,
    "encoder_ff_interm_dropout": 0.0,
    "encoder_dropout": 0.0,
    "encoder_layer_norm_first": False,
    "encoder_layer_drop": 0.0,
    "aux_num_out": None,
}
_TINY_LANGUAGE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@dataclass(frozen=True)
class Network:
    """A network that is ready to run.

    Attributes:
        module: in eval mode on the setting's device, in the asked-for dtype.
        batch: what it runs on.
        outputs: how to read what it returns.
        name: what measurements call it: with its weights and its dtype.
    """

    module: nn.Module
    batch: Batch
    outputs: Outputs
    name: str


def load(model: str, number: int, dtype: str, setting: Setting) -> Network:
    """Make a network and a batch of so many images, utterances, latents, or tokens of one sequence.

    Raises:
        ImportError: if the library is not installed that the network is of.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # or a machine without a network asks the hub until it gives up
    module, batch, outputs = _MADE[model](number, dtype, setting)
    name = f"{model}{' in small' if setting.rehearsal else ''}, {WEIGHTS}, {dtype}"
    return Network(module, batch, outputs, name)


Made = tuple[nn.Module, Batch, Outputs]


def _vision(number: int, dtype: str, setting: Setting) -> Made:
    from PIL import Image

    pixels = torch.randint(256, (number, 256, 256, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as folder:
        for index, image in enumerate(pixels):
            Image.fromarray(image.numpy()).save(Path(folder, f"{index:04}.png"))
        name = "demo_vit" if setting.rehearsal else "vit_b16"
        network = normscope.load(
            name, weights="random", data=folder, batch_size=number, device=setting.device, dtype=dtype, workers=0
        )
        [batch] = network.inputs
    return network.module, batch, network.outputs


def _speech(number: int, dtype: str, setting: Setting) -> Made:
    from torchaudio.models import wav2vec2_large, wav2vec2_model

    with seeded(0):
        module = wav2vec2_model(**_TINY_SPEECH) if setting.rehearsal else wav2vec2_large()
    length = 800 if setting.rehearsal else _WAVEFORM
    noise = torch.randn(number, length, generator=torch.Generator().manual_seed(0))
    where = {"device": setting.device, "dtype": getattr(torch, dtype)}
    return module.eval().to(**where), Batch((noise.to(**where),), samples=_samples(number)), Outputs()


def _diffusion(number: int, dtype: str, setting: Setting) -> Made:
    network = normscope.load(
        "demo_dit" if setting.rehearsal else "dit_xl",
        weights="random",
        guidance=4.0,  # so that each latent runs twice
        limit=-(-number // 2),
        batch_size=number,
        device=setting.device,
        dtype=dtype,
        workers=0,
    )
    first = next(iter(network.inputs))
    batch = first.take([index % len(first.samples) for index in range(number)])
    return network.module, replace(batch, samples=_samples(number), part=""), network.outputs


def _language(number: int, dtype: str, setting: Setting) -> Made:
    if setting.rehearsal:
        import transformers

        with seeded(0):
            module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_TINY_LANGUAGE))
        module = module.eval().to(getattr(torch, dtype))
        return module, of_tokens(module, number), Outputs("tokens")
    network = normscope.load("llama_7b", weights="random", limit=1, device=setting.device, dtype=dtype, workers=0)
    return network.module, of_tokens(network.module, number), network.outputs


_MADE: dict[str, Callable[[int, str, Setting], Made]] = {
    "vit_b16": _vision,
    "wav2vec2_large": _speech,
    "dit_xl": _diffusion,
    "llama_7b": _language,
}


def _samples(number: int) -> tuple[Sample, ...]:
    return tuple(Sample(f"sample {index}", index, index) for index in range(number))
