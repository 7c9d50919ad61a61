"""The static module graph, its stages, and the facts of samples that flow through it."""

from hetmesh.graph.meta_arrays import MetaArrays
from hetmesh.graph.module_graph import (
    LANE_AXES,
    NEXT_TOKEN,
    Activation,
    LossSpec,
    ModuleGraph,
    ModuleOptions,
    ModuleSpec,
    dense_mesh,
    expert_axis,
    experts_fit,
    experts_mesh,
    stage_mesh_alone,
    with_neighbours_meshes,
)
from hetmesh.graph.routes import Route, Routes, microbatches_text
from hetmesh.graph.rows import RowSpace
from hetmesh.graph.sample import MediaItem, SampleMeta
from hetmesh.graph.stage_graph import Edge, Stage, StageGraph, boundary_edge, stage_graph
from hetmesh.graph.topology import BoundarySpec, output_key
