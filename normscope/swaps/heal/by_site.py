"""Each site alone: what a norm took and gave in the original network, and the blocks that hold the sites."""

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
from normscope.swaps.calibrate.functions import channel_rows
from normscope.swaps.pointwise import PointwiseFunction

_MOST_TOKENS = 4096  # of a site


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
            rows = channel_rows(functions[name], value, current[0].valid_at(name))
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
