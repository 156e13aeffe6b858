"""Which modules normalize: a table of classes, what a user adds to it, and a trial of unknown ones."""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import UsageError
from normscope.pairs.norms.formulas import (
    FORMS,
    Normalize,
    channel_vectors,
    gain_and_shift,
    layer_norm,
    rms_norm,
    root_mean_square,
    scale_and_shift,
    std_norm,
    unit_length,
    unit_offset,
)
from normscope.pairs.norms.kinds import (
    Axes,
    NormKind,
    OfModule,
    group_norm,
    named_eps,
    running_norm,
    token_norm,
    trailing_axes,
)
from normscope.pairs.norms.known import NORMS, Row
from normscope.pairs.norms.sites import NormSite
from normscope.pairs.norms.verification import excess, overflow_in
from normscope.runtime.network import copied

__all__ = ["ancestor_kind", "is_norm", "kind_of", "layer_norm", "refusal", "register_norm", "rms_norm"]

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
    """Teach normscope a class of norms; subclasses that keep its ``forward`` are known with it.

    Args:
        module_type: the class, or its full name where importing it only for this would be too much.
        name: what tables and figures call it; the class's own name by default.
        axes: the axis or axes of the input that share one statistic, or a function of (module, number of axes).
        normalize: from float32 rows ``(tokens, d)`` and eps to (y, rstd), of shapes ``(tokens, d)`` and
            ``(tokens, 1)``.
        affine: from (module, y) to the module's output; ``weight · y + bias`` by default.
        centred: whether the mean is taken away; by default, whether ``normalize`` is not :func:`rms_norm` or its like.

    ``normscope layers MODEL --verify`` compares what this makes of a module's input with the module's own output.

    >>> import torch
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
    """Look up how a module normalizes; None where its class, or the class whose ``forward`` it runs, is not known."""
    for ancestor in type(module).__mro__:
        if _full_name(ancestor) in _TABLE:
            kind = _looked_up(ancestor, module)
            return kind if isinstance(kind, NormKind) and _same_forward(type(module), ancestor) else None
    return None


def ancestor_kind(module: nn.Module) -> NormKind | None:
    """Look up the nearest known ancestor's way, for a subclass whose own ``forward`` may do something else with it."""
    nearest = _nearest(module)
    return nearest if isinstance(nearest, NormKind) else None


def refusal(module: nn.Module) -> str | None:
    """Why a module of a known class, or of a subclass, is no norm site; None where it may be one."""
    nearest = _nearest(module)
    return nearest if isinstance(nearest, str) else None


def is_norm(module: nn.Module) -> bool:
    """True if a module is a norm by the table or by its name, which contains norm, or rms or ln as a word.

    Convolutions and linear layers are no norms, nor are modules that contain a norm, nor modules with layers unless
    their name ends in norm: RobertaPreLayerNormOutput is an output, AdaGroupNorm a norm, ConvMlpWithNorm an MLP.

    >>> [is_norm(type(name, (nn.Module,), {})()) for name in ("MyRMS", "LN2d", "AdaLN", "Channels", "Alarms")]
    [True, True, True, False, False]
    """
    if _nearest(module) is not None:
        return True
    name = type(module).__name__
    words = {word.lower() for word in _WORDS.findall(name)}
    if "norm" not in name.lower() and not words & {"rms", "ln"}:
        return False
    if type(module).__module__.startswith("torch.nn.utils") or re.search("With_?Norm", name):
        return False
    if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
        return False
    if any(is_norm(part) for part in module.modules() if part is not module):
        return False
    layers = any(parameter.ndim > 1 for child in module.children() for parameter in child.parameters())
    return not layers or _CALLED_A_NORM.search(name) is not None


def _nearest(module: nn.Module) -> NormKind | str | None:
    known = (ancestor for ancestor in type(module).__mro__ if _full_name(ancestor) in _TABLE)
    return next((_looked_up(ancestor, module) for ancestor in known), None)


def _looked_up(module_type: type, module: nn.Module) -> NormKind | str:
    row = _TABLE[_full_name(module_type)]
    return row(module) if callable(row) else row


def _full_name(module_type: type) -> str:
    return f"{module_type.__module__}.{module_type.__qualname__}"


def _same_forward(module_type: type, ancestor: type) -> bool:
    return getattr(module_type, "forward", None) is getattr(ancestor, "forward", None)


_AFFINES = (scale_and_shift, unit_offset, unit_length)
_USUAL_EPS = (1e-5, 1e-6, 1e-8, 1e-12, 1e-3)
_NO_ROOT_EPS = 1e-12  # what F.normalize takes, under no name that the module keeps
# (mean, σ) of noise: an offset that tells centring, and scales whose squares lie about the usual eps.
_PROBES = ((0.0, 1.0), (3.0, 1.0), (0.0, 1e-3), (0.0, 1e-5))
_MOST_TOKENS = 256  # that a trial compares
_MOST_POSITIONS = 32  # along an axis that no form normalizes over
_LARGE = ((0.0, 1e2), (0.0, 2e2))  # scales whose squares are far above every eps
_SAME = 1e-4  # how far two forms' y may differ and still be one, where float32 explains 4e-6 of it

_Call = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True)
class _Shown:
    """What a module makes of an input."""

    input: Tensor
    output: Tensor


def identified(module: nn.Module, call: _Call, x: Tensor, output: Tensor, ancestor: NormKind | None) -> NormKind | str:
    """Find the one form that reproduces a norm's output, by trial on a copy; return the reason if there is none.

    ``x`` is the normalized tensor among the arguments of ``call``. ``ancestor`` is the kind of a base class whose
    ``forward`` the module's class overrides.
    """
    register = "normscope.register_norm says what it does"
    if not x.is_floating_point() or output.shape != x.shape:
        return "it does not take floating-point numbers and return as many"
    if sum(isinstance(value, Tensor) for value in (*call[0], *call[1].values())) > 1:
        return f"its output depends on a second tensor that it is called with; {register}"
    name = type(module).__name__
    candidates = list(_candidates(name, module, x, ancestor))
    axes = {axis % x.ndim for kind in candidates for axis in kind.axes(module, x.ndim)}
    shape = [size if axis in axes else min(size, _MOST_POSITIONS) for axis, size in enumerate(x.shape)]
    try:
        shown = _probed(module, call, x, shape)
    except Exception as error:  # of code that is not ours, on inputs that it was not made for
        return f"it could not be tried on other inputs ({type(error).__name__}); {register}"
    fitting = [kind for kind in candidates if all(_fits(kind, module, s) for s in shown)]
    kinds = [kind for each in fitting if (kind := _at_precision(each, module, _Shown(x, output)))]
    gain, _ = gain_and_shift(module)
    if gain is not None and gain.numel() > 1 and not fitting and gain.numel() not in x.shape:
        return f"its weight has {gain.numel()} elements, as many as no axis of its input; {register}"
    if not kinds:
        tried = (each for kind in fitting for each in _at_precisions(kind))
        if too_large := next(filter(None, (overflow_in(kind, module, x, output) for kind in tried)), None):
            return f"its output is of no form on this input, which is too large for it: {too_large}"
        differs = "no form that is known" if ancestor is None else f"neither {ancestor.name}'s nor another known form"
        return f"{differs} reproduces its output over any axis; {register}"
    if any(not _same_y(kinds[0], other, module, s.input) for other in kinds[1:] for s in (*shown[:2], _Shown(x, x))):
        return f"its output fits more than one form (weights of zero hide y); {register}"
    return kinds[0]


@torch.no_grad()
def ignores_scale(module: nn.Module, call: _Call, x: Tensor) -> bool:
    """True if a module with one weight per channel may be a norm; the output of a layer scale doubles with its input.

    A copy is tried on noise in place of ``x``, which is one of the arguments of ``call``.

    >>> x = torch.zeros(2, 8)
    >>> ignores_scale(nn.RMSNorm(8), ((x,), {}), x), ignores_scale(nn.PReLU(8), ((x,), {}), x)
    (True, False)
    """
    if hasattr(module, "running_var"):  # whose scale is not the input's own
        return True
    channels = channel_vectors(module)[0].numel()
    shape = [size if size == channels else min(size, _MOST_POSITIONS) for size in x.shape]
    try:
        one, twice = (shown.output for shown in _probed(module, call, x, shape, _LARGE))
        # A norm's two outputs differ by less than a thousandth, a layer scale's by as much as the first itself.
        return bool((twice - one).abs().mean() < 0.1 * one.abs().mean())
    except Exception:  # of code that is not ours, on inputs that it was not made for
        return False


@torch.no_grad()
def kind_at(module: nn.Module, site: NormSite) -> NormKind | str:
    """Return the kind of the module at a known site without running the network, or the reason why it is no norm.

    Of a class that is in no table, a copy is tried on noise.
    """
    known = kind_of(module) or refusal(module)
    if known is not None:
        return known
    tensors = itertools.chain(module.parameters(), module.buffers())
    like = next((tensor for tensor in tensors if tensor.is_floating_point()), torch.zeros(()))
    twin = _twin(module).eval()
    for shape in _shapes_at(site):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like.device, like.dtype)
        try:
            args, kwargs = call = _call_with(twin, x)
            output = twin(*args, **kwargs)
        except Exception:  # noqa: S112 - code that is not ours may take inputs of one number of axes alone
            continue
        return identified(twin, call, x, output, ancestor_kind(module))
    return "it could not be tried on noise; normscope.register_norm says what it does"


@torch.no_grad()
def kept_strides(module: nn.Module, shape: Sequence[int], channel_axis: int, like: Tensor) -> str:
    """Identify, by trial, which strides of its input a norm keeps; its output is contiguous otherwise.

    Returns ``none`` for LayerNorm, ``channels_last`` for GroupNorm and BatchNorm, and ``all`` for elementwise formulas
    and norms that cannot be tried. ``like`` is a tensor of the norm's device and dtype.
    """
    twin = _twin(module).eval()
    for n_axes in (4, 3, 5):
        sizes = [2, 3, *shape] if channel_axis == -1 else [3] * n_axes
        sizes[channel_axis] = shape[-1]
        x = like.new_zeros(sizes[::-1]).permute(*reversed(range(len(sizes))))
        channels_last = x.movedim(channel_axis, -1).contiguous().movedim(-1, channel_axis)
        try:
            calls = [_call_with(twin, each) for each in (x, channels_last)]
            contiguous = [twin(*args, **kwargs).is_contiguous() for args, kwargs in calls]
        except Exception:  # noqa: S112 - as above
            continue
        return "all" if not contiguous[0] else "none" if contiguous[1] else "channels_last"
    return "all"


def _call_with(module: nn.Module, x: Tensor) -> _Call:
    first = next(iter(inspect.signature(module.forward).parameters.values()))
    return ((), {first.name: x}) if first.kind is first.KEYWORD_ONLY else ((x,), {})


def _shapes_at(site: NormSite) -> Iterator[list[int]]:
    """Shapes of inputs that have the site's channels in their place."""
    if site.grouped:
        yield [2, site.channels, *site.normalized_shape[1:]]
        return
    axes = (site.channel_axis,) if isinstance(site.channel_axis, int) else site.channel_axis
    for others in (2, 3, 1):
        shape = [3] * (len(axes) + others)
        if all(-len(shape) < axis < len(shape) for axis in axes):
            shape[0] = 2
            for axis, size in zip(axes, site.normalized_shape, strict=True):
                shape[axis] = size
            yield shape


def _twin(module: nn.Module) -> nn.Module:
    """A copy without hooks, to be called."""
    twin = copied(module)
    twin._forward_hooks.clear()
    twin._forward_pre_hooks.clear()
    return twin


def _probed(
    module: nn.Module, call: _Call, x: Tensor, shape: list[int], probes: tuple[tuple[float, float], ...] = _PROBES
) -> list[_Shown]:
    """The output of a float32 copy on noise; the module's hooks and state stay untouched."""
    twin, shown = _twin(module).float(), []
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(x.device)
    for mean, sigma in probes:
        probe = mean + sigma * noise
        args = tuple(probe.clone() if value is x else value for value in call[0])
        kwargs = {key: probe.clone() if value is x else value for key, value in call[1].items()}
        shown.append(_Shown(probe, twin(*args, **kwargs)))
    return shown


def _candidates(name: str, module: nn.Module, x: Tensor, ancestor: NormKind | None) -> Iterator[NormKind]:
    if ancestor is not None and ancestor.groups is not None:
        yield replace(ancestor, name=name)
        return
    if hasattr(module, "running_mean") and hasattr(module, "running_var"):
        yield from _with_eps(module, running_norm(name))
    elif hasattr(module, "num_groups"):
        yield from _with_eps(module, group_norm(name))
    gain, shift = gain_and_shift(module)
    for axes in _axes_of(module, x, ancestor):
        d = math.prod(x.shape[axis] for axis in axes)
        if d < 2 or any(part is not None and part.numel() not in (1, d) for part in (gain, shift)):
            continue
        if ancestor is not None:
            yield replace(ancestor, name=name, axes=_fixed(axes))
        for normalize in FORMS:
            for affine in _AFFINES if gain is not None else (scale_and_shift, unit_length):
                kind = token_norm(
                    name, axes=axes, normalize=normalize, affine=affine, bounded=normalize is not std_norm
                )
                yield from (
                    [replace(kind, eps=_NO_ROOT_EPS)] if normalize is root_mean_square else _with_eps(module, kind)
                )


def _with_eps(module: nn.Module, kind: NormKind) -> list[NormKind]:
    return [kind] if named_eps(module) is not None else [replace(kind, eps=eps) for eps in _USUAL_EPS]


def _fits(kind: NormKind, module: nn.Module, shown: _Shown) -> bool:
    try:
        return excess(kind, module, shown.input, shown.output, at_most=_MOST_TOKENS) <= 1
    except (RuntimeError, TypeError):  # channels or statistics of other sizes than the form needs, or none
        return False


def _at_precision(kind: NormKind, module: nn.Module, shown: _Shown) -> NormKind | None:
    """Return the kind that fits the module's own call, which may round every step to half precision."""
    return next((each for each in _at_precisions(kind) if _fits(each, module, shown)), None)


def _at_precisions(kind: NormKind) -> tuple[NormKind, NormKind]:
    return kind, replace(kind, own_precision=True)


def _same_y(kind: NormKind, other: NormKind, module: nn.Module, x: Tensor) -> bool:
    if kind.axes(module, x.ndim) != other.axes(module, x.ndim) or (kind.groups is None) != (other.groups is None):
        return False
    rows = kind.rows(module, x)
    rows = rows.cpu() if rows.device.type == "mps" else rows  # which has no float64
    y, its = (each.lines(module, rows, each.eps_of(module, x.dtype)).y(rows) for each in (kind, other))
    return bool(((y - its).abs() <= _SAME * (1 + y.abs())).all())


def _axes_of(module: nn.Module, x: Tensor, ancestor: NormKind | None) -> list[tuple[int, ...]]:
    """List the axes that may share a statistic, each once however it is counted; none of them numbers the samples."""
    counted: dict[tuple[int, ...], tuple[int, ...]] = {}
    for axes in [*([ancestor.axes(module, x.ndim)] if ancestor else []), (-1,), (1,), (-2,)]:
        if all(-x.ndim <= axis < x.ndim for axis in axes):
            counted.setdefault(tuple(axis % x.ndim for axis in axes), axes)
    return [axes for place, axes in counted.items() if 0 not in place or x.ndim == 1]


def _fixed(axes: tuple[int, ...]) -> Any:
    return lambda module, ndim: axes
