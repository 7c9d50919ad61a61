"""Attention masks entry by entry, from a recipe's key: the mask of the one-process reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hetmesh.graph import SampleMeta


def sees(kind: str, meta: SampleMeta, i: int, j: int) -> bool:
    """Whether token i of a sample sees its token j under the mask `kind`."""
    if kind == "prefix":
        first = min((start for start, _ in meta.targets), default=meta.tokens)
        return j <= i or (i < first and j < first)
    spans = [(n, at, at + rows) for n, item in enumerate(meta.media) for at, rows in item.spans]
    item_of = {t: n for n, start, stop in spans for t in range(start, stop)}
    if kind == "bidirectional_runs":
        between = range(min(i, j), max(i, j) + 1)
        return j <= i or all(t in item_of and meta.media[item_of[t]].name != "audio" for t in between)
    if i in item_of and item_of[i] == item_of.get(j):
        return kind != "causal" or j <= i
    return j <= i and (kind != "isolated_media" or i not in item_of)


def dense_mask(kind: str, metas: Sequence[SampleMeta], width: int) -> Tensor:
    """Mask of samples padded to `width` tokens: bool `[samples, 1, width, width]`, True: seen. Padding sees itself."""
    mask = torch.eye(width, dtype=torch.bool).repeat(len(metas), 1, 1, 1)
    for row, meta in enumerate(metas):
        for i in range(meta.tokens):
            for j in range(meta.tokens):
                mask[row, 0, i, j] = sees(kind, meta, i, j)
    return mask


class DenseAttention:
    """Stands for a `ContextAttention` of padded samples, whose `dense_mask` is `mask`: `hetmesh.attention.attend` then
    computes what torch's own attention does with it."""

    name = "dense"

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask
        self.rows = mask.shape[0] * mask.shape[-1]

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, window: int | None = None
    ) -> Tensor:
        assert window is None
        apart = [x.unflatten(1, (len(self.mask), -1)).transpose(0, 1) for x in (q, k, v)]
        groups = len(q) // len(k)
        k, v = (x.repeat_interleave(groups, 1) for x in apart[1:])
        return scaled_dot_product_attention(apart[0], k, v, self.mask, scale=scale).transpose(0, 1).flatten(1, 2)


@contextmanager
def masked(decoder: Any, mask: Tensor) -> Iterator[None]:
    """While the context lasts, a decoder of transformers attends as `mask` says, through transformers' own attention;
    layers with a sliding window see no farther than that."""
    forward = decoder.forward
    given: Any = mask
    if "sliding_attention" in (getattr(decoder.config, "layer_types", None) or ()):
        places = torch.arange(mask.shape[-1])
        near = (places[:, None] - places[None, :]).abs() < decoder.config.sliding_window
        given = {"full_attention": mask, "sliding_attention": mask & near}
    decoder.forward = lambda **arguments: forward(**{**arguments, "attention_mask": given})
    try:
        yield
    finally:
        decoder.__dict__.pop("forward", None)
