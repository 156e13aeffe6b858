"""Your own networks: a function of yours returns a module and batches for it. Its code runs because you named it."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from normscope.batches import Batch, as_batches
from normscope.errors import DataError, ModelError, NormscopeError, UsageError, unknown
from normscope.models.base import LoadedModel, LoadOptions, Provenance
from normscope.models.checkpoints import load_file
from normscope.models.hub_files import sha256_of
from normscope.models.weights import ready, seeded

_DEFAULT_BATCH_SIZE = 8
_OURS = (__file__, importlib.__file__, "<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")
_END = object()


def load_factory(name: str, architecture: str, options: LoadOptions) -> LoadedModel:
    """Load what a function of the user's returns: ``(module, batches)``.

    The function takes no arguments. Batches are an iterable of tensors, tuples of arguments, dicts of keyword
    arguments, or :class:`normscope.Batch`, best a list. As ``python FILE`` would, this puts FILE's folder in front of
    ``sys.path``, or the current folder where a module is named. torch's random numbers are under ``options.seed``
    while the function or its batches run, and afterwards as they were.

    Args:
        name: what outputs and errors call it.
        architecture: ``FILE_OR_MODULE:FACTORY``; a FILE ends in ``.py``, and FACTORY may have dots in it.
        options: which weights, how many samples, and where to put them.

    Raises:
        UsageError: if an option is given that is the function's to decide.
        ModelError: if there is no such function, it raises, or returns something else, or weights do not fit.
        DataError: if what it returns as batches are none.
    """
    _refuse(name, options)
    place, _, function_name = architecture.rpartition(":")
    if not place or not function_name:
        raise ModelError(f"{name!r} names no function. Write py:FILE.py:FUNCTION or py:MODULE:FUNCTION.")
    with seeded(options.seed):
        code = _UserCode(name, "", torch.default_generator.get_state())
    is_file = place.endswith(".py")
    path = Path(place).expanduser()
    factory = _function(name, _import_file(code, path) if is_file else _import_module(code, place), function_name)
    with code.running(name):
        returned = factory()
    module, batches = _pair(name, returned)
    inputs = FactoryBatches(name, batches, code, options)
    if options.weights == "pretrained":
        version = f"sha256 {sha256_of([path])[:12]}, " if is_file else ""
        provenance = Provenance("custom", f"as {name} made them ({version}seed {options.seed})")
    else:
        provenance = load_file(module, Path(options.weights), name)
    return LoadedModel(name, ready(module, options), inputs, provenance)


class FactoryBatches:
    """The batches that a factory returned, on the model's device and in its dtype.

    Attributes:
        description: whose batches they are.
        unreadable: empty: what goes wrong in the user's code is raised.
    """

    def __init__(self, name: str, batches: Iterable[Any], code: _UserCode, options: LoadOptions) -> None:
        """Look at the first batch; a list is counted.

        Raises:
            DataError: if there is none, or it is no batch.
        """
        self.unreadable: list[str] = []
        self._name, self._batches, self._code, self._options = name, batches, code, options
        self._total = sum(len(batch.samples) for batch in as_batches(batches)) if isinstance(batches, list) else None
        self._once = code.over(batches) if isinstance(batches, Iterator) else None
        self._first = _END if self._once is None else next(self._once, _END)
        self._beyond_first = False
        if next(iter(self), None) is None:
            raise DataError(f"{name} returned no batch to run its module on.")

    @property
    def description(self) -> str:
        """Say whose batches they are, and whether only some of their samples were taken."""
        limit = self._options.limit
        if limit is None or (self._total is not None and self._total <= limit):
            return f"batches of {self._name}"
        return f"the first {limit} samples of the batches of {self._name}"

    @property
    def n_samples(self) -> int | None:
        """How many samples there are at most; None where only iterating would tell."""
        known = [number for number in (self._total, self._options.limit) if number is not None]
        return min(known, default=None)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches, the last one cut where the limit falls into it.

        Raises:
            DataError: if one is no batch, the user's code raises, or an iterator is to be taken a second time.
        """
        left = self._options.limit
        for batch in as_batches(self._entries()):
            taken = batch if left is None else batch.first(left)
            yield taken.to(self._options.device, self._options.dtype)
            if left is not None:
                left -= len(taken.samples)
                if not left:
                    return

    def _entries(self) -> Iterator[Any]:
        if self._once is None:
            yield from self._code.over(self._batches)
            return
        if self._first is not _END:
            yield self._first
        if self._beyond_first:
            raise DataError(
                f"The batches of {self._name} are an iterator, which can be taken only once, and are asked for again. "
                "Return a list, or an object whose __iter__ starts anew."
            )
        for entry in self._once:
            self._beyond_first = True
            yield entry


@dataclass
class _UserCode:
    """What runs the user's code: its own random numbers, its prints on stderr, sentences for what it raises.

    Attributes:
        name: what errors call the model.
        file: where the user's code begins.
        random_state: torch's on the CPU, where the user's code left it.
    """

    name: str
    file: str
    random_state: Tensor

    @contextmanager
    def running(self, what: str, kind: type[NormscopeError] = ModelError) -> Iterator[None]:
        """Run the block as the user's code; what it raises becomes an error of ``kind`` that says so of ``what``."""
        with torch.random.fork_rng(devices=[]), redirect_stdout(sys.stderr):  # stdout is for results
            torch.default_generator.set_state(self.random_state)
            try:
                yield
            except (Exception, SystemExit) as error:
                said = error.msg if isinstance(error, SyntaxError) else str(error)
                line = said.strip().partition("\n")[0].rstrip(".")
                message = f"{type(error).__name__}: {line}" if line else type(error).__name__
                raise kind(f"{what} raised {message}{self._place(error)}.") from error
            finally:
                self.random_state = torch.default_generator.get_state()

    def over(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Iterate with the random numbers that follow the factory's own, the same ones each time."""
        code = replace(self)
        what = f"The batches of {self.name}"
        with code.running(what, DataError):
            entries = iter(batches)
        while True:
            with code.running(what, DataError):
                entry = next(entries, _END)
            if entry is _END:
                return
            yield entry

    def _place(self, error: BaseException) -> str:
        """Name the last line of the user's own file that was at work, or the last one of what it called."""
        if isinstance(error, SyntaxError):
            return f" ({error.filename}, line {error.lineno})"
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in _OURS]
        own = [frame for frame in frames if frame.filename == self.file]
        return "".join(f" ({frame.filename}, line {frame.lineno})" for frame in (own or frames)[-1:])


def _refuse(name: str, options: LoadOptions) -> None:
    """Refuse what only the factory can decide."""
    if options.data is not None:
        raise UsageError(f"{name} brings its own batches: data can have no effect on it.")
    if options.batch_size != _DEFAULT_BATCH_SIZE:
        raise UsageError(f"{name} decides how large its batches are: batch_size can have no effect on it.")
    if options.weights == "random":
        raise UsageError(f"{name} decides on its weights: leave --weights out, or name a file that fits its module.")


def _import_file(code: _UserCode, path: Path) -> ModuleType:
    if not path.is_file():
        raise ModelError(f"There is no file {str(path)!r} to take a function from.")
    _search_first(path.resolve().parent)
    module = ModuleType(f"normscope_py_{path.stem}")  # not the file's own name, which may be that of a library
    module.__file__ = code.file = str(path)
    sys.modules[module.__name__] = module  # where dataclasses and pickles look their classes up
    try:
        with code.running(str(path)):
            exec(compile(path.read_bytes(), path, "exec"), vars(module))  # noqa: S102 (the user named it)
    except ModelError:
        del sys.modules[module.__name__]
        raise
    return module


def _import_module(code: _UserCode, name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ModelError(f"{name!r} is neither a file, which ends in .py, nor the name of a module.")
    _search_first(Path.cwd())
    try:
        with code.running(f"The module {name}"):
            module = importlib.import_module(name)
    except ModelError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and cause.name and f"{name}.".startswith(f"{cause.name}."):
            raise ModelError(
                f"There is no module {cause.name!r}, neither installed nor in {Path.cwd()}. A file's name ends in .py."
            ) from error
        raise
    code.file = module.__file__ or ""
    return module


def _search_first(folder: Path) -> None:
    """Let imports look into ``folder`` before anything else."""
    if sys.path[0] != str(folder):
        sys.path.insert(0, str(folder))


def _function(name: str, source: ModuleType, dotted: str) -> Callable[[], Any]:
    found: Any = source
    for attribute in dotted.split("."):
        if not hasattr(found, attribute):
            known = [key for key, value in vars(found).items() if callable(value) and not key.startswith("_")]
            raise ModelError(f"{name}: {unknown('function', attribute, known or ['none'])}")
        found = getattr(found, attribute)
    if not callable(found):
        raise ModelError(f"{name} is no function but of type {type(found).__name__}.")
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise ModelError(
            f"{name} is called without arguments, and its signature does not allow that: {error}."
        ) from error
    except ValueError:  # a builtin without a signature
        pass
    function: Callable[[], Any] = found
    return function


def _pair(name: str, returned: Any) -> tuple[nn.Module, Iterable[Any]]:
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        what = f"{len(returned)} values" if isinstance(returned, (tuple, list)) else f"a {type(returned).__name__}"
        raise ModelError(f"{name} returned {what}; it has to return two: a torch.nn.Module and its batches.")
    module, batches = returned
    if not isinstance(module, nn.Module):
        raise ModelError(f"{name} returned a {type(module).__name__} where a torch.nn.Module has to be.")
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        raise ModelError(f"{name} returned a module on the meta device, which has no weights to run with.")
    if isinstance(batches, (Tensor, Mapping, Batch, str)) or not hasattr(batches, "__iter__"):
        raise DataError(
            f"{name} returned a {type(batches).__name__} where batches have to be: a list of tensors, of tuples of "
            "arguments, or of dicts of keyword arguments."
        )
    return module, batches
