"""Write docs/benchmarks.md and its figures: ``python benchmarks/table.py``."""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from common import RESULTS, cell, tables_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
QUESTIONS = tomllib.loads(Path(__file__).with_name("questions.toml").read_text(encoding="utf-8"))["question"]
INTRODUCTION = """# Benchmarks

Numbers are medians; bars in the figures extend from the smallest to the largest sample. Ratios carry over to other
machines better than times do. Each section names its script and links its raw samples, with the command, the commit and
all versions. Nothing was measured on a GPU yet ([how to](kernels.md#on-a-gpu)). `pip install -e '.[transformers]'`
installs what the scripts need, and `python benchmarks/table.py` writes this page. Samples may name scripts and
libraries that were removed since.
"""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
MARKERS = "osD^vPX"
Samples = Mapping[tuple[str, str, str], Sequence[float]]  # by case, way and quantity


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files (%(default)s)")
    parser.add_argument("--page", type=Path, default=PAGE, help="to write, beside its figures (%(default)s)")
    args = parser.parse_args()
    args.page.with_suffix("").mkdir(exist_ok=True)
    args.page.write_text(page_of(args.results, args.page.with_suffix("")), encoding="utf-8")
    print(args.page)


def page_of(results: Path, figures: Path | None = None) -> str:
    """Return the page, and draw its figures into a folder. Results that lack an answer's samples become tables."""
    parts = [INTRODUCTION]
    for question in QUESTIONS:
        for number, path in enumerate(sorted(results.glob(f"{question['benchmark']}-*.json"))):
            record = json.loads(path.read_text(encoding="utf-8"))
            parts += [f"## {question['title']}\n"] if not number else []
            sentences, chart = answer(question["answer"], record), question.get("chart")
            parts += [f"{sentences}\n"] if sentences else tables_of(record)
            if sentences and (label := chart["label"] if chart else question.get("figure")):
                parts.append(f"![{label}](benchmarks/{path.stem}.svg)\n")
                if figures and chart:
                    draw(chart, samples_of(record), figures / f"{path.stem}.svg")
            parts += [f"Failed: {sentence}\n" for sentence in record.get("failed", ())]
            script = f"`benchmarks/{question['script']}.py`, " if "script" in question else ""
            parts.append(f"{script}{origin(record)}, [samples](../benchmarks/results/{path.name})\n")
    return "\n".join(parts)


def samples_of(record: Mapping[str, Any]) -> Samples:
    """Return the samples of a record by case, way and quantity, and by quantity with unit."""
    rows = record["measurements"]
    with_unit = {(row["case"], row["way"], f"{row['quantity']}, {row['unit']}"): row["samples"] for row in rows}
    return with_unit | {(row["case"], row["way"], row["quantity"]): row["samples"] for row in reversed(rows)}


def answer(text: str, record: Mapping[str, Any]) -> str:
    """Replace each ``{case|way|quantity}`` by the median of these samples; return "" if some are missing.

    >>> row = {"case": "net", "way": "hooks", "quantity": "time", "unit": "s", "samples": [1e-6, 3e-6, 2e-6]}
    >>> answer("It takes {net|hooks|time} s.", {"measurements": [row]}), answer("{a|b|c}", {"measurements": [row]})
    ('It takes 2·10⁻⁶ s.', '')
    """
    samples = samples_of(record)
    fields = {field: tuple(field.split("|")) for field in re.findall(r"\{(.+?)\}", " ".join(text.split()))}
    if not samples.keys() >= {*fields.values()}:
        return ""
    values = {field: power(cell([statistics.median(samples[key])])) for field, key in fields.items()}
    filled = re.sub(r"\{(.+?)\}", lambda match: values[match[1]], " ".join(text.split()))
    return "\n".join(wrap(filled, 120, break_long_words=False, break_on_hyphens=False))


def power(number: str) -> str:
    """Write the exponent of a number as superscript."""
    superscript = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    return re.sub(r"e([+-]\d+)", lambda match: "·10" + str(int(match[1])).translate(superscript), number)


def origin(record: Mapping[str, Any]) -> str:
    """Return the machine, torch's version and the day of a record."""
    machine = record["machine"]
    hardware = f"{machine['cpu']}, {machine['cores']} core{'s' if machine['cores'] > 1 else ''}, no GPU"
    if "gpu" in machine:
        hardware = f"{machine['gpu']}, CUDA {machine['cuda']}"
    return f"{hardware}, torch {record['versions']['torch']}, {record['date'][:10]}"


def draw(chart: Mapping[str, Any], samples: Samples, path: Path) -> None:
    """Draw medians and ranges: a row for each case, or for each series if the case has no label."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    points = []
    for case, case_label in chart["cases"].items():
        for name, label in chart["series"].items():
            way, _, quantity = name.partition("|")
            key = case, way, quantity or chart["quantity"]
            if key in samples:
                points.append((case_label, label, samples[key]) if case_label else (label, "", samples[key]))
    rows, series = (list(dict.fromkeys(point[i] for point in points)) for i in (0, 1))
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem, "font.size": 9, "axes.axisbelow": True}):
        figure = Figure((6.9, 0.75 + len(rows) * max(0.24, 0.19 * len(series))), layout="constrained")
        axes = figure.subplots()
        for row, label, values in points:
            number = series.index(label)
            y = rows.index(row) + (number - (len(series) - 1) / 2) / (len(series) + 0.6)
            median, colour = statistics.median(values), COLOURS[number]
            axes.hlines(y, min(values), max(values), colour, linewidth=1)
            axes.plot(median, y, MARKERS[number], color=colour, markersize=5, label=label)
            axes.annotate(power(cell([median])), (max(values), y), (5, 0), textcoords="offset points", va="center")
        axes.set(xlabel=chart["label"], xscale="log" if chart.get("log") else "linear", ylim=(len(rows) - 0.5, -0.5))
        axes.margins(x=0.12)
        if not chart.get("log"):
            axes.set_xlim(left=chart.get("start", 0))
        if "reference" in chart:
            axes.axvline(chart["reference"], color="0.5", linestyle="--", linewidth=1, zorder=0)
        axes.set_yticks(range(len(rows)), rows)
        axes.tick_params(left=False)
        axes.grid(axis="x", color="0.9")
        axes.spines[["top", "right", "left"]].set_visible(False)
        if len(series) > 1:
            for edge in range(1, len(rows)):
                axes.axhline(edge - 0.5, color="0.9", linewidth=1, zorder=0)
            handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
            where = {"loc": "outside upper center", "ncols": min(len(series), 5), "frameon": False}
            figure.legend(handles.values(), handles, **where)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
