"""Train demo_vit's network under a probe with LayerNorm, DyT and DyISRU in turn, for docs/probe.md.

``python scripts/probe_studies.py`` writes build/probe/layernorm.jsonl, dyt.jsonl and dyisru.jsonl, and figures.
The same seed makes the same numbers again on the same machine and versions.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import normscope
from normscope.figures.style import draw_guides, key, sheet_of, theme_of
from normscope.fits.timeline import Timeline
from normscope.inputs.loaded_model import Inputs

STEPS, BATCH, PEAK_LR, WARMUP, EVERY = 600, 32, 3e-3, 60, 20
FUNCTIONS: dict[str, Callable[[int], nn.Module] | None] = {
    "LayerNorm": None,
    "DyT": normscope.DyT,  # A = 1, α = 0.5, as its authors start
    "DyISRU": normscope.DyISRU,  # C = 4, which is α = 0.5
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("functions", nargs="*", default=list(FUNCTIONS), help="to train with (%(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each training (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("build/probe"), help="folder of all files (%(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.functions:
        function, began = FUNCTIONS[name], time.process_time()
        path = args.out / f"{name.lower()}.jsonl"
        path.unlink(missing_ok=True)
        network = normscope.load("demo_vit", weights="random", seed=args.seed)
        for at, module in list(network.module.named_modules()):
            if function is not None and isinstance(module, nn.LayerNorm):
                network.module.set_submodule(at, function(module.normalized_shape[0]))
        loss = train(network.module, *digits(network.calibration), network.inputs, path, args.steps, args.seed)
        images, labels = digits(network.inputs)
        with torch.no_grad():
            correct = int((network.module.eval()(images).argmax(1) == labels).sum())
        score = f"{correct}/{len(labels)} held-out digits, {time.process_time() - began:.0f} s of one core"
        print(f"{name}: loss {loss:.3f}, {score}", flush=True)
    runs = {name: path for name in FUNCTIONS if (path := args.out / f"{name.lower()}.jsonl").exists()}
    draw({name: normscope.load_timeline(path) for name, path in runs.items()}, args.out / "functions.png")


def digits(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return the images and labels of all batches."""
    batches = list(inputs)
    labels = [sample.label for batch in batches for sample in batch.samples]
    return torch.cat([batch.args[0] for batch in batches]), torch.tensor(labels)


def train(
    model: nn.Module, images: Tensor, labels: Tensor, held_out: Inputs, path: Path, steps: int, seed: int
) -> float:
    """Train by AdamW with a warmup and a cosine schedule; return the mean loss since the last record but one."""
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_().train()
    optimizer = torch.optim.AdamW(model.parameters(), PEAK_LR, weight_decay=0.0)
    keep = path.with_suffix("") if path.stem == "layernorm" else None  # 0.2 GB, for E[y|x] in the figure of S-curves
    probe = normscope.Probe(model, held_out, samples=64, every=EVERY, path=path, keep=keep, about={"model": path.stem})
    probe.run()  # before training
    losses: list[Tensor] = []
    for step in range(steps):
        rate = min((step + 1) / WARMUP, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = PEAK_LR * rate
        batch = torch.randint(len(images), (BATCH,), generator=generator)
        loss = functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses = [*losses[1 - EVERY :], loss.detach()]
        probe.step(loss=torch.stack(losses).mean())  # a mean is less noisy than the loss of 32 digits
    return float(torch.stack(losses).mean())


def draw(runs: dict[str, Timeline], path: Path) -> None:
    """Draw the loss of all runs, and α, 1/std(x) and saturation of those with point-wise functions."""
    theme = theme_of({})
    colours = dict(zip(runs, (theme.ink, *theme.curves), strict=False))
    titles = {"module_alpha": "α", "inverse_std": "1/std(x)", "beyond_1": "pairs with |αx| > 1 [%]"}
    handles = [key(name, colour) for name, colour in colours.items()]
    foot = ["Lines: medians over the 17 sites; areas: from the least to the largest of them"]
    with sheet_of({}, theme, 7.0, 1.6, {}, foot=foot, handles=handles) as figure:
        axes = figure.subplots(1, 1 + len(titles))
        for name, run in runs.items():
            axes[0].plot(run.steps, run.losses, color=colours[name], lw=1.0)
            for ax, metric in zip(axes[1:], titles, strict=True):
                values = run.values(metric) * (100 if metric.startswith("beyond") else 1)
                low, median, high = np.quantile(values, (0, 0.5, 1), axis=1)
                ax.fill_between(run.steps, low, high, color=colours[name], alpha=0.15, lw=0)
                ax.plot(run.steps, median, color=colours[name], lw=1.0)
        for ax, title in zip(axes, ("loss", *titles.values()), strict=True):
            ax.set_title(title, loc="left", parse_math=False)
            ax.set_xlabel("step", labelpad=1)
            draw_guides(ax, theme)
    normscope.figures.save_figure(figure, path, next(iter(runs.values())).about)
    print(path)


if __name__ == "__main__":
    main()
