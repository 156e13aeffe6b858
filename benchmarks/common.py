"""What the benchmarks share: samples taken in turn, processes of their own, and one JSON file a machine."""

from __future__ import annotations

import argparse
import gc
import importlib.util
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
NO_GPU = "there is no NVIDIA GPU here; --device cpu --results FOLDER rehearses, and measures nothing"
ALWAYS_NAMED = ("normscope", "torch", "numpy")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")


@dataclass(frozen=True)
class Measurement:
    """The samples of one quantity, in the order in which they were taken.

    Attributes:
        case: what was measured on: a model, a number of pairs.
        way: who did it: normscope, or a peer.
        quantity: what was measured.
        unit: of the samples; × and % are ratios of other samples of the same run.
        samples: one for each repeat.
        shown: whether it stands in the table; every measurement is in the file.
        error: standard error of a share that was counted, in its unit; None of what was measured.
    """

    case: str
    way: str
    quantity: str
    unit: str
    samples: Sequence[float]
    shown: bool = True
    error: float | None = None


def options(description: str, *, repeats: int, peers: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return a parser of what every benchmark takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--repeats", type=int, default=repeats, help="samples of everything (%(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON file (%(default)s)")
    if peers:
        parser.add_argument("--without", type=names, default=[], help=f"peers to leave out, of {','.join(peers)}")
    return parser


def peers_left(parser: argparse.ArgumentParser, args: argparse.Namespace, peers: Sequence[str]) -> list[str]:
    """Return the peers that are to be measured; exit with a sentence where one of them is not installed."""
    for name in args.without:
        if name not in peers:
            parser.error(f"there is no peer {name!r} to leave out; the peers are {', '.join(peers)}")
    left = [name for name in peers if name not in args.without]
    for name in left:
        if importlib.util.find_spec(name) is None:
            sys.exit(f"{name} is not installed. Run pip install -e '.[bench]', or leave it out: --without {name}")
    return left


def gpu_options(description: str, *, repeats: int) -> argparse.ArgumentParser:
    """Return a parser of what every benchmark of a GPU takes."""
    parser = options(description, repeats=repeats)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu rehearses (%(default)s)")
    return parser


def parsed_for_gpu(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line; exit with a sentence without a GPU, or where a rehearsal would be taken for a result."""
    args = parser.parse_args()
    if args.device == "cuda" and not gpu():
        parser.error(NO_GPU)
    if args.device == "cpu" and args.results == RESULTS:
        parser.error("a rehearsal on the CPU is no result; name another folder with --results")
    return args


def names(text: str) -> list[str]:
    """Split a list at its commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def in_turn(ways: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Time every way once a round, so that whatever else the machine does meets them all: seconds.

    The first round warms up and does not count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(repeats + 1):
        for name, way in ways.items():
            gc.collect()
            took = seconds_of(way)
            if number:
                seconds[name].append(took)
    return seconds


def seconds_of(function: Callable[[], object]) -> float:
    """Return how long a call took."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def ratios(over: Iterable[float], under: Iterable[float]) -> list[float]:
    """Divide samples by those of the same round."""
    return [a / b for a, b in zip(over, under, strict=True)]


def in_own_process(function: Callable[..., Any], *args: Any, threads: int) -> Any:
    """Run a function in a new process, whose libraries begin with so many threads, and return what it returned.

    Threads of OpenMP that wait sleep there, as under normscope's command line.
    """
    os.environ.update(dict.fromkeys(_THREADS, str(threads)), OMP_WAIT_POLICY="PASSIVE")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def of_each(
    function: Callable[..., Iterable[Measurement | str]], cases: Mapping[str, tuple[Any, ...]]
) -> tuple[list[Measurement], list[str]]:
    """Measure each case in a process of its own; return what was measured, and a sentence for whatever failed."""
    found: list[Measurement | str] = []
    for case, given in cases.items():
        print(f"{case} …", flush=True)
        try:
            found += in_own_process(listed, function, *given, threads=os.cpu_count() or 1)
        except Exception as error:  # a kernel that breaks its process takes no other case with it
            found.append(f"{case}: {first_line(error)}")
    sentences = [one for one in found if isinstance(one, str)]
    return [one for one in found if isinstance(one, Measurement)], sentences


def listed(function: Callable[..., Iterable[Measurement | str]], *given: Any) -> list[Measurement | str]:
    """Return all that a function yields."""
    return list(function(*given))


def first_line(error: Exception) -> str:
    """Name an error and say the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def peak_megabytes() -> float:
    """Return the most memory that this process has held so far."""
    try:
        # ru_maxrss begins with the memory of the process that started this one; VmHWM does not.
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1000
    except FileNotFoundError:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 1e6 if sys.platform == "darwin" else peak / 1000


def finish(
    name: str,
    about: str,
    measurements: Sequence[Measurement],
    args: argparse.Namespace,
    *,
    threads: Sequence[int],
    libraries: Sequence[str] = (),
    failed: Sequence[str] = (),
    added: bool = False,
) -> None:
    """Print the table, and write everything that was measured; exit with the sentences of what failed, if any did.

    What is ``added`` leaves the rows of other cases and ways in the file.
    """
    record = record_of(name, about, args, threads=threads, libraries=libraries)
    record |= {"failed": list(failed), "measurements": [asdict(one) for one in measurements]}
    show(record)
    if added and (path := path_of(record, args.results)).exists():
        record = joined(json.loads(path.read_text(encoding="utf-8")), record)
    write(record, args.results)
    if failed:
        sys.exit("\n".join(failed))


def record_of(
    name: str, about: str, args: argparse.Namespace, *, threads: Sequence[int], libraries: Sequence[str] = ()
) -> dict[str, Any]:
    """Say what ran, when, and where."""
    return {
        "benchmark": name,
        "about": " ".join(about.split()),
        "command": " ".join(["python", f"benchmarks/{name}.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine() | (gpu() if getattr(args, "device", "") == "cuda" else {}),
        "threads": list(threads),
        "versions": versions([*ALWAYS_NAMED, *libraries]),
        "left_out": getattr(args, "without", []),
    }


def joined(before: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Put the rows of a record behind those of an earlier one, of which others of the same cases and ways are dropped.

    >>> rows = [{"case": "net", "way": way} for way in "ab"]
    >>> told = {"command": "run", "commit": "1", "measurements": rows}
    >>> both = joined(told, {"command": "run --b", "commit": "2", "measurements": rows[1:]})
    >>> [one["way"] for one in both["measurements"]], both["command"], both["commit"]
    (['a', 'b'], 'run; run --b', '1; 2')
    """
    new = {(one["case"], one["way"]) for one in record["measurements"]}
    old = [one for one in before["measurements"] if (one["case"], one["way"]) not in new]
    told = {name: dict.fromkeys([*str(before[name]).split("; "), str(record[name])]) for name in ("command", "commit")}
    return {**record, **{name: "; ".join(all_of) for name, all_of in told.items()}} | {
        "measurements": [*old, *record["measurements"]]
    }


def path_of(record: Mapping[str, Any], results: Path) -> Path:
    """The file of a record's benchmark and machine."""
    here = record["machine"]
    words = re.findall(r"[a-z0-9]+", here.get("gpu", f"{here['cpu']} {here['cores']} cores").lower())
    return results / f"{record['benchmark']}-{'-'.join(words)}.json"


def write(record: Mapping[str, Any], results: Path) -> None:
    """Write a record into its file, and print the file's path."""
    results.mkdir(parents=True, exist_ok=True)
    path = path_of(record, results)
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(path)


def show(record: Mapping[str, Any]) -> None:
    """Print a record as tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 120)
    console.print(record["about"])
    for headings, rows in tables_of(record):
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(1, 2, 0, 0))
        for number, heading in enumerate(headings):
            table.add_column(heading, justify="left" if number < 2 else "right", no_wrap=number < 2, overflow="fold")
        for row in rows:
            table.add_row(*(text.replace(" (", "\n(") for text in row))
        console.print(table)
    if record["left_out"]:
        console.print(f"Left out: {', '.join(record['left_out'])}.")


def tables_of(record: Mapping[str, Any]) -> list[tuple[list[str], list[list[str]]]]:
    """Arrange what is shown, as headings and rows: a row a case and way, a column a quantity.

    Rows that have no quantity in common stand in tables of their own.
    """
    by_place: dict[tuple[str, str], dict[str, str]] = {}
    for one in (Measurement(**entry) for entry in record["measurements"]):
        if one.shown:
            by_place.setdefault((one.case, one.way), {})[f"{one.quantity}, {one.unit}"] = cell(one.samples, one.error)
    tables: list[tuple[dict[str, None], list[tuple[str, str]]]] = []
    for place, cells in by_place.items():
        columns, places = next((table for table in tables if table[0].keys() & cells), ({}, []))
        if not places:
            tables.append((columns, places))
        columns.update(dict.fromkeys(cells))
        places.append(place)
    return [
        (["", "", *columns], [[*place, *(by_place[place].get(name, "") for name in columns)] for place in places])
        for columns, places in tables
    ]


def cell(samples: Sequence[float], error: float | None = None) -> str:
    """Write a median, and its range or its standard error.

    >>> cell([1.0, 3.0, 2.0]), cell([0.25]), cell([12_345.6, 12_345.6]), cell([94.5], 1.14)
    ('2 (1–3)', '0.25', '12,346', '94.5 ± 1.1')
    """
    middle, low, high = (number(value) for value in (statistics.median(samples), min(samples), max(samples)))
    if error is not None:
        return f"{middle} ± {error:.2g}"
    return middle if low == high else f"{middle} ({low}–{high})"


def number(value: float) -> str:
    """Write three digits, or all that stand before the point.

    >>> [number(value) for value in (1.67e-05, 0.5, 1234.5)]
    ['1.67e-05', '0.5', '1,234']
    """
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def machine() -> dict[str, Any]:
    """Say what this machine is."""
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
    """Say what the first GPU is, and how fast it runs at the moment; empty without an NVIDIA GPU."""
    import torch

    if not torch.cuda.is_available() or torch.version.hip is not None:
        return {}
    card = torch.cuda.get_device_properties(0)
    asked = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.max.memory", "power.limit", "temperature.gpu")
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(asked)}", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        told = ""
    return {
        "gpu": card.name,
        "compute_capability": f"{card.major}.{card.minor}",
        "multiprocessors": card.multi_processor_count,
        "gpu_memory_gb": round(card.total_memory / 1e9, 1),
        "l2_cache_mb": round(card.L2_cache_size / 1e6, 1),
        "cuda": torch.version.cuda,
        **dict(zip(asked, told.split(", "), strict=False)),
    }


def versions(libraries: Iterable[str]) -> dict[str, str]:
    """Look up which version of each library is installed; those that are not are left out."""
    found = {"python": platform.python_version()}
    for name in libraries:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Return the commit of this checkout, with a plus where files differ from it; None outside of one."""

    def git(*arguments: str) -> str:
        folder = Path(__file__).parent
        return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout

    try:
        changed = git("status", "--porcelain", "--", "../normscope", "*.py")
        return git("rev-parse", "--short=12", "HEAD").strip() + ("+" if changed.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return None
