"""α and saturation of a small ViT trained with DyT in place of its norms: ``python benchmarks/norm_free.py``."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from common import Measurement, finish, options
from torch import Tensor, nn
from torch.nn import functional

import normscope
from normscope.fits.saturation import Saturation
from normscope.inputs.loaded_model import Inputs

FIGURE = Path(__file__).parents[1] / "outputs" / "gallery" / "norm_free-saturation.png"
STEPS, BATCH, PEAK_LR, WARMUP = 1200, 64, 3e-3, 100
BLOCKS = 4
ALPHA = 0.5  # start value, of arXiv 2503.10622
ABOUT = """
A ViT of {blocks} blocks and width 64, with DynamicTanh in place of its LayerNorms. It was trained
here from scratch with seed {seed}, for {steps} steps of {batch} digits on one thread, which take about a minute. It
learns from 1,437 digits of scikit-learn, and all numbers are of 64 others. α starts at {alpha}.
"""


class DynamicTanh(nn.Module):
    """Weight · tanh(αx) + bias over the last axis (arXiv 2503.10622, eq. 3)."""

    def __init__(self, channels: int) -> None:
        """Start where DyT's authors do."""
        super().__init__()
        self.alpha = nn.Parameter(torch.full((1,), ALPHA))
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to every element."""
        return self.weight * torch.tanh(self.alpha * x) + self.bias


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help="of training (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (%(default)s)")
    parser.add_argument("--figure", type=Path, default=FIGURE, help="file of the figure (%(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    network = normscope.load("demo_vit", weights="random", seed=args.seed)
    model = without_norms(network.module)
    train(model, *digits(network.calibration), steps=args.steps, seed=args.seed)
    images, labels = digits(network.inputs)
    with torch.no_grad():
        correct = float((model(images).argmax(1) == labels).double().mean())
    about = {
        "model": "DyT ViT",
        "weights": f"trained here for a minute, {args.steps} steps",
        "data": "64 held-out digits",
    }
    seen = normscope.capture(model, network.inputs, about=about)
    functions = normscope.saturation(seen)
    print(functions.table())
    normscope.figures.save_figure(normscope.figures.plot_saturation(seen, width=5.5), args.figure, seen, dpi=200)
    print(args.figure)
    measurements = [Measurement("network", "", "top-1 accuracy on held-out digits", "%", [100 * correct])]
    measurements += [row for function in functions for row in rows_of(function)]
    text = ABOUT.format(blocks=BLOCKS, seed=args.seed, steps=args.steps, batch=BATCH, alpha=ALPHA)
    finish("norm_free", text, measurements, args, threads=[1])


def without_norms(model: nn.Module) -> nn.Module:
    """Replace every LayerNorm of demo_vit's first blocks by a fresh DynamicTanh, and let LayerScale begin at 1."""
    model.blocks = model.blocks[:BLOCKS]
    for name, parameter in model.named_parameters():
        if name.endswith("gamma"):
            nn.init.ones_(parameter)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.LayerNorm):
            model.set_submodule(name, DynamicTanh(module.normalized_shape[0]))
    return model


def digits(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return the images and labels of all batches."""
    batches = list(inputs)
    labels = [sample.label for batch in batches for sample in batch.samples]
    return torch.cat([batch.args[0] for batch in batches]), torch.tensor(labels)


def train(model: nn.Module, images: Tensor, labels: Tensor, steps: int, seed: int) -> None:
    """Train by AdamW with a warmup and a cosine schedule."""
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_()
    optimizer = torch.optim.AdamW(model.parameters(), PEAK_LR, weight_decay=0.0)
    for step in range(steps):
        rate = min((step + 1) / WARMUP, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = PEAK_LR * rate
        batch = torch.randint(len(images), (BATCH,), generator=generator)
        loss = functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 200 == 0:
            print(f"step {step:5d}  loss {loss.item():.4f}", flush=True)


def rows_of(function: Saturation) -> list[Measurement]:
    """Return the numbers of one site."""
    shares = {f"|αx| > {end}": getattr(function, f"beyond_{end}") for end in (1, 2, 3)}
    percent = {**shares, "saturated": function.saturated}
    return [
        Measurement(function.site, "", "α", "1/x", [function.alpha.p50]),
        Measurement(function.site, "", "1/std of x", "1/x", [function.inverse_std]),
        Measurement(function.site, "", "α·std of x", "", [function.alpha_std]),
        *(Measurement(function.site, "", name, "%", [100 * share]) for name, share in percent.items()),
    ]


if __name__ == "__main__":
    main()
