"""The modules of a recipe before they are parallelised, and what the recipe asks of each."""

from __future__ import annotations

import torch
from torch import nn

from hetmesh.errors import RecipeError
from hetmesh.models import Adapter, add_lora, build_empty, build_module, load_weights, pretrained_of, stand_ins
from hetmesh.parallel import Options
from hetmesh.recipe.meshes import splits_tokens, table_of
from hetmesh.recipe.recipe import Recipe
from hetmesh.recipe.sections import ModuleParallelism

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def full_module(recipe: Recipe, adapter: Adapter, name: str) -> nn.Module:
    """Module `name` before it is parallelised: weights from the seed, adapters added, frozen as the recipe says.

    With `initial_load_path` it has no weights yet (they are on the meta device): `load_weights` gives each rank its own
    after the module is parallelised.
    """
    own, dtype = recipe.modules[name], DTYPES[recipe.training.dtype]
    loads = own.initial_load_path is not None
    module = build_empty(adapter, dtype) if loads else build_module(adapter, name, recipe.debug.seed, dtype)
    if own.lora is not None:
        with stand_ins(module):
            add_lora(module, own.lora, name, recipe.debug.seed, adapter.layers())
    elif not own.trainable:
        module.requires_grad_(False)
    return module


def loaded_module(recipe: Recipe, adapter: Adapter, name: str) -> nn.Module:
    """`full_module` on the CPU with its weights, wherever they come from."""
    module = full_module(recipe, adapter, name)
    if (pretrained := pretrained_of(name, recipe.modules[name])) is not None:
        load_weights(adapter, module, pretrained)
    return module


def module_options(recipe: Recipe, name: str) -> Options:
    """What the recipe asks of module `name` beyond its mesh. Layout keys come with the mesh, also from a consumer."""
    owner = table_of(recipe, recipe.graph, name)
    layout = ModuleParallelism() if owner is None else recipe.parallelism.modules[owner]
    own, training = recipe.modules[name], recipe.training
    key, computes = f"modules.{name}.mixed_precision_param", own.mixed_precision_param
    if computes is None:
        key, computes = "training.mixed_precision_param", training.mixed_precision_param
    if computes == "bfloat16" and training.dtype != "float32":
        raise RecipeError(f"{key} = 'bfloat16' needs training.dtype = 'float32', got {training.dtype!r}")
    if training.enable_cpu_offload and all(m.mesh.axis_size("dp_shard") == 1 for m in recipe.graph.modules):
        raise RecipeError(
            "training.enable_cpu_offload: it moves the shards of modules with a data_parallel_shard_degree above 1 to "
            "the CPU, but no module has one"
        )
    return Options(
        reshard_after_forward=layout.fsdp_reshard_after_forward,
        activation_checkpoint=own.activation_checkpoint or recipe.activation_checkpoint.mode,
        compute_dtype=torch.bfloat16 if computes == "bfloat16" else None,
        cpu_offload=training.enable_cpu_offload,
        compile_backend=recipe.compile.backend if recipe.compile.enable and recipe.compile.components else None,
        sequence_parallel=splits_tokens(recipe, recipe.meshes(), name),
    )
