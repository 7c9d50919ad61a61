"""Context parallelism's plan: attention masks as values, visible tiles, token assignment. Pure: no communication."""

from hetmesh.context.balanced import balanced
from hetmesh.context.key_tiles import block_edges, full_tiles, needed_keys, tile_counts, tile_intervals
from hetmesh.context.masks import causal, runs_of_sample, text_with_instances
from hetmesh.context.rule import Rule, Sees
from hetmesh.context.segments import Mask, Segment, join, visible
from hetmesh.context.token_assignment import POLICIES, assign
