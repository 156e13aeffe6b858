"""What a benchmark puts in the norms' place; without fits, as start values do not change speed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import cast

import torch
from torch import nn

from normscope.errors import ModelError
from normscope.fits.curves.expressions import split_names
from normscope.pairs.norms.sites import NormSite
from normscope.swaps.kernels import choice
from normscope.swaps.pointwise import PointwiseFunction
from normscope.swaps.replace import replacements
from normscope.swaps.reports import FUSED, NATIVE, Passes, Way
from normscope.swaps.start import RMS_NORM

IDENTITY = "identity"


@dataclass(frozen=True)
class Variant:
    """One thing that takes the norms' places.

    Attributes:
        name: ``native`` for the norms themselves, ``rmsnorm``, ``identity``, or a curve as it was asked for.
        modules: what goes where, by module path; none for ``native``.
        note: which norms it cannot replace, and why.
    """

    name: str
    modules: dict[str, nn.Module]
    note: str = ""


def variants(model: nn.Module, sites: Sequence[NormSite], curves: str | Sequence[str]) -> list[Variant]:
    """Make the norms' replacements, on the norms' device and in their dtype: native, rmsnorm, identity, the curves.

    Args:
        model: the network; nothing is put in.
        sites: its norm sites.
        curves: names, or names separated by commas.

    Raises:
        UsageError: if there is no such curve, or if it is one that has to be fitted (``free``, ``best``).
    """
    asked = split_names(curves) if isinstance(curves, str) else curves
    names = dict.fromkeys((RMS_NORM, IDENTITY, *(name.strip().lower() for name in asked)))
    names.pop(NATIVE, None)
    return [Variant(NATIVE, {}), *(_variant(model, sites, name) for name in names)]


def compiled(module: nn.Module) -> nn.Module:
    """Compile a module for the one shape that it is timed with."""
    return cast(nn.Module, torch.compile(module, dynamic=False))  # typed as any callable, whatever it was made of


def fused(name: str, module: nn.Module, shape: Sequence[int], passes: Passes) -> dict[str, nn.Module]:
    """Return modules that do in one kernel what a replacement does, by what they are called; only ways that exist.

    The replacement itself, where :func:`has_kernel` says so; Liger's DyT (github.com/linkedin/Liger-Kernel) on CUDA,
    where it is installed.
    """
    return ({name: module} if has_kernel(module, shape, passes) else {}) | _ligers(name, module)


def has_kernel(module: nn.Module, shape: Sequence[int], passes: Passes, way: Way = "fused") -> bool:
    """Whether normscope's own kernels compute a module on its device and in its dtype, of an input of this shape.

    The CPU's loop does forward alone, and not under torch.compile.

    Raises:
        UsageError: if ``NORMSCOPE_KERNELS`` says nothing that there is, or asks for kernels that cannot run here.
    """
    if not isinstance(module, PointwiseFunction) or module.curve.function_name not in choice.CURVES:
        return False
    what = (module.curve.function_name, module.alpha.device, module.alpha.dtype)
    if choice.by_kernels(*what):
        return True
    return (way, passes) == ("fused", "forward") and choice.loop_for(*what, math.prod(shape)) is not None


@contextlib.contextmanager
def computed(way: Way) -> Iterator[None]:
    """Compute networks within the block as a way says.

    Point-wise functions by kernels where it is fused, else by plain torch; parts that were compiled before as they are
    where it is compiled, else by plain torch as well. In a compiled network, kernels are there only if asked for.
    """
    with contextlib.ExitStack() as choices:
        if way not in FUSED:
            choices.enter_context(choice.plain_torch())
        elif way == "compile + fused":
            choices.enter_context(choice.asking_for(choice.TRITON))
        if way in ("eager", "fused"):
            choices.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _ligers(name: str, module: nn.Module) -> dict[str, nn.Module]:
    if not (isinstance(module, PointwiseFunction) and module.curve.name == "tanh" and find_spec("liger_kernel")):
        return {}
    if not module.weight.is_cuda or module.channel_axis != -1 or module.weight.ndim != 1 or module.shift is not None:
        return {}
    layer: nn.Module = import_module("liger_kernel.transformers.dyt").LigerDyT(
        module.weight.numel(), beta=module.bias is not None, init_alpha=module.alpha.detach().item()
    )
    return {f"{name}, Liger": layer.to(module.weight.device, module.weight.dtype)}


def _variant(model: nn.Module, sites: Sequence[NormSite], name: str) -> Variant:
    modules: dict[str, nn.Module] = {}
    reasons: list[str] = []
    for site in sites:
        try:
            modules |= replacements(model, name, [site], init="paper")
        except ModelError as error:
            reasons.append(str(error))
    note = f"{len(reasons)} of {len(sites)} norms left as they are: {reasons[0]}" if reasons else ""
    return Variant(name, modules, note)


def require_gradients(module: nn.Module) -> list[torch.Tensor]:
    """Let every parameter require gradients, and return them."""
    return [parameter.requires_grad_() for parameter in module.parameters() if parameter.is_floating_point()]
