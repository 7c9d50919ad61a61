"""Payloads of the samples of one lane and microbatch -> the tensors that an encoder or an LLM reads."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetmesh.errors import SampleError
from hetmesh.graph.sample import SampleMeta, kinds_of
from hetmesh.models.adapter import SampleLike


def collate_media(
    samples: Sequence[SampleLike], metas: Sequence[SampleMeta], name: str, shape: tuple[int, ...]
) -> dict[str, Tensor]:
    """The media items of kind `name` in sample order, then position order, as `{"media": [n, *shape]}`."""
    items = media_items(samples, metas, name)
    return {"media": stacked(items) if items else torch.zeros(0, *shape)}


def stacked(items: Sequence[Tensor]) -> Tensor:
    """`torch.stack`, but as `joined` where it can be."""
    return joined([item.unsqueeze(0) for item in items])


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """`torch.cat` along the first dim, but a read-only view where they are adjacent in memory, as from worker
    processes."""
    first, end = tensors[0], tensors[0].data_ptr()
    storage = first.untyped_storage()
    for tensor in tensors:
        alike = tensor.shape[1:] == first.shape[1:] and tensor.dtype == first.dtype and tensor.is_contiguous()
        adjacent = tensor.data_ptr() == end and tensor.untyped_storage().data_ptr() == storage.data_ptr()
        if not (alike and adjacent) or not tensor.nbytes or tensor.requires_grad:
            return torch.cat(list(tensors))
        end += tensor.nbytes
    return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())


def media_items(samples: Sequence[SampleLike], metas: Sequence[SampleMeta], name: str) -> list[Tensor]:
    """The media items of kind `name` in sample order, then position order. Raises SampleError: a sample holds another
    number of items than its metadata says."""
    items: list[Tensor] = []
    for sample, meta in zip(samples, metas, strict=True):
        given = sample.media.get(name, ())
        if len(given) != meta.num_items(name):
            raise SampleError(
                f"sample {sample.id!r}: {meta.num_items(name)} {name!r} in its metadata, {len(given)} in its payload"
            )
        items.extend(given)
    return items


def collate_tokens(
    samples: Sequence[SampleLike],
    metas: Sequence[SampleMeta],
    *,
    sources: Mapping[str, str],
    placeholders: Mapping[str, int] = MappingProxyType({}),
    pad_id: int = 0,
) -> dict[str, Tensor]:
    """Token inputs of B samples, padded on the right to the longest, S. Payloads agree with their metadata
    (`hetmesh.data.source.check_sample`).

    Args:
        sources: producer module -> the placeholder that its rows replace.
        placeholders: placeholder name -> token id.

    Returns:
        `input_ids`, `position_ids`: int64 `[B, S]`; positions `[axes, B, S]` where samples have several (multimodal
        RoPE).
        `targets`: int64 `[num_targets]`, in sample order then position order.
        `target_positions`: int64 `[num_targets]`, index into the flat `[B * S]` of the token before each target, which
        is the position whose output predicts it.
        `positions.<placeholder>`: int64 `[rows]`, index into the flat `[B * S]` of each of its tokens.

    Raises:
        SampleError: placeholder counts or positions differ from the metadata.
    """
    pairs = list(zip(samples, metas, strict=True))
    length = max((meta.tokens for _, meta in pairs), default=1)
    ids = np.full((len(pairs), length), pad_id, np.int64)  # numpy: torch's dispatch costs more than short rows
    axes = next((len(meta.position_ids) for _, meta in pairs if meta.position_ids is not None), 1)
    position_ids = torch.arange(length).repeat(axes, len(pairs), 1)
    target_positions: list[int] = []
    for row, (sample, meta) in enumerate(pairs):
        ids[row, : meta.tokens] = sample.tokens.numpy()
        if meta.position_ids is not None:
            if len(meta.position_ids) != axes or any(len(axis) != meta.tokens for axis in meta.position_ids):
                raise SampleError(
                    f"sample {sample.id!r}: position_ids must be {axes} rows of {meta.tokens} positions, got rows of "
                    f"{[len(axis) for axis in meta.position_ids]}"
                )
            position_ids[:, row, : meta.tokens] = torch.tensor(meta.position_ids)
        for start, stop in meta.targets:
            target_positions += range(row * length + start - 1, row * length + stop - 1)
    input_ids, flat = torch.from_numpy(ids), torch.tensor(target_positions, dtype=torch.int64)
    batch = {
        "input_ids": input_ids,
        "position_ids": position_ids[0] if axes == 1 else position_ids,
        "target_positions": flat,
        "targets": input_ids.flatten()[flat + 1],
    }
    for source, at in sources.items():
        tokens = {placeholders[kind] for kind in kinds_of(at) if kind in placeholders}
        found = sum((input_ids == token for token in tokens), torch.zeros_like(input_ids, dtype=torch.bool))
        if any(token in tokens for kind, token in placeholders.items() if kind not in kinds_of(at)):  # GLM's videos
            found &= _of_kind(at, [meta for _, meta in pairs], length)
        for (sample, meta), count in zip(pairs, found.sum(dim=1).tolist(), strict=True):
            _check_rows(sample.id, meta, source, at, count)
        batch[f"positions.{at}"] = found.flatten().nonzero().flatten()
    return batch


def _of_kind(name: str, metas: Sequence[SampleMeta], length: int) -> Tensor:
    """Where the rows of media items of kind `name` are: bool `[samples, length]`."""
    found = torch.zeros(len(metas), length, dtype=torch.bool)
    for row, meta in enumerate(metas):
        for position, rows in (span for item in meta.media if item.name in kinds_of(name) for span in item.spans):
            found[row, position : position + rows] = True
    return found


def target_values(samples: Sequence[Any], metas: Sequence[SampleMeta], names: Collection[str]) -> dict[str, Tensor]:
    """`values.<name>`: float64 `[num_targets]`, what the targets of `collate_tokens` have of the values `names`. Raises
    SampleError: a sample has none, or another number of them than targets before some were cut."""
    of_targets: dict[str, list[Tensor]] = {name: [torch.zeros(0, dtype=torch.float64)] for name in names}
    for sample, meta in zip(samples, metas, strict=True):
        for name, parts in of_targets.items() if meta.num_targets else ():
            value = sample.values.get(name)
            if value is None or (value.shape and (value.ndim > 1 or len(value) < meta.num_targets)):
                shown = "none" if value is None else f"a tensor {list(value.shape)}"
                raise SampleError(
                    f"sample {sample.id!r}: its value {name!r} must be one number or one for each target, got {shown}"
                )
            parts.append(value.double()[: meta.num_targets] if value.ndim else value.double().expand(meta.num_targets))
    return {f"values.{name}": torch.cat(parts) for name, parts in of_targets.items()}


def _check_rows(sample_id: str, meta: SampleMeta, source: str, at: str, tokens: int) -> None:
    rows = meta.rows.get(source, sum(item.rows for item in meta.media if item.name in kinds_of(at)))
    if tokens != rows:
        raise SampleError(
            f"sample {sample_id!r}: {tokens} {at!r} placeholder tokens, but module {source!r} emits {rows} rows; "
            "every row replaces exactly one placeholder token"
        )
