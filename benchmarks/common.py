"""Harness of the benchmarks: timing in turn, child processes, and one JSON file of raw samples per machine."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
NO_GPU = "No NVIDIA GPU is available."
_ALWAYS_NAMED = ("normscope", "torch", "numpy")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")


@dataclass(frozen=True)
class Measurement:
    """Samples of one quantity, in the order in which they were taken.

    Attributes:
        case: the subject, such as a model and its shape.
        way: normscope, or a peer.
        quantity: name of the quantity.
        unit: unit of the samples; × and % are ratios of other samples of the same run.
        samples: one for each repeat.
        shown: whether the tables contain it; the file contains every measurement.
        error: standard error of a counted share, in its unit; None for other quantities.
    """

    case: str
    way: str
    quantity: str
    unit: str
    samples: Sequence[float]
    shown: bool = True
    error: float | None = None


def options(description: str, *, repeats: int = 1, device: bool = False) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--repeats", type=int, default=repeats, help="samples of each quantity (%(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON file (%(default)s)")
    if device:
        parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="(%(default)s)")
    return parser


def names(text: str) -> list[str]:
    """Split a list at its commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def in_turn(ways: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Time every way once per round, after a warm-up round, so that other load meets all of them: seconds."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(repeats + 1):
        for name, way in ways.items():
            gc.collect()
            duration = seconds_of(way)
            if number:
                seconds[name].append(duration)
    return seconds


def seconds_of(function: Callable[[], object]) -> float:
    """Return the duration of a call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def ratios(over: Iterable[float], under: Iterable[float]) -> list[float]:
    """Divide samples by those of the same round."""
    return [a / b for a, b in zip(over, under, strict=True)]


def in_own_process(function: Callable[..., Any], *args: Any, threads: int) -> Any:
    """Call a function in a new process with this number of threads, and return its result.

    Waiting threads of OpenMP sleep there, as under normscope's command line.
    """
    os.environ.update(dict.fromkeys(_THREADS, str(threads)), OMP_WAIT_POLICY="PASSIVE")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def of_each(
    function: Callable[..., Iterable[Measurement | str]],
    cases: Mapping[str, tuple[Any, ...]],
    threads: int = os.cpu_count() or 1,
) -> tuple[list[Measurement], list[str]]:
    """Measure each case in a process of its own; return the measurements, and a sentence for each failure."""
    results: list[Measurement | str] = []
    for case, given in cases.items():
        print(f"{case} …", flush=True)
        try:
            results += in_own_process(_as_list, function, *given, threads=threads)
        except Exception as error:  # a kernel that breaks its process takes no other case with it
            results.append(f"{case}: {first_line(error)}")
    sentences = [result for result in results if isinstance(result, str)]
    return [result for result in results if isinstance(result, Measurement)], sentences


def _as_list(function: Callable[..., Iterable[Measurement | str]], *given: Any) -> list[Measurement | str]:
    return list(function(*given))


def first_line(error: Exception) -> str:
    """Return the class of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def peak_megabytes() -> float:
    """Return the peak memory of this process; ru_maxrss would begin with that of its parent."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1000


def finish(
    name: str,
    about: str,
    measurements: Sequence[Measurement],
    args: argparse.Namespace,
    *,
    threads: Sequence[int] = (),
    libraries: Sequence[str] = (),
    failed: Sequence[str] = (),
    added: bool = False,
) -> None:
    """Print the tables, write all measurements, and exit with the sentences in ``failed``, if any.

    With ``added``, rows of other cases and ways stay in the file.
    """
    here = machine() | (gpu() if getattr(args, "device", "") == "cuda" else {})
    record = {
        "benchmark": name,
        "about": " ".join(about.split()),
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": here,
        "threads": list(threads),
        "versions": versions([*_ALWAYS_NAMED, *libraries]),
        "failed": list(failed),
        "measurements": [asdict(measurement) for measurement in measurements],
    }
    print(record["about"], *tables_of(record), sep="\n\n")
    words = re.findall(r"[a-z0-9]+", here.get("gpu", f"{here['cpu']} {here['cores']} cores").lower())
    path = args.results / f"{name}-{'-'.join(words)}.json"
    if added and path.exists():
        record = joined(json.loads(path.read_text(encoding="utf-8")), record)
    args.results.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1, ensure_ascii=False)
    path.write_text(text.replace("Infinity", "1e999") + "\n", encoding="utf-8")  # an overflow that JSON can express
    print(path)
    if failed:
        sys.exit("\n".join(failed))


def joined(before: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Append the rows of a record to an earlier one, in place of rows of the same cases and ways.

    >>> rows = [{"case": "net", "way": way} for way in "ab"]
    >>> before = {"command": "run", "commit": "1", "measurements": rows}
    >>> both = joined(before, {"command": "run --b", "commit": "2", "measurements": rows[1:]})
    >>> [row["way"] for row in both["measurements"]], both["command"], both["commit"]
    (['a', 'b'], 'run; run --b', '1; 2')
    """
    new = {(row["case"], row["way"]) for row in record["measurements"]}
    old = [row for row in before["measurements"] if (row["case"], row["way"]) not in new]
    both = {name: dict.fromkeys([*str(before[name]).split("; "), str(record[name])]) for name in ("command", "commit")}
    texts = {name: "; ".join(values) for name, values in both.items()}
    return {**record, **texts, "measurements": [*old, *record["measurements"]]}


def tables_of(record: Mapping[str, Any]) -> list[str]:
    """Return Markdown tables with a row for each case and way, and a column for each quantity.

    Rows without a common quantity are in separate tables.
    """
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for entry in (Measurement(**row) for row in record["measurements"]):
        if entry.shown:
            column = f"{entry.quantity}, {entry.unit}"
            cells.setdefault((entry.case, entry.way), {})[column] = cell(entry.samples, entry.error)
    tables: list[tuple[dict[str, None], list[tuple[str, str]]]] = []
    for key, by_column in cells.items():
        columns, keys = next((table for table in tables if table[0].keys() & by_column), ({}, []))
        if not keys:
            tables.append((columns, keys))
        columns.update(dict.fromkeys(by_column))
        keys.append(key)
    texts = []
    for columns, keys in tables:
        rows = [["", "", *columns], [":--", ":--", *["--:"] * len(columns)]]
        rows += [[*key, *(cells[key].get(name, "") for name in columns)] for key in keys]
        texts.append("".join(f"| {' | '.join(row)} |\n" for row in rows))
    return texts


def cell(samples: Sequence[float], error: float | None = None) -> str:
    """Format a median with its range or its standard error.

    >>> cell([1.0, 3.0, 2.0]), cell([0.25]), cell([12_345.6, 12_345.6]), cell([5.8e40]), cell([94.5], 1.14)
    ('2 (1–3)', '0.25', '12,346', '5.8e+40', '94.5 ± 1.1')
    """
    middle, low, high = (
        f"{value:,.0f}" if 100 <= abs(value) < 1e9 else f"{value:.3g}"
        for value in (statistics.median(samples), min(samples), max(samples))
    )
    if error is not None:
        return f"{middle} ± {error:.2g}"
    return middle if low == high else f"{middle} ({low}–{high})"


def machine() -> dict[str, Any]:
    """Return the processor, the number of its cores, the memory and the operating system."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text(encoding="utf-8").splitlines() if information.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "os": platform.platform(),
    }


def gpu() -> dict[str, Any]:
    """Return the first GPU's properties, driver and clocks; empty without an NVIDIA GPU."""
    import torch

    if not torch.cuda.is_available() or torch.version.hip is not None:
        return {}
    card = torch.cuda.get_device_properties(0)
    asked = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.max.memory", "power.limit", "temperature.gpu")
    answer = output_of("nvidia-smi", "--id=0", f"--query-gpu={','.join(asked)}", "--format=csv,noheader")
    return {
        "gpu": card.name,
        "compute_capability": f"{card.major}.{card.minor}",
        "multiprocessors": card.multi_processor_count,
        "gpu_memory_gb": round(card.total_memory / 1e9, 1),
        "l2_cache_mb": round(card.L2_cache_size / 1e6, 1),
        "cuda": torch.version.cuda,
        **dict(zip(asked, answer.split(", "), strict=False)),
    }


def output_of(*command: str) -> str:
    """Return the output of a command, or the reason why it does not run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return first_line(error)


def versions(libraries: Iterable[str]) -> dict[str, str]:
    """Return the versions of the installed ones of some libraries."""
    numbers = {"python": platform.python_version()}
    for name in libraries:
        try:
            numbers[name] = version(name)
        except PackageNotFoundError:
            continue
    return numbers


def commit() -> str | None:
    """Return the commit of this checkout, with a plus if files differ from it; None outside of a checkout."""

    def git(*arguments: str) -> str:
        folder = Path(__file__).parent
        return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout

    try:
        changed = git("status", "--porcelain", "--", "../normscope", "*.py")
        return git("rev-parse", "--short=12", "HEAD").strip() + ("+" if changed.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return None
