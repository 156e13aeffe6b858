"""Recognition of norms: a table of classes, additions by the user, a trial of unknown modules, and verification."""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from normscope.curves.known import CURVES
from normscope.errors import ModelError, UsageError
from normscope.pairs.norms.formulas import (
    FORMS,
    Normalize,
    channel_vectors,
    gain_and_shift,
    layer_norm,
    rms_norm,
    root_mean_square,
    scale_and_shift,
    unit_length,
    unit_offset,
)
from normscope.pairs.norms.kinds import (
    Axes,
    NormKind,
    OfModule,
    group_norm,
    named_eps,
    pointwise_function,
    running_norm,
    token_norm,
    trailing_axes,
)
from normscope.pairs.norms.known import NORMS, Row
from normscope.pairs.norms.sites import NormSite
from normscope.runtime.spread import copied

__all__ = ["ancestor_kind", "is_norm", "kind_of", "layer_norm", "refusal", "register_norm", "rms_norm"]

_TABLE: dict[str, Row] = dict(NORMS)
# The words of a class's name: "My" and "RMS" of MyRMS, "LN" of LN2d, "Channels" as one.
_WORDS = re.compile("[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_CALLED_POINTWISE = re.compile("dynamic_?(tanh|erf|isru)|dyt|dyisru|derf|pointwise", re.IGNORECASE)
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
        centred: whether the mean is subtracted; by default True, unless ``normalize`` is :data:`rms_norm` or its like.

    ``normscope layers MODEL --verify`` compares the result with the module's own output.

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

    So is a module that learns α, by a name such as DynamicTanh.
    Convolutions, linear layers and modules that contain a norm are no norms. Neither are modules with layers, unless
    their name ends in norm: RobertaPreLayerNormOutput is an output, AdaGroupNorm a norm, ConvMlpWithNorm an MLP.

    >>> [is_norm(type(name, (nn.Module,), {})()) for name in ("MyRMS", "LN2d", "AdaLN", "Channels", "Alarms")]
    [True, True, True, False, False]
    """
    if _nearest(module)[0] is not None:
        return True
    name = type(module).__name__
    words = {word.lower() for word in _WORDS.findall(name)}
    if learns_alpha(module) and _CALLED_POINTWISE.search(name):
        return True
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


def _nearest(module: nn.Module) -> tuple[type | None, NormKind | str | None]:
    """Return the first class among a module's ancestors that is in the table, and its row for this module."""
    for ancestor in type(module).__mro__:
        if (row := _TABLE.get(_full_name(ancestor))) is not None:
            return ancestor, row(module) if callable(row) else row
    return None, None


def _full_name(module_type: type) -> str:
    return f"{module_type.__module__}.{module_type.__qualname__}"


# Verification. We compute in float64 from x, weights and running statistics as float32 stores them; the module rounds.
# In float32 it rounds the mean and the variance (sums of d numbers, in some order), x − mean, a root, two products and
# a sum. The libraries' norms reach 2 units in the last place of the largest term, for any d up to 10⁶; other machines
# sum and take roots differently: eight times that. In half precision the result, and in some modules the factor of the
# weight, is rounded once more: half a unit each, and twice that. Modules that compute in half precision also round the
# variance, its root, each product, x and the mean: twice that again.
_FLOAT32_UNITS = 16
_HALF_UNITS = 2
_OWN_PRECISION_UNITS = 4
_NUDGE = 2.0**-10  # of x, as a share: its effect on a point-wise function tells how rounding of αx shows
# Activations are steeper than one in places (hardswish: 1.5), and their result is rounded again.
_ACTIVATION = 2


@torch.no_grad()
def excess(kind: NormKind, module: nn.Module, x: Tensor, output: Tensor, *, at_most: int | None = None) -> float:
    """Return the largest difference between the module's output and ours, as a multiple of what rounding explains.

    ``at_most`` limits the number of compared tokens, evenly over all, unless tokens are groups.
    """
    if output.shape != x.shape:
        return math.inf
    rows, truth = kind.rows(module, x), kind.rows(module, output)
    if at_most is not None and kind.groups is None:
        step = max(1, len(rows) // at_most)
        rows, truth = rows[::step], truth[::step]
    times = _times(kind, module, rows, truth).nan_to_num(nan=math.inf)
    return float(times.max()) if times.numel() else 0.0


@torch.no_grad()
def check(
    kind: NormKind,
    name: str,
    module: nn.Module,
    x: Tensor,
    output: Tensor,
    *,
    batch_axis: int = 0,
    valid: Tensor | None = None,
) -> None:
    """Raise ModelError if a site's output differs from that of ``kind`` by more than rounding explains.

    ``batch_axis`` of ``x`` and ``output`` counts samples. ``valid``, bool ``(tokens,)`` with one sample after the
    other, is False for padding; None stands for no padding.
    """
    furthest, largest = math.inf, float(x.abs().max()) if x.numel() else 0.0
    if output.shape == x.shape:
        rows, truth = (kind.rows(module, tensor, batch_axis) for tensor in (x, output))
        times = _times(kind, module, rows, truth)
        differs = times > 1 if valid is None else (times > 1) & valid.to(times.device)
        if not bool(differs.any()):
            return
        furthest, largest = float(times[differs].max()), float(rows[differs.to(rows.device)].abs().max())
    raise ModelError(
        f"Verification failed at {name} ({kind.name}, input {tuple(x.shape)} {x.dtype}): the module's output differs "
        f"from weight · y + bias by {furthest:.3g} times what rounding explains, in tokens of |x| up to {largest:.3g}. "
        "Its axes, eps or affine step are not what the table of norms says, and normscope.register_norm corrects them; "
        "or x overflows in the precision in which the module computes."
    )


def _times(kind: NormKind, module: nn.Module, rows: Tensor, truth: Tensor) -> Tensor:
    """Return the largest difference of each token from the module's output, as a multiple of rounding error.

    Args:
        kind: the supposed kind of the module.
        module: the norm.
        rows: its input, ``(tokens, d)``.
        truth: its output, likewise.

    Returns:
        float64 ``(tokens,)``. 0 for a token with a NaN or an infinity; NaN for one whose line is not finite, which is
        not summed either.
    """
    dtypes, device = (rows.dtype, truth.dtype), rows.device
    on_mps = device.type == "mps"  # which lacks float64
    rows, truth = (rows.cpu(), truth.cpu()) if on_mps else (rows, truth)
    lines = kind.lines(module, rows, kind.eps_of(module, dtypes[0]))
    y = lines.y(rows)
    shift, rstd = lines.of(rows.float().double(), slice(None))
    if kind.curve is None:
        offset = (shift * rstd).abs()  # of the mean, in units of σ
    else:  # αx is rounded, by a share of itself
        offset = (kind.lines(module, rows.float() * (1 + _NUDGE), 0.0).y(rows) - y).abs() / _NUDGE

    def applied(step: OfModule, y: Tensor) -> Tensor:
        return step(module, y.to(device, torch.float32) if on_mps else y).to(y)

    bias = applied(kind.affine, torch.zeros_like(y))
    weight = applied(kind.affine, torch.ones_like(y)) - bias
    # A mean far from zero costs digits of x − mean, and twice as many of a variance computed in one pass.
    unit = torch.finfo(torch.float32).eps
    allowed = _FLOAT32_UNITS * unit * (weight.abs() * (1 + y.abs() + offset) + bias.abs())
    if kind.curve is None:
        allowed += unit * weight.abs() * y.abs() * offset.square()
    coarsest = max(torch.finfo(dtype).eps for dtype in dtypes)
    if coarsest > unit:
        allowed += _HALF_UNITS * coarsest * ((weight * y).abs() + bias.abs())
        allowed += torch.finfo(dtypes[1]).smallest_normal * coarsest  # below which float16 has no digits left
        if kind.own_precision:
            allowed += _OWN_PRECISION_UNITS * coarsest * weight.abs() * (y.abs() + offset)
    if kind.activation is not None:
        allowed *= _ACTIVATION
    ratio = (applied(kind.output, y) - truth.double()).abs() / allowed.clamp_min(torch.finfo(torch.float32).tiny)
    times = ratio.nan_to_num(nan=math.inf).amax(1) if ratio.numel() else ratio.sum(1)
    summed = torch.isfinite(shift * rstd).flatten()
    return times.where(summed, math.nan).where(torch.isfinite(rows.float()).all(1), 0.0)


# Trial of unknown modules.
_AFFINES = (scale_and_shift, unit_offset, unit_length)
_USUAL_EPS = (1e-5, 1e-6, 1e-8, 1e-12, 1e-3, 2**-23)  # the last is that of F.rms_norm(x, shape)
_NO_ROOT_EPS = 1e-12  # the default of F.normalize, which modules do not store
# (mean, σ) of noise: an offset that reveals centring, and scales whose squares are near the usual eps.
_PROBES = ((0.0, 1.0), (3.0, 1.0), (0.0, 1e-3), (0.0, 1e-5))
_MOST_TOKENS = 256  # that a trial compares
_MOST_POSITIONS = 32  # along an axis that no form normalizes over
_LARGE = ((0.0, 1e2), (0.0, 2e2))  # scales whose squares are far above every eps
_SAME = 1e-4  # largest difference between y of two forms that count as one; float32 explains 4e-6
_REGISTER = "normscope.register_norm says what it does"

_Call = tuple[tuple[Any, ...], Mapping[str, Any]]


def identified(module: nn.Module, call: _Call, x: Tensor, output: Tensor, ancestor: NormKind | None) -> NormKind | str:
    """Find the only form that reproduces a norm's output, by trial on a copy; return the reason if there is none.

    ``x`` is the normalized tensor among the arguments of ``call``. ``ancestor`` is the kind of a base class whose
    ``forward`` the module's class overrides.
    """
    if not x.is_floating_point() or output.shape != x.shape:
        return "it does not take floating-point numbers and return as many"
    if sum(isinstance(value, Tensor) for value in (*call[0], *call[1].values())) > 1:
        return f"its output depends on a second tensor that it is called with; {_REGISTER}"
    pointwise = ancestor is None and learns_alpha(module)
    if pointwise and not torch.any(module.alpha):  # type: ignore[arg-type]
        return "its α is zero, so that its output is constant"
    candidates = list(_pointwise_candidates(module, x) if pointwise else _candidates(module, x, ancestor))
    axes = {axis % x.ndim for kind in candidates for axis in kind.axes(module, x.ndim)}
    shape = [size if axis in axes else min(size, _MOST_POSITIONS) for axis, size in enumerate(x.shape)]
    try:
        probes = _probed(module, call, x, shape, _probes_of_alpha(module) if pointwise else _PROBES)
    except Exception as error:  # of code that is not ours, on inputs that it was not made for
        return f"it could not be tried on other inputs ({type(error).__name__}); {_REGISTER}"
    fitting = [kind for kind in candidates if all(_fits(kind, module, *probe) for probe in probes)]
    # On its own input, a module may round every step to half precision.
    precisions = (each for kind in fitting for each in (kind, replace(kind, own_precision=True)))
    kinds = [kind for kind in precisions if _fits(kind, module, x, output)]
    if not kinds:
        if fitting:
            largest = x.detach().abs().max()
            return f"its output is of no form on this input, whose largest |x| is {largest:.3g}: it may overflow there"
        if pointwise:
            return "no known curve f makes weight · f(αx + s) + bias of its input"
        differs = "no form that is known" if ancestor is None else f"neither {ancestor.name}'s nor another known form"
        return f"{differs} reproduces its output over any axis; {_REGISTER}"
    inputs = [*(probe for probe, _ in probes[:2]), x]
    if any(not _same_y(kinds[0], kind, module, each) for kind in kinds[1:] for each in inputs):
        return f"its output fits more than one form (weights of zero hide y); {_REGISTER}"
    return kinds[0]


def learns_alpha(module: nn.Module) -> bool:
    """True if a module learns α and one weight per channel, as a point-wise function in place of a norm does.

    α, and s if there is one, are one number or one per channel.

    >>> learns_alpha(nn.PReLU(8)), learns_alpha(nn.LayerNorm(8))
    (False, False)
    """
    parameters = dict(module.named_parameters(recurse=False))
    if "alpha" not in parameters or len(parameters) != len(list(module.parameters())):
        return False
    if any(map(is_lazy, parameters.values())):
        return False
    d = max(parameter.numel() for parameter in parameters.values())
    gain, bias = gain_and_shift(module)
    inside = [parameters[name].numel() for name in ("alpha", "shift") if name in parameters]
    affine = [part.numel() for part in (gain, bias) if part is not None]
    alike = {*inside} <= {1, d} and {*affine} == {d} and len(parameters) == len(inside) + len(affine)
    return d > 1 and gain is not None and alike


@torch.no_grad()
def ignores_scale(module: nn.Module, call: _Call, x: Tensor) -> bool:
    """True if a module with one weight per channel may be a norm; the output of a layer scale doubles with its input.

    A copy is tried on noise in place of ``x``, which is one of the arguments of ``call``.

    >>> x = torch.zeros(2, 8)
    >>> ignores_scale(nn.RMSNorm(8), ((x,), {}), x), ignores_scale(nn.PReLU(8), ((x,), {}), x)
    (True, False)
    """
    if hasattr(module, "running_var"):  # its scale is not that of the input
        return True
    channels = channel_vectors(module)[0].numel()
    shape = [size if size == channels else min(size, _MOST_POSITIONS) for size in x.shape]
    try:
        (_, single), (_, double) = _probed(module, call, x, shape, _LARGE)
        # A norm's two outputs differ by less than a thousandth, a layer scale's by as much as the first itself.
        return bool((double - single).abs().mean() < 0.1 * single.abs().mean())
    except Exception:  # of code that is not ours, on inputs that it was not made for
        return False


@torch.no_grad()
def kind_at(module: nn.Module, site: NormSite) -> NormKind | str:
    """Return the kind of the module at a known site without running the network, or the reason why it is no norm.

    A copy of a module of an unknown class is tried on noise.
    """
    known = kind_of(module) or refusal(module)
    if known is not None:
        return known
    tensors = itertools.chain(module.parameters(), module.buffers())
    like = next((tensor for tensor in tensors if tensor.is_floating_point()), torch.zeros(()))
    twin = _twin(module)
    for shape in _shapes_at(site):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like.device, like.dtype)
        try:
            args, kwargs = call = _call_with(twin, x)
            output = twin(*args, **kwargs)
        except Exception:  # noqa: S112 - code that is not ours may accept only one number of axes
            continue
        return identified(twin, call, x, output, ancestor_kind(module))
    return f"it could not be tried on noise; {_REGISTER}"


@torch.no_grad()
def kept_strides(module: nn.Module, shape: Sequence[int], channel_axis: int, like: Tensor) -> str:
    """Identify, by trial, the strides of its input that a norm keeps; otherwise its output is contiguous.

    Returns ``none`` for LayerNorm, ``channels_last`` for GroupNorm and BatchNorm, and ``all`` for elementwise formulas
    and norms that cannot be tried. ``like`` is a tensor of the norm's device and dtype.
    """
    twin = _twin(module)
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
    """Yield shapes of inputs with the site's channels along its channel axes."""
    if site.grouped:
        yield [2, site.channels, *site.normalized_shape[1:]]
        return
    axes = (site.channel_axis,) if isinstance(site.channel_axis, int) else site.channel_axis
    for others in (2, 3, 1):
        shape = [2] + [3] * (len(axes) + others - 1)
        if all(-len(shape) < axis < len(shape) for axis in axes):
            for axis, size in zip(axes, site.normalized_shape, strict=True):
                shape[axis] = size
            yield shape


def _twin(module: nn.Module) -> nn.Module:
    return copied(module).eval()


def _probed(
    module: nn.Module, call: _Call, x: Tensor, shape: list[int], probes: tuple[tuple[float, float], ...] = _PROBES
) -> list[tuple[Tensor, Tensor]]:
    """Return noise in place of ``x``, and the outputs of a float32 copy for it."""
    twin, shown = _twin(module).float(), []
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(x.device)
    for mean, sigma in probes:
        probe = mean + sigma * noise
        args = tuple(probe.clone() if value is x else value for value in call[0])
        kwargs = {key: probe.clone() if value is x else value for key, value in call[1].items()}
        shown.append((probe, twin(*args, **kwargs)))
    return shown


def _candidates(module: nn.Module, x: Tensor, ancestor: NormKind | None) -> Iterator[NormKind]:
    name = type(module).__name__
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
            yield replace(ancestor, name=name, axes=token_norm(name, axes=axes).axes)
        for form in FORMS.values():
            for affine in _AFFINES if gain is not None else (scale_and_shift, unit_length):
                kind = token_norm(name, axes=axes, normalize=form, affine=affine)
                if form is root_mean_square:
                    yield replace(kind, eps=_NO_ROOT_EPS)
                else:
                    yield from _with_eps(module, kind)


def _pointwise_candidates(module: nn.Module, x: Tensor) -> Iterator[NormKind]:
    """Yield weight · f(αx + s) + bias with each bounded curve f, over each axis that may number the channels.

    softcap is left out, whose f is tanh; and linear, which makes a layer scale.
    """
    d = max(parameter.numel() for parameter in module.parameters())
    axes = [each for each in _axes_of(module, x, None) if math.prod(x.shape[axis] for axis in each) == d]
    if all(bool((part == part.flatten()[0]).all()) for part in module.parameters()):  # all axes make the same output
        axes = axes[:1]
    curves = [curve for curve in CURVES.values() if curve.bounded and not curve.amplitude_is_inverse_scale]
    shifted = hasattr(module, "shift")
    left_out = {curve.shift_of if shifted else curve.name for curve in curves if curve.shifted}  # erf, or derf
    for curve in curves:
        if curve.name not in left_out:
            yield from (pointwise_function(type(module).__name__, curve, axes=each) for each in axes)


def _probes_of_alpha(module: nn.Module) -> tuple[tuple[float, float], ...]:
    """Return mean and σ of noise that reaches the bends and the tails of every curve f(αx + s)."""
    alpha: Any = module.alpha
    scale = float(alpha[alpha != 0].abs().median())
    return tuple((0.0, u / scale) for u in (0.3, 1.0, 3.0, 30.0))


def _with_eps(module: nn.Module, kind: NormKind) -> list[NormKind]:
    return [kind] if named_eps(module) is not None else [replace(kind, eps=eps) for eps in _USUAL_EPS]


def _fits(kind: NormKind, module: nn.Module, x: Tensor, output: Tensor) -> bool:
    try:
        return excess(kind, module, x, output, at_most=_MOST_TOKENS) <= 1
    except (RuntimeError, TypeError):  # channels or statistics of other sizes than the form needs, or none
        return False


def _same_y(kind: NormKind, other: NormKind, module: nn.Module, x: Tensor) -> bool:
    if kind.axes(module, x.ndim) != other.axes(module, x.ndim) or (kind.groups is None) != (other.groups is None):
        return False
    rows = kind.rows(module, x)
    rows = rows.cpu() if rows.device.type == "mps" else rows  # which lacks float64
    y, its = (each.lines(module, rows, each.eps_of(module, x.dtype)).y(rows) for each in (kind, other))
    return bool(((y - its).abs() <= _SAME * (1 + y.abs())).all())


def _axes_of(module: nn.Module, x: Tensor, ancestor: NormKind | None) -> list[tuple[int, ...]]:
    """List the axes that may share a statistic, without repetitions; none of them numbers the samples."""
    places: dict[tuple[int, ...], tuple[int, ...]] = {}
    for axes in [*([ancestor.axes(module, x.ndim)] if ancestor else []), (-1,), (1,), (-2,)]:
        if all(-x.ndim <= axis < x.ndim for axis in axes):
            places.setdefault(tuple(axis % x.ndim for axis in axes), axes)
    return [axes for place, axes in places.items() if 0 not in place or x.ndim == 1]
