"""Context-parallel attention under a name in transformers' registry of attention functions.

A model built with `attn_implementation=register()` calls `attention` in every layer. What it shall compute belongs to a
microbatch, so it is not in the model: it is handed through the model's forward as the keyword `attention_state`, which
the recomputation of activation checkpointing keeps.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from hetmesh._torch_compat import not_compiled
from hetmesh.attention.context_attention import ContextAttention
from hetmesh.errors import BoundaryError

NAME = "hetmesh_context"
"""The name in the registry."""

WHOLE = "hetmesh_context_flash"
"""The name for vision towers: as it says flash, transformers hands over all images at once, and not one by one."""

counter: Counter[tuple[str, int]] = Counter()
"""How often attention ran, by name of the `ContextAttention` and index of the layer: proves that none was left out."""


def register(name: str = NAME) -> str:
    """Enter `attention` into transformers' registry as `NAME` or `WHOLE`; returns that, for `attn_implementation`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(name, attention)
    return name


def use_in(module: nn.Module, config: Any, name: str = NAME) -> None:
    """Let the attention of `module`, built with `config`, which others share, be `attention`."""
    config = copy.deepcopy(config)
    config._attn_implementation = register(name)
    for part in module.modules():
        if getattr(part, "config", None) is not None:
            part.config = config


@not_compiled
def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    attention_state: ContextAttention | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, as transformers calls it.

    Args:
        query: `[B, heads, S, features]`; the rows of this rank are its B * S, one sequence after another. A rank that
            keeps none passes some that count for nothing: transformers' views are ambiguous on empty tensors.
        key, value: `[B, key heads, S, features]`.
        attention_mask: ignored: the mask is that of the `ContextAttention`.

    Returns:
        `[B, S, heads, features]`, and no weights.

    Raises:
        BoundaryError: no `attention_state`, rows that are not those of its state, or an option that it does not have.
    """
    layer = getattr(module, "layer_idx", -1)
    if (state := attention_state) is None:
        raise BoundaryError(
            f"attention {NAME!r} of layer {layer}: no microbatch is set; hand the model's forward attention_state="
        )
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if dropout or unknown:
        raise BoundaryError(f"attention {NAME!r} of layer {layer}: has no dropout ({dropout}), nor {unknown}")
    counter[state.name, layer] += 1
    batch, _, length, _ = query.shape
    q, k, v = (_cast(x).transpose(0, 1).flatten(1, 2) for x in (query, key, value))
    if not state.rows:
        q, k, v = (x[:, :0] for x in (q, k, v))
    out = state(q, k, v, scale=scaling, window=sliding_window).transpose(0, 1)
    if not state.rows:
        out = torch.cat([out, out.new_zeros(batch * length, *out.shape[1:])])
    return out.unflatten(0, (batch, length)), None


def _cast(x: Tensor) -> Tensor:
    """As autocast does for torch's own attention: norms leave queries and keys in fp32, values are not."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
