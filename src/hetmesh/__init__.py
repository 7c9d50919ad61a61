"""hetmesh: train multimodal LLMs whose modules each have their own DeviceMesh.

The public names are below; everything else is reached through its room (README.md)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetmesh.api import open_job, train
    from hetmesh.boundary import World, abandon, backward, device_mesh, init, redistribute
    from hetmesh.cli.launch import launch
    from hetmesh.layout import Layout, MeshSpec, RowSplit, TransferPlan, plan_transfer
    from hetmesh.parallel import sum_over_shards
    from hetmesh.recipe.recipe import Recipe, load_recipe, parse_recipe
    from hetmesh.training.job import Job
    from hetmesh.training.pipeline import Part, Pipeline

_HOMES = {
    "Job": "hetmesh.training.job",
    "Layout": "hetmesh.layout",
    "MeshSpec": "hetmesh.layout",
    "Part": "hetmesh.training.pipeline",
    "Pipeline": "hetmesh.training.pipeline",
    "Recipe": "hetmesh.recipe.recipe",
    "RowSplit": "hetmesh.layout",
    "TransferPlan": "hetmesh.layout",
    "World": "hetmesh.boundary",
    "abandon": "hetmesh.boundary",
    "backward": "hetmesh.boundary",
    "device_mesh": "hetmesh.boundary",
    "init": "hetmesh.boundary",
    "launch": "hetmesh.cli.launch",
    "load_recipe": "hetmesh.recipe.recipe",
    "open_job": "hetmesh.api",
    "parse_recipe": "hetmesh.recipe.recipe",
    "plan_transfer": "hetmesh.layout",
    "redistribute": "hetmesh.boundary",
    "sum_over_shards": "hetmesh.parallel",
    "train": "hetmesh.api",
}

__all__ = [
    "Job",
    "Layout",
    "MeshSpec",
    "Part",
    "Pipeline",
    "Recipe",
    "RowSplit",
    "TransferPlan",
    "World",
    "abandon",
    "backward",
    "device_mesh",
    "init",
    "launch",
    "load_recipe",
    "open_job",
    "parse_recipe",
    "plan_transfer",
    "redistribute",
    "sum_over_shards",
    "train",
]


def __getattr__(name: str) -> Any:
    # Loaded on first use: a mistyped recipe should not wait for torch.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'hetmesh' has no attribute {name!r}")
