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
    "hetmesh.api": ("open_job", "train"),
    "hetmesh.boundary": ("World", "abandon", "backward", "device_mesh", "init", "redistribute"),
    "hetmesh.cli.launch": ("launch",),
    "hetmesh.layout": ("Layout", "MeshSpec", "RowSplit", "TransferPlan", "plan_transfer"),
    "hetmesh.parallel": ("sum_over_shards",),
    "hetmesh.recipe.recipe": ("Recipe", "load_recipe", "parse_recipe"),
    "hetmesh.training.job": ("Job",),
    "hetmesh.training.pipeline": ("Part", "Pipeline"),
}

__all__ = sorted(name for names in _HOMES.values() for name in names)


def __getattr__(name: str) -> Any:
    # Loaded on first use: a mistyped recipe should not wait for torch.
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'hetmesh' has no attribute {name!r}")
