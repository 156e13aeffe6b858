"""Record the behaviour of normscope as text files: ``python scripts/record_behaviour.py FOLDER``.

``diff -ru`` of the folders of two revisions shows each change that a user could see: JSON and text of every command,
text in figures, options, signatures of public names, and the schema of each file format. Numbers have five digits;
times are left out. PYTHONPATH selects the revision. The pretrained networks come from ``scripts/fetch_pretrained.py``.
"""

import argparse
import contextlib
import importlib
import inspect
import json
import multiprocessing
import os
import re
import runpy
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

MODELS = "demo_vit,demo_wav2vec2,demo_dit,minilm,dinov2_small,smollm2_135m,smart_turn"
ONCE = "demo_vit"  # slow commands and text are recorded of this model alone
FEW = "MODEL --limit 6 --batch-size 4"
SEEN = "FOLDER/seen.safetensors"
# Commands by the name of their record: those that run a network, then those that read its capture.
NETWORK = {
    "layers": "layers MODEL --verify --json",
    "capture": f"capture {FEW} --per-channel --diagonal --by-gamma --keep-inputs 2 -o {SEEN} --json",
    "swap": f"swap {FEW} --layers 4 -o FOLDER/swapped --json",
}
NETWORK_ONCE = {
    "swap-calibrated": f"swap {FEW} --init calibrated --layers 4 -o FOLDER/calibrated --json",
    "swap-bench": f"swap-bench {FEW} --layers 2 --quick --format svg -o FOLDER --json",
    "heal": "heal MODEL --limit 32 --steps 2 --init fit --layers 2 -o FOLDER/healed --json",
}
CAPTURE = {
    "stats": f"stats {SEEN} --plot FOLDER/stats.svg --json",
    "fit": f"fit {SEEN} --func all --layers 4 --plot FOLDER/fit.svg --json",
    "fit-no-shift": f"fit {SEEN} --no-shift --layers 2 --weights-by gamma --json",
    "fit-channel": f"fit {SEEN} --per channel --layers 1 --func tanh --json",
    "fit-theory": f"fit {SEEN} --theory --layers 2 --json",
    "gradient": f"gradient {SEEN} --layers 2 -o FOLDER/gradient.svg --json",
    "compare": f"compare {SEEN} {SEEN} -o FOLDER/compare.svg --json",
    "plot": f"plot {SEEN} --layers 4 --format svg -o FOLDER --json",
    "report": f"report {SEEN} --layers 4 -o FOLDER/page.html --json",
}
CAPTURE_ONCE = {
    "stats-text": f"stats {SEEN}",
    "fit-text": f"fit {SEEN} --func all",
    "fit-csv": f"fit {SEEN} -o FOLDER/fit.csv",
    "gradient-text": f"gradient {SEEN} -o FOLDER/text.svg",
    "compare-text": f"compare {SEEN} {SEEN} -o FOLDER/text.svg",
    "mistake-merge": f"merge {SEEN} {SEEN} -o FOLDER/merged.safetensors",
    "mistake-model": "fit nosuch",
    "mistake-layers": f"stats {SEEN} --layers nosuch",
    "mistake-func": "fit MODEL --func tahn",
    "mistake-data": "stats MODEL --data missing.png",
    "models": "models --json",
    "curves": "curves --json",
}
HELP = "capture,compare,curves,fit,gradient,heal,layers,merge,models,plot,report,stats,swap,swap-bench"
LIBRARIES = ("torch", "timm", "transformers", "diffusers", "matplotlib.pyplot", "numba", "rich.console", "typer")
FORK = multiprocessing.get_context("fork")  # imports LIBRARIES once


def record(line: str, path: Path, scratch: Path) -> None:
    """Run a command in this (forked) process; write its exit status and output to a file."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("output", "remarks")]
        for descriptor, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY), descriptor)
        sys.argv = ["normscope", *line.split()]
        status: Any = 0
        try:
            runpy.run_module("normscope", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code or 0
        sys.stdout.flush()
        sys.stderr.flush()
        text, remarks = (file.read_text(encoding="utf-8") for file in files)
    with contextlib.suppress(ValueError):
        text = printed(steady(json.loads(text)))
    if status or "--json" not in line:
        text += remarks
    text = f"{line}\nexit {status}\n{text}\n".replace(str(scratch), "SCRATCH")
    path.write_text(re.sub(r" +$", "", text, flags=re.MULTILINE), encoding="utf-8")


def steady(value: Any, name: str = "") -> Any:
    """Return a JSON value with rounded numbers, and types in the place of values that differ from run to run."""
    if "seconds" in name or (isinstance(value, dict) and "gb_per_s" in value):
        return schema(value)
    if isinstance(value, dict):
        return {key: steady(inner, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [steady(inner, name) for inner in value]
    return float(f"{round(value, 12):.5g}") if isinstance(value, float) else value


def schema(value: Any) -> Any:
    """Return a JSON value with types in the place of values, and the first element of each list alone."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, dict):
        return {key: schema(inner) for key, inner in sorted(value.items())}
    return [schema(inner) for inner in value[:1]] if isinstance(value, list) else type(value).__name__


def printed(value: Any) -> str:
    """Return a JSON value as text, with lists of numbers on one line."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    return re.sub(r"(?<=[-\d.],)\n +(?=[-\d])|(?<=\[)\n +(?=[-\d])|(?<=\d)\n +(?=\])", "", text)


def contents(path: Path) -> str | None:
    """Return the tensors of a file, the schema of JSON, or the text in a figure or a page."""
    if path.suffix == ".safetensors":
        with path.open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        metadata = printed(schema(header.pop("__metadata__", {})))
        return "\n".join(
            [metadata, *(f"{name} {entry['dtype']} {entry['shape']}" for name, entry in sorted(header.items()))]
        )
    if path.suffix not in (".json", ".html", ".svg", ".py"):
        return None
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".svg":
        words = re.findall(r"<text[^>]*>([^<]+)", text) or re.findall(r"<!-- (.*?) -->", text)
        return "\n".join(word for word in words if "speed" not in path.name or not re.match(r"[\d×]|[mµ]?s$", word))
    documents = re.findall(r"<script[^>]*json[^>]*>(.*?)</script", text) if path.suffix == ".html" else [text]
    return text if path.suffix == ".py" else "\n".join(printed(schema(json.loads(document))) for document in documents)


def signatures() -> str:
    """Return the signatures of public names and of their public members."""
    normscope = importlib.import_module("normscope")
    lines = []
    for name in sorted(normscope.__all__):
        public = {name: getattr(normscope, name)}
        if inspect.isclass(public[name]):
            members = inspect.getmembers_static(public[name])
            public |= {f"{name}.{member}": value for member, value in members if member[0] != "_"}
        for full, value in public.items():
            function = getattr(value, "__func__", value)  # of class methods
            with contextlib.suppress(TypeError, ValueError):  # attributes and exceptions
                full += str(inspect.signature(function))
            lines.append(f"{full}\n")
    return re.sub(r" at 0x\w+", "", "".join(lines))


def main() -> None:
    """Write one text file per command and per file that commands write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", default=MODELS)
    options = parser.parse_args()
    (folder := options.folder).mkdir(parents=True, exist_ok=True)
    os.environ |= {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb", "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    for library in LIBRARIES:
        importlib.import_module(library)
    (folder / "signatures.txt").write_text(signatures(), encoding="utf-8")
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        for common, once in ((NETWORK, NETWORK_ONCE), (CAPTURE, CAPTURE_ONCE)):
            commands = {f"help.{name}": f"{name} --help" for name in HELP.split(",")} if common is CAPTURE else {}
            for model in options.models.split(","):
                (scratch / model).mkdir(exist_ok=True)
                for name, line in (common | (once if model == ONCE else {})).items():
                    commands[f"{model}.{name}"] = line.replace("MODEL", model).replace("FOLDER", f"{scratch / model}")
            for name, line in commands.items():
                (process := FORK.Process(target=record, args=(line, folder / f"{name}.txt", scratch))).start()
                process.join()
        for path in sorted(scratch.rglob("*")):
            if (text := contents(path)) is not None:
                name = path.relative_to(scratch).as_posix().replace("/", ".")
                (folder / f"file.{name}.txt").write_text(text.replace(str(scratch), "SCRATCH") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
