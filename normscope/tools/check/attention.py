"""Logits of attention, and lengths of its queries and keys, read while a network runs."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from normscope.inputs.batch import Batch
from normscope.inputs.wrappers import submodule
from normscope.norms.sites import NormSite
from normscope.runtime.network import restoring, run

_SHARE = 0.95  # quantile over tokens of the estimate
_ROWS = 256  # queries at a time
_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)


@dataclass(frozen=True)
class AttentionLogits:
    """Logits scale · q·k of the attention behind a norm, over all samples, heads and calls.

    Attributes:
        front: name of the last norm before the attention, QK-norms aside, whose output it reads.
        largest: the largest logit that softmax took.
        bound: scale · max‖q‖ · max‖k‖ of the worst sample and head, plus the largest bias that is added.
        estimate: the same of the 95th percentiles over tokens.
        head_dim: channels of a head.
        scale: factor of q·k, 1/√d by default. If attention calls softmax itself, its logits are known but not q and k:
            then this and the channels are None, and all three numbers are those of the logits.
    """

    front: str
    largest: float
    bound: float
    estimate: float
    head_dim: int | None = None
    scale: float | None = None


def attention_logits(
    network: nn.Module, sites: Iterable[NormSite], batches: Iterable[Batch]
) -> dict[str, AttentionLogits]:
    """Run a network, and return the logits of its attention by site: the norm of the queries, or the norm in front."""
    watch = _AttentionWatch()
    with contextlib.ExitStack() as hooks, restoring(network), watch:
        for site in sites:
            if not site.is_call:
                hook = functools.partial(watch.called, site)
                hooks.callback(submodule(network, site.path).register_forward_hook(hook).remove)
        for batch in batches:
            run(network, batch)
    return watch.logits


class _AttentionWatch(TorchFunctionMode):
    """Reads the queries and keys of each attention in the thread that enters it, behind RoPE and QK-norm.

    Padded queries count, so the numbers may only be larger for them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.logits: dict[str, AttentionLogits] = {}
        self._front = self._of_queries = ""

    def called(self, site: NormSite, *_: Any) -> None:
        """Note the norm that has run, as a forward hook."""
        if site.placement != "qk":
            self._front, self._of_queries = site.name, ""
        elif not self._of_queries:
            self._of_queries = site.name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self._attended(*args, **kwargs)
        elif func is F.multi_head_attention_forward:
            self._multi_head(inspect.signature(func).bind(*args, **kwargs).arguments)
        elif func in _SOFTMAX and (logits := args[0] if args else kwargs["input"]).ndim == 4:
            rows = logits.detach().float().amax(-1)  # masked ones are the least
            self._add(float(rows.max()), float(rows.max()), float(_quantile(rows).max()))
        return func(*args, **kwargs)

    def _multi_head(self, arguments: dict[str, Any]) -> None:
        """Project queries and keys as F.multi_head_attention_forward does, whose own steps no mode sees."""
        width, heads, weight = (arguments[name] for name in ("embed_dim_to_check", "num_heads", "in_proj_weight"))
        bias, mask = arguments["in_proj_bias"], arguments.get("attn_mask")
        parts = zip(("query", "key"), (slice(width), slice(width, 2 * width)), strict=True)
        if weight is not None:  # as it is where keys have another width
            q, k = (F.linear(arguments[name], weight[at], None if bias is None else bias[at]) for name, at in parts)
            q, k = (part.view(*part.shape[:-1], heads, -1).transpose(0, -2) for part in (q, k))
            if mask is not None and mask.dtype == torch.bool:  # True is masked here, unlike below
                mask = ~mask
            if mask is not None and mask.ndim == 3:  # of each sample and head
                mask = mask.reshape(-1, heads, *mask.shape[1:]).transpose(0, 1)
            self._attended(q, k, attn_mask=mask)

    @torch.no_grad()
    def _attended(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        """Add a call of scaled_dot_product_attention, by its arguments."""
        query, key = query.detach().float(), key.detach().float()
        if enable_gqa:
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        head_dim, shape = query.shape[-1], (query.shape[-2], key.shape[-2])
        scale = head_dim**-0.5 if scale is None else float(scale)
        mask = torch.ones(shape, dtype=torch.bool, device=key.device).tril() if is_causal else attn_mask
        if mask is None or mask.dtype == torch.bool:
            mask = query.new_zeros(1, 1) if mask is None else torch.where(mask, 0.0, -math.inf)
        q, k = (torch.linalg.vector_norm(part, dim=-1) for part in (query, key))
        added = max(float(mask.max()), 0.0)
        bound, estimate = (scale * float((of(q) * of(k)).max()) + added for of in (lambda x: x.amax(-1), _quantile))
        masks = torch.split(mask.expand(*mask.shape[:-2], *shape), _ROWS, -2)
        logits = (scale * rows @ key.mT + part for rows, part in zip(torch.split(query, _ROWS, -2), masks, strict=True))
        largest = max(float(part.nan_to_num(math.inf, math.inf, -math.inf).max()) for part in logits)
        self._add(largest, bound, estimate, head_dim, scale)

    def _add(
        self, largest: float, bound: float, estimate: float, head_dim: int | None = None, scale: float | None = None
    ) -> None:
        if site := self._of_queries or self._front:
            largest, bound, estimate = (math.inf if math.isnan(n) else n for n in (largest, bound, estimate))
            if before := self.logits.get(site):
                largest, bound = max(largest, before.largest), max(bound, before.bound)
                estimate = max(estimate, before.estimate)
            self.logits[site] = AttentionLogits(self._front, largest, bound, estimate, head_dim, scale)


def _quantile(lengths: Tensor) -> Tensor:
    return torch.quantile(lengths, _SHARE, dim=-1)
