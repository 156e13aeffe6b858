"""Logits of attention, and lengths of its queries and keys, read while a network runs."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from normscope.inputs.wrappers import submodule
from normscope.norms.sites import NormSite

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


class AttentionWatch(TorchFunctionMode):
    """Reads the queries and keys of each attention in the thread that enters it, behind RoPE and QK-norm.

    Padded queries count, so the numbers may only be larger for them.

    Attributes:
        logits: by the name of a site: the norm of the queries, or the norm in front of attention without QK-norm.
    """

    def __init__(self) -> None:
        super().__init__()
        self.logits: dict[str, AttentionLogits] = {}
        self._front, self._of_queries = "", ""

    @contextlib.contextmanager
    def watching(self, network: nn.Module, sites: Sequence[NormSite]) -> Iterator[None]:
        """Watch a network's attention in the block."""

        def called(name: str, is_qk: bool, *_: Any) -> None:
            if not is_qk:
                self._front, self._of_queries = name, ""
            self._of_queries = self._of_queries or name * is_qk

        with contextlib.ExitStack() as hooks, self:
            for site in sites:
                if not site.is_call:
                    hook = functools.partial(called, site.name, site.placement == "qk")
                    hooks.callback(submodule(network, site.path).register_forward_hook(hook).remove)
            yield

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
            mask = (
                mask.reshape(-1, heads, *mask.shape[1:]).transpose(0, 1)
                if mask is not None and mask.ndim == 3
                else mask
            )
            self._attended(q, k, attn_mask=mask)

    @torch.no_grad()
    def _attended(
        self, query: Tensor, key: Tensor, value: Any = None, attn_mask: Any = None, *_: Any, **how: Any
    ) -> None:
        query, key = query.detach().float(), key.detach().float()
        if how.get("enable_gqa"):
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        head_dim = query.shape[-1]
        scale = head_dim**-0.5 if how.get("scale") is None else float(how["scale"])
        q, k = (torch.linalg.vector_norm(part, dim=-1) for part in (query, key))
        added = max(float(attn_mask.max()), 0.0) if attn_mask is not None and attn_mask.is_floating_point() else 0.0
        bound, estimate = (scale * float((of(q) * of(k)).max()) + added for of in (lambda x: x.amax(-1), _quantile))
        largest = _largest(scale * query, key, attn_mask, bool(how.get("is_causal")))
        self._add(largest, bound, estimate, head_dim=head_dim, scale=scale)

    def _add(self, *numbers: float, head_dim: int | None = None, scale: float | None = None) -> None:
        if site := self._of_queries or self._front:
            before = self.logits.get(site)
            old = (before.largest, before.bound, before.estimate) if before else numbers
            largest, bound, estimate = (
                math.inf if math.isnan(new) else max(new, was) for new, was in zip(numbers, old, strict=True)
            )
            self.logits[site] = AttentionLogits(self._front, largest, bound, estimate, head_dim, scale)


def _largest(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> float:
    """Return the largest logit, from a few rows at a time."""
    largest, (n_q, n_k) = -math.inf, (query.shape[-2], key.shape[-2])
    later = torch.arange(n_k, device=key.device) > torch.arange(n_q, device=key.device)[:, None]
    for first in range(0, n_q, _ROWS):
        rows = slice(first, first + _ROWS)
        logits = query[..., rows, :] @ key.mT
        if mask is not None:
            part = mask[..., rows, :] if mask.shape[-2] > 1 else mask
            logits = logits.masked_fill(~part, -math.inf) if part.dtype == torch.bool else logits + part
        if is_causal:
            logits = logits.masked_fill(later[rows], -math.inf)
        largest = max(largest, float(logits.nan_to_num(math.inf, math.inf, -math.inf).max()))
    return largest


def _quantile(lengths: Tensor) -> Tensor:
    return torch.quantile(lengths, _SHARE, dim=-1)
