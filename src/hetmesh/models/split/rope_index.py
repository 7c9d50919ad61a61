"""Positions of three axes as a model's own `get_rope_index` gives them."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch

from hetmesh.errors import RecipeError, SampleError
from hetmesh.graph.sample import MediaItem, SampleMeta
from hetmesh.models.adapter import ItemGrid
from hetmesh.models.named.qwen3_vl_text import multimodal_positions
from hetmesh.models.split.whole_model import WholeModel

Positions = tuple[tuple[int, ...], ...]
IMAGE_TYPE = 1
"""What marks an image's tokens in `mm_token_type_ids`."""

PROBE = SampleMeta("positions", 29, (MediaItem("image", (2, 3), 2, 6), MediaItem("image", (4, 2), 11, 8)))
"""Two images of other grids than the other's, with text before, between and after them."""


def rope_positions(whole: WholeModel, meta: SampleMeta, grids: Mapping[str, ItemGrid]) -> Positions:
    """Three rows of `meta.tokens` positions.

    `get_rope_index` takes a millisecond and more for a sample, so where it gives what `multimodal_positions` gives,
    which is tried once, that takes its place.
    """
    if has_plain_positions(whole) or not meta.media:
        return multimodal_positions(meta, grids)
    return _by_model(whole, meta, grids)


def has_plain_positions(whole: WholeModel) -> bool:
    """Whether `get_rope_index` gives what `multimodal_positions` gives; tried once. Raises RecipeError if it cannot
    take the grids of images with a row per patch, so that other positions are meant."""
    if whole.__dict__.get("_plain_positions") is None:
        own = {"image": lambda shape: (1, *shape)}
        try:
            found = _by_model(whole, PROBE, own)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise RecipeError(
                f"{whole.pretrained}: its get_rope_index does not take images of one row per merged patch: "
                f"{' '.join(str(error).split())}"
            ) from error
        whole.__dict__["_plain_positions"] = found == multimodal_positions(PROBE, own)
    return bool(whole.__dict__["_plain_positions"])


def _by_model(whole: WholeModel, meta: SampleMeta, grids: Mapping[str, ItemGrid]) -> Positions:
    merge = whole.config.vision_config.spatial_merge_size
    kinds = media_tokens(meta, grids)
    found: list[tuple[int, int, int]] = []
    end = -1
    for item in meta.media:
        if item.name not in grids:
            continue
        if item.position == end:
            raise SampleError(
                f"sample {meta.id!r}: two {item.name!r} items lie side by side, which {whole.model_class.__name__} "
                "cannot tell apart; its chat template puts a token between them"
            )
        end = item.position + item.rows
        frames, height, width = grids[item.name](item.extent)
        found.append((frames, height * merge, width * merge))
    inner: Any = whole.model.get_submodule(whole.decoder.rpartition(".")[0])
    marked = {"input_ids": _with_tokens_around(whole, kinds)} if whole.around else {"mm_token_type_ids": kinds}
    given = {"input_ids": torch.zeros_like(kinds), "image_grid_thw": torch.tensor(found) if found else None, **marked}
    positions, _ = inner.get_rope_index(**given)
    return tuple(tuple(axis) for axis in positions[:, 0].tolist())


def media_tokens(meta: SampleMeta, names: Container[str] | None = None) -> torch.Tensor:
    """`IMAGE_TYPE` where rows of media items are, of all or of some names, else 0: `[1, tokens]`."""
    kinds = torch.zeros(1, meta.tokens, dtype=torch.int64)
    for item in meta.media:
        if names is None or item.name in names:
            kinds[0, item.position : item.position + item.rows] = IMAGE_TYPE
    return kinds


def _with_tokens_around(whole: WholeModel, kinds: torch.Tensor) -> torch.Tensor:
    """Token ids `[1, tokens]` with an image where `kinds` has one, and with what lies around it."""
    before, after = whole.around["image"]
    ids = torch.where(kinds == IMAGE_TYPE, whole.config.image_token_id, 0)
    steps = torch.diff(kinds[0])
    ids[0, :-1][steps > 0] = before
    ids[0, 1:][steps < 0] = after
    return ids


def check_around(whole: WholeModel, meta: SampleMeta, tokens: torch.Tensor) -> None:
    """Check that every item of an expanded sample has the tokens around it by which the model finds it."""
    for item in meta.media:
        if item.name not in whole.around:
            continue
        stop = item.position + item.rows
        found = tuple(tokens[i].item() if 0 <= i < len(tokens) else None for i in (item.position - 1, stop))
        before, after = whole.around[item.name]
        if found[0] != before or found[1] not in (after, None):
            raise SampleError(
                f"sample {meta.id!r}: the {item.name!r} at position {item.position} lies between the tokens {found[0]} "
                f"and {found[1]}, not {before} and {after} ({', '.join(whole.family.around[item.name])} in "
                f"config.json), by which {whole.model_class.__name__} finds it"
            )
