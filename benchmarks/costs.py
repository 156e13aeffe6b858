"""Time and memory of captures of full-size networks, whole commands: ``python benchmarks/costs.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import Measurement, finish, names, options
from runs import write_images

CASES = {
    "demo_vit": ("--limit", "1000", "--data", "images"),
    "vit_b16": ("--weights", "random", "--limit", "64", "--data", "images"),
    "vit_l16": ("--weights", "random", "--limit", "64", "--data", "images"),
    "convnext_b": ("--weights", "random", "--limit", "64", "--data", "images"),
    "wav2vec2_large": ("--weights", "random"),
    "dit_xl": ("--weights", "random", "--limit", "1"),
}
ABOUT = """
`normscope capture MODEL -o FILE`: whole commands with default options, on all cores. Weights of full-size networks are
random; time and memory do not depend on them. Samples: images, utterances or timesteps that ran through the network.
CPU time: of all cores together. Memory: peak resident memory of the process, including the network.
"""


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--models", type=names, default=list(CASES), help=f"({','.join(CASES)})")
    args = parser.parse_args()
    samples: dict[tuple[str, str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder) / "images", 1000)
        for model in args.models * args.repeats:
            print(f"{model} …", flush=True)
            for (quantity, unit), value in cost(model, Path(folder)).items():
                samples.setdefault((model, quantity, unit), []).append(value)
    measurements = [Measurement(model, "", *quantity, values) for (model, *quantity), values in samples.items()]
    libraries = ["timm", "torchaudio", "diffusers", "numba"]
    finish("costs", ABOUT, measurements, args, threads=[os.cpu_count() or 1], libraries=libraries)


def cost(model: str, folder: Path) -> dict[tuple[str, str], float]:
    """Run one command to its end; return quantities with their units."""
    command = [sys.executable, "-m", "normscope", "capture", model, "-o", "seen.safetensors", "--json", *CASES[model]]
    start = time.perf_counter()
    with (folder / "out.json").open("w+", encoding="utf-8") as out:
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        if status:
            raise SystemExit(f"{' '.join(command)} failed")
        out.seek(0)
        document = json.load(out)
    return {
        ("samples", "1"): document["n_samples"],
        ("norms", "1"): len(document["sites"]),
        ("pairs", "million"): sum(site["n_pairs"] for site in document["sites"]) / 1e6,
        ("time", "s"): seconds,
        ("CPU time", "s"): usage.ru_utime + usage.ru_stime,
        ("memory", "GB"): usage.ru_maxrss * (1 if sys.platform == "darwin" else 1000) / 1e9,
        ("file", "MB"): (folder / "seen.safetensors").stat().st_size / 1e6,
    }


if __name__ == "__main__":
    main()
