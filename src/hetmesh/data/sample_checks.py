"""Checks of samples, before any module sees them. Each error names the sample, what it has and what was expected."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import torch

from hetmesh.data.source import Sample, wants
from hetmesh.errors import SampleError
from hetmesh.graph.sample import SampleMeta


def check_meta(meta: SampleMeta) -> None:
    """Check that a sample's metadata makes sense by itself. Raises SampleError: there are no tokens; media items
    overlap, are out of order or outside the sequence; target spans are empty, overlap, are out of order, outside
    `1..tokens` or on placeholder tokens."""
    who = f"sample {meta.id!r}"
    if meta.tokens < 1:
        raise SampleError(f"{who}: it has {meta.tokens} tokens, need at least 1")
    end = 0
    for item in meta.media:
        if item.rows < 1:
            raise SampleError(f"{who}: the {item.name!r} at position {item.position} has {item.rows} rows, need >= 1")
        if not end <= item.position <= meta.tokens - item.rows:
            raise SampleError(
                f"{who}: the {item.name!r} at positions {item.position}..{item.position + item.rows - 1} must lie in "
                f"{end}..{meta.tokens - 1}, after the media item before it and within the {meta.tokens} tokens"
            )
        end = item.position + item.rows
    end = 1  # nothing comes before token 0 from which to predict it
    for start, stop in meta.targets:
        if not end <= start < stop <= meta.tokens:
            raise SampleError(
                f"{who}: target span [{start}, {stop}) must be a non-empty part of [{end}, {meta.tokens}): token 0 "
                f"cannot be predicted, spans ascend without overlap, the sequence has {meta.tokens} tokens"
            )
        end = stop
        for item in meta.media:
            if item.position < stop and start < item.position + item.rows:
                raise SampleError(
                    f"{who}: target span [{start}, {stop}) covers the {item.name!r} at position {item.position}; "
                    f"placeholder tokens cannot be targets"
                )


def check_sample(
    sample: Sample, meta: SampleMeta, placeholders: Mapping[str, int], kinds: Collection[str] | None = None
) -> None:
    """Check that a payload is what its metadata says.

    Args:
        kinds: the kinds of media that were asked for; None: all. Of the others the placeholders alone are looked at.

    Raises:
        SampleError: another id; tokens not int64 `[meta.tokens]`; a kind of media without a placeholder; other media
            counts or shapes; other placeholder tokens in the sequence than media items account for.
    """
    who = f"sample {meta.id!r}"
    if sample.id != meta.id:
        raise SampleError(f"{who}: its payload has the id {sample.id!r}")
    if sample.tokens.dtype != torch.int64 or tuple(sample.tokens.shape) != (meta.tokens,):
        raise SampleError(
            f"{who}: tokens are {sample.tokens.dtype} {list(sample.tokens.shape)}, its metadata promises torch.int64 "
            f"[{meta.tokens}]"
        )
    tokens = sample.tokens.numpy()
    for name in sorted({*sample.media, *[item.name for item in meta.media]}.difference(placeholders)):
        raise SampleError(
            f"{who}: media of kind {name!r} has no placeholder token; kinds with one: {sorted(placeholders)}"
        )
    for name, token in placeholders.items():
        items = [item for item in meta.media if item.name == name]
        planned = [item.shape for item in items]
        actual = [tuple(tensor.shape) for tensor in sample.media.get(name, ())]
        if actual != planned and wants(kinds, name):
            raise SampleError(
                f"{who}: its payload has {len(actual)} {name!r} of shapes {actual}, "
                f"its metadata {len(planned)} of {planned}"
            )
        places = np.flatnonzero(tokens == token).tolist()
        promised = [p for item in items for p in range(item.position, item.position + item.rows)]
        if len(places) != len(promised):
            raise SampleError(
                f"{who}: {len(places)} {name!r} placeholder tokens (id {token}) in its sequence, {len(promised)} rows "
                f"of {len(items)} {name!r} media items to place there"
            )
        if places != promised:
            raise SampleError(
                f"{who}: {name!r} placeholder tokens (id {token}) are at positions {places}, "
                f"its metadata says {promised}"
            )
