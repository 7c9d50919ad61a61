"""Positions of three axes as a model's own `get_rope_index` gives them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from hetmesh.errors import RecipeError, SampleError
from hetmesh.graph.sample import MediaItem, SampleMeta
from hetmesh.models.adapter import ItemGrid
from hetmesh.models.named.qwen3_vl_text import grid_of, multimodal_positions
from hetmesh.models.split.whole_model import WholeModel

Positions = tuple[tuple[int, ...], ...]
IMAGE_TYPE, VIDEO_TYPE = 1, 2
"""What marks the tokens of images and of videos in `mm_token_type_ids`."""

GRIDS: Mapping[int, str] = {IMAGE_TYPE: "image_grid_thw", VIDEO_TYPE: "video_grid_thw"}
"""The arguments of `get_rope_index` that give their grids, in patches."""

PICOSECONDS = 1_000_000_000_000
"""In a second, as `MediaItem.size` gives them: finer than the fp32 numbers that a model compares."""

PROBE = SampleMeta("positions", 29, (MediaItem("image", (2, 3), 2, 6), MediaItem("image", (4, 2), 11, 8)))
"""Two images of other grids than the other's, with text before, between and after them."""


def rope_positions(whole: WholeModel, meta: SampleMeta, grids: Mapping[str, ItemGrid]) -> Positions:
    """Three rows of `meta.tokens` positions.

    `get_rope_index` takes a millisecond and more for a sample, so where it gives what `multimodal_positions` gives for
    images, which is tried once, that takes its place. Raises SampleError: the model cannot tell its items apart.
    """
    images = all(item.name != "video" and len(item.spans) == 1 for item in meta.media)
    if not meta.media or (images and has_plain_positions(whole)):
        return multimodal_positions(meta, grids)
    try:
        return _by_model(whole, meta, grids)
    except SampleError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as error:  # StopIteration as RuntimeError
        raise SampleError(
            f"sample {meta.id!r}: {whole.model_class.__name__}'s get_rope_index does not take its items: "
            f"{' '.join(str(error).split())}"
        ) from error


@lru_cache(maxsize=8)  # as many as directories that are remembered
def has_plain_positions(whole: WholeModel) -> bool:
    """Whether `get_rope_index` gives what `multimodal_positions` gives; tried once. Raises RecipeError if it cannot
    take the grids of images with a row per patch, so that other positions are meant."""
    own = {"image": lambda shape: (1, *shape)}
    try:
        return _by_model(whole, PROBE, own) == multimodal_positions(PROBE, own)
    except (AttributeError, TypeError) as error:
        raise RecipeError(
            f"{whole.pretrained}: its get_rope_index does not take grids of images: {' '.join(str(error).split())}"
        ) from error
    except (RuntimeError, ValueError, IndexError):  # of other rows than one per merged patch
        return False


def _by_model(whole: WholeModel, meta: SampleMeta, grids: Mapping[str, ItemGrid]) -> Positions:
    config = whole.config.vision_config
    known = {i: grid for i in meta.media if (grid := grid_of(meta, i, grids, of_rows=False)) is not None}
    found: dict[int, list[tuple[int, int, int]]] = {kind: [] for kind in GRIDS}
    end = (-1, 0)
    for item, (frames, height, width) in known.items():
        for position, rows in item.spans:
            if (position, _type(item)) == end:
                raise SampleError(
                    f"sample {meta.id!r}: two {item.name!r} items, or runs of one, lie side by side at position "
                    f"{position}, which {whole.model_class.__name__} cannot tell apart; its chat template puts a token "
                    "between them"
                )
            end = (position + rows, _type(item))
        found[_type(item)].append((frames, *(n * config.spatial_merge_size for n in (height, width))))
    inner: Any = whole.model.get_submodule(whole.decoder.rpartition(".")[0])
    kinds = media_tokens(meta, tuple(known))
    marked = {"input_ids": _with_tokens_around(whole, kinds)} if whole.around else {"mm_token_type_ids": kinds}
    given = {"input_ids": torch.zeros_like(kinds), "image_grid_thw": None, **marked}
    given["attention_mask"] = torch.ones_like(kinds)
    given |= {GRIDS[kind]: torch.tensor(grids) for kind, grids in found.items() if grids}
    if found[VIDEO_TYPE]:
        given |= _seconds(inner, meta)
    positions, _ = inner.get_rope_index(**given)
    if bool((positions != positions.long()).any()):  # of frames that last no whole number of steps (Qwen3-Omni)
        raise SampleError(f"sample {meta.id!r}: {whole.model_class.__name__} gives it positions that are no integers")
    return tuple(tuple(axis) for axis in positions[:, 0].long().tolist())


def media_tokens(meta: SampleMeta, items: Sequence[MediaItem] | None = None) -> torch.Tensor:
    """`VIDEO_TYPE` where rows of videos are, `IMAGE_TYPE` where rows of other media are, of all or some items of a
    sample; else 0: `[1, tokens]`."""
    kinds = torch.zeros(1, meta.tokens, dtype=torch.int64)
    for item in meta.media if items is None else items:
        for position, rows in item.spans:
            kinds[0, position : position + rows] = _type(item)
    return kinds


def _type(item: MediaItem) -> int:
    return VIDEO_TYPE if item.name == "video" else IMAGE_TYPE


def _seconds(inner: Any, meta: SampleMeta) -> dict[str, torch.Tensor]:
    """The argument that says how long the frames of each video's grid last, if `get_rope_index` has one."""
    names = [n for n in inspect.signature(inner.get_rope_index).parameters if n.startswith("second_per_grid")]
    videos = [item for item in meta.media if _type(item) == VIDEO_TYPE]
    if names and any(len(item.size) < 4 for item in videos):
        raise SampleError(
            f"sample {meta.id!r}: the size of a video must be frames, height, width and the picoseconds of a frame, "
            f"from which positions follow ({names[0]}), got {[item.size for item in videos]}"
        )
    return {name: torch.tensor([item.size[3] / PICOSECONDS for item in videos]) for name in names}


def _with_tokens_around(whole: WholeModel, kinds: torch.Tensor) -> torch.Tensor:
    """Token ids `[1, tokens]` with images and videos where `kinds` has them, and with what lies around them."""
    before, after = whole.around["image"]
    ids = torch.where(kinds == IMAGE_TYPE, whole.config.image_token_id, 0)
    ids[kinds == VIDEO_TYPE] = getattr(whole.config, "video_token_id", 0)
    steps = torch.diff(kinds[0])
    ids[0, :-1][steps > 0] = before
    ids[0, 1:][steps < 0] = after
    return ids


def check_around(whole: WholeModel, meta: SampleMeta, tokens: torch.Tensor) -> None:
    """Check that every item of an expanded sample has the tokens around it by which the model finds it."""
    for item in meta.media:
        if item.name not in whole.around:
            continue
        ends = item.position - 1, item.stop
        found = tuple(tokens[i].item() if 0 <= i < len(tokens) else None for i in ends)
        before, after = whole.around[item.name]
        if found[0] != before or found[1] not in (after, None):
            raise SampleError(
                f"sample {meta.id!r}: the {item.name!r} at position {item.position} lies between the tokens {found[0]} "
                f"and {found[1]}, not {before} and {after} ({', '.join(whole.family.around[item.name])} in "
                f"config.json), by which {whole.model_class.__name__} finds it"
            )
