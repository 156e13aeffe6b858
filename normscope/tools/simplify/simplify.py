"""Exact rewrites of a network: LayerNorms become RMSNorms, and their weights and biases move into linear layers."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import DataError, ModelError
from normscope.inputs.batch import Batch
from normscope.inputs.loaded_model import LoadedModel, Outputs
from normscope.inputs.wrappers import submodule, unwrapped
from normscope.norms.bound_inputs import unpacked
from normscope.norms.formulas import Form, channel_vectors, layer_norm, rms_norm, scale_and_shift
from normscope.norms.recognition import kind_at
from normscope.norms.sites import NormSite
from normscope.norms.trace import find_norms
from normscope.runtime.network import restoring, run
from normscope.runtime.spread import check_whole
from normscope.swaps.replace import Swap, model_tensor, outputs_at
from normscope.swaps.standalone import Removed, RMSNorm, centre, make_room, tied_heads, untie
from normscope.tools.simplify.dataflow import BlockedError, DataFlow, Entry, Reader, Writer, along
from normscope.tools.simplify.reports import SimplifiedNorm, SimplifyReport
from normscope.tools.simplify.trials import Exact, Trial, trials

_BATCHES = 4  # on which the rewrites are proved
MOST_OF_NORM, MOST_OF_OUTPUT = 1e-12, 1e-9  # relative change in float64
MOST_OF_EPS = 1e-5  # change of the output by eps, without a norm whose output is normalized again
# By how much rounding may change, in units of a dtype and of the network's own rounding, which is that of half
# precision at most.
_ROUNDINGS, _COARSEST = 32, 2**-8
_GAIN, _BOTH = "γ", "γ and β"


def simplify(model: nn.Module | LoadedModel, batches: Iterable[Any] | None = None) -> SimplifyReport:
    """Rewrite a network in place so that nothing but rounding changes: centre what norms read, and fold their weights.

    - *Centre*: parameters that write to LayerNorms alone are centred over channels, and the LayerNorms become RMSNorms
      (arXiv 2305.14858). If something nonlinear starts a stream, a forward pre-hook subtracts one mean where the stream
      enters its blocks, and the writers behind are centred. Layer scales are multiplied into the parameters, and a head
      that shares a changed embedding's weight gets its own copy.
    - *Fold*: γ and β of a norm that linear layers alone read move into these. Where a layer has no bias, or pads with
      zeros, the norm keeps β/γ.
    - *Remove*: a norm without γ and β that reaches norms alone, through linear layers without bias, is left out (arXiv
      2407.09577) if the eps of those then changes the output by at most 1e-5. float16 keeps it, lest a layer overflows.

    A traced pass shows what reads and writes. Norms stay where the data decide on the path, or where a module of their
    width, or of a part of it, was not called. A copy in float64 proves the rest: on the first four batches, a norm's
    output changes by at most 1e-12 (relative L2), and on random inputs and masks of several lengths by at most 1e-9.
    All of this is for eval mode, as dropout between a centred parameter and its norm breaks the equality; and for
    images of one size, if the network computes a table of positions anew for others.

    Args:
        model: the result of :func:`normscope.load`, or any module, which is changed in place.
        batches: inputs, as :func:`normscope.capture` takes them; by default those of the loaded model.

    Raises:
        DataError: if there is no batch.
        ModelError: if the output changes by more than 1e-9 in float64, or by far more than rounding in the network's
            dtype, or is not finite; or if it calls no norms, is spread over devices, returns what cannot be read, uses
            torch.cond, or raises. The network stays as it is, as after Ctrl-C during the proofs.
        UsageError: if a module comes without batches.

    >>> network = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    >>> report = simplify(network, [torch.randn(16, 4)])
    >>> report.norms[0].exact, report.norms[0].folded, network[1]
    (True, 'γ and β', RMSNorm(8, eps=1e-05))
    """
    module, inputs, about, outputs = unpacked(model, batches)
    check_whole(module, "Simplification")
    network = unwrapped(module)
    if not (few := list(itertools.islice(inputs, _BATCHES))):
        raise DataError("There is no batch to prove the rewrites on.")
    traced = find_norms(network, few[0].first_sample())
    reference, dtype = copy.deepcopy(network).cpu().double(), model_tensor(network).dtype
    for inner in reference.modules():  # grouped_mm, which transformers calls for routed experts, takes no float64
        if hasattr(config := getattr(inner, "config", None), "_experts_implementation"):
            config._experts_implementation = "eager"  # type: ignore[union-attr]
    heads = tied_heads(reference)
    untie(reference, heads)
    in_double = [batch.to(torch.device("cpu"), torch.float64) for batch in few]
    with Exact(dtype) as in_float64:
        flow = DataFlow(reference, [site for site in traced.sites if site.replaceable], in_double[0].first_sample())
    plan = Plan(reference, traced.sites, flow, dtype)
    replaceable = [norm.site for norm in plan.norms if norm.norm.replaceable]
    with in_float64:
        inputs_tried = [("", in_double, MOST_OF_NORM), *trials(reference, in_double[0], outputs, replaceable)]
        rewritten, changed = plan.proved(reference, inputs_tried, outputs)
        if dtype != torch.float16:  # in which the outputs of layers behind no norm may overflow
            plan.remove_repeated(rewritten, inputs_tried, outputs)
        truth = _outputs(reference, in_double, outputs)
    weights = {path: rewritten.get_parameter(f"{path}.weight") for path in (*heads, *heads.values())}
    untied = tuple(head for head, embedding in heads.items() if not torch.equal(weights[head], weights[embedding]))
    candidate = copy.deepcopy(network)
    plan.apply(candidate, rewritten, untied)
    unchanged = _outputs(network, few, outputs)
    in_dtype, rounding = _relative(_outputs(candidate, few, outputs), unchanged), _relative(unchanged, truth)
    most = max(MOST_OF_OUTPUT, _ROUNDINGS * (torch.finfo(dtype).eps + min(rounding, _COARSEST)))
    if not in_dtype <= most + sum(norm.removed or 0 for norm in plan.norms):
        is_finite = math.isfinite(in_dtype) and math.isfinite(rounding)
        differs = f" differs by {in_dtype:.1e}" if is_finite else ", or its own, is not finite"
        raise ModelError(
            f"The output of the rewritten {type(network).__name__}{differs} in {dtype}. The network stays as it was; "
            "convert it to float32 first."
        )
    del candidate  # whose memory the network may need
    plan.apply(network, rewritten, untied)
    norms = [SimplifiedNorm(n.site, n.kind, n.blocked, n.folded, n.unfolded, n.change, n.removed) for n in plan.norms]
    norms += [SimplifiedNorm(norm.name, norm.kind, norm.reason, "", norm.reason) for norm in traced.skipped]
    return SimplifyReport(
        norms,
        changed,
        in_dtype,
        str(dtype).removeprefix("torch."),
        sum(len(batch.samples) for batch in few),
        tuple(plan.subtractions),
        untied,
        sum(isinstance(inner, nn.modules.dropout._DropoutNd) and inner.p > 0 for inner in network.modules()),
        about,
    )


class PlannedNorm:
    """A norm with its rewrites so far: the fields of :class:`SimplifiedNorm`, and what they are made of."""

    def __init__(self, norm: NormSite, network: nn.Module, flow: DataFlow, dtype: torch.dtype) -> None:
        """Find the rewrites that the data flow of a network in float64 and its own dtype allow."""
        self.norm, self.site, self.kind = norm, norm.name, norm.kind
        self.writers: frozenset[Writer] = frozenset()
        self.entry: Entry | None = None  # where its stream is centred, if parameters alone do not write that
        self.readers: Sequence[Reader] = ()
        self.blocked = self.folded = self.unfolded = ""
        self.change: float | None = None
        self.removed: float | None = None
        self.form: Form | None = None  # of a norm that can be rewritten
        called = f"it is called with {norm.called_with}, which changes its output" if norm.called_with else ""
        kind = (
            kind_at(submodule(network, self.norm.path), norm) if norm.replaceable else called or "it is no norm module"
        )
        if isinstance(kind, str):
            self.block(kind)
        elif kind.form is None or kind.activation or kind.affine is not scale_and_shift:
            self.block("it is no LayerNorm or RMSNorm with γ·y + β")
        else:
            self.form = kind.form
            try:
                if kind.form is not layer_norm:
                    centred = "it divides by another σ than an RMSNorm does"
                    raise BlockedError(centred if kind.form.centred else "it subtracts no mean")
                self.writers = flow.writers(norm)
            except BlockedError as error:
                self.blocked = str(error)
            try:
                self.readers, self.folded = self._foldable(network, flow, dtype)
            except BlockedError as error:
                self.unfolded = str(error)

    def block(self, reason: str) -> None:
        """Leave the norm as it is."""
        self.blocked, self.folded, self.unfolded = self.blocked or reason, "", self.unfolded or reason

    def vectors(self, network: nn.Module) -> list[Tensor]:
        """Return γ and β in a network, each ``(channels,)``, as far as the norm has them."""
        return [vector.detach().flatten().clone() for vector in channel_vectors(submodule(network, self.norm.path))]

    def _foldable(self, network: nn.Module, flow: DataFlow, dtype: torch.dtype) -> tuple[list[Reader], str]:
        if not (vectors := self.vectors(network)):
            raise BlockedError("it has no weight per channel")
        gain, *offset = vectors
        readers, parameters = flow.linear_readers(self.norm), dict(network.named_parameters())
        both = bool(offset) and all(shift and _bias_of(weight) in parameters for weight, _, shift in readers)
        kept = torch.zeros_like(gain) if both or not offset else offset[0] / gain
        kept = kept.where(kept == kept, 0)  # 0/0, where γ and β are 0
        if not kept.isfinite().all():
            raise BlockedError("a layer that reads it has no bias for β, and β/γ is infinite where γ is 0")
        for name, axis, _ in readers:
            folded = parameters[name] * along(gain, axis, parameters[name].ndim)
            if not (_fits(kept, dtype) and _fits(folded, dtype, along(kept.abs().clamp(min=1), axis, folded.ndim))):
                raise BlockedError(f"the product of γ and {name}, or β/γ, does not fit into {dtype}")
        return readers, _BOTH if both else _GAIN

    def fold(self, network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """Multiply γ into the linear layers behind the norm, and add β to their biases."""
        gain, *offset = self.vectors(network)
        for name, axis, _ in self.readers:
            matrix = tensors[name]
            if self.folded == _BOTH:
                added = matrix * along(offset[0], axis, matrix.ndim)
                tensors[_bias_of(name)].add_(added.sum([n for n in range(matrix.ndim) if n != 1 - axis]))
            matrix.mul_(along(gain, axis, matrix.ndim))
        weight, *bias = channel_vectors(submodule(network, self.norm.path))
        weight.fill_(1)
        for vector in bias:
            left = torch.zeros_like(vector) if self.folded == _BOTH else vector / gain.view(vector.shape)
            vector.copy_(left.nan_to_num())  # 0/0, where γ and β are 0

    def unfolded_output(self, y: Tensor, network: nn.Module) -> Tensor:
        """Return a folded norm's output as it was with γ and β."""
        if not self.folded:
            return y
        axis = int(self.norm.channel_axis) % y.ndim  # type: ignore[arg-type]
        gain, *offset = (along(vector, axis, y.ndim) for vector in self.vectors(network))
        return y * gain + (offset[0] if self.folded == _BOTH else 0)

    def nothing(self) -> Removed:
        """Return the module in place of a norm that is removed."""
        return Removed(self.norm.normalized_shape, int(self.norm.channel_axis))  # type: ignore[arg-type]

    def rms_norm(self, network: nn.Module) -> RMSNorm:
        """Return an RMSNorm with the weight and bias that folding has left to a LayerNorm."""
        parameters, like = channel_vectors(submodule(network, self.norm.path)), model_tensor(network)
        if self.folded == _BOTH or (self.folded and len(parameters) == 1):
            parameters = []
        options = {"elementwise_affine": bool(parameters), "bias": len(parameters) > 1, "eps": self.norm.eps}
        module = RMSNorm(self.norm.normalized_shape, channel_axis=int(self.norm.channel_axis), **options)  # type: ignore[arg-type]
        module.to(like.device, like.dtype)
        with torch.no_grad():
            for parameter, value in zip(module.parameters(), parameters, strict=True):
                parameter.copy_(value.view(parameter.shape)).requires_grad_(value.requires_grad)
        return module


class Plan:
    """Rewrites of all norms in the order of calls, which the data flow allows until something else is proved."""

    def __init__(self, network: nn.Module, sites: Iterable[NormSite], flow: DataFlow, dtype: torch.dtype) -> None:
        """Subtract one mean where that makes several norms exact that otherwise are not."""
        self.norms, self.flow = [PlannedNorm(site, network, flow, dtype) for site in sites], flow
        blocked = {norm.site: norm for norm in self.norms if norm.blocked and norm.form is layer_norm}
        for entry, writers in flow.entries(blocked):
            for name, of_norm in writers.items():
                blocked[name].entry, blocked[name].writers, blocked[name].blocked = entry, of_norm, ""

    @property
    def subtractions(self) -> dict[str, int]:
        """Axes of the channels in streams to be centred, by the paths of the modules that these enter."""
        return {norm.entry.module: norm.entry.axis for norm in self.norms if norm.entry and not norm.blocked}

    @property
    def centred(self) -> set[Writer]:
        """Parameters and buffers to be centred."""
        return {writer for norm in self.norms if not norm.blocked for writer in norm.writers}

    @torch.no_grad()
    def rewrite(self, network: nn.Module) -> None:
        """Change the parameters of a network in float64, in place."""
        tensors = {**dict(network.named_parameters()), **dict(network.named_buffers())}
        for norm in self.norms:
            if norm.folded:
                norm.fold(network, tensors)
        for scale, writers in self.flow.scales.items():
            if writers & self.centred:
                for name, axis in writers:
                    tensors[name].mul_(along(tensors[scale], axis, tensors[name].ndim))
                tensors[scale].fill_(1)
        for name, axis in self.centred:
            tensors[name].sub_(tensors[name].mean(axis, keepdim=True))

    def restructure(self, network: nn.Module) -> None:
        """Put RMSNorms and subtractions in, and let state dicts contain every centred buffer."""
        make_room(network, {name for name, _ in self.centred})
        modules = {norm.site: norm.rms_norm(network) for norm in self.norms if not norm.blocked}
        Swap(network, {**modules, **{norm.site: norm.nothing() for norm in self.norms if norm.removed is not None}})
        centre(network, self.subtractions)

    def apply(self, network: nn.Module, rewritten: nn.Module, untied: Collection[str]) -> None:
        """Rewrite a network in its own dtype, by its rewritten copy in float64."""
        untie(network, untied)
        self.restructure(network)
        values = {**dict(rewritten.named_parameters()), **dict(rewritten.named_buffers())}
        for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
            tensor.data.copy_(values[name])
        if untied and hasattr(network, "config"):
            network.config.tie_word_embeddings = False  # type: ignore[union-attr]

    def proved(self, reference: nn.Module, trials: Sequence[Trial], outputs: Outputs) -> tuple[nn.Module, float]:
        """Return a rewritten copy of a network in float64 and the change of its output; block what cannot be proved."""
        while True:
            rewritten = copy.deepcopy(reference)
            self.rewrite(rewritten)
            self.restructure(rewritten)
            for where, batches, most in trials:
                changes = _changes(reference, rewritten, self.norms, batches, outputs)
                if not where:
                    given = changes
                changed = [norm for norm in self.norms if norm.site in changes and not changes[norm.site] <= most]
                if changed or not changes[""] <= MOST_OF_OUTPUT:
                    break
            if not changed:
                break
            change = changes[changed[0].site]
            words = "is not finite" if math.isnan(change) else f"changed by {change:.1e}"
            self._block(changed[0], f"{words} in float64{where}")
        if not changes[""] <= MOST_OF_OUTPUT:
            raise ModelError(
                f"The output of the rewritten {type(reference).__name__} differs by {changes['']:.1e} in float64, more "
                f"than {MOST_OF_OUTPUT:g}{where}, although no norm's output changed. The network stays as it was."
            )
        for norm in self.norms:
            norm.change = given.get(norm.site)
        return rewritten, given[""]

    def remove_repeated(self, rewritten: nn.Module, trials: Sequence[Trial], outputs: Outputs) -> None:
        """Remove norms from a rewritten network whose output is normalized again, unless the eps of that matters."""
        before: list[Tensor] = []
        for norm in self.norms:
            if not (norm.form is rms_norm or (norm.form is layer_norm and not norm.blocked)):
                continue
            with contextlib.suppress(BlockedError):
                pairs = zip(norm.vectors(rewritten), (1, 0), strict=False)  # γ and β, and what changes nothing
                affine = any(bool((vector != neutral).any()) for vector, neutral in pairs)
                if affine or not self.flow.is_normalized_again(norm.norm):
                    continue
                before = before or [_outputs(rewritten, batches, outputs) for _, batches, _ in trials]
                swap = Swap(rewritten, {norm.site: norm.nothing()})
                after = [_outputs(rewritten, batches, outputs) for _, batches, _ in trials]
                changes = list(map(_relative, after, before))
                if all(change <= MOST_OF_EPS for change in changes):
                    norm.removed, before = changes[0], after
                else:
                    swap.undo()

    def _block(self, changed: PlannedNorm, change: str) -> None:
        """Leave a norm whose output changed as it is, or the last rewritten one before it."""
        reason = f"the output of {changed.site} {change}"
        until = self.norms[: self.norms.index(changed) + 1]
        if not (rewritten := [norm for norm in until if norm.folded or not norm.blocked]):
            raise ModelError(f"Nothing can be proved: {reason}, and nothing before it was rewritten.")
        last = rewritten[-1]
        for norm in self.norms if not last.blocked else ():  # centring for them would change its input, too
            if norm.writers & last.writers or (norm.entry and norm.entry is last.entry):
                norm.blocked = norm.blocked or reason
        last.block(reason)


@torch.no_grad()
def _outputs(network: nn.Module, batches: Sequence[Batch], outputs: Outputs) -> Tensor:
    """Return all outputs of a network in one vector, on the CPU and in float64."""
    with restoring(network):
        return torch.cat([outputs.read(run(network, batch), batch).cpu().double().flatten() for batch in batches])


def _relative(y: Tensor, truth: Tensor) -> float:
    return float((y - truth).norm() / truth.norm().clamp(min=1e-300))


def _changes(
    original: nn.Module, rewritten: nn.Module, norms: Sequence[PlannedNorm], batches: Sequence[Batch], outputs: Outputs
) -> dict[str, float]:
    """Return the relative L2 between two networks at each norm, by its path, and at the output, by an empty path."""
    squares: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    by_path = {norm.site: norm for norm in norms if norm.norm.replaceable}
    for batch in batches:
        pairs = []
        for network in (original, rewritten):
            with restoring(network), outputs_at(network, by_path) as at_norms:
                pairs.append({**at_norms, "": [outputs.read(run(network, batch), batch)]})
        for path, expected in pairs[0].items():
            for y, again in zip(expected, pairs[1][path], strict=True):
                again = by_path[path].unfolded_output(again, original) if path else again
                squares[path][0] += float((again.double() - y.double()).square().sum())
                squares[path][1] += float(y.double().square().sum())
    return {path: math.sqrt(error / (length or 1)) for path, (error, length) in squares.items()}


def _fits(values: Tensor, dtype: torch.dtype, scale: Tensor | float = 1.0) -> bool:
    """True if a dtype rounds values, weighted by a scale, by no more than its resolution."""
    error = (values.to(dtype).to(values) - values) * scale
    return bool(error.norm() <= torch.finfo(dtype).eps * (values * scale).norm())


def _bias_of(weight: str) -> str:
    return weight.removesuffix("weight") + "bias"
