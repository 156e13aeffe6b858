"""Every family of timm and every text class of transformers, verified: ``python benchmarks/architectures.py``."""

from __future__ import annotations

import argparse
import contextlib
import resource
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import tiny_networks
from common import RESULTS, names, record_of, write

ABOUT = """
normscope layers NAME --verify, of the smallest architecture of every family of timm with random weights, and of a
folder of every class of transformers that reads text, with a configuration made tiny and random weights. Texts are then
also captured two at a time, padded. What failed or took too long was run again by the command line, alone.
"""
NO_NORM = "has no normalization of activations"


@dataclass
class Row:
    """What came of one architecture.

    Attributes:
        library: timm or transformers.
        family: timm's module, or the model type.
        name: timm's name, or the class.
        network: the class that was run.
        parameters: their number.
        norms: how many norm sites there are of each kind.
        skipped: how many norms of each class were not observed.
        worst: largest difference of a norm's output and ours, as a multiple of what rounding explains; None of no norm.
        seconds: to load and to verify, on a machine that may do other things as well.
        outcome: works, no norm, not padded, refused, traceback, not built, time or memory.
        reason: the sentence, the last lines of the traceback, or why it could not be built.
        exit_status: of the command line, where it was run again.
    """

    library: str
    family: str
    name: str
    network: str = ""
    parameters: int = 0
    norms: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    worst: float | None = None
    seconds: float = 0.0
    outcome: str = "works"
    reason: str = ""
    exit_status: int | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timm", type=names, help="families, timm's modules (all)")
    parser.add_argument("--transformers", type=names, help="classes (all that read text)")
    parser.add_argument("--seconds", type=float, default=120, help="limit of each (%(default)s)")
    parser.add_argument("--gigabytes", type=float, default=8, help="limit of each process (%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time, of one thread each (%(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON file (%(default)s)")
    args = parser.parse_args()
    with Pool(args.workers, args.seconds, args.gigabytes) as pool:
        families = pool.ask(families_of_timm) if args.timm is None else args.timm
        classes = pool.ask(tiny_networks.text_classes) if args.transformers is None else args.transformers
        tasks = [(of_timm, family) for family in families] + [(of_transformers, name) for name in classes]
        rows = list(pool.map(lambda task: task[0](pool, task[1]), tasks))
    record = record_of("architectures", ABOUT, args, threads=[1], libraries=["timm", "transformers"])
    record["rows"] = [asdict(row) for row in rows]
    for (library, outcome), count in Counter((row.library, row.outcome) for row in rows).items():
        print(f"{library}: {outcome} {count}")
    write(record, args.results)


def of_timm(pool: Pool, family: str) -> Row:
    """Survey the smallest architecture of a family."""
    row = Row("timm", family, family)
    try:
        row.name, row.network, row.parameters = pool.ask(smallest_of_timm, family, seconds=10 * pool.seconds)
    except UnfinishedError as failure:
        row.outcome, row.reason = failure.args
        return row
    return verified(pool, row, f"timm:{row.name}", "random")


def of_transformers(pool: Pool, name: str) -> Row:
    """Survey a class of which a tiny folder is made."""
    row = Row("transformers", "", name, name)
    with tempfile.TemporaryDirectory() as folder:
        try:
            row.family, row.parameters = pool.ask(tiny_networks.save, name, folder)
        except UnfinishedError as failure:
            row.outcome = "not built" if failure.args[0] == "traceback" else failure.args[0]
            row.reason = failure.args[1].splitlines()[-1].removeprefix("ValueError: ")
            return row
        return verified(pool, row, f"transformers:{folder}", "pretrained")


def verified(pool: Pool, row: Row, model: str, weights: str) -> Row:
    """Complete a row by what a network's norms did; those that did not work are tried again by the command line."""
    try:
        vars(row).update(pool.ask(verify, model, weights, row.library == "transformers"))
    except UnfinishedError as failure:
        row.outcome, row.reason = failure.args
    if row.outcome in ("traceback", "time", "memory"):
        command = [sys.executable, "-m", "normscope", "layers", model, "--weights", weights, "--verify"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            row.exit_status = subprocess.run(command, capture_output=True, timeout=2 * pool.seconds).returncode
    row.reason = row.reason.replace(model, row.name).replace(model.partition(":")[2], row.name)
    return row


def families_of_timm() -> list[str]:
    """Name timm's modules."""
    import timm

    return timm.list_modules()


def smallest_of_timm(family: str) -> tuple[str, str, int]:
    """Return the name, the class and the number of parameters of a family's smallest architecture."""
    import timm
    import torch

    found = []
    for name in timm.list_models(module=family):
        with torch.device("meta"):
            network = timm.create_model(name)
        parameters = sum(parameter.numel() for parameter in network.parameters())
        found.append((parameters, network.default_cfg["input_size"], name, type(network).__name__))
    parameters, _, name, network_class = min(found)
    return name, network_class, parameters


def verify(model: str, weights: str, padded: bool) -> dict[str, Any]:
    """Do what ``normscope layers MODEL --verify`` does, and say of it what a row does."""
    import normscope
    from normscope.errors import NormscopeError
    from normscope.pairs import recorder
    from normscope.pairs.norms.recognition import excess

    times: list[float] = []

    def check(kind: Any, name: str, module: Any, x: Any, output: Any, **more: Any) -> None:
        times.append(excess(kind, module, x, output))
        checked(kind, name, module, x, output, **more)

    checked, start = recorder.check, time.perf_counter()
    row: dict[str, Any] = {}
    try:
        network = normscope.load(model, weights=weights, limit=2, batch_size=2, device="cpu")
        row["network"] = type(network.module).__name__
        with mock.patch.object(recorder, "check", check):
            seen = normscope.capture(network.module, [network.inputs.first_sample()], verify=True)
        row["norms"] = dict(Counter(site.kind for site in seen.sites))
        row["skipped"] = dict(Counter(norm.kind for norm in seen.skipped))
        row |= {"worst": max(times), "seconds": time.perf_counter() - start}
        if padded:
            row["outcome"] = "not padded"
            normscope.capture(network.module, network.inputs, verify=True)
        row["outcome"] = "works"
    except NormscopeError as error:
        outcome = "no norm" if NO_NORM in str(error) else row.get("outcome", "refused")
        row |= {"outcome": outcome, "reason": str(error)}
    return {"seconds": time.perf_counter() - start} | row


class UnfinishedError(Exception):
    """A worker's task that gave nothing: the outcome, and why."""


class Pool:
    """Processes that take one task after the other, and are replaced where one takes too long or ends."""

    def __init__(self, workers: int, seconds: float, gigabytes: float) -> None:
        """Start none before the first task."""
        self.seconds, self._bytes = seconds, int(gigabytes * 1e9)
        self._threads = ThreadPoolExecutor(workers)
        self._own = threading.local()
        self._all: list[Any] = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *raised: object) -> None:
        """End the processes."""
        self._threads.shutdown()
        for process in self._all:
            process.kill()

    def map(self, function: Callable[[Any], Row], tasks: Iterable[Any]) -> Iterator[Row]:
        """Yield the rows of all tasks in order, and print each."""
        for row in self._threads.map(function, tasks):
            print(f"{row.library} {row.name}: {row.outcome} ({row.seconds:.1f} s) {row.reason[:150]}", flush=True)
            yield row

    def ask(self, function: Callable[..., Any], *args: Any, seconds: float | None = None) -> Any:
        """Return what a function returns in this thread's process; or raise UnfinishedError."""
        if getattr(self._own, "process", None) is None:
            self._own.connection, theirs = get_context("spawn").Pipe()
            self._own.process = get_context("spawn").Process(target=work, args=(theirs, self._bytes), daemon=True)
            self._own.process.start()
            self._all.append(self._own.process)
            theirs.close()
        self._own.connection.send((function, args))
        try:
            if self._own.connection.poll(seconds or self.seconds):
                done, result = self._own.connection.recv()
                if done:
                    return result
                raise UnfinishedError("traceback", result)
            failure = UnfinishedError("time", f"not done after {seconds or self.seconds:g} s")
        except EOFError:
            failure = UnfinishedError("memory", "the process ended")
        self._own.process.kill()
        self._own.process = None
        raise failure


def work(connection: Any, most: int) -> None:
    """Serve tasks, within so many bytes of memory."""
    import torch

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    while True:
        try:
            function, args = connection.recv()
        except EOFError:  # there is nothing more to do
            return
        try:
            answer = True, function(*args)
        except Exception:
            answer = False, traceback.format_exc().strip()
        connection.send(answer)


if __name__ == "__main__":
    main()
