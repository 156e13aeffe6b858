"""Train demo_vit, the tiny vision transformer that ships with normscope, and write it with its digits.

The same seed makes the same bytes again on the same machine and versions: ``python scripts/train_demo_vit.py``.
``--only calibration`` writes the digits to learn from, and trains nothing.
"""

import argparse
import copy
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

EMBEDDED = Path(__file__).parents[1] / "normscope" / "models" / "embedded"

CONFIG = {
    "img_size": 8,
    "patch_size": 2,
    "in_chans": 1,
    "num_classes": 10,
    "embed_dim": 64,
    "depth": 8,
    "num_heads": 4,
    "init_values": 0.1,
    "class_token": False,
    "global_pool": "avg",
    "fc_norm": False,
}
PIXELS_TO_INPUT = {"scale": 0.75, "offset": 0.0}
RECIPE = {
    "steps": 6000,
    "batch_size": 64,
    "peak_lr": 1e-3,
    "warmup_steps": 200,
    "weight_decay": 0.0,
    "clip": 1.0,
    "ema_decay": 0.998,
}
HELD_OUT, VALIDATION, SHIPPED = 360, 240, 64


def main() -> None:
    parser = options(__doc__)
    parser.add_argument(
        "--validate", action="store_true", help="leave 240 digits out of training, score them, write nothing"
    )
    parser.add_argument("--only", choices=["calibration"], help="write the digits to learn from, and nothing else")
    args = parsed(parser)
    images, labels = load_pixels_and_labels()
    train, validation, held_out = split(len(images), args.seed)

    if args.validate:
        model = rounded_to_fp16(train_vit(images[train], labels[train], args.seed))
        print(f"validation accuracy {accuracy(model, images[validation], labels[validation]):.4f}")
        return

    args.out.mkdir(parents=True, exist_ok=True)
    everything_else = torch.cat([train, validation])
    save_digits(images[everything_else], labels[everything_else], args.out / "demo_vit_calibration.safetensors")
    if args.only:
        return

    model = rounded_to_fp16(train_vit(images[everything_else], labels[everything_else], args.seed))
    score = accuracy(model, images[held_out], labels[held_out])
    print(f"held-out accuracy {score:.4f} ({round(score * HELD_OUT)}/{HELD_OUT})")
    facts = {"config": CONFIG, "seed": args.seed, "steps": RECIPE["steps"], "held_out_accuracy": score}
    save_model("demo_vit", args.out, model.state_dict(), facts | {"torch": torch.__version__, "timm": timm.__version__})
    shipped = held_out[balanced_choice(labels[held_out], args.seed)]
    save_digits(images[shipped], labels[shipped], args.out / "demo_vit_digits.safetensors")


def options(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every training script."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=EMBEDDED)
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line; all computation is deterministic from here."""
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    return args


def load_pixels_and_labels() -> tuple[Tensor, Tensor]:
    digits = load_digits()
    return torch.tensor(digits.images, dtype=torch.uint8), torch.tensor(digits.target, dtype=torch.int64)


def split(count: int, seed: int) -> tuple[Tensor, ...]:
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order.split([count - VALIDATION - HELD_OUT, VALIDATION, HELD_OUT])


def balanced_choice(labels: Tensor, seed: int) -> Tensor:
    """Pick SHIPPED indices, one class after the other in a random order, so that no class leads by more than one."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    shuffled_labels = labels[order]
    rank_in_class = (F.one_hot(shuffled_labels).cumsum(0) - 1)[torch.arange(len(order)), shuffled_labels]
    return order[rank_in_class.argsort(stable=True)[:SHIPPED]]


def to_input(pixels: Tensor) -> Tensor:
    return pixels.float()[:, None] * PIXELS_TO_INPUT["scale"] + PIXELS_TO_INPUT["offset"]  # (n,8,8) -> (n,1,8,8)


def augment(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Rotate, scale, shear, shift and bend each image, all at random, and change its ink a little."""
    n = len(pixels)

    def uniform(*shape: int, width: float) -> Tensor:
        return (torch.rand(*shape, generator=generator) * 2 - 1) * width

    angle, shear = uniform(n, width=0.26), uniform(n, width=0.2)
    stretch_x, stretch_y = 1 + uniform(n, width=0.15), 1 + uniform(n, width=0.15)
    cos, sin = angle.cos(), angle.sin()
    row_x = torch.stack([cos * stretch_x, (shear - sin) * stretch_y, uniform(n, width=0.2)], dim=1)
    row_y = torch.stack([sin * stretch_x, cos * stretch_y, uniform(n, width=0.2)], dim=1)
    grid = F.affine_grid(torch.stack([row_x, row_y], dim=1), [n, 1, 8, 8], align_corners=False)
    bend = F.interpolate(uniform(n, 2, 3, 3, width=0.15), size=(8, 8), mode="bilinear", align_corners=True)
    grid = grid + bend.permute(0, 2, 3, 1)  # (n,2,8,8) -> (n,8,8,2)
    moved = F.grid_sample(pixels.float()[:, None], grid, align_corners=False)[:, 0]  # (n,1,8,8) -> (n,8,8)
    ink = 1 + uniform(n, 1, 1, width=0.2)
    noise = torch.randn(n, 8, 8, generator=generator) * (moved > 0)
    return (moved * ink + noise).clamp(0, 16)


def train_vit(pixels: Tensor, labels: Tensor, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = VisionTransformer(**CONFIG)

    def loss() -> Tensor:
        batch = torch.randint(len(pixels), (RECIPE["batch_size"],), generator=generator)
        return F.cross_entropy(model(to_input(augment(pixels[batch], generator))), labels[batch])

    return trained(model, loss, RECIPE, 250)


def trained(
    model: nn.Module, loss_of_a_batch: Callable[[], Tensor], recipe: Mapping[str, float], report_every: int
) -> nn.Module:
    """Train by AdamW with a warmup, a cosine schedule and clipped gradients.

    With ``ema_decay`` in the recipe, return an average of the weights.
    """
    average = copy.deepcopy(model).requires_grad_(False) if "ema_decay" in recipe else None

    def warmup_then_cosine(step: int) -> float:
        warmup, steps = recipe["warmup_steps"], recipe["steps"]
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))

    optimizer = torch.optim.AdamW(model.parameters(), recipe["peak_lr"], weight_decay=recipe["weight_decay"])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_then_cosine)
    for step in range(recipe["steps"]):
        loss = loss_of_a_batch()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe["clip"])
        optimizer.step()
        schedule.step()
        if average is not None:
            decay = min(recipe["ema_decay"], (1 + step) / (10 + step))
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)
        if step % report_every == 0:
            print(f"step {step:5d}  loss {loss.item():.4f}", flush=True)
    return (model if average is None else average).eval()


def rounded_to_fp16(model: nn.Module) -> nn.Module:
    return model.half().float()


@torch.no_grad()
def accuracy(model: nn.Module, pixels: Tensor, labels: Tensor) -> float:
    return (model(to_input(pixels)).argmax(dim=1) == labels).double().mean().item()


def save_model(name: str, folder: Path, weights: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write weights in half precision, with facts about them in the metadata."""
    metadata = {"normscope": json.dumps({"model": name, **facts})}
    save_file({key: tensor.half() for key, tensor in weights.items()}, folder / f"{name}.safetensors", metadata)


def save_digits(pixels: Tensor, labels: Tensor, path: Path) -> None:
    tensors = {"images": pixels, "labels": labels}
    save_file(tensors, path, metadata={"normscope": json.dumps(PIXELS_TO_INPUT)})


if __name__ == "__main__":
    main()
