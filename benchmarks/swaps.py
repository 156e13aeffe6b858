"""Output error after a swap of all norms, after calibration and after healing: ``python benchmarks/swaps.py``.

Squashing functions, as in arXiv 2503.10622: ``--models minilm,dinov2_small,smart_turn --curves dyt,hardtanh,sigmoid
--ways fit,paper,identity,rmsnorm``, and ``--models smollm2_135m --limit 32 … --ways fit,identity``. Heal for four
minutes: ``--curves dyt --ways fit,calibrated,healed --minutes 4``.

Pretrained networks, calibrated and healed: ``--models smart_turn --curves dyt --ways calibrated --clips 1``,
``--models dinov2_small --class-token --limit 96 --curves dyt --ways calibrated,healed --steps 28 --rounds 1 2 3`` and
``--models smollm2_135m --texts 12 --limit 32 --curves dyt --ways "calibrated, six kept;"``.
"""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from common import Measurement, finish, in_own_process, names, options
from pretrained import BATCH_SIZE, HELD_OUT, inputs_of
from torch import Tensor, nn

import normscope
from normscope.inputs.held_out import by_length
from normscope.inputs.loaded_model import LoadedModel, Outputs
from normscope.runtime.network import run
from normscope.runtime.progress import silent
from normscope.swaps.distances import distances, measure_of, output_by_sample, output_errors
from normscope.swaps.quality import QualityMeter

MODELS = ("demo_vit", "demo_dit", "demo_wav2vec2", "minilm")
CURVES = ("dyt", "dyisru", "derf")
STARTS = ("fit", "theory", "paper")
OTHERS = ("free", "best", "identity", "rmsnorm")
TRAINED = ("functions calibrated", "calibrated", "calibrated, two kept", "calibrated, six kept", "healed")
# Norms of smollm2_135m where its massive activations begin and end, and the last.
SIX = (*(f"model.layers.{number}.post_attention_layernorm" for number in (8, 9, 11, 28, 29)), "model.norm")
FEW = 16  # batches learned from, on which the error is measured too
CLASS_TOKEN = Outputs("tensor", lambda output, batch: output.last_hidden_state[:, 0])
ABOUT = """
Relative L2 of a network's output, ‖swapped − original‖ / ‖original‖, for each held-out input after a swap of all norms;
an output of zero has an error of 1; cosine: of both outputs. The demo networks are embedded toys; the others are
pretrained, see scripts/fetch_pretrained.py. Those of text learn from {texts} docstrings of Python's standard library,
and {held_out} docstrings of other modules are held out (with --limit N, at most N of each). dinov2_small has eight
crops of three photographs (with --limit N, N crops), smart_turn eight recordings: in three and four rounds, each
photograph or recording is held out once; with --rounds, each of these rounds is a case of its own. With --clips N,
smart_turn also learns from N clips of words by each voice of demo_wav2vec2's training that made no recording. Class
token: the output is the first token of the last hidden state alone, in all columns and for what is calibrated and
healed. Start values are fitted to the inputs to learn from, with s, weighted by γ². Samples are inputs; numbers are
median, smallest and largest. Paper: A = 1, α = 0.5, s = 0, and the original γ and β. free is E[y|x] itself, with one
shape for all channels of a site. Functions calibrated: by normscope.calibrate with refit="norms". Calibrated: with the
neighbouring linear layers too. Two kept: all norms are replaced except two, which normscope.keep chose. Six kept: of
smollm2_135m, those before the feed-forwards where massive activations begin (layers 8, 9 and 11) and end (28 and 29),
and the last. Healed: calibrated, then trained by normscope.heal for the --steps or --minutes of its command. RMSNorm
replaces no GroupNorm. KL: of logits, mean per input, in nats. Top-1: share of positions with the same largest logit.
Other columns are the quality at the task. On inputs learned from: the error at the output on at most {few} batches of
them. CPU seconds cover swap, calibration and healing, on one thread; the row of the capture is apart.
"""


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--models", type=names, default=list(MODELS), help=f"({','.join(MODELS)})")
    parser.add_argument("--curves", type=names, default=list(CURVES), help=f"({','.join(CURVES)})")
    parser.add_argument("--ways", type=ways_of, default=[*STARTS, *OTHERS],
                        help=f"of {'; '.join((*STARTS, *OTHERS, *TRAINED))} (all but the last five)")  # fmt: skip
    parser.add_argument("--limit", type=int, help="inputs to learn from and held out (all)")
    parser.add_argument("--texts", type=int, default=320, help="docstrings to learn from (%(default)s)")
    parser.add_argument("--steps", type=int, help="of healing, in place of --minutes")
    parser.add_argument("--minutes", type=float, default=4.0, help="of healing (%(default)s)")
    parser.add_argument("--clips", type=int, default=0, help="of each further voice, for smart_turn")
    parser.add_argument("--rounds", type=int, nargs="*", help="which, from 1, each in rows of its own (all in one)")
    parser.add_argument("--class-token", action="store_true", help="the output is a vision transformer's first token")
    args = parser.parse_args()
    length = {"steps": args.steps} if args.steps else {"minutes": args.minutes}
    given = (args.curves, args.ways, args.texts, args.limit, args.clips, args.class_token, args.rounds, length)
    measurements = [row for model in args.models for row in in_own_process(measured, model, *given, threads=1)]
    about = ABOUT.format(texts=args.texts, held_out=HELD_OUT, few=FEW)
    libraries = ["timm", "torchaudio", "diffusers", "transformers"]
    finish("swaps", about, measurements, args, threads=[1], libraries=libraries, added=True)


def ways_of(text: str) -> list[str]:
    """Split a list at its semicolons, or at its commas if there are none."""
    return list(filter(None, text.split(";"))) if ";" in text else text.split(",")


def measured(
    model: str,
    curves: Sequence[str],
    ways: Sequence[str],
    texts: int,
    limit: int | None,
    clips: int,
    class_token: bool,
    rounds: Sequence[int] | None,
    length: dict[str, float],
) -> list[Measurement]:
    """Swap every curve in every way, and compare the outputs; samples are those of all rounds."""
    torch.set_num_threads(1)
    network, divisions = inputs_of(model, texts, limit, clips)
    if class_token:
        network, model = replace(network, outputs=CLASS_TOKEN), f"{model}, class token"
    results: dict[tuple[str, str, str], Measurement] = {}
    for number, (learned, held_out) in enumerate(divisions, start=1):
        if rounds is not None and number not in rounds:
            continue
        case = model if rounds is None else f"{model}, round {number}"
        for row in round_of(case, network, learned, held_out, curves, ways, length):
            key = row.case, row.way, row.quantity
            samples = [*results[key].samples, *row.samples] if key in results else row.samples
            results[key] = replace(row, samples=samples)
    return list(results.values())


def round_of(
    model: str,
    network: LoadedModel,
    learned: Sequence[normscope.Batch],
    held_out: Sequence[normscope.Batch],
    curves: Sequence[str],
    ways: Sequence[str],
    length: dict[str, float],
) -> Iterator[Measurement]:
    """Learn from some inputs, and compare the outputs on others."""
    began = time.process_time()
    seen = normscope.capture(network.module, learned, by_gamma=True)
    yield Measurement(model, "capture", "CPU", "s", [time.process_time() - began])
    healing = {"outputs": network.outputs, "calibrated": False, **length}
    calibrated: dict[str, tuple[nn.Module, float]] = {}  # by curve, with the CPU seconds

    def swapped(curve: str, way: str) -> nn.Module:
        if way == "healed":
            module = copy.deepcopy(calibrated[curve][0]) if curve in calibrated else swapped(curve, "calibrated")
            normscope.heal(network.module, module, learned, held_out, **healing)
            return module
        module, sites = copy.deepcopy(network.module), "all"
        if way == "calibrated, two kept":
            modules = normscope.replacements(network, curve, seen)
            sites = normscope.keep(network, learned, modules, number=2).swapped
        elif way == "calibrated, six kept":
            sites = [site.name for site in seen.sites if site.name not in SIX]
        elif curve == "rmsnorm":
            kinds = {site.name: network.module.get_submodule(site.name) for site in seen.sites if site.replaceable}
            sites = [name for name, norm in kinds.items() if not isinstance(norm, nn.GroupNorm)]
        normscope.swap(module, curve, seen, init=way if way in STARTS else "fit", layers=sites)
        if way in TRAINED:
            refit = "norms" if way == "functions calibrated" else "neighbours"
            normscope.calibrate(network.module, module, learned, outputs=network.outputs, refit=refit)
        return module

    pairs = [(curve, way) for curve in curves for way in ways if way not in OTHERS]
    pairs += [(way, "") for way in ways if way in OTHERS]
    meter = QualityMeter(network, None, held_out, network.outputs, silent)
    yield from quality("original", network.module, model, meter)
    for curve, way in pairs:
        began = time.process_time()
        module = swapped(curve, way)
        seconds = time.process_time() - began + (calibrated[curve][1] if way == "healed" and curve in calibrated else 0)
        if way == "calibrated":
            calibrated[curve] = module, seconds
        name = f"{curve}, {way}" if way else curve
        rows = compared(name, module, model, network, held_out)
        if way in TRAINED:
            errors = output_errors(network.module, module, learned[:FEW], network.outputs).tolist()
            unit = measure_of(network.outputs.kind)
            rows.append(Measurement(model, name, "on inputs learned from", unit, errors))
        rows += [Measurement(model, name, "CPU", "s", [seconds]), *quality(name, module, model, meter)]
        print(name, *rows, sep="\n", flush=True)
        yield from rows


@torch.no_grad()
def compared(
    name: str, module: nn.Module, model: str, network: LoadedModel, held_out: Sequence[normscope.Batch]
) -> list[Measurement]:
    """Compare a swapped network with the original, input by input."""
    columns: dict[str, list[Tensor]] = defaultdict(list)
    for batch in (part for whole in held_out for part in by_length(whole, BATCH_SIZE)):
        original, valid = arranged(network, network.module, batch)
        other, _ = arranged(network, module, batch)
        moved = distances(original, other, valid, network.outputs.kind)
        for column in ("relative_l2", "cosine", "kl", "top1", "answers"):
            if (values := getattr(moved, column)) is not None:
                columns[column].append(values)
    joined = {column: torch.cat(values) for column, values in columns.items()}
    rows = [
        Measurement(model, name, "relative L2", "at the output", joined["relative_l2"].tolist()),
        Measurement(model, name, "cosine", "at the output", joined["cosine"].tolist()),
    ]
    if "kl" in joined:
        rows.append(Measurement(model, name, "KL", "nats", joined["kl"].tolist()))
        top1 = 100 * float(joined["top1"].sum() / joined["answers"].sum())
        rows.append(Measurement(model, name, "top-1", "%", [top1]))
    return rows


def quality(name: str, module: nn.Module, model: str, meter: QualityMeter) -> Iterator[Measurement]:
    """Yield the network's quality at its task, as the commands report it, if the inputs tell."""
    meter.add(name, module)
    if meter.quality is not None:
        value = meter.quality.scores[name].value
        yield Measurement(model, name, meter.quality.name, f"of {meter.quality.over}", [value])


def arranged(network: LoadedModel, module: nn.Module, batch: normscope.Batch) -> tuple[Tensor, Tensor | None]:
    """Return a network's output by sample and position, and which positions are valid."""
    return output_by_sample(network.outputs.read(run(module, batch), batch), batch, network.outputs.kind)


if __name__ == "__main__":
    main()
