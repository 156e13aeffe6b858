"""Weights from a file: read without executing anything in it, and fitted strictly."""

from __future__ import annotations

import hashlib
import pickle
import sys
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from normscope.errors import ModelError
from normscope.models.base import Provenance
from normscope.models.conversions import converted, dtypes_by_name

SHOWN = 3  # of the keys that do not fit


def load_file(module: nn.Module, path: Path, name: str) -> Provenance:
    """Load the state dict in ``path`` into ``module``.

    A state dict may lie under ``state_dict``, ``model`` or their EMA versions. One whose keys are not the model's own
    goes through the conversion that timm has for that family of models.

    Args:
        module: on the CPU, in its dtypes, to which weights are converted; half loaded if an error is raised.
        path: a safetensors file whose name says so, or a torch checkpoint.
        name: what error messages call the model.

    Raises:
        ModelError: if the file cannot be read, or does not hold exactly the weights of ``module``.
    """
    state_dict = read_state_dict(path)
    if state_dict.keys() != module.state_dict().keys():
        state_dict = _converted(state_dict, module)
    misfits = _misfits(state_dict, module)
    if not misfits:
        # Not our own comparison of keys: modules may fill in what older versions of them did not save.
        result = module.load_state_dict(state_dict, strict=False)
        misfits = [f"{key} is missing" for key in result.missing_keys]
        misfits += [f"{key} is not in the model" for key in result.unexpected_keys]
    if misfits:
        more = f", and {len(misfits) - SHOWN} more" if len(misfits) > SHOWN else ""
        raise ModelError(f"The weights file {str(path)!r} does not fit {name}: {', '.join(misfits[:SHOWN])}{more}.")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    provenance = Provenance("file", f"file {path.name} (sha256 {digest[:12]})")
    return converted(provenance, dtypes_by_name(state_dict.items()), dtypes_by_name(module.named_parameters()))


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file or torch checkpoint, without unpickling code; ModelError if it is none."""
    if path.is_dir():
        raise ModelError(f"The weights {str(path)!r} are a folder. Name the checkpoint file in it.")
    if not path.is_file():
        raise ModelError(
            f"There is no weights file {str(path)!r}. --weights takes pretrained, random, or the path of a file."
        )
    if path.stat().st_size == 0:
        raise ModelError(f"The weights file {str(path)!r} is empty.")
    import timm.models  # a second or two that only reading a file is worth

    try:
        state_dict = timm.models.load_state_dict(str(path), weights_only=True)
    except Exception as error:  # pickle, zipfile, torch and safetensors each have their own
        if isinstance(error.__cause__ or error, pickle.UnpicklingError):
            raise ModelError(
                f"The weights file {str(path)!r} is damaged, or holds Python objects besides tensors. Those would "
                "have to be unpickled, which can run any code; save the model's state_dict() alone, best as "
                "safetensors."
            ) from error
        kind = "safetensors file" if path.suffix == ".safetensors" else "torch checkpoint"
        raise ModelError(
            f"The weights file {str(path)!r} cannot be read: it is no {kind}, or a damaged one "
            f"({type(error).__name__})."
        ) from error
    if not state_dict or not all(isinstance(value, Tensor) for value in state_dict.values()):
        raise ModelError(f"The weights file {str(path)!r} holds no state dict: a dict of tensors by name.")
    return dict(state_dict)


def _converted(state_dict: dict[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """Return what timm makes of a checkpoint in the format of the model's first publication."""
    family = sys.modules[type(module).__module__]
    convert: Any = getattr(family, "checkpoint_filter_fn", None)
    if convert is None:
        return state_dict
    try:
        return dict(convert(dict(state_dict), module))
    except Exception:  # it met keys that no format of this family has: the caller names them
        return state_dict


def _misfits(state_dict: dict[str, Tensor], module: nn.Module) -> list[str]:
    """Name the tensors that torch would refuse for their shape, or copy though their numbers are of another kind."""
    found = []
    wanted = module.state_dict()
    for key, value in state_dict.items():
        if key not in wanted:
            continue
        if value.shape != wanted[key].shape:
            found.append(f"{key} is {tuple(value.shape)} and should be {tuple(wanted[key].shape)}")
        elif wanted[key].is_floating_point() and not value.is_floating_point():  # quantized, or a mask
            found.append(f"{key} is {_dtype(value)} and should be {_dtype(wanted[key])}")
    return found


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
