"""What sharding the optimizer state over a recipe's replicas costs: its simulated step with ZeRO-1 and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hetmesh.recipe.recipe import load_recipe
from hetmesh.resolve.predictions import simulate_recipe
from hetmesh.resolve.resolved import resolve

RECIPE = Path(__file__).parents[3] / "recipes" / "mllm_22b_175b.toml"


def sharded_state() -> dict[str, Any]:
    """Steps and peaks of the recipe as it is, all of whose modules have replicas, and with their ranks as `dp_shard`:
    in a pipeline parameters are then gathered, and gradients summed to shards, once per step. Both come on top of what
    ranks compute: the replicas' all-reduce is as many bytes."""
    keys = []
    for name, layout in load_recipe(RECIPE).parallelism.modules.items():
        replicas = layout.data_parallel_replicate_degree
        keys += [
            f"--parallelism.{name}.data_parallel_replicate_degree=1",
            f"--parallelism.{name}.data_parallel_shard_degree={replicas}",
        ]
    plain, sharded = (simulate_recipe(resolve(load_recipe(RECIPE, given))) for given in ([], keys))
    return {
        "recipe": RECIPE.stem,
        "step_s": {"replicas": plain.makespan, "zero1": sharded.makespan},
        "peak_bytes": {"replicas": max(plain.peak_bytes), "zero1": max(sharded.peak_bytes)},
        "step_over_replicas": sharded.makespan / plain.makespan,
    }
