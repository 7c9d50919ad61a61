"""What a recipe asks of one module beyond its mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hetmesh.graph.module_graph import SAVE_OPS, ModuleOptions, reshard_in_pipeline
from hetmesh.recipe.sections import ModuleParallelism

if TYPE_CHECKING:
    from hetmesh.recipe.recipe import Recipe

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
"""By the names in `[training] dtype` and `mixed_precision_param`."""


def layout_table(recipe: Recipe, name: str) -> ModuleParallelism:
    """The layout keys of module `name`, which come with its mesh, also from a consumer."""
    owner = recipe.wiring.tables[name]
    return ModuleParallelism() if owner is None else recipe.parallelism.modules[owner]


def module_options(recipe: Recipe, name: str) -> ModuleOptions:
    """How module `name` runs."""
    own, training, layout = recipe.modules[name], recipe.training, layout_table(recipe, name)
    computes = own.mixed_precision_param or training.mixed_precision_param
    halves = training.dtype == "bfloat16"
    return ModuleOptions(
        reshard_after_forward=reshard_in_pipeline(layout.fsdp_reshard_after_forward, layout.pipeline_parallel_degree),
        activation_checkpoint=own.activation_checkpoint or recipe.activation_checkpoint.mode,
        save_ops=recipe.activation_checkpoint.save_ops or SAVE_OPS,
        parameter_dtype=DTYPES["float32" if halves else training.dtype],
        compute_dtype=DTYPES["bfloat16"] if halves or computes == "bfloat16" else None,
        compute_copies=halves,
        reduce_dtype=DTYPES["bfloat16"] if training.mixed_precision_reduce == "bfloat16" else None,
        sequence_parallel=splits_tokens(recipe, name),
        cpu_offload=training.enable_cpu_offload,
        compile_backend=recipe.compile.backend
        if recipe.compile.enable and "model" in recipe.compile.components
        else None,
    )


def splits_tokens(recipe: Recipe, name: str) -> bool:
    """Whether module `name` itself asks for sequence parallelism and has tensor parallel ranks to split over."""
    own = recipe.parallelism.modules.get(name)
    return own is not None and own.enable_sequence_parallel and recipe.wiring.meshes[name].axis_size("tp") > 1


def packs(recipe: Recipe, name: str) -> bool:
    """Whether the samples of a lane lie in one row: in the LLM, if the recipe asks for it, if ranks share its tokens,
    or if its mask is one that only hetmesh's own attention knows."""
    shared = recipe.wiring.meshes[name].axis_size("cp") > 1
    return packs_anyway(recipe, name) or (name == recipe.llm and shared)


def packs_anyway(recipe: Recipe, name: str) -> bool:
    """The same, whatever its layout."""
    masked = recipe.modules[name].attention_mask != "causal"
    return name == recipe.llm and (recipe.training.pack_samples or masked)


def token_assignment(recipe: Recipe, name: str) -> str:
    """Which tokens each rank along `cp` keeps: a policy of `hetmesh.context`."""
    own = recipe.parallelism.modules.get(name)
    given = own.context_parallel_assignment if own is not None else None
    return given or recipe.parallelism.context_parallel_assignment or "balanced"


def token_axes(recipe: Recipe, name: str) -> tuple[str, ...]:
    """Mesh axes whose ranks share the tokens of a lane. Only the LLM has tokens, and an encoder those of its media."""
    cp = ("cp",) if recipe.wiring.meshes[name].axis_size("cp") > 1 else ()
    if name == recipe.llm:
        return (*cp, "tp") if splits_tokens(recipe, name) else cp
    return () if recipe.wiring.topology.inputs(name) else cp
