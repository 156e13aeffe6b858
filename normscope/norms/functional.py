"""Calls of norm functions in the forward methods of modules: their names, and the norms that they compute."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor
from torch.overrides import TorchFunctionMode

from normscope.errors import ModelError
from normscope.inputs.wrappers import named_modules
from normscope.norms.formulas import rms_norm
from normscope.norms.kinds import NormKind, group_norm, running_norm, token_norm
from normscope.norms.known import NORMS
from normscope.norms.recognition import is_norm
from normscope.runtime.network import PassHooks

_LAYER = ("input", "normalized_shape", "weight", "bias", "eps")
_RMS = ("input", "normalized_shape", "weight", "eps")
_GROUP = ("input", "num_groups", "weight", "bias", "eps")
_STATISTICS = ("input", "running_mean", "running_var", "weight", "bias")
_ARGUMENTS: dict[Any, tuple[str, ...]] = {
    **dict.fromkeys((F.layer_norm, torch.layer_norm), _LAYER),
    **dict.fromkeys((F.rms_norm, torch.rms_norm), _RMS),
    **dict.fromkeys((F.group_norm, torch.group_norm), _GROUP),
    F.instance_norm: (*_STATISTICS, "use_input_stats", "momentum", "eps"),
    F.batch_norm: (*_STATISTICS, "training", "momentum", "eps"),
}
_OPERATOR = "an operator behind the norms of torch.nn.functional, whose calls alone are sites"
_NO_SITES: dict[Any, str] = {
    F.local_response_norm: str(NORMS["torch.nn.modules.normalization.LocalResponseNorm"]),
    **dict.fromkeys((torch.batch_norm, torch.instance_norm), _OPERATOR),
    **dict.fromkeys((torch.native_layer_norm, torch.native_group_norm), _OPERATOR),
}
_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_NORM_OPERATORS = re.compile(r"aten\.(_?native_|_fused_|cudnn_|miopen_)?(batch|group|instance|layer|rms)_norm\b")
_TORCH = "torch.nn.modules."  # whose classes call norm functions in norms alone

_OUTSIDE = "(forward)"  # in place of a module's path, where no module runs: a method, or a function passed as forward=

Adder = Callable[[nn.Module, Tensor, Tensor], None]
Sequences = Mapping[str, Collection[tuple[str, ...]]]


class CalledNorm(nn.Module):
    """A call of a norm function, with its arguments as the attributes of a module that computes the same.

    Attributes:
        function: its name.
        kind: of norm; or the reason why the call is no site.
        whole: True for a LayerNorm over its whole input, such as a waveform of any length. Its token is a group of one
            channel.

    >>> x = torch.ones(1, 9)
    >>> CalledNorm(F.layer_norm, (x, x.shape), {}).whole, CalledNorm(F.layer_norm, (x, (9,)), {}).whole
    (True, False)
    """

    def __init__(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        names = _ARGUMENTS.get(func, ("input",))
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        x = arguments["input"]
        self.function = _name(func)
        self.eps = arguments.get("eps", None if names is _RMS else 1e-5)
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, arguments.get(name))
        self.normalized_shape = tuple(arguments.get("normalized_shape", ()))
        self.num_groups = arguments.get("num_groups")
        self.num_features = x.shape[1] if "running_mean" in names else None
        self.whole = names is _LAYER and len(self.normalized_shape) == x.ndim and self.weight is self.bias is None
        no_site = None if func in _ARGUMENTS else _NO_SITES.get(func, _OPERATOR)
        self.kind = inseparable(x) or no_site or self._kind(arguments)

    def laid_out(self, tensor: Tensor) -> Tensor:
        """Return the input or output in the layout that the kind of norm takes."""
        return tensor.reshape(1, 1, -1) if self.whole else tensor

    def _kind(self, arguments: Mapping[str, Any]) -> NormKind | str:
        match self.function:
            case "layer_norm" if self.whole:
                return group_norm("layer_norm", groups=lambda norm: 1)
            case "layer_norm":
                return token_norm("layer_norm")
            case "rms_norm":
                return token_norm("rms_norm", normalize=rms_norm)
            case "group_norm":
                return group_norm("group_norm")
            case "instance_norm":
                describe = group_norm if arguments.get("use_input_stats", True) else running_norm
                return describe("instance_norm", own_precision=True)
        if arguments.get("training") or self.running_mean is None:
            return "it normalizes by statistics of the whole batch, so that no token is one sample's own"
        return running_norm("batch_norm")


def _name(func: Any) -> str:
    return str(func.__name__).partition(".")[0]  # without an operator's overload


def inseparable(x: Tensor) -> str | None:
    """Return the reason why the tokens of a tensor cannot be told apart by sample, if there is one."""
    if not (x.is_nested or is_batchedtensor(x)):
        return None
    called = "it takes a nested tensor, whose" if x.is_nested else "it is called within torch.vmap, where its"
    return f"{called} tokens cannot be told apart by sample"


@dataclass(slots=True)
class Frame:
    """A running call of a module's forward, or all that a pass runs outside of modules.

    Attributes:
        path: of the module.
        in_norm: True within a norm module, which has its functions to itself.
        functions: names of the norm functions that the forward has called so far.
    """

    path: str
    in_norm: bool
    functions: list[str] = field(default_factory=list)


class _OfThread(threading.local):
    entered = by_itself = paused = False

    def __init__(self) -> None:
        self.frames, self.norms_called = list[Frame](), list[str]()


class FunctionWatch(TorchFunctionMode):
    """Numbers the norm functions that each call of a module's forward calls.

    It is active in the thread that enters it, and in threads of the same pass while they run a module.
    """

    def __init__(self, norms: Collection[str], hooks: PassHooks) -> None:
        """Watch a network outside of its ``norms``, paths of modules, in the passes of ``hooks``."""
        super().__init__()
        self._norms, self.hooks, self._here = norms, hooks, _OfThread()

    def called(self, name: str, norm_of_call: Callable[[], CalledNorm], x: Tensor, output: Any) -> None:
        """Receive a call of a norm function, by the name of its site."""

    def left(self, frame: Frame) -> None:
        """Receive the end of a call of a module's forward, or of a pass, outside of norms."""

    @property
    def frames(self) -> list[Frame]:
        """Running calls of modules in this thread, the innermost last; the first is outside of modules."""
        return self._here.frames

    def __enter__(self) -> FunctionWatch:
        # A pass before may have ended with an error.
        self._here.frames, self._here.entered = [Frame(_OUTSIDE, False)], True
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        whole_pass = raised[0] is None and not self._here.by_itself
        self._here.entered = self._here.by_itself = False
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        if whole_pass:
            self.left(self.frames[0])

    @contextlib.contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Follow the calls of a network's modules in the block; hooks that were registered before run inside them."""
        with contextlib.ExitStack() as hooks:
            for path, module in named_modules(model):
                in_torch = type(module).__module__.startswith(_TORCH) and path and not is_norm(module)
                if not in_torch and not isinstance(module, torch.jit.ScriptModule):
                    enter = self.hooks.limited(partial(self._enter, path))
                    hooks.callback(module.register_forward_pre_hook(enter).remove)
                    hooks.callback(module.register_forward_hook(self.hooks.limited(self._leave)).remove)
            yield

    def _enter(self, path: str, *_: Any) -> None:
        if not self._here.entered:  # a thread that the network started, as nn.DataParallel does
            self.__enter__()
            self._here.by_itself = True
        self.frames.append(Frame(path, self.frames[-1].in_norm or path in self._norms))

    def _leave(self, *_: Any) -> None:
        frame = self.frames.pop()
        if len(self.frames) == 1 and self._here.by_itself:
            self.__exit__(None, None, None)
        if not frame.in_norm:
            self.left(frame)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        frame = self.frames[-1]
        is_operator = isinstance(func, _OPERATORS) and _NORM_OPERATORS.match(str(func)) is not None
        if (is_operator or func in _ARGUMENTS or func in _NO_SITES) and not frame.in_norm:
            function = _name(func)
            name = f"{frame.path or '(model)'}:{function}.{len(frame.functions)}"
            frame.functions.append(function)
            x = args[0] if args else kwargs["input"]
            self.called(name, partial(CalledNorm, func, args, kwargs), x, result)
        return result


class ExpectedCalls(FunctionWatch):
    """Passes calls of norm functions on, and raises ModelError where they are not those of the traced pass."""

    def __init__(
        self, norms: Collection[str], sequences: Sequences, adders: Mapping[str, Adder], hooks: PassHooks
    ) -> None:
        """Expect ``sequences`` of functions by the paths of modules; pass calls on to ``adders``, by sites' names."""
        super().__init__(norms, hooks)
        self._sequences, self._adders = sequences, adders

    def called(self, name: str, norm_of_call: Callable[[], CalledNorm], x: Tensor, output: Any) -> None:
        """Pass a call on, as a norm with its input and output."""
        if (add := self._adders.get(name)) is not None:
            norm = norm_of_call()
            add(norm, norm.laid_out(x), norm.laid_out(output))

    def left(self, frame: Frame) -> None:
        """Compare the functions that a forward called with those of the traced pass."""
        expected = self._sequences.get(frame.path, ((),))
        if tuple(frame.functions) not in expected:
            seen, traced = (", ".join(names) or "none" for names in (frame.functions, next(iter(expected))))
            outside = frame.path == _OUTSIDE
            caller = "The code outside of modules" if outside else f"The forward of {frame.path or 'the network'}"
            raise ModelError(
                f"{caller} called other norm functions than with the first sample: "
                f"{seen}, not {traced}. The number and order of these calls name the norm sites, and must not depend "
                "on the input. Capture inputs of one kind at a time."
            )
