"""Exact rewrites of a network: LayerNorms become RMSNorms, and their weights and biases move into linear layers."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import DataError, ModelError
from normscope.inputs.batch import Batch
from normscope.inputs.loaded_model import LoadedModel, Outputs
from normscope.norms.bound_inputs import unpacked
from normscope.norms.formulas import channel_vectors, layer_norm, scale_and_shift
from normscope.norms.recognition import kind_at
from normscope.norms.sites import NormSite
from normscope.norms.trace import find_norms
from normscope.runtime.network import restoring, run, uncompiled
from normscope.runtime.spread import check_whole
from normscope.swaps.replace import Swap, model_tensor, outputs_at
from normscope.swaps.standalone import RMSNorm, make_room, tied_heads, untie
from normscope.tools.simplify.dataflow import BlockedError, DataFlow, Reader, Writer, along
from normscope.tools.simplify.reports import SimplifiedNorm, SimplifyReport
from normscope.tools.simplify.trials import Exact, Trial, trials

_BATCHES = 4  # on which the rewrites are proved
MOST_OF_NORM, MOST_OF_OUTPUT = 1e-12, 1e-9  # relative change in float64
# By how much rounding may change, in units of a dtype and of the network's own rounding, which is that of half
# precision at most.
_ROUNDINGS, _COARSEST = 32, 2**-8
_GAIN, _BOTH = "γ", "γ and β"


def simplify(model: nn.Module | LoadedModel, batches: Iterable[Any] | None = None) -> SimplifyReport:
    """Rewrite a network in place so that nothing but rounding changes: centre what norms read, and fold their weights.

    - *Centre*: a parameter that writes to LayerNorms alone is centred over channels. A LayerNorm that nothing else
      writes to becomes an RMSNorm (arXiv 2305.14858). Layer scales in between are multiplied into the parameter, and
      a head that shares an embedding's weight gets its own copy.
    - *Fold*: γ and β of a norm that linear layers alone read move into these. Where a layer has no bias, or pads with
      zeros, the norm keeps β/γ.

    A traced pass shows what reads and writes. Norms stay as they are where the data decide on the path, or where a
    module of their width, or of a part of it, was not called. The first four batches prove the result on a copy in
    float64: a norm whose output changes by more than 1e-12 (relative L2) stays, too. So does one that changes by more
    than 1e-9 on random inputs and masks of several lengths and numbers of samples. All of this is for eval mode:
    dropout between a centred parameter and its norm breaks the equality. So does a table of positions that the network
    computes anew for larger images.

    Args:
        model: the result of :func:`normscope.load`, or any module, which is changed in place.
        batches: inputs, as :func:`normscope.capture` takes them; by default those of the loaded model.

    Raises:
        DataError: if there is no batch.
        ModelError: if the output changes by more than 1e-9 in float64, or by far more than rounding in the network's
            dtype, or is not finite; or if it calls no norms, is spread over devices, returns what cannot be read, uses
            torch.cond, or raises. The network stays as it is, as after Ctrl-C.
        UsageError: if a module comes without batches.

    >>> network = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    >>> report = simplify(network, [torch.randn(16, 4)])
    >>> report.norms[0].exact, report.norms[0].folded, network[1]
    (True, 'γ and β', RMSNorm(8, eps=1e-05))
    """
    module, inputs, about, outputs = unpacked(model, batches)
    network = uncompiled(module)
    check_whole(network, "Simplification")
    if not (few := list(itertools.islice(inputs, _BATCHES))):
        raise DataError("There is no batch to prove the rewrites on.")
    found = find_norms(network, few[0].first_sample())
    reference, dtype = copy.deepcopy(network).cpu().double(), model_tensor(network).dtype
    for part in reference.modules():  # grouped_mm, which transformers calls for routed experts, takes no float64
        if hasattr(config := getattr(part, "config", None), "_experts_implementation"):
            config._experts_implementation = "eager"  # type: ignore[union-attr]
    heads = tied_heads(reference)
    untie(reference, heads)
    in_double = [batch.to(torch.device("cpu"), torch.float64) for batch in few]
    with Exact(dtype) as in_float64:
        flow = DataFlow(reference, [site for site in found.sites if site.replaceable], in_double[0].first_sample())
    plan = _Plan([_Norm(site, reference, flow, dtype) for site in found.sites], flow.scales)
    replaceable = [norm.site for norm in plan.norms if norm.norm.replaceable]
    with in_float64:
        inputs_tried = [("", in_double, MOST_OF_NORM), *trials(reference, in_double[0], outputs, replaceable)]
        rewritten, changed = plan.proved(reference, inputs_tried, outputs)
        truth = _outputs(reference, in_double, outputs)
    weights = {path: rewritten.get_parameter(f"{path}.weight") for path in (*heads, *heads.values())}
    untied = tuple(head for head, embedding in heads.items() if not torch.equal(weights[head], weights[embedding]))
    with _restored_unless_done(network) as original:
        untie(network, untied)
        plan.restructure(network)
        values = {**dict(rewritten.named_parameters()), **dict(rewritten.named_buffers())}
        for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
            tensor.data.copy_(values[name])
        own = _changes(original, network, (), few, outputs)[""]
        rounding = float((_outputs(original, few, outputs) - truth).norm() / truth.norm().clamp(min=1e-300))
        if not own <= max(MOST_OF_OUTPUT, _ROUNDINGS * (torch.finfo(dtype).eps + min(rounding, _COARSEST))):
            is_finite = math.isfinite(own) and math.isfinite(rounding)
            what = f" differs by {own:.1e}" if is_finite else ", or its own, is not finite"
            raise ModelError(
                f"The output of the rewritten {type(network).__name__}{what} in {dtype}. The network stays as it was; "
                "convert it to float32 first."
            )
        if untied and hasattr(network, "config"):
            network.config.tie_word_embeddings = False  # type: ignore[union-attr]
    norms = [SimplifiedNorm(n.site, n.kind, n.blocked, n.folded, n.unfolded, n.change) for n in plan.norms]
    norms += [SimplifiedNorm(each.name, each.kind, each.reason, "", each.reason) for each in found.skipped]
    return SimplifyReport(
        norms,
        changed,
        own,
        str(dtype).removeprefix("torch."),
        sum(len(batch.samples) for batch in few),
        untied,
        module.training,
        sum(isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0 for part in network.modules()),
        about,
    )


@contextlib.contextmanager
def _restored_unless_done(network: nn.Module) -> Iterator[nn.Module]:
    """Yield a copy of a network, and restore the network from it to the bit if the block raises."""
    original, tensors = copy.deepcopy(network), [*network.parameters(), *network.buffers()]
    parts = [
        (m, m._parameters.copy(), m._modules.copy(), m._non_persistent_buffers_set.copy()) for m in network.modules()
    ]
    try:
        yield original
    except BaseException:
        for module, parameters, children, temporary in parts:
            module._parameters, module._modules, module._non_persistent_buffers_set = parameters, children, temporary
        with torch.no_grad():
            for tensor, value in zip(tensors, [*original.parameters(), *original.buffers()], strict=True):
                tensor.copy_(value)
        raise


class _Norm:
    """A norm with its rewrites so far: the fields of :class:`SimplifiedNorm`, and what they are made of."""

    def __init__(self, norm: NormSite, network: nn.Module, flow: DataFlow, dtype: torch.dtype) -> None:
        """Find the rewrites that the data flow of a network in float64 and its own dtype allow."""
        self.norm, self.site, self.kind = norm, norm.name, norm.kind
        self.writers: frozenset[Writer] = frozenset()
        self.readers: Sequence[Reader] = ()
        self.blocked = self.folded = self.unfolded = ""
        self.change: float | None = None
        called = f"it is called with {norm.called_with}, which changes its output" if norm.called_with else ""
        kind = kind_at(network.get_submodule(self.site), norm) if norm.replaceable else called or "it is no norm module"
        if isinstance(kind, str):
            self.block(kind)
        elif kind.form is None or kind.activation or kind.affine is not scale_and_shift:
            self.block("it is no LayerNorm or RMSNorm with γ·y + β")
        else:
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
        return [part.detach().flatten().clone() for part in channel_vectors(network.get_submodule(self.site))]

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
        weight, *bias = channel_vectors(network.get_submodule(self.site))
        weight.fill_(1)
        for part in bias:
            left = torch.zeros_like(part) if self.folded == _BOTH else part / gain.view(part.shape)
            part.copy_(left.nan_to_num())  # 0/0, where γ and β are 0

    def unfolded_output(self, y: Tensor, network: nn.Module) -> Tensor:
        """Return a folded norm's output as it was with γ and β."""
        parts = [along(part, int(self.norm.channel_axis) % y.ndim, y.ndim) for part in self.vectors(network)]  # type: ignore[arg-type]
        return y if not self.folded else y * parts[0] + (parts[1] if self.folded == _BOTH else 0)

    def rms_norm(self, network: nn.Module) -> RMSNorm:
        """Return an RMSNorm with the weight and bias that folding has left to a LayerNorm."""
        parameters, like = channel_vectors(network.get_submodule(self.site)), model_tensor(network)
        if self.folded == _BOTH or (self.folded and len(parameters) == 1):
            parameters = []
        options = {"elementwise_affine": bool(parameters), "bias": len(parameters) > 1, "eps": self.norm.eps}
        module = RMSNorm(self.norm.normalized_shape, channel_axis=int(self.norm.channel_axis), **options)  # type: ignore[arg-type]
        module.to(like.device, like.dtype)
        with torch.no_grad():
            for part, value in zip(module.parameters(), parameters, strict=True):
                part.copy_(value.view(part.shape)).requires_grad_(value.requires_grad)
        return module


@dataclass
class _Plan:
    """Rewrites of all norms in the order of calls, and the writers behind each layer scale by its parameter's name."""

    norms: Sequence[_Norm]
    scales: Mapping[str, frozenset[Writer]]

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
        for scale, writers in self.scales.items():
            if writers & self.centred:
                for name, axis in writers:
                    tensors[name].mul_(along(tensors[scale], axis, tensors[name].ndim))
                tensors[scale].fill_(1)
        for name, axis in self.centred:
            tensors[name].sub_(tensors[name].mean(axis, keepdim=True))

    def restructure(self, network: nn.Module) -> None:
        """Put RMSNorms in, and let state dicts contain every centred buffer."""
        make_room(network, {name for name, _ in self.centred})
        Swap(network, {norm.site: norm.rms_norm(network) for norm in self.norms if not norm.blocked})

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

    def _block(self, changed: _Norm, change: str) -> None:
        """Leave a norm whose output changed as it is, or the last rewritten one before it."""
        reason = f"the output of {changed.site} {change}"
        until = self.norms[: self.norms.index(changed) + 1]
        if not (rewritten := [norm for norm in until if norm.folded or not norm.blocked]):
            raise ModelError(f"Nothing can be proved: {reason}, and nothing before it was rewritten.")
        last = rewritten[-1]
        for other in self.norms if not last.blocked else ():  # centring for them would change its input, too
            if other.writers & last.writers:
                other.blocked = other.blocked or reason
        last.block(reason)


@torch.no_grad()
def _outputs(network: nn.Module, batches: Sequence[Batch], outputs: Outputs) -> Tensor:
    """Return all outputs of a network in one vector, on the CPU and in float64."""
    with restoring(network):
        return torch.cat([outputs.read(run(network, batch), batch).cpu().double().flatten() for batch in batches])


def _changes(
    original: nn.Module, rewritten: nn.Module, norms: Sequence[_Norm], batches: Sequence[Batch], outputs: Outputs
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
