"""Adapters that turn ready-made models and users' own modules into members of a graph."""

from hetmesh.graph.module_graph import Activation
from hetmesh.models.adapter import Abilities, Adapter, AdapterRequest, BoundaryLike, ModuleLike, SampleLike
from hetmesh.models.multimodal_rope import sample_positions
from hetmesh.models.registry import MODELS, make_adapters, pretrained_of
from hetmesh.models.row_counts import module_rows, placeholder_rows
from hetmesh.models.side_outputs import with_side_outputs
from hetmesh.models.weights.build import build_empty, build_module, build_unfilled
from hetmesh.models.weights.load import check_weights, load_weights, stand_ins
from hetmesh.models.weights.lora import add_lora, lora_plan
from hetmesh.models.weights.unfilled import Unfilled

__all__ = [
    "MODELS",
    "Abilities",
    "Activation",
    "Adapter",
    "AdapterRequest",
    "BoundaryLike",
    "ModuleLike",
    "SampleLike",
    "Unfilled",
    "add_lora",
    "build_empty",
    "build_module",
    "build_unfilled",
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
