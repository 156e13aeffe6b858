"""Your own networks: a function of yours returns a module and batches. Its code runs because you named it."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from normscope.errors import DataError, ModelError, NormscopeError, UsageError, count, first_line, unknown
from normscope.inputs.batch import Batch, as_batches
from normscope.inputs.chunks import Chunk, Inputs, LeftOut, RankSampler
from normscope.inputs.loaded_model import InferredOutputs, LoadedModel, LoadOptions, Provenance, inferred_task
from normscope.models.inputs.dataset import drawn
from normscope.models.weights.checkpoints import load_file, ready, seeded
from normscope.runtime.files import sha256_of

_END = object()


@dataclass
class UserCode:
    """The user's code: with random numbers of its own, prints on stderr, and its exceptions as sentences."""

    name: str  # of the model, in errors
    file: str  # in which the code begins; empty if unknown
    random_state: Tensor  # of torch on the CPU, as the code left it

    @contextmanager
    def running(self, subject: str, kind: type[NormscopeError] = ModelError) -> Iterator[None]:
        """Run the block as the user's code; its exceptions become an error of ``kind`` about ``subject``."""
        with torch.random.fork_rng(devices=[]), redirect_stdout(sys.stderr):  # stdout is for results
            torch.default_generator.set_state(self.random_state)
            try:
                yield
            except (Exception, SystemExit) as error:
                raise kind(f"{subject} raised {first_line(error)}{self._line(error)}.") from error
            finally:
                self.random_state = torch.default_generator.get_state()

    def over(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Iterate with the random numbers that follow the factory's own, the same ones each time."""
        code = replace(self)
        subject = f"The batches of {self.name}"
        with code.running(subject, DataError):
            entries = iter(batches)
        while True:
            with code.running(subject, DataError):
                entry = next(entries, _END)
            if entry is _END:
                return
            yield entry

    def _line(self, error: BaseException) -> str:
        """Name the last line of the user's own file in a traceback; a SyntaxError's message names it."""
        if isinstance(error, SyntaxError):
            return ""
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == self.file]
        return "".join(f" ({frame.filename}, line {frame.lineno})" for frame in frames[-1:])


class FactoryBatches(Inputs):
    """The batches of a factory, on the model's device and in dtypes that it has."""

    def __init__(self, model: nn.Module, batches: Iterable[Any], code: UserCode, options: LoadOptions) -> None:
        """Look at the first batch, and count those of a list.

        Raises:
            UsageError: if ``options.shuffle`` is set and the batches are no list.
            DataError: if there is no batch, or the first is none.
        """
        name = code.name
        if options.shuffle and not isinstance(batches, list):
            raise UsageError(f"{name} returned batches that can be taken only in their order: to shuffle takes a list.")
        self.left_out = LeftOut()
        self._name, self._model, self._code, self._options = name, model, code, options
        # Without a requested dtype, inputs in one of the network's stay: only the function knows which part takes them.
        dtypes = dict.fromkeys(tensor.dtype for tensor in model.parameters() if tensor.is_floating_point())
        self._kept = list(dtypes) if options.dtype is None else []
        self._total: int | None = None  # number of samples, if known
        if isinstance(batches, list):
            self._total = sum(len(batch.samples) for batch in as_batches(batches, model))
        self._batches = _Once(name, code.over(batches)) if isinstance(batches, Iterator) else batches
        self.first_sample()

    @property
    def description(self) -> str:
        """Describe the batches, and a selection or another order of their samples."""
        limit, seed, shuffled = self._options.limit, self._options.seed, self._options.shuffle
        batches = f"batches of {self._name}"
        if limit is None or (self._total is not None and self._total <= limit):
            return f"{batches}, shuffled with seed {seed}" if shuffled else batches
        if shuffled:
            return f"{count(limit, 'sample')} of the {batches}, drawn with seed {seed}"
        return f"the first {limit} samples of the {batches}"

    @property
    def n_samples(self) -> int | None:
        return min((number for number in (self._total, self._options.limit) if number is not None), default=None)

    def chunks(self, sampler: RankSampler) -> Iterator[Chunk]:
        for number, batch in sampler.select(self._selected()):
            yield Chunk([number], [self._placed(batch)])

    def first_sample(self) -> Batch:
        for _, batch in self._selected():
            return self._placed(batch.first_sample())
        raise DataError(f"{self._name} returned no batch to run its module on.")

    def _placed(self, batch: Batch) -> Batch:
        """Move a batch to the model's device; its tensors in a dtype that the model has are not converted."""
        dtype = next(iter(self._kept), self._options.dtype)
        return batch.to(self._options.device, dtype, self._kept)

    def _selected(self) -> Iterator[tuple[int, Batch]]:
        """Yield the batches with their numbers, up to the limit."""
        entries = self._batches if isinstance(self._batches, _Once) else self._code.over(self._batches)
        batches: Iterable[tuple[int, Batch]] = enumerate(as_batches(entries, self._model))
        if self._options.shuffle:
            batches = list(batches)
            order = drawn(len(batches), replace(self._options, limit=None))  # the limit is of samples, not of batches
            batches = [batches[number] for number in order]
        left = self._options.limit
        for number, batch in batches:
            yield number, batch if left is None else batch.first(left)
            if left is not None and (left := left - len(batch.samples)) <= 0:
                return


class _Once:
    """Entries of an iterator; the first can be read repeatedly before the rest."""

    def __init__(self, name: str, entries: Iterator[Any]) -> None:
        self._name, self._entries, self._beyond_first = name, entries, False
        self._first = list(islice(entries, 1))

    def __iter__(self) -> Iterator[Any]:
        yield from self._first
        if self._beyond_first:
            raise DataError(
                f"The batches of {self._name} are an iterator, which can be taken only once, and are asked for again. "
                "Return a list, or an object whose __iter__ starts anew."
            )
        for entry in self._entries:
            self._beyond_first = True
            yield entry


def load(name: str, architecture: str, options: LoadOptions) -> LoadedModel:
    """Load the ``(module, batches)`` that a function of the user's returns; it takes no arguments.

    ``architecture`` is ``FILE_OR_MODULE:FACTORY``; a FILE ends in ``.py``, and FACTORY may have dots in it. FILE's
    folder, or the current one, goes in front of ``sys.path``. torch's random numbers are under ``options.seed`` while
    the function or its batches run, and unaffected afterwards.
    """
    refusals = {
        "brings its own batches: data can have no effect on it": options.data is not None,
        "decides how large its batches are: batch_size can have no effect on it": options.batch_size != 8,
        "decides on its weights: leave --weights out, or name a file that fits its module": options.weights == "random",
    }
    for why, refused in refusals.items():
        if refused:
            raise UsageError(f"{name} {why}.")
    source, _, function_name = architecture.rpartition(":")
    if not source or not function_name:
        raise ModelError(f"{name!r} names no function. Write py:FILE.py:FUNCTION or py:MODULE:FUNCTION.")
    with seeded(options.seed):
        code = UserCode(name, "", torch.default_generator.get_state())
    is_file = source.endswith(".py")
    path = Path(source).expanduser()
    factory = _function(name, _import_file(code, path) if is_file else _import_module(code, source), function_name)
    with code.running(name):
        returned = factory()
    module, batches = _pair(name, returned)
    inputs = FactoryBatches(module, batches, code, options)
    if options.weights == "pretrained":
        version = f"sha256 {sha256_of([path])[:12]}, " if is_file else ""
        provenance = Provenance("custom", f"as {name} made them ({version}seed {options.seed})")
    else:
        provenance = load_file(module, Path(options.weights), name)
    module, provenance = ready(module, provenance, options)
    return LoadedModel(name, module, inputs, provenance, InferredOutputs(module), task=inferred_task(module))


def _import_file(code: UserCode, path: Path) -> ModuleType:
    if not path.is_file():
        raise DataError(f"There is no file {str(path)!r} to take a function from.")
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


def _import_module(code: UserCode, name: str) -> ModuleType:
    _search_first(Path.cwd())
    with code.running(f"Importing {name!r} as a module (the name of a file ends in .py)"):
        module = importlib.import_module(name)
    code.file = module.__file__ or ""
    return module


def _search_first(folder: Path) -> None:
    if sys.path[0] != str(folder):
        sys.path.insert(0, str(folder))


def _function(name: str, source: ModuleType, dotted: str) -> Callable[[], Any]:
    function: Any = source
    for attribute in dotted.split("."):
        if not hasattr(function, attribute):
            names = [key for key, value in vars(function).items() if callable(value) and not key.startswith("_")]
            raise ModelError(f"{name}: {unknown('function', attribute, names or ['none'])}")
        function = getattr(function, attribute)
    if not callable(function):
        raise ModelError(f"{name} is no function but of type {type(function).__name__}.")
    return cast("Callable[[], Any]", function)


def _pair(name: str, returned: Any) -> tuple[nn.Module, Iterable[Any]]:
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        shown = f"{len(returned)} values" if isinstance(returned, (tuple, list)) else f"a {type(returned).__name__}"
        raise ModelError(f"{name} returned {shown}; it has to return two: a torch.nn.Module and its batches.")
    module, batches = returned
    if not isinstance(module, nn.Module):
        raise ModelError(f"{name} returned a {type(module).__name__} where a torch.nn.Module has to be.")
    if isinstance(batches, (Tensor, Mapping, Batch, str)) or not hasattr(batches, "__iter__"):
        raise DataError(
            f"{name} returned a {type(batches).__name__} where batches have to be: a list of tensors, of tuples of "
            "arguments, or of dicts of keyword arguments."
        )
    return module, batches
