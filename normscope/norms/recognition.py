"""Recognition of norms: a table of classes, additions by the user, and a trial of unknown modules."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import UsageError
from normscope.norms.formulas import Normalize, layer_norm, scale_and_shift
from normscope.norms.kinds import Axes, NormKind, OfModule, token_norm, trailing_axes
from normscope.norms.known import NORMS, Row
from normscope.norms.sites import NormSite
from normscope.norms.trials import REGISTER, Call, called_pointwise, identified
from normscope.runtime.spread import copied

_TABLE: dict[str, Row] = dict(NORMS)
# The words of a class's name: "My" and "RMS" of MyRMS, "LN" of LN2d, "Channels" as one.
_WORDS = re.compile("[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_CALLED_A_NORM = re.compile("([nN]orm[^A-Z]*|RMS|Rms|rms|LN|Ln|ln)[0-9]*[dD]?$")


def register_norm(
    module_type: type[nn.Module] | str,
    *,
    name: str | None = None,
    axes: int | tuple[int, ...] | Axes = trailing_axes,
    normalize: Normalize = layer_norm,
    affine: OfModule = scale_and_shift,
    centred: bool | None = None,
) -> None:
    """Teach normscope a class of norms, and its subclasses that do not override ``forward``.

    Args:
        module_type: the class, or its full name if importing the class only for this would be too much.
        name: for tables and figures; the class's own name by default.
        axes: the axis or axes of the input that share one statistic, or a function of (module, number of axes).
        normalize: from float32 rows ``(tokens, d)`` and eps to (y, rstd), of shapes ``(tokens, d)`` and
            ``(tokens, 1)``.
        affine: from (module, y) to the module's output; ``weight · y + bias`` by default.
        centred: whether the mean is subtracted; by default True, unless ``normalize`` is ``rms_norm`` or its like.

    ``normscope layers MODEL --verify`` compares the result with the module's own output.

    >>> import torch
    >>> from normscope.norms.formulas import rms_norm
    >>> class GemmaNorm(nn.Module):
    ...     def __init__(self, d):
    ...         super().__init__()
    ...         self.weight, self.eps = nn.Parameter(torch.zeros(d)), 1e-6
    >>> register_norm(GemmaNorm, axes=-1, normalize=rms_norm, affine=lambda norm, y: y * (1 + norm.weight))
    >>> kind_of(GemmaNorm(8)).name
    'GemmaNorm'
    """
    key = module_type if isinstance(module_type, str) else _full_name(module_type)
    if axes == ():
        raise UsageError(f"The norm {key} needs at least one axis that shares a statistic; axes=() names none.")
    _TABLE[key] = token_norm(
        name or key.rpartition(".")[2],
        axes=(axes,) if isinstance(axes, int) else axes,
        normalize=normalize,
        affine=affine,
        centred=centred,
    )


def kind_of(module: nn.Module) -> NormKind | None:
    """Look up the kind of a module; None if neither its class nor the class that defines its ``forward`` is known."""
    ancestor, kind = _nearest(module)
    inherited = getattr(type(module), "forward", None) is getattr(ancestor, "forward", None)
    return kind if isinstance(kind, NormKind) and inherited else None


def ancestor_kind(module: nn.Module) -> NormKind | None:
    """Look up the kind of the nearest known ancestor, even if the module's class overrides ``forward``."""
    _, kind = _nearest(module)
    return kind if isinstance(kind, NormKind) else None


def refusal(module: nn.Module) -> str | None:
    """Return the reason why a module of a known class, or of a subclass, is no norm site, if there is one."""
    _, reason = _nearest(module)
    return reason if isinstance(reason, str) else None


def is_norm(module: nn.Module) -> bool:
    """True if a module is a norm by the table or by its name, which contains norm, or rms or ln as a word.

    So is a small module by a name such as DynamicTanh.
    Convolutions, linear layers and modules that contain a norm are no norms. Neither are modules with layers, unless
    their name ends in norm: RobertaPreLayerNormOutput is an output, AdaGroupNorm a norm, ConvMlpWithNorm an MLP.

    >>> [is_norm(type(name, (nn.Module,), {})()) for name in ("MyRMS", "LN2d", "AdaLN", "Channels", "Alarms")]
    [True, True, True, False, False]
    """
    if _nearest(module)[0] is not None:
        return True
    name = type(module).__name__
    words = {word.lower() for word in _WORDS.findall(name)}
    if called_pointwise(module):
        return True
    if "norm" not in name.lower() and not words & {"rms", "ln"}:
        return False
    if type(module).__module__.startswith("torch.nn.utils") or re.search("With_?Norm", name):
        return False
    if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
        return False
    if any(is_norm(child) for child in module.modules() if child is not module):
        return False
    layers = any(parameter.ndim > 1 for child in module.children() for parameter in child.parameters())
    return not layers or _CALLED_A_NORM.search(name) is not None


def _nearest(module: nn.Module) -> tuple[type | None, NormKind | str | None]:
    """Return the first class among a module's ancestors that is in the table, and its row for this module."""
    for ancestor in type(module).__mro__:
        if (row := _TABLE.get(_full_name(ancestor))) is not None:
            return ancestor, row(module) if callable(row) else row
    return None, None


def _full_name(module_type: type) -> str:
    return f"{module_type.__module__}.{module_type.__qualname__}"


@torch.no_grad()
def kind_at(module: nn.Module, site: NormSite) -> NormKind | str:
    """Return the kind of the module at a known site without running the network, or the reason why it is no norm.

    A copy of a module of an unknown class is tried on noise.
    """
    listed = kind_of(module) or refusal(module)
    if listed is not None:
        return listed
    tensors = itertools.chain(module.parameters(), module.buffers())
    like = next((tensor for tensor in tensors if tensor.is_floating_point()), torch.zeros(()))
    twin = copied(module).eval()
    for shape in shapes_at(site):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like.device, like.dtype)
        try:
            args, kwargs = call_with(twin, x.clone())  # it may overwrite its input
            output = twin(*args, **kwargs)
        except Exception:  # noqa: S112 - code that is not ours may accept only one number of axes
            continue
        return identified(twin, call_with(twin, x), x, output, ancestor_kind(module))
    return f"it could not be tried on noise; {REGISTER}"


def input_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the tensor that a norm normalizes: the first among its positional, then its keyword arguments."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)


def with_input(args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a norm with ``x`` in the place of the tensor that it normalizes."""
    normalized = input_of(args, kwargs)
    return tuple(x if value is normalized else value for value in args), {
        name: x if value is normalized else value for name, value in kwargs.items()
    }


def call_with(module: nn.Module, x: Tensor) -> Call:
    """Return arguments of a norm: x first, and None for others without a default."""
    first, *further = inspect.signature(module.forward).parameters.values()
    variadic = (first.VAR_POSITIONAL, first.VAR_KEYWORD)
    absent = {p.name: None for p in further if p.default is p.empty and p.kind not in variadic}
    return ((), {first.name: x, **absent}) if first.kind is first.KEYWORD_ONLY else ((x,), absent)


@torch.no_grad()
def ignored(module: nn.Module, x: Tensor) -> set[str]:
    """Return where a norm takes further tensors that change nothing, whatever its weights: as ``1`` and ``mask``."""
    twin, places = copied(module).eval(), set[str]()
    for parameter in twin.parameters():  # which may be zeros at first
        parameter.copy_(0.5 + torch.rand(parameter.shape, generator=torch.Generator().manual_seed(0)))

    def called(**further: Tensor) -> Tensor:
        args, kwargs = call_with(twin, x.clone())
        return twin(*args, **{**kwargs, **further})  # type: ignore[no-any-return]

    for position, name in list(enumerate(inspect.signature(module.forward).parameters))[1:]:
        values = (torch.zeros_like(x), x.flip(-1), torch.ones_like(x[..., 0]), torch.ones_like(x).bool())
        with contextlib.suppress(Exception):  # of code that is not ours
            if all(torch.equal(called(), called(**{name: value})) for value in values):
                places |= {str(position), name}
    return places


def shapes_at(site: NormSite) -> Iterator[list[int]]:
    """Yield shapes of inputs with the site's channels along its channel axes."""
    if site.grouped and site.channel_axis == 1:
        yield [2, site.channels, *site.normalized_shape[1:]]
        return
    axes = (site.channel_axis,) if isinstance(site.channel_axis, int) else site.channel_axis
    heads = (site.channels // site.d, site.d) if len(axes) == 2 else (site.channels,)
    sizes = heads if site.grouped else site.normalized_shape
    for n_further in (2, 3, 1):
        shape = [2] + [3] * (len(axes) + n_further - 1)
        if all(-len(shape) < axis < len(shape) for axis in axes):
            for axis, size in zip(axes, sizes, strict=True):
                shape[axis] = size
            yield shape
