"""Point-wise functions and swapped networks in plain PyTorch, without normscope.

Each swapped folder contains a copy of this file as ``pointwise.py``. It imports torch and safetensors, and reads
``swap.json`` and ``model.safetensors`` beside it. With the folder on Python's path, the line under ``example`` in
``swap.json`` makes the network, in eval mode and in the dtypes of ``model.safetensors``; FOLDER there is the folder.

This file is under the MIT License. The weights are under the license that they had before.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format

FOLDER = Path(__file__).parent
WEIGHTS = FOLDER / "model.safetensors"
_ACTIVATIONS = ("drop", "act", "activation")  # children of timm's norms, and of BiT's, that run after the affine step
_HALF = (torch.float16, torch.bfloat16)


# f by the name in swap.json.
CURVES: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "isru": lambda u: (v := u.clamp(-1e9, 1e9)) * torch.rsqrt(1 + v.square()),
    "erf": torch.erf,
    "derf": torch.erf,
    "hardtanh": lambda u: u.clamp(-1, 1),
    "linear": torch.clone,
    "softcap": torch.tanh,
    "sigmoid": lambda u: torch.exp(u.clamp(max=0)) / (1 + torch.exp(-u.abs())),
    "arctan": lambda u: 2 / math.pi * torch.atan(u),
    "satursin": lambda u: torch.sin(u.clamp(-math.pi / 2, math.pi / 2)),
    "expsign": lambda u: torch.copysign(-torch.expm1(-u.abs()), u),
    "softsign": lambda u: u / (1 + u.abs()),
    "relsign": lambda u: u / (1 + torch.hypot(u, torch.ones_like(u))),
    "cubsign": lambda u: (v := u.clamp(-1e6, 1e6).pow(3)) / (1 + v.abs()),
    "saturlog": lambda u: torch.copysign((v := torch.log1p(u.abs())) / (1 + v), u),
    "logquad_clip": lambda u: torch.copysign(torch.log1p(u.square()).clamp(max=1), u),
    "logsign_clip": lambda u: torch.copysign(torch.log1p(u.abs()).clamp(max=1), u),
}
_OPERATORS: dict[type[ast.AST], Callable[..., Tensor]] = {
    **{ast.Add: torch.add, ast.Sub: torch.sub, ast.Mult: torch.mul, ast.Div: torch.true_divide, ast.Pow: torch.pow},
    **{ast.UAdd: torch.clone, ast.USub: torch.neg},
}
_ELEMENTWISE = "abs sign sqrt exp expm1 log log1p sin cos tan sinh cosh tanh asinh atan arctan erf sigmoid"
_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    **{name: getattr(torch, name) for name in (*_ELEMENTWISE.split(), "minimum", "maximum")},
    **{"min": torch.minimum, "max": torch.maximum},
    "cbrt": lambda x: torch.sign(x) * x.abs().pow(1 / 3),
    "clip": lambda x, low, high: torch.minimum(torch.maximum(x, low), high),
}
_CONSTANTS = {"pi": math.pi, "e": math.e}


def formula(text: str) -> Callable[[Tensor], Tensor]:
    """Return f of a formula in u, or x; ValueError if it contains anything but numbers, operators and functions.

    >>> formula("min(u / 2, 1)")(torch.tensor([1.0, 3.0]))
    tensor([0.5000, 1.0000])
    """
    return _term(ast.parse(text, mode="eval").body)


def _term(node: ast.expr) -> Callable[[Tensor], Tensor]:
    match node:
        case ast.Name(id="u" | "x"):
            return lambda u: u
        case ast.Name(id=name) if name in _CONSTANTS:
            return _term(ast.Constant(_CONSTANTS[name]))
        case ast.Constant(value=int() | float() as value):
            constant = torch.tensor(float(value), dtype=torch.float64)  # unlike a number it may be divided by zero
            return lambda u: constant
        case ast.UnaryOp(op=operator, operand=operand) if type(operator) in _OPERATORS:
            function, arguments = _OPERATORS[type(operator)], [operand]
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
            function, arguments = _OPERATORS[type(operator)], [left, right]
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            function = _FUNCTIONS[name]
        case _:
            raise ValueError(f"{ast.unparse(node)!r} is not part of a formula.")
    terms = [_term(argument) for argument in arguments]
    return lambda u: function(*(term(u) for term in terms))


# From the dtypes of a norm's input and weight to that of its output. T5 in float16 expects the least of both.
RETURNS: dict[str, Callable[[torch.dtype, torch.dtype], torch.dtype]] = {
    "input": lambda input, weight: input,
    "promoted": torch.promote_types,
    "weight": lambda input, weight: weight,
    "least": lambda input, weight: weight if input == torch.float32 and weight in _HALF else input,
    "float32": lambda input, weight: torch.float32,
}


def with_strides_kept(input: Tensor, keeps: str) -> Tensor:
    """Return the input in the memory layout that the replaced norm's output has."""
    if keeps == "to_channels_last":
        return input.movedim(1, -1).contiguous().movedim(-1, 1)
    if keeps == "all" or input.is_contiguous():
        return input
    kept = suggest_memory_format(input) if keeps == "channels_last" else torch.contiguous_format
    return input.contiguous(memory_format=kept)


class Table(nn.Module):
    """Piecewise linear function through points; the outer pieces extend to infinity.

    The points stay in float32 when a network becomes half precision, in which neighbours would coincide.

    >>> lines = Table(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 3.0]), torch.tensor([0.0, 3.0, 0.0]))
    >>> lines(torch.tensor([-2.0, 0.5, 9.0]))
    tensor([0.0000, 1.5000, 3.0000])
    """

    at: Tensor
    mean: Tensor
    slopes: Tensor

    def __init__(self, at: Tensor, mean: Tensor, slopes: Tensor) -> None:
        super().__init__()
        for name, values in (("at", at), ("mean", mean), ("slopes", slopes)):
            self.register_buffer(name, values.float())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Table:
        for name, buffer in self.named_buffers():
            setattr(self, name, buffer.to(fn(buffer).device))
        return self

    def forward(self, u: Tensor) -> Tensor:
        """Evaluate at u, of any shape, float32 or float64."""
        at, mean, slopes = (values.to(u) for values in (self.at, self.mean, self.slopes))
        piece = torch.searchsorted(at, u.detach().contiguous())
        left = (piece - 1).clamp_min(0)
        return mean[left] + slopes[piece] * (u - at[left])


def pointwise(
    x: Tensor,
    f: Callable[[Tensor], Tensor],
    alpha: Tensor,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    behind: int,
) -> Tensor:
    """Return weight · f(αx + s) + bias in x's dtype; ``behind`` axes of x follow those of the channels."""

    def along(parameter: Tensor) -> Tensor:
        single = parameter.numel() == 1
        return (parameter if single else parameter.view(*parameter.shape, *[1] * behind)).to(x.dtype)

    u = along(alpha) * x
    if shift is not None:
        u = u + along(shift)
    y = along(weight) * f(u)
    return y if bias is None else y + along(bias)


BEHAVIOUR = ("keeps", "returns", "under_autocast", "overwrites", "ignores")


class InPlaceOfNorm(nn.Module):
    """Base of modules that take a norm's arguments, and return its dtype, in its layout and memory."""

    eps = math.nan  # keeps nn.TransformerEncoderLayer from its fused path, which would make a LayerNorm of this
    in_place_of: str = ""  # full class name of the norm that it replaced
    # Strides of the input that the output inherits: all, channels_last, or none if it is contiguous; or it always has
    # those of channels_last: to_channels_last.
    keeps: str = "all"
    returns: str = "least"  # rule of the output's dtype, a key of RETURNS
    under_autocast: str = ""  # another rule under autocast, except on the CPU
    overwrites: Sequence[str] = ()  # dtypes of inputs that are overwritten with the output
    ignores: Sequence[str] = ()  # places and names of arguments whose tensors change nothing, such as 1 and mask
    activations: Sequence[str] = ()  # names of children that run afterwards
    computed: Callable[[Tensor], Tensor]  # from an input in float32 or float64 to the output
    weight: nn.Parameter | None

    def __init__(self, normalized_shape: int | Sequence[int], channel_axis: int) -> None:
        super().__init__()
        self.normalized_shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.channel_axis = channel_axis if len(self.normalized_shape) == 1 else -1

    def forward(self, input: Tensor | None = None, *ignored: Any, **named: Any) -> Tensor:
        """Apply the function to the only tensor; other arguments, such as ``residual=None``, change nothing."""
        if input is None or ignored or named:
            positional = {str(number): value for number, value in enumerate((input, *ignored))}
            arguments = {name: value for name, value in (positional | named).items() if name not in self.ignores}
            input = self.normalized(*arguments.values())
        if input.is_nested:  # nn.TransformerEncoder makes it of a padded batch
            return torch.nested.as_nested_tensor([self(sample) for sample in input.unbind()])
        if self.overwrites and str(input.dtype)[6:] in self.overwrites:
            return input.copy_(self.applied(input.clone()))  # whose values its gradient needs
        return self.applied(input)

    def applied(self, input: Tensor) -> Tensor:
        """Return the output in the norm's dtype and layout."""
        x, dtype = with_strides_kept(input, self.keeps), self.returned_dtype(input)
        y = self.computed(x.to(torch.promote_types(torch.promote_types(x.dtype, dtype), torch.float32))).to(dtype)
        return self.activate(y)

    def also_activate(self, norm: nn.Module) -> None:
        """Take over the children of a norm that run after its affine step, as in timm's NormAct classes."""
        for name in _ACTIVATIONS:
            if isinstance(child := getattr(norm, name, None), nn.Module):
                self.add_module(name, child)
                self.activations = (*self.activations, name)

    def activate(self, y: Tensor) -> Tensor:
        """Apply the activations to an output."""
        for name in self.activations:
            y = getattr(self, name)(y)
        return y

    def normalized(self, *arguments: Any) -> Tensor:
        """Return the tensor among the arguments of a norm; TypeError if there is another one, or none."""
        tensors = [value for value in arguments if isinstance(value, Tensor)]
        if len(tensors) != 1:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "none"
            norm = self.in_place_of.rpartition(".")[2] or "norm"
            raise TypeError(f"The {type(self).__name__} in place of a {norm} takes one tensor, and got {shapes}.")
        return tensors[0]

    def returned_dtype(self, input: Tensor) -> torch.dtype:
        """Return the dtype of the output."""
        device, weight = input.device.type, input if self.weight is None else self.weight
        autocast = self.under_autocast and device != "cpu" and torch.is_autocast_enabled(device)
        return RETURNS[self.under_autocast if autocast else self.returns](input.dtype, weight.dtype)


class RMSNorm(InPlaceOfNorm):
    """weight · x / √(mean of x² + eps) + bias over the channels (arXiv 1910.07467, eq. 4, with a bias besides).

    Args:
        normalized_shape: sizes of the channel axes.
        eps: kept as ``variance_epsilon``; ``eps`` itself is NaN.
        channel_axis: the channel axis, if ``normalized_shape`` is one number; several numbers are the last axes.
        elementwise_affine: use a weight and a bias, both ``normalized_shape``.
        bias: use a bias.

    >>> RMSNorm(2, eps=0.0)(torch.tensor([[3.0, 4.0]])).detach()
    tensor([[0.8485, 1.1314]])
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        *,
        eps: float = 1e-6,
        channel_axis: int = -1,
        elementwise_affine: bool = True,
        bias: bool = True,
    ) -> None:
        super().__init__(normalized_shape, channel_axis)
        self.variance_epsilon = eps
        self.weight = nn.Parameter(torch.ones(self.normalized_shape)) if elementwise_affine else None
        self.bias = nn.Parameter(torch.zeros(self.normalized_shape)) if bias and elementwise_affine else None

    def computed(self, x: Tensor) -> Tensor:
        """Normalize the tokens."""
        x = x if self.channel_axis == -1 else x.movedim(self.channel_axis, -1)
        weight = None if self.weight is None else self.weight.to(x)
        y = nn.functional.rms_norm(x, self.normalized_shape, weight, self.variance_epsilon)
        if self.bias is not None:
            y = y + self.bias.to(x)
        return y if self.channel_axis == -1 else y.movedim(-1, self.channel_axis)

    def extra_repr(self) -> str:
        """Return the channels and eps."""
        return f"{', '.join(map(str, self.normalized_shape))}, eps={self.variance_epsilon:g}"


class Removed(InPlaceOfNorm):
    """Nothing in place of a norm whose output linear layers pass on to norms (arXiv 2407.09577, proposition 3)."""

    weight = bias = None

    def applied(self, input: Tensor) -> Tensor:
        """Return the input itself."""
        return input


class Pointwise(InPlaceOfNorm):
    """Elementwise weight · f(αx + s) + bias, computed in float32 at least.

    Args:
        curve: the name of f in swap.json.
        normalized_shape: sizes of the channel axes.
        channel_axis: the channel axis, if ``normalized_shape`` is one number; several numbers are the last axes.
        alpha: initial α, ``(1,)`` or one per channel.
        shift: initial s, likewise; None for a function without s.
        elementwise_affine: use one weight and bias per channel; otherwise one weight, ``(1,)``, and no bias.
        bias: use a bias.
        table: f, if it has no formula.
    """

    alpha: nn.Parameter
    shift: nn.Parameter | None
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        curve: Any,
        normalized_shape: int | Sequence[int],
        *,
        channel_axis: int,
        alpha: Tensor,
        shift: Tensor | None,
        elementwise_affine: bool,
        bias: bool,
        table: Table | None = None,
    ) -> None:
        super().__init__(normalized_shape, channel_axis)
        self.curve, self.table = curve, table
        self.alpha = nn.Parameter(alpha)
        self.shift = None if shift is None else nn.Parameter(shift)
        affine = self.normalized_shape if elementwise_affine else (1,)
        self.weight = nn.Parameter(torch.ones(affine))
        self.bias = nn.Parameter(torch.zeros(affine)) if bias and elementwise_affine else None

    @property
    def f(self) -> Callable[[Tensor], Tensor]:
        """The function of αx + s."""
        return CURVES[self.curve] if self.table is None else self.table

    def computed(self, x: Tensor) -> Tensor:
        """Apply the function."""
        return pointwise(x, self.f, self.alpha, self.shift, self.weight, self.bias, self.axes_behind(x))

    def axes_behind(self, x: Tensor) -> int:
        """Return the number of axes of x after those of its channels."""
        return (-self.channel_axis if self.channel_axis < 0 else x.ndim - self.channel_axis) - 1

    def extra_repr(self) -> str:
        """Return the curve, the shape and the channel axis."""
        shape = ", ".join(map(str, self.normalized_shape))
        axis = "" if self.channel_axis == -1 else f", channel_axis={self.channel_axis}"
        return f"{getattr(self.curve, 'name', self.curve)}, {shape}{axis}"


def record() -> dict[str, Any]:
    """Return swap.json."""
    facts: dict[str, Any] = json.loads((FOLDER / "swap.json").read_text(encoding="utf-8"))
    return facts


def modules() -> dict[str, nn.Module]:
    """Return new modules that replace norms, by the norms' paths; their weights are not loaded yet."""
    replacements: dict[str, nn.Module] = {site["name"]: _module(site) for site in record()["sites"]}
    for site in record()["sites"]:
        vars(replacements[site["name"]]).update({name: site[name] for name in BEHAVIOUR})
    return replacements


def _module(site: dict[str, Any]) -> InPlaceOfNorm:
    curve, shape = site["curve"], site["normalized_shape"]
    options = {name: site[name] for name in ("channel_axis", "elementwise_affine", "bias")}
    if curve == "removed":
        return Removed(shape, site["channel_axis"])
    if curve == "rmsnorm":
        return RMSNorm(shape, eps=site["eps"], **options)
    if "=" in curve:
        CURVES[curve] = formula(curve.partition("=")[2])
    start = torch.zeros(shape if site["per_channel"] else 1)
    options |= {"alpha": start, "shift": start.clone() if site["shift"] else None}
    if curve != "free":
        return Pointwise(curve, shape, **options)
    with safe_open(WEIGHTS, framework="pt") as tensors:
        parts = (tensors.get_slice(f"{site['name']}.table.{name}").get_shape() for name in ("at", "mean", "slopes"))
        return Pointwise(curve, shape, **options, table=Table(*map(torch.zeros, parts)))


def tied_heads(network: nn.Module) -> dict[str, str]:
    """Return the path of the embedding whose weight a linear layer shares, by the path of the layer."""
    modules = dict(network.named_modules())
    first_last = reversed(modules.items())  # so that the first of several embeddings is named, as in a saved file
    embeddings = {id(module.weight): path for path, module in first_last if isinstance(module, nn.Embedding)}
    heads = {path: id(module.weight) for path, module in modules.items() if isinstance(module, nn.Linear)}
    return {path: embeddings[weight] for path, weight in heads.items() if weight in embeddings}


def untie(network: nn.Module, heads: Iterable[str]) -> None:
    """Give linear layers that share a weight their own copy."""
    for path in heads:
        head: Any = network.get_submodule(path)
        head.weight = nn.Parameter(head.weight.detach().clone(), head.weight.requires_grad)


def make_room(network: nn.Module, names: Iterable[str]) -> None:
    """Prepare a network for tensors of exact rewrites: heads of their own, and buffers that its state did not have."""
    names, heads = set(names), tied_heads(network)
    untie(network, [head for head in heads if {f"{path}.weight" for path in (head, heads[head])} <= names])
    for path, module in network.named_modules():
        module._non_persistent_buffers_set -= {last for at, _, last in (n.rpartition(".") for n in names) if at == path}


def subtract_mean(module: nn.Module, args: Any, kwargs: Any, *, axis: int) -> Any:
    """Subtract the mean over the channels from a module's first floating-point tensor, as a forward pre-hook."""
    x = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point())
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = (wide - wide.mean(axis, keepdim=True)).to(x.dtype)
    values = {name: centred if value is x else value for name, value in kwargs.items()}
    return tuple(centred if value is x else value for value in args), values


def centre(network: nn.Module, axes: Mapping[str, int]) -> None:
    """Subtract means over the axes of the channels, once in each residual stream, before the modules at some paths."""
    for path, axis in axes.items():
        network.get_submodule(path).register_forward_pre_hook(partial(subtract_mean, axis=axis), with_kwargs=True)


def put_in(network: nn.Module) -> nn.Module:
    """Replace a network's norms by these modules, in place, and subtract means; the weights are not loaded yet."""
    centre(network, record()["centred"])
    activated = {site["name"] for site in record()["sites"] if site["activated"]}
    for path, module in modules().items():
        norm = network.get_submodule(path)
        if isinstance(module, Pointwise) and path in activated:
            module.also_activate(norm)
        module.train(norm.training)
        for parent in list(network.modules()):
            for name in [name for name, child in parent._modules.items() if child is norm]:
                setattr(parent, name, module)
    return network


def swapped(network: nn.Module, weights: str | Path = WEIGHTS) -> nn.Module:
    """Swap the norms of a network in place and load the weights; its own weights do not matter.

    Raises RuntimeError, or AttributeError, if it is of another architecture.
    """
    tensors = load_file(weights)
    make_room(network, tensors)
    tensors |= {name: tensors[kept] for name, kept in record()["tied"].items()}
    put_in(network)
    for name, value in network.state_dict(keep_vars=True).items():
        if name in tensors:
            value.data = value.data.to(tensors[name].dtype)
    network.load_state_dict(tensors)
    return network.eval()


def register(library: Any) -> None:
    """Let AutoModel of ``library``, transformers, load the folder, whose config.json has its own model type."""
    facts = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
    names = facts["pointwise"]

    def initialize(self: Any, config: Any) -> None:
        base.__init__(self, config, **names["options"])
        put_in(self)
        with safe_open(WEIGHTS, framework="pt") as tensors:
            make_room(self, tensors.keys())

    config = type("PointwiseConfig", (getattr(library, names["config"]),), {"model_type": facts["model_type"]})
    base = getattr(library, names["model"])
    kept = {*(getattr(base, "_keep_in_fp32_modules_strict", None) or ()), "table"}
    content = {"config_class": config, "_keep_in_fp32_modules_strict": kept, "__init__": initialize}
    library.AutoConfig.register(facts["model_type"], config)
    library.AutoModel.register(config, type("PointwiseModel", (base,), content))
