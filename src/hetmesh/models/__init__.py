"""Adapters that turn ready-made models and users' modules into modules of a graph."""

from hetmesh.graph.module_graph import Activation
from hetmesh.models.adapter import Abilities, Adapter, AdapterRequest, SampleLike
from hetmesh.models.composition import module_rows, placeholder_rows, sample_positions, with_side_outputs
from hetmesh.models.registry import MODELS, make_adapters, pretrained_of
from hetmesh.models.weights.build import DeferredModule, build_deferred, build_empty, build_module
from hetmesh.models.weights.freeze import freeze_by_name
from hetmesh.models.weights.load import check_weights, load_weights, stand_ins
from hetmesh.models.weights.lora import add_lora, lora_plan
