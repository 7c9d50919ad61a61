"""The static module graph and the facts of samples that flow through it."""

from hetmesh.graph.module_graph import LANE_AXES, BoundarySpec, ModuleGraph, ModuleSpec
from hetmesh.graph.sample import MediaItem, SampleMeta

__all__ = ["LANE_AXES", "BoundarySpec", "MediaItem", "ModuleGraph", "ModuleSpec", "SampleMeta"]
