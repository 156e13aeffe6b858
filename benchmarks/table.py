"""Write docs/benchmarks.md, and parts of docs/kernels.md, docs/models.md and README.md: ``python benchmarks/table.py``.

All of it is from benchmarks/results/*.json.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import RESULTS, tables_of

ROOT = Path(__file__).parents[1]
PAGE, KERNELS, MODELS, README = "docs/benchmarks.md", "docs/kernels.md", "docs/models.md", "README.md"
ORDER = (
    "capture",
    "fit",
    "channels",
    "intervals",
    "swaps",
    "speed",
    "machine_code",
    "accuracy",
    "healing",
    "figure",
    "startup",
    "scale",
    "gpu",
)
TITLES = {
    "capture": "What a capture costs",
    "fit": "What a fit costs",
    "channels": "What a fit of every channel costs",
    "intervals": "How often the intervals hold the truth",
    "swaps": "How far a swap moves the output",
    "speed": "How fast swapped networks are",
    "accuracy": "How accurate the kernels' functions are",
    "healing": "How much of that is healed",
    "machine_code": "What the kernels are as machine code",
    "figure": "What a figure costs",
    "startup": "How long it takes to start",
    "scale": "What a whole data set costs",
    "gpu": "On a GPU",
}
INTRODUCTION = """# Benchmarks

Each number is a median, with the smallest and the largest of its samples behind it. Whatever is compared ran in turn on
the same machine within one command. Ratios carry over to other machines better than times do. The raw samples are in
[benchmarks/results](../benchmarks/results). To repeat all of it:

```bash
pip install -e '.[bench]'
{commands}
python benchmarks/table.py
```

This page is written by the last of these commands; a change to it by hand would be lost.
"""


BEGIN, END = "<!-- python benchmarks/table.py writes from here -->\n", "<!-- to here -->\n"
NOT_MEASURED = """
**Measured on a GPU: nothing.** Not that they are faster than plain torch or than torch.compile, not that they reach the
floors, not the tile sizes (chosen by counting), not the accuracy of the instructions. The first things to measure are
the copy, then (3).

"""
MEASURED = """
**Measured on a GPU.** What was measured of whole networks and of captures is [beside it](benchmarks.md).
"""
README_NOT_MEASURED = """\
- Nothing has been measured on a GPU yet: the fused kernels are held to float64 in Triton's interpreter, and to counts
  in their machine code.
"""
README_MEASURED = """\
- On GPUs, kernels, captures and whole networks were checked and measured on {machines}:
  [what came of it](docs/kernels.md#on-a-gpu).
"""
KERNELS_APART = "What was measured of the kernels themselves is [beside it](kernels.md).\n"
_OF_NETWORKS = ("networks", "captures")
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files (%(default)s)")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of README.md and docs (%(default)s)")
    args = parser.parse_args()
    paths = sorted(args.results.glob("*.json"))
    if not paths:
        parser.error(f"there is no result in {args.results}; run python benchmarks/fit.py, for example")
    records = [record for path in paths if real(record := json.loads(path.read_text(encoding="utf-8")))]
    for name, text in written(args.root, records).items():
        (args.root / name).write_text(text, encoding="utf-8")
        print(args.root / name)


def written(root: Path, records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Write each page anew: one as a whole, and of the others what stands between two marks."""
    blocks = {KERNELS: of_kernels(records), MODELS: of_architectures(records), README: of_readme(records)}
    pages = {name: with_block(name, (root / name).read_text(encoding="utf-8"), own) for name, own in blocks.items()}
    return {PAGE: page(records), **pages}


def real(record: Mapping[str, Any]) -> bool:
    """Whether something was measured, and not rehearsed."""
    return "--rehearse" not in record["command"].split()


def with_block(name: str, text: str, block: str) -> str:
    """Put a block between the two marks of a page."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{name} lacks {BEGIN.strip()} or {END.strip()}, between which GPUs' numbers belong.")
    return f"{before}{begin}{block}{end}{after}"


def of_kernels(records: Sequence[Mapping[str, Any]]) -> str:
    """Say what was measured of the kernels themselves on GPUs, or that nothing was."""
    parts = []
    for record in records:
        if found := of_parts(record, networks=False):
            parts += [*found, origin(record)]
    return "\n".join([MEASURED, *parts, ""]) if parts else NOT_MEASURED


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


def of_readme(records: Sequence[Mapping[str, Any]]) -> str:
    """Say on which GPUs anything was measured, and when, or that nothing was."""
    machines = [f"{one['machine']['gpu']} ({one['date'][:10]})" for one in records if "gpu" in one["machine"]]
    return README_MEASURED.format(machines=" and ".join(machines)) if machines else README_NOT_MEASURED


def of_parts(record: Mapping[str, Any], *, networks: bool) -> list[str]:
    """Write the tables of the parts that ran whole networks, or of the others, and what was found wrong there."""
    own = [one for one in record.get("parts", []) if one["part"].startswith(_OF_NETWORKS) == networks]
    wrong = "".join(f"- {sentence}\n" for one in own for sentence in one["failures"])
    return [
        *(markdown(*table) for table in tables_of({"parts": own})),
        *([f"What was wrong:\n\n{wrong}"] if wrong else []),
    ]


def page(records: Sequence[Mapping[str, Any]]) -> str:
    """Write the whole page, a section a benchmark, and in it a part for each machine."""
    where = {"gpu": "  # with an NVIDIA GPU, until nothing is left"}
    commands = "\n".join(f"python benchmarks/{name}.py{where.get(name, '')}" for name in ORDER)
    parts = [INTRODUCTION.format(commands=commands)]
    for name in ORDER:
        own = [record for record in records if record["benchmark"] == name]
        parts += [f"## {TITLES[name]}\n"] if own else []
        for record in own:
            if "parts" in record:
                found = [KERNELS_APART, *of_parts(record, networks=True)]
            else:
                found = [markdown(*table) for table in tables_of(record)]
            parts += [record["about"] + "\n", *found, origin(record)]
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
        hardware = f"{machine['gpu']}, driver {machine['driver']}, CUDA {machine['cuda']}, in {hardware}"
    threads = f" · threads: {', '.join(map(str, record['threads']))}" if record["threads"] else ""
    left_out = f" · left out: {', '.join(record['left_out'])}" if record["left_out"] else ""
    libraries = ", ".join(f"{name} {version}" for name, version in versions.items())
    commit = f" · commit {record['commit']}" if record["commit"] else ""
    return f"`{record['command']}` · {record['date'][:10]}{commit}{threads}{left_out}\n\n{hardware} · {libraries}\n"


if __name__ == "__main__":
    main()
