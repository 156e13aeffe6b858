"""Each site alone: the parameters of one point-wise function from the norm's own inputs and outputs, by least squares.

Given α and s, the weight and bias of every channel have a closed form; α and s are then searched along it (variable
projection: G. H. Golub, V. Pereyra, SIAM J. Numer. Anal. 10, 1973).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normscope.inputs.batch import Batch
from normscope.pairs.norms.trace import input_of
from normscope.runtime.network import KeptBuffers, run
from normscope.swaps.pointwise import PointwiseFunction

_MOST_TOKENS = 4096  # of a site
_SEARCH_STEPS = 20
_LEAST_VARIANCE = 1e-10  # of f over a channel's tokens, as a share of its mean square: less leaves no slope to tell


@torch.no_grad()
def norm_pairs(
    original: nn.Module, functions: dict[str, PointwiseFunction], batches: Sequence[Batch]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Run the original, and return inputs and outputs of the norms that point-wise functions replace.

    Every pass begins from the buffers that it has now, and leaves them and its batch so.

    Returns:
        For each site rows of its input and output, float64 ``(tokens, channels)`` on the CPU; at most 4096, the same
        number of every batch, without padding where it can be told.
    """
    quota = max(1, math.ceil(_MOST_TOKENS / len(batches)))
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in functions}
    with contextlib.ExitStack() as hooks:
        current: list[Batch] = []
        inputs: dict[str, Tensor] = {}

        def some(name: str, value: Tensor) -> Tensor:
            rows = _rows(functions[name], value, current[0].valid_at(name))
            return rows[:: max(1, len(rows) // quota)][:quota].to("cpu", torch.float64, copy=True)

        def keep_input(name: str) -> Any:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                x = input_of(args, kwargs)
                if x is not None and len(seen[name]) * quota < _MOST_TOKENS:
                    inputs[name] = some(name, x)  # now: the norm itself may change it in place

            return hook

        def keep_output(name: str) -> Any:
            def hook(module: nn.Module, args: Any, output: Tensor) -> None:
                if name in inputs:
                    seen[name].append((inputs.pop(name), some(name, output)))

            return hook

        for name in functions:
            norm = original.get_submodule(name)
            hooks.callback(norm.register_forward_pre_hook(keep_input(name), with_kwargs=True).remove)
            hooks.callback(norm.register_forward_hook(keep_output(name)).remove)
        buffers = KeptBuffers(original)
        for batch in batches:
            current[:] = [batch]
            run(original, batch)
            buffers.put_back()
    return {
        name: (torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs]))
        for name, pairs in seen.items()
        if pairs
    }


def least_squares(function: PointwiseFunction, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The parameters of a point-wise function that come nearest to y, searched from its present ones.

    Args:
        function: it stays as it is.
        x: what the norm took: float64 ``(tokens, channels)``.
        y: what it gave.

    Returns:
        Values by parameter name, in the shape and dtype of the function's.

    >>> function = PointwiseFunction("tanh", 2, alpha=0.4)
    >>> x = torch.linspace(-3, 3, 200, dtype=torch.float64).reshape(100, 2)
    >>> found = least_squares(function, x, 2 * torch.tanh(0.7 * x) - 1)
    >>> [round(float(found[name].mean()), 4) for name in ("alpha", "weight", "bias")]
    [0.7, 2.0, -1.0]
    """
    inner = {"alpha": function.alpha, "shift": function.shift}
    free = {
        name: part.detach().double().cpu().flatten().clone().requires_grad_(function.table is None)
        for name, part in inner.items()
        if part is not None
    }
    if function.table is None:
        with torch.enable_grad():
            _search(function, free, x, y)
    with torch.no_grad():
        weight, bias = _projected(function, _of(function, free, x), y)
    solution: dict[str, Tensor] = {**free, "weight": weight, **({} if bias is None else {"bias": bias})}
    parameters = dict(function.named_parameters())
    return {
        name: value.detach().reshape(parameters[name].shape).to(parameters[name]) for name, value in solution.items()
    }


def blocks_of(sites: Iterable[str], model: nn.Module) -> list[str]:
    """Return the paths of the blocks that hold the sites: elements of the innermost list of modules around each.

    >>> layers = [nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2)]
    >>> blocks_of(["0.1", "1.1"], nn.Sequential(*layers, nn.Linear(4, 2)))
    ['0', '1']
    """
    return list(dict.fromkeys(path for site in sites for path in _innermost(site, model)))


def _innermost(site: str, model: nn.Module) -> Iterator[str]:
    parts = site.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        if isinstance(model.get_submodule(".".join(parts[: depth - 1])), (nn.ModuleList, nn.Sequential)):
            yield ".".join(parts[:depth])
            return


def _search(function: PointwiseFunction, free: dict[str, Tensor], x: Tensor, y: Tensor) -> None:
    """Move α and s downhill, with their best weight and bias; stay where nothing is finite."""
    start = {name: value.detach().clone() for name, value in free.items()}
    search = torch.optim.LBFGS(list(free.values()), max_iter=_SEARCH_STEPS, line_search_fn="strong_wolfe")
    total = y.square().sum().clamp_min(torch.finfo(y.dtype).tiny)

    def loss() -> Tensor:
        search.zero_grad()
        values = _of(function, free, x)
        with torch.no_grad():  # at the minimum over them, their own change does not count
            weight, bias = _projected(function, values.detach(), y)
        left = y - weight * values - (0.0 if bias is None else bias)
        squares = left.square().sum() / total
        squares.backward()  # type: ignore[no-untyped-call]
        return squares

    search.step(loss)  # type: ignore[no-untyped-call]
    if not all(bool(value.isfinite().all()) for value in free.values()):
        for name, value in free.items():
            value.data.copy_(start[name])


def _of(function: PointwiseFunction, free: dict[str, Tensor], x: Tensor) -> Tensor:
    inside = free["alpha"] * x
    if "shift" in free:
        inside = inside + free["shift"]
    return (function.curve.function if function.table is None else function.table)(inside)


def _projected(function: PointwiseFunction, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
    """The best weight and bias, in closed form: a straight line through (f, y)."""
    old = function.weight.detach().double().cpu().flatten()
    if old.numel() == 1 and f.shape[1] > 1:
        return (f * y).sum().div(f.square().sum().clamp_min(1e-300)).reshape(1), None
    if function.bias is None:
        spread, common, centre = f.square().mean(0), (f * y).mean(0), None
    else:
        centre = f.mean(0)
        spread = (f - centre).square().mean(0)
        common = ((f - centre) * (y - y.mean(0))).mean(0)
    idle = spread <= _LEAST_VARIANCE * f.square().mean(0)
    weight = torch.where(idle, old, common / spread.masked_fill(idle, 1.0))
    return weight, None if centre is None else y.mean(0) - weight * centre


def _rows(function: PointwiseFunction, value: Tensor, valid: Tensor | None) -> Tensor:
    """Bring channels to the end: ``(tokens, channels)``, without padding where axes 0 and 1 are its."""
    channels = math.prod(function.normalized_shape)
    if function.channel_axis != -1:
        value = value.movedim(function.channel_axis, -1)
    if valid is not None and value.shape[:2] == valid.shape:
        value = value[valid.to(value.device)]
    return value.reshape(-1, channels)
