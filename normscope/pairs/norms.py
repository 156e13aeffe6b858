"""Which modules normalize: a table of classes, and what a user adds to it.

A hook sees a norm's output after its affine step, and dividing by γ is no way back: trained γ reach zero. The output
before it is recomputed from the input, in float32, by the row of the table that fits the module's class.
"""

from __future__ import annotations

import re

from torch import nn

from normscope.errors import UsageError
from normscope.pairs.formulas import Normalize, layer_norm, rms_norm, scale_and_shift
from normscope.pairs.kinds import Axes, NormKind, OfModule, token_norm, trailing_axes
from normscope.pairs.library_norms import NORMS, Row

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
    found = _nearest(module)
    return found if isinstance(found, NormKind) else None


def refusal(module: nn.Module) -> str | None:
    """Say why a module of a known class, or of one made from it, is no norm site; None where nothing is against it."""
    found = _nearest(module)
    return found if isinstance(found, str) else None


def is_norm(module: nn.Module) -> bool:
    """Say whether a module is a norm by the table or by its name, which has norm somewhere or rms or ln as a word.

    One that only holds a norm is none, nor is one with layers of its own, unless norm is what it is called: a
    RobertaPreLayerNormOutput is an output, an AdaGroupNorm a norm, a ConvMlpWithNorm an MLP. Nor is a convolution or a
    linear layer, which may normalize its weight.

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
