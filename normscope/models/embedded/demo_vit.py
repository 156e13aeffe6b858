"""The tiny ViT that is embedded in this package: its network, digits and task."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from normscope.inputs.batch import Sample
from normscope.inputs.loaded_model import LoadedModel, LoadOptions, Outputs, Task
from normscope.inputs.previews import Normalized
from normscope.models.inputs.dataset import InMemory, InputDataset
from normscope.models.inputs.images import class_task, image_inputs
from normscope.models.weights.checkpoints import load_embedded, read_embedded

_DIGITS = 10  # classes
_EPS = 1e-6  # of LayerNorms, as timm has it
_STD = 0.02  # of fresh weights
_WHITE = 16  # of scikit-learn's digits
_POOLING = ("class_token", "global_pool", "fc_norm")


class VisionTransformer(nn.Module):
    """A pre-norm ViT without a class token: timm's class of this name, as far as ``demo_vit`` needs it.

    Parameters have the same names, and outputs the same bits. Importing timm takes longer than a first figure.

    >>> VisionTransformer(8, 2, in_chans=1, num_classes=10, embed_dim=8, depth=1, num_heads=2, init_values=0.1)(
    ...     torch.zeros(3, 1, 8, 8)
    ... ).shape
    torch.Size([3, 10])
    """

    def __init__(
        self,
        img_size: int,
        patch_size: int,
        in_chans: int,
        num_classes: int,
        embed_dim: int,
        depth: int,
        num_heads: int,
        init_values: float,
    ) -> None:
        """Draw fresh weights; the arguments are timm's of these names."""
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__()
        arguments |= {"class_token": False, "global_pool": "avg", "fc_norm": False}
        self.remade_by = f"timm.models.vision_transformer.VisionTransformer(**{arguments})"  # of the same outputs
        self.num_classes = num_classes
        self.patch_embed = _Patches(in_chans, embed_dim, patch_size)
        self.pos_embed = nn.Parameter(torch.empty(1, (img_size // patch_size) ** 2, embed_dim))
        self.blocks = nn.Sequential(*[_Block(embed_dim, num_heads, init_values) for _ in range(depth)])
        self.norm = nn.LayerNorm(embed_dim, eps=_EPS)
        self.head = nn.Linear(embed_dim, num_classes)
        nn.init.trunc_normal_(self.pos_embed, std=_STD)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=_STD)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits ``(images, classes)`` of images ``(images, channels, height, width)``."""
        tokens = self.patch_embed(x) + self.pos_embed
        tokens = self.norm(self.blocks(tokens))
        logits: Tensor = self.head(tokens.mean(dim=1))
        return logits


class _Patches(nn.Module):
    def __init__(self, channels: int, width: int, size: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, kernel_size=size, stride=size)

    def forward(self, x: Tensor) -> Tensor:
        patches: Tensor = self.proj(x)
        return patches.flatten(2).transpose(1, 2)  # (images, patches, width)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, init_values: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=_EPS)
        self.attn = _Attention(width, heads)
        self.ls1 = _LayerScale(width, init_values)
        self.norm2 = nn.LayerNorm(width, eps=_EPS)
        layers = {"fc1": nn.Linear(width, 4 * width), "act": nn.GELU(), "fc2": nn.Linear(4 * width, width)}
        self.mlp = nn.Sequential(OrderedDict(layers))
        self.ls2 = _LayerScale(width, init_values)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        result: Tensor = x + self.ls2(self.mlp(self.norm2(x)))
        return result


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        images, tokens, width = x.shape
        qkv = self.qkv(x).reshape(images, tokens, 3, self.num_heads, width // self.num_heads)
        queries, keys, values = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (images, heads, tokens, width of a head)
        mixed = functional.scaled_dot_product_attention(queries, keys, values)
        projected: Tensor = self.proj(mixed.transpose(1, 2).reshape(images, tokens, width))
        return projected


class _LayerScale(nn.Module):
    def __init__(self, width: int, init_values: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), init_values))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


def load(name: str, architecture: str, options: LoadOptions) -> LoadedModel:
    """Load the embedded ViT with digits that were held out from its training, and its training digits to learn from."""
    module, provenance, _ = load_embedded(
        name, options, lambda facts: network_of(facts["config"]), trained_on="scikit-learn's digits"
    )
    if options.data is not None:
        images = _images(options)
        return LoadedModel(name, module, images, provenance, Outputs("classes"), task=class_task(images, _DIGITS))
    digits = _digits("digits", "held-out digits", "demo_vit", options)
    training = _digits("calibration", "digits of demo_vit's training", "demo_vit training", options)
    return LoadedModel(name, module, digits, provenance, Outputs("classes"), training, task=Task("top-1"))


def network_of(config: Mapping[str, Any]) -> VisionTransformer:
    """Make the network of a configuration for timm, whose way of pooling is the only one here."""
    return VisionTransformer(**{key: value for key, value in config.items() if key not in _POOLING})


def _images(options: LoadOptions) -> InputDataset:
    _, pixels_to_input, _ = read_embedded("demo_vit_digits.safetensors")
    scale, offset = pixels_to_input["scale"], pixels_to_input["offset"]

    def transform(image: Image.Image) -> Tensor:
        """Average a greyscale image over 8×8 boxes, as the digits were made; white is 16."""
        grey = bytearray(image.resize((8, 8), Image.Resampling.BOX).tobytes())
        pixels = torch.frombuffer(grey, dtype=torch.uint8).view(1, 8, 8) * (_WHITE / 255)
        result: Tensor = pixels * scale + offset
        return result

    return image_inputs(transform, options, mode="L", normalized_by=_normalized_by(pixels_to_input))


def _digits(file: str, noun: str, data: str, options: LoadOptions) -> InMemory:
    digits, pixels_to_input, _ = read_embedded(f"demo_vit_{file}.safetensors")
    images = digits["images"][:, None].float() * pixels_to_input["scale"] + pixels_to_input["offset"]  # (n, 1, 8, 8)
    samples = [Sample(f"digit {i}", i, i, data, label) for i, label in enumerate(digits["labels"].tolist())]
    normalized_by = _normalized_by(pixels_to_input)
    return InMemory(list(images), samples, f"{len(images):,} {noun}", options, normalized_by=normalized_by)


def _normalized_by(pixels_to_input: Mapping[str, float]) -> Normalized:
    """Return mean and standard deviation that pixels from 0 to 1 are normalized by; the digits' go up to 16."""
    std = 1 / (_WHITE * pixels_to_input["scale"])
    return (-pixels_to_input["offset"] * std,), (std,)
