"""Linear layers in closed form, by ridge regression towards their weights, and point-wise functions by least squares.

With inputs H, ``(tokens, features)``, and targets T, ``(tokens, channels)``, the weights W that minimize
‖HWᵀ + b − T‖² + λ‖W − W₀‖² follow from the sums HᵀH and HᵀT, which batches add to. Each group of a grouped convolution
has features, channels and an HᵀH of its own; λ is the same for all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normscope.swaps.pointwise import PointwiseFunction

PENALTIES = (1e-5, 0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)  # λ / mean square of a centred feature
_FIRST_TRIED = 0.1
_LARGER = 10.0  # factor of a λ that rounding makes too small
_CHANNELS = 128  # of a layer, for the choice of λ
_NONE = torch.zeros(0)  # sums before the first token
BLOCK = 4096  # tokens whose products are summed in float32, before they are added in float64
_SEARCH_STEPS = 20
_LEAST_REACH = 0.01  # of α·max|x|, where tanh is linear to 3·10⁻⁵
_LEAST_VARIANCE = 1e-10  # of f in a channel, as a share of its mean square: with less its slope is undetermined


@dataclass
class LayerSums:
    """Sums over tokens of a layer's inputs H and of one or several targets T: float64, on the CPU.

    Attributes:
        count: number of tokens.
        features: ΣH: ``(groups, features)``.
        gram: HᵀH: ``(groups, features, features)``.
        targets: ΣT: ``(targets, channels)``, group by group.
        cross: HᵀT: ``(targets, groups, features, channels of a group)``.
        products: ΣTᵢTⱼ: ``(targets, targets, channels)``.

    >>> sums = LayerSums()
    >>> sums.add(torch.tensor([[1.0], [2.0]]), [torch.tensor([[3.0], [5.0]])])
    >>> sums.gram.item(), sums.cross.item()
    (5.0, 13.0)
    """

    count: int = 0
    features: Tensor = _NONE
    gram: Tensor = _NONE
    targets: Tensor = _NONE
    cross: Tensor = _NONE
    products: Tensor = _NONE

    def add(self, inputs: Tensor, targets: Sequence[Tensor]) -> None:
        """Add inputs ``(tokens, features)``, or ``(tokens, groups, features)``, and targets ``(tokens, channels)``."""
        for rows in range(0, len(inputs), BLOCK):
            h = inputs[rows : rows + BLOCK].float()
            h = (h[:, None] if h.ndim == 2 else h).movedim(0, 1)
            t = torch.stack([target[rows : rows + BLOCK].float() for target in targets])
            self.count += h.shape[1]
            self._add(features=h.sum(1), gram=h.mT @ h)
            by_group = t.reshape(*t.shape[:2], len(h), -1).movedim(2, 1)
            products = torch.stack([(target * t).sum(1) for target in t])
            self._add(targets=t.sum(1), cross=h.mT @ by_group, products=products)

    def add_joined(self, pieces: Sequence[tuple[Tensor, ...]]) -> None:
        """Add pieces of inputs and targets together, as few large products take less time than many small ones."""
        if pieces:
            inputs, *targets = map(torch.cat, zip(*pieces, strict=True))
            self.add(inputs, targets)

    def _add(self, **block_sums: Tensor) -> None:
        for name, block_sum in block_sums.items():
            total = getattr(self, name)
            setattr(self, name, block_sum.cpu().double() if total is _NONE else total.add_(block_sum.cpu()))

    def combined(self, factors: Tensor) -> LayerSums:
        """Return the sums for one target, Σ factorᵢ·Tᵢ, with factors ``(targets, channels)``."""
        factors = factors.double()
        return replace(
            self,
            targets=(factors * self.targets).sum(0, keepdim=True),
            cross=torch.einsum("kgc,kgfc->gfc", self._by_group(factors), self.cross)[None],
            products=torch.einsum("ic,jc,ijc->c", factors, factors, self.products)[None, None],
        )

    def with_own(self, weight: Tensor) -> LayerSums:
        """Return the sums for two targets after adding HWᵀ, the output of a layer with these weights, to the second."""
        first, second = self.cross
        w = self.turned(weight)
        outputs = self.gram @ w
        crossed = self.products[0, 1] + (w * first).sum(1).flatten()
        squared = self.products[1, 1] + (w * (2 * second + outputs)).sum(1).flatten()
        return replace(
            self,
            targets=torch.stack([self.targets[0], self.targets[1] + self.summed_outputs(w)]),
            cross=torch.stack([first, second + outputs]),
            products=torch.stack([torch.stack([self.products[0, 0], crossed]), torch.stack([crossed, squared])]),
        )

    def centred(self, by: LayerSums | None = None) -> LayerSums:
        """Return the sums of H − mean(H) and T − mean(T), with these means or those of other sums."""
        by = self if by is None else by
        m, t = by.features / by.count, by.targets / by.count
        sums, means = self._by_group(self.targets), self._by_group(t)
        around = self.features - self.count * m
        return LayerSums(
            self.count,
            around,
            self.gram - _outer(m, self.features) - _outer(around, m),
            self.targets - self.count * t,
            self.cross - _outer(m, sums) - _outer(around, means),
            self.products
            - torch.einsum("ic,jc->ijc", t, self.targets)
            - torch.einsum("ic,jc->ijc", self.targets, t)
            + self.count * torch.einsum("ic,jc->ijc", t, t),
        )

    def turned(self, weight: Tensor) -> Tensor:
        """View a weight ``(channels, features)`` as ``(groups, features, channels of a group)``."""
        return weight.reshape(len(self.features), -1, weight.shape[1]).mT

    def summed_outputs(self, turned: Tensor) -> Tensor:
        """Return ΣHWᵀ, the summed outputs of a layer with such weights: ``(channels,)``."""
        return (self.features[:, None] @ turned).flatten()

    def _by_group(self, channels: Tensor) -> Tensor:
        return channels.reshape(*channels.shape[:-1], len(self.features), -1)

    def __add__(self, sums: LayerSums) -> LayerSums:
        names = ("count", "features", "gram", "targets", "cross", "products")
        return LayerSums(*(getattr(self, name) + getattr(sums, name) for name in names))


@dataclass(frozen=True)
class RefittedLayer:
    """Result of a ridge regression.

    Attributes:
        weight: W: float64 ``(channels, features)``.
        bias: b: ``(channels,)``; None for a layer without one.
        penalty: λ, as in :class:`CalibratedModule`.
        before: relative L2 error with W₀ and b₀, on the tokens that decide, of the targets about their mean.
        after: the same with W and b.
    """

    weight: Tensor
    bias: Tensor | None
    penalty: float | None
    before: float
    after: float


def ridge(learned: LayerSums, validation: LayerSums, weight: Tensor, bias: Tensor | None) -> RefittedLayer:
    """Fit a layer with weight W₀ and bias b₀, or None, to all tokens, with the best λ on the tokens that decide.

    >>> generator = torch.Generator().manual_seed(0)
    >>> x = torch.randn(400, 3, generator=generator)
    >>> sums = [LayerSums(), LayerSums()]
    >>> for rows, part in zip((x[:300], x[300:]), sums):
    ...     part.add(rows, [2 * rows[:, :1] + 1])
    >>> refitted = ridge(*sums, torch.zeros(1, 3), torch.zeros(1))
    >>> [round(float(value), 1) for value in (refitted.weight[0, 0], refitted.bias[0])]
    [2.0, 1.0]
    """
    before = learned.turned(weight.double())
    present_bias = torch.zeros(len(weight), dtype=torch.float64) if bias is None else bias.double()
    learned_centred = learned.centred() if bias is not None else learned
    validation_centred = validation.centred(learned) if bias is not None else validation
    scale = _spread(learned_centred)
    total = max(float(validation.centred().products[0, 0].sum()), torch.finfo(torch.float64).tiny)
    missing, missing_judged = (sums.cross[0] - sums.gram @ before for sums in (learned_centred, validation_centred))
    error_of_bias = _squares(validation_centred, before, torch.zeros_like(present_bias))

    factor = functools.cache(lambda penalty: _factor(learned_centred.gram, penalty * scale))

    def gained(penalty: float, every: int) -> float:
        change = torch.cholesky_solve(missing[..., ::every], factor(penalty))
        left = 2 * missing_judged[..., ::every] - validation_centred.gram @ change
        return float((change * left).sum())

    present = (max(_squares(validation, before, present_bias), 0.0) / total) ** 0.5
    best = gain = 0.0
    if scale > 0:
        best = _downhill(functools.cache(lambda penalty: -gained(penalty, max(1, before.shape[-1] // _CHANNELS))))
        gain = gained(best, 1)
    if not gain > 0:
        best, gain = math.inf, 0.0  # the bias alone
    after = (max(error_of_bias - gain, 0.0) / total) ** 0.5
    if not after < present:
        return RefittedLayer(weight.double(), bias, None, present, present)
    both = learned + validation
    weights = before
    if best < math.inf:
        both_centred = both.centred() if bias is not None else both
        left = both_centred.cross[0] - both_centred.gram @ before
        weights = before + torch.cholesky_solve(
            left, _factor(both_centred.gram, best * scale * both.count / learned.count)
        )
    offset = None if bias is None else (both.targets[0] - both.summed_outputs(weights)) / both.count
    return RefittedLayer(weights.mT.flatten(0, 1), offset, best, present, after)


def slopes(sums: LayerSums, penalty: float = _FIRST_TRIED) -> Tensor:
    """Return the slope of the first target in the second, by channel, of what a ridge regression on H leaves of both.

    ``penalty`` is λ, as a share of the mean square of a centred feature.
    """
    centred = sums.centred()
    first, second = centred.cross
    explained = torch.cholesky_solve(second, _factor(centred.gram, penalty * _spread(centred)))
    covariance = centred.products[0, 1] - (explained * first).sum(1).flatten()
    variance = centred.products[1, 1] - (explained * second).sum(1).flatten()
    return torch.div(covariance, variance.clamp_min(torch.finfo(torch.float64).tiny))


def _downhill(error: Callable[[float], float]) -> float:
    """Return the penalty at a local minimum of the error, searched from the usual one."""
    here = PENALTIES.index(_FIRST_TRIED)
    for step in (-1, 1):
        while 0 <= here + step < len(PENALTIES) and error(PENALTIES[here + step]) < error(PENALTIES[here]):
            here += step
    return PENALTIES[here]


def _factor(gram: Tensor, penalty: float) -> Tensor:
    """Return the Cholesky factor of HᵀH + λ of each group, with a larger λ if rounding requires it.

    With linearly dependent features, eigenvalues of zero may fall below −λ, as products are summed in float32.
    """
    penalties = torch.full((len(gram), 1), penalty, dtype=gram.dtype)
    while True:
        penalized = gram.clone()
        penalized.diagonal(dim1=-2, dim2=-1).add_(penalties)
        factor: Tensor
        factor, failed = torch.linalg.cholesky_ex(penalized)
        if not bool(failed.any()) or not bool(gram.isfinite().all()):
            return factor
        penalties[failed > 0] *= _LARGER


def _squares(sums: LayerSums, turned: Tensor, bias: Tensor) -> float:
    """‖HWᵀ + b − T‖²."""
    square = sums.products[0, 0].sum() + (turned * (sums.gram @ turned - 2 * sums.cross[0])).sum()
    return float(square + sums.count * bias @ bias - 2 * bias @ (sums.targets[0] - sums.summed_outputs(turned)))


def _spread(centred: LayerSums) -> float:
    """Return the mean over features of their sum of squares."""
    return float(centred.gram.diagonal(dim1=-2, dim2=-1).mean())


def _outer(features: Tensor, channels: Tensor) -> Tensor:
    return features[..., :, None] * channels[..., None, :]


def least_squares(function: PointwiseFunction, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return the parameters of a point-wise function that fit a norm's outputs y best, searched from the present ones.

    x and y are float64 ``(tokens, channels)``, and the function has a weight and a bias for each channel. Values are by
    name, with the shapes and dtypes of the parameters.

    >>> function = PointwiseFunction("tanh", 2, alpha=0.4)
    >>> x = torch.linspace(-3, 3, 200, dtype=torch.float64).reshape(100, 2)
    >>> fitted = least_squares(function, x, 2 * torch.tanh(0.7 * x) - 1)
    >>> [round(float(fitted[name].mean()), 3) for name in ("alpha", "weight", "bias")]
    [0.7, 2.0, -1.0]
    """
    free = {
        name: inner.detach().double().cpu().flatten().clone().requires_grad_(function.table is None)
        for name, inner in (("alpha", function.alpha), ("shift", function.shift))
        if inner is not None
    }
    if function.table is None:
        with torch.enable_grad():
            _search(function, free, x, y)
    with torch.no_grad():
        weight, bias = _projected(function, _of(function, free, x), y)
    parameters = dict(function.named_parameters())
    return {
        name: value.detach().reshape(parameters[name].shape).to(parameters[name])
        for name, value in {**free, "weight": weight, "bias": bias}.items()
    }


def _search(function: PointwiseFunction, free: dict[str, Tensor], x: Tensor, y: Tensor) -> None:
    """Search for α and s, each with its best weight and bias; keep the present ones if the search diverges."""
    start = {name: value.detach().clone() for name, value in free.items()}
    size = x.square().mean(0 if free["alpha"].numel() > 1 else None).sqrt().clamp_min(torch.finfo(x.dtype).tiny)
    x = x / size  # so that steps do not depend on the unit of x
    free["alpha"].data.mul_(size)
    search = torch.optim.LBFGS(list(free.values()), max_iter=_SEARCH_STEPS, line_search_fn="strong_wolfe")
    total = y.square().sum().clamp_min(torch.finfo(y.dtype).tiny)

    def loss() -> Tensor:
        search.zero_grad()
        values = _of(function, free, x)
        with torch.no_grad():  # at their minimum, the loss does not depend on them
            weight, bias = _projected(function, values.detach(), y)
        left = y - weight * values - bias
        squares = left.square().sum() / total
        squares.backward()  # type: ignore[no-untyped-call]
        return squares

    search.step(loss)  # type: ignore[no-untyped-call]
    if all(bool(value.isfinite().all()) for value in free.values()):
        free["alpha"].data.copy_(_not_all_straight(free["alpha"].detach(), x) / size)
        if function.curve.zero_centred:
            _turn_upwards(free)
    else:
        for name, value in free.items():
            value.data.copy_(start[name])


def _not_all_straight(alpha: Tensor, x: Tensor) -> Tensor:
    """Raise α to at least 0.01 / max|x|, so that the weight stays below overflow.

    A norm that is linear over all tokens is fitted by any small α with a weight of 1/α. The search may end at weights
    of 10⁵, which overflow half precision and destabilize training.
    """
    reach = x.abs().amax(0) if alpha.numel() > 1 else x.abs().amax()
    least = torch.where(reach > 0, _LEAST_REACH / reach, 0.0)
    return torch.copysign(torch.maximum(alpha.abs(), least), alpha)


def _turn_upwards(free: dict[str, Tensor]) -> None:
    """Make every α positive, as w·f(αx + s) = −w·f(−αx − s); not if one s is shared by α of both signs."""
    turned = torch.where(free["alpha"] < 0, -1.0, 1.0)
    shift = free.get("shift")
    if shift is not None and shift.numel() != turned.numel():
        if bool((turned != turned[0]).any()):
            return
        turned = turned[0]
    for value in free.values():
        value.data.mul_(turned)


def _of(function: PointwiseFunction, free: dict[str, Tensor], x: Tensor) -> Tensor:
    return function.f(free["alpha"] * x + free.get("shift", 0.0))


def _projected(function: PointwiseFunction, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight and bias of the least-squares line through (f, y), by channel."""
    present, centre = function.weight.detach().double().cpu().flatten(), f.mean(0)
    variance = (f - centre).square().mean(0)
    covariance = ((f - centre) * (y - y.mean(0))).mean(0)
    idle = variance <= _LEAST_VARIANCE * f.square().mean(0)
    weight = torch.where(idle, present, covariance / variance.masked_fill(idle, 1.0))
    return weight, y.mean(0) - weight * centre
