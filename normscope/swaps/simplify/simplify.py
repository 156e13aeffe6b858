"""Exact rewrites of a network: LayerNorms become RMSNorms, and their weights and biases move into linear layers."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import DataError, ModelError
from normscope.inputs.batch import Batch
from normscope.inputs.loaded_model import LoadedModel, Outputs
from normscope.pairs.norms.formulas import channel_vectors, scale_and_shift, unit_offset
from normscope.pairs.norms.recognition import kind_at
from normscope.pairs.norms.sites import NormSite
from normscope.pairs.norms.streams import unpacked
from normscope.pairs.norms.trace import find_norms
from normscope.runtime.network import check_whole, left_as_found, run, uncompiled
from normscope.swaps.replace import Swap, model_tensor, outputs_at, replacement
from normscope.swaps.reports import SimplifiedNorm, SimplifyReport
from normscope.swaps.simplify.dataflow import BlockedError, DataFlow, Reader
from normscope.swaps.standalone import tied_heads, untie
from normscope.swaps.start import RMS_NORM, starts

MOST_SAMPLES = 16  # on which the rewrites are proved
MOST_OF_NORM, MOST_OF_OUTPUT = 1e-12, 1e-9  # relative change in float64
_GAIN, _BOTH = "γ", "γ and β"

_Writer = tuple[str, int]  # name of a parameter or buffer, and its axis of channels


def simplify(model: nn.Module | LoadedModel, batches: Iterable[Any] | None = None) -> SimplifyReport:
    """Rewrite a network in place so that nothing but rounding changes: centre what norms read, and fold their weights.

    - *Centre*: where every reader of what a parameter writes is a LayerNorm, the parameter is centred over channels.
      A LayerNorm whose input only centred parameters write becomes an RMSNorm (arXiv 2305.14858). Layer scales between
      the two are multiplied into the parameters. A head that shares an embedding's weight gets its own copy.
    - *Fold*: where only linear layers read a norm, its γ and β are multiplied into them. Where a layer has no bias, or
      pads with zeros, the norm keeps β/γ.

    Rewrites are found from one traced pass and proved on at most 16 samples. A copy of the network in float64 is
    rewritten first. A norm whose output there changes by more than 1e-12 (relative L2) is left as it is.
    Dropout between a centred parameter and its norm breaks the equality while the network trains.

    Args:
        model: the result of :func:`normscope.load`, or any module, which is changed in place.
        batches: inputs, as :func:`normscope.capture` takes them; by default those of the loaded model.

    Raises:
        DataError: if there is no batch.
        ModelError: if the output in float64 changes by more than 1e-9, in which case the network stays as it is; or if
            it calls no norms, is spread over devices, or raises.
        UsageError: if a module comes without batches.

    >>> network = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    >>> simplify(network, [torch.randn(16, 4)])
    SimplifyReport: 1 of 1 norm exact, output changed by 1e-07 in float32
    >>> network[1]
    RMSNorm(8, eps=1e-05)
    """
    module, inputs, about, outputs = unpacked(model, batches)
    network = uncompiled(module)
    check_whole(network)
    few = list(_first_samples(inputs))
    if not few:
        raise DataError("There is no batch to prove the rewrites on.")
    found = find_norms(network, few[0].first_sample())
    reference = copy.deepcopy(network).cpu().double()
    heads = tied_heads(reference)
    untie(reference, heads)
    exact = [batch.to(torch.device("cpu"), torch.float64) for batch in few]
    plan = _Plan.of(reference, found.sites, exact[0].first_sample())
    rewritten, output = _proved(plan, reference, exact, outputs)
    original = copy.deepcopy(network)
    untied = tuple(head for head, embedding in heads.items() if _differ(rewritten, head, embedding))
    untie(network, untied)
    if untied and hasattr(network, "config"):
        network.config.tie_word_embeddings = False  # type: ignore[union-attr]
    plan.restructure(network)
    network.load_state_dict(rewritten.state_dict())
    norms = [norm.record for norm in plan.norms]
    norms += [SimplifiedNorm(norm.name, norm.kind, False, norm.reason, "", norm.reason, None) for norm in found.skipped]
    return SimplifyReport(
        norms,
        output,
        _changes(original, network, (), few, outputs)[1],
        str(model_tensor(network).dtype).removeprefix("torch."),
        sum(len(batch.samples) for batch in few),
        untied,
        module.training,
        sum(isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0 for part in network.modules()),
        about,
    )


@dataclass
class _Norm:
    """Rewrites of one norm: it becomes an RMSNorm unless it is blocked, and ``folded`` moves into the layers behind.

    Attributes:
        site: the norm.
        writers: parameters and buffers that write its input.
        blocked: reason why it stays as it is.
        readers: linear layers that read it.
        folded: ``γ``, ``γ and β`` or nothing.
        unfolded: reason for nothing.
        change: relative L2 of its output in float64.
    """

    site: NormSite
    writers: frozenset[_Writer] = frozenset()
    blocked: str = ""
    readers: Sequence[Reader] = ()
    folded: str = ""
    unfolded: str = ""
    change: float | None = None

    @property
    def record(self) -> SimplifiedNorm:
        site = self.site
        return SimplifiedNorm(
            site.name, site.kind, not self.blocked, self.blocked, self.folded, self.unfolded, self.change
        )

    def block(self, reason: str) -> None:
        """Leave the norm as it is."""
        self.blocked, self.unfolded = self.blocked or reason, self.unfolded or reason
        self.folded = ""

    def vectors(self, network: nn.Module) -> tuple[Tensor, Tensor, list[nn.Parameter]]:
        """Return γ and β, each ``(channels,)``, of the norm in a network, and its parameters."""
        module = network.get_submodule(self.site.name)
        parameters = channel_vectors(module)
        weight, *bias = (parameter.detach().flatten().clone() for parameter in parameters)
        return weight + _unit(module, self.site), bias[0] if bias else torch.zeros_like(weight), parameters


@dataclass
class _Plan:
    """Rewrites of all norms of a network, in the order of calls.

    Attributes:
        norms: the norm sites.
        scales: writers that each layer scale multiplies, by the name of its parameter.
    """

    norms: Sequence[_Norm]
    scales: Mapping[str, frozenset[_Writer]]

    @classmethod
    def of(cls, network: nn.Module, sites: Sequence[NormSite], sample: Batch) -> _Plan:
        """Find the rewrites that the data flow allows."""
        flow = DataFlow(network, [site for site in sites if site.replaceable], sample)
        norms = [_Norm(site) for site in sites]
        for norm in norms:
            site = norm.site
            try:
                _check_kind(network, site)
                norm.writers = frozenset((value.name, axis) for value, axis in flow.writers(site))
            except BlockedError as error:
                norm.blocked = str(error)
            try:
                norm.readers, norm.folded = _foldable(network, norm, flow)
            except BlockedError as error:
                norm.unfolded = str(error)
        named = {
            scale: frozenset((value.name, axis) for value, axis in writers) for scale, writers in flow.scales.items()
        }
        return cls(norms, named)

    @property
    def centred(self) -> set[_Writer]:
        """Parameters and buffers to be centred."""
        return {writer for norm in self.norms if not norm.blocked for writer in norm.writers}

    @torch.no_grad()
    def rewrite(self, network: nn.Module) -> None:
        """Change the parameters of a network in float64, in place."""
        tensors = {**dict(network.named_parameters()), **dict(network.named_buffers())}
        for norm in self.norms:
            if norm.folded:
                _fold(norm, network, tensors)
        for scale, writers in self.scales.items():
            if writers & self.centred:
                for name, axis in writers:
                    tensors[name].mul_(_along(tensors[scale].flatten(), axis, tensors[name].ndim))
                tensors[scale].fill_(1)
        for name, axis in self.centred:
            tensors[name].sub_(tensors[name].mean(axis, keepdim=True))

    def restructure(self, network: nn.Module) -> None:
        """Put RMSNorms in, and let state dicts contain every centred buffer."""
        for name, _ in self.centred:
            path, _, last = name.rpartition(".")
            network.get_submodule(path)._non_persistent_buffers_set.discard(last)
        modules = {norm.site.name: _rms_norm(network, norm) for norm in self.norms if not norm.blocked}
        if modules:
            Swap(network, modules)

    def block(self, wrong: _Norm) -> None:
        """Leave a norm whose output changed as it is, or the last rewritten one before it."""
        before = self.norms[: self.norms.index(wrong) + 1]
        culprit = next((norm for norm in reversed(before) if norm.folded or not norm.blocked), None)
        changed = f"the output of {wrong.site.name} changed by {wrong.change:.1e} in float64"
        if culprit is None:
            raise ModelError(f"Nothing can be proved: {changed}, and nothing before it was rewritten.")
        if not culprit.blocked:
            for norm in self.norms:
                if norm.writers & culprit.writers and not norm.blocked:
                    norm.blocked = changed
        culprit.block(changed)


def _proved(
    plan: _Plan, reference: nn.Module, batches: Sequence[Batch], outputs: Outputs
) -> tuple[nn.Module, float]:
    """Return a rewritten copy of the network in float64, and the change of its output; block what cannot be proved."""
    while True:
        rewritten = copy.deepcopy(reference)
        plan.rewrite(rewritten)
        plan.restructure(rewritten)
        changes, output = _changes(reference, rewritten, plan.norms, batches, outputs)
        for norm in plan.norms:
            norm.change = changes.get(norm.site.name)
        wrong = next((norm for norm in plan.norms if norm.change is not None and not norm.change <= MOST_OF_NORM), None)
        if wrong is None:
            break
        plan.block(wrong)
    if not output <= MOST_OF_OUTPUT:
        raise ModelError(
            f"The output of the rewritten {type(reference).__name__} differs by {output:.1e} in float64, more than "
            f"{MOST_OF_OUTPUT:g}, although no norm's output changed. The network stays as it was."
        )
    return rewritten, output


def _changes(
    original: nn.Module, rewritten: nn.Module, norms: Sequence[_Norm], batches: Sequence[Batch], outputs: Outputs
) -> tuple[dict[str, float], float]:
    """Return the relative L2 between two networks at each norm, with γ and β unfolded, and at the output."""
    squares: dict[str, tuple[float, float]] = {}

    def compare(name: str, expected: Tensor, value: Tensor) -> None:
        expected, value = expected.double(), value.double()
        error, length = squares.get(name, (0.0, 0.0))
        squares[name] = error + float((value - expected).square().sum()), length + float(expected.square().sum())

    by_name = {norm.site.name: norm for norm in norms if norm.site.replaceable}
    for batch in batches:
        (at_norms, expected), (at_rewritten, output) = (
            _outputs(network, batch, by_name, outputs) for network in (original, rewritten)
        )
        compare("", expected, output)
        for name, norm in by_name.items():
            for y, y_rewritten in zip(at_norms[name], at_rewritten[name], strict=True):
                if norm.folded:
                    gain, offset, _ = norm.vectors(original)
                    axis = int(norm.site.channel_axis) % y.ndim  # type: ignore[arg-type]
                    y_rewritten = y_rewritten * _along(gain, axis, y.ndim)
                    y_rewritten = y_rewritten + _along(offset, axis, y.ndim) if norm.folded == _BOTH else y_rewritten
                compare(name, y, y_rewritten)
    changes = {name: math.sqrt(error / length) if length else error for name, (error, length) in squares.items()}
    return changes, changes.pop("")


def _outputs(
    network: nn.Module, batch: Batch, paths: Iterable[str], outputs: Outputs
) -> tuple[dict[str, list[Tensor]], Tensor]:
    with left_as_found(network), outputs_at(network, paths) as at_norms:
        return at_norms, outputs.read(run(network, batch), batch)


def _first_samples(batches: Iterable[Batch]) -> Iterator[Batch]:
    left = MOST_SAMPLES
    for batch in batches:
        yield batch if len(batch.samples) <= left or not batch.divisible else batch.first(left)
        left -= len(batch.samples)
        if left <= 0:
            return


def _check_kind(network: nn.Module, site: NormSite) -> None:
    """Raise BlockedError for a norm whose place no RMSNorm can take."""
    if not site.replaceable:
        raise BlockedError("it is called as a function")
    if site.form != "layer_norm":
        raise BlockedError("it subtracts no mean" if not site.centred else f"a {site.kind} is no LayerNorm")
    try:
        replacement(network.get_submodule(site.name), starts(RMS_NORM, [site])[0], model_tensor(network))
    except ModelError as error:
        raise BlockedError(str(error)) from error


def _foldable(network: nn.Module, norm: _Norm, flow: DataFlow) -> tuple[list[Reader], str]:
    """Return the layers that γ and β can be folded into, and what can be folded; or raise BlockedError."""
    site = norm.site
    if not site.replaceable:
        raise BlockedError("it is called as a function")
    module = network.get_submodule(site.name)
    if not channel_vectors(module):
        raise BlockedError("it has no weight")
    kind = kind_at(module, site)
    if isinstance(kind, str) or kind.affine not in (scale_and_shift, unit_offset) or kind.activation is not None:
        raise BlockedError(f"a {site.kind} does more than γ·y + β with each channel")
    readers = flow.linear_readers(site)
    gain, offset, parameters = norm.vectors(network)
    biases = {name for name, _ in network.named_parameters()}
    if len(parameters) > 1 and all(_bias_of(reader) in biases and not reader.padded for reader in readers):
        return readers, _BOTH
    if not bool(((gain != 0) | (offset == 0)).all()):
        raise BlockedError("a layer that reads it has no bias for β, and β/γ is infinite where γ is 0")
    return readers, _GAIN


def _fold(norm: _Norm, network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Multiply γ into the linear layers behind a norm and add β to their biases."""
    gain, offset, (weight, *bias) = norm.vectors(network)
    for reader in norm.readers:
        matrix = tensors[reader.weight]
        if norm.folded == _BOTH:
            others = [axis for axis in range(matrix.ndim) if axis != 1 - reader.axis]  # all but that of the outputs
            tensors[_bias_of(reader)].add_((matrix * _along(offset, reader.axis, matrix.ndim)).sum(others))
        matrix.mul_(_along(gain, reader.axis, matrix.ndim))
    weight.fill_(1 - _unit(network.get_submodule(norm.site.name), norm.site))
    if bias:
        left = torch.where(offset == 0, offset, offset / gain)
        bias[0].copy_((left if norm.folded == _GAIN else torch.zeros_like(left)).view(bias[0].shape))


def _rms_norm(network: nn.Module, norm: _Norm) -> nn.Module:
    """Return an RMSNorm with the weight and bias that folding has left to a LayerNorm."""
    layer_norm = network.get_submodule(norm.site.name)
    module: Any = replacement(layer_norm, starts(RMS_NORM, [norm.site])[0], model_tensor(network))
    parameters = channel_vectors(layer_norm)
    if norm.folded == _BOTH or (norm.folded and len(parameters) == 1):
        module.weight = module.bias = None
    with torch.no_grad():
        for part, value in zip((module.weight, module.bias), parameters, strict=False):
            if part is not None:
                part.copy_(value.view(part.shape))  # in float64, if the network is
    return module  # type: ignore[no-any-return]


def _bias_of(reader: Reader) -> str:
    return reader.weight.removesuffix("weight") + "bias"


def _unit(module: nn.Module, site: NormSite) -> int:
    """Return what is added to a norm's weight before it multiplies: 1 for Gemma's, otherwise 0."""
    kind = kind_at(module, site)
    return int(not isinstance(kind, str) and kind.affine is unit_offset)


def _along(vector: Tensor, axis: int, ndim: int) -> Tensor:
    return vector.view([-1 if n == axis else 1 for n in range(ndim)])


def _differ(network: nn.Module, head: str, embedding: str) -> bool:
    return not torch.equal(*(network.get_parameter(f"{path}.weight") for path in (head, embedding)))
