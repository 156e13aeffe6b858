"""Requirements of papers on every figure: its width, readable letters, no overlaps, whole fonts."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex, to_rgb
from matplotlib.text import Text
from networks import network_of
from timelines import timeline
from torch import nn

import normscope
from normscope.errors import UsageError
from normscope.inputs.batch import Batch, Sample
from normscope.inputs.loaded_model import Outputs
from normscope.show.figures.sheet import save_figure
from normscope.show.figures.style import STYLES
from normscope.swaps.drift.drift import drift
from normscope.swaps.drift.reports import KeepReport, KeepStep
from normscope.swaps.replace import replacements
from normscope.swaps.reports import Quality, Quantiles, Score
from normscope.tools.bench.reports import BenchReport, Timing
from normscope.tools.heal.reports import HealReport, TrainingCheck

ONE_COLUMN, NEURIPS, A_PAGE = 3.25, 5.5, 9
ABOUT = {
    "model": "a_net",
    "weights": "file step_12000.safetensors (random init, sha256 0123456789ab)",
    "data": "noise & <more>",
}
PASSES = ("forward", "forward + backward")


def network():
    """Six norms of a spread that grows with depth, as a transformer's blocks have them."""

    def forward(self, x):
        for depth, block in enumerate(self.blocks, 1):
            for norm in block.values():
                x = x + 5 * depth * norm(x)
        return x

    torch.manual_seed(0)
    names = ("attention_norm", "feed_forward_norm")
    blocks = [nn.ModuleDict({name: nn.LayerNorm(16) for name in names}) for _ in range(3)]
    return network_of(forward, "Net", blocks=nn.ModuleList(blocks))


def batches(parts=("",)):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(16, 12, 16, generator=draw) * torch.exp(torch.randn(16, 12, 1, generator=draw))
    x[..., 3] *= 30
    samples = tuple(Sample(f"s{n}", n, n) for n in range(16))
    return [Batch((x * (1 + number),), samples=samples, part=part) for number, part in enumerate(parts)]


@pytest.fixture(scope="module")
def seen():
    return normscope.capture(network(), batches(), about=ABOUT, diagonal=True)


@pytest.fixture(scope="module")
def fits(seen):
    return normscope.fit(seen, "tanh,isru")


@pytest.fixture(scope="module")
def drifts(seen):
    model, of = network(), batches(("timestep 980", "timestep 660", "timestep 0"))
    return [
        drift(
            model,
            of,
            replacements(model, func, seen.sites, init="paper"),
            outputs=Outputs("tensor"),
            func=func,
            init="paper",
            about=ABOUT,
        )
        for func in ("dyt", "derf")
    ]


def timing(variant, way, scope, passes):
    ratio, verdict = (None, "") if variant == "native" else (0.72, "faster")
    times = {"median": 1e-3, "p25": 0.95e-3, "p75": 1.2e-3}
    return Timing(
        **{
            **{"variant": variant, "way": way, "scope": scope, "passes": passes, "dtype": "bfloat16"},
            **{"shape": (16, 197, 768), "sites": 25, "samples": (1e-3,) * 5, **times},
            **{"ratio": ratio, "verdict": verdict},
        }
    )


@pytest.fixture(scope="module")
def speed():
    rows = [
        timing(variant, way, scope, passes)
        for scope in ("norm", "model")
        for passes in PASSES
        for way in ("eager", "compile", "fused")
        for variant in ("native", "dyt", "dyisru", "mine, of my own")
    ]
    return BenchReport(ABOUT, "NVIDIA H200 of the machine room", tuple(rows))


HEALED = HealReport(
    {
        stage: {"p10": 0.8 * median, "median": median, "p90": 1.4 * median}
        for stage, median in {"start": 0.617, "calibrated": 0.22, "trained": 0.118}.items()
    },
    "trained",
    [TrainingCheck(142 * n, 0.4 / n, 0.22 - 0.008 * n * (-1) ** (n < 3), n > 2) for n in range(1, 13)],
    1700,
    "all",
    192,
    64,
    32,
    0,
    about=ABOUT,
)


def kept(sites):
    """Three of six norms kept, and the calibrated rest."""
    errors = [Quantiles(*(share / (n + 1) for share in (0.01, 0.1, 0.5, 0.9, 1.2)), n=64) for n in range(5)]
    steps = [
        KeepStep(sites[n].name if n else None, n, 6 - n, error, error if n < 4 else None, error.p50 / 9)
        for n, error in enumerate(errors)
    ]
    paths = [site.name for site in sites]
    scores = {"original": Score(0.9), **{f"{n} kept": Score(0.5 + n / 9, (0.4, 0.6 + n / 9)) for n in range(4)}}
    quality = Quality("top-1 accuracy", True, 64, "64 images", scores)
    return KeepReport(paths, paths[1:4], steps, 48, about=ABOUT, quality=quality, calibrated=errors[4])


@pytest.fixture(scope="module")
def functions():
    """A capture of the same network with functions in place of its norms, as of two steps."""
    model = network()
    for block in model.blocks:
        for name in block:
            block[name] = normscope.DyT(16, alpha=0.3)
    capture = normscope.capture(model, batches(), about=ABOUT)
    return [replace(capture, about={**ABOUT, "weights": f"{ABOUT['weights']} {number}"}) for number in (1, 2)]


@pytest.fixture(scope="module")
def drawn(seen, fits, drifts, speed, functions):
    """Every figure, by the name of its command."""
    rows = "density,token,channel,residual"
    both = [seen, replace(seen, about={**ABOUT, "weights": "step 2"})], [fits, fits]
    cards = normscope.norm_cards(seen)
    of_functions = normscope.fit(functions[0], "tanh")
    return {
        "plot": lambda **look: normscope.plot(seen, fits, color=rows, **look),
        "overview": lambda **look: normscope.figures.overview(*both, **look),
        "fit --plot": lambda **look: normscope.figures.plot_depth(seen, fits, **look),
        "stats --plot": lambda **look: normscope.figures.plot_tails(seen, cards, **look),
        "stats --plot, functions": lambda **look: normscope.figures.plot_saturation(functions[0], **look),
        "compare, functions": lambda **look: normscope.figures.plot_comparison(functions, [of_functions] * 2, **look),
        "plot, functions": lambda **look: normscope.plot(functions[0], of_functions, **look),
        "curves": lambda **look: normscope.figures.plot_curves("all", **look),
        "gradient": lambda **look: normscope.figures.plot_gradient(seen, fits, **look),
        "compare": lambda **look: normscope.figures.plot_comparison(*both, **look),
        "drift": lambda **look: normscope.figures.plot_drift(drifts, seen.sites, **look),
        "keep": lambda **look: normscope.figures.plot_keep(kept(seen.sites), **look),
        "heal": lambda **look: normscope.figures.plot_healing(HEALED, **look),
        "speed": lambda **look: normscope.figures.plot_speed(speed, **look),
        "timeline": lambda **look: normscope.figures.plot_timeline(timeline(norms=9, functions=9), **look),
        "timeline, S-curves": lambda **look: normscope.figures.plot_scurves_by_step(timeline(), **look),
    }


FIGURES = (
    *(
        "plot",
        "overview",
        "fit --plot",
        "stats --plot",
        "curves",
        "gradient",
        "compare",
        "drift",
        "keep",
        "heal",
    ),
    *("stats --plot, functions", "compare, functions", "plot, functions", "timeline", "timeline, S-curves", "speed"),
)


def within(axes):
    """These axes and those inside of them, as far as they are shown."""
    shown = [ax for ax in axes if ax.get_visible()]
    return shown + [inner for ax in shown for inner in within(ax.child_axes)]


def written(figure):
    """Every text that is drawn."""
    texts = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    for ax in within(figure.axes):
        legend = ax.get_legend()
        texts += [text for text in ax.get_children() if isinstance(text, Text)] + (legend.get_texts() if legend else [])
        for axis in (ax.xaxis, ax.yaxis) if ax.axison else ():
            low, high = sorted(axis.get_view_interval())
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            inside = [tick for tick in ticks if low <= tick.get_loc() <= high]
            texts += [axis.label, axis.offsetText]
            texts += [text for tick in inside for text in (tick.label1, tick.label2)]
    return [text for text in texts if text.get_visible() and text.get_text().strip()]


def said(figure):
    return " ".join(text.get_text() for text in written(figure)).replace("\n", " ")


@pytest.mark.parametrize("name", FIGURES)
def test_every_letter_can_be_read_in_one_column(drawn, name):
    with pytest.raises(UsageError, match="cannot be 1 inches wide"):
        drawn[name](width=1)
    with pytest.raises(UsageError, match="no style 'drak'"):
        drawn[name](style="drak")
    figure = drawn[name](width=ONE_COLUMN, title="Figure $1_{", style="dark")
    assert figure.get_figwidth() == ONE_COLUMN
    assert figure.get_figheight() <= A_PAGE or name in ("plot", "plot, functions")
    assert to_hex(figure.get_facecolor()) == STYLES["dark"].background.lower()
    check_letters(figure)
    assert figure.get_suptitle() == "Figure $1_{"
    assert "a_net" not in said(figure) or name.startswith("overview")  # where it is the name of a row
    assert "noise & <more>" in figure.caption or name == "curves"  # of which no network is drawn


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_every_letter_can_be_read_at_the_usual_width_with_its_usual_title(drawn, name):
    check_letters(drawn[name]())


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_full_labels_can_be_read_beside_a_caption_and_pdfs_embed_whole_fonts(drawn, name, tmp_path):
    figure = drawn[name](width=NEURIPS, labels="full", font="DejaVu Serif", caption="txt", title="none")
    check_letters(figure)
    assert figure.get_suptitle() == "" and "weights:" not in said(figure)
    assert "noise & <more>" in figure.caption or name == "curves"
    content = save_figure(figure, tmp_path / "figure.pdf", {}, dpi=40).read_bytes()
    assert b"/CIDFontType2" in content and b"/Type3" not in content  # many journals refuse the latter


def check_letters(figure):
    """Check that no text is small, cut or over another."""
    figure.draw_without_rendering()
    texts = written(figure)
    assert {text.get_text(): text.get_fontsize() for text in texts if text.get_fontsize() < 6} == {}
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    right, top = figure.bbox.size
    # A pixel is a hundredth of an inch.
    assert [text for text, box in boxes if min(box.p0) < -1 or box.x1 > right + 1 or box.y1 > top + 1] == []  # none cut
    assert overlapping(boxes) == []
    assert "sha256" not in said(figure) and "0123456789ab" not in said(figure)
    check_contrast(figure)


def check_contrast(figure):
    """Check that letters stand out, by the Web Content Accessibility Guidelines' ratio."""
    behind = luminance(figure.get_facecolor())
    for text in written(figure):
        low, high = sorted((behind, luminance(text.get_color())))
        assert (high + 0.05) / (low + 0.05) >= 4.5 or text.get_color() == "none", (text.get_text(), text.get_color())


def luminance(colour):
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def overlapping(boxes):
    """Pairs of texts of which one stands in the other's box; of hundreds of texts there are tens of thousands."""
    low, high = np.array([(box.min, box.max) for _, box in boxes]).swapaxes(0, 1)  # (texts, 2)
    shared = np.minimum(high[:, None], high) - np.maximum(low[:, None], low)
    # The box of a line holds room for ascenders and descenders that its neighbour's letters may reach into.
    pairs = np.argwhere(np.triu((shared > 2.5).all(-1), k=1))
    return [(boxes[one][0], boxes[other][0]) for one, other in pairs]
