"""What is trained of a network: its parameters, and of point-wise functions slope and log α in their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from normscope.swaps.pointwise import PointwiseFunction

_LEAST_ALPHA = 1e-6  # in place of an α of nought, through which nothing could be learned


class TrainedParameters:
    """Parameters of a network as training moves them: weight · f(αx + s) + bias as (v/α) · f(α(x + c)) + bias.

    Where a norm is nearly a straight line, weight and α matter by their product alone: trained as they are, α falls
    and the weight grows, to 10⁵, until one step of α or s destroys the network. The slope v = weight · α, log α and
    c = s/α, a shift of x itself, stay moderate.

    Args:
        network: whose point-wise functions have a weight for each channel.
        names: of the parameters that are trained; of a function all of them together.

    Attributes:
        tensors: what an optimizer moves, by parameter name: v under the weight's, log α under α's, counted from what it
            was, and c under the shift's; everything else is the parameter itself.

    >>> function = PointwiseFunction("tanh", 2, alpha=0.5)
    >>> trained = TrainedParameters(function, ["alpha", "weight", "bias"])
    >>> trained.tensors["weight"], trained.tensors["alpha"]
    (tensor([0.5000, 0.5000]), tensor([0.]))
    >>> trained.tensors["alpha"] += 1
    >>> trained.put()
    >>> [round(float(parameter.detach().max()), 3) for parameter in (function.alpha, function.weight)]
    [1.359, 0.368]
    """

    def __init__(self, network: nn.Module, names: Sequence[str]) -> None:
        of_network = dict(network.named_parameters())
        self.parameters: Mapping[str, nn.Parameter] = {name: of_network[name] for name in names}
        self.tensors: dict[str, Tensor] = dict(self.parameters)
        self._functions: list[_Function] = []
        for path, module in network.named_modules():
            prefix = f"{path}." if path else ""
            if isinstance(module, PointwiseFunction) and f"{prefix}alpha" in self.parameters:
                with torch.no_grad():
                    module.alpha[module.alpha == 0] = _LEAST_ALPHA
                function = _Function(prefix, module.alpha.detach().clone())
                self._functions.append(function)
                self.tensors |= function.tensors(self.parameters)

    @torch.no_grad()
    def put(self) -> None:
        """Give the network the values of the tensors."""
        for function in self._functions:
            for name, value in function.values(self.tensors).items():
                self.parameters[name].copy_(value)

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor]) -> None:
        """Give the tensors, and with them the network, other values."""
        for name, value in values.items():
            self.tensors[name].copy_(value)
        self.put()

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Give the tensors the gradients that the network's parameters have."""
        for function in self._functions:
            for name, gradient in function.gradients(self.parameters).items():
                self.tensors[name].grad = gradient

    def forget_gradients(self) -> None:
        """Leave no gradient, neither in the network nor in the tensors."""
        for tensor in (*self.parameters.values(), *self.tensors.values()):
            tensor.grad = None


class _Function:
    """One point-wise function: from its parameters to what is trained in their place, and back."""

    def __init__(self, prefix: str, begun: Tensor) -> None:
        self._weight, self._alpha, self._shift = (f"{prefix}{name}" for name in ("weight", "alpha", "shift"))
        self._begun = begun  # α, whose sign stays

    def tensors(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return v, log α and c."""
        trained = {
            self._weight: parameters[self._weight].detach() * self._begun,
            self._alpha: torch.zeros_like(self._begun),
        }
        if self._has_shift(parameters):
            trained[self._shift] = parameters[self._shift].detach() / self._begun
        return trained

    def values(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return weight, α and s."""
        alpha = self._begun * tensors[self._alpha].exp()
        found = {self._weight: tensors[self._weight] / alpha, self._alpha: alpha}
        if self._has_shift(tensors):
            found[self._shift] = tensors[self._shift] * alpha
        return found

    def gradients(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Return the gradients of v, log α and c, from those of weight, α and s."""
        weight, alpha = parameters[self._weight], parameters[self._alpha]
        if weight.grad is None or alpha.grad is None:
            return {}
        # As log α grows, so does s = αc; the weight, v/α, falls.
        of_log = alpha * alpha.grad - (weight * weight.grad).sum_to_size(alpha.shape)
        found = {self._weight: weight.grad / alpha}
        if self._has_shift(parameters):
            shift = parameters[self._shift]
            of_shift = torch.zeros_like(shift) if shift.grad is None else shift.grad
            found[self._shift] = of_shift * alpha
            of_log = of_log + shift * of_shift
        return {**found, self._alpha: of_log}

    def _has_shift(self, tensors: Mapping[str, Tensor]) -> bool:
        # One shift for the αs of all channels stays as it is.
        return self._shift in tensors and tensors[self._shift].shape == tensors[self._alpha].shape
