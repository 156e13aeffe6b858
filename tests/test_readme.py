"""README's Python is run as it stands; its commands are what .ci/run runs."""

import json
import math
import re
import statistics
from pathlib import Path

import pytest
import torch
from torch import nn

from normscope.models.registry import embedded_models
from normscope.norms import recognition

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


def medians_of(name):
    return {key: statistics.median(samples) for key, samples in samples_of(name).items()}


def assert_shown(texts, values):
    """Each number in the text is the committed one, rounded to its digits."""
    texts = [text.replace("−", "-").replace(",", "") for text in texts]
    assert texts == [f"{value:.{len(text.partition('.')[2])}f}" for text, value in zip(texts, values, strict=True)]


def numbers_in(pattern, page=README):
    """Return the numbers at each ``#`` of a pattern that matches a page once."""
    [match] = re.finditer(pattern.replace("#", r"(−?\d+(?:,\d{3})*(?:\.\d+)?)").replace(" ", r"\s+"), page)
    return match.groups()


def rows_of(page, heading):
    """Return the numbers in the rows of the table with this first heading, by the text of their first cell."""
    _, table = page.split(f"\n| {heading} |", 1)
    rows = [line.split(" | ", 1) for line in table.partition("\n\n")[0].splitlines()[2:]]
    return {first.removeprefix("| "): re.findall(r"(?<![\w.])[−\d.,]*\d", rest) for first, rest in rows}


def test_the_numbers_of_its_table_are_committed_results():
    samples = samples_of("readme")
    last = {name: values[0] for (_, way, name), values in samples.items() if way == "last norm"}
    fit = numbers_in("last norm: tanh A #, α # ± #, held-out R² # ")
    assert_shown(fit, [last[name] for name in ("A", "α", "α ±", "held-out R²")])
    assert_shown(numbers_in("any function of x reached: there # "), [last["ceiling"]])
    tails = [last[name] for name in ("largest |x| over the median", "share of three channels in Σx²")]
    assert_shown(numbers_in("is # times the median; three channels with γ ≈ 0 carry # % of Σx²"), tails)
    swaps = [samples["minilm", f"all norms → {function}", "cosine"] for function in ("dyt", "rmsnorm")]
    *cosines, texts = numbers_in(r"DyT, untrained: output cosine # \(RMSNorm #\), median of # texts")
    assert_shown(cosines, map(statistics.median, swaps))
    assert {int(texts)} == {*map(len, swaps)}
    assert_shown(numbers_in("`minilm` on a page of # texts"), [last["samples"]])


def test_numbers_of_the_same_run_in_the_docs_are_committed_results():
    pages = {name: docs_page(name) for name in DOCS}
    samples = samples_of("readme")
    [tanh] = samples["minilm", "all norms", "mean R² of tanh"]
    swaps = [samples["minilm", f"all norms → {function}", "cosine"] for function in ("dyt", "rmsnorm")]
    cosines = [statistics.median(values) for values in swaps]
    shown = numbers_in(r"DyT leaves a cosine of #, RMSNorm # \(median of # texts\):", pages["index"])
    assert_shown(shown, [*cosines, len(swaps[0])])
    shown = numbers_in(r"mean R² of #, and their swap leaves a cosine of # \(median of # texts\)\.", pages["swaps"])
    assert_shown(shown, [tanh, cosines[0], len(swaps[0])])
    assert_shown(numbers_in(r"keeps the scale of each token and leaves #\.", pages["swaps"]), [cosines[1]])
    names = ("mean R² of one curve without s", "mean R² of the best without s")
    without = [samples[model, "all norms", name][0] for model in ("demo_vit", "minilm") for name in names]
    pattern = "without a shift # and # for demo_vit, # and # for all-MiniLM-L6-v2"
    assert_shown(numbers_in(pattern, pages["papers"]), without)
    [equal] = numbers_in(r"without a shift \(mean R² #\)", pages["papers"])
    curves = [samples["minilm", "all norms", f"mean R² of {curve} without s"][0] for curve in ("tanh", "isru")]
    assert_shown([equal] * 2, curves)
    [change] = samples["minilm", "last norm", "change without centring"]
    assert_shown(numbers_in(r"\*without\*: # % at the last norm", pages["papers"]), [change])


def test_the_numbers_of_its_limits_are_committed_results():
    swaps, pages = medians_of("swaps"), {"README": README, "swaps": docs_page("swaps")}
    fitted = [swaps[name, "dyt, fit", "relative L2"] for name in ("smart_turn", "dinov2_small", "minilm")]
    for page in pages.values():
        pattern = "leaves a relative L2 of # on a Whisper encoder, # on DINOv2 and # on all-MiniLM-L6-v2"
        assert_shown(numbers_in(pattern, page), fitted)
    shown = numbers_in(r"Calibration \(`--init calibrated`\) leaves the encoder #, and")
    assert_shown(shown, [swaps["smart_turn", "dyt, calibrated", "relative L2"]])
    cosine = swaps["smart_turn", "rmsnorm", "cosine"]
    assert_shown(numbers_in(r"have large means, it leaves # \(8 recordings\)", pages["swaps"]), [cosine])
    embedded = [swaps[name, "identity", "relative L2"] for name in embedded_models()]
    least, most, *pretrained = numbers_in(
        "toys keep a relative L2 of # to #; all-MiniLM-L6-v2 gets # and the Whisper encoder #", pages["swaps"]
    )
    assert_shown([least, most], [min(embedded), max(embedded)])
    assert_shown(pretrained, [swaps[name, "identity", "relative L2"] for name in ("minilm", "smart_turn")])
    calibrated = [
        values[0] for (_, way, name), values in samples_of("calibration").items() if (way, name) == WITH_NEIGHBOURS
    ]
    healed = [
        values[0]
        for (case, way, name), values in samples_of("healing").items()
        if (way, name) == ("dyt, all", "closed") and case in HEALED
    ]
    assert len(calibrated) == len(healed) == 5
    for closed, pattern in ((calibrated, "recovers # to # % of the error"), (healed, "`heal` recovers # to # % there")):
        assert_shown(numbers_in(pattern), [min(closed), max(closed)])
    expected = [of(closed) for closed in (calibrated, healed) for of in (min, max)]
    assert_shown(
        numbers_in("calibration recovers # to # % of the error, and healing # to # %", pages["swaps"]), expected
    )


def docs_page(name):
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


# Rows of the tables in docs/swaps.md, by their names in the results.
CONVERSION = {
    "RMSNorm": "RMSNorm",
    "DyT for all 13, fitted": "DyT, fitted",
    "the same, calibrated": "DyT, calibrated",
    "DyT for 11 of 13, calibrated (step 5)": "DyT, calibrated, two norms kept",
    "DyT for all 13, healed (step 6)": "DyT, healed in 30 minutes",
}
CALIBRATION = {
    "`demo_vit`": "demo_vit",
    "`demo_wav2vec2`": "demo_wav2vec2",
    "`demo_dit`": "demo_dit",
    "all-MiniLM-L6-v2, 320 docstrings": "minilm",
    "FCPE": "torchfcpe",
}
LLAMA = {
    "DyT, fitted": "fitted",
    "calibrated": "calibrated",
    "calibrated, two norms kept": "calibrated, two kept",
    "healed, 6 minutes": "healed",
}
HEALING = {
    "`demo_vit`, `--minutes 4`": "demo_vit, 4 minutes",
    "`demo_dit`, `--minutes 4`": "demo_dit, 4 minutes",
    "`demo_wav2vec2`, `--minutes 10`": "demo_wav2vec2, 10 minutes",
    "all-MiniLM-L6-v2, 1,200 docstrings, 480 steps": "minilm, 480 steps",
    "FCPE, `--minutes 4`": "torchfcpe, 4 minutes",
}


def test_the_tables_of_swaps_are_committed_results():
    page = docs_page("swaps")
    medians = {name: medians_of(name) for name in ("conversion", "calibration", "prenorm", "healing")}

    rows, minilm = rows_of(page, "all-MiniLM-L6-v2"), medians["conversion"]
    assert_shown(rows.pop("original"), [0, minilm["minilm", "original", "own text found"]])
    assert rows.keys() == CONVERSION.keys()
    for row, way in CONVERSION.items():
        columns = ("relative L2", "own text found", "CPU")
        assert_shown(rows[row], [minilm["minilm", way, column] for column in columns])

    rows, calibrated = rows_of(page, "calibration: median relative L2"), medians["calibration"]
    assert rows.keys() == CALIBRATION.keys()
    for row, case in CALIBRATION.items():
        errors = [calibrated[case, f"dyt, {way}", "relative L2"] for way in ("fit", "norms", "neighbours")]
        assert_shown(rows[row], [*errors, calibrated[case, "dyt, neighbours", "CPU"]])

    rows, llama = rows_of(page, "9 norms"), medians["prenorm"]
    for way in ("original", "RMSNorm"):
        assert_shown(rows["original, or RMSNorm"], [llama["llama-128", way, n] for n in ("perplexity", "KL", "top-1")])
    assert rows.keys() == {"original, or RMSNorm", *LLAMA}
    for row, way in LLAMA.items():
        assert_shown(rows[row], [llama["llama-128", way, name] for name in ("perplexity", "KL", "top-1")])

    rows, healed = rows_of(page, "healing: median relative L2"), medians["healing"]
    assert rows.keys() == HEALING.keys()
    for row, case in HEALING.items():
        columns = ("drift, start", "drift, calibrated", "drift, trained", "CPU")
        assert_shown(rows[row], [healed[case, "dyt, all", column] for column in columns])


def test_calibrated_pretrained_networks_are_committed_results():
    page, samples = docs_page("swaps"), samples_of("swaps")
    whisper, dino, smollm = (
        {quantity: values for (*at, quantity), values in samples.items() if at == [case, f"dyt, {way}"]}
        for case, way in (
            ("smart_turn", "calibrated"),
            ("dinov2_small, class token", "calibrated"),
            ("smollm2_135m", "calibrated, six kept"),
        )
    )
    median = statistics.median
    errors, learned = (whisper[name] for name in ("relative L2", "on inputs learned from"))
    shown = numbers_in(r"relative L2 # \(#\), # recordings, # s; # on inputs learned from", page)
    assert_shown(shown, [median(errors), max(errors), len(errors), median(whisper["CPU"]), median(learned)])

    rounds = [f"dinov2_small, class token, round {number}" for number in (1, 2, 3)]
    cosines, errors, learned, seconds = (
        [samples[case, "dyt, calibrated", name] for case in rounds]
        for name in ("cosine", "relative L2", "on inputs learned from", "CPU")
    )
    of_all = [value for values in cosines for value in values]
    pattern = r"cosine # \(#\), # crops, each photograph held out once \(medians # to #\), about # s;"
    medians, cpu = [median(values) for values in cosines], median(value for [value] in seconds)
    expected = [median(of_all), min(of_all), len(of_all), min(medians), max(medians), cpu]
    assert_shown(numbers_in(pattern, page), expected)
    shown = numbers_in("relative L2 # on the # crops learned from, # on the others", page)
    both = [median(value for values in part for value in values) for part in (learned, errors)]
    assert_shown(shown, [both[0], len(learned[0]), both[1]])
    healed = {name: samples["dinov2_small, class token", "dyt, healed", name] for name in ("cosine", "CPU")}
    assert healed["cosine"] == dino["cosine"]  # the state before the training was kept
    shown = numbers_in(r"30 steps of healing \(# s in all, # crops held out\) did not raise the cosine", page)
    assert_shown(shown, [*healed["CPU"], len(healed["cosine"])])

    errors, learned = (smollm[name] for name in ("KL", "on inputs learned from"))
    shown = numbers_in(r"KL # \(#\), # docstrings, # s; # on the # learned from", page)
    expected = [median(errors), max(errors), len(errors), *smollm["CPU"], median(learned), len(learned)]
    assert_shown(shown, expected)


# Rows of the tables of pretrained networks in docs/papers.md, by their names in the results.
FIGURES = {
    "DINOv2: 25, 8 crops": ("dinov2_small", "figures"),
    "Whisper encoder: 9, 8 recordings": ("smart_turn", "figures"),
    "SmolLM2-135M: 61, 12 texts": ("smollm2_135m", "figures"),
    "without token 0: 61, 12 texts": ("smollm2_135m", "figures, without token 0"),
    "all-MiniLM-L6-v2: 13, 12 texts": ("minilm", "figures"),
}
FUNCTIONS = {
    "identity": "identity",
    "hardtanh": "hardtanh, fit",
    "sigmoid": "sigmoid, fit",
    "tanh (DyT)": "dyt, fit",
    "tanh, A = 1, α = 0.5": "dyt, paper",
    "RMSNorm": "rmsnorm",
}


def test_the_tables_of_pretrained_networks_are_committed_results():
    page, samples = docs_page("papers"), samples_of("readme")
    rows = rows_of(page, "network: norms, inputs")
    assert rows.keys() == FIGURES.keys()
    for row, (case, way) in FIGURES.items():
        values = {quantity: samples[case, way, quantity] for *of, quantity in samples if of == [case, way]}
        r2, alpha = values["R² of tanh"], values["α"]
        assert_shown(re.findall(r"(?<=[ :])\d+(?=[ ,])", row), [len(r2), *values["samples"]])
        expected = [statistics.median(r2), min(r2), max(r2), values["straight"][0], min(values["nearly linear"])]
        expected += [max(values["largest |x|"]), max(values["largest share of a channel in Σx²"])]
        expected += [values["rank correlation of α and 1/std(x)"][0], min(alpha), max(alpha)]
        assert_shown(rows[row], expected)
    largest = samples["smollm2_135m", "figures", "largest |x|"]
    assert_shown(numbers_in(r"the largest .x. rises from # to # at the feed-forward of layer 11", page), largest[23:25])

    rows, samples = rows_of(page, "for all norms"), samples_of("swaps")
    assert rows.keys() == FUNCTIONS.keys()
    cases = ("dinov2_small", "smart_turn", "minilm")
    numbers = numbers_in(
        r"DINOv2: # crops . Whisper encoder: # recordings . \S+: # docstrings . SmolLM2-135M: # doc", page
    )
    counts = [len(samples[case, "dyt, fit", "relative L2"]) for case in cases]
    assert_shown(numbers, [*counts, len(samples["smollm2_135m", "dyt, fit", "KL"])])
    for row, way in FUNCTIONS.items():
        expected = []
        for case in cases:
            errors, cosines = (samples[case, way, name] for name in ("relative L2", "cosine"))
            expected += [statistics.median(errors), max(errors), statistics.median(cosines)]
        kl = samples.get(("smollm2_135m", way, "KL"), [])
        expected += [of(kl) for of in (statistics.median, max) if kl and math.isfinite(max(kl))]
        assert_shown(rows[row], expected)


SCALES = {
    "all-MiniLM-L6-v2": "minilm",
    "on French, German": "minilm, French and German",
    "on Russian, Japanese, Chinese": "minilm, Russian, Japanese and Chinese",
    "FCPE (pitch)": "torchfcpe",
    "RXNMapper (reactions)": "rxnmapper",
    "AntiBERTy (antibodies)": "antiberty",
    **{f"`{name}`": name for name in ("demo_vit", "demo_wav2vec2", "demo_dit")},
}


def test_the_table_of_scales_of_tokens_is_a_committed_result():
    page, samples = docs_page("scale-of-tokens"), samples_of("scale_of_tokens")
    for row, case in SCALES.items():
        [line] = re.findall(rf"^\| {re.escape(row)} \|[^|]*\|(.*)\|$", page, re.MULTILINE)
        ways = ("rmsnorm", "rmsnorm, centred", "few:8", "dyt", "frozen")
        for cell, way in zip(line.split("|"), ways, strict=True):
            value = statistics.median(samples[case, way, "relative L2"])
            if "·" in cell:
                assert value < 1e-6
            else:
                assert float(cell) == pytest.approx(value, abs=0.0006 if value < 1 else 0.006)


def test_a_single_number_of_another_page_is_a_committed_result():
    [three] = samples_of("readme")["minilm", "last norm", "share of three channels in Σx²"]
    assert_shown(numbers_in("three channels with γ ≈ 0 contain # % of Σx²", docs_page("card")), [three])


def test_the_study_of_a_training_is_a_committed_result():
    page = docs_page("probe")
    samples = {(case, quantity): values for (case, _, quantity), values in samples_of("probe_studies").items()}
    begin, end = (
        {name: values for (case, name), values in samples.items() if case == f"LayerNorm, step {step}"}
        for step in (0, 600)
    )
    first = numbers_in("all # sites have the same curve, nearly a step .tanh: α = #.", page)
    assert_shown(first, [len(begin["α of tanh"]), statistics.median(begin["α of tanh"])])
    assert_shown(numbers_in("σ spreads by a factor of #.", page), [statistics.median(begin["spread of σ"])])
    final = numbers_in("At the final norm α falls to #, the spread to #, and R² of tanh rises from # to #.", page)
    last = [end["α of tanh"], end["spread of σ"], begin["R² of tanh"], end["R² of tanh"]]
    assert_shown(final, [values[-1] for values in last])
    assert_shown(numbers_in(r"stays a step \(α = #\)", page), [end["α of tanh"][0]])
    gains = [isru - tanh for isru, tanh in zip(end["R² of isru"], end["R² of tanh"], strict=True)]
    assert_shown(numbers_in("by at most # in R² at the end", page), [max(gains)])
    assert min(gains) > 0

    rows = rows_of(page, "at step 600")
    three = ("LayerNorm", "DyT", "DyISRU")
    for row, quantity in (("loss, mean of 20 steps", "loss"), ("held-out digits read, of 64", "held-out digits read")):
        assert_shown(rows[row], [samples[f"{name}, step 600", quantity][0] for name in three])
    spreads = {"α, median over sites (least to largest)": "α", "1/std(x), likewise": "1/std(x)"}
    spreads[r"pairs with \|αx\| > 1, likewise"] = "pairs with |αx| > 1"
    for row, quantity in spreads.items():
        of_two = [samples[f"{name}, step 600", quantity] for name in three[1:]]
        assert_shown(rows[row], [of(values) for values in of_two for of in (statistics.median, min, max)])
    for step, text in ((0, "from #"), (120, "to #")):
        [shown] = numbers_in(f"1/std.x. falls {'from [0-9.]+ ' if step else ''}{text}", page)
        for name in three[1:]:
            assert_shown([shown], [statistics.median(samples[f"{name}, step {step}", "1/std(x)"])])
    correlations = numbers_in(r"rank correlation is # \(DyT\) and # \(DyISRU\)", page)
    assert_shown(correlations, [samples[f"{name}, step 600", "rank correlation"][0] for name in three[1:]])
    for name, shown in zip(three[1:], numbers_in("of the pairs beyond 1 to # % and # %", page), strict=True):
        assert_shown([shown], [statistics.median(samples[f"{name}, step 600", "pairs with |αx| > 1"])])
        assert_shown(numbers_in("from # % of the pairs", page), [samples[f"{name}, step 0", "pairs with |αx| > 1"][0]])


def test_the_map_of_learning_rates_is_a_committed_result():
    page, samples = docs_page("papers"), samples_of("learning_rates")
    least, (multiple,) = (
        numbers_in(r"at most # · ln 10, and", page),
        numbers_in(r"at most # times its minimum", page),
    )
    limit, functions = float(least[0]) * math.log(10), ("DyT", "DyISRU", "Derf")
    runs = {}  # pairs of loss at the end and stability, by case and way
    for case, way, quantity in samples:
        if quantity == "stable":
            both = zip(samples[case, way, "loss at the end"], samples[case, way, "least loss"], strict=True)
            runs[case, way] = [(end, end <= min(limit, float(multiple) * best)) for end, best in both]
            assert samples[case, way, "stable"] == [sum(stable for _, stable in runs[case, way])]

    def stable(width, rate, names, alphas=(0.2, 0.5, 1, 2), words=""):
        ways = [f"α₀ {alpha:g}, rate {rate:g}" for alpha in alphas]
        chosen = [runs.get((f"{name}, width {width}{words}", way), []) for name in names for way in ways]
        chosen += [runs.get((f"{name}, width {width}{words}", f"rate {rate:g}"), []) for name in names]
        return [sum(is_stable for cell in chosen for _, is_stable in cell), sum(map(len, chosen))]

    def loss(name, way):
        return statistics.mean(end for end, _ in runs[name, way])

    assert all(math.isfinite(end) for cell in runs.values() for end, _ in cell)
    seconds = sum(values[0] for (_, _, quantity), values in samples.items() if quantity == "CPU time")
    assert_shown(numbers_in(r"learning_rates.py`, # CPU minutes", page), [seconds / 60])
    failed, tried = stable(32, 0.001, functions)
    assert_shown(numbers_in("At width 32 and rate 0.001, # runs are merely slow", page), [tried - failed])
    everything = (*functions, "LayerNorm", "RMSNorm")
    shown = numbers_in("at rate 0.016, # of # runs are stable at width 32, and # of # at width 128", page)
    assert_shown(shown, [*stable(32, 0.016, everything), *stable(128, 0.016, everything)])
    shown = numbers_in("width 32, # of # runs with α₀ up to 0.5, and # of # above", page)
    assert_shown(shown, [*stable(32, 0.016, functions, (0.2, 0.5)), *stable(32, 0.016, functions, (1, 2))])
    shown = numbers_in("DyT ends at # with 0.2 and # with 2 .width 128", page)
    assert_shown(shown, [loss("DyT, width 128", f"α₀ {alpha}, rate 0.001") for alpha in ("0.2", "2")])
    shown = numbers_in("width 32, # of # runs against # of #; at rate 0.004, DyT ends at # and LayerNorm at #", page)
    norms = stable(32, 0.016, ["LayerNorm"])
    losses = [loss("DyT, width 32", "α₀ 0.5, rate 0.004"), loss("LayerNorm, width 32", "rate 0.004")]
    assert_shown(shown, [*stable(32, 0.016, functions, (0.5,)), *norms, *losses])
    cells = [(width, rate) for width in (32, 128) for rate in (0.001, 0.004, 0.016, 0.064)]
    shifted, as_before, rms = (
        [sum(counts) for counts in zip(*(stable(*cell, [name], words=words) for cell in cells), strict=True)]
        for name, words in (("LayerNorm", ", shifted weights"), ("LayerNorm", ""), ("RMSNorm", ", shifted weights"))
    )
    assert shifted == as_before
    shown = numbers_in("LayerNorm has # of # stable runs, as without the shift, RMSNorm # of #", page)
    assert_shown(shown, [*shifted, *rms])


def test_the_readme_holds_the_two_commands_and_can_be_read_in_minutes():
    assert "\npip install -c constraints.txt '.[speech]' && normscope plot\n" in README
    assert "\npip install -c constraints.txt -e '.[test,speech]' && pytest\n" in README
    assert len(README.split()) <= 900
