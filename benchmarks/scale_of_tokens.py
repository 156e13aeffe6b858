"""Output error of predicted token scales, and exact rewrites: ``python benchmarks/scale_of_tokens.py``."""

from __future__ import annotations

import copy
import dataclasses
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from common import Measurement, finish, in_own_process, names, options
from molecules import MOLECULES
from pretrained import BATCH_SIZE, FCPE, HELD_OUT, inputs_of
from swaps import compared
from torch import nn

import normscope
from normscope.inputs.batch import Batch
from normscope.inputs.loaded_model import LoadedModel
from normscope.swaps.drift.scale import SecondPass

MODELS = ("demo_vit", "demo_dit", "demo_wav2vec2", "minilm", FCPE, *MOLECULES)
FEW = ("few:4", "few:8", "random:4")
TEXTS = 320
LANGUAGES = tomllib.loads(Path(__file__).with_name("languages.toml").read_text(encoding="utf-8"))
ABOUT = f"""
Relative L2 of a network's output, ‖swapped − original‖ / ‖original‖, for each held-out input after a swap of all norms
that scale each token by its own σ (FCPE keeps its GroupNorm). Samples are inputs; numbers are median, smallest and
largest. Frozen: one σ per norm and the exact mean; first positions whose σ differs by more than a factor of 2 have
their own. minilm is all-MiniLM-L6-v2; it learns from {TEXTS} docstrings of Python's standard library, and {HELD_OUT}
docstrings of other modules are held out, or sentences in other languages. torchfcpe is FCPE, on the synthetic words of
demo_wav2vec2. rxnmapper is RXNMapper, an ALBERT whose two norms serve twelve layers: as many reactions of common types
to learn from as docstrings, and others of other molecules. antiberty is AntiBERTy, a BERT of antibodies: human heavy
chains whose genes are joined at random, likewise, and others with other V genes. Hidden tokens: every seventh of a
held-out text is hidden, and the network predicts it, which shows that its weights were read properly. The others are
embedded toys. few:K predicts σ² and the mean from K channels, random:4 from four channels drawn from the 128 largest.
DyT is fitted, weighted by γ². Centred: the network of normscope.simplify, in which RMSNorm also replaces the LayerNorms
that could not be rewritten exactly. Exact: LayerNorms that simplify turns into RMSNorms.
"""


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--models", type=names, default=list(MODELS), help=f"({','.join(MODELS)})")
    args = parser.parse_args()
    measurements = [row for model in args.models for row in in_own_process(measured, model, threads=1)]
    libraries = ["timm", "torchaudio", "diffusers", "transformers"]
    finish("scale_of_tokens", ABOUT, measurements, args, threads=[1], libraries=libraries, added=True)


def measured(model: str) -> list[Measurement]:
    """Rewrite the network, swap its norms by each function, and compare the outputs."""
    torch.set_num_threads(1)
    network, learned, held_out = inputs_of(model, TEXTS)
    sites = normscope.find_norms(network.module, learned[0].first_sample()).sites
    layers = [site.name for site in sites if site.replaceable and not site.grouped]
    simplified = dataclasses.replace(network, module=copy.deepcopy(network.module))
    report = normscope.simplify(simplified, [batch.first(4) for batch in learned[:4]])
    exact = [norm.site for norm in report.exact]
    swaps = {
        "rmsnorm, centred": swapped(
            simplified.module, "rmsnorm", sites, [name for name in layers if name not in exact]
        ),
        "rmsnorm": swapped(network.module, "rmsnorm", sites, layers),
        "dyt": swapped(network.module, "dyt", normscope.capture(network.module, learned, by_gamma=True), layers),
    }
    second = SecondPass(network.module, learned, layers=layers, outputs=network.outputs)
    swaps |= {func: swapped(network.module, func, second.fits(func), layers) for func in (*FEW, "frozen")}
    rows = [
        Measurement(model, "simplify", "exact", f"of {len(layers)} LayerNorms", [len(exact)]),
        Measurement(model, "simplify", "relative L2", "in float64", [report.float64]),
        Measurement(model, "simplify", "relative L2", f"in {report.dtype}", [report.own]),
    ]
    if network.task.mask_id is not None:
        rows.append(Measurement(model, "original", "hidden tokens", "% right", recovered(network, held_out)))
    cases = {model: held_out, **(dict(other_languages(model)) if model == "minilm" else {})}
    for case, batches in cases.items():
        rows += compared(case, swaps, network, batches)
    return rows


@torch.no_grad()
def recovered(network: LoadedModel, batches: Sequence[Batch]) -> list[float]:
    """Return the share of each text's hidden tokens, every seventh, that a masked language model predicts, in %."""
    shares = []
    for batch in batches:
        ids, valid = batch.kwargs["input_ids"], batch.kwargs["attention_mask"].bool()
        hidden = valid & ~torch.isin(ids, torch.tensor(sorted(network.task.unmasked)))
        hidden[:, torch.arange(ids.shape[1]) % 7 != 0] = False
        masked = batch.kwargs | {"input_ids": ids.masked_fill(hidden, network.task.mask_id)}
        right = (network.module(**masked).logits.argmax(-1) == ids) & hidden
        shares += (100 * right.sum(1) / hidden.sum(1)).tolist()
    return shares


def swapped(network: nn.Module, func: str, fits: object, layers: list[str]) -> nn.Module:
    """Return a copy of a network with a function in place of some norms."""
    module = copy.deepcopy(network)
    if layers:
        normscope.swap(module, func, fits, layers=layers)
    return module


def other_languages(model: str) -> Iterator[tuple[str, list[Batch]]]:
    """Yield the texts of each group of languages as a network's inputs."""
    for group, texts in LANGUAGES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "texts.txt"
            path.write_text("\n".join(texts), encoding="utf-8")
            yield (
                f"{model}, {group}",
                list(normscope.load(model, data=path, batch_size=BATCH_SIZE, device="cpu").inputs),
            )


if __name__ == "__main__":
    main()
