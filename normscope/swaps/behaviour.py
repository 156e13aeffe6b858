"""Behaviour of a norm beside its formula, found by trial: the layout, dtype and memory of its output."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from normscope.errors import ModelError
from normscope.norms.recognition import call_with, ignored
from normscope.runtime.spread import copied
from normscope.swaps.standalone import RETURNS, InPlaceOfNorm

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Functions of norms that accelerators run in float32 under autocast.
_IN_FLOAT32 = {"layer_norm", "group_norm", "normalize", "norm", "linalg_vector_norm", "rsqrt", "reciprocal"}
_IN_FLOAT32 |= {"pow", "__pow__", "sum"}
# Inputs before and after a call, and the output, by the dtypes of input and weight.
_Trials = dict[tuple[torch.dtype, torch.dtype], tuple[Tensor, Tensor, Tensor]]


class _Autocast(TorchFunctionMode):
    """Autocast of accelerators on any device: a network may be swapped on one and run on another."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = (args, kwargs or {})
        args, kwargs = tree_map_only(Tensor, Tensor.float, arguments) if func.__name__ in _IN_FLOAT32 else arguments
        return func(*args, **kwargs)


@torch.no_grad()
def behave_like(module: InPlaceOfNorm, norm: nn.Module, name: str, like: Tensor) -> None:
    """Let the replacement of a norm return its output as the norm does, see :class:`InPlaceOfNorm`.

    Copies of the norm are tried on noise in several dtypes. If no trial succeeds, the attributes keep their defaults.
    ``name`` is for errors; ``like`` has the norm's device and dtype.

    Raises:
        ModelError: if the norm overwrites its input with anything but its output, or its dtypes follow no rule.
    """
    refusal, trials = f"The norm {name} ({type(norm).__name__}) cannot be replaced", _trials(norm, module, like)
    overwritten = set[str]()
    for dtypes, (x, written, y) in trials.items():
        if torch.equal(x, written):
            continue
        if y.dtype == x.dtype and torch.equal(written, y):
            overwritten.add(str(x.dtype)[6:])
        elif dtypes == (like.dtype, like.dtype):
            raise ModelError(f"{refusal}: it overwrites its input with other values than its output.")
    own_dtype = {dtypes: trial for dtypes, trial in trials.items() if dtypes[1] == like.dtype}
    if not (rules := _rules(trials) or _rules(own_dtype)):
        listed = ", ".join(f"{str(y.dtype)[6:]} for {str(x.dtype)[6:]}" for x, _, y in own_dtype.values())
        raise ModelError(f"{refusal}: the dtype of its output follows no rule: {listed}.")
    if trials:
        ((x, *_), *_) = trials.values()
        with _Autocast():
            casting = _rules(_trials(norm, module, like))
        module.returns, module.under_autocast = rules[0], "" if rules[0] in casting else next(iter(casting), "")
        module.ignores = tuple(sorted(ignored(norm, x)))
        module.keeps, module.overwrites = _kept(norm, module.channel_axis, x), tuple(sorted(overwritten))


def _kept(norm: nn.Module, axis: int, x: Tensor) -> str:
    """Identify the strides of a norm's output, see :class:`InPlaceOfNorm`."""
    twin = copied(norm).eval()
    layouts = {
        "to_channels_last": x.clone(),
        "all": x.mT.contiguous().mT,
        "channels_last": x.movedim(axis, -1).contiguous().movedim(-1, axis),
    }
    for kept, laid_out in layouts.items():
        args, kwargs = call_with(twin, laid_out)
        with contextlib.suppress(Exception):  # of a view that it takes
            y = twin(*args, **kwargs)
            if not y.is_contiguous() and (kept != "to_channels_last" or y.movedim(1, -1).is_contiguous()):
                return kept
    return "none"


def _rules(trials: _Trials) -> list[str]:
    """Return the rules that explain the dtypes of outputs."""
    measured = [
        (dtypes, y.dtype) for dtypes, (*_, y) in trials.items() if dtypes[0] != torch.float64 or len(trials) == 1
    ]
    return [name for name, rule in RETURNS.items() if all(rule(*dtypes) == returned for dtypes, returned in measured)]


def _trials(norm: nn.Module, module: InPlaceOfNorm, like: Tensor) -> _Trials:
    """Try a norm on noise."""
    shape, axis, trials = module.normalized_shape, module.channel_axis, _Trials()
    sizes = [[2, 3, *shape]] if axis == -1 else [[3] * n_axes for n_axes in (4, 3, 5)]
    for weight in dict.fromkeys((like.dtype, torch.float32, torch.bfloat16)):
        twin = copied(norm).eval().to(weight)
        for dtype, size in itertools.product(dict.fromkeys((like.dtype, *_DTYPES)), sizes):
            size[axis] = shape[-1]
            x = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(like.device, dtype)
            args, kwargs = call_with(twin, written := x.clone())
            # Code that is not ours may accept only some dtypes and numbers of axes.
            with contextlib.suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trials[dtype, weight] = (x, written, twin(*args, **kwargs))
                sizes = [size]
    return trials
