"""Map of stable trainings by function, α₀, learning rate and width: ``python benchmarks/learning_rates.py``.

A toy of figures 9 and 10 of arXiv 2503.10622, and of the weights of mean 0.2 of arXiv 1910.07467. ``--draw JSON``
draws the map of these samples into docs/benchmarks, and trains nothing.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from common import Measurement, finish, in_own_process, options
from probe_studies import digits
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional

import normscope

FIGURES = Path(__file__).parents[1] / "docs" / "benchmarks"
STEPS, WARMUP, BATCH, LAST = 60, 6, 32, 10
RATES, WIDTHS, ALPHAS, SEEDS = (1e-3, 4e-3, 1.6e-2, 6.4e-2), (32, 128), (0.2, 0.5, 1.0, 2.0), (0, 1)
CENTRE = 0.2  # of the shifted weights
COLOURS = ("#E9A07E", "#F2E2A0", "#A5CCE6")  # by the number of stable seeds
LEARNED, REBOUND = 0.75 * math.log(10), 1.5
FUNCTIONS: Mapping[str, Callable[[int, float], nn.Module]] = {
    "DyT": lambda width, alpha: normscope.DyT(width, alpha=alpha),
    "DyISRU": lambda width, alpha: normscope.DyISRU(width, C=alpha**-2),
    "Derf": lambda width, alpha: normscope.Derf(width, alpha=alpha),
}
NORMS: Mapping[str, Callable[[int], nn.Module]] = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}
ABOUT = f"""
A vision transformer (eight blocks, four heads, four patches, no LayerScale) learns standardized 8 × 8 digits: {STEPS}
steps of {BATCH} by AdamW without weight decay or clipping, and a rate that rises for {WARMUP} steps and then stays. In
place of all 17 LayerNorms: DyT, DyISRU (C = 1/α₀²), Derf or RMSNorm. Samples are seeds, of the weights and the digits
drawn. Loss: mean of {LAST} consecutive steps, the last ones at the end; infinite where any loss of the training is not
finite. Stable, fixed before functions were trained: the loss at the end is finite, at most 0.75 · ln 10, and at most
{REBOUND} times the least. Shifted weights: {CENTRE} is added to those of linear layers and of the patch embedding.
"""


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--draw", type=Path, metavar="JSON", help="draw the map of these samples, and train nothing")
    parser.add_argument("--widths", type=int, nargs="*", default=WIDTHS, help="whose rows are replaced (all)")
    args = parser.parse_args()
    if args.draw is None:
        measurements = in_own_process(measured, args.widths, threads=1)
        libraries = ["timm", "scikit-learn"]
        finish("learning_rates", ABOUT, measurements, args, threads=[1], libraries=libraries, added=True)
    else:
        rows = json.loads(args.draw.read_text(encoding="utf-8"))["measurements"]
        draw([Measurement(**row) for row in rows], FIGURES / f"{args.draw.stem}.svg")


def measured(widths: Sequence[int]) -> list[Measurement]:
    """Train every cell with every seed."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    images, labels = digits(normscope.load("demo_vit", device="cpu").calibration)
    images = (images - images.mean()) / images.std()
    measurements: list[Measurement] = []
    for case, way, make in cells(widths):
        began = time.process_time()
        runs = [losses_of(make(seed), images, labels, float(way.rpartition("rate ")[2]), seed) for seed in SEEDS]
        rows = list(of_cell(case, way, runs))
        rows.append(Measurement(case, way, "CPU time", "s", [time.process_time() - began], shown=False))
        print(case, way, *(row.samples for row in rows), flush=True)
        measurements += rows
    return measurements


def cells(widths: Sequence[int]) -> Iterator[tuple[str, str, Callable[[int], nn.Module]]]:
    """Yield the case and way of each cell, and a function that returns its network for a seed."""
    for width in widths:
        for rate in RATES:
            for name, norm in NORMS.items():
                for shift, words in ((0.0, ""), (CENTRE, ", shifted weights")):
                    case, way = f"{name}, width {width}{words}", f"rate {rate:g}"
                    yield case, way, lambda seed, w=width, n=norm, s=shift: network(w, lambda: n(w), s, seed)
            for name, function in FUNCTIONS.items():
                for alpha in ALPHAS:
                    case, way = f"{name}, width {width}", f"α₀ {alpha:g}, rate {rate:g}"
                    yield case, way, lambda seed, w=width, f=function, a=alpha: network(w, lambda: f(w, a), 0.0, seed)


def network(width: int, norm: Callable[[], nn.Module], shift: float, seed: int) -> nn.Module:
    """Return a vision transformer with other modules in place of its LayerNorms."""
    torch.manual_seed(seed)
    sizes = {"img_size": 8, "patch_size": 4, "in_chans": 1, "num_classes": 10, "depth": 8, "num_heads": 4}
    pooling = {"class_token": False, "global_pool": "avg", "fc_norm": False}
    model = VisionTransformer(embed_dim=width, weight_init="jax", **sizes, **pooling)  # Xavier: it learns in 60 steps
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.LayerNorm):
            model.set_submodule(path, norm())
        elif isinstance(module, (nn.Linear, nn.Conv2d)):
            module.weight.data += shift
    return model


def losses_of(model: nn.Module, images: Tensor, labels: Tensor, peak: float, seed: int) -> list[float]:
    """Train, and return the loss of each step until one is not finite."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), peak, weight_decay=0.0)
    losses: list[float] = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = peak * min(1.0, (step + 1) / WARMUP)
        batch = torch.randint(len(images), (BATCH,), generator=generator)
        loss = functional.cross_entropy(model(images[batch]), labels[batch])
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def of_cell(case: str, way: str, runs: Sequence[Sequence[float]]) -> Iterator[Measurement]:
    """Yield the losses of a cell's seeds, and the number of stable ones."""
    means = [
        [math.fsum(run[first : first + LAST]) / LAST for first in range(STEPS - LAST + 1)]
        if math.isfinite(run[-1])
        else [math.inf]
        for run in runs
    ]
    ends, least = [each[-1] for each in means], [min(each) for each in means]
    yield Measurement(case, way, "loss of the first step", "nats", [run[0] for run in runs], shown=False)
    yield Measurement(case, way, "least loss", "nats", least, shown=False)
    yield Measurement(case, way, "loss at the end", "nats", ends)
    yield Measurement(case, way, "stable", f"of {len(runs)}", [sum(map(is_stable, ends, least))])


def is_stable(end: float, least: float) -> bool:
    """True if a training has learned something at its end, and has not lost it again.

    >>> is_stable(0.6, 0.5), is_stable(0.8, 0.5), is_stable(2.2, 2.2), is_stable(math.inf, math.inf)
    (True, False, False, False)
    """
    return end <= LEARNED and end <= REBOUND * least


def draw(measurements: Sequence[Measurement], path: Path) -> None:
    """Draw a row of panels for each width: cells are coloured by their stable seeds, and show the mean loss."""
    import matplotlib as mpl
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    samples = {(row.case, row.way, row.quantity): row.samples for row in measurements}
    rates, colours = [f"rate {rate:g}" for rate in RATES], ListedColormap(COLOURS)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem, "font.size": 8}):
        figure = Figure((6.9, 4.3), layout="constrained")
        axes = figure.subplots(len(WIDTHS), 1 + len(FUNCTIONS), sharex=True, sharey="col", squeeze=False)
        for width, row in zip(WIDTHS, axes, strict=True):
            panels = {
                name: {f"α₀ {a:g}": (f"{name}, width {width}", f"α₀ {a:g}, ") for a in ALPHAS} for name in FUNCTIONS
            }
            panels["norms"] = {
                f"{name}{mark}": (f"{name}, width {width}{words}", "")
                for mark, words in (("", ""), ("*", ", shifted weights"))
                for name in NORMS
            }
            for (title, lines), panel in zip(panels.items(), row, strict=True):
                cells = [[(case, f"{way}{rate}") for rate in rates] for case, way in lines.values()]
                stable = [[samples[*cell, "stable"][0] for cell in line] for line in cells]
                panel.imshow(stable, cmap=colours, vmin=0, vmax=len(SEEDS), aspect="auto")
                for y, line in enumerate(cells):
                    for x, cell in enumerate(line):
                        loss = statistics.mean(samples[*cell, "loss at the end"])
                        panel.text(x, y, f"{loss:.2f}" if loss < 10 else "∞" if loss == math.inf else f"{loss:.0f}",
                                   ha="center", va="center")  # fmt: skip
                panel.set_xticks(range(len(RATES)), [f"{1000 * rate:g}" for rate in RATES])
                panel.set_yticks(range(len(lines)), lines)
                panel.tick_params(length=0)
                panel.spines[:].set_visible(False)
                panel.set_title(f"{title}, width {width}", fontsize=8)
        figure.supxlabel("learning rate, 10⁻³    (numbers: loss at the end; *: weights of mean 0.2)", fontsize=8)
        words = [f"{number} of {len(SEEDS)} seeds stable" for number in range(len(SEEDS) + 1)]
        handles = [Patch(color=colour, label=label) for colour, label in zip(COLOURS, words, strict=True)]
        figure.legend(handles=handles[::-1], loc="outside upper center", ncols=len(handles), frameon=False)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=200)


if __name__ == "__main__":
    main()
