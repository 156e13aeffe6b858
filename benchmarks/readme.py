"""Numbers of README's table and of docs/: ``python benchmarks/readme.py``."""

from __future__ import annotations

import copy
import statistics

from common import Measurement, finish, in_own_process, options
from scipy.stats import spearmanr
from swaps import arranged

import normscope
from normscope.fits.layerwise import layerwise
from normscope.fits.saturation import spread
from normscope.inputs.held_out import learned_and_held_out
from normscope.inputs.loaded_model import LoadedModel
from normscope.swaps.distances import distances

MODEL = "minilm"
PRETRAINED = ("dinov2_small", "smart_turn", "smollm2_135m", MODEL)
LAST, ALL = "last norm", "all norms"
ABOUT = """
all-MiniLM-L6-v2 on normscope's page of twelve texts, as README's commands take it by default. Last norm: the fit of
tanh to all pairs, with s; the half of its 95 % interval; the ceiling; the largest |x| over the median of |x|; the share
of the two and of the three leading channels in Σx²; the change of y without centring. All norms: the output against the
original's, with functions fitted to nine texts, weighted by γ², on each of the three others; samples are texts. Mean R²
over all norms: of tanh with s; without s of the best built-in curve for all norms and of the best for each, for
demo_vit as well. Figures of arXiv 2503.10622: of pretrained networks on their default inputs; samples are norms. Nearly
linear: the share of pairs at which tanh is within 5 % of its tangent, of norms whose tanh is identified or straight.
Rank correlation: Spearman's, of α and 1/std(x), over the norms at which α is identified. Without token 0: the first
token of each text is in no sum.
"""


def main() -> None:
    args = options(__doc__).parse_args()
    rows = in_own_process(measured, threads=1)
    for model in PRETRAINED:
        rows += in_own_process(of_figures, model, 0, threads=1)
    rows += in_own_process(of_figures, "smollm2_135m", 1, threads=1)
    finish("readme", ABOUT, rows, args, threads=[1], libraries=["transformers"])


def measured() -> list[Measurement]:
    network = normscope.load(MODEL, device="cpu")
    seen = normscope.capture(network)
    demo = normscope.capture(normscope.load("demo_vit", device="cpu"))
    return [
        *of_last_norm(seen),
        *of_swaps(network),
        *of_all_norms(MODEL, seen),
        *of_all_norms("demo_vit", demo),
    ]


def of_last_norm(seen: normscope.Capture) -> list[Measurement]:
    """Fit tanh at the last norm, and describe its tails."""
    last = seen.only(seen.sites[-1].name)
    [fit], [card] = normscope.fit(last, "tanh"), normscope.norm_cards(last)
    low, high = fit.intervals["alpha"]
    values = {
        "A": fit.amplitude,
        "α": fit.alpha,
        "α ±": (high - low) / 2,
        "held-out R²": fit.r2_cv,
        "ceiling": fit.r2_ceiling,
        "largest |x| over the median": card.tails.ratio,
        "share of two channels in Σx²": 100 * sum(channel.share for channel in card.tails.channels[:2]),
        "share of three channels in Σx²": 100 * sum(channel.share for channel in card.tails.channels[:3]),
        "change without centring": 100 * card.centring.change_without,
        "samples": seen.n_samples,
    }
    units = {"largest |x| over the median": "×"}
    percent = ("share of two channels in Σx²", "share of three channels in Σx²", "change without centring")
    units |= dict.fromkeys(percent, "%")
    return [Measurement(MODEL, LAST, name, units.get(name, ""), [value]) for name, value in values.items()]


def of_all_norms(model: str, seen: normscope.Capture) -> list[Measurement]:
    """Fit tanh, and every built-in curve without s, at all norms."""
    fits = normscope.fit(seen, "all", shift=False)
    means = layerwise(fits)
    values = {
        "mean R² of tanh": statistics.mean(fit.r2 for fit in normscope.fit(seen, "tanh")),
        "mean R² of tanh without s": statistics.mean(fit.r2 for fit in fits if fit.curve == "tanh"),
        "mean R² of isru without s": statistics.mean(fit.r2 for fit in fits if fit.curve == "isru"),
        "mean R² of one curve without s": means.r2,
        "mean R² of the best without s": means.r2_best,
    }
    return [Measurement(model, ALL, name, "", [value]) for name, value in values.items()]


def of_figures(model: str, skip: int) -> list[Measurement]:
    """Describe the pairs of all norms, as figures 2, 4 and 8 of arXiv 2503.10622 draw them."""
    network = normscope.load(model, device="cpu")
    seen = normscope.capture(network, skip=skip)
    fits, cards = normscope.fit(seen, "tanh"), normscope.norm_cards(seen)
    identified = [fit for fit in fits if fit.identified]
    slopes = [1 / spread(seen.stats[fit.site]) for fit in identified]
    correlation = float(spearmanr([fit.alpha for fit in identified], slopes).statistic)
    columns = {
        "R² of tanh": ("", [fit.r2 for fit in fits]),
        "straight": ("norms", [sum(fit.straight for fit in fits)]),
        "nearly linear": ("%", [100 * card.linear for card in cards if card.linear is not None]),
        "largest |x|": ("", [card.tails.largest for card in cards]),
        "largest share of a channel in Σx²": ("%", [100 * card.tails.channels[0].share for card in cards]),
        "α": ("", [fit.alpha for fit in identified]),
        "rank correlation of α and 1/std(x)": ("", [correlation]),
        "samples": ("", [seen.n_samples]),
    }
    way = f"figures{', without token 0' if skip else ''}"
    return [Measurement(model, way, name, unit, samples) for name, (unit, samples) in columns.items()]


def of_swaps(network: LoadedModel) -> list[Measurement]:
    """Swap all norms by DyT and by RMSNorm, as ``normscope swap-bench`` does, and compare the outputs."""
    learned, held_out = learned_and_held_out(network.inputs)
    seen = normscope.capture(network.module, learned, by_gamma=True)
    rows = []
    for function in ("dyt", "rmsnorm"):
        module = copy.deepcopy(network.module)
        normscope.swap(module, function, seen)
        moved = []
        for batch in held_out:
            original, valid = arranged(network, network.module, batch)
            moved.append(distances(original, arranged(network, module, batch)[0], valid, network.outputs.kind))
        for quantity, name in (("relative L2", "relative_l2"), ("cosine", "cosine")):
            samples = [value for each in moved for value in getattr(each, name).tolist()]
            rows.append(Measurement(MODEL, f"{ALL} → {function}", quantity, "at the output", samples))
    return rows


if __name__ == "__main__":
    main()
