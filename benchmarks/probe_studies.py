"""Train demo_vit's network under a probe with LayerNorm, DyT and DyISRU: ``python benchmarks/probe_studies.py``.

It also writes build/probe/layernorm.jsonl, dyt.jsonl and dyisru.jsonl, of which ``normscope timeline`` draws figures.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from common import Measurement, finish, in_own_process, options
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.nn import functional

import normscope
from normscope.inputs.loaded_model import Inputs
from normscope.tools.probe.timeline import Timeline

STEPS, BATCH, PEAK_LR, WARMUP, EVERY, SEED = 600, 32, 3e-3, 60, 20, 0
FUNCTIONS: dict[str, Callable[[int], nn.Module] | None] = {
    "LayerNorm": None,
    "DyT": normscope.DyT,  # A = 1, α = 0.5, as its authors start
    "DyISRU": normscope.DyISRU,  # C = 4, which is α = 0.5
}
METRICS = {
    "LayerNorm": {"r2/tanh": "R² of tanh", "r2/isru": "R² of isru", "alpha/tanh": "α of tanh", "spread": "spread of σ"},
    "DyT": {"module_alpha": "α", "inverse_std": "1/std(x)", "beyond_1": "pairs with |αx| > 1"},
}
METRICS["DyISRU"] = METRICS["DyT"]
ABOUT = f"""
demo_vit's network, trained from random weights with LayerNorm, DyT and DyISRU in turn: {STEPS} steps of {BATCH} digits
(AdamW, peak rate {PEAK_LR:g}, seed {SEED}), and a probe of the 64 held-out digits at every {EVERY}th step. The samples
of a step are its {{sites}} sites, in their order. Loss: mean of {EVERY} steps. Rank correlation: of α and 1/std(x) over
the sites.
"""


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/probe"), help="folder of timelines (%(default)s)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    measurements = [row for name in FUNCTIONS for row in in_own_process(measured, name, args.out, threads=1)]
    sites = max(len(row.samples) for row in measurements)
    finish("probe_studies", ABOUT.format(sites=sites), measurements, args, threads=[1])


def measured(name: str, folder: Path) -> list[Measurement]:
    """Train with one function in place of all norms."""
    torch.use_deterministic_algorithms(True)
    function, began = FUNCTIONS[name], time.process_time()
    path = folder / f"{name.lower()}.jsonl"
    path.unlink(missing_ok=True)
    network = normscope.load("demo_vit", weights="random", seed=SEED)
    for at, module in list(network.module.named_modules()):
        if function is not None and isinstance(module, nn.LayerNorm):
            network.module.set_submodule(at, function(module.normalized_shape[0]))
    train(network.module, *digits(network.calibration), network.inputs, path)
    images, labels = digits(network.inputs)
    with torch.no_grad():
        correct = (network.module.eval()(images).argmax(1) == labels).sum()
    return [
        *of_run(name, normscope.load_timeline(path)),
        Measurement(f"{name}, step {STEPS}", "", "held-out digits read", f"of {len(labels)}", [float(correct)]),
        Measurement(f"{name}, step {STEPS}", "", "CPU time", "s", [time.process_time() - began]),
    ]


def digits(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return the images and labels of all batches."""
    batches = list(inputs)
    labels = [sample.label for batch in batches for sample in batch.samples]
    return torch.cat([batch.args[0] for batch in batches]), torch.tensor(labels)


def train(model: nn.Module, images: Tensor, labels: Tensor, held_out: Inputs, path: Path) -> None:
    """Train by AdamW with a warmup and a cosine schedule."""
    generator = torch.Generator().manual_seed(SEED)
    model.requires_grad_().train()
    optimizer = torch.optim.AdamW(model.parameters(), PEAK_LR, weight_decay=0.0)
    keep = path.with_suffix("") if path.stem == "layernorm" else None  # 0.2 GB, for E[y|x] in the figure of S-curves
    probe = normscope.Probe(model, held_out, samples=64, every=EVERY, path=path, keep=keep, about={"model": path.stem})
    probe.run()  # before training
    losses: list[Tensor] = []
    for step in range(STEPS):
        rate = min((step + 1) / WARMUP, 0.5 + 0.5 * math.cos(math.pi * step / STEPS))
        optimizer.param_groups[0]["lr"] = PEAK_LR * rate
        batch = torch.randint(len(images), (BATCH,), generator=generator)
        loss = functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses = [*losses[1 - EVERY :], loss.detach()]
        probe.step(loss=torch.stack(losses).mean())  # a mean is less noisy than the loss of 32 digits


def of_run(name: str, run: Timeline) -> Iterator[Measurement]:
    """Yield the metrics of all sites before training, at step 120 and at the end."""
    for record, step in enumerate(run.steps.tolist()):
        if step in (0, 120, STEPS):
            case = f"{name}, step {step}"
            for metric, quantity in METRICS[name].items():
                values = run.values(metric)[record]
                if metric == "beyond_1":
                    yield Measurement(case, "", quantity, "%", (100 * values).tolist())
                else:
                    yield Measurement(case, "", quantity, "", values.tolist())
            if step:
                yield Measurement(case, "", "loss", "nats", [run.losses[record]])
            if step == STEPS and name != "LayerNorm":
                correlation = spearmanr(run.values("module_alpha")[record], run.values("inverse_std")[record])
                yield Measurement(case, "", "rank correlation", "", [float(correlation.statistic)])


if __name__ == "__main__":
    main()
