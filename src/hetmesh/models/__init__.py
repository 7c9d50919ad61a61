"""Adapters that turn ready-made models and users' modules into modules of a graph."""

from hetmesh.graph.module_graph import Activation
from hetmesh.models.adapter import Abilities, Adapter, AdapterRequest, BoundaryLike, ModuleLike, SampleLike
from hetmesh.models.multimodal_rope import sample_positions
from hetmesh.models.registry import MODELS, make_adapters, pretrained_of
from hetmesh.models.row_counts import module_rows, placeholder_rows
from hetmesh.models.side_outputs import with_side_outputs
from hetmesh.models.weights.build import build_deferred, build_empty, build_module
from hetmesh.models.weights.deferred import DeferredModule
from hetmesh.models.weights.load import check_weights, load_weights, stand_ins
from hetmesh.models.weights.lora import add_lora, lora_plan

__all__ = [
    "MODELS",
    "Abilities",
    "Activation",
    "Adapter",
    "AdapterRequest",
    "BoundaryLike",
    "DeferredModule",
    "ModuleLike",
    "SampleLike",
    "add_lora",
    "build_deferred",
    "build_empty",
    "build_module",
    "check_weights",
    "load_weights",
    "lora_plan",
    "make_adapters",
    "module_rows",
    "placeholder_rows",
    "pretrained_of",
    "sample_positions",
    "stand_ins",
    "with_side_outputs",
]
