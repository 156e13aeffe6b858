"""Your own networks: a function of yours returns a module and batches for it. Its code runs because you named it."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from normscope.batches import Batch
from normscope.errors import DataError, ModelError, UsageError, unknown
from normscope.models.base import LoadedModel, LoadOptions, Provenance
from normscope.models.checkpoints import load_file
from normscope.models.hub_files import sha256_of
from normscope.models.user_code import FactoryBatches, UserCode
from normscope.models.weights import ready, seeded

_DEFAULT_BATCH_SIZE = 8


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
        code = UserCode(name, "", torch.default_generator.get_state())
    is_file = place.endswith(".py")
    path = Path(place).expanduser()
    factory = _function(name, _import_file(code, path) if is_file else _import_module(code, place), function_name)
    with code.running(name):
        returned = factory()
    module, batches = _pair(name, returned)
    kept = _dtypes_kept(module, options)
    inputs = FactoryBatches(name, batches, code, options, kept)
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
