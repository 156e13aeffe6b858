"""README's Python is run as it stands; its commands are what .ci/run runs."""

import json
import re
import statistics
from pathlib import Path

import pytest
import torch
from torch import nn

from normscope.models.registry import embedded_models
from normscope.pairs.norms import recognition

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = ("index", "numbers", "papers", "swaps")
WITH_NEIGHBOURS = ("dyt, neighbours", "closed")
# The trainings of docs/swaps.md: 480 steps for MiniLM, minutes for the others.
HEALED = ("demo_vit, 4 minutes", "demo_dit, 4 minutes", "demo_wav2vec2, 10 minutes", "torchfcpe, 4 minutes")
HEALED += ("minilm, 480 steps",)
PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")


class MyRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(8)), 1e-6


@pytest.mark.slow
@pytest.mark.usefixtures("few_inputs")
def test_the_python_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    [block] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(block, {})  # noqa: S102 - our own README
    assert "blocks.0.norm1" in capsys.readouterr().out
    assert (tmp_path / "scurves.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
@pytest.mark.usefixtures("few_inputs")
def test_the_python_of_its_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recognition, "_TABLE", dict(recognition._TABLE))
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 4
    names = {"MyRMSNorm": MyRMSNorm}
    for block in blocks:
        exec(block, names)  # noqa: S102 - our own README
    assert recognition.kind_of(MyRMSNorm()).name == "MyRMSNorm"
    assert "blocks.0.norm1" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scurves.png", "seen.safetensors"]
    assert names["both"].n_samples == 800 + 8


def samples_of(name):
    """Return the samples of a committed result by case, way and quantity."""
    [path] = (ROOT / "benchmarks" / "results").glob(f"{name}-*.json")
    rows = json.loads(path.read_text(encoding="utf-8"))["measurements"]
    return {(row["case"], row["way"], row["quantity"]): row["samples"] for row in rows}


def assert_shown(texts, values):
    """Each number in the text is the committed one, rounded to its digits."""
    assert [*texts] == [f"{value:.{len(text.partition('.')[2])}f}" for text, value in zip(texts, values, strict=True)]


def found(pattern, page=README):
    """Return the numbers at each ``#`` of a pattern that matches a page once."""
    [match] = re.finditer(pattern.replace("#", r"(\d+(?:\.\d+)?)").replace(" ", r"\s+"), page)
    return match.groups()


def test_the_numbers_of_its_table_are_committed_results():
    samples = samples_of("readme")
    last = {name: values[0] for (_, way, name), values in samples.items() if way == "last norm"}
    fit = found("last norm: tanh A #, α # ± #, held-out R² # ")
    assert_shown(fit, [last[name] for name in ("A", "α", "α ±", "held-out R²")])
    assert_shown(found("any function of x reached: there # "), [last["ceiling"]])
    tails = [last[name] for name in ("largest |x| over the median", "share of two channels in Σx²")]
    assert_shown(found("is # times the median; two channels carry # % of Σx²"), tails)
    swaps = [samples["minilm", f"all norms → {function}", "cosine"] for function in ("dyt", "rmsnorm")]
    *cosines, texts = found(r"DyT, untrained: output cosine # \(RMSNorm #\), median of # texts")
    assert_shown(cosines, map(statistics.median, swaps))
    assert {int(texts)} == {*map(len, swaps)}
    assert_shown(found("`minilm` on a page of # texts"), [last["samples"]])


def test_numbers_of_the_same_run_in_the_docs_are_committed_results():
    pages = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in DOCS}
    samples = samples_of("readme")
    [tanh] = samples["minilm", "all norms", "mean R² of tanh"]
    swaps = [samples["minilm", f"all norms → {function}", "cosine"] for function in ("dyt", "rmsnorm")]
    cosines = [statistics.median(values) for values in swaps]
    assert_shown(found("DyT leaves a cosine of #, RMSNorm #:", pages["index"]), cosines)
    assert_shown(found("mean R² of #. Replacing", pages["numbers"]), [tanh])
    pattern = r"a cosine of # to the original's output \(median of # texts\); RMSNorm, [^.]*, leaves #\."
    shown = found(pattern, pages["numbers"])
    assert_shown(shown, [cosines[0], len(swaps[0]), cosines[1]])
    shown = found(r"mean R² of #, and their swap leaves a cosine of # \(median of # texts\)\.", pages["swaps"])
    assert_shown(shown, [tanh, cosines[0], len(swaps[0])])
    assert_shown(found(r"keeps the scale of each token and leaves #\.", pages["swaps"]), [cosines[1]])
    names = ("mean R² of one curve without s", "mean R² of the best without s")
    without = [samples[model, "all norms", name][0] for model in ("demo_vit", "minilm") for name in names]
    pattern = "without a shift # and # for demo_vit, # and # for all-MiniLM-L6-v2"
    assert_shown(found(pattern, pages["papers"]), without)
    [equal] = found(r"without a shift \(mean R² #\)", pages["papers"])
    curves = [samples["minilm", "all norms", f"mean R² of {curve} without s"][0] for curve in ("tanh", "isru")]
    assert_shown([equal] * 2, curves)
    [change] = samples["minilm", "last norm", "change without centring"]
    assert_shown(found(r"\*without centring\*: # % at the last norm", pages["papers"]), [change])


def test_the_numbers_of_its_limits_are_committed_results():
    texts = [samples_of("readme")["minilm", "all norms → dyt", "relative L2"]]
    texts += [samples_of("conversion")["minilm", "DyT, fitted", "relative L2"]]
    swaps, medians = samples_of("swaps"), list(map(statistics.median, texts))
    embedded = [statistics.median(swaps[name, "dyt, fit", "relative L2"]) for name in embedded_models()]
    least, most, *shown = found(r"relative L2 of # to # on the embedded networks, # to # on all-MiniLM-L6-v2")
    assert_shown([least, most, *shown], [min(embedded), max(embedded), *medians])
    assert_shown(found(r"on all-MiniLM-L6-v2 \(# to # texts\)"), map(len, texts))
    calibrated = [
        values[0] for (_, way, name), values in samples_of("calibration").items() if (way, name) == WITH_NEIGHBOURS
    ]
    healed = [
        values[0]
        for (case, way, name), values in samples_of("healing").items()
        if (way, name) == ("dyt, all", "closed") and case in HEALED
    ]
    assert len(calibrated) == len(healed) == 5
    for closed, pattern in ((calibrated, "recovers # to # % of that"), (healed, "and `heal` # to # % ")):
        assert_shown(found(pattern), [min(closed), max(closed)])


def test_the_readme_holds_the_two_commands_and_can_be_read_in_minutes():
    assert "\npip install -c constraints.txt '.[speech]' && normscope plot\n" in README
    assert "\npip install -c constraints.txt -e '.[test,speech]' && pytest\n" in README
    assert len(README.split()) <= 850
