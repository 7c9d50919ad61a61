"""What a recipe asks of one module beyond its mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hetmesh.errors import RecipeError
from hetmesh.graph.module_options import ModuleOptions
from hetmesh.recipe.sections import ModuleParallelism

if TYPE_CHECKING:
    from hetmesh.recipe.recipe import Recipe

DTYPES = {"float32": torch.float32, "float64": torch.float64}
"""Of parameters, by the name in `[training] dtype`."""


def module_options(recipe: Recipe, name: str, table: ModuleParallelism, sequence_parallel: bool) -> ModuleOptions:
    """The options of module `name`.

    Args:
        table: its layout keys, which come with its mesh, also from a consumer.
        sequence_parallel: whether it asks for that and has ranks for it.

    Raises:
        RecipeError: computation in bfloat16 of other parameters than float32.
    """
    own, training = recipe.modules[name], recipe.training
    key, computes = f"modules.{name}.mixed_precision_param", own.mixed_precision_param
    if computes is None:
        key, computes = "training.mixed_precision_param", training.mixed_precision_param
    if computes == "bfloat16" and training.dtype != "float32":
        raise RecipeError(f"{key} = 'bfloat16' needs training.dtype = 'float32', got {training.dtype!r}")
    return ModuleOptions(
        reshard_after_forward=table.fsdp_reshard_after_forward,
        activation_checkpoint=own.activation_checkpoint or recipe.activation_checkpoint.mode,
        parameter_dtype=DTYPES[training.dtype],
        compute_dtype=torch.bfloat16 if computes == "bfloat16" else None,
        sequence_parallel=sequence_parallel,
        cpu_offload=training.enable_cpu_offload,
        compile_backend=recipe.compile.backend if recipe.compile.enable and recipe.compile.components else None,
    )
