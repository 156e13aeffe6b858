"""The norm sites of a network, found in one forward pass: their order, number of calls, kinds and placements."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import ModelError, count
from normscope.inputs.batch import Batch
from normscope.inputs.loaded_model import LoadedModel
from normscope.inputs.wrappers import class_of
from normscope.norms.bound_inputs import unpacked
from normscope.norms.formulas import gain_and_shift
from normscope.norms.functional import CalledNorm
from normscope.norms.kinds import NormKind
from normscope.norms.recognition import is_norm
from normscope.norms.sites import NormSite, SkippedNorm, kind_of_site
from normscope.norms.traced_pass import NOT_ONE_TENSOR, TracedCall, TracedPass
from normscope.runtime.network import uncompiled
from normscope.runtime.spread import differing_inputs, is_sharded, whole

NOT_CALLED = "not called"
_DIVIDED = "ranks that share the network have different inputs of it: each has some of the heads, or other batches"
# Names in timm (q_norm), diffusers (norm_q, norm_added_k, q_rms_norm_t) and transformers (q_layernorm, qk_norm,
# q_layernorm.norms.0 of one head); a norm before the projection (pre_norm_q, q_a_layernorm) is none of them.
QUERY_OR_KEY = re.compile(
    r"(^|[._])(q|k|qk|query|key)_?((layer|rms|img)_?)?norm\d*(_t|_und_for_gen)?(\.norms\.\d+)?$"
    r"|(^|\.)norm\d*_?((added|ip)_)?(q|k|query|key)$"
    r"|(^|\.)\w*att\w*\.((q|k)_ln|ln_(q|k))$",
    re.IGNORECASE,
)


@dataclass
class NormReport:
    """Results of one traced forward pass.

    Attributes:
        sites: the norm sites in the order of their first calls.
        skipped: norms that cannot be observed, and why.
        kinds: the kind of each site's norm.
        shapes: shape of each site's input at its first call; empty if its only token is the whole input.
        overwriting: names of the sites that change their own input, so that a hook behind them does not see it.
        keeps_state: whether the pass changed a buffer.
        weight_norms: names of the sites whose input is computed from parameters alone: no token of theirs is padding.
        positions: the number of positions in the padding mask of a sample, for sites that have such a mask.
        norm_modules: paths of the norm modules, inside which nothing is a site.
        sequences: names of the norm functions that the forward of each other module calls, in order.
    """

    sites: list[NormSite]
    skipped: list[SkippedNorm]
    kinds: dict[str, NormKind] = field(repr=False)
    shapes: dict[str, torch.Size] = field(repr=False)
    overwriting: frozenset[str] = frozenset()
    keeps_state: bool = False
    weight_norms: frozenset[str] = frozenset()
    positions: dict[str, int] = field(default_factory=dict, repr=False)
    norm_modules: frozenset[str] = frozenset()
    sequences: Mapping[str, Collection[tuple[str, ...]]] = field(default_factory=dict, repr=False)


def find_norms(model: nn.Module | LoadedModel, batch: Batch | None = None) -> NormReport:
    """Run ``model`` once on ``batch`` and list its norms, and point-wise functions in place of norms, by first call.

    Args:
        model: what :func:`normscope.load` returned, or any module; its training flags and buffers, grad mode and the
            RNG state are restored.
        batch: one batch of its inputs, of which it gets a copy. One sample is enough. By default the first sample of a
            loaded model's inputs.

    Raises:
        UsageError: if a module comes without a batch.
        ModelError: if the model calls no norm that is known, or if it is TorchScript or from torch.export.

    >>> from normscope.inputs.batch import as_batches
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    >>> report = find_norms(model, next(as_batches([torch.zeros(2, 4)])))
    >>> [(site.name, site.kind, site.d) for site in report.sites]
    [('1', 'LayerNorm', 8)]
    """
    if batch is None and isinstance(model, LoadedModel):
        batch = model.inputs.first_sample()
    model, batches, *_ = unpacked(model, None if batch is None else [batch])
    batch = batch if isinstance(batch, Batch) else next(iter(batches))
    _refuse_what_hooks_cannot_enter(model)
    model = uncompiled(model)  # inside torch.compile: compiled code calls no hook of its parts
    traced = TracedPass.of(model, batch)
    weighing = traced.weighing
    called = [call for call in traced.calls.values() if call.is_site or call.name not in weighing]
    for name in differing_inputs(model, {call.name: call.input for call in called if call.is_site}):
        traced.calls[name].kind = _DIVIDED
    kinds = {call.name: call.kind for call in called if isinstance(call.kind, NormKind)}
    skipped = []
    for call in called:
        if call.name not in kinds:
            module: Any = call.module
            function = module.function if isinstance(module, CalledNorm) else type(module).__name__
            skipped.append(SkippedNorm(call.name, function, str(call.kind)))
    for name in dict.fromkeys([*traced.named, *traced.torn]):
        if name not in traced.calls.keys() | traced.within_norms | weighing:
            reason = traced.torn.get(name, NOT_ONE_TENSOR if name in traced.tensorless else NOT_CALLED)
            skipped.append(SkippedNorm(name, type(traced.suspects[name]).__name__, reason))
    if not kinds:
        raise ModelError(_no_sites(class_of(model).__name__, skipped, len(traced.weights_normed)))
    calls = [call for call in called if call.name in kinds]
    placed = _placements(calls, traced)
    sites = [_site(index, call, kinds[call.name], placed[call.name]) for index, call in enumerate(calls)]
    masks = {site.name: batch.valid_at(site.path) for site in sites}
    return NormReport(
        sites,
        skipped,
        kinds,
        {
            call.name: torch.Size() if isinstance(call.module, CalledNorm) and call.module.whole else call.input.shape
            for call in calls
        },
        frozenset(call.name for call in calls if call.overwrites),
        traced.keeps_state,
        frozenset(call.name for call in calls if call.on_weight),
        {name: mask.shape[1] for name, mask in masks.items() if mask is not None},
        frozenset((traced.named.keys() | kinds.keys()) - traced.with_sites),
        traced.sequences,
    )


def _refuse_what_hooks_cannot_enter(model: nn.Module | torch.export.ExportedProgram) -> None:
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    scripted = [getattr(child, "inlined_graph", "") for child in modules if isinstance(child, torch.jit.ScriptModule)]
    if any(re.search(r"aten::(\w*norm|rsqrt)\b", str(graph)) for graph in scripted):
        raise ModelError(
            "The model is TorchScript where it normalizes, which hooks cannot enter; load that part as a module."
        )
    # Graphs of torch.export call operators; those of torch.fx.symbolic_trace call modules.
    graphs = [graph for graph in modules if isinstance(graph, torch.fx.GraphModule)]
    graphs = [graph for graph in graphs if not any(map(is_norm, graph.modules()))]
    targets = [node.target for graph in graphs for node in graph.graph.nodes]
    operators = any(isinstance(target, torch._ops.OpOverload) and target.namespace == "aten" for target in targets)
    if isinstance(model, torch.export.ExportedProgram) or operators:
        raise ModelError(
            "The model is of torch.export, in whole or in part: its norms are calls of functions (torch.ops.aten), "
            "which hooks on modules do not see. Pass the module as it was before torch.export.export."
        )


def _site(index: int, call: TracedCall, kind: NormKind, placement: str | None) -> NormSite:
    x = whole(call.input)
    axes = (1,) if kind.over_positions else kind.axes(call.module, x.ndim)
    return NormSite(
        index=index,
        name=call.name,
        kind=kind.name,
        normalized_shape=kind.token_shape(call.module, x),
        channel_axis=axes[0] if len(axes) == 1 else axes,
        channels=kind.channels(call.module, x),
        eps=kind.eps_of(call.module, x.dtype),
        affine=any(parameter is not None for parameter in gain_and_shift(call.module)),
        placement=placement,
        calls=call.calls,
        tokens_per_sample=len(kind.rows(call.module, x)) * call.calls,
        centred=kind.centred,
        bounded=kind.bounded,
        grouped=kind.groups is not None,
        form=None if kind.form is None else kind.form.name,
        pointwise=call.pointwise,
        called_with="".join(call.arguments),
    )


def _placements(calls: Sequence[TracedCall], traced: TracedPass) -> dict[str, str | None]:
    """Identify the placement of each site by its path, from the order of its first call and the additions.

    It is ``pre-norm``, ``post-norm``, ``qk``, ``final`` or None, beside the residual stream. Sites whose paths differ
    only in the numbers of their blocks share a placement: nothing is added after the last block of a post-norm network.
    """
    last_added: dict[tuple[int, int] | None, float] = {}
    for number, (operands, in_place) in enumerate(traced.additions):
        for operand in filter(_identity, operands):
            # What was added to in place is, from then on, the sum; only what comes later takes it as it is now.
            overwritten = in_place and operand is operands[0]
            before = last_added.get(_identity(operand), -1)
            last_added[_identity(operand)] = max(before, number if overwritten else math.inf)
    attended = set(map(_identity, traced.queries_and_keys)) - {None}

    def placement_of(call: TracedCall) -> str | None:
        if QUERY_OR_KEY.search(call.name):
            return "qk"
        for tensor, placement in ((call.input, "pre-norm"), (call.output, "post-norm")):
            if last_added.get(_identity(tensor), -1) >= call.additions_before:
                return placement
        return "qk" if _identity(call.output) in attended else None

    by_call = {call.name: placement_of(call) for call in calls}
    by_kind = {kind_of_site(name): placement for name, placement in reversed(by_call.items()) if placement}
    by_name = {name: placement or by_kind.get(kind_of_site(name)) for name, placement in by_call.items()}
    repeated = Counter(map(kind_of_site, by_name))
    if any(by_name.values()):
        for name in reversed(by_name):
            if by_name[name] or repeated[kind_of_site(name)] > 1:
                break
            by_name[name] = "final"
    return by_name


def _identity(tensor: Tensor) -> tuple[int, int] | None:
    """Return the address and size of a tensor or shard; None for one that torch.vmap made, which has no address."""
    try:
        local: Any = tensor
        local = local.to_local() if is_sharded(tensor) else tensor
        return local.data_ptr(), local.numel()
    except RuntimeError:
        return None


def _no_sites(network: str, skipped: list[SkippedNorm], weights_normed: int) -> str:
    if not skipped:
        none = f"This {network} has no normalization of activations, so that there is nothing to observe or to replace."
        instead = f" It normalizes its weights instead, in {count(weights_normed, 'module')}."
        return none + (instead if weights_normed else "")
    seen = "; ".join(f"{norm.name} ({norm.kind}): {norm.reason}" for norm in skipped[:4])
    return f"The model calls no normalization layer that normscope knows. Skipped: {seen}."
