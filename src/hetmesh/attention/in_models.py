"""How models call context-parallel attention: in transformers' registry of attention functions under a name, in users'
modules as `attend`, with a batch whose samples lie in one row, which ranks may share.

A model built with `attn_implementation=register()` calls `attention` in every layer. What it shall compute belongs to a
microbatch, so it is not in the model: it is handed through the model's forward as the keyword `attention_state`, which
the recomputation of activation checkpointing keeps.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

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


PACKED = "target_index"
"""A key of every packed batch of tokens, and of no padded one."""


@dataclass(frozen=True, eq=False)
class PackedRows(Mapping[str, Any]):
    """What an adapter or a user's module is called with; as a mapping it is `tensors`.

    Attributes:
        tensors: the batch, cut to the tokens that this rank keeps.
        attention: which of the row's tokens see each other, who keeps which, and how to reach them.
    """

    tensors: Mapping[str, Any]
    attention: ContextAttention

    def __getitem__(self, key: str) -> Any:
        return self.tensors[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def attention_of(batch: Mapping[str, Any]) -> ContextAttention | None:
    """The attention of packed rows; None for a padded batch."""
    return batch.attention if isinstance(batch, PackedRows) else None


def with_tensors(batch: Mapping[str, Any], tensors: dict[str, Any]) -> Mapping[str, Any]:
    """A batch of other tensors; the attention of packed rows stays."""
    return PackedRows(tensors, batch.attention) if isinstance(batch, PackedRows) else tensors


def attend(
    query: Tensor, key: Tensor, value: Tensor, batch: Mapping[str, Any], *, scale: float | None = None
) -> Tensor:
    """Causal attention over each sample, or what the recipe's `attention_mask` says. Nothing is dropped.

    Args:
        query: `[B, heads, S, features]`, with rotary positions applied, if any.
        key, value: `[B, key heads, S, features]`; `heads` is a multiple of `key heads`.
        batch: what the module was called with. Packed samples come with their mask, and with which rank keeps what.
        scale: 1 / sqrt(features) by default.

    Returns:
        `[B, heads, S, features]`.

    Raises:
        BoundaryError: tensors that do not fit each other or the batch, or a copy of a packed batch.
    """
    if query.ndim != 4 or key.shape != value.shape or query.shape[1] % key.shape[1]:
        raise BoundaryError(
            "attend: query [B, heads, S, features] with key and value alike and heads a multiple of theirs are "
            f"expected, got {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
        )
    state = attention_of(batch)
    if state is None:
        if PACKED in batch:
            raise BoundaryError(
                "attend: packed samples need the batch that the module was called with, not a copy of it"
            )
        groups = query.shape[1] // key.shape[1]
        key, value = (torch.repeat_interleave(x, groups, 1) if groups > 1 else x for x in (key, value))
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    none: Any = None
    return attention(none, query, key, value, None, scaling=scale, attention_state=state)[0].transpose(1, 2)
