"""Point-wise functions and swapped networks in plain PyTorch, without normscope.

A swapped folder contains this file as ``pointwise.py``, after instructions for its network. It imports torch and
safetensors, and reads ``swap.json`` and ``model.safetensors`` beside it. It is under the MIT License.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format

FOLDER = Path(__file__).parent
WEIGHTS = FOLDER / "model.safetensors"
CURVES: dict[str, Callable[[Tensor], Tensor]] = {}  # f by the name in swap.json; a folder's copy fills it at its end
_ACTIVATIONS = ("drop", "act", "activation")  # children of timm's norms, and of BiT's, that run after the affine step
_HALF = (torch.float16, torch.bfloat16)


def number(value: float) -> Tensor:
    """Return a constant of a formula; unlike Python's numbers it may overflow and be divided by zero."""
    return torch.tensor(value, dtype=torch.float64)


def cbrt(x: Tensor) -> Tensor:
    """Return the real cube root."""
    return torch.sign(x) * x.abs().pow(1 / 3)


def clip(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Limit x to a range."""
    return torch.minimum(torch.maximum(x, low), high)


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


class Float32(nn.Module):
    """Module whose buffers never become half precision, in which neighbouring values would coincide."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Float32:
        for name, part in self.named_buffers():
            setattr(self, name, part.to(fn(part).device))
        return self


class Table(Float32):
    """Piecewise linear function through points; the outer pieces extend to infinity.

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

    def forward(self, u: Tensor) -> Tensor:
        """Evaluate at u, of any shape, float32 or float64."""
        at, mean, slopes = (part.to(u) for part in (self.at, self.mean, self.slopes))
        piece = torch.searchsorted(at, u.detach().contiguous())
        left = (piece - 1).clamp_min(0)
        return mean[left] + slopes[piece] * (u - at[left])


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
    normalized_shape: tuple[int, ...]
    channel_axis: int
    weight: nn.Parameter | None

    def forward(self, input: Tensor | None = None, *others: Any, **named: Any) -> Tensor:
        """Apply the function to the only tensor; other arguments, such as ``residual=None``, change nothing."""
        if input is None or others or named:
            places = {str(place): value for place, value in enumerate((input, *others))}
            arguments = {name: value for name, value in (places | named).items() if name not in self.ignores}
            input = self.normalized(*arguments.values())
        if input.is_nested:  # nn.TransformerEncoder makes it of a padded batch
            return torch.nested.as_nested_tensor([self(part) for part in input.unbind()])
        if self.overwrites and str(input.dtype)[6:] in self.overwrites:
            return input.copy_(self.applied(input.clone()))  # whose values its gradient needs
        return self.applied(input)

    def applied(self, input: Tensor) -> Tensor:
        """Return the output in the norm's dtype and layout."""
        x, dtype = with_strides_kept(input, self.keeps), self.returned_dtype(input)
        y = self.computed(x.to(torch.promote_types(torch.promote_types(x.dtype, dtype), torch.float32))).to(dtype)
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
        super().__init__()
        self.variance_epsilon = eps
        self.normalized_shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.channel_axis = channel_axis if len(self.normalized_shape) == 1 else -1
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


class Pointwise(InPlaceOfNorm):
    """Elementwise weight · f(alpha · x + shift) + bias, computed in float32 at least.

    alpha and shift are one number, (1,), or one per channel; weight is one per channel or one number, (1,). The
    arguments are the entries of a site in swap.json; a :class:`Table` takes the place of a curve without a formula.
    """

    weight: nn.Parameter

    def __init__(self, site: dict[str, Any], table: Table | None = None) -> None:
        super().__init__()
        shape, self.channel_axis, self.curve = tuple(site["normalized_shape"]), site["channel_axis"], site["curve"]
        self.table = table
        self.alpha = nn.Parameter(torch.full(shape if site["per_channel"] else (1,), 0.5))
        self.shift = nn.Parameter(torch.zeros(self.alpha.shape)) if site["shift"] else None
        self.weight = nn.Parameter(torch.ones(shape if site["elementwise_affine"] else (1,)))
        self.bias = nn.Parameter(torch.zeros(shape)) if site["bias"] else None

    def computed(self, x: Tensor) -> Tensor:
        """Apply the function."""
        behind = (-self.channel_axis if self.channel_axis < 0 else x.ndim - self.channel_axis) - 1

        def along(part: Tensor) -> Tensor:
            return (part if part.numel() == 1 else part.view(*part.shape, *[1] * behind)).to(x.dtype)

        u = along(self.alpha) * x
        if self.shift is not None:
            u = u + along(self.shift)
        y = along(self.weight) * (CURVES[self.curve] if self.table is None else self.table)(u)
        return y if self.bias is None else y + along(self.bias)

    def extra_repr(self) -> str:
        """Return the curve."""
        return str(self.curve)


def record() -> dict[str, Any]:
    """Return swap.json."""
    facts: dict[str, Any] = json.loads((FOLDER / "swap.json").read_text(encoding="utf-8"))
    return facts


def modules() -> dict[str, nn.Module]:
    """Return new modules that replace norms, by the norms' paths; their weights are not loaded yet."""
    made: dict[str, nn.Module] = {site["name"]: _module(site) for site in record()["sites"]}
    for site in record()["sites"]:
        vars(made[site["name"]]).update({"keeps": "none"} | {name: site[name] for name in BEHAVIOUR if name in site})
    return made


def _module(site: dict[str, Any]) -> InPlaceOfNorm:
    options = {name: site[name] for name in ("channel_axis", "elementwise_affine", "bias")}
    if site["curve"] == "rmsnorm":
        return RMSNorm(site["normalized_shape"], eps=site["eps"], **options)
    if site["curve"] != "free":
        return Pointwise(site)
    with safe_open(WEIGHTS, framework="pt") as tensors:
        parts = (tensors.get_slice(f"{site['name']}.table.{name}").get_shape() for name in ("at", "mean", "slopes"))
        return Pointwise(site, Table(*map(torch.zeros, parts)))


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


def put_in(network: nn.Module) -> nn.Module:
    """Replace a network's norms by these modules, in place; their weights are not loaded yet."""
    activated = {site["name"] for site in record()["sites"] if site["activated"]}
    for path, module in modules().items():
        norm = network.get_submodule(path)
        if isinstance(module, Pointwise) and path in activated:
            module.activations = [name for name, _ in _children(norm, _ACTIVATIONS)]
            for name, child in _children(norm, _ACTIVATIONS):
                module.add_module(name, child)
        module.train(norm.training)
        for parent in list(network.modules()):
            for name in [name for name, child in parent._modules.items() if child is norm]:
                setattr(parent, name, module)
    return network


def _children(norm: nn.Module, names: Iterable[str]) -> list[tuple[str, nn.Module]]:
    return [(name, child) for name in names if isinstance(child := getattr(norm, name, None), nn.Module)]


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
    """Let AutoModel of transformers load the folder, whose config.json has its own model type."""
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
