"""Answers of ``normscope check`` against the truth on real inputs of norms: ``python benchmarks/check.py``."""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from common import Measurement, finish, first_line, names, options
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import normscope
from normscope.inputs.batch import Batch
from normscope.inputs.wrappers import submodule
from normscope.tools.check.evidence import Evidence
from normscope.tools.check.precision import epsilon, float16, fp8, int8

ABOUT = """
Answers of check against float64 arithmetic on the inputs of the same norms, which plain hooks record: int8 and FP8 by
quantizing all of them, another eps by normalizing them again, float16 by computing x, x², Σx² and γy + β in float16 of
inputs scaled at random. Attention logits are those that the attention function computes from its queries and keys, in
networks with random weights whose queries and keys are normalized.
"""
NETWORKS = "minilm,dinov2_small,smollm2_135m,smart_turn,demo_vit,demo_dit,demo_wav2vec2"
EPS = (1e-5, 1e-6, 1e-12, 1e-3)
VERDICTS = 200  # of float16, over all networks
Rows = Mapping[str, Tensor]  # inputs (tokens, d) of norms, by their paths


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--networks", type=names, default=names(NETWORKS), help="(%(default)s)")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    measured, failed, deviations = list[Measurement](), list[str](), dict[str, list[float]]()
    for name in args.networks:
        print(f"{name} …", flush=True)
        try:
            network = normscope.load(name, device="cpu")
            rows = inputs_of_norms(network.module, list(network.inputs))
            found = deviations_of(network, rows) | verdicts(network, rows, VERDICTS // len(args.networks) + 1)
        except Exception as error:
            failed.append(f"{name}: {first_line(error)}")
            continue
        measured += list(summaries(name, found))
        for key, values in found.items():
            deviations.setdefault(key, []).extend(values)
    measured += list(summaries("all networks", deviations))
    for case, make in (("Qwen3, 4 layers", qwen3), ("ViT, 4 layers", vit)):
        measured += logits(case, *make())
    finish(
        "check",
        ABOUT,
        measured,
        args,
        threads=[torch.get_num_threads()],
        libraries=["transformers", "timm"],
        failed=failed,
        added=True,
    )


def inputs_of_norms(module: nn.Module, batches: Sequence[Batch]) -> Rows:
    """Run a network, and return the tokens at each of its norms over the last axis, without padding, in float64."""
    sites = [
        site
        for site in normscope.find_norms(module, batches[0].first_sample()).sites
        if not site.is_call and not site.grouped and site.form and site.channel_axis == -1
    ]
    rows: dict[str, list[Tensor]] = {site.name: [] for site in sites}
    mask: list[Tensor | None] = [None]

    def record(of_site: list[Tensor], _: nn.Module, args: Any, kwargs: Any) -> None:
        x = args[0] if args else next(iter(kwargs.values()))
        of_site.append(x[mask[0].bool()] if mask[0] is not None else x.flatten(0, -2))

    hooks = [
        submodule(module, site.path).register_forward_pre_hook(
            functools.partial(record, rows[site.name]), with_kwargs=True
        )
        for site in sites
    ]
    module.eval()
    for batch in batches:
        mask[0] = batch.kwargs.get("attention_mask")
        forward = batch.forward or (lambda network, *args, **kwargs: network(*args, **kwargs))
        forward(module, *batch.args, **batch.kwargs)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts).double() for name, parts in rows.items()}


def deviations_of(network: Any, rows: Rows) -> dict[str, list[float]]:
    """Return |answer : truth − 1| of every number, by its name."""
    seen = normscope.capture(network)
    sites = {site.name: site for site in seen.sites}
    found: dict[str, list[float]] = {}

    def compare(key: str, answer: float | None, true: float) -> None:
        if answer is not None and true > 1e-9:
            found.setdefault(key, []).append(abs(answer / true - 1))

    for name, question, quantize in (("int8", int8, to_int8), ("fp8", fp8, to_fp8)):
        for row in question(Evidence(seen)).sites:
            if (x := rows.get(row["site"])) is not None:
                by_tensor, by_channel, by_token = (quantize(x, axes) - x for axes in ((0, 1), (0,), (1,)))
                compare(f"{name}|per tensor", row["tensor"], float(by_tensor.norm() / x.norm()))
                for error, key in ((by_tensor, "tensor"), (by_channel, "channel"), (by_token, "token")):
                    of_tokens = error.norm(dim=1) / x.norm(dim=1)
                    compare(f"{name}|median token, per {key}", row[f"{key}_median"], float(of_tokens.median()))
    for eps in EPS:
        for row in epsilon(Evidence(seen, eps=eps)).sites:
            if (x := rows.get(row["site"])) is not None:
                y, other = (normalized(sites[row["site"]], x, value) for value in (row["eps"], eps))
                compare("eps|output", row[f"{eps:g}"], float((other - y).norm() / y.norm()))
    return found


def to_int8(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    low, high = x.amin(axes, keepdim=True).clamp(max=0), x.amax(axes, keepdim=True).clamp(min=0)
    scale, zero = (high - low) / 255, -torch.round(low / ((high - low) / 255))
    return ((x / scale + zero).round().clamp(0, 255) - zero) * scale


def to_fp8(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    scale = 448 / x.abs().amax(axes, keepdim=True)
    return (x * scale).float().to(torch.float8_e4m3fn).double() / scale


def normalized(site: Any, x: Tensor, eps: float) -> Tensor:
    """Normalize as LayerNorm or RMSNorm."""
    x = x - x.mean(-1, keepdim=True) if site.centred else x
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def verdicts(network: Any, rows: Rows, number: int) -> dict[str, list[float]]:
    """Check norms of one layer on inputs scaled at random; return 1 for each wrong verdict, and for each unsure one."""
    draw = random.Random(0)  # noqa: S311 - no secret
    found: dict[str, list[float]] = {"float16|wrong": [], "float16|unsure": []}
    sites = {site.name: site for site in normscope.find_norms(network).sites}
    for _ in range(number):
        name = draw.choice(list(rows))
        gain = 2.0 ** draw.uniform(-2, 16)
        x = (rows[name] * 2.0 ** draw.uniform(-4, 18) / rows[name].abs().max()).float()
        norm = (nn.LayerNorm if sites[name].centred else nn.RMSNorm)(x.shape[1], eps=1e-6)
        nn.init.constant_(norm.weight, gain)
        module = nn.Sequential(norm)
        [row] = float16(Evidence(normscope.capture(module, [x]), module)).sites
        half = x.half()
        truth = {
            "x": half,
            "x²": half.square(),
            "Σx²": half.square().sum(-1),
            "output": norm(x).half(),
        }
        for what, values in truth.items():
            unsure = what in row["may_overflow"]
            is_wrong = not unsure and bool(values.isinf().any()) != (what in row["overflows"])
            found["float16|wrong"].append(float(is_wrong))
            found["float16|unsure"].append(float(unsure))
    return found


def summaries(case: str, found: Mapping[str, Sequence[float]]) -> Iterator[Measurement]:
    for key, values in found.items():
        way, _, what = key.partition("|")
        if way == "float16":
            yield Measurement(case, way, what, "number", [sum(values)])
            if what == "wrong":
                yield Measurement(case, way, "verdicts", "number", [len(values)])
            continue
        limit = 0.1 if way == "eps" else 0.05
        yield Measurement(case, f"{way}, {what}", "sites", "number", [len(values)], shown=False)
        yield Measurement(
            case, f"{way}, {what}", f"within {limit:.0%}", "%", [100 * sum(v <= limit for v in values) / len(values)]
        )
        yield Measurement(case, f"{way}, {what}", "median error", "%", [100 * statistics.median(values)])
        yield Measurement(case, f"{way}, {what}", "largest error", "%", [100 * max(values)])


def logits(case: str, module: nn.Module, batches: Sequence[Any]) -> Iterator[Measurement]:
    """Measure the bound and the estimate of the largest attention logit of each layer, relative to the truth."""
    report = normscope.check(module, batches)
    answers = [answer for answer in report.answers if answer.question == "attention logits"]
    with Logits() as seen:
        for batch in batches:
            module(batch)
    layers = len(seen.largest) // len(batches)
    true = [max(seen.largest[layer::layers]) for layer in range(layers)]
    for answer in answers:
        for key in ("bound", "estimate"):
            ratios = [row[key] / largest for row, largest in zip(answer.sites, true, strict=True)]
            yield Measurement(case, "attention logits", f"{key} : truth", "×", ratios)
            yield Measurement(case, "attention logits", f"largest {key} : truth", "×", [max(ratios)], shown=False)
            yield Measurement(case, "attention logits", f"smallest {key} : truth", "×", [min(ratios)], shown=False)


class Logits(TorchFunctionMode):
    """Records the largest |logit| of each call of the attention function, of pairs that attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: list[float] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            query, key = (kwargs[name] if name in kwargs else args[n] for n, name in enumerate(("query", "key")))
            key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
            scale = kwargs.get("scale") or query.shape[-1] ** -0.5
            logit = (query.double() @ key.double().mT).abs() * scale
            attended = torch.ones_like(logit, dtype=torch.bool)
            if (mask := kwargs.get("attn_mask")) is not None:
                attended &= mask if mask.dtype == torch.bool else mask == 0
            attended = attended.tril() if kwargs.get("is_causal") else attended
            self.largest.append(float(logit[attended].max()))
        return func(*args, **kwargs)


def grown(module: nn.Module, projections: Callable[[str], bool]) -> nn.Module:
    """Multiply the weights of queries and keys by 4, and draw those of their norms, as training may."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        if projections(name):
            parameter.mul_(4)
        elif ".q_norm." in name or ".k_norm." in name:
            parameter.copy_((torch.randn(parameter.shape, generator=generator) / 2).exp())
    return module.eval()


def qwen3() -> tuple[nn.Module, list[Tensor]]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 500}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    module = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads))
    return grown(module, lambda name: "q_proj" in name or "k_proj" in name), [torch.randint(500, (8, 64))]


def vit() -> tuple[nn.Module, list[Tensor]]:
    import timm

    torch.manual_seed(0)
    module = timm.models.VisionTransformer(
        img_size=32, patch_size=4, embed_dim=96, depth=4, num_heads=3, num_classes=10, qk_norm=True
    )
    return grown(module, lambda name: "qkv" in name), [torch.randn(8, 3, 32, 32)]


if __name__ == "__main__":
    main()
