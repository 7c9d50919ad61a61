"""Multimodal RoPE: positions of three axes (time, height, width) for sequences of text and images."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hetmesh.graph.sample import SampleMeta
from hetmesh.models.adapter import ItemGrid


def multimodal_positions(meta: SampleMeta, grids: Mapping[str, ItemGrid]) -> tuple[tuple[int, ...], ...]:
    """Three rows of `meta.tokens` positions each.

    Text advances all three axes. The rows of an image start where the text before it ended, each at its frame, height
    and width; the text after it continues from the larger of height and width (Qwen3-VL; transformers'
    `Qwen3VLModel.get_rope_index`). Media without a grid count as text.
    """
    parts, token, position = [], 0, 0
    for item in meta.media:
        if item.name not in grids:
            continue
        text = item.position - token
        parts.append(np.tile(np.arange(position, position + text), (3, 1)))
        position += text
        frames, height, width = grids[item.name](item.extent)
        parts.append(position + np.indices((frames, height, width)).reshape(3, -1))
        token = item.position + item.rows
        position += max(height, width)
    parts.append(np.tile(np.arange(position, position + meta.tokens - token), (3, 1)))
    return tuple(tuple(row) for row in np.concatenate(parts, axis=1).tolist())
