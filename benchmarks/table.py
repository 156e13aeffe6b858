"""Write docs/benchmarks.md and the survey in docs/models.md from benchmarks/results: ``python benchmarks/table.py``."""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import RESULTS, tables_of

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
MODELS = PAGE.with_name("models.md")
BEGIN, END = "<!-- python benchmarks/table.py writes from here -->\n", "<!-- to here -->\n"
OUTCOMES = {
    "works": "every norm reproduced",
    "not padded": "the same, but not captured of two texts at a time",
    "no norm": "no norm of activations, and that is said",
    "refused": "refused in a sentence",
    "traceback": "failed",
    "time": "took too long",
    "memory": "took too much memory",
    "not built": "not made so small that the library itself ran it on text",
}
TITLES = {
    "capture": "What a capture costs",
    "capture_parts": "What the steps of a capture cost",
    "fit": "What a fit costs",
    "channels": "What a fit of every channel costs",
    "intervals": "How often the intervals hold the truth",
    "folds": "Where kinds of sources alternate",
    "swaps": "How far a swap moves the output",
    "speed": "How fast swapped networks are",
    "pointwise": "How fast point-wise functions are on the CPU",
    "host_time": "How long the host takes for a fused call",
    "machine_code": "What the kernels are as machine code",
    "machine_code_capture": "What a capture's kernels are as machine code",
    "compiled_bytes": "What a compiled network reads and writes around a norm",
    "accuracy": "How accurate the kernels' functions are",
    "calibration": "How much of that goes without training",
    "healing": "How much of that is healed",
    "prenorm": "What is left of pre-norm networks",
    "conversion": "A pretrained network converted from start to end",
    "figure": "What a figure costs",
    "page": "How fast the page is written, opens and answers",
    "commands": "How long commands take",
    "scale": "What a whole data set costs",
}
OF_A_GPU = {
    "gpu_checks": "Whether the kernels are right on a GPU",
    "gpu_accuracy": "How accurate the kernels' functions are on a GPU",
    "gpu_kernels": "How fast the kernels are on a GPU",
    "gpu_captures": "What a capture costs on a GPU",
    "gpu_networks": "How fast swapped networks are on a GPU",
}
INTRODUCTION = """# Benchmarks

Each number is a median, with the smallest and the largest of its samples behind it. Whatever is compared ran in turn on
the same machine within one command. Ratios carry over to other machines better than times do. The raw samples are in
[benchmarks/results](../benchmarks/results). To repeat all of it:

```bash
pip install -e '.[bench]'
{commands}
python benchmarks/gpu.py  # with an NVIDIA GPU: kernels.md says what it does
python benchmarks/table.py
```

This page is written by the last of these commands; a change to it by hand would be lost.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files (%(default)s)")
    parser.add_argument("--page", type=Path, default=PAGE, help="to write (%(default)s)")
    parser.add_argument("--models", type=Path, default=MODELS, help="page with the survey (%(default)s)")
    args = parser.parse_args()
    if not (found := records(args.results)):
        parser.error(f"there is no result in {args.results}; run python benchmarks/fit.py, for example")
    args.page.write_text(page(found), encoding="utf-8")
    args.models.write_text(with_survey(args.models.read_text(encoding="utf-8"), found), encoding="utf-8")
    print(args.page, args.models, sep="\n")


def records(results: Path) -> list[dict[str, Any]]:
    """Read the files of a folder."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("*.json"))]


def with_survey(text: str, found: Sequence[Mapping[str, Any]]) -> str:
    """Put what the survey of architectures found between the two marks of a page."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"The page lacks {BEGIN.strip()} or {END.strip()}, between which the survey belongs.")
    return f"{before}{begin}{of_architectures(found)}{end}{after}"


def of_architectures(records: Sequence[Mapping[str, Any]]) -> str:
    """Count what came of each library's architectures, and list those that did not work by the reason."""
    parts = []
    for record in (one for one in records if one["benchmark"] == "architectures"):
        rows = record["rows"]
        counts = Counter((row["outcome"], row["library"]) for row in rows)
        libraries = list(dict.fromkeys(row["library"] for row in rows))
        outcomes = [outcome for outcome in OUTCOMES if any(counts[outcome, library] for library in libraries)]
        table = [[OUTCOMES[outcome], *(str(counts[outcome, each]) for each in libraries)] for outcome in outcomes]
        sites, worst = sum(sum(row["norms"].values()) for row in rows), max(row["worst"] or 0 for row in rows)
        said = f"{sites:,} norms were reproduced, to within {worst:.2g} of what rounding explains.\n"
        parts += [record["about"] + "\n", markdown(["", *libraries], table, left=1), said]
        for outcome in outcomes:
            if outcome != "works":
                own = [row for row in rows if row["outcome"] == outcome]
                bare = outcome in ("no norm", "not built")  # of which each says something else
                listed = ", ".join(f"`{row['name']}`" for row in own) + ".\n" if bare else f"\n\n{reasons(own)}"
                parts.append(f"{OUTCOMES[outcome][0].upper()}{OUTCOMES[outcome][1:]}:{' ' * bare}{listed}")
        parts.append(origin(record))
    return "\n".join(parts)


def reasons(rows: Sequence[Mapping[str, Any]]) -> str:
    """List architectures by the reason, without what differs from one to another: places, shapes and numbers."""
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        alone = " (alone, by the command line: done)" if row["exit_status"] == 0 else ""
        by_reason.setdefault(alike(row), []).append(f"`{row['name']}`{alone}")
    return "".join(f"- {reason} {', '.join(names)}\n" for reason, names in by_reason.items())


def alike(row: Mapping[str, Any]) -> str:
    """Return the reason's first sentence, with … for what it says of this architecture alone.

    >>> alike({"name": "AModel", "reason": "At a.b.0 (input (2, 8)) AModel ends after 12 of 419 positions. Do that."})
    'At … … ends after … of … positions.'
    """
    sentence = re.split(r"(?<=\.) (?=[A-Z])", row["reason"].splitlines()[-1])[0].replace(row["name"], "…")
    sentence = re.sub(r" ?\((?:[^()]|\([^()]*\))*\)", "", sentence)
    return re.sub(r"\b\w+(\.\w+)+\b|\b\d[\d,]*\b(?! s\b)", "…", sentence)


def page(found: Sequence[Mapping[str, Any]]) -> str:
    """Write the whole page, a section a benchmark, and in it a part for each machine."""
    commands = "\n".join(f"python benchmarks/{name}.py" for name in TITLES)
    parts = [INTRODUCTION.format(commands=commands)]
    for name, title in {**TITLES, **OF_A_GPU}.items():
        own = [record for record in found if record["benchmark"] == name]
        parts += [f"## {title}\n"] if own else []
        for record in own:
            tables = [markdown(*table) for table in tables_of(record)]
            wrong = "".join(f"- {sentence}\n" for sentence in record.get("failed", ()))
            failed = [f"What failed:\n\n{wrong}"] if wrong else []
            parts += [record["about"] + "\n", *tables, *failed, origin(record)]
    return "\n".join(parts)


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 2) -> str:
    """Write a table, whose first columns stand to the left."""
    rules = [":--" if number < left else "--:" for number in range(len(headings))]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (headings, rules, *rows))


def origin(record: Mapping[str, Any]) -> str:
    """Say which machine, versions and command the numbers come from."""
    machine, versions = record["machine"], record["versions"]
    hardware = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']:g} GB, {machine['os']}"
    if "gpu" in machine:
        driver = machine.get("driver_version", "unknown")
        hardware = f"{machine['gpu']}, driver {driver}, CUDA {machine['cuda']}, in {hardware}"
    threads = f" · threads: {', '.join(map(str, record['threads']))}" if record["threads"] else ""
    left_out = f" · left out: {', '.join(record['left_out'])}" if record["left_out"] else ""
    libraries = ", ".join(f"{name} {version}" for name, version in versions.items())
    commit = f" · commit {record['commit']}" if record["commit"] else ""
    return f"`{record['command']}` · {record['date'][:10]}{commit}{threads}{left_out}\n\n{hardware} · {libraries}\n"


if __name__ == "__main__":
    main()
