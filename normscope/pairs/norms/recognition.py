"""Recognition of norms: a table of classes, additions by the user, and a trial of unknown modules."""

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
from normscope.runtime.network import copied

# Ours is float64 but for what it begins with: x, weights and running statistics as float32 holds them. It is the module
# that rounds: in float32 the mean and the variance (sums of d numbers, in some order), x − mean, a root, two products
# and a sum. The norms of the libraries come to 2 units in the last place of the largest term, whatever d is up to 10⁶;
# other machines sum and take roots otherwise: eight times that. In half precision the result, and in some modules what
# the weight multiplies, is rounded once more: half a unit each, and twice that. Modules that compute in half precision
# themselves round the variance, its root and each product too: twice that again, and x and the mean before one is taken
# from the other.
_FLOAT32_UNITS = 16
_HALF_UNITS = 2
_OWN_PRECISION_UNITS = 4
_WIDER = {torch.float16: "bfloat16 or float32"}  # holds what the dtype does not; otherwise only float64 does
# Activations are steeper than one in places (hardswish: 1.5), and what they give is rounded again.
_ACTIVATION = 2


@torch.no_grad()
def excess(kind: NormKind, module: nn.Module, x: Tensor, output: Tensor, *, at_most: int | None = None) -> float:
    """Return the largest difference between the module's output and ours, as a multiple of what rounding explains.

    ``at_most`` limits the number of tokens that are compared, evenly over all, unless tokens are groups.
    """
    if output.shape != x.shape:
        return math.inf
    rows, true = kind.rows(module, x), kind.rows(module, output)
    if at_most is not None and kind.groups is None:
        step = max(1, len(rows) // at_most)
        rows, true = rows[::step], true[::step]
    times = _times(kind, module, rows, true).nan_to_num(nan=math.inf)
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
    """Raise ModelError if a site's output differs from what ``kind`` makes of its input by more than rounding.

    ``batch_axis`` of ``x`` and ``output`` counts samples. ``valid``, bool ``(tokens,)`` with samples one after the
    other, marks the tokens that are no padding; None stands for all.
    """
    where = f"{name} ({kind.name}, input {tuple(x.shape)} {x.dtype})"
    furthest, too_large = math.inf, None
    if output.shape == x.shape:
        rows, true = (kind.rows(module, tensor, batch_axis) for tensor in (x, output))
        times = _times(kind, module, rows, true)
        differs = times > 1 if valid is None else (times > 1) & valid.to(times.device)
        if not bool(differs.any()):
            return
        furthest, too_large = float(times[differs].max()), overflow(kind, rows[differs.to(rows.device)])
    if too_large is not None:
        wider = _WIDER.get(_computed_in(kind, x.dtype), "float64")
        raise ModelError(
            f"Verification failed at {where}: {too_large}. The module's output is then not what its formula gives, and "
            "the y that is summed, in float64, not the network's own. Find out what makes the input so large, run the "
            f"network in {wider}, or leave the site out (layers)."
        )
    raise ModelError(
        f"Verification failed at {where}: the module's output differs from weight · y + bias by {furthest:.3g} times "
        "what rounding explains. Its axes, eps or affine step are not what the table of norms says; "
        "normscope.register_norm corrects them."
    )


def overflow(kind: NormKind, rows: Tensor) -> str | None:
    """A clause that says that all of these tokens are too large for the module that normalizes them.

    Args:
        kind: how the module normalizes.
        rows: the elements of its tokens, ``(tokens, d)``.

    Returns:
        None where there is no token, or one that is not too large.
    """
    dtype = _computed_in(kind, rows.dtype)
    most = torch.finfo(dtype).max
    # torch adds numbers in half precision up in float32.
    most_in_sum = torch.finfo(torch.promote_types(dtype, torch.float32)).max
    squares = (rows.cpu() if rows.device.type == "mps" else rows).double().square()
    single, summed = squares > most, squares.sum(1) > most_in_sum
    if not len(rows) or not bool((single.any(1) | summed).all()):
        return None
    what = "its square passes" if bool(single.any()) else f"with d = {rows.shape[1]} the sum of squares passes"
    name = str(dtype).removeprefix("torch.")
    return f"the largest |x| is {rows.abs().max():.3g}, and {what} what {name} holds ({most:.2g}), in which it computes"


def overflow_in(kind: NormKind, module: nn.Module, x: Tensor, output: Tensor) -> str | None:
    """A clause that says that all tokens with another output than ours are too large for the module, if they are."""
    rows = kind.rows(module, x)
    return overflow(kind, rows[(_times(kind, module, rows, kind.rows(module, output)) > 1).to(rows.device)])


def _computed_in(kind: NormKind, dtype: torch.dtype) -> torch.dtype:
    return dtype if kind.own_precision or dtype == torch.float64 else torch.float32


def _times(kind: NormKind, module: nn.Module, rows: Tensor, true: Tensor) -> Tensor:
    """Return the difference of a module's output from ours, as a multiple of rounding error.

    Args:
        kind: how the module is thought to normalize.
        module: the norm.
        rows: its input, ``(tokens, d)``.
        true: its true output, likewise.

    Returns:
        The largest of each token: float64 ``(tokens,)``. 0 of a token that holds a NaN or an infinity; NaN of one whose
        line is not finite, which is in no sum either.
    """
    dtypes, on = (rows.dtype, true.dtype), rows.device
    if on.type == "mps":  # which has no float64
        rows, true = rows.cpu(), true.cpu()
    lines = kind.lines(module, rows, kind.eps_of(module, dtypes[0]))
    y = lines.y(rows)
    shift, rstd = lines.of(rows.float().double(), slice(None))
    offset = (shift * rstd).abs()  # of the mean, in units of σ

    def made_by(step: OfModule, y: Tensor) -> Tensor:
        return step(module, y.to(on, torch.float32) if on.type == "mps" else y).to(y)

    ours, bias = made_by(kind.output, y), made_by(kind.affine, torch.zeros_like(y))
    weight = made_by(kind.affine, torch.ones_like(y)) - bias
    allowed = _allowed(kind, dtypes, y, offset, weight, bias)
    ratio = (ours - true.double()).abs() / allowed.clamp_min(torch.finfo(torch.float32).tiny)
    times = ratio.nan_to_num(nan=math.inf).amax(1) if ratio.numel() else ratio.sum(1)
    in_sums = torch.isfinite(shift * rstd).flatten()
    return times.where(in_sums, math.nan).where(torch.isfinite(rows.float()).all(1), 0.0)


def _allowed(
    kind: NormKind, dtypes: tuple[torch.dtype, torch.dtype], y: Tensor, offset: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    """Return what rounding explains of each element's difference: ``(tokens, d)``, as all but ``offset``."""
    unit = torch.finfo(torch.float32).eps
    # A mean far off zero costs digits of x − mean, and twice as many of a variance that is computed in one pass.
    allowed = _FLOAT32_UNITS * unit * (weight.abs() * (1 + y.abs() + offset) + bias.abs())
    allowed += unit * weight.abs() * y.abs() * offset.square()
    coarsest = max(torch.finfo(dtype).eps for dtype in dtypes)
    if coarsest > unit:
        allowed += _HALF_UNITS * coarsest * ((weight * y).abs() + bias.abs())
        allowed += torch.finfo(dtypes[1]).smallest_normal * coarsest  # below which float16 has no digits left
        if kind.own_precision:
            allowed += _OWN_PRECISION_UNITS * coarsest * weight.abs() * (y.abs() + offset)
    return allowed if kind.activation is None else _ACTIVATION * allowed


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
    """Return a module's output for an input."""

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
