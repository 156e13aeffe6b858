"""Your own networks: a function of yours returns a module and batches. Its code runs because you named it."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from normscope.errors import DataError, ModelError, NormscopeError, UsageError, count, unknown
from normscope.inputs.batch import Batch
from normscope.inputs.chunks import Chunk, Inputs, LeftOut, Share
from normscope.inputs.entries import as_batches
from normscope.inputs.loaded_model import LoadedModel, LoadOptions, Provenance
from normscope.models.inputs.numbered_inputs import drawn
from normscope.models.weights.checkpoints import load_file, ready, seeded
from normscope.runtime.files import sha256_of

_IMPORTLIB = (importlib.__file__, "<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")
_END = object()


@dataclass
class UserCode:
    """The user's code as it is run: its own random numbers, its prints on stderr, sentences for what it raises.

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
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(frame.filename)]
        in_file = [frame for frame in frames if frame.filename == self.file]
        return "".join(f" ({frame.filename}, line {frame.lineno})" for frame in (in_file or frames)[-1:])


class FactoryBatches(Inputs):
    """The batches that a factory returned, on the model's device and in dtypes that it has; each is an input.

    Nothing is left out: what goes wrong in the user's code is raised.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        batches: Iterable[Any],
        code: UserCode,
        options: LoadOptions,
        kept: Sequence[torch.dtype] = (),
    ) -> None:
        """Look at the first batch, and count those of a list; tensors of the dtypes in ``kept`` are not converted.

        Raises:
            UsageError: if batches are to be shuffled that can only be taken in their own order.
            DataError: if there is none, or it is no batch.
        """
        self.left_out = LeftOut()
        self._name, self._model, self._batches, self._code = name, model, batches, code
        self._options, self._kept = options, kept
        if options.shuffle and not isinstance(batches, list):
            raise UsageError(f"{name} returned batches that can be taken only in their order: to shuffle takes a list.")
        sizes = [len(batch.samples) for batch in as_batches(batches, model)] if isinstance(batches, list) else None
        self._sizes = None if sizes is None else [sizes[i] for i in self._order(len(sizes))]
        self._once = code.over(batches) if isinstance(batches, Iterator) else None
        self._first = _END if self._once is None else next(self._once, _END)
        self._beyond_first = False
        self.first_sample()

    @property
    def description(self) -> str:
        """Describe the batches, and a selection or another order of their samples."""
        limit, seed, shuffled = self._options.limit, self._options.seed, self._options.shuffle
        batches = f"batches of {self._name}"
        if limit is None or (self._sizes is not None and sum(self._sizes) <= limit):
            return f"{batches}, shuffled with seed {seed}" if shuffled else batches
        if shuffled:
            return f"{count(limit, 'sample')} of the {batches}, drawn with seed {seed}"
        return f"the first {limit} samples of the {batches}"

    @property
    def n_samples(self) -> int | None:
        """Number of samples at most; None where only iterating would tell."""
        total = None if self._sizes is None else sum(self._sizes)
        return min((number for number in (total, self._options.limit) if number is not None), default=None)

    @property
    def n_inputs(self) -> int | None:
        """Number of batches taken; None where only iterating would tell."""
        if self._sizes is None or self._options.limit is None:
            return None if self._sizes is None else len(self._sizes)
        before = accumulate(self._sizes, initial=0)
        return sum(seen < self._options.limit for seen, _ in zip(before, self._sizes, strict=False))

    def chunks(self, share: Share) -> Iterator[Chunk]:
        """Yield each batch of a share as a chunk; those of the others are gone through, as only the factory can skip.

        Raises:
            DataError: if one is no batch, the user's code raises, or an iterator is to be taken a second time.
        """
        left = ((number, batch) for number, batch in self._taken() if number not in share.done)
        for number, batch in share.of(left):
            yield Chunk([number], [self._placed(batch)])

    def first_sample(self) -> Batch:
        """Return the first sample of the first batch; DataError if there is none."""
        for _, batch in self._taken():
            return self._placed(batch.first_sample())
        raise DataError(f"{self._name} returned no batch to run its module on.")

    def _placed(self, batch: Batch) -> Batch:
        dtype = next(iter(self._kept), self._options.dtype)
        return batch.to(self._options.device, dtype, self._kept)

    def _taken(self) -> Iterator[tuple[int, Batch]]:
        """Yield the batches with their numbers, up to the limit."""
        left = self._options.limit
        for number, batch in self._in_order():
            yield number, batch if left is None else batch.first(left)
            if left is not None:
                left -= len(batch.samples)
                if left <= 0:
                    return

    def _in_order(self) -> Iterable[tuple[int, Batch]]:
        numbered = enumerate(as_batches(self._entries(), self._model))
        if not self._options.shuffle:
            return numbered
        batches = list(numbered)
        return [batches[number] for number in self._order(len(batches))]

    def _order(self, number: int) -> Sequence[int]:
        return drawn(number, replace(self._options, limit=None))  # which counts samples, and not batches

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


def _is_ours(filename: str) -> bool:
    return filename in _IMPORTLIB or Path(filename).parent == Path(__file__).parent


_DEFAULT_BATCH_SIZE = 8


def load_factory(name: str, architecture: str, options: LoadOptions) -> LoadedModel:
    """Load what a function of the user's returns: ``(module, batches)``.

    ``architecture`` is ``FILE_OR_MODULE:FACTORY``; a FILE ends in ``.py``, and FACTORY may have dots in it. The
    function takes no arguments. Batches are an iterable of tensors, tuples of arguments, dicts of keyword arguments, or
    :class:`normscope.Batch`, best a list. As ``python FILE`` would, this puts FILE's folder in front of ``sys.path``,
    or the current folder where a module is named. torch's random numbers are under ``options.seed`` while the function
    or its batches run, and afterwards as they were.

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
        code = UserCode(name, "", torch.default_generator.get_state())
    is_file = place.endswith(".py")
    path = Path(place).expanduser()
    factory = _function(name, _import_file(code, path) if is_file else _import_module(code, place), function_name)
    with code.running(name):
        returned = factory()
    module, batches = _pair(name, returned)
    kept = _dtypes_kept(module, options)
    inputs = FactoryBatches(name, module, batches, code, options, kept)
    if options.weights == "pretrained":
        version = f"sha256 {sha256_of([path])[:12]}, " if is_file else ""
        provenance = Provenance("custom", f"as {name} made them ({version}seed {options.seed})")
    else:
        provenance = load_file(module, Path(options.weights), name)
    module, provenance = ready(module, provenance, options)
    return LoadedModel(name, module, inputs, provenance)


def _refuse(name: str, options: LoadOptions) -> None:
    """Refuse what only the factory can decide."""
    if options.data is not None:
        raise UsageError(f"{name} brings its own batches: data can have no effect on it.")
    if options.batch_size != _DEFAULT_BATCH_SIZE:
        raise UsageError(f"{name} decides how large its batches are: batch_size can have no effect on it.")
    if options.weights == "random":
        raise UsageError(f"{name} decides on its weights: leave --weights out, or name a file that fits its module.")


def _dtypes_kept(module: nn.Module, options: LoadOptions) -> list[torch.dtype]:
    """List the dtypes of the network's floating-point parameters, the first one's first; none where it is converted.

    Inputs in one of them are as the function means them: which part of the network takes them, it alone knows.
    """
    if options.dtype is not None:
        return []
    return list(dict.fromkeys(tensor.dtype for tensor in module.parameters() if tensor.is_floating_point()))


def _import_file(code: UserCode, path: Path) -> ModuleType:
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


def _import_module(code: UserCode, name: str) -> ModuleType:
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
    function: Any = source
    for attribute in dotted.split("."):
        if not hasattr(function, attribute):
            known = [key for key, value in vars(function).items() if callable(value) and not key.startswith("_")]
            raise ModelError(f"{name}: {unknown('function', attribute, known or ['none'])}")
        function = getattr(function, attribute)
    if not callable(function):
        raise ModelError(f"{name} is no function but of type {type(function).__name__}.")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ModelError(
            f"{name} is called without arguments, and its signature does not allow that: {error}."
        ) from error
    except ValueError:  # a builtin without a signature
        pass
    return cast("Callable[[], Any]", function)


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
