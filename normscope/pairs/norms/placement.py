"""Where a norm stands, read from the data flow: on the residual stream, before a branch of it, or on queries and keys.

A pre-norm's input is the residual stream itself, which an addition takes too, past the norm. A post-norm's output is
what an addition takes. Names and flags say nothing reliable here; additions do.
"""

from __future__ import annotations

import contextlib
import math
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

ADDITIONS = {
    *(torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__),
    *(torch.sub, Tensor.sub, Tensor.sub_, Tensor.__sub__, Tensor.__rsub__),
    *(torch.addcmul, Tensor.addcmul, Tensor.addcmul_, torch.lerp, Tensor.lerp),
}

_NORM_FUNCTIONS = {
    F.layer_norm,
    F.rms_norm,
    F.group_norm,
    F.batch_norm,
    F.instance_norm,
    F.local_response_norm,
    torch.layer_norm,
    torch.rms_norm,
    torch.group_norm,
    torch.batch_norm,
    torch.native_layer_norm,
    torch.native_group_norm,
}
_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_NORM_OPERATORS = re.compile(r"aten\.(_?native_|_fused_|cudnn_|miopen_)?(batch|group|instance|layer|rms)_norm\b")
# As timm (q_norm), diffusers (norm_q, norm_added_k, q_rms_norm_t) and transformers (q_layernorm, qk_norm,
# q_layernorm.norms.0 of one head) say; a norm before the projection (pre_norm_q, q_a_layernorm) is none of them.
_QUERY_OR_KEY = re.compile(
    r"(^|[._])(q|k|qk|query|key)_?((layer|rms|img)_?)?norm\d*(_t|_und_for_gen)?(\.norms\.\d+)?$"
    r"|(^|\.)norm\d*_?((added|ip)_)?(q|k|query|key)$"
    r"|(^|\.)\w*att\w*\.((q|k)_ln|ln_(q|k))$",
    re.IGNORECASE,
)


class Ends(NamedTuple):
    """Input and output of a site's first call, of any shape and still alive, and how many additions came before it."""

    input: Tensor
    output: Tensor
    additions_before: int


class Addition(NamedTuple):
    """The operands of one addition of a forward pass, still alive, and whether the first of them took the sum."""

    operands: tuple[Tensor, ...]
    in_place: bool


def of_sites(ends: dict[str, Ends], additions: list[Addition]) -> dict[str, str | None]:
    """Tell the placement of each site.

    Args:
        ends: for each module path, in the order of first calls, what its first call took and gave.
        additions: every addition of the forward pass, in order.

    Returns:
        ``pre-norm``, ``post-norm``, ``qk``, ``final`` or None (beside the residual stream) for each path. Sites whose
        paths differ only in the numbers of their blocks share a placement: nothing is added after the last block of a
        post-norm network, and its norm is post-norm all the same.
    """
    last_added: dict[tuple[int, int] | None, float] = {}
    for number, addition in enumerate(additions):
        for operand in filter(_identity, addition.operands):
            # What was added to in place is, from then on, the sum; only what comes later takes it as it is now.
            overwritten = addition.in_place and operand is addition.operands[0]
            before = last_added.get(_identity(operand), -1)
            last_added[_identity(operand)] = max(before, number if overwritten else math.inf)
    placements = {name: _of_site(name, end, last_added) for name, end in ends.items()}
    by_pattern = {_pattern(name): known for name, known in reversed(placements.items()) if known is not None}
    placements = {name: placement or by_pattern.get(_pattern(name)) for name, placement in placements.items()}
    repeated = Counter(_pattern(name) for name in placements)
    if any(placements.values()):
        for name in reversed(placements):
            if placements[name] or repeated[_pattern(name)] > 1:
                break
            placements[name] = "final"
    return placements


def _of_site(name: str, end: Ends, last_added: dict[tuple[int, int] | None, float]) -> str | None:
    def added(tensor: Tensor) -> bool:
        return last_added.get(_identity(tensor), -1) >= end.additions_before

    if _QUERY_OR_KEY.search(name):
        return "qk"
    if added(end.input):
        return "pre-norm"
    return "post-norm" if added(end.output) else None


def _identity(tensor: Tensor) -> tuple[int, int] | None:
    """Return where a tensor lies and how large it is; None of one that torch.vmap made, which lies nowhere."""
    try:
        return tensor.data_ptr(), tensor.numel()
    except RuntimeError:
        return None


def _pattern(name: str) -> str:
    """A path without the numbers of its blocks; the 1 of ``norm1`` is no such number."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "#", name)


class FunctionWatch(TorchFunctionMode):
    """Sees every torch function: norms that are called as functions, and the additions of the residual stream.

    A norm function may be called on weights (a weight-standardized convolution calls batch_norm): on a parameter, or on
    what functions made of parameters alone. That is no norm of activations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.on_pause = False
        self.lock = threading.RLock()  # identifies the watched pass
        self.path: list[str] = []
        self.tensorless: dict[str, None] = {}
        self.functional: dict[tuple[str, str], None] = {}
        self.additions: list[Addition] = []
        self.weights_normed: dict[str, None] = {}
        self._of_weights = WeakTensorKeyDictionary()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore what normscope itself calls."""
        self.on_pause = True
        yield
        self.on_pause = False

    def mark(self) -> tuple[int, int]:
        """Return how many norms and additions were seen until now."""
        return len(self.functional), len(self.additions)

    def forget_since(self, mark: tuple[int, int]) -> None:
        """Forget what went on inside a norm: its x − mean is no branch, and the function it calls no other norm."""
        for key in list(self.functional)[mark[0] :]:
            del self.functional[key]
        del self.additions[mark[1] :]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.on_pause:
            return func(*args, **kwargs)
        operands = tuple(value for value in args if isinstance(value, Tensor))
        if func in _NORM_FUNCTIONS or (isinstance(func, _OPERATORS) and _NORM_OPERATORS.match(str(func))):
            where = self.path[-1] if self.path else ""
            if self.is_weight(operands[0] if operands else kwargs["input"]):
                self.weights_normed[where] = None
            else:
                self.functional[(where, func.__name__.partition(".")[0])] = None  # without an operator's overload
        # A bias or an embedding is no branch.
        elif func in ADDITIONS and not any(isinstance(value, nn.Parameter) for value in operands):
            in_place = func.__name__.endswith("_") and not func.__name__.startswith("__")  # add_, but not __rsub__
            self.additions.append(Addition(operands, in_place))
        result = func(*args, **kwargs)
        # Outside of every module it is the batch that is copied, which may be a parameter.
        if self.path and isinstance(result, Tensor):
            made_of = list(_tensors_in((*args, *kwargs.values())))
            if made_of and all(map(self.is_weight, made_of)):
                self._of_weights[result] = version_of(result)
        return result

    def is_weight(self, value: Tensor) -> bool:
        """Whether a tensor is a parameter or made of such alone, and nothing was written into it since."""
        if isinstance(value, nn.Parameter):
            return True
        return value in self._of_weights and bool(self._of_weights[value] == version_of(value))


def version_of(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        yield from (
            each for each in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(each, Tensor)
        )
