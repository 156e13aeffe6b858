"""Write docs/benchmarks.md from benchmarks/results: ``python benchmarks/table.py``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import RESULTS, tables_of

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
TITLES = {
    "capture": "What a capture costs",
    "fit": "What a fit costs",
    "intervals": "How often the intervals contain the truth",
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
    "page": "How fast the page is written, opens and answers",
    "commands": "How long commands take",
    "scale": "What a whole data set costs",
    "gpu": "Tests of the kernels on a GPU",
}
INTRODUCTION = """# Benchmarks

Each number is the median of its samples, followed by the smallest and the largest. Within one command, everything that
is compared ran in turn on the same machine. Ratios carry over to other machines better than times do. The raw samples
are in [benchmarks/results](../benchmarks/results). To repeat the measurements:

```bash
pip install -e '.[bench]'
{commands}
python benchmarks/gpu.py  # with an NVIDIA GPU, see kernels.md
python benchmarks/table.py
```

The last command writes this page and overwrites any edit by hand. Each section ends with the command and the commit
that produced its numbers. Some of these commands name scripts that are now part of others:

| script in a command | now part of |
|---|---|
| `pointwise.py` | `speed.py` |
| `calibration.py`, `healing.py`, `prenorm.py` | `swaps.py` |
| `machine_code_capture.py` | `machine_code.py` |
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files (%(default)s)")
    parser.add_argument("--page", type=Path, default=PAGE, help="to write (%(default)s)")
    args = parser.parse_args()
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(args.results.glob("*.json"))]
    scripts = [name for name in TITLES if name != "gpu" and Path(__file__).with_name(f"{name}.py").exists()]
    parts = [INTRODUCTION.format(commands="\n".join(f"python benchmarks/{name}.py" for name in scripts))]
    for name, title in TITLES.items():
        of_title = [record for record in records if record["benchmark"] == name]
        parts += [f"## {title}\n"] if of_title else []
        for record in of_title:
            failures = "".join(f"- {sentence}\n" for sentence in record.get("failed", ()))
            failed = [f"What failed:\n\n{failures}"] if failures else []
            parts += [record["about"] + "\n", *tables_of(record), *failed, origin(record)]
    args.page.write_text("\n".join(parts), encoding="utf-8")
    print(args.page)


def origin(record: Mapping[str, Any]) -> str:
    """Return the command, commit, machine and versions of a record."""
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
