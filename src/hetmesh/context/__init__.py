"""Context parallelism's plan: attention masks as values, visible tiles, token assignment. Pure: no communication."""

from hetmesh.context.assign import POLICIES, Policy, assign
from hetmesh.context.balanced import balanced
from hetmesh.context.builders import (
    blockwise_causal,
    causal,
    of_sample,
    packed,
    padded,
    prefix,
    prefix_of_sample,
    runs_of_sample,
    text_with_instances,
)
from hetmesh.context.full_tiles import full_tiles, row_edges
from hetmesh.context.loads import Loads, loads
from hetmesh.context.masks import Mask, Segment, join, visible
from hetmesh.context.rule import TEXT, Rule, Sees
from hetmesh.context.tiles import TileIntervals, block_edges, needed_keys, tile_counts, tile_intervals

__all__ = [
    "POLICIES",
    "TEXT",
    "Loads",
    "Mask",
    "Policy",
    "Rule",
    "Sees",
    "Segment",
    "TileIntervals",
    "assign",
    "balanced",
    "block_edges",
    "blockwise_causal",
    "causal",
    "full_tiles",
    "join",
    "loads",
    "needed_keys",
    "of_sample",
    "packed",
    "padded",
    "prefix",
    "prefix_of_sample",
    "row_edges",
    "runs_of_sample",
    "text_with_instances",
    "tile_counts",
    "tile_intervals",
    "visible",
]
